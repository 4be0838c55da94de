"""Pipeline on gloo processes: its buffers over several steps, and the timeline that it measures."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import pipeloom as pl
from models import batch, blocks, mse
from pipeloom.runtime import Pipeline, RuntimeOptions
from processes import run_ranks

S = pl.schedules
QUIET = [RuntimeOptions(monitor=False, transport=name) for name in ("individual", "shared")]


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
    for step in range(2):
        pipeline.evaluate(*batch(2 * schedule.microbatches, seed=step))
    report = {
        "made": made,
        "made with evaluations": pipeline.stats.receive_buffers,
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


def work(rank: int, ranks: int) -> list[dict[str, Any]]:
    measured = [S.interleaved(ranks, 2 * ranks + 1, 2), S.one_f_one_b(ranks, 9), S.looped_bfs(ranks, 5, 3)]
    return [buffers(rank, s, options) for s in measured for options in QUIET]


@pytest.fixture(scope="module", params=[2, 4])
def reports(request: pytest.FixtureRequest) -> list[list[dict[str, Any]]]:
    """One spawn for all tests of this file: rank -> its reports."""
    return run_ranks(work, request.param, request.param)


@pytest.mark.core
def test_buffers_do_not_grow(reports: list[list[dict[str, Any]]]) -> None:
    """Receive buffers are a pool: all are made in the first step, fewer than messages; nothing else is kept either."""
    for report in reports:
        for each in report:
            assert each["made"][1:] == each["made"][:1] * 3, each
            assert each["made with evaluations"] == each["made"][-1], each
            if each["shared segments"] is None:
                assert each["alive"][1] >= each["alive"][2] >= each["alive"][3], each
            else:  # how many are on their way at once depends on time, up to all of a step
                assert each["shared segments"] <= each["sends"], each
            assert each["made"][0] <= each["messages"]
    looped = [each for report in reports for each in report[:2]]
    assert all(each["made"][0] <= each["peak"] + 2 * 2 for each in looped), looped  # alive, and two open a channel
    assert sum(each["made"][0] for each in looped) < sum(each["messages"] for each in looped)


@pytest.mark.core
def test_the_measured_timeline_has_the_simulated_boxes(reports: list[list[dict[str, Any]]]) -> None:
    ranks = len(reports)
    schedule = S.interleaved(ranks, 2 * ranks + 1, 2)
    for report in reports:
        each = report[0]
        assert each["boxes"] == tuple(map(len, schedule.programs))
        assert each["ordered"]
        assert each["makespan"] > 0
        assert each["late"] < 0.05  # no effect before its cause, but for the error of the clocks
    assert len({report[0]["makespan"] for report in reports}) == 1
