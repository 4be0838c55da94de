"""A verify matrix: many layouts in one TOML file.

skip_invalid = true                      # leave out combinations that are refused, and report how many
[base.train]
seq_len = 16
[[layout]]                               # lists are expanded into every combination
schedule.name = ["gpipe", "1f1b"]
parallel.pp = [2, 3]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice, product
from pathlib import Path
from typing import Any, get_origin

from pipeloom.config.layout import Layout
from pipeloom.config.search import NAME as SEARCH
from pipeloom.config.settings import annotation_of, load_layout, read_toml
from pipeloom.errors import ConfigError, PipeloomError, ScheduleError, UsageError, did_you_mean

MOST_LAYOUTS = 1_000  # each is resolved before the first one runs, which takes some milliseconds
_KEYS = ("base", "layout", "skip_invalid")


@dataclass(frozen=True)
class Matrix:
    """The layouts of a matrix file.

    Attributes:
        layouts: in the file's order, the last list of a table varying fastest.
        names: a label for each, see `label`.
        skipped: why each of the others was left out.
    """

    layouts: tuple[Layout, ...]
    names: tuple[str, ...]
    skipped: tuple[str, ...]


def load_matrix(path: str | Path, config: str | Path | None, overrides: Mapping[str, Any]) -> Matrix:
    """The layouts of the matrix file `path`. Each is merged from `config`, the file's `[base]`, a combination, and `overrides`.

    Raises ConfigError for a file that is not a matrix, and, unless `skip_invalid` is true, with the problems of every
    combination that is refused; also when none is left.
    """
    tables = read_toml(Path(path))
    problems = [
        f"{path}: a matrix has no key {key!r:.200}{did_you_mean(key, _KEYS)}" for key in tables if key not in _KEYS
    ]
    rows, skip = tables.get("layout"), tables.get("skip_invalid", False)
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        problems.append(f"{path}: a matrix needs at least one [[layout]] table")
    if not isinstance(skip, bool):
        problems.append(f"{path}: skip_invalid is {skip!r:.200}; it must be true or false")
    if problems:
        raise ConfigError(problems)
    base, here = flat(tables.get("base", {})), Path(path).absolute().parent
    layouts, names, refused = [], [], []
    combinations = list(islice(chain.from_iterable(map(expand, rows or [])), MOST_LAYOUTS + 1))
    if len(combinations) > MOST_LAYOUTS:
        raise ConfigError(
            f"{path}: the [[layout]] tables stand for more than {MOST_LAYOUTS:,} combinations; use shorter lists or more files"
        )
    for combination in combinations:
        try:
            layouts.append(load_layout(config, base, combination, overrides, folder=here))
            names.append(label(layouts[-1], combination))
        except (UsageError, ScheduleError) as error:
            refused.append(f"{_name(combination)}: {_reason(error)}")
    if refused and not skip:
        raise ConfigError([f"{path}: {reason}" for reason in refused])
    if not layouts:
        raise ConfigError([f"{path}: every layout is refused; the first: {refused[0]}"])
    return Matrix(tuple(layouts), tuple(names), tuple(refused))


def expand(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield every combination of the lists in a `[[layout]]` table, as dotted key -> value."""
    keys = flat(row)
    choices = [
        value if isinstance(value, list) and get_origin(annotation_of(key)) is not tuple else [value]
        for key, value in keys.items()
    ]
    return (dict(zip(keys, values, strict=True)) for values in product(*choices))


def flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value, tables within tables joined by dots."""
    keys: dict[str, Any] = {}
    for key, value in tables.items():
        if isinstance(value, dict):
            keys |= flat(value, f"{prefix}{key}.")
        else:
            keys[prefix + key] = value
    return keys


def label(layout: Layout, combination: Mapping[str, Any] | None = None) -> str:
    """Words for a layout: its schedule, p, v and m, and the other keys that a matrix's combination sets."""
    schedule = layout.schedule
    options = [f"{key}={value}" for key, value in schedule.options if key != "chunks"]
    others = [
        f"{key.rpartition('.')[2]}={value}"
        for key, value in flat(combination or {}).items()
        if (layout.search is not None or not key.startswith("schedule.options."))
        and key not in ("schedule.name", "schedule.chunks", "schedule.microbatches", "parallel.pp")
    ]
    sizes = [f"p={schedule.ranks}", f"v={schedule.chunks}", f"m={schedule.microbatches}"]
    name = SEARCH if layout.search is not None else schedule.name
    return " ".join([name, *([] if layout.search is not None else options), *sizes, *others])


def _name(combination: Mapping[str, Any]) -> str:
    parts = [
        str(value) if key == "schedule.name" else f"{key.rpartition('.')[2]}={value}"
        for key, value in combination.items()
    ]
    return " ".join(parts) or "the base"


def _reason(error: PipeloomError) -> str:
    problems = error.problems if isinstance(error, ConfigError) else [" ".join(str(error).split())]
    return "; ".join(problems)
