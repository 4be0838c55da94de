"""What a dry run predicts of activations, against the tensors that live in a step; and the schedule's time from layers'."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeloom.cli.dry_run import measured_timeline, peak_bytes
from pipeloom.config import Layout, load_layout
from pipeloom.errors import UsageError
from pipeloom.train.build import build_pipeline
from pipeloom.train.report import layer_costs
from pipeloom.train.report.layer_costs import LayerCost, LayerCosts, measure_layers
from pipeloom.train.report.verify import make_batch
from processes import run_ranks

TOLERANCE = 0.25  # of the bytes: temporaries of operations, and messages, come on top

FLAGS: list[dict[str, Any]] = [
    {"schedule.name": "1f1b", "schedule.microbatches": 4},
    {"schedule.name": "interleaved", "schedule.microbatches": 4, "train.recompute": "full"},
]
SHAPE = {
    "model.hidden_size": 64,
    "model.intermediate_size": 192,
    "train.seq_len": 48,
    "train.global_batch_size": 8,
}


class _Live(TorchDispatchMode):
    """The most bytes of storages that operations made and that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_leaves((args, kwargs or {})):
            if isinstance(tensor, torch.Tensor):
                self._known.add(tensor.untyped_storage())
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage()) not in self._known:
                self._known.add(storage)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._freed, storage.nbytes())
        self.most = max(self.most, self.now)
        return result

    def _freed(self, size: int) -> None:
        self.now -= size


def live_bytes(rank: int) -> list[int]:
    found = []
    for flags in FLAGS:
        layout = load_layout("tiny", SHAPE | flags)
        pipeline, batch = build_pipeline(layout, torch.device("cpu")), make_batch(layout)
        pipeline.step(batch.tokens, batch.targets)  # gradients exist from now on
        with _Live() as live:
            pipeline.step(batch.tokens, batch.targets)
        found.append(live.most)
        pipeline.close()
    return found


def predicted(layout: Layout) -> list[float]:
    costs = measure_layers(layout)
    return peak_bytes(layout, costs, measured_timeline(layout, costs))


def test_the_predicted_bytes_are_those_of_a_step() -> None:
    by_rank = run_ranks(live_bytes, 2)
    for at, flags in enumerate(FLAGS):
        expected = predicted(load_layout("tiny", SHAPE | flags))
        found = [each[at] for each in by_rank]
        assert found == pytest.approx(expected, rel=TOLERANCE)


def test_the_step_is_the_schedule_of_the_layers() -> None:
    layout = load_layout("tiny", {"schedule.name": "gpipe", "schedule.microbatches": 3, "parallel.stages": "Et|tttL"})
    sizes = layout.microbatch_sizes
    assert sizes == (3, 3, 2)
    costs = LayerCosts(
        (LayerCost(0.0, 0.0, 10.0), *[LayerCost(3.0, 6.0, 100.0, 7.0)] * 4, LayerCost(1.0, 2.0, 5.0)), 3, 16, 1
    )
    timeline = measured_timeline(layout, costs)
    whole = 3 + 8 / 3 * 10  # the first rank's first forward, then all of the second rank's
    assert timeline.makespan == pytest.approx(whole + 8 / 3 * 20 + 2 / 3 * 6)
    assert peak_bytes(layout, costs, timeline) == pytest.approx([8 / 3 * 110 + 7, 8 / 3 * 305 + 7])


def test_long_sequences_are_cut_and_large_layers_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = load_layout("tiny", {"train.seq_len": 128, "parallel.pp": 1, "schedule.name": "gpipe"})
    whole = measure_layers(layout)
    monkeypatch.setattr(layer_costs, "MOST_FLOPS", 1e6)
    cut = measure_layers(layout)
    assert cut.tokens < whole.tokens == 128
    for short, long in zip(cut.layers, whole.layers, strict=True):
        assert short.activation == pytest.approx(long.activation, rel=0.05)
    monkeypatch.setattr(layer_costs, "MOST_PARAMETERS", 10)
    with pytest.raises(UsageError, match="parameters, more than the 10 that a dry run builds"):
        measure_layers(layout)
