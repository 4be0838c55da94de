"""Locks, released at the latest when the process that holds them ends, and a run's claim to the folder of its checkpoints."""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from pathlib import Path

from pipeloom.errors import ConfigError

RUN_ID = "run-id"  # in a folder of checkpoints: the id of the run that saves there, and the number of its attempt
TAKEN = "another run saves there now, or another attempt of this one"
LOCK_SECONDS = 10.0  # to wait for another holder: a process that was killed may take a moment to exit
_POLL_SECONDS = 0.1


def locked(descriptor: int) -> bool | None:
    """Lock an open file exclusively until its descriptor is closed.

    Return False if another process holds it for LOCK_SECONDS, and None on a file system without locks.
    """
    until = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(_POLL_SECONDS)
        except OSError:
            return None
        else:
            return True


class RunClaim:
    """The claim of one run to the folder of its checkpoints; the first rank's worker makes it, and keeps it to the run's end.

    The file `run-id` there is locked. It holds the run's id, which restarts and requeued jobs keep, and the number of the
    attempt: each save compares them, because they alone tell runs apart where the file system has no locks, or where the
    folder was deleted and made again.

    Attributes:
        locks: whether the file system has locks.
    """

    def __init__(self) -> None:
        self.locks = True
        self._folder: Path | None = None
        self._file: int | None = None
        self._text = ""

    def lock(self, folder: Path, key: str) -> None:
        """Lock the folder, created if it does not exist, unless this claim has locked it already.

        Args:
            key: the key of the configuration that names the folder, with its value.

        Raises:
            ConfigError: another run holds it for LOCK_SECONDS, or the folder cannot be written.
        """
        if self._folder == folder:
            return
        self.close()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = os.open(folder / RUN_ID, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"{key}: cannot write there: {error.strerror or error}") from None
        state = locked(self._file)
        if state is False:
            self.close()
            raise ConfigError(
                f"{key}: {folder} is the folder of a run that is still active; end that run first, or give each run its own "
                "checkpoint.dir"
            )
        self.locks, self._folder = state is True, folder

    def begin(self, continues: bool) -> None:
        """Write the id of this run into the locked folder, or keep the one there if this run continues that one."""
        assert self._folder is not None
        name, _, attempt = self._written().partition(" ")
        if not continues or not name:
            name, attempt = secrets.token_hex(8), "0"
        self._text = f"{name} {int(attempt) + 1 if attempt.isdecimal() else 1}"
        self._write()

    def problem(self) -> str:
        """Return why this run must not save in its folder; "" if it may. Raises OSError if the file cannot be read or written."""
        text = self._written()
        if not text:  # someone deleted the folder, which each save creates again
            self._write()
        return "" if text in ("", self._text) else f"{self._folder}: {TAKEN} ({text}; this is {self._text})"

    def close(self) -> None:
        """Unlock the folder."""
        if self._file is not None:
            os.close(self._file)
        self._file = self._folder = None

    def _written(self) -> str:
        assert self._folder is not None
        try:
            return (self._folder / RUN_ID).read_text(encoding="utf-8", errors="replace").strip()[:200]
        except FileNotFoundError:
            return ""

    def _write(self) -> None:
        assert self._folder is not None
        (self._folder / RUN_ID).write_text(f"{self._text}\n", encoding="utf-8")
