"""State that a forward writes to attributes, and reads of it in a backward."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from pipeloom.ops.attribute_state import CONTAINERS, Attribute, equal_values
from pipeloom.ops.recompute import RECOMPUTATION


class WrittenAttributes:
    """Attributes with their present values, which another micro-batch may replace. Records are left out."""

    def __init__(self, attributes: Iterable[Attribute]) -> None:
        self._marks = [(attribute, _mark(attribute)) for attribute in attributes if not is_record(attribute)]

    def stale(self) -> list[Attribute]:
        """Return the attributes whose values have changed since."""
        return [attribute for attribute, mark in self._marks if not _same(mark, _mark(attribute))]


class AttributeReads:
    """Context that watches for reads of some attributes.

    Objects whose classes react to a change of their class are not watched. Counting (`self.calls += 1`) is not a read.

    Args:
        recomputed: whether reads in recomputed layers count: not in a backward, where these get their own values.

    Attributes:
        found: the first attribute that was read before it was written.
    """

    def __init__(self, attributes: Iterable[Attribute], recomputed: bool) -> None:
        self._recomputed = recomputed
        self._watched: dict[int, tuple[Any, dict[str, Attribute]]] = {}
        for attribute in attributes:
            self._watched.setdefault(id(attribute.owner), (attribute.owner, {}))[1][attribute.name] = attribute
        self._kinds: list[tuple[Any, type]] = []
        self.found: Attribute | None = None
        self._counts_read: dict[tuple[int, str], Attribute] = {}

    def __enter__(self) -> AttributeReads:
        for owner, names in self._watched.values():
            kind = type(owner)
            if isinstance(owner, torch.jit.ScriptModule) or "__init_subclass__" in {
                n for c in kind.mro()[:-1] for n in vars(c)
            }:
                continue
            object.__setattr__(owner, "__class__", self._watching(kind, names))
            self._kinds.append((owner, kind))
        return self

    def __exit__(self, *_: Any) -> None:
        while self._kinds:
            owner, kind = self._kinds.pop()
            object.__setattr__(owner, "__class__", kind)
        if self.found is None:
            self.found = next(iter(self._counts_read.values()), None)

    def _watching(self, kind: Any, names: dict[str, Attribute]) -> Any:
        """Return a subclass of `kind` whose objects record reads of `names`."""

        def read(owner: Any, name: str) -> Any:
            if name in names and self.found is None and self._counts():
                if type(vars(owner).get(name)) is int:  # until it is written
                    self._counts_read[id(owner), name] = names[name]
                else:
                    self.found = names[name]
            return kind.__getattribute__(owner, name)

        def write(owner: Any, name: str, value: Any) -> None:
            if name in names and self._counts():
                if (id(owner), name) not in self._counts_read:
                    del names[name]
                elif type(value) is int:
                    del self._counts_read[id(owner), name]
            kind.__setattr__(owner, name, value)

        def remove(owner: Any, name: str) -> None:
            if name in names and self._counts():
                del names[name]
            kind.__delattr__(owner, name)

        special = {"__getattribute__": read, "__setattr__": write, "__delattr__": remove}
        return type(kind)(kind.__name__, (kind,), {"__module__": kind.__module__, "__doc__": kind.__doc__, **special})

    def _counts(self) -> bool:
        if self._recomputed:
            return True
        frame: Any = sys._getframe(2)
        while frame is not None and frame.f_code is not RECOMPUTATION:
            frame = frame.f_back
        return frame is None


def is_record(attribute: Attribute) -> bool:
    """Return whether the attribute is a list, set or dict that only keeps a record: a layer does not compute with it."""
    value = _value(attribute)
    return type(value) in CONTAINERS and not _holds_numbers(value)


def _holds_numbers(value: Any, depth: int = 4) -> bool:
    """Return whether a container holds tensors or arrays, or a dict holds floats, with which a layer may compute."""
    if isinstance(value, dict):
        return any(isinstance(each, float) or _holds_numbers(each, depth - 1) for each in value.values())
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return depth > 0 and any(_holds_numbers(each, depth - 1) for each in value)
    return hasattr(value, "dtype")


def _value(attribute: Attribute) -> Any:
    held = vars(attribute.owner)
    return held[attribute.name] if attribute.name in held else held.get("_buffers", {}).get(attribute.name)


def _mark(attribute: Attribute) -> tuple[Any, Any]:
    """Return the value, to keep it alive, and a mark that differs after a change in place."""
    value = _value(attribute)
    if isinstance(value, Tensor):
        return value, 0 if value.is_inference() else value._version
    if isinstance(value, dict):
        return value, tuple(value.values())
    return value, tuple(value) if isinstance(value, (list, set, deque)) else None


def _same(before: tuple[Any, Any], now: tuple[Any, Any]) -> bool:
    return equal_values(before[0], now[0]) and equal_values(before[1], now[1])
