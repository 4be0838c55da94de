"""Assembly: the stages of one rank, built, with their parameters under global names and their tied weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from pipeloom.errors import ConfigError
from pipeloom.ops.deferred import Desk
from pipeloom.parallel.buckets import Held
from pipeloom.parallel.data import AFTER_TIES
from pipeloom.parallel.laid import Laid, layout_of
from pipeloom.runtime.deferral import HeadDeferral
from pipeloom.runtime.layers import LayerSource, build_stage, split_layers
from pipeloom.runtime.memory import keep_freed_memory
from pipeloom.runtime.options import RuntimeOptions
from pipeloom.runtime.overlap import Lane
from pipeloom.runtime.rank import Loss, Rank
from pipeloom.runtime.stage import Stage
from pipeloom.runtime.ties import Tie, make_ties, replica_ties, share
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
        held: the parameters with their layout and stages, for their reduction.
        desks: those that the linear layers here write to.
    """

    rank: Rank
    modules: dict[str, nn.Module]
    parameters: dict[str, nn.Parameter]
    buffers: dict[str, Tensor]
    ties: dict[Tie, nn.Parameter]
    copies: frozenset[str]
    held: tuple[Held, ...]
    desks: tuple[Desk, ...]


@dataclass(frozen=True)
class Thread:
    """What the ranks of one thread share: the layers built so far (replicas of a layer are one module), and the desks.

    `head`: the desk of the last layer, where its weight gradients may wait.
    """

    built: dict[int, nn.Module] = field(default_factory=dict)
    desk: Desk = field(default_factory=Desk)
    head: Desk = field(default_factory=Desk)


def assemble(
    layers: Sequence[LayerSource],
    schedule: Schedule,
    rank: int,
    sizes: Sequence[int] | None,
    tied: Sequence[Sequence[str]],
    loss: Loss,
    options: RuntimeOptions,
    device: torch.device,
    thread: Thread | None = None,
) -> Assembly:
    """Builds the layers that `schedule` places on `rank`; `thread` is given where several ranks share one."""
    if device.type == "cpu":
        keep_freed_memory()
    names = [str(getattr(layer, "name", at)) for at, layer in enumerate(layers)]
    if len(set(names)) != len(names):
        raise ConfigError(f"two layers are called {next(n for n in names if names.count(n) > 1)!r}; names must differ")
    ranges = split_layers(len(layers), schedule.positions, sizes)
    shop = thread if thread is not None else Thread()
    shop.desk.in_place = schedule.splits_backward
    lane = Lane(device, options.trace)
    deferral = None if options.head_deferral is None else HeadDeferral(options.head_deferral, shop.head)
    ends = {route[-1] for route in schedule.routes}
    stages = {
        s: Stage(
            s,
            build_stage(layers, ranges[schedule.position_of[s]], device, shop.built, options.recompute),
            options.deallocate,
            shop.desk,
            schedule.splits_backward,
            lane,
            deferral if s in ends else None,
        )
        for s in schedule.stages_of[rank]
    }
    modules = {n: m for stage in stages.values() for n, m in zip(stage.layers.names, stage.modules, strict=True)}
    owners: dict[str, tuple[int, ...]] = {}
    for route in schedule.routes:
        for stage in route:
            for layer in ranges[schedule.position_of[stage]]:
                known = owners.get(names[layer], ())
                place = schedule.placement[stage]
                owners[names[layer]] = known if place in known else (*known, place)
    across: dict[Tie, nn.Parameter] = {}
    copies: set[str] = set()
    asked = make_ties(tied, owners)
    for tie in (*asked, *replica_ties(modules, owners, asked)):
        weight, first = share(tie, modules)
        if weight is not None and first is not None and len(tie.holders) > 1:
            across[tie] = weight
            if tie.holders[0] != rank:
                copies.add(first)
    buffers = {f"{name}.{inner}": value for name, module in modules.items() for inner, value in module.named_buffers()}
    engine = Rank(schedule, rank, stages, loss, options, lane)
    engine.deferral = deferral if ends & stages.keys() else None
    parameters = unique_parameters(modules)
    held = _held(parameters, modules, stages, across)
    desks = (shop.desk, shop.head)
    return Assembly(engine, modules, parameters, buffers, across, frozenset(copies), held, desks)


def _held(
    parameters: Mapping[str, nn.Parameter],
    modules: Mapping[str, nn.Module],
    stages: Mapping[int, Stage],
    across: Mapping[Tie, nn.Parameter],
) -> tuple[Held, ...]:
    """What the reduction of gradients asks of each parameter. One that other pipeline ranks hold too is summed there first."""
    layouts: dict[nn.Parameter, Laid] = {}
    for module in modules.values():
        inner = layout_of(module)
        for name, parameter in module.named_parameters():
            layouts.setdefault(parameter, inner[name])
    adders: dict[nn.Parameter, list[int]] = {}
    for index, stage in sorted(stages.items()):
        for module in stage.modules:
            for parameter in module.parameters():
                adders.setdefault(parameter, []).append(index)
    for parameter in across.values():
        adders[parameter] = [AFTER_TIES]
    return tuple(Held(name, p, tuple(dict.fromkeys(adders[p])), layouts[p]) for name, p in parameters.items())


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
