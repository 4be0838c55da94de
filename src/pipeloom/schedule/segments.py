"""Segments: a stage's F, I and W on computation and links, and the gain from overlapping them.

A layer computes attention and experts; its tokens are sent to the experts (dispatch) and back (combine). An overlapped pair
runs one micro-batch's forward and another's backward, layer pair by layer pair, each resource in this order:

    computation     F.attention  B.experts  W.experts  F.experts  B.attention  W.attention
    communication   B.combine  F.dispatch  B.dispatch  F.combine

A segment starts when its resource is free and what it needs has ended. So the times of pairs follow from the layers' times.
In chunks of its tokens a layer sends all of them at once, and computes the experts of each as soon as it has come. With two
levels each all-to-all has a hop between nodes and one inside a node, on links of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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

    def times(self, factor: float) -> PhaseTimes:
        """Return the times multiplied by a factor."""
        return PhaseTimes(*(factor * time for time in self))


UNIT = PhaseTimes()


@dataclass(frozen=True)
class LayerSegments:
    """Times of one layer's segments for one micro-batch, in any one unit.

    Attributes:
        attention: computation before the dispatch; all of a layer that has no experts.
        experts: computation between dispatch and combine.
        dispatch, combine: the forward's all-to-alls; with two levels, their hops between nodes.
        dispatch_backward, combine_backward: the backward's; None: as long as the forward's.
        inside: each all-to-all's hop inside a node, on a link of its own; 0: there is one level.
        chunks: equal parts of the tokens, whose all-to-alls run beside the experts of the others; times are those of all chunks.

    Raises:
        UsageError: a negative or not finite time, or fewer chunks than one.
    """

    attention: PhaseTimes = UNIT
    experts: PhaseTimes = UNIT
    dispatch: float = 0.0
    combine: float = 0.0
    dispatch_backward: float | None = None
    combine_backward: float | None = None
    inside: float = 0.0
    chunks: int = 1

    def __post_init__(self) -> None:
        talks = (self.dispatch, self.combine, self.dispatch_backward, self.combine_backward, self.inside)
        for time in (*self.attention, *self.experts, *(talk for talk in talks if talk is not None)):
            if not math.isfinite(time) or time < 0:
                raise UsageError(f"a segment's time is {time}; it must be a finite number of at least 0")
        if self.chunks < 1:
            raise UsageError(f"a layer's chunks are {self.chunks}; nearest: 1")

    @property
    def exchanges(self) -> bool:
        """Return whether the layer sends tokens to experts."""
        return any((*self.experts, self.dispatch, self.combine, *self.backward_talk, self.inside))

    def times(self, factor: float) -> LayerSegments:
        """Return the segments with all times multiplied, those of the backward given."""
        back, there = (factor * talk for talk in self.backward_talk)
        talks = factor * self.dispatch, factor * self.combine, there, back, factor * self.inside
        return LayerSegments(self.attention.times(factor), self.experts.times(factor), *talks, self.chunks)

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


LayerSequence = Sequence[LayerSegments]
WeightGradMode = Literal["split", "fused", "later"]

_Step = tuple[Literal["start", "wait", "turn", "attention", "experts"], int, int]
"""A start or a wait with its chunk and hop; where a pair goes on with its other half; or a computation with its chunk."""


@dataclass
class _Device:
    """The time on a device, the times from which its links are free, and the segments that have run."""

    now: float = 0.0
    free: dict[Resource, float] = field(default_factory=lambda: {"communication": 0.0, "inside": 0.0})
    done: list[ScheduledSegment] = field(default_factory=list)

    def compute(self, name: str, layer: int, time: float) -> None:
        """Run a computation. One that takes no time is not recorded."""
        if time:
            self.done.append(ScheduledSegment(name, layer, "computation", self.now, self.now + time))
            self.now += time

    def send(self, name: str, layer: int, link: Resource, time: float) -> float:
        """Start a communication behind those on its link; return its end."""
        if not time:
            return self.now
        start = max(self.now, self.free[link])
        self.free[link] = start + time
        self.done.append(ScheduledSegment(name, layer, link, start, start + time))
        return start + time


def run_block(
    forward: LayerSequence, backward: LayerSequence, weights: WeightGradMode = "split"
) -> tuple[ScheduledSegment, ...]:
    """One block on a device and its links: an overlapped pair, or a forward or a backward alone where the other is empty.

    Args:
        forward: the layers of the stage that goes forward, first to last.
        backward: those of the stage that goes backward, first to last; they run from the last on.
        weights: `"split"`: each W after its I, beside the all-to-all that I starts; `"fused"`: I and W are one, and the
            all-to-all waits for both; `"later"`: no W (a pair F|I).

    Returns:
        The segments, in the order in which each resource ran them.
    """
    device = _Device()
    halves = [_half(device, backward, "B", weights), _half(device, forward, "F", weights)]
    if not any(layer.exchanges for layer in backward):
        halves.reverse()
    while halves:
        halves = [half for half in halves if next(half, None)]
    return tuple(device.done)


def _half(
    device: _Device, layers: LayerSequence, letter: Literal["F", "B"], weights: WeightGradMode
) -> Iterator[Literal[True]]:
    """Run a forward, or a backward, which takes its steps from the last on; yield where a pair goes on with the other half."""
    later: list[
        tuple[str, int, float]
    ] = []  # weight gradients, which are computed once the next communication has started
    ahead, places = letter == "F", [*enumerate(layers)]

    def flush() -> None:
        for each in later:
            device.compute(*each)
        later.clear()

    for at, layer in places if ahead else reversed(places):
        hops, ends = _hops(layer, *((layer.dispatch, layer.combine) if ahead else layer.backward_talk[::-1])), {}
        steps = _steps(layer)
        for what, chunk, hop in steps if ahead else reversed(steps):
            if what == ("start" if ahead else "wait"):
                name, link, time = hops[hop]
                ends[chunk, hop] = device.send(f"{letter}.{name}", at, link, time)
            elif what == "attention" or what == "experts":
                times = layer.attention if what == "attention" else layer.experts.times(1 / layer.chunks)
                gradients = times.input_grad + (weights == "fused") * times.weight_grad
                device.compute(f"{letter}.{what}", at, times.forward if ahead else gradients)
                if weights == "split" and not ahead:
                    later.append((f"W.{what}", at, times.weight_grad))
            else:
                flush()
                if what == "turn":
                    yield True
                else:
                    device.now = max(device.now, ends[chunk, hop])
    flush()


def _hops(layer: LayerSegments, dispatch: float, combine: float) -> list[tuple[str, Resource, float]]:
    """The (name, link, time of a chunk) of each hop, to the experts and back."""
    inside: list[tuple[Resource, float]] = [("inside", layer.inside)] if layer.inside else []
    there: list[tuple[Resource, float]] = [("communication", dispatch), *inside]
    back: list[tuple[Resource, float]] = [*inside, ("communication", combine)]
    hops = [("dispatch", *hop) for hop in there] + [("combine", *hop) for hop in back]
    return [(name, link, time / layer.chunks) for name, link, time in hops]


def _steps(layer: LayerSegments) -> list[_Step]:
    """The forward's steps, in the order of the runtime (`in_turns` in `ops/segments.py`): hop h of chunk i is waited for in
    step i + h, behind the start of the hop before it.
    """
    steps: list[_Step] = [("attention", 0, 0)]
    if not layer.exchanges:
        return steps
    hops, begun = 4 if layer.inside else 2, list[_Step]()
    steps += [("start", chunk, 0) for chunk in range(layer.chunks)]
    steps.append(("turn", 0, 0))
    for step in range(layer.chunks + hops - 2):
        for hop in range(hops - 1):
            if 0 <= (chunk := step - hop) < layer.chunks:
                steps += [*begun, ("wait", chunk, hop)]
                if hop == hops // 2 - 1:
                    steps.append(("experts", chunk, 0))
                begun = [("start", chunk, hop + 1)]
    return [*steps, *begun, ("turn", 0, 0), *(("wait", chunk, hops - 1) for chunk in range(layer.chunks))]


def length(block: Sequence[ScheduledSegment]) -> float:
    """The time from the block's start to its last end."""
    return max((segment.end for segment in block), default=0.0)


def exposed(block: Sequence[ScheduledSegment]) -> float:
    """The block's time in which nothing computes: all-to-all that is not hidden."""
    return length(block) - sum(s.end - s.start for s in block if s.resource == "computation")


def segment_costs(stages: Sequence[LayerSequence], **others: Any) -> Costs:
    """F, I, W, B alone, F|B, F|I and the share of all-to-all, from the segments.

    F and I alone hide the all-to-all of their own chunks, if any; B alone hides it behind W. `all_to_all` is the share of F + I
    in which nothing computes.

    Args:
        stages: stage -> its layers; one stage stands for all.
        others: all else of `Costs` (p2p ...).
    """
    alone = [(run_block(layers, ()), run_block((), layers, "later")) for layers in stages]
    forward, input_grad = zip(*(map(length, both) for both in alone), strict=True)
    talk = [sum(map(exposed, both)) for both in alone]
    whole = map(add, forward, input_grad)
    times: dict[str, Sequence[Any]] = {
        "forward": forward,
        "input_grad": input_grad,
        "weight_grad": [sum(x.attention.weight_grad + x.experts.weight_grad for x in layers) for layers in stages],
        "backward": [length(run_block((), layers)) for layers in stages],
        "all_to_all": [moved / time if time else 0.0 for moved, time in zip(talk, whole, strict=True)],
        "pair": [tuple(length(run_block(here, there)) for there in stages) for here in stages],
        "pair_split": [tuple(length(run_block(here, there, "later")) for there in stages) for here in stages],
    }
    return replace(Costs(**others), **{name: _spread(values) for name, values in times.items()})


def _spread(values: Sequence[Any]) -> Any:
    """One value per stage; one stage's value as a number."""
    if len(values) > 1:
        return tuple(values)
    return values[0][0] if isinstance(values[0], tuple) else values[0]
