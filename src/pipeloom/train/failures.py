"""Notes that the launcher and its workers leave for each other in a folder: who failed, when, why, who is dead."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from pipeloom.errors import DistributedError

FAILURES = "PIPELOOM_FAILURES"
_DEAD = "dead"
# a process that dies so was hit by something outside; SIGABRT and SIGTERM are how it ends because of others
_FROM_OUTSIDE = tuple(-n for n in (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE))


@dataclass(frozen=True)
class Failure:
    """Why a worker ended.

    Attributes:
        rank: global rank.
        at: seconds of the machine's clock.
        exit_code: of the worker.
        text: what it wrote to stderr about it.
    """

    rank: int
    at: float
    exit_code: int
    text: str


def record_failure(rank: int, exit_code: int, text: str) -> None:
    """Leaves a note that this worker fails now; does nothing without a launcher of ours."""
    folder = os.environ.get(FAILURES)
    if folder is None or not Path(folder).is_dir():
        return
    note = Path(folder) / f"rank{rank}.json"
    fresh = note.with_suffix(".part")
    fresh.write_text(json.dumps(asdict(Failure(rank, time.time(), exit_code, text))), encoding="utf-8")
    fresh.replace(note)


def read_failures(folder: Path) -> dict[int, Failure]:
    """rank -> its note."""
    notes = [Failure(**json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob("rank*.json")]
    return {note.rank: note for note in notes}


def first_failure(codes: Mapping[int, int], failures: Mapping[int, Failure]) -> int:
    """The rank that failed first: one killed from outside, else the earliest note, else the first that was seen to end.

    `codes` gives the return codes in the order in which the workers were seen to end. A worker that stops because of
    another does so as a DistributedError, so a note of any other kind comes before those.
    """
    bad = [rank for rank, code in codes.items() if code not in (0, 75)]
    for rank in bad:
        if codes[rank] in _FROM_OUTSIDE:
            return rank
    noted = [failures[rank] for rank in bad if rank in failures]
    if noted:
        return min(noted, key=lambda note: (note.exit_code == DistributedError.exit_code, note.at)).rank
    return bad[0]


def tell_peers(folder: Path, text: str) -> None:
    """Leaves word for the workers that one of them is dead."""
    with (folder / _DEAD).open("a", encoding="utf-8") as file:
        file.write(text + "\n")


def death_notice() -> str | None:
    """What the launcher says about workers that died, or None; for a worker's monitor to ask now and then."""
    folder = os.environ.get(FAILURES)
    if folder is None:
        return None
    try:
        return (Path(folder) / _DEAD).read_text(encoding="utf-8").strip() or None
    except OSError:
        return None
