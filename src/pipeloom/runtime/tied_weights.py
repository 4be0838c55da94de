"""One weight in several places: tied weights, and the replicas of a schedule with two routes. Gradients are summed once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.errors import ConfigError, did_you_mean
from pipeloom.parallel.collectives import Tag, as_sent, goes_through_host

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
        if len(set(names)) < 2:
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


def values_by_name(modules: Mapping[str, nn.Module], method: str = "named_parameters") -> dict[str, Any]:
    """Return global name -> parameter (or buffer: "named_buffers") of these layers; one with several names under each."""
    return {
        f"{layer}.{name}": value
        for layer, module in modules.items()
        for name, value in getattr(module, method)(remove_duplicate=False)
    }


def unknown_names(ties: Sequence[Tie], modules: Mapping[str, nn.Module]) -> list[str]:
    """A sentence for each name in `ties` whose layer is among `modules` and has no such parameter."""
    problems = []
    for name in (name for tie in ties for name in tie.names):
        layer = layer_of(name, modules)
        known = [name] if layer is None else values_by_name({layer: modules[layer]})
        if name not in known:
            problems.append(f"tied: no parameter is called {name!r}{did_you_mean(name, known)}")
    return problems


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
    """Replace all copies among `modules` by one Parameter and return it, or None if none is there."""
    shared: nn.Parameter | None = None
    first: str | None = None
    for name in tie.names:
        layer = layer_of(name, modules)
        if layer is None:
            continue
        inner = name[len(layer) + 1 :]
        # `get_parameter` fails for modules of TorchScript.
        parameter = dict(modules[layer].named_parameters(remove_duplicate=False))[inner]
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
    marks = torch.tensor([float(part is not None) for part in parts], device=whole[0].device)
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
            works.append(call([tensor], other, Tag.TIED_WEIGHT))
    for work in works:  # only now: all transfers are under way, so no rank waits for one that waits itself
        work.wait()
    first, *others = (_unflatten(received[holder].to(whole[0].device), [*whole, marks]) for holder in holders)
    for terms in others:  # in place, in one of the copies
        for total, term in zip(first, terms, strict=True):
            total.add_(term)
    *sums, marks = first
    if all(part is not None for part in parts):
        return list(sums)
    return [each if mark else None for each, mark in zip(sums, marks.tolist(), strict=True)]


def _flatten(values: Sequence[Tensor]) -> Tensor:
    """Return the bytes of all values in one tensor."""
    return torch.cat([value.detach().resolve_conj().contiguous().view(-1).view(torch.uint8) for value in values])


def _unflatten(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    pieces = torch.split(flat, [value.nbytes for value in like])
    # A dtype cannot begin at every byte: a copy can.
    aligned = (p.clone() if p.storage_offset() % v.itemsize else p for p, v in zip(pieces, like, strict=True))
    return [piece.view(value.dtype).view(value.shape) for piece, value in zip(aligned, like, strict=True)]


Groups = list[tuple[str, ...]]


class SharedParameters:
    """Parameter objects of several layers, as far as one process can tell.

    Objects of the modules among `layers`, and of the modules and parameters to which factories refer directly (a closure, an
    argument), have the same key in every process, which runs the same program. Others have keys of their own rank.

    Args:
        layers: as given to the pipeline, before any is built.
        names: theirs.
    """

    def __init__(self, layers: Sequence[Any], names: Sequence[str]) -> None:
        self._objects: dict[str, nn.Parameter] = {}
        referred = [value for layer in layers for value in _referred(layer)]
        parameters = [
            p for value in referred for p in (value.parameters() if isinstance(value, nn.Module) else (value,))
        ]
        self._keys = {parameter: f"object {at}" for at, parameter in enumerate(dict.fromkeys(parameters))}
        for layer, name in zip(layers, names, strict=True):
            if isinstance(layer, nn.Module):
                self.add_layer(name, layer)

    def add_layer(self, name: str, module: nn.Module) -> None:
        """The layer `name` is `module`; call it before the module's parameters are moved or replaced."""
        for inner, parameter in values_by_name({name: module}).items():
            self._objects.setdefault(inner, parameter)

    def keys(self, rank: int) -> dict[str, str]:
        """Return name -> key of each object that has several names here or a key in every process."""
        counts = Counter(self._objects.values())
        named = [(name, p) for name, p in self._objects.items() if counts[p] > 1 or p in self._keys]
        return {name: self._keys.get(p, f"rank {rank} {id(p)}") for name, p in named}

    def require_tied(self, tied: Sequence[Sequence[str]], owners: Owners) -> None:
        """Raise ConfigError for one parameter that layers of several ranks get by other ways, and `tied` does not name.

        In one process it is one weight; where each rank has a process, each would train a copy.
        """
        for names in shared_groups([self.keys(0)]):
            holders = {owners[layer] for name in names if (layer := layer_of(name, owners)) is not None}
            parameter = self._objects[names[0]]
            known = parameter in self._keys or any({*names} <= {*group} for group in tied)
            if len(holders) > 1 and parameter.requires_grad and not known:
                raise ConfigError(
                    f"{' and '.join(map(repr, names))} are one parameter, which factories share, and on several processes each "
                    f"would train a copy: name them in tied=[{names!r}]"
                )

    def elsewhere(self, keys: Sequence[Mapping[str, str]], here: Mapping[str, Any]) -> dict[Tensor, str]:
        """Return parameters that only layers of other ranks hold -> their names there.

        Args:
            keys: of every rank of the pipeline.
            here: this rank's layers by name.
        """
        held = {p for name, p in self._objects.items() if layer_of(name, here) is not None}
        name_of = {key: name for each in reversed(keys) for name, key in reversed([*each.items()])}
        return {p: name_of[key] for p, key in self._keys.items() if key in name_of and p not in held}


def shared_groups(keys: Sequence[Mapping[str, str]]) -> Groups:
    """Return the names of parameters that are one object, from the `keys` of every rank of a pipeline."""
    by_key: dict[str, dict[str, None]] = {}
    for name, key in (item for each in keys for item in each.items()):
        by_key.setdefault(key, {})[name] = None
    return [tuple(names) for names in by_key.values() if len(names) > 1]


def _referred(layer: Any) -> list[Any]:
    """Return the modules and parameters that a layer is, or to which its factory refers directly."""
    build = layer if isinstance(layer, nn.Module) else getattr(layer, "build", layer)
    values = [build]
    if isinstance(build, partial):
        values = [build.func, *build.args, *build.keywords.values()]
    elif not isinstance(build, nn.Module):
        values = [cell.cell_contents for cell in getattr(build, "__closure__", None) or ()]
        values += getattr(build, "__defaults__", None) or ()
    return [value for value in values if isinstance(value, (nn.Module, nn.Parameter))]


def merged(groups: Sequence[Sequence[str]]) -> Groups:
    """Groups that have a name in common are one; names keep the order in which they come."""
    disjoint: Groups = []
    for names in groups:
        touched = [other for other in disjoint if not set(other).isdisjoint(names)]
        together = tuple(dict.fromkeys(name for group in (*touched, names) for name in group))
        disjoint = [*(other for other in disjoint if other not in touched), together]
    return disjoint
