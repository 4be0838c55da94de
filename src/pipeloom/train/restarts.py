"""Restarts of a run by its launcher: the folder in which the next attempt continues."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

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
