"""Schedules in files: the choice of the text form, and the test for names of files."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from pipeloom.errors import UsageError, printable, shortened
from pipeloom.limits import SCHEDULE_BYTES, of_annotated_types, read_text
from pipeloom.schedule.csv_form import from_csv, to_csv
from pipeloom.schedule.json_form import from_json, to_json
from pipeloom.schedule.model import Schedule

SUFFIXES = (".csv", ".json")


def names_a_file(name: str) -> bool:
    """Return whether `name` is that of a schedule's file: it ends in .csv or .json, or has a dot or a directory in it and no
    function.
    """
    return name.lower().endswith(SUFFIXES) or (":" not in name and "." in name) or (".py:" not in name and "/" in name)


@of_annotated_types
def load(path: str | Path) -> Schedule:
    """Return the schedule in the file `path`: JSON when its text starts with a brace, else CSV. It is not checked.

    Raises:
        UsageError: the file cannot be read, is not text, or is not a schedule's JSON.
        ScheduleError: a cell or number that no schedule can have, with file:line:column.
    """
    where = Path(path)
    if where.suffix == ".py":
        functions = re.findall(r"^def ([a-z]\w*)\(", read_text(path, SCHEDULE_BYTES, "a schedule"), re.MULTILINE)
        names = [f"{path}:{function}" for function in functions] or [f"{path}:function"]
        raise UsageError(f"{path}: a schedule in Python is a function of a file; give {' or '.join(names)[:300]}")
    text = read_text(path, SCHEDULE_BYTES, "a schedule")
    if text.lstrip("\ufeff \t\r\n").startswith("{") or where.suffix.lower() == ".json":
        return from_json(text, source=str(path))
    return from_csv(text, name=printable(where.stem), source=str(path))


def save(schedule: Schedule, path: str | Path) -> None:
    """Write the schedule to a file that `load` reads, in the form that its extension names. Raises as `Schedule.save`."""
    write_as(path, {".json": lambda: to_json(schedule), ".csv": lambda: to_csv(schedule)})


@of_annotated_types
def write_as(path: str | Path, forms: Mapping[str, Callable[[], str]]) -> None:
    """Write a file in the form that its extension names. Raises UsageError for another one, and where it cannot be written."""
    where = Path(path)
    if where.suffix.lower() not in forms:
        raise UsageError(
            f"{shortened(str(path))} has the extension {where.suffix!r:.200}; nearest: "
            + " or ".join(where.with_suffix(suffix).name for suffix in forms)
        )
    text = forms[where.suffix.lower()]()
    try:
        where.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot write {shortened(str(path))}: {getattr(error, 'strerror', None) or error}") from None
