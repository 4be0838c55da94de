"""Tied weights: one weight that several stages use, whose gradients are summed once a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.errors import ConfigError, did_you_mean

_TIE_TAG = 14


@dataclass(frozen=True)
class Tie:
    """One weight under several names; `holders`: the pipeline ranks that hold a copy, in the order of the names."""

    names: tuple[str, ...]
    holders: tuple[int, ...]


def make_ties(groups: Sequence[Sequence[str]], owner: Mapping[str, int]) -> tuple[Tie, ...]:
    """The ties whose weights exist; `owner` says which rank holds each layer (a name's owner is its longest layer prefix).

    Raises ConfigError for a name that no layer has.
    """
    ties = []
    for names in groups:
        ranks: list[int] = []
        for name in names:
            layers = [layer for layer in owner if name.startswith(f"{layer}.")]
            if not layers:
                raise ConfigError(f"tied: no layer holds {name!r}{did_you_mean(name.rsplit('.', 1)[0], owner)}")
            rank = owner[max(layers, key=len)]
            if rank not in ranks:
                ranks.append(rank)
        ties.append(Tie(tuple(names), tuple(ranks)))
    return tuple(ties)


def share(tie: Tie, modules: Mapping[str, nn.Module]) -> tuple[nn.Parameter | None, str | None]:
    """Makes the copies on this rank one Parameter; returns it with its first name here (None when there is none)."""
    shared: nn.Parameter | None = None
    first: str | None = None
    for name in tie.names:
        layer = max((m for m in modules if name.startswith(f"{m}.")), key=len, default=None)
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


def start_equal(tie: Tie, rank: int, weight: nn.Parameter, group: Any) -> None:
    """The first holder's values on every holder."""
    source = tie.holders[0]
    if rank == source:
        for work in [group.send([weight.detach()], to, _TIE_TAG) for to in tie.holders[1:]]:
            work.wait()
    else:
        buffer = torch.empty_like(weight)
        group.recv([buffer], source, _TIE_TAG).wait()
        with torch.no_grad():
            weight.copy_(buffer)


def sum_gradients(tie: Tie, rank: int, weight: nn.Parameter, group: Any) -> None:
    """Adds the holders' gradients, in the order of the holders, so that every copy gets bitwise the same sum."""
    own = weight.grad if weight.grad is not None else torch.zeros_like(weight)
    own = own.contiguous()
    others = [to for to in tie.holders if to != rank]
    sends = [group.send([own], to, _TIE_TAG) for to in others]
    received: dict[int, Tensor] = {rank: own}
    for origin in others:
        received[origin] = torch.empty_like(own)
        group.recv([received[origin]], origin, _TIE_TAG).wait()
    for work in sends:
        work.wait()
    total = received[tie.holders[0]].clone()
    for origin in tie.holders[1:]:
        total += received[origin]
    weight.grad = total
