"""`verify`: what passes, what fails, and how differences are measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import pipeloom
from pipeloom.config import load_layout
from pipeloom.train.report.verify import ComparedStep, compare, make_batch, relative_error, serial_step

CPU = torch.device("cpu")


def verify(*flags: str) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON of `pipeloom verify tiny`."""
    done = pipeloom("verify", "tiny", "--json", *flags)
    return done.returncode, json.loads(done.stdout)


def test_layouts_pass_in_one_pool_whatever_their_size(tmp_path: Path) -> None:
    matrix = tmp_path / "matrix.toml"
    matrix.write_text(
        """
[[layout]]
parallel.pp = [2, 1, 2]
schedule.name = "1f1b"
schedule.microbatches = 3
model.tie_word_embeddings = true
[[layout]]
parallel.pp = 2
model.num_hidden_layers = 7
schedule.chunks = 2
schedule.microbatches = 8
"""
    )
    code, report = verify("--matrix", str(matrix))
    assert code == 0, report
    assert len(report["layouts"]) == 4
    assert all(layout["passed"] and layout["worst_error"] <= 1e-5 for layout in report["layouts"])
    assert [layout["parameters"] for layout in report["layouts"]] == [39, 38, 39, 66]


def test_swapped_micro_batches_fail() -> None:
    code, report = verify("--debug.fault", "swap-microbatches:0,1")
    assert code == 1
    assert not report["passed"]
    failing = report["layouts"][0]["failing"]
    assert len(failing) == report["layouts"][0]["parameters"]
    assert min(failing.values()) > 1e-3


def step(loss: float = 2.0, **gradients: Any) -> ComparedStep:
    return ComparedStep(loss, {name: None if g is None else torch.tensor(g) for name, g in gradients.items()})


@pytest.mark.core
def test_differences_are_relative_to_the_largest_serial_value() -> None:
    found = [step(a=[1.0, 3.0]), step(b=[0.0])]
    result = compare(found, step(a=[1.0, 4.0], b=[0.0]), (), 0.25)
    assert result.errors == {"a": 0.25, "b": 0.0}
    assert result.loss_error == 0
    assert result.passed
    assert not compare(found, step(a=[1.0, 4.0], b=[0.0]), (), 0.2).passed


@pytest.mark.core
@pytest.mark.parametrize(
    "found",
    [
        [step(a=[1.0])],
        [step(a=[1.0], b=None)],
        [step(a=[1.0], b=[float("nan")])],
        [step(a=[1.0], b=[2.0, 2.0])],
        [step(a=[1.0], b=[2.0], c=[0.0])],
        [step(a=[1.0], b=[2.0]), step(b=[3.0])],
        [step(a=[1.0], b=[3.0]), step(b=[2.0])],
        [step(a=[1.0], b=[2.0]), step(loss=2.1)],
        [step(a=[1.0], b=[2.0]), step(loss=float("nan"))],
        [step(loss=float("nan"), a=[1.0], b=[2.0])],
    ],
    ids=[
        "missing",
        "none",
        "nan",
        "shape",
        "unknown",
        "replica",
        "first replica",
        "loss",
        "last loss is nan",
        "loss is nan",
    ],
)
def test_whatever_differs_fails(found: list[ComparedStep]) -> None:
    reference = step(a=[1.0], b=[2.0])
    assert compare([step(a=[1.0]), step(b=[2.0])], reference, (), 1e-5).passed
    assert not compare(found, reference, (), 1e-5).passed


@pytest.mark.core
def test_a_tied_weight_counts_under_the_names_that_ranks_hold() -> None:
    reference = step(a=[1.0], b=[1.0], c=[1.0])
    assert compare([step(a=[1.0], c=[1.0])], reference, [("a", "b")], 1e-5).passed
    assert not compare([step(c=[1.0])], reference, [("a", "b")], 1e-5).passed
    assert not compare([step(a=[1.0], c=[1.0]), step(b=[0.5])], reference, [("a", "b")], 1e-5).passed


@pytest.mark.core
def test_zero_and_missing_gradients() -> None:
    zero, one = torch.zeros(2), torch.ones(2)
    assert relative_error(None, None) == 0
    assert relative_error(zero, zero) == 0
    assert relative_error(one, zero) == float("inf")
    assert relative_error(None, zero) == float("inf")


@pytest.mark.core
def test_the_serial_step_is_the_mean_over_all_targets() -> None:
    """Cut into other micro-batches it is the same step up to rounding."""
    layouts = [load_layout("tiny", {"schedule.microbatches": m, "train.dtype": "float64"}) for m in (1, 2, 5, 8)]
    first, *others = [serial_step(layout, CPU) for layout in layouts]
    for other in others:
        assert compare([other], first, (), 1e-12).passed


@pytest.mark.core
def test_no_two_rows_of_the_batch_are_alike() -> None:
    tokens, targets, *_ = make_batch(load_layout("tiny"))
    assert tokens.shape == targets.shape == (8, 16)
    assert len({tuple(row) for row in tokens.tolist() + targets.tolist()}) == 16
