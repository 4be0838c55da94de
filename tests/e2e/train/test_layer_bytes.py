"""What a dry run predicts of activations, against the tensors that live in a step."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeloom.cli.dry_run import peak_bytes
from pipeloom.config import Layout, load_layout
from pipeloom.errors import UsageError
from pipeloom.runtime import Layer
from pipeloom.train.build import build_pipeline
from pipeloom.train.report import layer_bytes as module
from pipeloom.train.report.layer_bytes import LayerBytes, layer_bytes
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
    return peak_bytes(layout, layer_bytes(layout))


def test_the_predicted_bytes_are_those_of_a_step() -> None:
    by_rank = run_ranks(live_bytes, 2)
    for at, flags in enumerate(FLAGS):
        expected = predicted(load_layout("tiny", SHAPE | flags))
        found = [each[at] for each in by_rank]
        assert found == pytest.approx(expected, rel=TOLERANCE)


def test_the_peak_is_that_of_the_schedule() -> None:
    layout = load_layout("tiny", {"schedule.name": "gpipe", "schedule.microbatches": 3, "parallel.stages": "Et|tttL"})
    assert layout.microbatch_sizes == (3, 3, 2)
    layers = (LayerBytes(10.0), *[LayerBytes(100.0, 7.0)] * 4, LayerBytes(5.0))
    assert peak_bytes(layout, layers) == pytest.approx([8 / 3 * 110 + 7, 8 / 3 * 305 + 7])


def written(folder: Path, kind: str) -> Path:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "vocab_size": 300,
        "bos_token_id": 1,
        "eos_token_id": 1,
    }
    getattr(transformers, f"{kind}ForCausalLM" if kind != "GPT2" else "GPT2LMHeadModel")(
        getattr(transformers, f"{kind}Config")(**sizes)
    ).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"train.dtype": "bfloat16"},
        {"model.num_key_value_heads": 2},
        {"model.source": "Llama"},
        {"model.source": "GPT2"},
    ],
)
def test_shapes_alone_give_the_bytes_of_a_run(
    flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """GPT-2's attention has a dropout, so that it is not fused."""
    if kind := flags.get("model.source"):
        flags = {"model.source": str(written(tmp_path, kind))}
    layout = load_layout("tiny", flags)
    monkeypatch.setattr(module, "MOST_PARAMETERS", 0)
    shapes = layer_bytes(layout)
    monkeypatch.undo()
    real = module.saved_by

    def without_meta(layout: Layout, layer: Layer, x: torch.Tensor, last: bool) -> Any:
        if x.is_meta:
            raise NotImplementedError
        return real(layout, layer, x, last)

    monkeypatch.setattr(module, "saved_by", without_meta)
    assert layer_bytes(layout) == shapes


def test_layers_that_need_values_run_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long sequences are shortened, and their bytes scaled; large layers are refused."""
    experts = {"model.num_experts": 4, "parallel.pp": 1, "schedule.name": "gpipe"}
    layout = load_layout("tiny", {"train.seq_len": 128, **experts})
    whole = layer_bytes(layout)
    assert whole[1].held > layer_bytes(load_layout("tiny", {"train.seq_len": 128}))[1].held
    monkeypatch.setattr(module, "MOST_FLOPS", 1e6)
    assert [layer.held for layer in layer_bytes(layout)] == pytest.approx([layer.held for layer in whole], rel=0.05)
    monkeypatch.setattr(module, "MOST_PARAMETERS", 10)
    with pytest.raises(UsageError, match="parameters, more than the 10 that a dry run builds"):
        layer_bytes(layout)
