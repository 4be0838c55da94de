"""Assembly: the stages of one rank, built, with their parameters under global names and their tied weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipeloom.errors import ConfigError
from pipeloom.runtime.faults import Faults
from pipeloom.runtime.layers import LayerSource, build_stage, split_layers
from pipeloom.runtime.options import RuntimeOptions
from pipeloom.runtime.rank import Loss, Rank
from pipeloom.runtime.specs import SpecBook
from pipeloom.runtime.stage import Stage
from pipeloom.runtime.ties import Tie, make_ties, share
from pipeloom.schedule.model import Schedule


@dataclass(frozen=True)
class Assembly:
    """What a rank holds.

    Attributes:
        rank: its stages and engine.
        modules: layer name -> module, in order of the stages.
        parameters: global name -> parameter; one tied within the rank is there once.
        buffers: global name -> buffer.
        ties: those with another holder on another rank -> the copy here.
        copies: names of parameters here whose first holder is another rank.
    """

    rank: Rank
    modules: dict[str, nn.Module]
    parameters: dict[str, nn.Parameter]
    buffers: dict[str, Tensor]
    ties: dict[Tie, nn.Parameter]
    copies: frozenset[str]


def assemble(
    layers: Sequence[LayerSource],
    schedule: Schedule,
    rank: int,
    sizes: Sequence[int] | None,
    tied: Sequence[Sequence[str]],
    loss: Loss,
    options: RuntimeOptions,
    device: torch.device,
) -> Assembly:
    """Builds the layers that `schedule` places on `rank`."""
    names = [str(getattr(layer, "name", at)) for at, layer in enumerate(layers)]
    if len(set(names)) != len(names):
        raise ConfigError(f"two layers are called {next(n for n in names if names.count(n) > 1)!r}; names must differ")
    ranges = split_layers(len(layers), schedule.positions, sizes)
    built = {s: build_stage(layers, ranges[schedule.position_of[s]], device) for s in schedule.stages_of[rank]}
    stages = {s: Stage(s, modules, options.deallocate) for s, modules in built.items()}
    modules = {n: m for part in built.values() for n, m in zip(part.names, part.modules, strict=True)}
    owner = {
        names[layer]: schedule.placement[stage]
        for route in schedule.routes[:1]
        for stage in route
        for layer in ranges[schedule.position_of[stage]]
    }
    across: dict[Tie, nn.Parameter] = {}
    copies: set[str] = set()
    for tie in make_ties(tied, owner):
        weight, first = share(tie, modules)
        if weight is not None and first is not None and len(tie.holders) > 1:
            across[tie] = weight
            if tie.holders[0] != rank:
                copies.add(first)
    buffers = {f"{name}.{inner}": value for name, module in modules.items() for inner, value in module.named_buffers()}
    engine = Rank(schedule, rank, stages, loss, SpecBook(schedule, options.shapes), Faults(options.fault, rank))
    return Assembly(engine, modules, unique_parameters(modules), buffers, across, frozenset(copies))


def unique_parameters(modules: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
    """Global name -> parameter; one that stands in several places is there once, under its first name."""
    seen: set[int] = set()
    parameters: dict[str, nn.Parameter] = {}
    for name, module in modules.items():
        for inner, parameter in module.named_parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                parameters[f"{name}.{inner}"] = parameter
    return parameters
