"""A run that is started again by its launcher: which folder it goes on in."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

NOTE = "PIPELOOM_RUN_NOTE"  # a file in which a run's first rank writes where its folder is
FOLDER = "PIPELOOM_RUN_FOLDER"  # of the attempt before, to go on in


def note_run(folder: Path) -> None:
    """Tells the launcher where the run's folder is, so that another attempt can go on there."""
    path = os.environ.get(NOTE)
    if path:
        with contextlib.suppress(OSError):
            Path(path).write_text(str(folder), encoding="utf-8")


def restarted_run() -> Path | None:
    """The folder of the attempt before this one; None: this is the first."""
    folder = os.environ.get(FOLDER)
    return Path(folder) if folder else None
