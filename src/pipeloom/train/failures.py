"""Notes that workers leave for their launcher in a folder, and for people in the run's: who failed, when, why."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

from pipeloom.errors import DistributedError, Interrupted, Preempted

FAILURES = "PIPELOOM_FAILURES"
_STORE_SECONDS = 2.0  # for a store on a machine that answers at all
STORE = "PIPELOOM_STORE"  # the file through which the workers of one machine meet
EXIT_FILE = "exit.json"
OBEYED = (Preempted.exit_code, Interrupted.exit_code)  # how a worker ends that was told to stop
# a process that dies so was hit by something outside; SIGABRT and SIGTERM are how it ends because of others
_FROM_OUTSIDE = tuple(-n for n in (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE))


@dataclass(frozen=True)
class WorkerFailure:
    """Reason for the end of a worker.

    Attributes:
        rank: global rank.
        at: seconds of the machine's clock.
        exit_code: of the worker.
        text: what it wrote to stderr about it.
        blames: the ranks whose fault it is, as far as this one knows; empty: its own.
        origin: the rank that told the others of the failure: one that is blamed and told them ends by itself. None: this one.
    """

    rank: int
    at: float
    exit_code: int
    text: str
    blames: tuple[int, ...] = ()
    origin: int | None = None


def record_failure(rank: int, exit_code: int, text: str, blames: Sequence[int] = (), origin: int | None = None) -> None:
    """Leaves a note that this worker fails now; does nothing without a launcher of ours."""
    folder = os.environ.get(FAILURES)
    if folder is None or not Path(folder).is_dir():
        return
    note = Path(folder) / f"rank{rank}.json"
    fresh = note.with_suffix(".part")
    facts = asdict(WorkerFailure(rank, time.time(), exit_code, text, tuple(blames), origin))
    with contextlib.suppress(OSError):  # without room for the note the exit code says it
        fresh.write_text(json.dumps(facts), encoding="utf-8")
        fresh.replace(note)


def read_failures(folder: Path) -> dict[int, WorkerFailure]:
    """rank -> its note; a worker that was told to stop has not failed."""
    notes = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("rank*.json")]
    failed = [note for note in notes if note["exit_code"] not in OBEYED]
    return {note["rank"]: WorkerFailure(**{**note, "blames": tuple(note["blames"])}) for note in failed}


def first_failure(codes: Mapping[int, int], failures: Mapping[int, WorkerFailure]) -> int:
    """The rank that failed first: one killed from outside, else the earliest note's, else whom the earliest note blames,
    else the first that was seen to end.

    `codes` gives the return codes in the order in which the workers were seen to end by themselves. A worker that stops
    because of another does so as a DistributedError, so a note of any other kind comes before those.
    """
    bad = [rank for rank, code in codes.items() if code not in (0, *OBEYED)]
    for rank in bad:
        if codes[rank] in _FROM_OUTSIDE:
            return rank
    notes = sorted(failures.values(), key=lambda note: (note.exit_code == DistributedError.exit_code, note.at))
    for note in notes:
        if note.exit_code != DistributedError.exit_code or note.rank in note.blames:
            return note.rank
        if note.blames:
            return note.blames[0]
    return notes[0].rank if notes else (bad or list(codes))[0]


def write_exit(folder: str | None, exit_code: int, reason: str = "", blames: Sequence[int] = ()) -> None:
    """Write how a run ended into its folder, where that is on this machine; the first of its ranks to do so decides.

    A rank that stops because of another does so as a DistributedError, and may be the first to write: what that other one
    writes takes its place.
    """
    if folder is None or not Path(folder).is_dir():
        return
    facts = {"exit_code": exit_code, "reason": reason, "ranks": list(blames)}
    path = Path(folder) / EXIT_FILE
    is_cause = exit_code not in (0, DistributedError.exit_code, *OBEYED)
    with contextlib.suppress(OSError):
        file = path.open("wb" if is_cause and _written_code(path) == DistributedError.exit_code else "xb")
        try:
            with file:
                file.write(json.dumps(facts).encode() + b"\n")
        except OSError:  # a disc that is full: an empty file would say less than none
            path.unlink()


def _written_code(path: Path) -> object:
    try:
        return json.loads(path.read_bytes())["exit_code"]
    except (OSError, ValueError):
        return None


def first_to_say(text: str) -> bool:
    """Return whether this process is to print why it ends: the first of torchrun's workers that would print this text.

    Every worker of torchrun's reads the same configuration and refuses it in the same words. Our own launcher leaves out
    what it has shown already, so that its workers all say what they have to.
    """
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if FAILURES in os.environ or "TORCHELASTIC_RUN_ID" not in os.environ or address is None or not port.isdigit():
        return True
    from torch._C._distributed_c10d import TCPStore

    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    key = f"pipeloom/said/{start}/{hashlib.sha256(text.encode()).hexdigest()}"
    try:
        store = TCPStore(address, int(port), is_master=False, timeout=timedelta(seconds=_STORE_SECONDS))
        return bool(store.add(key, 1) == 1)
    except RuntimeError:  # torchrun's store, or rank 0's, is not there: better twice than never
        return True
