"""Pipeline on gloo processes against one process: steps, evaluation, trace, buffers."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import pipeloom as pl
from models import batch, blocks, gradients, mse, serial, worst
from pipeloom.runtime import Pipeline, RuntimeOptions
from processes import run_ranks

S = pl.schedules
QUIET = [RuntimeOptions(monitor=False, transport=name) for name in ("individual", "shared")]


def evaluation(rank: int, schedule: Any, options: RuntimeOptions) -> dict[str, Any]:
    """Two steps before zero_grad, evaluations of other batch sizes in between and after; then an optimizer's step."""
    layers = blocks(schedule.stages)
    pipeline = Pipeline(layers, schedule, loss=mse, options=options)
    first, second = batch(3 * schedule.microbatches, seed=1), batch(schedule.microbatches + 1, seed=2)
    pipeline.step(*first)
    evaluated = {}
    for rows in (1, 2, schedule.microbatches, 40):
        x, y = batch(rows, seed=rows)
        serial_loss = serial(layers, x, y, [rows])[0].item()
        evaluated[rows] = (pipeline.evaluate(x, y).item(), serial_loss)
        outputs = pipeline.predict(x)
        assert (outputs is not None) == (schedule.placement[-1] == rank)
        if outputs is not None:
            evaluated[-rows] = (mse(outputs, y).item(), serial_loss)
    pipeline.step(*second)
    pipeline.evaluate(*first)
    one = serial(layers, *first, split(len(first[0]), schedule.microbatches))[1]
    two = serial(layers, *second, split(len(second[0]), schedule.microbatches))[1]
    got = gradients(pipeline)
    off = worst(got, {name: one[name] + two[name] for name in got})
    before = {name: p.detach().clone() for name, p in pipeline.named_parameters()}
    torch.optim.SGD(pipeline.parameters(), lr=0.5).step()
    moved = worst(dict(pipeline.named_parameters()), {n: before[n] - 0.5 * (one[n] + two[n]) for n in before})
    pipeline.zero_grad()
    report = {"evaluated": evaluated, "worst": off, "moved": moved, "zeroed": not gradients(pipeline)}
    pipeline.close()
    return report


def split(rows: int, count: int) -> list[int]:
    base, larger = divmod(rows, count)
    return [base + (at < larger) for at in range(count)]


def buffers(rank: int, schedule: Any, options: RuntimeOptions) -> dict[str, Any]:
    """Receive buffers made, tensors alive, and sends kept, over several steps."""
    pipeline = Pipeline(blocks(schedule.stages), schedule, loss=mse, options=options)
    gc.collect()
    gc.freeze()  # what is there already need not be looked through again
    made, alive = [], []
    for step in range(4):
        pipeline.step(*batch(2 * schedule.microbatches, seed=step))
        pipeline.zero_grad()
        gc.collect()
        made.append(pipeline.stats.receive_buffers)
        alive.append(sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()))
    timeline = pipeline.timeline()
    report = {
        "made": made,
        "shared segments": pipeline.stats.send_segments,
        "sends": pipeline.stats.messages_sent,
        "alive": alive,
        "messages": pipeline.stats.messages_received,
        "peak": pl.simulate(schedule, pl.Costs(1, 1, 1, 0)).peak_activations[rank],
        "boxes": tuple(map(len, timeline.starts)),
        "ordered": all(
            a <= b <= c
            for s, e in zip(timeline.starts, timeline.ends, strict=True)
            for a, b, c in zip(s, e, [*s[1:], float("inf")], strict=True)
        ),
        "late": lateness(timeline),
        "makespan": timeline.makespan,
    }
    pipeline.close()
    return report


def lateness(timeline: Any) -> float:
    """The most seconds by which a forward starts before the one that it depends on has ended: the clocks' error."""
    schedule = timeline.schedule
    at = {cell: (r, i) for r, program in enumerate(schedule.programs) for i, cell in enumerate(program)}
    worst_case = float("-inf")
    for action, (rank, index) in at.items():
        if action.kind == "F" and action.stage:
            r, i = at[pl.Action("F", action.stage - 1, action.microbatch)]
            worst_case = max(worst_case, timeline.ends[r][i] - timeline.starts[rank][index])
    return worst_case


def work(rank: int, ranks: int) -> dict[str, Any]:
    looped = S.interleaved(ranks, 2 * ranks + 1, 2)
    evaluated = [looped, S.one_f_one_b(ranks, 3), S.looped_bfs(ranks, ranks, 2)]
    measured = [looped, S.one_f_one_b(ranks, 9), S.looped_bfs(ranks, 5, 3)]
    return {
        "evaluation": [evaluation(rank, s, options) for s in evaluated for options in QUIET],
        "buffers": [buffers(rank, s, options) for s in measured for options in QUIET],
    }


@pytest.fixture(scope="module", params=[2, 4])
def reports(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """One spawn for all tests of this file: rank -> its reports."""
    return run_ranks(work, request.param, request.param)


@pytest.mark.core
def test_evaluation_between_steps_leaves_gradients_alone(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        for each in report["evaluation"]:
            for rows, (got, want) in each["evaluated"].items():
                assert got == pytest.approx(want, rel=1e-5), rows
            assert each["worst"] <= 1e-6
            assert each["moved"] <= 1e-6
            assert each["zeroed"]


@pytest.mark.core
def test_buffers_do_not_grow(reports: list[dict[str, Any]]) -> None:
    """Receive buffers are a pool: all are made in the first step, fewer than messages; nothing else is kept either."""
    for report in reports:
        for each in report["buffers"]:
            assert each["made"][1:] == each["made"][:1] * 3, each
            if each["shared segments"] is None:
                assert each["alive"][1] >= each["alive"][2] >= each["alive"][3], each
            else:  # how many are on their way at once depends on time, up to all of a step
                assert each["shared segments"] <= each["sends"], each
            assert each["made"][0] <= each["messages"]
    looped = [each for report in reports for each in report["buffers"][:2]]
    assert all(each["made"][0] <= each["peak"] + 2 * 2 for each in looped), looped  # alive, and two open a channel
    assert sum(each["made"][0] for each in looped) < sum(each["messages"] for each in looped)


@pytest.mark.core
def test_the_measured_timeline_has_the_simulated_boxes(reports: list[dict[str, Any]]) -> None:
    ranks = len(reports)
    schedule = S.interleaved(ranks, 2 * ranks + 1, 2)
    for report in reports:
        each = report["buffers"][0]
        assert each["boxes"] == tuple(map(len, schedule.programs))
        assert each["ordered"]
        assert each["makespan"] > 0
        assert each["late"] < 0.05  # no effect before its cause, but for the error of the clocks
    assert len({report["buffers"][0]["makespan"] for report in reports}) == 1
