"""The state of a run between checkpoints, and an error of one rank on all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeloom.config import load_layout
from pipeloom.errors import CheckpointError, ConfigError
from pipeloom.train.checkpoint.load import Loaded
from pipeloom.train.checkpoint.run import RunFacts, RunState, digests
from pipeloom.train.collect import agreed
from pipeloom.train.report.report import reported


def test_a_state_continues_from_its_facts() -> None:
    state = RunState(5, 7, 1, {"before": 2.5}, [1.0, 3.0], True, Path("/runs/a"))
    again = RunState(norms=[9.0])
    norms = again.norms
    facts = again.adopt(Loaded(5, state.facts(), Path("step-000005")))
    assert (again.steps_done, again.batch, again.rollbacks) == (5, 7, 1)
    assert (again.held_out, again.norms) == ({"before": 2.5}, [1.0, 3.0])
    assert again.norms is norms  # which the verdict on steps appends to
    assert (facts.run, facts.chat) == ("/runs/a", True)
    assert set(state.facts()) <= set(RunFacts.model_fields)


def test_batches_of_an_older_checkpoint_are_as_many_as_its_steps() -> None:
    state = RunState()
    state.adopt(Loaded(3, None, Path()))
    assert (state.steps_done, state.batch, state.norms) == (3, 3, [])


@pytest.mark.parametrize(
    ("changes", "digest"),
    [
        ({}, "054a5c30169dfb8e"),
        ({"model.qk_norm": True}, "251526e198fcd8a3"),
        ({"model.num_nextn_predict_layers": 1}, "67e4e1f263dcfb45"),
        ({"model.num_experts": 4, "model.moe_layer_freq": 2}, "69141d8f9373e0d9"),
        ({"model.num_experts": 4}, "c0d7922279f803a0"),
    ],
)
def test_the_digest_of_a_model_is_that_of_earlier_versions(changes: dict[str, Any], digest: str) -> None:
    layout = load_layout("tiny", {"parallel.pp": 1, "schedule.name": "1f1b", **changes})
    assert digests(layout.config, "text") == {"model": digest, "data": "text"}


@pytest.mark.parametrize("kind", [CheckpointError, ConfigError])
def test_the_first_error_of_any_rank_is_raised_on_every_rank(kind: type[Exception]) -> None:
    def fail() -> None:
        raise CheckpointError("later")

    def with_others(answer: Any) -> list[Any]:
        return [[1, "", ""], [None, kind.__name__, "first"], answer]

    for work in (fail, lambda: 3):
        with pytest.raises(kind, match=r"^first$"):
            agreed(with_others, work)


def test_results_of_all_ranks_are_returned_where_none_fails() -> None:
    assert agreed(lambda answer: [[1, "", ""], answer], lambda: 2) == [1, 2]


def test_an_error_that_is_no_answer_is_raised_at_once() -> None:
    with pytest.raises(ZeroDivisionError):
        agreed(lambda answer: [answer], lambda: 1 / 0)


def test_a_rank_without_a_report_runs_the_same_lines() -> None:
    silent = reported(None)
    assert silent.say("a") is None  # type: ignore[func-returns-value]
    assert silent.record("step", loss=1.0) is None  # type: ignore[func-returns-value]
    assert reported(silent) is silent
