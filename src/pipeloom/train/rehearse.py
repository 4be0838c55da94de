"""Rehearsal of a schedule: real processes, transports and messages, and emulated computation of given costs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeloom.runtime import Pipeline, RuntimeOptions
from pipeloom.schedule import Costs, Schedule, Timeline, simulate
from pipeloom.schedule.check import TransportName
from pipeloom.schedule.segments import LayerSegments, PhaseTimes, SegmentCosts
from pipeloom.train.emulated import Clock, EmulatedBlock, EmulatedLayer

if TYPE_CHECKING:
    from pipeloom.train.workers.context import WorkerContext


@dataclass(frozen=True)
class Rehearsal:
    """A rehearsal's schedule and settings.

    Attributes:
        schedule: the schedule, already checked.
        costs: costs of a stage; those of a pair follow from `all_to_all`. `message` is the bytes of each message.
        unit: seconds that a cost of 1 takes.
        steps: number of recorded steps; one step that is not recorded precedes them.
        slow: stage -> factor by which its emulated times exceed its costs, to show the effect of a slow stage.
        transport: name of the transport that carries the messages.
    """

    schedule: Schedule
    costs: Costs
    unit: float
    steps: int = 8
    slow: Mapping[int, float] = field(default_factory=dict)
    transport: TransportName = "auto"

    @property
    def communicates(self) -> bool:
        """Return whether any stage has all-to-all costs, which pairs can hide."""
        return any(self.costs.per_stage("all_to_all", self.schedule.stages))

    @property
    def seconds(self) -> Costs:
        """The costs in seconds; the costs of pairs follow from the emulated segments."""
        costs = replace(self.costs.scaled(self.unit), activation=self.costs.activation)
        if not self.communicates:
            return costs
        others = {name: getattr(costs, name) for name in ("activation", "held", "microbatch", "message")}
        return SegmentCosts(tuple((layer,) for layer in self._segments())).costs(**others)

    def simulated(self) -> Timeline:
        """Return the timeline simulated with the costs, in seconds; messages take no time in it."""
        return simulate(self.schedule, self.seconds)

    def work(self) -> list[float]:
        """Return stage -> the sum of its F, I and W costs, in seconds."""
        stages = self.schedule.stages
        rows = [self.costs.per_stage(name, stages) for name in ("forward", "input_grad", "weight_grad")]
        return [self.unit * sum(column) for column in zip(*rows, strict=True)]

    def layers(self, rank: int, clock: Clock) -> list[Any]:
        """Return the layer of each stage position, as `Pipeline` takes them on this rank."""
        stages = {self.schedule.position_of[stage]: stage for stage in reversed(self.schedule.stages_of[rank])}
        segments = self._segments()

        def build(position: int) -> nn.Module:
            stage = stages[position]
            factor = self.slow.get(stage, 1.0)
            part = segments[stage]
            if self.communicates:
                slowed = replace(part, attention=_times(part.attention, factor), experts=_times(part.experts, factor))
                return EmulatedBlock(clock, slowed, factors=self.costs.microbatch)
            return EmulatedLayer(clock, _times(part.attention, factor), self.costs.microbatch)

        return [_Factory(f"stage.{position}", partial(build, position)) for position in range(self.schedule.positions)]

    def _segments(self) -> list[LayerSegments]:
        """Return stage -> its segments in seconds; without an all-to-all, all of the time is in the attention segment."""
        stages = self.schedule.stages
        names = ("forward", "input_grad", "weight_grad", "all_to_all")
        layers = []
        for f, i, w, share in zip(*(self.costs.per_stage(name, stages) for name in names), strict=True):
            f, i, w = f * self.unit, i * self.unit, w * self.unit
            if not self.communicates:
                layers.append(LayerSegments(attention=PhaseTimes(f, i, w), experts=PhaseTimes(0, 0, 0)))
                continue
            half = PhaseTimes((1 - share) * f / 2, (1 - share) * i / 2, w / 2)
            there, back = share * f / 2, share * i / 2
            layers.append(LayerSegments(half, half, there, there, back, back))
        return layers


@dataclass(frozen=True)
class _Factory:
    """Builds a layer; its name is the prefix of the layer's parameters."""

    name: str
    build: Any

    def __call__(self) -> nn.Module:
        layer: nn.Module = self.build()
        return layer


def _times(times: PhaseTimes, factor: float) -> PhaseTimes:
    return PhaseTimes(*(factor * time for time in times))


def run(rehearsal: Rehearsal, context: WorkerContext) -> tuple[Timeline, ...]:
    """Run the rehearsal on this worker; return its recorded steps, in seconds, the same on every rank."""
    schedule, device = rehearsal.schedule, context.device
    options = RuntimeOptions(
        transport=rehearsal.transport,
        device=device,
        timeout=patience(rehearsal),
        watchdog=context.watchdog,
        trace=device.type == "cuda",
    )
    clock = Clock(device)
    pipeline = Pipeline(rehearsal.layers(context.rank, clock), schedule, loss=_loss, options=options)
    context.close_to_strangers()
    batch = torch.ones(schedule.microbatches, max(1, math.ceil(rehearsal.costs.message / 4)), device=device)
    recorded = []
    for step in range(rehearsal.steps + 1):
        if dist.is_initialized():
            with pipeline.waiting("the other ranks before a step"):
                dist.barrier()
        pipeline.step(batch, batch)
        timeline = pipeline.timeline()
        if step:
            recorded.append(timeline)
    pipeline.close()
    return tuple(recorded)


def patience(rehearsal: Rehearsal) -> float:
    """Return the seconds without progress after which a rank counts as stuck: at least 20 simulated steps."""
    return max(60.0, 20.0 * rehearsal.simulated().makespan)


def _loss(output: Tensor, targets: Tensor) -> Tensor:
    return output.mean()
