"""Tokens per second of a device as tensor or pipeline parallelism grows, within a node and beyond it, at two speeds of links."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from pipeloom.errors import UsageError
from pipeloom.plan.layout import CHUNKS, PlannedLayout, problems
from pipeloom.plan.predict import Planner
from pipeloom.plan.search import PlanRequest, estimate

Points = list[tuple[float, float]]


def scaling(planner: Planner, request: PlanRequest) -> dict[str, Points]:
    """Line -> (devices that share one copy of the model, tokens per second on each device).

    Lines: the model over d devices by tp alone, by pp alone, and (of several nodes) by tp within a node and pp over nodes; each
    with the links as they are and half as fast. The rest of the devices is dp, and micro-batches have one sequence. Of the
    schedules of `request` the one with the best estimate counts. Memory is not looked at: the lines compare speed.
    """
    device, lines = planner.device, {}
    for words, speed in (("", 1.0), (", links half as fast", 0.5)):
        slower = replace(planner, device=replace(device, link=speed * device.link, network=speed * device.network))
        kinds = [("tp", _tensor), ("pp", _pipeline), (f"tp up to {device.per_node}, then pp", _both)]
        for name, axes in kinds if request.devices > device.per_node else kinds[:2]:
            points: Points = []
            for count in _doubled(request.devices):
                tp, pp = axes(count, device.per_node)
                with suppress(UsageError):  # the model cannot be cut so often
                    points.append((float(count), _tokens(slower, request, tp, pp)))
            lines[name + words] = points
    return lines


def _tensor(count: int, node: int) -> tuple[int, int]:
    return count, 1


def _pipeline(count: int, node: int) -> tuple[int, int]:
    return 1, count


def _both(count: int, node: int) -> tuple[int, int]:
    return min(count, node), max(1, count // node)


def _doubled(devices: int) -> Iterator[int]:
    """Yield the powers of two that divide the number of devices."""
    count = 1
    while devices % count == 0:
        yield count
        count *= 2


def _tokens(planner: Planner, request: PlanRequest, tp: int, pp: int) -> float:
    """Return tokens per second on each device. Raises UsageError where no schedule of `request` allows these sizes."""
    dp = request.devices // (tp * pp)
    base = PlannedLayout(
        dp=dp, tp=tp, pp=pp, m=request.sequences // dp, seq=request.seq, zero=request.zero[0], capacity=request.capacity
    )
    layouts = [
        replace(base, schedule=name, v=chunks)
        for name in (request.schedules if pp > 1 else request.schedules[:1])
        for chunks in CHUNKS[name]
    ]
    allowed = [each for each in layouts if request.sequences % dp == 0 and not problems(planner.shape, each)]
    for each in sorted(allowed, key=lambda each: estimate(planner, each).seconds):
        with suppress(UsageError):  # a family that refuses these sizes
            return planner.predict(each).tokens
    raise UsageError(f"tp={tp}, pp={pp}: no schedule allows it")
