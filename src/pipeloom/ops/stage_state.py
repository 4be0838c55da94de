"""The state of a stage's modules at one moment: to run a forward again from it, or to return to it."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase  # of all batch norms; torch has no public name for it

from pipeloom.ops.checksum import version_of
from pipeloom.ops.random_state import random_states, set_random_states

# The dict of a module's buffers, in which a forward may replace, add and remove them. torch has no public name for the dict, and
# its methods leave out buffers that are None.
_BUFFERS = "_buffers"
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}
_CONTAINERS = (list, dict, set, collections.deque, collections.OrderedDict, collections.defaultdict)


class StageState:
    """The values of buffers, each submodule's own attributes with the states of torch's generators among them, and the states of
    Python's and NumPy's global generators.

    Lists, dicts, sets and deques among the attributes are copied, but not what they hold. Closures, global variables and objects
    of other classes are not looked into: what a layer leaves there is outside the stage contract (docs/own_model.md).
    torch's global generators are the caller's matter.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._parts = [_PartState(part) for part in dict.fromkeys(p for module in modules for p in module.modules())]
        self._random = random_states()

    def forget_unchanged(self) -> None:
        """Drop what has not been changed since, such as large tables. Call it once."""
        self._parts = [part for part in self._parts if part.forget_unchanged()]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Give the modules the state of that moment inside, in copies."""
        buffers: dict[int, Tensor] = {}  # a tensor in two places has one copy
        outside = [dict(part.module.__dict__) for part in self._parts]
        drawn, others = [generator.get_state() for generator, _ in self._generators()], random_states()
        try:
            for part in self._parts:
                part.swap_in(buffers)
            self._restart()
            yield
        finally:
            for part, attributes in zip(self._parts, outside, strict=True):
                part.module.__dict__.clear()
                part.module.__dict__.update(attributes)
            for (generator, _), state in zip(self._generators(), drawn, strict=True):
                generator.set_state(state)
            set_random_states(others)

    @torch.no_grad()
    def restore(self) -> None:
        """Return to the state of that moment for good."""
        for part in self._parts:
            part.restore()
        self._restart()

    def _generators(self) -> Iterator[tuple[torch.Generator, Tensor]]:
        for part in self._parts:
            yield from part.generators

    def _restart(self) -> None:
        for generator, state in self._generators():
            generator.set_state(state)
        set_random_states(self._random)


class _PartState:
    """The state of one module, without its submodules.

    Attributes:
        generators: torch's generators among its attributes, with their states.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._buffer_of = dict(_buffers_of(module))
        self._copies = {
            name: (b.detach().clone(), version_of(b)) for name, b in self._buffer_of.items() if b is not None
        }
        self._attributes = {n: _copy(value) for n, value in module.__dict__.items() if n not in _OF_EVERY_MODULE}
        self._objects = {name: module.__dict__[name] for name in self._attributes}
        self.generators = [(g, g.get_state()) for g in self._objects.values() if isinstance(g, torch.Generator)]

    def forget_unchanged(self) -> bool:
        """Drop the copies of unchanged buffers; return whether anything has changed."""
        self._copies = {
            name: (copy, version)
            for name, (copy, version) in self._copies.items()
            if _may_have_changed(self._buffer_of[name], version)
        }
        now = {n: value for n, value in self.module.__dict__.items() if n not in _OF_EVERY_MODULE}
        objects = self._objects
        same = now.keys() == objects.keys() and all(
            now[name] is objects[name] and _same_contents(now[name], before)
            for name, before in self._attributes.items()
        )
        buffers = _buffers_of(self.module)
        replaced = buffers.keys() != self._buffer_of.keys() or not all(
            map(is_, buffers.values(), self._buffer_of.values())
        )
        drawn = any(not torch.equal(generator.get_state(), state) for generator, state in self.generators)
        return bool(self._copies) or not same or replaced or drawn

    def swap_in(self, copies: dict[int, Tensor]) -> None:
        buffers = dict(self._buffer_of)
        for name, (copy, _) in self._copies.items():
            # Copies, because the graphs of other forwards may hold the buffers themselves.
            buffers[name] = copies.setdefault(id(self._buffer_of[name]), copy.clone())
        self._fill({name: _copy(value) for name, value in self._attributes.items()})
        vars(self.module)[_BUFFERS] = buffers

    def restore(self) -> None:
        for name, (copy, _) in self._copies.items():
            buffer = self._buffer_of[name]
            assert buffer is not None
            buffer.copy_(copy)
        vars(self.module)[_BUFFERS] = dict(self._buffer_of)
        self._fill({name: _copy(value) for name, value in self._attributes.items()})

    def _fill(self, attributes: dict[str, Any]) -> None:
        held = self.module.__dict__
        for name in [name for name in held if name not in _OF_EVERY_MODULE and name not in attributes]:
            del held[name]
        held.update(attributes)


def _buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    buffers: dict[str, Tensor | None] = vars(module)[_BUFFERS]
    return buffers


def _copy(value: Any) -> Any:
    return value.copy() if type(value) in _CONTAINERS else value


def _same_contents(now: Any, before: Any) -> bool:
    """Return whether a container holds the same objects; other values are not looked into."""
    if type(now) not in _CONTAINERS:
        return True
    if isinstance(now, dict):
        return list(now) == list(before) and all(map(is_, now.values(), before.values()))
    return len(now) == len(before) and all(map(is_, now, before))


def _may_have_changed(buffer: Tensor | None, version: int) -> bool:
    """Return whether a buffer has another version, or is a vector, which batch norm's kernels change without counting it.

    Vectors are not compared: their copies are small, and on a GPU a comparison would wait for the device.
    """
    return buffer is not None and (version_of(buffer) != version or (buffer.is_floating_point() and buffer.ndim < 2))


def batch_statistics(module: nn.Module) -> str | None:
    """Return the class name of the first part of `module` that updates running statistics in its forward, or None."""
    for part in module.modules():
        if isinstance(part, _NormBase) and part.training and part.running_mean is not None:
            return type(part).__name__
    return None
