"""A run's prediction beside its measured step, and the cause that is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pipeloom.config import load_layout
from pipeloom.plan.run import predicted
from pipeloom.schedule import Timeline, simulate
from pipeloom.schedule.families import FAMILIES
from pipeloom.train.report.metrics import known_device, simulated
from pipeloom.train.report.prediction import Comparison, compared, step_lines

LAYOUT = load_layout("tiny", {"schedule.name": "1f1b", "parallel.pp": 2, "schedule.microbatches": 4})
NAMES = ("forward", "input_grad", "weight_grad")


def comparison(
    device: str = "", speed: float = 1.0, slow: float = 1.0, hop: float = 0.0, stall: float = 0.0
) -> Comparison:
    """That of a step as predicted, but for a factor on all times, one on those of stage 1, seconds of a message, and a stall."""
    run = predicted(LAYOUT, known_device(device)).timeline
    factors = (speed, speed * slow)
    times: dict[str, Any] = {
        name: tuple(f * t for f, t in zip(factors, run.costs.per_stage(name, 2), strict=True)) for name in NAMES
    }
    step = simulate(run.schedule, replace(run.costs, **times, p2p=run.costs.p2p + hop))
    ends = [list(row) for row in step.ends]
    ends[0][-1] += stall
    return compared(LAYOUT, Timeline.measured(run.schedule, step.starts, ends), device, ([5.0, 3.0], [4.0, 6.0]))


def test_a_step_as_predicted_has_no_error() -> None:
    same = comparison("NVIDIA H100 80GB HBM3")
    assert same.basis == "the data sheet of h100"
    assert same.figures["step, s"][0] == pytest.approx(same.figures["step, s"][1])
    assert same.figures["bubble rate"][0] == pytest.approx(same.figures["bubble rate"][1])
    assert max(map(abs, same.causes.values())) < 0.05 * same.figures["step, s"][0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"slow": 1.5}, "times of the stages (stage 1 takes 50 % longer)"),
        ({"slow": 0.5}, "times of the stages (stage 1 takes 50 % less)"),
        ({"hop": 1.0}, "messages"),
        ({"stall": 1.0}, "times of the stages (stage 0 takes"),
    ],
)
def test_the_largest_cause_is_named(changes: dict[str, float], words: str) -> None:
    other = comparison("NVIDIA H100 80GB HBM3", **changes)
    assert other.largest.startswith(words)
    one, measured = other.figures["step, s"]
    assert sum(other.causes.values()) == pytest.approx(measured - one)
    assert other.advice.startswith(f"largest cause of error: {other.largest}, ")
    assert other.advice.endswith(", for plan --costs FILE")


def test_a_cause_that_nobody_can_act_on_is_not_named() -> None:
    """Waits, and a cause within the noise of a step."""
    known = comparison("NVIDIA H100 80GB HBM3", slow=1.5)
    stages, messages, waits = known.causes
    step = known.figures["step, s"][1]
    assert replace(known, causes={stages: 0.02 * step, messages: 0.0, waits: 0.1 * step}).advice == ""
    assert replace(known, causes={stages: 0.009 * step, messages: 0.0, waits: 0.0}).advice == ""
    assert "stage 1" in replace(known, causes={stages: -0.02 * step, messages: 0.0, waits: 0.0}).advice


def test_a_step_is_one_table_of_a_narrow_terminal() -> None:
    """A share, and what is close to 0, has no percentage; without a prediction there is no column for it."""
    both = comparison(slow=1.5, hop=1e-4)
    measured = replace(both.predicted, source="measured")
    lines = step_lines(measured, both, "4 ranks on 2 cores")
    assert lines[0].split() == ["measured", "simulated", "predicted", "error"]
    assert max(map(len, lines[:5])) <= 80
    assert ["%" in line for line in lines[1:5]] == [True, False, False, True]
    assert [line.split("  ")[0] for line in lines[1:5]] == [
        "step, s", "bubble rate", "exposed communication, s", "bytes"
    ]  # fmt: skip
    assert (
        lines[5]
        == "bubble rate: Σ idle / (p · makespan) (4 ranks on 2 cores, so idle time includes waiting for a core)"
    )
    assert "predicted: times from FLOPs at the measured speed" in lines
    assert [line.split() for line in step_lines(measured, None, "")[:3]] == [
        ["measured", "simulated"],
        ["step,", "s", *[f"{measured.makespan:.4g}", f"{simulated(measured).makespan:.4g}"]],
        ["bubble", "rate", *[f"{measured.bubble_rate:.4g}", f"{simulated(measured).bubble_rate:.4g}"]],
    ]


def test_without_a_data_sheet_the_measured_speed_counts() -> None:
    """Whatever the machine's speed, an even step is predicted; messages are not free, but in the prediction."""
    for speed in (1.0, 3.0):
        step = comparison(speed=speed).figures["step, s"]
        assert step[0] == pytest.approx(step[1])
    exposed = comparison(hop=1e9).figures["exposed communication, s"]
    assert exposed[0] == 0
    assert exposed[1] > 1e9


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_predicted_at_the_measured_speed(name: str) -> None:
    """So are pairs, whose times are given."""
    axes = {"schedule.name": name, "parallel.pp": 2, "schedule.microbatches": 4, "model.num_experts": 4}
    layout = load_layout("tiny", axes)
    run = predicted(layout).timeline
    starts, ends = ([[7e-12 * time for time in row] for row in rows] for rows in (run.starts, run.ends))
    step = compared(layout, Timeline.measured(run.schedule, starts, ends), "").figures["step, s"]
    assert step[0] == pytest.approx(step[1])


def test_the_bytes_are_those_of_the_fullest_rank() -> None:
    assert comparison().record()["bytes"] == {"predicted": 3.0, "measured": 6.0}
    both = comparison()
    (line,) = [line for line in step_lines(both.predicted, both, "") if line.startswith("bytes")]
    assert line.split() == ["bytes", "6", "B", "3", "B", "-50.0", "%"]


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA GB300", "gb300"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("AMD Instinct MI300X", "mi300x"),
        ("T4", None),
    ],
)
def test_devices_are_known_by_their_names(name: str, known: str | None) -> None:
    device = known_device(name)
    assert (None if device is None else device.name) == known
