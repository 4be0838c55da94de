"""`data.batching = "planned"`: steps of documents packed for their lengths, against one process that sees each alone."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from corpora import documents, json_lines
from models import gradients, worst
from pipeloom.config import Config, load_layout
from pipeloom.measure.build import build_pipeline, model_layers, training_loss
from pipeloom.runtime import LocalPipeline
from pipeloom.schedule.families import build
from pipeloom.train.data.batches import Batches
from pipeloom.train.data.planned import most_tokens
from pipeloom.train.data.prepare import Data, opened, prepare
from pipeloom.train.loop import Trainer
from pipeloom.train.observers import StepObserver
from processes import run_ranks
from run_notes import context

CPU = torch.device("cpu")


def settings(folder: Path, **keys: Any) -> dict[str, Any]:
    """A decoder with dropout 0, on documents of 15 to 250 bytes; every step has 12 of these."""
    source = json_lines(folder / "a.jsonl", ({"text": text} for text in documents(150)))
    named = {key.replace("__", "."): value for key, value in keys.items()}
    return {
        "data.source": str(source), "data.cache": str(folder / "cache"), "data.batching": "planned",
        "train.seq_len": 128, "train.global_batch_size": 12, "schedule.microbatches": 6, "schedule.name": "1f1b",
        "model.hidden_size": 16, "model.num_attention_heads": 2, "model.num_key_value_heads": 2,
        "model.intermediate_size": 16, "optimizer.barrier": True, **named,
    }  # fmt: skip


def opened_by(config: Config) -> Data:
    return opened(config, prepare(config))


class OneProcess:
    """The model in one process, whose weights are those of the run's start."""

    def __init__(self, config: Config) -> None:
        layers = model_layers(config, torch.float32, CPU)
        self.pipeline = LocalPipeline(layers, build("1f1b", 1, 1), loss=training_loss(config))

    def step(self, batch: Any) -> tuple[float, dict[str, Tensor]]:
        loss = self.pipeline.step(batch.tokens, batch.targets, **batch.keywords).item()
        found = gradients(self.pipeline)
        self.pipeline.zero_grad()
        return loss, found


def steps(rank: int, keys: dict[str, Any]) -> dict[str, list[Any]]:
    """Train with rates so small that weights stay; each step beside one process that gets a row for each document."""
    layout = load_layout("tiny", {**keys, "optimizer.lr": 1e-12, "optimizer.min_lr": 1e-12})
    data, one = opened_by(layout.config), OneProcess(layout.config)
    pipeline = build_pipeline(layout, CPU)
    batches = Batches(data.train, layout.config, layout.mesh.dp)
    found: dict[str, list[Any]] = {name: [] for name in ("loss", "worst", "shapes", "alive")}
    wanted: list[float] = []

    def compare() -> None:
        loss, want = one.step(batches.of_step(len(wanted)))
        wanted.append(loss)
        got = gradients(pipeline)
        found["worst"].append(worst(got, {name: want[name] for name in got}))

    def after(end: Any) -> None:
        found["loss"].append(abs(end.outcomes[-1].loss - wanted[-1]) / wanted[-1])
        found["shapes"].append([each.tokens.shape[1] for each in end.batch.microbatches])
        gc.collect()
        mine = sum(part is not None for each in end.batch.microbatches for part in each)
        found["alive"].append(sum(issubclass(type(thing), Tensor) for thing in gc.get_objects()) - mine)

    trainer = Trainer(
        layout.config, pipeline, context(rank, layout.world_size), None, observers=[StepObserver("test", None, after)]
    )
    step = trainer.optimizer.step
    trainer.optimizer.step = lambda norm, rate: (compare(), step(norm, rate))[1]  # type: ignore[method-assign]
    trainer.train(data.train)
    pipeline.close()
    found["most"] = [most_tokens(layout.config)]
    return found


def require_as_one_process(reports: list[dict[str, list[Any]]], count: int) -> None:
    for report in reports:
        assert len(report["loss"]) == count
        assert max(*report["loss"], *report["worst"]) <= 1e-5, report
        assert max(max(shapes) for shapes in report["shapes"]) <= report["most"][0]
        assert len({tuple(shapes) for shapes in report["shapes"]}) == count, report  # no two steps are alike


@pytest.mark.core
def test_steps_of_two_ranks_are_those_of_one_process(tmp_path: Path) -> None:
    keys = settings(tmp_path, parallel__pp=2, schedule__name="zbv", train__steps=4)
    opened_by(load_layout("tiny", keys).config)
    require_as_one_process(run_ranks(steps, 2, keys), 4)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "name"), [(2, "zbv"), (4, "zbv"), (4, "1f1b")])
def test_fifty_steps_are_those_of_one_process_and_memory_stays(world: int, name: str, tmp_path: Path) -> None:
    axes = {"parallel__pp": 2, "parallel__dp": world // 2}
    keys = settings(tmp_path, **axes, schedule__name=name, train__steps=50)
    opened_by(load_layout("tiny", keys).config)
    reports = run_ranks(steps, world, keys)
    require_as_one_process(reports, 50)
    for report in reports:
        alive = report["alive"]  # a tensor kept in each step would add 25, buffers that grow to the largest add a few
        assert max(alive[25:]) <= max(alive[:25]) + 16, alive


def losses(rank: int, keys: dict[str, Any]) -> list[float]:
    layout = load_layout("tiny", keys)
    found: list[float] = []
    row = StepObserver("test", None, lambda end: found.extend(outcome.loss for outcome in end.outcomes))
    pipeline = build_pipeline(layout, CPU)
    trainer = Trainer(layout.config, pipeline, context(rank, layout.world_size), None, observers=[row])
    trainer.train(opened_by(layout.config).train)
    pipeline.close()
    return found


@pytest.mark.parametrize(
    "more",
    [
        {"optimizer.zero1": True},
        {"optimizer.barrier": False},
        {"model.num_nextn_predict_layers": 1},
        {"train.recompute": "full"},
        {"model.num_experts": 4, "model.aux_loss_coef": 0.0},
    ],
    ids=lambda more: next(iter(more)),
)
def test_training_learns_as_in_one_process(more: dict[str, Any], tmp_path: Path) -> None:
    keys = {**settings(tmp_path, train__steps=4), **more}
    opened_by(load_layout("tiny", keys).config)
    one = losses(0, {**keys, "parallel.pp": 1})
    assert max(one) > 1.05 * min(one)  # it learns
    for found in run_ranks(losses, 4, {**keys, "parallel.pp": 2, "parallel.dp": 2}):
        assert found == pytest.approx(one, rel=1e-4)
