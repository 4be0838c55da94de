"""Reports of workers that outlive them: failures, for the launcher and for people, the run's folder, and each rank's output."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO, cast

from pipeloom.errors import DistributedError, Interrupted, Preempted

FAILURES = "PIPELOOM_FAILURES"
_STORE_SECONDS = 2.0  # limit for connecting to torchrun's store; one that can be reached answers sooner
STORE = "PIPELOOM_STORE"  # the file through which the workers of one machine meet
# In a run's folder: how it ended, and the digests of its model and data.
EXIT_FILE, DIGESTS_FILE = "exit.json", "run.json"
OBEYED = (Preempted.exit_code, Interrupted.exit_code)  # exit codes of a worker that stopped on request
# Signals that are a worker's own failure or come from outside the run. SIGABRT and SIGTERM are left out: a worker also ends by
# them because another one failed.
_FROM_OUTSIDE = tuple(-n for n in (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE))


@dataclass(frozen=True)
class WorkerFailure:
    """Reason for the end of a worker.

    Attributes:
        rank: global rank.
        at: time of the failure, in seconds since the epoch.
        exit_code: exit code of the worker.
        text: the message that it wrote to stderr.
        blames: the ranks that caused the failure, as far as this one can see; empty: all ranks raised it together.
        origin: the rank that reported the failure to the others; None: this one. A rank that is blamed, but reported the failure
            itself, is not stuck: it ends by itself.
    """

    rank: int
    at: float
    exit_code: int
    text: str
    blames: tuple[int, ...] = ()
    origin: int | None = None


def record_failure(rank: int, exit_code: int, text: str, blames: Sequence[int] = (), origin: int | None = None) -> None:
    """Write a note that this worker fails now, for Pipeloom's own launcher; without that, do nothing."""
    folder = os.environ.get(FAILURES)
    if folder is None or not Path(folder).is_dir():
        return
    note = Path(folder) / f"rank{rank}.json"
    fresh = note.with_suffix(".part")
    facts = asdict(WorkerFailure(rank, time.time(), exit_code, text, tuple(blames), origin))
    with contextlib.suppress(OSError):  # without room for the note, the launcher has the exit code
        fresh.write_text(json.dumps(facts), encoding="utf-8")
        fresh.replace(note)


def read_failures(folder: Path) -> dict[int, WorkerFailure]:
    """Return rank -> its note, for the workers that failed; those that stopped on request are left out."""
    notes = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("rank*.json")]
    failed = [note for note in notes if note["exit_code"] not in OBEYED]
    return {note["rank"]: WorkerFailure(**{**note, "blames": tuple(note["blames"])}) for note in failed}


def first_failure(codes: Mapping[int, int], failures: Mapping[int, WorkerFailure]) -> int | None:
    """Return the rank that failed first; None: the run stalled, and its notes blame no rank.

    A worker that stops because of another raises DistributedError, so notes of any other error count as earlier. The first rank
    is one that a signal of `_FROM_OUTSIDE` killed; else the writer of the earliest note, or the rank that this note blames; else
    the first that ended with an error.

    Args:
        codes: rank -> return code, in the order in which the workers were seen to end by themselves; not empty.
        failures: rank -> note.
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
    silent = [rank for rank in bad if codes[rank] > 0 and rank not in failures]
    if notes and not silent:
        return None
    return (silent or bad or list(codes))[0]


def write_exit(folder: str | None, exit_code: int, reason: str = "", blames: Sequence[int] = ()) -> None:
    """Write the exit code and reason of a run into its folder, if that is on this machine; the first rank to write decides.

    A rank that stops because of another raises DistributedError, and may write first: the other rank's file replaces it.
    """
    if folder is None or not Path(folder).is_dir():
        return
    facts = {"exit_code": exit_code, "reason": reason, "ranks": list(blames)}
    path = Path(folder) / EXIT_FILE
    is_cause = exit_code not in (0, DistributedError.exit_code, *OBEYED)
    with contextlib.suppress(OSError):
        mode = "wb" if is_cause and facts_in(path).get("exit_code") == DistributedError.exit_code else "xb"
        with path.open(mode) as file, contextlib.ExitStack() as torn:
            torn.callback(path.unlink)  # on a full disk
            file.write(json.dumps(facts).encode() + b"\n")
            file.flush()
            torn.pop_all()


def failure_of_run(folder: Path) -> str:
    """Return the last line of the reason for which the run in `folder` failed; "" if it did not."""
    facts = facts_in(folder / EXIT_FILE)
    if facts.get("exit_code") in (None, 0, *OBEYED):
        return ""
    return (str(facts.get("reason", "")).strip().splitlines() or [f"exit code {facts['exit_code']}"])[-1]


def facts_in(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a run's folder; {} if there is none."""
    try:
        facts = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def claim_message(text: str) -> bool:
    """Return whether this process should print `text`, its reason to end: of torchrun's workers, the first of each host.

    All of torchrun's workers read the same configuration, and refuse it with the same message. Pipeloom's own launcher omits
    repeated messages, so its workers always print.
    """
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if FAILURES in os.environ or "TORCHELASTIC_RUN_ID" not in os.environ or address is None or not port.isdecimal():
        return True
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    start, host = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), os.environ.get("GROUP_RANK", "0")
    key = f"pipeloom/said/{start}/{host}/{hashlib.sha256(text.encode()).hexdigest()}"
    try:
        store = TCPStore(address, int(port), is_master=False, timeout=timedelta(seconds=_STORE_SECONDS))
        return bool(store.add(key, 1) == 1)
    except RuntimeError:  # no store of torchrun's or rank 0's: better twice than never
        return True


# -- the folder of a run that is restarted -----------------------------------------------------------------------------

NOTE = "PIPELOOM_RUN_NOTE"  # a file into which a run's first rank writes the path of its folder
FOLDER = "PIPELOOM_RUN_FOLDER"  # of the previous attempt, in which to continue


def note_run(folder: Path) -> None:
    """Report the run's folder to the launcher, so that another attempt can continue in it."""
    path = os.environ.get(NOTE)
    if path:
        with contextlib.suppress(OSError):
            Path(path).write_text(str(folder), encoding="utf-8")


def restarted_run() -> Path | None:
    """Return the folder of the previous attempt; None: this is the first."""
    folder = os.environ.get(FOLDER)
    return Path(folder) if folder else None


# -- each rank's output ------------------------------------------------------------------------------------------------

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # colours and cursor movements of a terminal
_KEPT_LINES = 1000  # lines kept until the run's folder is known
_PATIENCE = 1.0  # seconds; the watchdog must not wait for a thread that is stuck in a write to a slow disk


class RankLog:
    """Copies what this process writes to `sys.stdout` and `sys.stderr` into `RUN_DIR/rank_N.log`, inside a `with` block.

    Output to the terminal is unchanged; each line is written to the file when it is complete, without the frames of a
    progress bar. The last 1000 lines from before `open` are kept until then. Errors of writing to the file are ignored:
    training does not depend on it. Output that native code writes directly to the process's descriptors is not copied.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._lock = threading.RLock()
        self._file: int | None = None
        self._held: deque[str] = deque(maxlen=_KEPT_LINES)
        self._unfinished = {"stdout": "", "stderr": ""}
        self._redirections = contextlib.ExitStack()

    def open(self, folder: Path) -> None:
        """Write into `folder` from now on; a host that does not share the run's folder creates its own of that name."""
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
            self._file = os.open(folder / f"rank_{self._rank}.log", flags, 0o600)
        began = time.strftime("%Y-%m-%d %H:%M:%S")
        held, self._held = [*self._held], deque(maxlen=_KEPT_LINES)
        self._write([f"--- rank {self._rank}, process {os.getpid()} on {os.uname().nodename}, {began}", *held])

    def take(self, name: str, text: str) -> None:
        """Copy `text`, which was written to the stream `name`."""
        if not self._lock.acquire(timeout=_PATIENCE):
            return
        try:
            *lines, rest = (self._unfinished[name] + text).split("\n")
            self._unfinished[name] = rest.rpartition("\r")[2]
            self._write([_CONTROL.sub("", line.rstrip("\r").rpartition("\r")[2]) for line in lines])
        finally:
            self._lock.release()

    def _write(self, lines: list[str]) -> None:
        if self._file is None:
            self._held.extend(lines)
        elif lines:
            with contextlib.suppress(OSError):
                os.write(self._file, "".join(f"{line}\n" for line in lines).encode(errors="replace"))

    def __enter__(self) -> RankLog:
        out, err = (cast(TextIO, _Copied(getattr(sys, name), name, self)) for name in self._unfinished)
        self._redirections.enter_context(contextlib.redirect_stdout(out))
        self._redirections.enter_context(contextlib.redirect_stderr(err))
        return self

    def __exit__(self, *_: object) -> None:
        self._redirections.close()
        for name, text in self._unfinished.items():
            if text:
                self.take(name, "\n")
        if self._file is not None:
            os.close(self._file)
            self._file = None


class _Copied:
    """A stream whose text is also copied to a RankLog; all other attributes are those of the wrapped stream."""

    def __init__(self, stream: TextIO, name: str, log: RankLog) -> None:
        self._stream, self._name, self._log = stream, name, log

    def write(self, text: str) -> int:
        written = self._stream.write(text)
        self._log.take(self._name, text)
        return written

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
