"""`--section.key value` and `--section.key=value`: flags for every key of the configuration."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from pipeloom.config.files import BUILT_IN, require_small
from pipeloom.config.sections import SECTIONS
from pipeloom.errors import ConfigError, UsageError, did_you_mean, shortened
from pipeloom.limits import MOST_NESTED, MOST_VALUES

SHORT = {"html": "log.html"}  # flag that all commands share -> the key that it sets


def split_arguments(arguments: Sequence[str]) -> tuple[str | None, dict[str, Any]]:
    """(path of the configuration or None, dotted key -> value) from a command's arguments.

    A value is read as TOML, else taken as text. A switch (a key that is true or false) may stand alone. Raises
    UsageError for a second path, a flag without a dot, or one without its value.
    """
    path: str | None = None
    overrides: dict[str, Any] = {}
    rest = list(arguments)
    if len(rest) > MOST_VALUES:
        raise UsageError(f"{len(rest):,} words are too many for one command; at most {MOST_VALUES:,}")
    rest.reverse()
    while rest:
        word = rest.pop()
        if not word.startswith("-"):
            if path is not None:
                raise UsageError(
                    f"two configurations are named, {path!r:.200} and {word!r:.200}; give one, and flags as --section.key value"
                )
            path = word
            continue
        flag, equals, text = word.removeprefix("--").partition("=")
        flag = SHORT.get(flag, flag)
        if not word.startswith("--") or "." not in flag:
            raise UsageError(f"there is no option {word!r:.200}{_near_flag(flag)}")
        if not equals:
            if rest and not rest[-1].startswith("--") and not (_is_switch(flag) and _is_path(rest[-1])):
                text = rest.pop()
            elif _is_switch(flag):
                text = "true"
            else:
                raise UsageError(f"--{flag} needs a value: --{flag} VALUE")
        overrides[flag.replace("-", "_")] = parse_value(flag.replace("-", "_"), text)
    return path, overrides


def parse_value(key: str, text: str) -> Any:
    """Return the value of `text`, read as TOML if it is valid, else the text itself; for a key that holds text, always text."""
    kind = _annotation(key)
    if kind is bool and _is_truth(text):
        return text.lower() == "true"
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):  # TOMLDecodeError is one; so are numbers of thousands of digits
        value = text
        if kind not in (str, None):
            value = _number(text)
    if _is_text(key) and not isinstance(value, str):
        return text
    return value


def nested(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """section -> key -> value (and deeper for a key that is a table) from dotted keys.

    Raises ConfigError for keys or values that are too large, and for a text with lone surrogates, which cannot be written to a
    file; UsageError for a key that is given both a value and keys below it.
    """
    tables: dict[str, Any] = {}
    for key, value in overrides.items():
        if key.count(".") >= MOST_NESTED:
            raise ConfigError(f"--{shortened(key)}: a key has at most {MOST_NESTED} parts")
        require_small({key: value}, f"--{shortened(key)}")
    for dotted, value in overrides.items():
        if isinstance(value, str) and any("\ud800" <= c <= "\udfff" for c in value):
            raise ConfigError(f"{dotted} is {value[:200]!a}: it is not text (UTF-8)")
        table = tables
        *path, last = dotted.split(".")
        for part in path:
            inner = table.setdefault(part, {})
            if not isinstance(inner, dict):
                raise UsageError(f"--{dotted}: {part} already has a value that is not a table")
            table = inner
        table[last] = value
    return tables


def _number(text: str) -> Any:
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text


def _is_truth(text: str) -> bool:
    return text.lower() in ("true", "false")


def _is_path(word: str) -> bool:
    return word.endswith(".toml") or word in BUILT_IN


def _annotation(key: str) -> Any:
    section, _, name = key.partition(".")
    field = SECTIONS[section].model_fields.get(name) if section in SECTIONS else None
    return field.annotation if field is not None else None


def _is_switch(key: str) -> bool:
    return _annotation(key.replace("-", "_")) is bool


def _is_text(key: str) -> bool:
    kind = _annotation(key)
    return kind is str or all(isinstance(value, str) for value in getattr(kind, "__args__", (0,)))


def _near_flag(flag: str) -> str:
    known = [f"--{section}.{key}" for section, model in SECTIONS.items() for key in model.model_fields]
    if "." in flag:
        return did_you_mean(f"--{flag}", known)
    keys = {name.rpartition(".")[2]: name for name in known}
    near = difflib.get_close_matches(flag.replace("-", "_"), keys, n=1)
    return f"; did you mean {keys[near[0]]}?" if near else "; a key is given as --section.key value"
