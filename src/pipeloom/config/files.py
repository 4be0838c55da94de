"""Reads TOML files with `extends`, and merges them key by key, remembering where each key came from."""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from pipeloom.errors import ConfigError, did_you_mean

BUILT_IN = ("default", "tiny", "moe")


@dataclass
class Merged:
    """Tables merged so far.

    Attributes:
        values: section -> key -> value, as TOML gives them.
        origins: "section.key" -> file or flag that set it last.
        given: the keys that something other than the package's own configurations set.
    """

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    given: set[str] = field(default_factory=set)

    def lay(self, tables: Mapping[str, Any], origin: str | None, *, default: bool = False) -> None:
        """Puts `tables` over what is there. Chunks and options go with a schedule's name: another name drops them.

        `origin` None stands for flags.
        """
        tables = copy.deepcopy(dict(tables))
        named = tables.get("schedule")
        held = self.values.get("schedule")
        if (
            isinstance(named, dict)
            and isinstance(held, dict)
            and named.get("name", held.get("name")) != held.get("name")
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
    """The tables of a TOML file. Raises ConfigError with the reason, and file:line:column of malformed TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8") if text is None else text)
    except FileNotFoundError:
        near = did_you_mean(path.name, [p.name for p in path.parent.glob("*.toml")]) if path.parent.is_dir() else ""
        raise ConfigError(f"there is no file {path}{near}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start})") from None
    except tomllib.TOMLDecodeError as error:
        message, _, place = str(error).rpartition(" (at ")
        if place.startswith("line "):
            line, _, column = place.removeprefix("line ").removesuffix(")").partition(", column ")
        else:  # "at end of document"
            line, column = (
                str(len((text if text is not None else path.read_text(encoding="utf-8")).splitlines()) or 1),
                "1",
            )
        raise ConfigError(f"{path}:{line}:{column}: {message or error}") from None


def built_in(name: str) -> dict[str, Any]:
    """The tables of a configuration that comes with the package."""
    text = resources.files("pipeloom.config").joinpath(f"{name}.toml").read_text(encoding="utf-8")
    return read_toml(Path(f"{name}.toml"), text)


def lay_file(merged: Merged, path: str | Path) -> None:
    """Lays the file at `path`, and before it those that it extends, over `merged`.

    A name of BUILT_IN that is no file stands for the package's own. Raises ConfigError for a cycle of `extends`.
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
            raise ConfigError(f"{path}: extends goes in a circle: {names}")
        seen.append(resolved)
        tables = read_toml(here)
        parent = tables.pop("extends", None)
        chain.append((str(here), tables, False))
        if parent is None:
            here = None
        elif not isinstance(parent, str):
            raise ConfigError(f"{here}: extends is {parent!r}; it must be the name of a TOML file, in quotes")
        else:
            beside = here.parent / parent
            here = Path(parent) if parent in BUILT_IN and not beside.exists() else beside
    for name, tables, ours in reversed(chain):
        merged.lay(tables, name, default=ours)
