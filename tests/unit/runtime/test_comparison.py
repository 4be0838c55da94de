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

SCHEDULE = pl.schedules.interleaved(2, 5, 2)
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


def test_nothing_wrong_and_a_loss_that_is_a_little_too_large() -> None:
    assert max(differences(local(SCHEDULE), SCHEDULE)) <= BOUND
    remaining = iter((1.001, 1.0, 1.0, 1.0, 1.0))
    pipeline = local(SCHEDULE, loss=lambda output, target: mse(output, target) * next(remaining))
    assert min(differences(pipeline, SCHEDULE)) > 10 * BOUND


def test_swapped_microbatches_are_seen() -> None:
    """Their inputs change places, their targets stay."""
    assert min(differences(local(SCHEDULE, "swap-microbatches:0,1"), SCHEDULE)) > 1e-3


def test_a_microbatch_or_a_backward_left_out_is_refused_and_seen() -> None:
    without = [[a for cell in p for a in parts(cell) if a.microbatch] for p in SCHEDULE.programs]
    last = [list(SCHEDULE.programs[0])[:-1], *SCHEDULE.programs[1:]]  # nobody waits for it, so the step runs to its end
    for programs, words in ((without, "has no forward"), (last, "has no backward")):
        short = pl.Schedule.of(programs, placement=SCHEDULE.placement, microbatches=SCHEDULE.microbatches)
        with pytest.raises(ScheduleError, match=words):
            pl.check(short)
        assert differences(local(short, check_first=False), SCHEDULE)[1] > 1e-2


def test_a_deadlock_is_an_error_that_names_the_messages() -> None:
    backwards = pl.Schedule.of([["0B0", "0F0"], ["1F0", "1B0"]], placement=[0, 1], microbatches=1)
    with pytest.raises(
        ScheduleError, match=r"deadlocks: rank 0 waits for the input gradient .*; rank 1 waits for the output"
    ):
        local(backwards, check_first=False).step(*batch(1))
