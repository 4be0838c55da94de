"""One weight in several places: tied weights, and the replicas of a schedule with two routes. Gradients are summed once."""

from __future__ import annotations

import functools
import hashlib
import types
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeloom.errors import ConfigError, did_you_mean
from pipeloom.parallel.tags import Tag
from pipeloom.parallel.through_host import as_sent, goes_through_host

Owners = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Tie:
    """One weight under several names; `holders`: the pipeline ranks that hold a copy, in the order of the names."""

    names: tuple[str, ...]
    holders: tuple[int, ...]


def make_ties(groups: Sequence[Sequence[str]], owners: Owners) -> tuple[Tie, ...]:
    """Return the ties for the user's groups of names; `owners`: layer -> the ranks that hold it.

    Raises ConfigError for an entry that is not a group of names, and for a name that begins with no layer's.
    """
    ties = []
    for names in groups:
        if isinstance(names, str) or len(set(names)) < 2:
            raise ConfigError(
                f"tied: {names!r} is not a group of names; write the names of one weight together, "
                f"as tied=[('embed.weight', 'head.weight')]"
            )
        holders: dict[int, None] = {}
        for name in names:
            layer = layer_of(name, owners)
            if layer is None:
                raise ConfigError(f"tied: no layer holds {name!r}{did_you_mean(name.rsplit('.', 1)[0], owners)}")
            holders.update(dict.fromkeys(owners[layer]))
        ties.append(Tie(tuple(names), tuple(holders)))
    return tuple(ties)


def unknown_names(ties: Sequence[Tie], modules: Mapping[str, nn.Module]) -> list[str]:
    """A sentence for each name in `ties` whose layer is among `modules` and has no such parameter."""
    problems = []
    for name in (name for tie in ties for name in tie.names):
        layer = layer_of(name, modules)
        if layer is not None:
            known = [f"{layer}.{inner}" for inner, _ in modules[layer].named_parameters(remove_duplicate=False)]
            if name not in known:
                problems.append(f"tied: no parameter is called {name!r}{did_you_mean(name, known)}")
    return problems


def frozen_names(modules: Mapping[str, nn.Module]) -> list[str]:
    """The names of the parameters among `modules` that do not train."""
    return [
        f"{layer}.{inner}"
        for layer, module in modules.items()
        for inner, parameter in module.named_parameters(remove_duplicate=False)
        if not parameter.requires_grad
    ]


def replica_ties(modules: Mapping[str, nn.Module], owners: Owners, tied: Sequence[Tie]) -> tuple[Tie, ...]:
    """A tie for every parameter here of a layer that other ranks hold too, unless it is tied already."""
    tied_names = {name for tie in tied for name in tie.names}
    return tuple(
        Tie((f"{layer}.{inner}",), owners[layer])
        for layer, module in modules.items()
        if len(owners[layer]) > 1
        for inner, _ in module.named_parameters()
        if f"{layer}.{inner}" not in tied_names
    )


def layer_of(name: str, layers: Mapping[str, Any]) -> str | None:
    """The layer that a parameter's global name begins with."""
    return max((layer for layer in layers if name.startswith(f"{layer}.")), key=len, default=None)


def share(tie: Tie, modules: Mapping[str, nn.Module]) -> nn.Parameter | None:
    """Makes the copies among `modules` one Parameter and returns it; None when there is none."""
    shared: nn.Parameter | None = None
    first: str | None = None
    for name in tie.names:
        layer = layer_of(name, modules)
        if layer is None:
            continue
        inner = name[len(layer) + 1 :]
        parameter = dict(modules[layer].named_parameters(remove_duplicate=False))[
            inner
        ]  # get_parameter fails in TorchScript
        if shared is None:
            shared, first = parameter, name
        elif parameter.shape != shared.shape:
            raise ConfigError(f"tied: {first} is {list(shared.shape)} and {name} is {list(parameter.shape)}")
        else:
            path, _, leaf = inner.rpartition(".")
            setattr(modules[layer].get_submodule(path), leaf, shared)
    return shared


def by_holders(ties: Mapping[Tie, nn.Parameter]) -> dict[tuple[int, ...], list[nn.Parameter]]:
    """Holders -> the weights that they share and train, in an order that all of them know: that of the names."""
    groups: dict[tuple[int, ...], list[nn.Parameter]] = {}
    for tie, weight in sorted(ties.items(), key=lambda item: item[0].names):
        if weight.requires_grad:
            groups.setdefault(tie.holders, []).append(weight)
    return dict(sorted(groups.items()))


def start_equal(holders: tuple[int, ...], rank: int, weights: Sequence[nn.Parameter], group: Any) -> None:
    """The first holder's values on every holder."""
    flat = _flatten([weight.detach() for weight in weights])
    send_first(holders, rank, flat, group)
    if rank == holders[0]:
        return
    with torch.no_grad():
        for weight, values in zip(weights, _unflatten(flat, weights), strict=True):
            weight.copy_(values)


def send_first(holders: tuple[int, ...], rank: int, flat: Tensor, group: Any) -> None:
    """Writes the first holder's `flat` into that of every other holder."""
    values = flat.cpu() if goes_through_host(flat.device, group) else flat
    if rank == holders[0]:
        for work in [group.send([as_sent(values)], to, Tag.TIED_WEIGHT) for to in holders[1:]]:
            work.wait()
    else:
        group.recv([as_sent(values)], holders[0], Tag.TIED_WEIGHT).wait()
        if values is not flat:
            flat.copy_(values)


def sum_over(
    holders: tuple[int, ...], rank: int, like: Sequence[Tensor], parts: Sequence[Tensor | None], group: Any
) -> list[Tensor | None]:
    """The sum of each weight's gradient over the holders, added in their order: bitwise the same on each.

    A gradient that is None on every holder stays None; otherwise None counts as zeros.

    Args:
        like: of each gradient's shape and dtype, on every holder, also where there is none.
    """
    whole = [torch.zeros_like(each) if part is None else part for each, part in zip(like, parts, strict=True)]
    marks = torch.tensor([float(part is not None) for part in parts], device=whole[0].device).to(whole[0].dtype)
    flat = _flatten([*whole, marks])
    if goes_through_host(flat.device, group):
        flat = flat.cpu()
    received: dict[int, Tensor] = {rank: flat}
    works = []
    for other in holders:
        if other == rank:
            continue
        received[other] = torch.empty_like(flat)
        calls = [(group.send, flat), (group.recv, received[other])]
        # On NCCL a send ends when the other end receives, and calls between two ranks run one after the other.
        for call, tensor in calls if rank < other else reversed(calls):
            works.append(call([as_sent(tensor)], other, Tag.TIED_WEIGHT))
    for work in works:
        work.wait()
    total = received[holders[0]].clone()
    for origin in holders[1:]:
        total += received[origin]
    *sums, marks = _unflatten(total.to(whole[0].device), [*whole, marks])
    if all(part is not None for part in parts):
        return list(sums)
    return [each if mark else None for each, mark in zip(sums, marks.abs().tolist(), strict=True)]


def _flatten(values: Sequence[Tensor]) -> Tensor:
    """All values in one tensor, of the narrowest dtype that holds each of them exactly."""
    dtype = reduce(torch.promote_types, [value.dtype for value in values])
    return torch.cat([value.reshape(-1).to(dtype) for value in values])


def _unflatten(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    pieces = torch.split(flat, [value.numel() for value in like])
    return [_as(piece.reshape(value.shape), value.dtype).clone() for piece, value in zip(pieces, like, strict=True)]


def _as(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what `_flatten` widened, as it was: real numbers among complex ones have no imaginary part."""
    return (value.real if value.is_complex() and not dtype.is_complex else value).to(dtype)


_MOST_OBJECTS = 100_000  # searched in all layers together, without modules and parameters: more would take seconds
_OPAQUE = {
    "torch",
    "numpy",
    "builtins",
    "pydantic",
    "pydantic_core",
    "threading",
    "logging",
    "multiprocessing",
    "asyncio",
}

Groups = list[tuple[str, ...]]


class SharedParameters:
    """Parameters that several of `layers` share, as far as one process can tell.

    Args:
        layers: as given to the pipeline, before any is built.
        names: theirs.
    """

    def __init__(self, layers: Sequence[Any], names: Sequence[str]) -> None:
        self._layers = layers
        self._objects: dict[str, nn.Parameter] = {}
        self._built: list[nn.Module] = []
        objects = list(_objects(layers))
        self._lengths = {
            id(each.value): (each.value, len(each.value)) for each in objects if isinstance(each.value, list)
        }
        self._numbers = _numbers(objects)
        for layer, name in zip(layers, names, strict=True):
            if isinstance(layer, nn.Module):
                self._remember(name, layer)

    def add_layer(self, name: str, module: nn.Module) -> None:
        """The layer `name` is `module`; call it before the module's parameters are moved or replaced."""
        self._remember(name, module)
        self._built.append(module)

    def _remember(self, name: str, module: nn.Module) -> None:
        for inner, parameter in module.named_parameters(remove_duplicate=False):
            self._objects.setdefault(f"{name}.{inner}", parameter)

    def facts(self) -> dict[str, Any]:
        """Return what the other ranks must know, in plain values."""
        numbers = self._numbers
        return {
            "groups": [list(names) for names in _grouped({name: id(p) for name, p in self._objects.items()})],
            "digest": _digest(numbers),
            "numbers": {name: numbers[p] for name, p in self._objects.items() if p in numbers},
            "kept": self._kept(),
        }

    def _kept(self) -> list[tuple[str, str, bool]]:
        """(path, name, whether it belongs to a layer that is found there) of parameters that factories have made and kept."""
        names: dict[nn.Parameter, str] = {}
        for name, parameter in self._objects.items():
            if parameter not in self._numbers:
                names.setdefault(parameter, name)
        built = {id(part) for module in self._built for part in module.modules()}
        additions = []
        for holder in _objects(self._layers, self._added_to):
            value = holder.value
            if isinstance(value, nn.Parameter):
                inside: Iterable[tuple[str, nn.Parameter]] = [("", value)]
            elif isinstance(value, nn.Module) and not _collects(value, built):
                inside = value.named_parameters()
            else:
                continue
            is_layer = any(value is module for module in self._built)
            for inner, parameter in inside:
                if parameter in names:
                    path = f"{holder.path}:{inner} {tuple(parameter.shape)} {parameter.dtype}"
                    additions.append((path, names[parameter], is_layer))
        return additions

    def _added_to(self, value: Any) -> bool:
        """Return whether a list was made, or has become longer or shorter, while layers were built."""
        before = self._lengths.get(id(value))
        return isinstance(value, list) and (before is None or before[1] != len(value))

    def of_other_ranks(self, facts: Sequence[Mapping[str, Any]], here: Mapping[str, Any]) -> dict[nn.Parameter, str]:
        """Parameters that this process can reach and only layers of other ranks hold -> their names there.

        Args:
            facts: of every rank of the pipeline.
            here: this rank's layers by name.
        """
        names = {parameter: name for name, parameter in reversed(self._objects.items())}
        if _number_alike(facts):
            by_number = {number: parameter for parameter, number in self._numbers.items()}
            for rank_facts in facts:
                for name, number in rank_facts["numbers"].items():
                    names.setdefault(by_number[number], name)
        held = {p for name, p in self._objects.items() if layer_of(name, here) is not None}
        return {parameter: name for parameter, name in names.items() if parameter not in held}


def _number_alike(facts: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the ranks have found the same parameter objects, so that their numbers mean the same."""
    return len({each["digest"] for each in facts}) == 1


def shared_groups(facts: Sequence[Mapping[str, Any]]) -> Groups:
    """Names of parameters that are one object, from the `facts` of every rank of a pipeline."""
    groups: Groups = [tuple(names) for rank_facts in facts for names in rank_facts["groups"]]
    if _number_alike(facts):
        groups += _grouped({name: number for rank_facts in facts for name, number in rank_facts["numbers"].items()})
    paths: dict[str, dict[str, bool]] = {}
    for rank_facts in facts:
        for path, name, is_layer in rank_facts["kept"]:
            paths.setdefault(path, {})[name] = is_layer
    # where every rank has found a layer of its own, each of them was kept there in its turn
    groups += [tuple(names) for names in paths.values() if len(names) > 1 and not all(names.values())]
    return merged(groups)


def merged(groups: Sequence[Sequence[str]]) -> Groups:
    """Groups that have a name in common are one; names keep the order in which they come."""
    disjoint: list[dict[str, None]] = []
    for names in groups:
        together = dict.fromkeys(names)
        apart: list[dict[str, None]] = []
        touched: list[dict[str, None]] = []
        for other in disjoint:
            (touched if together.keys() & other.keys() else apart).append(other)
        for other in reversed(touched):
            together = {**other, **together}
        disjoint = [*apart, together]
    return [tuple(names) for names in disjoint]


def _grouped(keys: Mapping[str, int]) -> Groups:
    by_key: dict[int, list[str]] = {}
    for name, key in keys.items():
        by_key.setdefault(key, []).append(name)
    return [tuple(names) for names in by_key.values() if len(names) > 1]


def _digest(numbers: Mapping[nn.Parameter, int]) -> str:
    shapes = [(tuple(parameter.shape), str(parameter.dtype)) for parameter in numbers]
    return hashlib.sha256(repr(shapes).encode()).hexdigest()[:16]


class _Found(NamedTuple):
    """An object that the layers refer to, and by which attribute names, keys and positions it is reached first."""

    path: str
    value: Any


def _numbers(objects: Iterable[_Found]) -> dict[nn.Parameter, int]:
    """Parameter object -> its number among all that were found."""
    numbers: dict[nn.Parameter, int] = {}
    for holder in objects:
        if isinstance(holder.value, nn.Parameter):
            numbers.setdefault(holder.value, len(numbers))
        elif isinstance(holder.value, nn.Module):
            for parameter in holder.value.parameters():
                numbers.setdefault(parameter, len(numbers))
    return numbers


def referred_to(layers: Sequence[Any]) -> list[Any]:
    """Return every object that `layers`, or their factories, refer to, once, in an order that every process finds alike."""
    return list({id(each.value): each.value for each in _objects(layers)}.values())


def _collects(module: nn.Module, built: Container[int]) -> bool:
    """Return whether a module that is no part of a built layer holds parts of some, as a list of all layers does."""
    return id(module) not in built and any(id(part) in built for part in module.modules())


def _objects(layers: Sequence[Any], leave_out: Callable[[Any], bool] = lambda value: False) -> Iterator[_Found]:
    """Every object that `layers`, or their factories, refer to, in an order that every process finds alike."""
    seen: dict[int, Any] = {}  # the objects stay alive, so that no id is used twice
    waiting = [_Found(f"layer {at}", layer) for at, layer in enumerate(layers)][::-1]
    while waiting and len(seen) < _MOST_OBJECTS:
        path, value = waiting.pop()
        if isinstance(value, (nn.Parameter, nn.Module)):
            yield _Found(path, value)  # under every path
        elif id(value) not in seen and not leave_out(value):
            seen[id(value)] = value
            yield _Found(path, value)
            waiting += [_Found(f"{path} {step}", each) for step, each in _references(value)][::-1]


def _references(value: Any) -> Iterator[tuple[Any, Any]]:
    """(name, key or position, object) of what `value` refers to, in an order that every process finds alike."""
    if isinstance(value, (list, tuple)):
        yield from enumerate(value)
    elif isinstance(value, dict):
        yield from (
            (repr(key) if isinstance(key, (str, int)) else at, each) for at, (key, each) in enumerate(value.items())
        )
    elif isinstance(value, functools.partial):
        yield from (("function", value.func), *enumerate(value.args), *value.keywords.items())
    elif isinstance(value, types.MethodType):
        yield from (("self", value.__self__), ("function", value.__func__))
    elif isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:  # not filled yet
                continue
        yield from enumerate(value.__defaults__ or ())
        yield from (value.__kwdefaults__ or {}).items()
        if _root(value) not in _OPAQUE:
            names = dict.fromkeys(_global_names(value.__code__))
            yield from ((name, value.__globals__[name]) for name in names if name in value.__globals__)
    elif not isinstance(value, (type, types.ModuleType)) and _root(type(value)) not in _OPAQUE:
        yield from getattr(value, "__dict__", {}).items()


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


def _root(value: Any) -> str:
    return str(getattr(value, "__module__", "")).partition(".")[0]
