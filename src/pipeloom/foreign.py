"""Files of other programs: which keys are known, and which values are numbers.

A key is used, harmless (it changes neither sizes nor numbers nor what is learned) or unknown. A reader names unknown keys once,
and refuses them where they can change any of these: a list of what is known refuses what nobody thought of.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, TypeGuard

from pipeloom.errors import ConfigError, shortened

LARGEST_NUMBER = 1e100  # the sums and products of larger ones would overflow


def unknown_keys(values: Mapping[Any, Any], known: Collection[str]) -> list[str]:
    """Return the keys that are not `known` and have a value: null, false, 0 and what is empty say nothing."""
    return sorted(str(key) for key, value in values.items() if value and key not in known)


def refuse_unknown(where: str, values: Mapping[Any, Any], used: Collection[str], harmless: Collection[str]) -> None:
    """Raise ConfigError, with a message that begins with `where`, for a key that is neither used nor harmless."""
    for key in unknown_keys(values, {*used, *harmless}):
        raise ConfigError(f"{where}: {shortened(key, 60)} = {as_json(values[key])} is not supported")


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value of a file is a number that can be computed with: finite, and of at most `LARGEST_NUMBER`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -LARGEST_NUMBER <= value <= LARGEST_NUMBER


def number_in(where: str, value: Any, least: float = 0.0, most: float = LARGEST_NUMBER, whole: bool = False) -> Any:
    """Return a number of a file. Raises ConfigError, with a message that begins with `where`, for any other value."""
    if is_number(value) and least <= value <= most and (type(value) is int or not whole):
        return value
    bounds = f"{least:,} to {most:,}" if whole else f"{least:g} to {most:g}"
    raise ConfigError(f"{where} = {as_json(value)}: it must be a {'whole ' * whole}number from {bounds}")


def typed(where: str, values: Mapping[str, Any], key: str, kind: Any, words: str) -> Any:
    """Return the value of a key, None where it is absent. Raises ConfigError for one of another type."""
    value = values.get(key)
    if isinstance(value, int | float) and not isinstance(value, bool) and not is_number(value):
        words = "a finite number"
    elif value is None or (isinstance(value, kind) and (kind is bool or not isinstance(value, bool))):
        return value
    raise ConfigError(f"{where}: {key} = {as_json(value)}: it must be {words}")


def as_json(value: Any) -> str:
    """Return a value of a file as it stands there, shortened: how a message shows it."""
    return shortened(json.dumps(value))
