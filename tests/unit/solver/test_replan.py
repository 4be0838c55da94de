"""A better schedule in place of one that runs."""

from __future__ import annotations

import itertools
import json
import time

import pytest

import pipeloom as pl
from pipeloom.schedule.json_form import from_json
from pipeloom.solver import replan
from pipeloom.solver.replan import better, request

SLOW = (1.0, 1.0, 1.0, 1.5)
COSTS = pl.Costs(SLOW, SLOW, SLOW)


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes on when it is read, so that a search of so many seconds is the same on every machine."""
    readings = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: 1e-3 * next(readings))


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


def test_a_request_says_all_that_the_search_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = pl.schedules.build("interleaved", 2, 3, 2)
    costs, limits = {"forward": [1.0, 1.0, 1.0, 2.0], "weight_grad": [1.0, 1.0, 1.0, 2.0]}, [4.0, 3.0]
    searched = []

    def search(*arguments: object) -> pl.Schedule:
        searched.append(arguments)
        return found

    found = pl.schedules.build("zb-h1", 2, 3)
    monkeypatch.setattr(replan, "better", search)
    reply = from_json(json.dumps(replan.answer(request(schedule, costs, limits, "makespan", 0.05))))
    assert (reply, searched) == (found, [(schedule, pl.Costs(**costs), limits, "makespan", 0.05)])  # type: ignore[arg-type]
