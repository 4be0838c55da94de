"""Bytes of one layer of each kind: by shapes alone as in a run on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pipeloom.config import Layout, load_layout
from pipeloom.errors import UsageError
from pipeloom.measure import layer_bytes as module
from pipeloom.measure.layer_bytes import layer_bytes
from pipeloom.plan.run import predicted as planned_run
from pipeloom.runtime import Layer

LATENT = {
    **{"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16},
    **{"first_k_dense_replace": 4, "intermediate_size": 192},
}


def written(folder: Path, kind: str, **more: int) -> Path:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "vocab_size": 300,
        "bos_token_id": 1,
        "eos_token_id": 1,
        **more,
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
        {"data.documents": "pack"},
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
    real = module.measured_in

    def without_meta(layout: Layout, layer: Layer, x: torch.Tensor, last: bool) -> Any:
        if x.is_meta:
            raise NotImplementedError
        return real(layout, layer, x, last)

    monkeypatch.setattr(module, "measured_in", without_meta)
    if "data.documents" in flags:  # values say where documents end, and attention runs over them one by one
        assert [layer.saved for layer in layer_bytes(layout)] == pytest.approx(
            [layer.saved for layer in shapes], rel=0.03
        )
    else:
        assert layer_bytes(layout) == shapes


def test_latent_attention_that_no_fused_kernel_takes(tmp_path: Path) -> None:
    """Its values are narrower than its queries. What the planner expects of a block is what one on the CPU saves, but for the
    cosines and sines of its positions; and the blocks that predict further ahead are none of the run's.
    """
    source = str(written(tmp_path, "DeepseekV3", **LATENT))
    layout = load_layout("tiny", {"model.source": source, "train.device": "cpu", "data.tokenizer": "bytes"})
    run = planned_run(layout)
    block, measured = run.planner.layers(run.layout)[1], layer_bytes(layout)[1]
    assert block.saved == pytest.approx(measured.saved + measured.input, rel=0.01)
    assert run.planner.shape.num_nextn_predict_layers == 0


def test_layers_that_need_values_run_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long sequences are shortened, and their bytes scaled; large layers are refused."""
    experts = {"model.num_experts": 4, "parallel.pp": 1, "schedule.name": "gpipe"}
    layout = load_layout("tiny", {"train.seq_len": 128, **experts})
    whole = layer_bytes(layout)
    assert whole[1].saved > layer_bytes(load_layout("tiny", {"train.seq_len": 128}))[1].saved
    monkeypatch.setattr(module, "MOST_FLOPS", 1e6)
    assert [layer.saved for layer in layer_bytes(layout)] == pytest.approx([layer.saved for layer in whole], rel=0.05)
    monkeypatch.setattr(module, "MOST_PARAMETERS", 10)
    with pytest.raises(UsageError, match="parameters, more than the 10 that a dry run builds"):
        layer_bytes(layout)
