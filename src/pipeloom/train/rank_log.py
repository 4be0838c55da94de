"""Copies of the workers' standard output and error in the run's folder, one file per rank."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO, cast

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
        self._unfinished: dict[str, str] = {}
        self._streams: dict[str, tuple[TextIO, TextIO]] = {}  # name -> the original stream, and its replacement

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
            *lines, rest = (self._unfinished.get(name, "") + text).split("\n")
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
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            ours = cast(TextIO, _Copied(stream, name, self))
            self._streams[name] = (stream, ours)
            setattr(sys, name, ours)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, (before, ours) in self._streams.items():
            if getattr(sys, name) is ours:
                setattr(sys, name, before)
            if self._unfinished.get(name):
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
