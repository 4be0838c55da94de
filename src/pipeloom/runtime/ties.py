"""One weight in several places: tied weights, and the replicas of a schedule with two routes. Gradients are summed once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.errors import ConfigError, did_you_mean

_TIE_TAG = 14
Owners = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Tie:
    """One weight under several names; `holders`: the pipeline ranks that hold a copy, in the order of the names."""

    names: tuple[str, ...]
    holders: tuple[int, ...]


def make_ties(groups: Sequence[Sequence[str]], owners: Owners) -> tuple[Tie, ...]:
    """The ties that a user asks for; `owners` says which ranks hold each layer.

    Raises ConfigError for a name that no layer has.
    """
    ties = []
    for names in groups:
        holders: dict[int, None] = {}
        for name in names:
            layer = layer_of(name, owners)
            if layer is None:
                raise ConfigError(f"tied: no layer holds {name!r}{did_you_mean(name.rsplit('.', 1)[0], owners)}")
            holders.update(dict.fromkeys(owners[layer]))
        ties.append(Tie(tuple(names), tuple(holders)))
    return tuple(ties)


def replica_ties(modules: Mapping[str, nn.Module], owners: Owners, tied: Sequence[Tie]) -> tuple[Tie, ...]:
    """A tie for every parameter here of a layer that other ranks hold too, unless it is tied already."""
    taken = {name for tie in tied for name in tie.names}
    return tuple(
        Tie((f"{layer}.{inner}",), owners[layer])
        for layer, module in modules.items()
        if len(owners[layer]) > 1
        for inner, _ in module.named_parameters()
        if f"{layer}.{inner}" not in taken
    )


def layer_of(name: str, layers: Mapping[str, Any]) -> str | None:
    """The layer that a parameter's global name begins with."""
    return max((layer for layer in layers if name.startswith(f"{layer}.")), key=len, default=None)


def share(tie: Tie, modules: Mapping[str, nn.Module]) -> tuple[nn.Parameter | None, str | None]:
    """Makes the copies among `modules` one Parameter; returns it with its first name (None when there is none)."""
    shared: nn.Parameter | None = None
    first: str | None = None
    for name in tie.names:
        layer = layer_of(name, modules)
        if layer is None:
            continue
        path, _, leaf = name[len(layer) + 1 :].rpartition(".")
        home = modules[layer].get_submodule(path)
        own = home.get_parameter(leaf)
        if shared is None:
            shared, first = own, name
        elif own.shape != shared.shape:
            raise ConfigError(f"tied: {first} is {list(shared.shape)} and {name} is {list(own.shape)}")
        else:
            setattr(home, leaf, shared)
    return shared, first


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
    if rank == holders[0]:
        for work in [group.send([flat], to, _TIE_TAG) for to in holders[1:]]:
            work.wait()
        return
    group.recv([flat], holders[0], _TIE_TAG).wait()
    with torch.no_grad():
        for weight, values in zip(weights, _unflatten(flat, weights), strict=True):
            weight.copy_(values)


def sum_over(holders: tuple[int, ...], rank: int, parts: Sequence[Tensor], group: Any) -> list[Tensor]:
    """The sum of each tensor over the holders, added in their order: bitwise the same on each."""
    own = _flatten(parts)
    others = [to for to in holders if to != rank]
    sends = [group.send([own], to, _TIE_TAG) for to in others]
    received: dict[int, Tensor] = {rank: own}
    for origin in others:
        received[origin] = torch.empty_like(own)
        group.recv([received[origin]], origin, _TIE_TAG).wait()
    for work in sends:
        work.wait()
    total = received[holders[0]].clone()
    for origin in holders[1:]:
        total += received[origin]
    return _unflatten(total, parts)


def _flatten(values: Sequence[Tensor]) -> Tensor:
    return torch.cat([value.reshape(-1).to(values[0].dtype) for value in values])


def _unflatten(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    pieces = torch.split(flat, [value.numel() for value in like])
    return [piece.reshape(value.shape).to(value.dtype).clone() for piece, value in zip(pieces, like, strict=True)]
