"""Tokens per second of a device as tensor or pipeline parallelism grows, within a node and beyond it, at two speeds of links."""

from __future__ import annotations

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
        slower = replace(planner, device=device.with_links(speed))
        largest = {"tp": request.devices, "pp": 1}  # tp
        if request.devices > device.per_node:
            largest[f"tp up to {device.per_node}, then pp"] = device.per_node
        for name, most in largest.items():
            points: Points = []
            for count in (1 << n for n in range(request.devices.bit_length()) if request.devices % (1 << n) == 0):
                with suppress(UsageError):  # the model cannot be cut so often
                    points.append((float(count), _tokens(slower, request, min(count, most), max(1, count // most))))
            lines[name + words] = points
    return lines


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
