"""A pipeline that changes its schedule between steps: same weights, same gradients, or one sentence."""

from __future__ import annotations

from typing import Any

import pytest

import pipeloom as pl
from models import batch, blocks, gradients, mse, serial, worst
from pipeloom.errors import ConfigError, ScheduleError
from pipeloom.parallel.mesh import PipelineMesh
from pipeloom.runtime import Pipeline
from processes import run_ranks

pytestmark = pytest.mark.core

S = pl.schedules
FIRST = S.interleaved_zb(2, 5, 2)
SECOND = pl.search(2, 5, pl.Costs(forward=(1, 2, 1, 3)), 3, placement="loop", chunks=2, iterations=200)
WHOLE = S.interleaved(2, 5, 2)


def mixed(schedule: pl.Schedule) -> pl.Schedule:
    """`schedule` with the backwards of odd micro-batches split, and those of even ones whole."""

    def pieces(cell: str, odd: bool) -> list[str]:
        return [cell.replace("B", "I"), cell.replace("B", "W")] if odd and "B" in cell else [cell]

    programs = [
        [piece for cell in program for piece in pieces(str(cell), cell.microbatch % 2 == 1)]
        for program in schedule.programs
    ]
    return pl.Schedule.of(programs, placement=schedule.placement, microbatches=schedule.microbatches)


MIXED = mixed(WHOLE)


def two_schedules(rank: int) -> list[dict[str, Any]]:
    pipeline = Pipeline(blocks(4), FIRST, loss=mse)
    x, y = batch(11)
    want_loss, want = serial(blocks(4), x, y, [3, 2, 2, 2, 2])
    found = []
    for schedule in (None, SECOND.schedule, MIXED, WHOLE, FIRST):
        if schedule is not None:
            pipeline.adopt(schedule)
        loss = pipeline.step(x, y)
        got = gradients(pipeline)
        found.append(
            {
                "loss": abs(loss.item() - want_loss.item()),
                "worst": worst(got, {name: want[name] for name in got}),
                "parameters": len(got),
                "peak": pipeline.peak_activations,
            }
        )
        pipeline.zero_grad()
        assert pipeline.timeline().schedule == (schedule or FIRST)
    pipeline.close()
    return found


def test_gradients_are_those_of_one_process_under_each_schedule() -> None:
    everyone = run_ranks(two_schedules, 2)
    timelines = [pl.simulate(schedule) for schedule in (FIRST, SECOND.schedule, MIXED, WHOLE, FIRST)]
    for at, timeline in enumerate(timelines):
        reports = [ranks[at] for ranks in everyone]
        assert all(report["worst"] <= 1e-6 and report["loss"] <= 1e-6 for report in reports), reports
        assert sum(report["parameters"] for report in reports) == 4 * 4
        assert tuple(report["peak"] for report in reports) == timeline.peak_activations
    assert SECOND.schedule.codes != FIRST.codes


def test_what_needs_other_stages_is_refused() -> None:
    pipeline = Pipeline(blocks(2), S.zb_h1(1, 4), loss=mse, mesh=PipelineMesh.of([0]))
    with pytest.raises(ConfigError, match="placement"):
        pipeline.adopt(S.interleaved_zb(1, 4, 2))
    assert pipeline.schedule == S.zb_h1(1, 4)


def test_a_schedule_that_cannot_run_is_refused() -> None:
    pipeline = Pipeline(blocks(2), S.zb_h1(1, 2), loss=mse, mesh=PipelineMesh.of([0]))
    broken = pl.Schedule.of([["0F0", "0I0", "0W0", "0F1", "0I1"]], placement=[0], microbatches=2)
    with pytest.raises(ScheduleError):
        pipeline.adopt(broken)


def test_a_pipeline_without_split_backwards_does_not_learn_them() -> None:
    pipeline = Pipeline(blocks(2), S.one_f_one_b(1, 4), loss=mse, mesh=PipelineMesh.of([0]))
    with pytest.raises(ConfigError, match="without split backwards"):
        pipeline.adopt(S.zb_h1(1, 4))
