"""The comparison with one process must fail when something is wrong: mutations made on purpose."""

from __future__ import annotations

import pytest

import pipeloom as pl
from models import batch, blocks, gradients, mse, serial, worst
from pipeloom.config.fault import parse_fault
from pipeloom.errors import ScheduleError
from pipeloom.runtime import LocalPipeline, RuntimeOptions
from pipeloom.runtime.loss import Loss
from pipeloom.schedule.model import parts

SCHEDULES = [
    pl.schedules.gpipe(2, 4),
    pl.schedules.one_f_one_b(3, 4),
    pl.schedules.interleaved(2, 5, 2),
    pl.schedules.looped_bfs(2, 4, 2),
]
BOUND = 1e-6


def differences(pipeline: LocalPipeline, schedule: pl.Schedule) -> tuple[float, float]:
    """Loss and gradients of a step against one process."""
    sizes = [2] * schedule.microbatches
    x, y = batch(sum(sizes))
    loss = pipeline.step(x, y)
    want_loss, want = serial(blocks(schedule.stages), x, y, sizes)
    return abs(loss.item() / want_loss.item() - 1), worst(gradients(pipeline), want)


def local(schedule: pl.Schedule, fault: str = "", check_first: bool = True, loss: Loss = mse) -> LocalPipeline:
    options = RuntimeOptions(fault=parse_fault(fault))
    return LocalPipeline(blocks(schedule.stages), schedule, loss=loss, options=options, check_first=check_first)


def scaled(*factors: float) -> Loss:
    """Return a loss that is multiplied by these factors, one per call and thus per micro-batch."""
    remaining = iter(factors)
    return lambda output, target: mse(output, target) * next(remaining)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
class TestIsSeen:
    def test_nothing_wrong(self, schedule: pl.Schedule) -> None:
        assert max(differences(local(schedule), schedule)) <= BOUND

    def test_swapped_microbatches(self, schedule: pl.Schedule) -> None:
        """Their inputs change places, their targets stay."""
        loss, gradient = differences(local(schedule, "swap-microbatches:0,1"), schedule)
        assert loss > 1e-3
        assert gradient > 1e-2

    def test_gradients_m_times_too_large(self, schedule: pl.Schedule) -> None:
        """The usual mistake: the loss is divided by m for the log only."""
        m = schedule.microbatches
        pipeline = local(schedule, loss=scaled(*[float(m)] * m))
        assert differences(pipeline, schedule)[1] == pytest.approx(m - 1, rel=1e-3)

    def test_one_share_a_little_too_large(self, schedule: pl.Schedule) -> None:
        pipeline = local(schedule, loss=scaled(1.001, *[1.0] * (schedule.microbatches - 1)))
        loss, gradient = differences(pipeline, schedule)
        assert loss > 10 * BOUND
        assert gradient > 10 * BOUND

    def test_a_microbatch_left_out(self, schedule: pl.Schedule) -> None:
        programs = [[a for cell in p for a in parts(cell) if a.microbatch] for p in schedule.programs]
        short = pl.Schedule.of(programs, placement=schedule.placement, microbatches=schedule.microbatches)
        with pytest.raises(ScheduleError, match=r"stage 0 micro-batch 0 .* has no forward"):
            pl.check(short)
        loss, gradient = differences(local(short, check_first=False), schedule)
        assert loss > 1e-2
        assert gradient > 1e-2

    def test_a_warmup_step_left_out(self, schedule: pl.Schedule) -> None:
        programs = [list(program) for program in schedule.programs]
        del programs[-1][0]
        short = pl.Schedule.of(programs, placement=schedule.placement, microbatches=schedule.microbatches)
        with pytest.raises(ScheduleError, match="is missing"):
            pl.check(short)
        with pytest.raises(Exception):  # noqa: B017  it ends, and not with gradients
            differences(local(short, check_first=False), schedule)

    def test_a_backward_left_out(self, schedule: pl.Schedule) -> None:
        """The first stage's last backward: nobody waits for it, so the step runs to its end."""
        programs = [list(program) for program in schedule.programs]
        assert str(programs[0].pop()).startswith("0B")
        short = pl.Schedule.of(programs, placement=schedule.placement, microbatches=schedule.microbatches)
        with pytest.raises(ScheduleError, match="has no backward"):
            pl.check(short)
        loss, gradient = differences(local(short, check_first=False), schedule)
        assert loss <= BOUND
        assert gradient > 1e-2
