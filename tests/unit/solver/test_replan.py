"""A better schedule in place of one that runs."""

from __future__ import annotations

import json

import pytest

import pipeloom as pl
from pipeloom.schedule.json_form import from_json
from pipeloom.solver.replan import answer, better, request

SLOW = (1.0, 1.0, 1.0, 1.5)
COSTS = pl.Costs(SLOW, SLOW, SLOW)


@pytest.mark.parametrize("objective", ["makespan", "span"])
def test_no_rank_holds_more_than_its_limit(objective: str) -> None:
    schedule = pl.schedules.build("1f1b", 4, 5)
    limits = pl.simulate(schedule, COSTS).peak_memory
    assert len(set(limits)) == 4
    other = better(schedule, COSTS, limits, objective, 0.05)  # type: ignore[arg-type]
    pl.check(other)
    run = pl.simulate(other, COSTS)
    assert run.value(objective) < pl.simulate(schedule, COSTS).value(objective)
    assert all(peak <= limit for peak, limit in zip(run.peak_memory, limits, strict=True))
    assert (other.placement, other.microbatches) == (schedule.placement, schedule.microbatches)


def test_backwards_are_split_only_where_that_gains() -> None:
    schedule = pl.schedules.build("1f1b", 4, 5)
    other = better(schedule, COSTS, pl.simulate(schedule, COSTS).peak_memory, "makespan", 0.05)
    cells = [cell for program in other.programs for cell in program]
    assert sum(cell.kind == "B" for cell in cells) > sum(cell.kind == "I" for cell in cells) > 0


def test_a_schedule_that_nothing_beats_stays() -> None:
    schedule = pl.schedules.build("1f1b", 1, 3)
    assert better(schedule, pl.Costs(), [1.0], "makespan", 0.05) is schedule


def test_a_schedule_stays_where_nothing_fits() -> None:
    schedule = pl.schedules.build("1f1b", 2, 3)
    assert better(schedule, pl.Costs(), [0.5, 0.5], "makespan", 0.05) is schedule


def test_a_request_says_all_that_the_search_needs() -> None:
    schedule = pl.schedules.build("interleaved", 2, 3, 2)
    costs = {"forward": [1.0, 1.0, 1.0, 2.0], "input_grad": [1.0, 1.0, 1.0, 2.0], "weight_grad": [1.0, 1.0, 1.0, 2.0]}
    limits = pl.simulate(schedule, pl.Costs(**costs)).peak_memory  # type: ignore[arg-type]
    found = from_json(json.dumps(answer(request(schedule, costs, limits, "makespan", 0.05))))
    assert found.codes == better(schedule, pl.Costs(**costs), limits, "makespan", 0.05).codes  # type: ignore[arg-type]
