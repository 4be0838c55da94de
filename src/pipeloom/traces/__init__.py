"""Measured steps: those of other programs' traces, the files of our own, and what they say about costs and time."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from pipeloom.traces import chrome, timed_csv
from pipeloom.traces.measured import MeasuredSteps


class TraceReader(Protocol):
    """A module that reads one format of other programs' traces."""

    def accepts(self, path: Path) -> bool:
        """Return whether the file or folder looks like a trace of this format, by its name and its beginning."""

    def read(self, path: Path) -> MeasuredSteps:
        """Return the steps of the trace.

        Raises UsageError for a file that is not of the format, ScheduleError for actions that do not form a schedule.
        """


READERS: tuple[TraceReader, ...] = (chrome, timed_csv)


def reader_of(path: Path) -> TraceReader | None:
    """Return the reader of another program's trace at `path`; None where no reader accepts it."""
    return next((reader for reader in READERS if reader.accepts(path)), None)
