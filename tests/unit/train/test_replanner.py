"""When a run searches for another schedule, and when it swaps."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

import pipeloom as pl
from pipeloom.config import load_layout
from pipeloom.schedule.json_form import to_dict
from pipeloom.schedule.transforms import split_cooldown
from pipeloom.train import replan
from pipeloom.train.replan import Replanner, drift
from run_notes import Notes, context

EQUAL = pl.Costs(1.0, 1.0, 1.0)
SLOW = pl.Costs((1.0, 1.5), (1.0, 1.5), (1.0, 1.5))
KEYS = {"parallel.pp": 2, "schedule.name": "1f1b", "schedule.microbatches": 4, "schedule.replan": 1, "train.steps": 90}
BETTER = split_cooldown(pl.schedules.build("1f1b", 2, 4))


class Steps:
    """A pipeline whose steps take what the simulation says."""

    def __init__(self, schedule: pl.Schedule) -> None:
        self.schedule, self.costs, self.device = schedule, EQUAL, torch.device("cpu")
        self.mesh = SimpleNamespace(everyone=SimpleNamespace(group=None))

    def timeline(self) -> pl.Timeline:
        return pl.simulate(self.schedule, self.costs)

    def adopt(self, schedule: pl.Schedule) -> None:
        self.schedule = schedule


class Answers:
    """A search that is over at once."""

    asked: ClassVar[list[dict[str, Any]]] = []
    result: dict[str, Any] | None = None
    closed = 0

    def __init__(self, text: str) -> None:
        self.asked.append(json.loads(text))

    def answer(self) -> dict[str, Any] | None:
        return self.result

    def close(self) -> None:
        Answers.closed += 1


@pytest.fixture(autouse=True)
def searches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replan, "BackgroundSearch", Answers)
    monkeypatch.setattr(Answers, "asked", [])
    monkeypatch.setattr(Answers, "result", to_dict(BETTER))


def run_of(**more: Any) -> tuple[Steps, Replanner, Notes]:
    layout = load_layout("tiny", KEYS | {f"schedule.{key}": value for key, value in more.items()})
    pipeline, notes = Steps(layout.schedule), Notes()
    return pipeline, Replanner(layout, pipeline, context(), notes), notes  # type: ignore[arg-type]


def drifted(**more: Any) -> tuple[Steps, Replanner, Notes]:
    """A run whose second stage becomes slower after its first three steps; the search is asked for after step 5."""
    pipeline, replanner, notes = run_of(**more)
    for step in range(1, 6):
        pipeline.costs = EQUAL if step <= 3 else SLOW
        assert not replanner.after_step(step)
    return pipeline, replanner, notes


def test_a_stage_drifts_beside_the_others() -> None:
    change, words = drift(EQUAL, SLOW, 2)
    assert change == pytest.approx(0.5)
    assert words == "stage 1 has become 50 % slower beside the others"
    assert drift(SLOW, EQUAL, 2)[0] == pytest.approx(0.5)


def test_a_machine_that_slows_as_a_whole_does_not_drift() -> None:
    assert drift(SLOW, SLOW.scaled(3), 2)[0] == pytest.approx(0)


def test_a_message_drifts_beside_the_forwards() -> None:
    change, words = drift(pl.Costs(2.0, 1.0, 1.0, p2p=0.2), pl.Costs(4.0, 2.0, 2.0, p2p=1.6), 2)
    assert change == pytest.approx(0.3)
    assert words == "a message takes 40 % of a mean forward, was 10 %"


def test_a_backward_measured_whole_counts_as_its_two_parts() -> None:
    assert drift(pl.Costs(1.0, 1.0, 1.0), pl.Costs(1.0, 9.0, 9.0, backward=2.0), 2)[0] == pytest.approx(0)


def test_steady_costs_are_not_searched_for() -> None:
    pipeline, replanner, _ = run_of()
    for step in range(1, 20):
        pipeline.costs = EQUAL.scaled(1 + step / 10)
        assert not replanner.after_step(step)
    assert not Answers.asked


def test_one_slow_step_is_no_drift() -> None:
    pipeline, replanner, _ = run_of()
    for step in range(1, 20):
        pipeline.costs = SLOW if step % 3 == 0 else EQUAL
        replanner.after_step(step)
    assert not Answers.asked


@pytest.mark.parametrize(("threshold", "asked"), [(0.49, 1), (0.51, 0)])
def test_the_threshold_decides(threshold: float, asked: int) -> None:
    drifted(replan_threshold=threshold)
    assert len(Answers.asked) == asked


def test_the_search_is_for_the_measured_costs_within_the_first_schedules_peaks() -> None:
    pipeline, _, notes = drifted()
    (asked,) = Answers.asked
    assert asked["costs"]["forward"] == [1.0, 1.5]
    assert asked["costs"]["activation"] == [2.0, 3.0]  # blocks of a stage, and the output layer
    assert asked["limits"] == [4.0, 3.0]
    assert asked["objective"] == "makespan"
    assert asked["seconds"] == pytest.approx(pl.simulate(pipeline.schedule, SLOW).makespan)  # as long as `replan` steps
    (event,) = notes.of("drift")
    assert event["step"] == 5
    assert event["costs"]["weight_grad"] == (1.0, 1.5)


def test_a_better_schedule_is_swapped_in_and_stays_if_its_steps_are_shorter() -> None:
    pipeline, replanner, notes = drifted()
    old = pl.simulate(pipeline.schedule, SLOW).makespan
    assert replanner.after_step(6)
    assert pipeline.schedule.codes == BETTER.codes
    assert [replanner.after_step(step) for step in range(7, 20)] == [False] * 13
    assert len(Answers.asked) == 1  # the costs that it was searched for are those of now
    (event,) = notes.of("replan")
    assert (event["was"], event["value"], event["swapped"]) == (old, pl.simulate(BETTER, SLOW).makespan, True)
    (event,) = notes.of("replanned")
    assert (event["step"], event["kept"]) == (9, True)


def test_the_old_schedule_returns_if_the_new_ones_steps_are_longer() -> None:
    pipeline, replanner, notes = drifted()
    old = pipeline.schedule
    assert replanner.after_step(6)
    pipeline.costs = SLOW.scaled(1.2)
    assert [replanner.after_step(step) for step in (7, 8, 9)] == [False, False, True]
    assert pipeline.schedule is old
    assert notes.of("replanned")[0]["kept"] is False
    assert not any(replanner.after_step(step) for step in range(10, 20))


def test_a_search_goes_on_while_steps_are_made() -> None:
    pipeline, replanner, _ = drifted()
    old, Answers.result = pipeline.schedule, None
    assert not any(replanner.after_step(step) for step in range(6, 12))
    assert pipeline.schedule is old
    assert len(Answers.asked) == 1
    Answers.result = to_dict(BETTER)
    assert replanner.after_step(12)


def test_a_gain_below_one_per_cent_is_no_reason_to_swap() -> None:
    pipeline, replanner, notes = drifted()
    old = pipeline.schedule
    Answers.result = to_dict(old)
    assert not replanner.after_step(6)
    assert pipeline.schedule is old
    assert notes.of("replan")[0]["swapped"] is False
    assert not any(replanner.after_step(step) for step in range(7, 12))
    assert len(Answers.asked) == 1


def test_a_search_that_fails_changes_nothing() -> None:
    pipeline, replanner, notes = drifted()
    old, Answers.result = pipeline.schedule, {"failed": "Killed"}
    assert not replanner.after_step(6)
    assert pipeline.schedule is old
    assert "step 6: the search for another schedule failed: Killed; the present one stays" in notes.said


def test_nothing_is_swapped_or_searched_after_the_last_step() -> None:
    pipeline, replanner, _ = drifted()
    old = pipeline.schedule
    assert not replanner.after_step(90)
    assert pipeline.schedule is old
    pipeline.costs = EQUAL
    assert not any(replanner.after_step(90) for _ in range(5))
    assert len(Answers.asked) == 1


def test_a_search_under_way_is_ended_with_the_run() -> None:
    _, replanner, _ = drifted()
    before = Answers.closed
    replanner.close()
    assert Answers.closed == before + 1
    run_of()[1].close()
    assert Answers.closed == before + 1


def configured(**more: Any) -> dict[str, Any]:
    layout = load_layout("tiny", KEYS | {f"schedule.{key}": value for key, value in more.items()})
    return layout.config.schedule.model_dump(mode="json")


def test_a_checkpoint_continues_with_its_schedule_and_costs() -> None:
    _, replanner, _ = drifted()
    assert replanner.after_step(6)
    state = json.loads(json.dumps(replanner.state()))
    resumed, again, _ = run_of()
    again.restore(state, configured(replan=7))
    assert resumed.schedule.codes == BETTER.codes
    resumed.costs = SLOW
    assert not any(again.after_step(step) for step in range(7, 12))
    assert len(Answers.asked) == 1
    resumed.costs = EQUAL  # the machine is well again
    for step in (12, 13):
        again.after_step(step)
    assert len(Answers.asked) == 2


@pytest.mark.parametrize(
    ("state", "section"),
    [
        ({}, {}),
        ({"schedule": to_dict(BETTER)}, {}),
        ({"schedule": to_dict(BETTER), "costs": {"forward": -1}}, {}),
        ({"schedule": to_dict(BETTER), "costs": {"speed": 1}}, {}),
        ({"schedule": to_dict(BETTER), "costs": {"forward": [1, 2, 3]}}, {}),
        ({"schedule": {"programs": 3}, "costs": {}}, {}),
        ({"schedule": to_dict(pl.schedules.build("gpipe", 2, 4)), "costs": {}}, {}),  # more memory
        ({"schedule": to_dict(BETTER), "costs": {}}, {"microbatches": 8}),
        ({"schedule": to_dict(BETTER), "costs": {}}, None),
    ],
)
def test_a_checkpoint_of_another_layout_is_left_alone(state: dict[str, Any], section: dict[str, Any] | None) -> None:
    pipeline, replanner, _ = run_of()
    old = pipeline.schedule
    replanner.restore(state, {} if section is None else configured(**section))
    assert pipeline.schedule is old
    assert replanner.state() == {}


def test_there_is_no_state_before_the_first_costs() -> None:
    _, replanner, _ = run_of()
    assert replanner.state() == {}
