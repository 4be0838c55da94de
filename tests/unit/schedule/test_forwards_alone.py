"""A schedule of forwards alone is one: it is checked, simulated, drawn, written and read, and run by evaluation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pipeloom as pl
from pipeloom.config import load_layout
from pipeloom.errors import ScheduleError, UsageError
from pipeloom.runtime import LocalPipeline, program
from pipeloom.schedule.families import FAMILIES
from pipeloom.schedule.transforms import forward_only, transformed
from pipeloom.traces import timed_csv


def alone(name: str, *words: str) -> pl.Schedule:
    return transformed(pl.schedules.build(name, ranks=4, microbatches=8), [*words, "forward-only"])


@pytest.mark.parametrize("name", FAMILIES)
def test_the_forwards_of_every_family_can_run_and_hold_nothing(name: str) -> None:
    schedule = alone(name)
    pl.check(schedule)
    timeline = pl.simulate(schedule)
    assert timeline.makespan >= pl.lower_bound(schedule)
    assert set(timeline.peak_activations) == {0}
    assert set(timeline.peak_memory) == {0.0}


@pytest.mark.parametrize("words", [["vocabulary", "embedding"], ["shard=1"], ["recompute=whole"], ["slices=2"]])
def test_so_can_those_of_transformed_schedules(words: list[str]) -> None:
    pl.check(alone("1f1b", *words))


def test_1f1b_forward_takes_as_long_as_its_bound() -> None:
    schedule = alone("1f1b")
    assert pl.simulate(schedule).makespan == pl.lower_bound(schedule) == 11  # m + p - 1


@pytest.mark.parametrize("ending", ["csv", "json"])
def test_a_file_gives_it_back(ending: str, tmp_path: Path) -> None:
    schedule = alone("zbv")
    schedule.save(tmp_path / f"forward.{ending}")
    loaded = pl.load(tmp_path / f"forward.{ending}")
    assert loaded.codes == schedule.codes
    assert loaded.forwards_alone
    pl.check(loaded)


def test_a_forward_that_is_missing_is_named_and_so_is_one_backward_alone() -> None:
    short = pl.Schedule.of([["0F0", "0F1"], ["1F0"]], placement=[0, 1], microbatches=2)
    with pytest.raises(ScheduleError, match=r"stage 1 micro-batch 1 \(rank 1\) has no forward: 1F1 is missing"):
        pl.check(short)
    mixed = pl.Schedule.of([["0F0", "0F1", "0B0"], ["1F0", "1F1"]], placement=[0, 1], microbatches=2)
    with pytest.raises(ScheduleError, match=r"stage 1 micro-batch 0 \(rank 1\) has no backward: 1B0"):
        pl.check(mixed)
    order = pl.Schedule.of([["0F0", "1F0"], ["2F0"]], placement=[0, 1, 0], microbatches=1)
    with pytest.raises(ScheduleError, match="wrong rank"):
        pl.check(order)


def test_a_share_of_the_vocabulary_that_is_missing_is_named() -> None:
    schedule = alone("1f1b", "vocabulary")
    short = schedule.with_programs([*schedule.programs[:-1], [*schedule.programs[-1][:-2], "7REDUCE7"]])
    with pytest.raises(ScheduleError, match=r"7S7 is missing"):
        pl.check(short)


def test_a_training_step_needs_a_backward() -> None:
    with pytest.raises(ScheduleError, match=r"1f1b \(forward only\), of forwards alone, has no backward"):
        pl.check(alone("1f1b"), training=True)
    pl.check(pl.schedules.one_f_one_b(2, 4), training=True)


def test_training_and_traces_of_it_refuse_it(pipeloom: Callable[[str], Any], tmp_path: Path) -> None:
    alone("1f1b").save(tmp_path / "forward.csv")
    with pytest.raises(ScheduleError, match="of forwards alone, has no backward"):
        load_layout("tiny", {"schedule.name": str(tmp_path / "forward.csv")})
    assert pipeloom(f"rehearse {tmp_path}/forward.csv").code == 3
    (tmp_path / "timed.csv").write_text("0F0:1.5\n")
    with pytest.raises(ScheduleError, match="of forwards alone, has no backward"):
        timed_csv.read(tmp_path / "timed.csv")
    nothing = pl.Schedule.of([[], []], placement=[0, 1], microbatches=2)
    assert not nothing.forwards_alone


def test_some_of_its_micro_batches_are_a_schedule_too() -> None:
    few = forward_only(alone("zb-h1"), 3)
    pl.check(few)
    assert few.microbatches == 3


def test_evaluation_runs_the_schedule_itself_and_a_step_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    training = pl.schedules.zbv(ranks=2, microbatches=4)
    schedule = forward_only(training)
    monkeypatch.delattr(program, "forward_only")  # nothing is derived from it
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in range(4)]
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    pipeline = LocalPipeline(layers, schedule, loss=nn.functional.mse_loss)
    output = nn.Sequential(*layers)(x)
    torch.testing.assert_close(pipeline.evaluate(x, y), nn.functional.mse_loss(output, y).detach())
    torch.testing.assert_close(pipeline.predict(x), output.detach())
    with pytest.raises(UsageError, match=r"the schedule 'zbv \(forward only\)' has no backward; call evaluate"):
        pipeline.step(x, y)
