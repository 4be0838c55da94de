"""The attributes of a module at one moment, to run the same forward again from the same values."""

from __future__ import annotations

import collections
import itertools
import operator
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeloom.errors import UsageError
from pipeloom.ops.layouts import is_strided, strided_parts

_MOST_ENTRIES = 10_000  # a longer list or dict is data, such as a vocabulary, and comparing it would take too long
_ALIKE = ("layout", "dtype", "is_nested", "is_meta")  # properties that tensors with the same values share
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}
CONTAINERS = (list, dict, set, collections.deque, collections.OrderedDict, collections.defaultdict)
# Classes of these packages keep no state of a forward in their attributes, or keep it outside of them.
_OPAQUE = {"torch", "numpy", "builtins", "random", "threading", "logging", "multiprocessing", "pipeloom", "collections"}


class Attribute(NamedTuple):
    """An attribute, a buffer or a parameter of a module, or an attribute of an object that the module holds.

    Attributes:
        path: its name in messages.
    """

    owner: Any
    name: str
    path: str


class AttributeState:
    """The attributes of a module and its submodules before a forward.

    Lists, dicts, sets and objects of the user's classes are searched; tuples and closures are not. Random generators among them
    are included, and the global ones of Python's `random` and NumPy; torch's are not.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._seen: dict[int, Any] = {}  # keeps the objects alive, so that no id is reused
        self._holders: list[tuple[Any, Any]] = []  # a container, and its contents
        self._tensors: list[tuple[Tensor, int]] = []  # with their versions
        self._generators: list[tuple[_Generator, Any]] = [
            (generator, generator.get()) for generator in _shared_generators()
        ]
        self._sources: list[tuple[Any, str]] = []  # random generators in the module's attributes, with their names
        self._names: dict[int, str] = {}  # id of a container, a tensor or a generator -> its name
        self._owned: dict[int, Attribute] = {}  # id of a container or a tensor -> the attribute that leads to it
        for path, part in module.named_modules():
            self._names[id(part)] = path
            self._look_into(part)
        self._seen.clear()
        self._unchanged: list[Any] = []  # containers that the forward has left as they were
        self._outside: list[tuple[list[tuple[Any, Any]], list[Any]]] = []

    def _look_into(self, holder: Any) -> None:
        held = held_by(holder)
        self._holders.append((holder, held))
        for key, value in held.items() if isinstance(held, dict) else enumerate(held):
            if type(value) in _IMMUTABLE or isinstance(value, (nn.Module, nn.Parameter)) or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            self._names[id(value)] = path = _joined(self._names[id(holder)], key)
            if isinstance(value, Tensor) or type(value) in CONTAINERS:
                self._owned[id(value)] = self._owned.get(id(holder)) or Attribute(holder, str(key), path)
            if isinstance(value, Tensor):
                if not value.is_inference():
                    self._tensors.append((value, value._version))
            elif (generator := generator_of(value)) is not None:
                self._generators.append((generator, generator.get()))
                self._names[id(generator)] = self._names[id(value)]
                self._sources.append((value, self._names[id(value)]))
            elif is_object(value) or (type(value) in CONTAINERS and len(value) <= _MOST_ENTRIES):
                self._look_into(value)

    def of(self, kind: type) -> bool:
        """Return whether a module or an object of this class is among the owners of these attributes."""
        return any(isinstance(holder, kind) for holder, _ in self._holders)

    def changed(self) -> Iterator[Attribute]:
        """Yield the attributes that were changed or replaced since, and the generators that were used.

        Left out are attributes that were None, empty or absent (they are only created now), and integers in a dict, which are
        counts. So are lists and dicts that have grown, which keep a record, unless they held tensors or floats, with which a
        layer may compute; tensors that replace others and are part of a graph or have the same values, since each forward
        computes them anew, like a normed weight; and generators that all modules share.
        """
        for holder, before in self._holders:
            now, name = held_by(holder), self._names[id(holder)]
            if isinstance(before, dict):
                entries = [(_joined(name, key), value, now.get(key)) for key, value in before.items()]
            elif isinstance(holder, set):
                entries = [(name, True, set(before) <= holder)]
            else:
                grown = [*now, *[None] * len(before)]
                entries = [(_joined(name, at), value, grown[at]) for at, value in enumerate(before)]
            if type(holder) in CONTAINERS and len(now) > len(before) and any(map(_is_number, _values(before))):
                yield Attribute(holder, name, name)
            counts = isinstance(holder, dict)
            for path, value, value_now in entries:
                if counts and type(value) is int and type(value_now) is int:
                    continue
                if value is not None and not _is_empty(value) and _depends(value, value_now):
                    yield Attribute(holder, path.rpartition(".")[2], path)
        yield from (self._owned[id(tensor)] for tensor, version in self._tensors if tensor._version != version)
        for generator, state in self._generators:
            if id(generator) in self._names and not same_state(generator.get(), state):
                path = self._names[id(generator)]
                yield Attribute(self._module, path, path)

    def reached(self) -> Iterator[tuple[Any, str]]:
        """Return the modules, objects, lists, dicts, tensors and generators among the attributes, with their names."""
        yield from ((holder, self._names[id(holder)]) for holder, _ in self._holders)
        yield from ((tensor, self._names[id(tensor)]) for tensor, _ in self._tensors)
        yield from self._sources

    def written(self) -> Iterator[Attribute]:
        """Return the attributes that were replaced, created or deleted since, or whose values were changed in place."""
        for holder, before in self._holders:
            now = held_by(holder)
            if not _differ(before, now):
                continue
            if id(holder) in self._owned:
                yield self._owned[id(holder)]
                continue
            for name in {**before, **now}:
                if before.get(name, self) is not now.get(name, self):
                    yield Attribute(holder, name, _joined(self._names[id(holder)], name))
        yield from (self._owned[id(tensor)] for tensor, version in self._tensors if tensor._version != version)

    def keep_what_changed(self) -> None:
        """Drop the attributes that the forward has not changed. Call it once, after the forward.

        Raises UsageError for a tensor that the forward has changed in place: only a buffer's values are kept.
        """
        for tensor, version in self._tensors:
            if tensor._version != version:
                raise UsageError(
                    f"{type(self._module).__name__} is recomputed, and its forward changes a tensor of shape "
                    f"{list(tensor.shape)} among its attributes in place: make it a buffer (register_buffer), replace it "
                    "instead of changing it, or leave the layer out of `recompute`"
                )
        self._tensors.clear()
        changed = [_differ(held, held_by(holder)) for holder, held in self._holders]
        self._unchanged = [holder for (holder, _), differs in zip(self._holders, changed, strict=True) if not differs]
        self._holders = list(itertools.compress(self._holders, changed))
        self._generators = [
            (generator, state) for generator, state in self._generators if not same_state(generator.get(), state)
        ]

    def swap_in(self) -> None:
        """Restore the attributes of that moment, until `swap_out`."""
        holders = (*(holder for holder, _ in self._holders), *self._unchanged)
        outside = (
            [(holder, _everything_in(holder)) for holder in holders],
            [generator.get() for generator, _ in self._generators],
        )
        self._outside.append(outside)
        for holder, held in self._holders:
            _fill(holder, held)
        for generator, state in self._generators:
            generator.set(state)

    def swap_out(self) -> None:
        """Undo `swap_in`, also if the forward has ended early, before it deletes an attribute at its end."""
        contents, states = self._outside.pop()
        for holder, held in contents:
            if _differ(held, _everything_in(holder)):
                _fill(holder, held)
        for (generator, _), state in zip(self._generators, states, strict=True):
            generator.set(state)


_IMMUTABLE = frozenset(
    {bool, int, float, complex, str, bytes, tuple, frozenset, type(None), torch.dtype, torch.device, torch.Size}
)


def is_object(value: Any) -> bool:
    """Return whether this is an object of a user's class, with its state in attributes."""
    if isinstance(value, type) or callable(value) or not hasattr(value, "__dict__"):
        return False
    return type(value).__module__.partition(".")[0] not in _OPAQUE


def held_by(holder: Any) -> Any:
    """Return a copy of the contents of a container or an object: a dict, or a list."""
    if isinstance(holder, nn.Module):
        return {name: value for name, value in holder.__dict__.items() if name not in _OF_EVERY_MODULE}
    if isinstance(holder, dict):
        return dict(holder)
    return list(holder) if type(holder) in CONTAINERS else dict(vars(holder))


def _fill(holder: Any, held: Any) -> None:
    """Replace the contents of a container or an object by `held`."""
    if isinstance(holder, list):
        holder[:] = held
    elif isinstance(holder, (set, collections.deque)):
        holder.clear()
        holder.update(held) if isinstance(holder, set) else holder.extend(held)
    else:
        attributes = holder if isinstance(holder, dict) else holder.__dict__
        for name in [name for name in held_by(holder) if name not in held]:
            del attributes[name]
        attributes.update(held)


def _joined(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def _depends(before: Any, now: Any) -> bool:
    """Return whether an attribute has a new value that may depend on the old one."""
    if isinstance(now, Tensor):
        return not now.requires_grad and not same_tensor(before, now)
    return not equal_values(before, now)


def _is_number(value: Any) -> bool:
    """Return whether a layer may compute with the value: a tensor, an array or a float, or a tuple of such."""
    return (
        any(map(_is_number, value)) if isinstance(value, tuple) else isinstance(value, float) or hasattr(value, "dtype")
    )


def _values(held: Any) -> Any:
    return held.values() if isinstance(held, dict) else held


def _is_empty(value: Any) -> bool:
    """Return whether the value is empty, like a table that the first forward fills."""
    return isinstance(value, Tensor) and value.numel() == 0


def same_tensor(before: Any, now: Tensor) -> bool:
    """Return whether a tensor is the old one or has its values, like a frozen weight that each forward masks anew.

    A table that the first forward moves to the device of its input has its old values.
    """
    if now is before:
        return True
    if not isinstance(before, Tensor) or any(getattr(before, each) != getattr(now, each) for each in _ALIKE):
        return False
    return same_values(before, now.to(before.device))


def same_values(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of one layout and dtype, on one device, have the same values, NaNs included.

    Tensors without values, on the meta device, have if they have one shape.
    """
    if not is_strided(a):
        parts, others = strided_parts(a), strided_parts(b)
        shapes_agree = a.is_nested or a.shape == b.shape
        return shapes_agree and len(parts) == len(others) and all(map(same_values, parts, others))
    if a.shape != b.shape or a.is_meta:
        return a.shape == b.shape
    return torch.equal(a, b) or ((a.is_floating_point() or a.is_complex()) and torch.equal(_bits(a), _bits(b)))


def _bits(value: Tensor) -> Tensor:
    return value.detach().resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8)


def equal_values(before: Any, now: Any) -> bool:
    """Return whether two values are one object, or equal and of an immutable type."""
    if now is before:
        return True
    if type(before) is not type(now) or type(before) not in _IMMUTABLE:
        return False
    if isinstance(before, tuple):  # of tensors too, whose equality has no truth value
        return len(before) == len(now) and all(map(equal_values, before, now))
    return bool(before == now)


def _differ(before: Any, now: Any) -> bool:
    """Return whether two copies of a container's contents have different objects, or another order."""
    if isinstance(before, dict):
        return list(before) != list(now) or not all(map(operator.is_, before.values(), now.values()))
    return len(before) != len(now) or not all(map(operator.is_, before, now))


def _everything_in(holder: Any) -> Any:
    """Return the same as `held_by`, with the attributes that torch keeps in every module, which is faster."""
    return dict(holder.__dict__) if isinstance(holder, nn.Module) else held_by(holder)


class _Generator:
    """A random generator, with functions to read and set its state."""

    def __init__(self, get: Callable[[], Any], put: Callable[[Any], Any]) -> None:
        self.get, self.set = get, put


def _shared_generators() -> Iterator[_Generator]:
    yield _Generator(random.getstate, random.setstate)
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        yield _Generator(numpy.get_state, numpy.set_state)


def generator_of(value: Any) -> _Generator | None:
    if isinstance(value, torch.Generator):
        return _Generator(value.get_state, value.set_state)
    if isinstance(value, random.Random):
        return _Generator(value.getstate, value.setstate)
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None and isinstance(value, numpy.RandomState):
        return _Generator(value.get_state, value.set_state)
    if numpy is not None and isinstance(value, numpy.Generator):
        bits = value.bit_generator
        return _Generator(lambda: bits.state, lambda state: setattr(bits, "state", state))
    return None


def same_state(a: Any, b: Any) -> bool:
    """Return whether two states of a generator are equal: tensors, or tuples and dicts of numbers and NumPy arrays."""
    if isinstance(a, Tensor):
        return same_values(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_state(a[key], b[key]) for key in a)
    if isinstance(a, tuple) and not (a and type(a[-1]) is int and len(a) > 100):
        return len(a) == len(b) and all(map(same_state, a, b))
    same = a == b
    return bool(same.all()) if hasattr(same, "all") else bool(same)
