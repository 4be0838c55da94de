"""ZeRO-1's all-gather beside the next forward: started by the step, waited for by the first who reads the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeloom.config import Layout, load_layout
from pipeloom.measure.build import build_pipeline
from pipeloom.parallel import data
from pipeloom.parallel.collectives import PendingCollective, start_gather_slices
from pipeloom.parallel.data import GradientSync
from pipeloom.parallel.mesh import Axis
from pipeloom.train.data.batches import Batch
from pipeloom.train.loop import Trainer
from pipeloom.train.speculative import OptimizerCopy
from processes import run_ranks
from run_notes import context

pytestmark = pytest.mark.core

CPU = torch.device("cpu")
STEPS = 2
CHUNKS: dict[str, Any] = {
    "parallel.dp": 2,
    "parallel.pp": 1,
    "schedule.name": "interleaved",
    "schedule.chunks": 2,
    "schedule.microbatches": 2,
}


class LateGathers:
    """All-gathers that move nothing before someone waits for them; notes when they start and when they are waited for."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.patch = pytest.MonkeyPatch()

    def __enter__(self) -> LateGathers:
        self.patch.setattr(data, "start_gather_slices", self.start)
        return self

    def __exit__(self, *_: Any) -> None:
        self.patch.undo()

    def start(self, flat: Tensor, axis: Axis) -> PendingCollective:
        self.events.append("start")

        def wait() -> None:
            self.events.append("wait")
            start_gather_slices(flat, axis).wait()

        return PendingCollective(SimpleNamespace(wait=wait), lambda: flat, flat)


def trainer_of(rank: int, changes: dict[str, Any]) -> tuple[Layout, Trainer]:
    layout = load_layout("tiny", {"optimizer.zero1": True, **changes})
    pipeline = build_pipeline(layout, CPU)
    return layout, Trainer(layout.config, pipeline, context(rank), None)


def batch_of(layout: Layout, step: int, replica: int) -> Batch:
    generator = torch.Generator().manual_seed(100 * step + replica)
    rows = layout.config.train.global_batch_size // layout.mesh.dp
    text = torch.randint(0, 256, (rows, layout.config.train.seq_len + 1), generator=generator)
    return Batch(text[:, :-1], text[:, 1:])


def train(rank: int, changes: dict[str, Any], steps: int = STEPS) -> tuple[Layout, Trainer, list[float]]:
    layout, trainer = trainer_of(rank, changes)
    losses = []
    for step in range(steps):
        losses.append(trainer.step(batch_of(layout, step, trainer.pipeline.mesh.place.dp), 1e-2).loss)
    return layout, trainer, losses


def weights_of(trainer: Trainer) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trainer.pipeline.named_parameters()}


def same(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    """Equal; in bf16 up to a rounding, which the order of the norm's sum may turn. A step changes weights by 1e-2."""
    return first.keys() == second.keys() and all(
        torch.allclose(value, second[name], rtol=2**-7 if value.dtype == torch.bfloat16 else 0.0, atol=0.0)
        for name, value in first.items()
    )


def of_modules(trainer: Trainer) -> dict[str, Tensor]:
    layers = trainer.pipeline.modules.items()
    values = {f"{layer}.{name}": p for layer, module in layers for name, p in module.named_parameters()}
    return {name: values[name] for name in trainer.pipeline.layouts}


def of_parameters(trainer: Trainer) -> dict[str, Tensor]:
    return dict(trainer.pipeline.named_parameters())  # type: ignore[arg-type]


def of_copy(trainer: Trainer) -> dict[str, Tensor]:
    """After everything that a step changes was copied, spoilt, and put back."""
    copy = OptimizerCopy()
    copy.take(trainer.optimizer)
    with torch.no_grad():
        for tensor in trainer.optimizer.masters.changing():
            tensor.zero_()
    copy.restore(trainer.optimizer)
    return weights_of(trainer)


def of_load(trainer: Trainer) -> dict[str, Tensor]:
    """After a load of halves into the pipeline: twice the weights."""
    trainer.pipeline.load_state_dict({name: value / 2 for name, value in trainer.pipeline.state_dict().items()})
    return {name: 2 * value for name, value in weights_of(trainer).items()}


def of_end(trainer: Trainer) -> dict[str, Tensor]:
    held = [p for bucket in sync_of(trainer).buckets for p in bucket.parameters]
    trainer.pipeline.close()
    assert not sync_of(trainer).weights.pending
    return {name: p.detach() for name, p in trainer.pipeline.named_parameters() if any(p is each for each in held)}


def sync_of(trainer: Trainer) -> GradientSync:
    assert trainer.pipeline.sync is not None
    return trainer.pipeline.sync


READERS: dict[str, Callable[[Trainer], Mapping[str, Tensor]]] = {
    "named_parameters": weights_of,
    "parameters": of_parameters,
    "modules": of_modules,
    "state_dict": lambda trainer: trainer.pipeline.state_dict(),
    "copy": of_copy,
    "load": of_load,
    "close": of_end,
}


def readers(rank: int) -> list[str]:
    """Those who saw other weights than without sharding; the gathers move nothing unless they are waited for."""
    wrong = []
    narrow = {**CHUNKS, "train.dtype": "bfloat16", "model.tie_word_embeddings": True}
    for changes, chosen in ((CHUNKS, [*READERS, "evaluate", "predict"]), (narrow, ["modules", "load"])):
        layout, whole, losses = train(rank, {**changes, "optimizer.zero1": False})
        wanted, probe = weights_of(whole), batch_of(layout, 99, rank)
        loss, outputs = whole.pipeline.evaluate(probe.tokens, probe.targets), whole.pipeline.predict(probe.tokens)
        whole.pipeline.close()
        computations: dict[str, Callable[[Trainer], Mapping[str, Tensor]]] = {
            "evaluate": lambda trainer, probe=probe: {"": trainer.pipeline.evaluate(probe.tokens, probe.targets)},
            "predict": lambda trainer, probe=probe: {"": trainer.pipeline.predict(probe.tokens)},
        }
        seen = {"evaluate": {"": loss}, "predict": {"": outputs}}
        for name in chosen:
            reader = {**READERS, **computations}[name]
            with LateGathers():
                _, trainer, found = train(rank, changes)
                assert sync_of(trainer).weights.pending, "nothing is on its way"
                if not same(reader(trainer), seen.get(name, wanted)):
                    wrong.append(f"{name} with {changes}")
                if found != losses:
                    wrong.append(f"the losses with {changes}")
            trainer.pipeline.close()
    return wrong


@pytest.mark.slow
def test_every_reader_of_weights_waits_for_them() -> None:
    assert run_ranks(readers, 2) == [[], []]


def order(rank: int) -> tuple[list[str], list[str]]:
    """What happened in a step, and in the one after it; a bucket per layer."""
    with LateGathers() as gathers:
        gathers.patch.setattr(GradientSync.__init__, "__kwdefaults__", {**defaults(), "capacity": 1})
        layout, trainer = trainer_of(rank, CHUNKS)
        for layer, module in trainer.pipeline.modules.items():
            module.register_forward_pre_hook(lambda *_, layer=layer: gathers.events.append(layer))
        trainer.step(batch_of(layout, 0, rank), 1e-2)
        first = list(gathers.events)
        gathers.events.clear()
        trainer.step(batch_of(layout, 1, rank), 1e-2)
        then = list(gathers.events)
        trainer.pipeline.close()
    return first, then


def defaults() -> dict[str, Any]:
    given = GradientSync.__init__.__kwdefaults__
    assert given is not None
    return given


def test_a_layer_waits_for_its_own_weights_only_and_just_before_it_runs() -> None:
    for first, then in run_ranks(order, 2):
        starts = first.count("start")
        assert "wait" not in first
        assert first[-starts:] == ["start"] * starts, "the first step's end is not what it started"
        layers = [event for event in then if event not in ("start", "wait")]
        between = []  # waits before each layer's first run
        for layer in dict.fromkeys(layers):
            at = then.index(layer)
            between.append(then[:at].count("wait") - sum(between))
        assert len(between) == 6
        assert all(count > 0 for count in between), between
        assert sum(between) == starts
