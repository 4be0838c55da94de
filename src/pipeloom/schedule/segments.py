"""Segments: a stage's F, I and W on two resources, computation and communication, and the gain from overlapping them.

A layer computes attention and experts; its tokens are sent to the experts (dispatch) and back (combine). An overlapped pair
runs one micro-batch's forward and another's backward, layer pair by layer pair, each resource in this order:

    computation     F.attention  B.experts  W.experts  F.experts  B.attention  W.attention
    communication   B.combine  F.dispatch  B.dispatch  F.combine

A segment starts when its resource is free and what it needs has ended. So the times of pairs follow from the layers' times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import add
from typing import Any, Literal, NamedTuple

from pipeloom.errors import UsageError
from pipeloom.schedule.actions import Resource
from pipeloom.schedule.costs import Costs


class PhaseTimes(NamedTuple):
    """Forward, input gradient and weight gradient of one part of a layer."""

    forward: float = 1.0
    input_grad: float = 1.0
    weight_grad: float = 1.0


UNIT = PhaseTimes()


@dataclass(frozen=True)
class LayerSegments:
    """Times of one layer's segments for one micro-batch, in any one unit.

    Attributes:
        attention: computation before the dispatch; all of a layer that has no experts.
        experts: computation between dispatch and combine.
        dispatch, combine: the forward's all-to-alls.
        dispatch_backward, combine_backward: the backward's; None: as long as the forward's.

    Raises:
        UsageError: a negative or not finite time.
    """

    attention: PhaseTimes = UNIT
    experts: PhaseTimes = UNIT
    dispatch: float = 0.0
    combine: float = 0.0
    dispatch_backward: float | None = None
    combine_backward: float | None = None

    def __post_init__(self) -> None:
        talks = (self.dispatch, self.combine, self.dispatch_backward, self.combine_backward)
        for time in (*self.attention, *self.experts, *(talk for talk in talks if talk is not None)):
            if not math.isfinite(time) or time < 0:
                raise UsageError(f"a segment's time is {time}; it must be a finite number of at least 0")

    @property
    def backward_talk(self) -> tuple[float, float]:
        """(combine's, dispatch's) backward, in the order in which they run."""
        combine = self.combine if self.combine_backward is None else self.combine_backward
        return combine, self.dispatch if self.dispatch_backward is None else self.dispatch_backward


class ScheduledSegment(NamedTuple):
    """One segment as it ran: `name` as in the module's order, its layer (from the stage's first), and when."""

    name: str
    layer: int
    resource: Resource
    start: float
    end: float


@dataclass
class _Resources:
    """Both resources: the time from which each is free, and the segments that have run."""

    free: dict[Resource, float] = field(default_factory=lambda: {"computation": 0.0, "communication": 0.0})
    done: list[ScheduledSegment] = field(default_factory=list)

    def run(self, name: str, layer: int, resource: Resource, time: float, after: float) -> float:
        """Run a segment from `after` on; return its end. One that takes no time is not recorded and delays nothing."""
        if time == 0:
            return after
        start = max(self.free[resource], after)
        self.free[resource] = start + time
        self.done.append(ScheduledSegment(name, layer, resource, start, start + time))
        return start + time


LayerSequence = Sequence[LayerSegments]
WeightGradMode = Literal["split", "fused", "later"]


def run_block(
    forward: LayerSequence, backward: LayerSequence, weights: WeightGradMode = "split"
) -> tuple[ScheduledSegment, ...]:
    """One block on two resources: an overlapped pair, or a forward or a backward alone where the other is empty.

    Args:
        forward: the layers of the stage that goes forward, first to last.
        backward: those of the stage that goes backward, first to last; they run from the last on.
        weights: `"split"`: each W after its I, beside the all-to-all that I starts; `"fused"`: I and W are one, and the
            all-to-all waits for both; `"later"`: no W (a pair F|I).

    Returns:
        The segments, in the order in which each resource ran them.
    """
    resources = _Resources()
    output = gradient = 0.0
    last = len(backward) - 1
    for turn in range(max(len(forward), len(backward))):
        ahead = forward[turn] if turn < len(forward) else None
        back = backward[last - turn] if turn <= last else None
        output, gradient = _layer_pair(resources, (ahead, back), (turn, last - turn), (output, gradient), weights)
    return tuple(resources.done)


def _layer_pair(
    resources: _Resources,
    layers: tuple[LayerSegments | None, LayerSegments | None],
    at: tuple[int, int],
    ready: tuple[float, float],
    weights: WeightGradMode,
) -> tuple[float, float]:
    """Run one layer forward and one backward, either may be None; return when the output and the gradient are complete."""
    ahead, back = layers
    output, gradient = ready
    run = resources.run
    fused = weights == "fused"

    def back_through(name: str, times: PhaseTimes, after: float) -> float:
        spent = times.input_grad + (times.weight_grad if fused else 0.0)
        end = run(f"B.{name}", at[1], "computation", spent, after)
        if weights == "split":
            run(f"W.{name}", at[1], "computation", times.weight_grad, end)
        return end

    if ahead is not None:
        output = run("F.attention", at[0], "computation", ahead.attention.forward, output)
    if back is not None:
        gradient = run("B.combine", at[1], "communication", back.backward_talk[0], gradient)
    if ahead is not None:
        output = run("F.dispatch", at[0], "communication", ahead.dispatch, output)
    if back is not None:
        gradient = back_through("experts", back.experts, gradient)
    if ahead is not None:
        output = run("F.experts", at[0], "computation", ahead.experts.forward, output)
    if back is not None:
        gradient = run("B.dispatch", at[1], "communication", back.backward_talk[1], gradient)
        gradient = back_through("attention", back.attention, gradient)
    if ahead is not None:
        output = run("F.combine", at[0], "communication", ahead.combine, output)
    return output, gradient


def length(block: Sequence[ScheduledSegment]) -> float:
    """The time from the block's start to its last end."""
    return max((segment.end for segment in block), default=0.0)


def exposed(block: Sequence[ScheduledSegment]) -> float:
    """The block's time in which nothing computes: all-to-all that is not hidden."""
    return length(block) - sum(s.end - s.start for s in block if s.resource == "computation")


@dataclass(frozen=True)
class SegmentCosts:
    """The layers of every stage; one stage given stands for all.

    Attributes:
        stages: stage -> its layers.
        split: whether W is cut from I inside a block, to run beside I's all-to-all.
    """

    stages: tuple[tuple[LayerSegments, ...], ...]
    split: bool = True

    @classmethod
    def uniform(cls, layer: LayerSegments, layers: int = 1, split: bool = True) -> SegmentCosts:
        """Every stage of `layers` such layers."""
        return cls(((layer,) * layers,), split)

    def pair(self, forward: int, backward: int, weights: bool = True) -> float:
        """Time of F of one stage with B of another; without `weights`, of F|I."""
        return length(run_block(self.stages[forward], self.stages[backward], self._weights if weights else "later"))

    @property
    def _weights(self) -> WeightGradMode:
        return "split" if self.split else "fused"

    def costs(self, **others: Any) -> Costs:
        """F, I, W, B alone, F|B, F|I and the share of all-to-all, from the segments; `others`: all else of `Costs` (p2p ...).

        F and I alone are their segments one after the other; B alone hides all-to-all behind W where `split`. `all_to_all` is
        the communication's share of F + I.
        """
        forward = [length(run_block(layers, ())) for layers in self.stages]
        input_grad = [length(run_block((), layers, "later")) for layers in self.stages]
        talk = [sum(x.dispatch + x.combine + sum(x.backward_talk) for x in layers) for layers in self.stages]
        whole = map(add, forward, input_grad)
        count = range(len(self.stages))
        times: dict[str, Sequence[Any]] = {
            "forward": forward,
            "input_grad": input_grad,
            "weight_grad": [
                sum(x.attention.weight_grad + x.experts.weight_grad for x in layers) for layers in self.stages
            ],
            "backward": [length(run_block((), layers, self._weights)) for layers in self.stages],
            "all_to_all": [moved / time if time else 0.0 for moved, time in zip(talk, whole, strict=True)],
            "pair": [tuple(self.pair(s, t) for t in count) for s in count],
            "pair_split": [tuple(self.pair(s, t, False) for t in count) for s in count],
        }
        return replace(Costs(**others), **{name: _spread(values) for name, values in times.items()})


def _spread(values: Sequence[Any]) -> Any:
    """One value per stage; one stage's value as a number."""
    if len(values) > 1:
        return tuple(values)
    return values[0][0] if isinstance(values[0], tuple) else values[0]
