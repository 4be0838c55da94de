"""Nested values, as layers take and return them: tensors and others inside tuples, lists and dicts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from pipeloom.errors import UsageError


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of a value, inside tuples, lists and dicts too, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return []
    return [tensor for each in value for tensor in tensors_in(each)]


def mapped(value: Any, kind: type[Any], change: Callable[[Any], Any]) -> Any:
    """Return `value` with `change(each)` in place of each value of this kind, itself or inside tuples, lists and dicts."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, Mapping):
        return {key: mapped(item, kind, change) for key, item in value.items()}
    return like(value, [mapped(item, kind, change) for item in value]) if isinstance(value, (tuple, list)) else value


def like(value: tuple[Any, ...] | list[Any], items: Iterable[Any]) -> Any:
    """Return `items` as a list, a tuple or a named tuple, like `value`. Raises UsageError for a class that takes others."""
    try:
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    except TypeError as error:
        raise UsageError(
            f"a {type(value).__name__} cannot be made of its items ({error}); give a tuple or a list"
        ) from None
