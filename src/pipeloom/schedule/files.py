"""Schedules from files: which text form it is, and what makes a name a file's."""

from __future__ import annotations

from pathlib import Path

from pipeloom.errors import UsageError
from pipeloom.schedule.csv_form import from_csv
from pipeloom.schedule.json_form import from_json
from pipeloom.schedule.model import Schedule

SUFFIXES = (".csv", ".json")


def names_a_file(name: str) -> bool:
    """Whether `name` is a file's and not a family's: it ends in .csv or .json, or has a directory in it."""
    return name.lower().endswith(SUFFIXES) or "/" in name or Path(name).name != name


def load(path: str | Path) -> Schedule:
    """The schedule in the file `path`: JSON when its text starts with a brace, else CSV; `check` is the caller's to
    run.

    Raises:
        UsageError: the file cannot be read, is not text, or is not a schedule's JSON.
        ScheduleError: a cell or number that no schedule can have, with file:line:column.
    """
    where = Path(path)
    try:
        text = where.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not a text file (byte {error.start} is not UTF-8)") from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
    if text.lstrip("\ufeff \t\r\n").startswith("{") or where.suffix.lower() == ".json":
        return from_json(text, source=str(path))
    return from_csv(text, name=where.stem, source=str(path))
