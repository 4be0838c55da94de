"""State that layers of several stages share: refused where a forward changes it.

Two stages run forwards of other micro-batches in between, and on two ranks each has a copy of its own, so that a buffer, an
attribute or a variable which one writes and another reads is not what it is in one process. Weights are shared in another way
(`tied_weights`), and what nobody changes may be shared.
"""

from __future__ import annotations

import hashlib
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pipeloom.errors import ConfigError, UsageError
from pipeloom.ops.attribute_state import (
    CONTAINERS,
    AttributeState,
    equal_values,
    generator_of,
    held_by,
    is_object,
    same_state,
    same_tensor,
    same_values,
)
from pipeloom.ops.layouts import memory_of
from pipeloom.runtime.tied_weights import referred_to

_LEAVES = (bool, int, str, bytes, type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)


class StateHolder(NamedTuple):
    """Something that holds state: a module, an object, a list or dict, a tensor, a generator, or a variable.

    Attributes:
        value: it; of a variable, a function that returns its value.
        path: its name for a message to a person.
        outside: whether only the code of the layer refers to it, by a global name or a closure.
        name: of the global variable that refers to it, with its module.
    """

    value: Any
    path: str
    outside: bool = False
    name: str | None = None


class SharedState:
    """The holders of state in the layers of each position of the model, as far as the ranks can tell.

    Args:
        position_of: layer -> its position.
        values: objects to which layers and factories refer before any is built, in an order that is the same in every
            process.
    """

    def __init__(self, position_of: Mapping[str, int], values: Iterable[Any]) -> None:
        self._position_of = position_of
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []
        kinds = []
        for value in values:
            inside = [item.value for item in _inside(value)] if isinstance(value, nn.Module) else [value]
            for item in inside:
                if id(item) not in self._numbers and not isinstance(item, _LEAVES):
                    self._numbers[id(item)] = len(self._numbers)
                    self._alive.append(item)
                    kinds.append(type(item).__qualname__)
        self._digest = hashlib.sha256(repr(kinds).encode()).hexdigest()[:16]
        self._overlaps = _Overlaps(values)
        self._held: dict[str, dict[Any, StateHolder]] = {}
        self._places: dict[Any, set[int]] = {}

    @classmethod
    def of_layers(cls, layers: Sequence[Any], names: Sequence[str], ranges: Sequence[range]) -> SharedState:
        """Return the state of `layers`; `ranges` says which of them stand at each position of the model."""
        position_of = {names[layer]: position for position, which in enumerate(ranges) for layer in which}
        return cls(position_of, referred_to(layers) if len(ranges) > 1 else ())

    def add_layer(self, layer: str, module: nn.Module) -> None:
        """The built layer is `module`."""
        self._held[layer] = {}
        self._overlaps.add_layer(layer, module)
        if len(set(self._position_of.values())) < 2:
            return
        for holder in (*_inside(module), *_outside(module)):
            for key in self._keys(holder):
                self._held[layer].setdefault(key, holder)
                self._places.setdefault(key, set()).add(self._position_of[layer])

    def _keys(self, holder: StateHolder) -> Iterator[Any]:
        """Keys that are equal for the same thing: in this process, and, of integers and strings, on other ranks."""
        if isinstance(holder.value, _Variable):
            yield holder.value.key
            return
        yield self._numbers.get(id(holder.value), ("id", id(holder.value)))
        if holder.name is not None:
            yield f"value of {holder.name}"

    def facts(self) -> dict[str, Any]:
        """Return what the other ranks must know, in plain values."""
        places = {key: sorted(each) for key, each in self._places.items()}
        return {
            "digest": self._digest,
            "numbers": [[key, each] for key, each in places.items() if isinstance(key, int)],
            "globals": [[key, each] for key, each in places.items() if isinstance(key, str)],
            "memory": list(self._overlaps.names.items()),
        }

    def add(self, facts: Sequence[Mapping[str, Any]], tied: Sequence[Sequence[str]]) -> None:
        """Take what other ranks hold.

        Raises ConfigError for parameters and buffers of one memory that are not on the same ranks, and not `tied`.
        """
        alike = len({rank_facts["digest"] for rank_facts in facts}) == 1
        if alike:
            self._overlaps.require_together([dict(rank_facts["memory"]) for rank_facts in facts], tied)
            self._require_no_gradients([number for rank_facts in facts for number, _ in rank_facts["numbers"]])
        for rank_facts in facts:
            for key, places in (*rank_facts["globals"], *(rank_facts["numbers"] if alike else ())):
                self._places.setdefault(key, set()).update(places)

    def _require_no_gradients(self, held: Sequence[int]) -> None:
        """Raise ConfigError for a tensor that trains, is no parameter, and is `held` by two ranks."""
        twice = {number for number, count in Counter(held).items() if count > 1}
        for layer, holders in self._held.items():
            for key, holder in holders.items():
                value = holder.value  # one with a graph has been computed from others, as pruned weights are
                if key in twice and isinstance(value, Tensor) and value.requires_grad and value.is_leaf:
                    raise ConfigError(
                        f"'{layer}.{holder.path}' requires a gradient, and layers of two ranks hold it: make it an nn.Parameter "
                        "of both, which is then tied, and its gradient summed"
                    )

    def of(self, layers: Sequence[str]) -> list[tuple[str, StateHolder]]:
        """Return what these layers of one stage hold and layers of other stages hold too, each with the layer.

        Call it once all ranks have built their layers.
        """
        holders: dict[int, tuple[str, StateHolder]] = {}
        for layer in layers:
            for key, holder in self._held.get(layer, {}).items():
                if len(self._places[key]) > 1:
                    holders.setdefault(id(holder.value), (layer, holder))
        return list(holders.values())


class _Overlaps:
    """Parameters and buffers that are not one object and have memory in common.

    Attributes:
        names: number of such a tensor -> its name in a layer that is built here.
    """

    def __init__(self, values: Iterable[Any]) -> None:
        tensors: dict[int, Tensor] = {}
        for value in values:
            inside = (*value.parameters(), *value.buffers()) if isinstance(value, nn.Module) else (value,)
            tensors.update(
                (id(tensor), tensor) for tensor in inside if isinstance(tensor, Tensor) and _has_memory(tensor)
            )
        by_memory: dict[int, list[Tensor]] = {}
        for tensor in tensors.values():
            by_memory.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
        self._numbers: dict[int, int] = {}
        self._pairs: list[tuple[int, int]] = []
        self._alive: list[Tensor] = []
        for together in by_memory.values():
            extents = sorted(((*_extent(tensor), tensor) for tensor in together), key=itemgetter(0, 1))
            for at, (_, end, one) in enumerate(extents):
                for start, _, other in extents[at + 1 :]:
                    if start >= end:
                        break
                    self._pairs.append((self._number(one), self._number(other)))
        self.names: dict[int, str] = {}

    def _number(self, tensor: Tensor) -> int:
        self._alive.append(tensor)
        return self._numbers.setdefault(id(tensor), len(self._numbers))

    def add_layer(self, layer: str, module: nn.Module) -> None:
        for name, tensor in (*module.named_parameters(), *module.named_buffers()) if self._pairs else ():
            if id(tensor) in self._numbers:
                self.names.setdefault(self._numbers[id(tensor)], f"{layer}.{name}")

    def require_together(self, names: Sequence[Mapping[int, str]], tied: Sequence[Sequence[str]]) -> None:
        for one, other in self._pairs:
            ranks = [[rank for rank, held in enumerate(names) if number in held] for number in (one, other)]
            if not all(ranks) or ranks[0] == ranks[1]:
                continue
            pair = names[ranks[0][0]][one], names[ranks[1][0]][other]
            if not any(set(pair) <= set(group) for group in tied):
                raise ConfigError(
                    f"{pair[0]!r} and {pair[1]!r} are two tensors of one memory, which ranks do not share: in one process a "
                    "change of one changes the other; make them one nn.Parameter, which is then tied, or clone one of them"
                )


def _has_memory(tensor: Tensor) -> bool:
    return not is_lazy(tensor) and tensor.numel() > 0 and memory_of(tensor) is not None


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its storage between which a tensor's elements lie."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * tensor.element_size()
    return start, start + (int(last) + 1) * tensor.element_size()


class SharedChanges:
    """The state that a stage shares with others, before a forward.

    Args:
        by_value: compare values of tensors, too: some kernels change them and do not count it.
    """

    def __init__(self, holders: Sequence[tuple[str, StateHolder]], by_value: bool) -> None:
        self._before = [(layer, holder, _state(holder.value, by_value)) for layer, holder in holders]
        self._by_value = by_value

    def refuse(self) -> None:
        """Raise UsageError for what the forward has changed since."""
        for layer, holder, before in self._before:
            for name in _changes(holder, before, _state(holder.value, self._by_value)):
                path = ".".join(part for part in (holder.path, name) if part)
                raise UsageError(
                    f"the forward of layer {layer!r} changes {path!r}, which a layer of another stage shares: forwards of other "
                    "micro-batches run between the two stages, and on another rank it is another copy; give each stage its own, "
                    "or pass the value on, by name (Layer(..., writes=...) and reads=...) or as an output"
                )


def _inside(module: nn.Module) -> Iterator[StateHolder]:
    """The parts of a module, and what they hold."""
    for path, part in module.named_modules():
        yield StateHolder(part, path)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                yield StateHolder(buffer, f"{path}.{name}" if path else name)
    for value, path in AttributeState(module).reached():
        if not isinstance(value, nn.Module):
            yield StateHolder(value, path)


def _outside(module: nn.Module) -> Iterator[StateHolder]:
    """The variables that a module's code refers to by global names and in closures, and what they hold."""
    kinds = {kind: None for part in module.modules() for kind in type(part).mro() if not _is_library(kind)}
    functions = [f for kind in kinds for f in vars(kind).values() if isinstance(f, types.FunctionType)]
    seen: set[types.FunctionType] = set()
    while functions:
        function = functions.pop()
        if function in seen or _is_library(function):
            continue
        seen.add(function)
        for variable in _variables(function):
            value = variable()
            if isinstance(value, types.FunctionType):
                functions.append(value)
            elif isinstance(value, (nn.Module, nn.Parameter, *_LEAVES)):
                continue
            else:
                yield StateHolder(variable, variable.name, outside=True)
                if type(value) in CONTAINERS or is_object(value) or isinstance(value, Tensor):
                    name = variable.key if isinstance(variable.key, str) else None
                    yield StateHolder(value, variable.name, outside=True, name=name)


class _Variable:
    """A global variable, or one of a closure.

    Attributes:
        key: the same for the same variable, on every rank if it is a string.
    """

    def __init__(self, name: str, key: Any, get: Callable[[], Any]) -> None:
        self.name, self.key, self._get = name, key, get

    def __call__(self) -> Any:
        try:
            return self._get()
        except (ValueError, KeyError):  # not filled, or not there, yet
            return None


def _variables(function: types.FunctionType) -> Iterator[_Variable]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if name != "__class__":
            yield _Variable(name, ("id", id(cell)), partial(getattr, cell, "cell_contents"))
    names = function.__globals__
    for name in dict.fromkeys(_names_in(function.__code__)):
        if name in names:
            yield _Variable(name, f"{function.__module__}.{name}", partial(names.get, name))


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _is_library(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).partition(".")[0] in {"torch", "builtins", "pipeloom", "numpy", "abc"}


def _state(value: Any, by_value: bool) -> dict[str, Any]:
    """Name -> what it is now: a tensor with its version, and its values where asked for."""
    generator = generator_of(value)
    if generator is not None:
        return {"": generator.get()}
    if isinstance(value, _Variable):
        return {"": _mark(value(), by_value=False)}
    if isinstance(value, Tensor):
        return {"": _mark(value, by_value)}
    held = held_by(value)
    entries = held if isinstance(held, dict) else dict(enumerate(held))
    buffers = value._buffers if isinstance(value, nn.Module) else {}
    return {str(key): _mark(each, by_value) for key, each in (*entries.items(), *buffers.items())}


class _Mark(NamedTuple):
    value: Any
    version: int
    copy: Tensor | None


def _mark(value: Any, by_value: bool) -> _Mark:
    if not isinstance(value, Tensor) or value.is_inference():
        return _Mark(value, 0, None)
    return _Mark(value, value._version, value.detach().clone() if by_value else None)


def _changes(holder: StateHolder, before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """The names of what has other values.

    What was None, or not there, has been made only now, as caches are, and lists and dicts that grow keep a record, unless it
    is a part of a graph.
    """
    if generator_of(holder.value) is not None:
        if not same_state(before[""], now[""]):
            yield ""
        return
    missing = _Mark(None, 0, None)
    for name in {**before, **now}:
        old, new = before.get(name, missing), now.get(name, missing)
        graph = isinstance(new.value, Tensor) and new.value.requires_grad
        if new.value is None and holder.outside:
            continue
        if old.value is None:
            if graph and new.value is not None and not isinstance(holder.value, nn.Module):
                yield name
        elif _same(old, new) or (graph and isinstance(holder.value, nn.Module)):
            continue
        elif type(new.value) is int and (holder.outside or type(holder.value) in CONTAINERS):
            continue  # a count, for people
        elif not holder.outside or isinstance(new.value, (Tensor, float)):
            yield name


def _same(old: _Mark, new: _Mark) -> bool:
    if not isinstance(old.value, Tensor) or not isinstance(new.value, Tensor):
        return equal_values(old.value, new.value)
    if old.value is new.value:
        return old.version == new.version and (old.copy is None or new.copy is None or same_values(old.copy, new.copy))
    return same_tensor(old.value, new.value)
