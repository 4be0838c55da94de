"""TOML files with `extends`, read and merged key by key; the origin of each key is recorded."""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from pipeloom.errors import ConfigError, UsageError, did_you_mean, echo, shortened
from pipeloom.limits import CONFIG_BYTES, MOST_NESTED, MOST_VALUES, depth, number, read_file
from pipeloom.schedule.families import canonical_name

_MOST_DOTS = 300  # in a line: the time that tomllib takes for a key grows with the square of its parts
BUILT_IN = ("default", "tiny", "moe")


@dataclass
class Merged:
    """Tables merged so far.

    Attributes:
        values: section -> key -> value, as TOML gives them.
        origins: "section.key" -> file or flag that set it last.
        given: the keys that a file of the user's or a flag sets, not only the package's own configurations.
    """

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    given: set[str] = field(default_factory=set)

    def lay(self, tables: Mapping[str, Any], origin: str | None, *, default: bool = False) -> None:
        """Merge `tables` over the present values. Chunks and options belong to a schedule: naming another family drops them.

        Args:
            origin: the name of the file; None: flags.
            default: whether the tables are one of the package's own configurations.
        """
        tables = copy.deepcopy(dict(tables))
        named = tables.get("schedule")
        held = self.values.get("schedule")
        if (
            isinstance(named, dict)
            and isinstance(held, dict)
            and _family(named.get("name", held.get("name"))) != _family(held.get("name"))
        ):
            held.pop("chunks", None)
            held["options"] = {}
        for section, table in tables.items():
            if not isinstance(table, dict) or not isinstance(self.values.get(section, {}), dict):
                self.values[section] = table
                self._remember(section, origin, default)
                continue
            self.values.setdefault(section, {})
            for key, value in table.items():
                self._put(self.values[section], key, value)
                self._remember(f"{section}.{key}", origin, default)

    @staticmethod
    def _put(table: dict[str, Any], key: str, value: Any) -> None:
        if isinstance(value, dict) and isinstance(table.get(key), dict):
            for inner, deeper in value.items():
                Merged._put(table[key], inner, deeper)
        else:
            table[key] = value

    def _remember(self, key: str, origin: str | None, default: bool) -> None:
        self.origins[key] = origin or f"--{key}"
        if not default:
            self.given.add(key)


def read_toml(path: Path, text: str | None = None) -> dict[str, Any]:
    """Return the tables of a TOML file (of `text`, where it is given).

    Raises ConfigError with the reason; for malformed TOML it begins with file:line:column.
    """
    name = shortened(str(path))
    try:
        if text is None:
            text = read_file(path, CONFIG_BYTES, "a configuration").decode("utf-8")
        if any(line.count(".") > _MOST_DOTS for line in text.split("\n")):
            raise ConfigError(
                f"{name}: a line has more than {_MOST_DOTS} dots, but a key has at most {MOST_NESTED} parts"
            )
        tables = tomllib.loads(text)
    except FileNotFoundError:
        near = did_you_mean(path.name, [p.name for p in path.parent.glob("*.toml")]) if path.parent.is_dir() else ""
        raise ConfigError(f"there is no file {name}{near}") from None
    except UsageError as error:
        raise ConfigError(str(error)) from None
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} is not UTF-8 text (byte {error.start})") from None
    except tomllib.TOMLDecodeError as error:
        message, _, place = str(error).rpartition(" (at ")
        if place.startswith("line "):
            line, _, column = place.removeprefix("line ").removesuffix(")").partition(", column ")
        else:  # "at end of document"
            line, column = str(len((text or "").splitlines()) or 1), "1"
        raise ConfigError(f"{name}:{line}:{column}: {message or error}") from None
    except RecursionError:
        raise ConfigError(f"{name}: tables and lists are nested too deeply; at most {MOST_NESTED} levels") from None
    except ValueError as error:  # a zero byte in the name, a number of thousands of digits
        raise ConfigError(f"{name} cannot be read: {error}") from None
    require_small(tables, name)
    return tables


def require_small(tables: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError for tables nested too deeply, a list that is too long, or a whole number of more than 64 bits."""
    if depth(tables) > MOST_NESTED:
        raise ConfigError(f"{where}: tables and lists are nested too deeply; at most {MOST_NESTED} levels")
    rest: list[tuple[str, Any]] = list(tables.items())
    while rest:
        key, value = rest.pop()
        if isinstance(value, int) and not -(2**63) <= value < 2**64:
            raise ConfigError(f"{where}: {shortened(key)} is {number(value)}; a whole number has at most 64 bits")
        if isinstance(value, list) and len(value) > MOST_VALUES:
            raise ConfigError(f"{where}: {shortened(key)} holds {len(value):,} values; at most {MOST_VALUES:,}")
        if isinstance(value, dict):
            rest += value.items()
        elif isinstance(value, list):
            rest += [(key, item) for item in value]


def _family(name: object) -> object:
    """Return a schedule's name for comparisons: two names of one family are equal."""
    return canonical_name(name) if isinstance(name, str) else name


def built_in(name: str) -> dict[str, Any]:
    """The tables of a configuration that comes with the package."""
    text = resources.files("pipeloom.config").joinpath(f"{name}.toml").read_text(encoding="utf-8")
    return read_toml(Path(f"{name}.toml"), text)


def lay_file(merged: Merged, path: str | Path) -> None:
    """Merge the file at `path` into `merged`, after the files that it extends.

    A name in BUILT_IN that is not a file stands for the package's own configuration. Raises ConfigError for a file that cannot
    be read, and for a cycle of `extends`.
    """
    chain: list[tuple[str, dict[str, Any], bool]] = []
    seen: list[Path] = []
    here: Path | None = Path(path)
    while here is not None:
        if str(here) in BUILT_IN and not here.exists():
            chain.append((str(here), built_in(str(here)), True))
            break
        resolved = here.resolve()
        if resolved in seen:
            names = " -> ".join(p.name for p in [*seen[seen.index(resolved) :], resolved])
            raise ConfigError(f"{path}: extends forms a cycle: {names}")
        seen.append(resolved)
        tables = read_toml(here)
        parent = tables.pop("extends", None)
        chain.append((str(here), tables, False))
        if parent is None:
            here = None
        elif not isinstance(parent, str):
            raise ConfigError(f"{here}: extends is {echo(parent)}; it must be the name of a TOML file, in quotes")
        else:
            beside = here.parent / parent
            here = Path(parent) if parent in BUILT_IN and not beside.exists() else beside
    for name, tables, ours in reversed(chain):
        merged.lay(tables, name, default=ours)
