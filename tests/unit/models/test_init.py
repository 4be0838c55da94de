"""First weights: a function of seed and name, whatever the layout."""

from __future__ import annotations

import math

import pytest
import torch

from pipeloom import schedules
from pipeloom.config import load
from pipeloom.models import cross_entropy, layers
from pipeloom.models.layers import BLOCK, stable_seed
from pipeloom.ops.layer import Layer
from pipeloom.ops.live_bytes import LiveBytes
from pipeloom.parallel.dispatch import ExpertParallel
from pipeloom.parallel.mesh import Axis
from pipeloom.parallel.sharding import join, shardings_of
from pipeloom.parallel.tensor import TensorParallel
from pipeloom.runtime import LocalPipeline

MODEL = load("tiny").model
# Embedding, attention and experts of several blocks each, cut by rows, by columns and by experts; blocks end inside parts.
WIDE = load("moe").model.model_copy(
    update={
        "hidden_size": 768,
        "intermediate_size": 1536,
        "num_experts": 4,
        "num_hidden_layers": 1,
        "vocab_size": 4099,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
    }
)


def part_of(tp: int, ep: int) -> list[Layer]:
    """The wide model's layers on one of 2 tensor-parallel by 2 expert-parallel ranks; no layer is run."""
    tensor, expert = Axis((0, 1), tp, None), Axis((0, 2), ep, None)
    return layers(WIDE, 5, tensor=TensorParallel(tensor), expert=ExpertParallel(expert))


def test_every_layout_starts_from_bitwise_the_same_weights() -> None:
    one = {f"{layer.name}.{n}": p for layer in layers(MODEL, 7) for n, p in layer().named_parameters()}
    for schedule, stages in (
        (schedules.gpipe(ranks=2, microbatches=2), (1, 5)),
        (schedules.interleaved(ranks=3, chunks=2, microbatches=3), None),
    ):
        torch.manual_seed(stages is None)
        pipeline = LocalPipeline(layers(MODEL, 7), schedule, loss=cross_entropy, stages=stages)
        found = dict(pipeline.named_parameters())
        assert found.keys() == one.keys()
        assert all(torch.equal(found[name], one[name]) for name in one)


def test_drawing_leaves_the_global_random_state_alone() -> None:
    torch.manual_seed(3)
    want = torch.rand(4)
    torch.manual_seed(3)
    for layer in layers(MODEL, 0):
        layer()
    assert torch.equal(torch.rand(4), want)


def test_every_cut_of_matrices_of_several_blocks_gives_bitwise_the_same_weights() -> None:
    for at, layer in enumerate(layers(WIDE, 5)):
        module = layer()
        parts = {(tp, ep): part_of(tp, ep)[at]() for tp in (0, 1) for ep in (0, 1)}
        layouts = shardings_of(parts[0, 0])
        held = {place: dict(part.named_parameters()) for place, part in parts.items()}
        for name, whole in module.named_parameters():
            axes = [shard.axis for shard in layouts[name].shards]
            indices = {place: dict(zip(("tp", "ep"), place, strict=True)) for place in parts}
            pieces = {tuple(indices[place][axis] for axis in axes): held[place][name] for place in parts}
            assert torch.equal(join(pieces, layouts[name]), whole), name
    assert sum(p.numel() > BLOCK for p in module.parameters()), "no matrix has several blocks"


def test_blocks_of_one_matrix_differ_and_are_normal() -> None:
    weight = layers(WIDE, 5)[0]().weight
    first, second = weight[: BLOCK // 768], weight[BLOCK // 768 : 2 * (BLOCK // 768)]
    assert not torch.equal(first, second)
    for block in (first, second):
        assert block.std().item() == pytest.approx(math.sqrt(2 / (5 * 768)), rel=0.01)
        assert block.mean().item() == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rank_never_holds_more_than_its_part_and_one_block(dtype: torch.dtype) -> None:
    tensor = TensorParallel(Axis((0, 1, 2, 3), 1, None))
    for layer in layers(WIDE, 5, dtype, tensor=tensor):
        with LiveBytes() as live:
            module = layer()
        part = sum(p.nbytes for p in module.parameters())
        assert part < live.peak <= part + 4 * BLOCK + 2**18, layer.name  # 2**18: numbers of rows, buffers of the layer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_dtype_changes_the_rounding_only(dtype: torch.dtype) -> None:
    narrow = layers(MODEL, 0, dtype)[0]().weight
    assert narrow.dtype == dtype
    assert torch.equal(narrow, layers(MODEL, 0)[0]().weight.to(dtype))


def test_deviations_follow_width_and_depth() -> None:
    block = layers(MODEL.model_copy(update={"hidden_size": 256, "intermediate_size": 512}), 0)[1]()
    usual = math.sqrt(2 / (5 * 256))
    assert block.self_attn.q_proj.weight.std().item() == pytest.approx(usual, rel=0.02)
    for part in (block.self_attn.o_proj, block.mlp.down_proj):
        assert part.weight.std().item() == pytest.approx(usual / math.sqrt(2 * 4), rel=0.02)
    assert block.input_layernorm.weight.tolist() == [1.0] * 256


def test_the_seed_of_a_name_never_changes() -> None:
    assert stable_seed(0, "model.embed_tokens.weight") == 3590614378461558581
    assert stable_seed("a", "b") != stable_seed("ab")
