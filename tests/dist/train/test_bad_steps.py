"""Steps that are not used: what counts as one, and what a run does about it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from pipeloom.config import load_layout
from pipeloom.errors import PipeloomError
from pipeloom.measure.build import build_pipeline
from pipeloom.train.checkpoint.run import Start
from pipeloom.train.loop import Trainer
from pipeloom.train.step import BadSteps
from processes import run_ranks
from run_notes import Notes, context

CPU = torch.device("cpu")


@pytest.mark.core
def test_a_norm_that_is_not_finite_is_bad_at_once_and_a_spike_after_twenty_steps() -> None:
    steps = BadSteps("skip", "stop")
    assert [steps.judge(value) for value in (math.nan, math.inf)] == ["nan", "nan"]
    assert [steps.judge(1000.0 if at == 3 else 1.0 + at / 100) for at in range(20)] == [""] * 20
    assert steps.judge(10.9) == ""
    assert steps.judge(12.0) == "spike"
    assert steps.judge(12.0) == "spike"  # it is not remembered
    assert len(steps.norms) == 21
    calm = BadSteps("stop", "ignore")
    assert [calm.judge(value) for value in [1.0] * 30 + [1e9]] == [""] * 31


def trained(tmp_path: Any, bad: dict[int, float], **changes: Any) -> tuple[Trainer, list[tuple[str, dict[str, Any]]]]:
    """A run of 8 steps in which the batches of these numbers have gradients that are multiplied."""
    keys = {f"train.{key}": value for key, value in changes.items()}
    layout = load_layout(
        "tiny",
        {
            **{"parallel.pp": 1, "schedule.name": "1f1b", "train.steps": 8, "checkpoint.every": 2},
            **{"model.dropout": 0.1, "log.dir": str(tmp_path), **keys},
        },
    )
    report: Any = Notes()
    trainer = Trainer(layout.config, build_pipeline(layout, CPU), context(), report)
    trainer.begin(Start(), tmp_path / "run")
    plain = trainer.pipeline.step

    def spoilt(*arguments: Any, **keywords: Any) -> Any:
        loss = plain(*arguments, **keywords)
        for parameter in trainer.pipeline.parameters():
            if trainer.state.batch in bad and parameter.grad is not None:
                parameter.grad.mul_(bad[trainer.state.batch])
        return loss

    trainer.pipeline.step = spoilt  # type: ignore[method-assign]
    trainer.train(torch.randint(0, 256, (4000,), generator=torch.Generator().manual_seed(0)))
    return trainer, report.events


@pytest.mark.core
def test_stop_names_the_step(tmp_path: Any) -> None:
    with pytest.raises(PipeloomError, match=r"step 4: the loss is .* and the gradient norm nan: .*; training diverged"):
        trained(tmp_path, {3: math.nan})


def stopped(rank: int, what: str) -> str:
    """The error of this rank when one replica alone has a NaN in the second step."""
    layout = load_layout(
        "tiny",
        {
            **{"parallel.pp": 1, "parallel.dp": 2, "schedule.name": "1f1b", "schedule.microbatches": 4},
            **{"train.steps": 3, "train.device": "cpu", "model.num_hidden_layers": 2},
        },
    )
    trainer = Trainer(layout.config, build_pipeline(layout, CPU), context(rank, 2), None)
    plain = trainer.pipeline.step

    def spoilt(*arguments: Any, **keywords: Any) -> Any:
        if trainer.state.steps_done == 1 and rank == 1 and what == "weight":
            dict(trainer.pipeline.named_parameters())[NORM].data[3] = math.nan
        if trainer.state.steps_done == 1 and rank == 1 and what == "loss":
            first = next(iter(trainer.pipeline.modules.values()))
            handle = first.register_forward_hook(lambda *values: values[2] * math.nan)
            loss = plain(*arguments, **keywords)
            handle.remove()
            return loss
        return plain(*arguments, **keywords)

    trainer.pipeline.step = spoilt  # type: ignore[method-assign]
    try:
        trainer.train(torch.randint(0, 256, (4000,), generator=torch.Generator().manual_seed(0)))
    except PipeloomError as error:
        return str(error)
    finally:
        trainer.pipeline.close()
    return ""


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (
            "weight",
            f"{NORM} is not finite on rank 1 (dp 1), and finite on rank 0 (dp 0); replicas should hold the same bits",
        ),
        (
            "loss",
            "the loss is not finite on rank 1 (dp 1), and finite on rank 0 (dp 0); the data of that replica, or a fault",
        ),
    ],
)
def test_what_one_replica_alone_has_is_not_blamed_on_the_learning_rate(what: str, words: str) -> None:
    for error in run_ranks(stopped, 2, what):
        assert error.startswith("step 2: the loss is nan and the gradient norm nan: ")
        assert words in error
        assert "optimizer.lr" not in error


def test_skip_leaves_the_weights_and_goes_on(tmp_path: Any) -> None:
    trainer, events = trained(tmp_path, {3: math.nan}, on_nan="skip")
    assert (trainer.state.steps_done, trainer.state.batch) == (8, 8)
    assert [values["step"] for event, values in events if event == "skip"] == [4]
    assert all(bool(p.isfinite().all()) for p in trainer.pipeline.parameters())
    plain, _ = trained(tmp_path / "plain", {})
    assert not all(
        torch.equal(a, b) for a, b in zip(trainer.pipeline.parameters(), plain.pipeline.parameters(), strict=True)
    )


@pytest.mark.core
def test_rollback_goes_on_from_the_last_checkpoint_past_the_bad_batch(tmp_path: Any) -> None:
    """Step 6, of batch 5, is bad: back to step 4, whose batches 4 and 5 are left out."""
    trainer, events = trained(tmp_path, {5: math.inf}, on_nan="rollback")
    assert (trainer.state.steps_done, trainer.state.batch) == (8, 10)
    (rollback,) = [values for event, values in events if event == "rollback"]
    assert rollback == {"step": 6, "to": 4, "batch": 6}
    assert [values["step"] for event, values in events if event == "step"] == [1, 2, 3, 4, 5, 6, 5, 6, 7, 8]
    assert all(bool(p.isfinite().all()) for p in trainer.pipeline.parameters())


@pytest.mark.core
def test_rollbacks_are_limited(tmp_path: Any) -> None:
    with pytest.raises(PipeloomError, match=r"another bad step after 2 rollbacks \(train.rollbacks\)"):
        trained(tmp_path, dict.fromkeys(range(3, 100), math.nan), on_nan="rollback", rollbacks=2)
