"""Rows of what the training loop does around its steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pipeloom as pl
from pipeloom.config import load_layout
from pipeloom.measure.build import build_pipeline
from pipeloom.train import observers as module
from pipeloom.train.loop import Trainer
from pipeloom.train.observers import StepEnd, StepLog, StepObserver, observers
from pipeloom.train.workers.context import INTERRUPT, SAVE, STOP

CPU = torch.device("cpu")
KEYS = {"parallel.pp": 1, "train.steps": 5, "log.every": 2, "checkpoint.every": 0, "train.eval_every": 0}
SPARSE = {"model.num_experts": 4}


def rows_of(changes: dict[str, Any], first: int = 1, searches: bool = False) -> dict[str, StepObserver]:
    config = load_layout("tiny", KEYS | changes).config
    return {row.name: row for row in observers(config, first, searches)}


@pytest.mark.parametrize(
    ("row", "steps"),
    [
        (StepObserver("a"), [1, 2, 3, 4, 5, 6]),
        (StepObserver("a", every=3), [3, 6]),
        (StepObserver("a", every=0), []),
        (StepObserver("a", every=0, also=range(2, 4)), [2, 3]),
        (StepObserver("a", every=4, also=(1, 4)), [1, 4]),
        (StepObserver("a", every=0, requests=SAVE), []),
    ],
)
def test_a_row_is_due_at_its_interval_and_at_further_steps(row: StepObserver, steps: list[int]) -> None:
    assert [step for step in range(1, 7) if row.due(step)] == steps


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (StepObserver("a"), "every step"),
        (StepObserver("a", every=3, also=(7,)), "every 3 steps, after step 7"),
        (StepObserver("a", every=3, also=(6,)), "every 3 steps"),
        (StepObserver("a", every=0, also=range(2, 5)), "steps 2 to 4"),
        (StepObserver("a", every=0, requests=STOP | INTERRUPT), "on SIGTERM, on SIGINT"),
        (StepObserver("a", every=0), ""),
    ],
)
def test_a_row_says_when_it_is_called(row: StepObserver, words: str) -> None:
    assert row.when() == words


def test_rows_follow_the_configuration() -> None:
    default = ["record, and bad steps", "replica check", "garbage collection", "log", "end", "checkpoint"]
    assert list(rows_of({})) == default
    everything = SPARSE | {
        "schedule.replan": 4,
        "train.profile_from": 2,
        "train.profile_steps": 9,
        "train.eval_every": 2,
    }
    rows = rows_of(everything, first=3, searches=True)
    assert list(rows) == [
        "profile",
        "expert loads",
        *default[:-1],
        "evaluation",
        "checkpoint",
        "measuring for the search",
        "replan",
    ]
    assert list(rows["profile"].also) == [2, 3, 4, 5]  # not beyond the last step
    assert rows["garbage collection"].due(3)
    assert "replica check" not in rows_of({"train.check_every": 0})


def test_loads_of_experts_are_collected_in_every_step_only_for_biases() -> None:
    due = [
        [step for step in range(1, 6) if rows_of(SPARSE | {"model.router": router})["expert loads"].due(step)]
        for router in ("softmax", "sigmoid")
    ]
    assert due == [[2, 4, 5], [1, 2, 3, 4, 5]]


def test_norms_are_needed_where_they_are_logged() -> None:
    assert "norms" not in rows_of({})["log"].needs
    assert "norms" in rows_of({"log.norms": "layer"})["log"].needs


def trained(*rows: StepObserver, flags: int = 0) -> Trainer:
    layout = load_layout("tiny", KEYS | {"schedule.microbatches": 2, "train.global_batch_size": 2, "train.seq_len": 8})
    context: Any = SimpleNamespace(rank=0, device=CPU, flags=flags, requests=SimpleNamespace(flags=SAVE))
    trainer = Trainer(layout.config, build_pipeline(layout, CPU), context, None, observers=rows)
    trainer.train(torch.arange(2000) % 250)
    trainer.pipeline.close()
    return trainer


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """Import what a first step imports before any test's time is counted."""
    trained()


def test_a_row_of_ones_own_is_called_around_its_steps() -> None:
    calls: list[tuple[str, int]] = []
    ends: list[StepEnd] = []

    def after(end: StepEnd) -> None:
        calls.append(("after", end.step))
        ends.append(end)

    trained(StepObserver("mine", lambda step: calls.append(("before", step)), after, every=2))
    assert calls == [("before", 2), ("after", 2), ("before", 4), ("after", 4)]
    assert all(len(end.outcomes) == 1 and end.outcomes[0].loss > 0 and end.seconds > 0 for end in ends)
    assert ends[0].batch.tokens.shape == (2, 8)


def test_a_request_calls_a_row_in_a_step_that_is_not_its_own() -> None:
    saves: list[int] = []
    trained(StepObserver("mine", after_step=lambda end: saves.append(end.step), every=0, requests=SAVE), flags=SAVE)
    assert saves == [1, 2, 3, 4, 5]


def test_no_row_after_a_rollback_is_called() -> None:
    steps: list[int] = []

    def undo(end: StepEnd) -> None:
        end.rolled_back = end.step == 3

    trained(
        StepObserver("undo", after_step=undo),
        StepObserver("last", after_step=lambda end: steps.append(end.step)),
    )
    assert steps == [1, 2, 4, 5]


def test_a_row_gets_the_trace_that_it_needs() -> None:
    traced: list[bool] = []
    rows = [
        StepObserver("reader", every=3, needs=("trace",)),
        StepObserver("look", after_step=lambda end: traced.append(trainer[0].trace)),
    ]
    layout = load_layout("tiny", KEYS | {"log.every": 5, "schedule.microbatches": 2, "train.global_batch_size": 2})
    trainer = [build_pipeline(layout, CPU)]
    context: Any = SimpleNamespace(rank=0, device=CPU, flags=0)
    Trainer(layout.config, trainer[0], context, None, observers=rows).train(torch.arange(20_000) % 250)
    trainer[0].close()
    assert traced == [False, False, True, False, True]


def test_a_step_that_something_slowed_is_traced_only_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "maxima", lambda pipeline, values: values)
    timeline, shape = pl.simulate(pl.schedules.build("1f1b", 2, 4)), SimpleNamespace(dp=1, world=2)
    pipeline: Any = SimpleNamespace(
        timeline=lambda: timeline, device=CPU, exposed=None, mesh=SimpleNamespace(shape=shape)
    )
    log = StepLog(load_layout("tiny", KEYS).config, pipeline, None, SimpleNamespace(take=lambda: None))  # type: ignore[arg-type]
    traced = []
    for step, slow in ((1, False), (2, True), (5, True)):
        end: Any = SimpleNamespace(
            step=step, seconds=1.0, outcomes=[SimpleNamespace(loss=1.0, norm=1.0, rate=1.0, norms=None)],
            batch=SimpleNamespace(tokens=torch.zeros(2, 4)),
        )  # fmt: skip
        log.slowed = lambda slow=slow: slow  # type: ignore[misc]
        log.count(end)
        log.after_step(end)
        traced.append(len(log.traces))
    assert traced == [1, 1, 2]
