"""What the formulas say that a step sends is what it sends: collectives of tensor and context parallelism, messages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from layouts import LENGTH, Way, model, step, tensor_parallel
from pipeloom.config import load_layout
from pipeloom.models import cross_entropy, layers, token_loss
from pipeloom.parallel import collectives
from pipeloom.parallel.context import ContextParallel
from pipeloom.parallel.mesh import Mesh
from pipeloom.plan.run import boundary_bytes
from pipeloom.plan.volume import Volume, volumes, words
from pipeloom.runtime import Pipeline, RuntimeOptions
from pipeloom.schedule.channels import message_counts, size_words, traffic
from pipeloom.schedule.families import FAMILIES, build
from pipeloom.schedule.transforms import recompute as recomputing
from pipeloom.shapes.layers import parameter_count
from pipeloom.shapes.mesh import MeshShape
from processes import run_ranks

pytestmark = pytest.mark.core

# bytes that leave a rank, over the bytes of the larger of its two tensors and (ranks - 1) / ranks
MOVES = {"all_reduce": 2.0, "all_gather_single": 1.0, "all_gather_into_tensor": 1.0, "all_to_all_single": 1.0}
WIDTH = model().hidden_size


class _Counter:
    """torch.distributed, seen by the layers: collectives of hidden states, and the bytes that a ring sends for them."""

    def __init__(self, ranks: int, every: bool = False) -> None:
        self.real, self.ranks, self.every = collectives.dist, ranks, every
        self.count, self.bytes = 0, 0.0

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.real, name)
        if name not in MOVES:
            return value

        def call(first: torch.Tensor, *others: Any, **keywords: Any) -> Any:
            if self.every or first.shape[-1] == WIDTH:  # not the statistics of the loss
                whole = first.numel() * first.element_size()
                self.count += 1
                self.bytes += MOVES[name] * whole * (self.ranks - 1) / self.ranks
            return value(first, *others, **keywords)

        return call


def sent(rank: int, ranks: int) -> list[tuple[int, float]]:
    found = []
    real = collectives.dist
    for sequence in (False, True):
        for recompute in (False, True):
            tensor = tensor_parallel(sequence)
            counter = _Counter(ranks)
            collectives.dist = counter  # type: ignore[assignment]
            try:
                step(model(), Way(recompute=recompute), tensor)
            finally:
                collectives.dist = real
            found.append((counter.count, counter.bytes))
    return found


def test_tensor_parallel_volume() -> None:
    ranks = run_ranks(sent, 2, 2)
    for at, (sequence, recompute) in enumerate((s, r) for s in (False, True) for r in (False, True)):
        layout = load_layout(
            "tiny",
            {
                f"model.{key}": getattr(model(), key)
                for key in ("num_hidden_layers", "num_key_value_heads", "vocab_size")
            }
            | {"parallel.pp": 1, "parallel.tp": 2, "parallel.sp": sequence, "schedule.name": "1f1b"}
            | {"train.recompute": "full" if recompute else "none", "train.dtype": "float32"}
            | {"train.seq_len": LENGTH, "train.global_batch_size": 5, "schedule.microbatches": 2},
        )
        (volume,) = volumes(layout)
        assert volume.kind == "tensor"
        if sequence and recompute:  # this step runs the output layer again, too, which the trainer does not: its gather
            extra = 2, (2 - 1) * 5 * LENGTH * WIDTH * 4
            volume = Volume("tensor", volume.count + extra[0], volume.bytes + extra[1])
        assert (volume.count, volume.bytes) == (ranks[0][at][0], sum(rank[at][1] for rank in ranks)), (
            sequence,
            recompute,
        )


def _layout(**keys: Any) -> Any:
    sizes = {"train.dtype": "float32", "train.seq_len": 16, "train.global_batch_size": 8, "schedule.microbatches": 4}
    return load_layout("tiny", {"schedule.name": "1f1b", "parallel.pp": 1} | sizes | keys)


def test_pipeline_volume() -> None:
    """4 micro-batches of 2 sequences cross one boundary, there and back, on each of 2 tensor-parallel ranks."""
    layout = _layout(**{"parallel.pp": 2})
    hidden = layout.config.model.hidden_size
    assert boundary_bytes(layout) == (2 * 16 * hidden * 4,) * 4
    assert volumes(layout) == (Volume("pipeline", 8, 8 * 2 * 16 * hidden * 4),)
    half = _layout(**{"parallel.pp": 2, "parallel.tp": 2, "parallel.sp": True})
    assert volumes(half)[0] == Volume(
        "pipeline", 16, 8 * 2 * 16 * hidden * 4
    )  # each of two workers sends half of the tokens
    narrow = _layout(**{"parallel.pp": 2, "train.dtype": "bfloat16"})
    assert volumes(narrow)[0].bytes == volumes(layout)[0].bytes / 2


def test_data_parallel_volume() -> None:
    """2 (N - 1) times the gradients in fp32, over all replicas; bfloat16 parameters are gathered narrow with zero1."""
    keys = {"parallel.dp": 4, "train.global_batch_size": 16}
    layout = _layout(**keys)
    assert not layout.config.model.tie_word_embeddings
    count = parameter_count(layout.config.model.shape())
    (volume,) = volumes(layout)
    assert volume == Volume("data", 1, 2 * 3 * 4 * count)
    (sharded,) = volumes(_layout(**keys, **{"train.dtype": "bfloat16", "optimizer.zero1": True}))
    assert sharded.bytes == (4 + 2) * 3 * count
    assert "data " + size_words(volume.bytes) in words(layout)


def test_experts_volume() -> None:
    """Of 2 choices of each of 8 x 16 tokens a half stays on its rank; 4 passes through each block; experts are reduced apart."""
    keys = {"model.num_experts": 4, "model.num_experts_per_tok": 2, "parallel.dp": 2, "parallel.ep": 2}
    layout = _layout(**keys)
    data, experts = volumes(layout)
    model_ = layout.config.model
    rows = 8 * 16 * 2
    assert experts.kind == "experts"
    assert experts.bytes == 4 * model_.num_hidden_layers * rows * model_.hidden_size * 4 / 2
    assert experts.count == 4 * model_.num_hidden_layers * 4
    spread = 3 * model_.hidden_size * model_.expert_width * 4 * model_.num_hidden_layers
    assert data.bytes == 2 * 1 * 4 * (parameter_count(model_.shape()) - spread)  # experts have one replica each


def exchanged(rank: int, recomputed: str) -> tuple[int, float]:
    """The exchanges of keys and values of a step of one micro-batch, and their bytes on this rank."""
    mesh, real = Mesh.of(MeshShape(cp=2)), collectives.dist
    assert mesh is not None
    context = ContextParallel(mesh.cp)
    options = RuntimeOptions(recompute="full" if recomputed == "full" else "none")
    schedule = build("1f1b", 1, 1)
    schedule = recomputing(schedule, part=recomputed) if recomputed in ("attention", "mlp") else schedule
    pipeline = Pipeline(layers(model(), 0, context=context), schedule, loss=cross_entropy, mesh=mesh, options=options)
    tokens = torch.randint(0, model().vocab_size, (2, 2, LENGTH), generator=torch.Generator().manual_seed(1))
    counter = _Counter(2, every=True)
    collectives.dist = counter  # type: ignore[assignment]
    try:
        pipeline.step(tokens[0], tokens[1])
    finally:
        collectives.dist = real
    pipeline.close()
    return counter.count, counter.bytes


@pytest.mark.parametrize("recomputed", ["none", "full", "attention", "mlp"])
def test_context_volume(recomputed: str) -> None:
    shape = model()
    sizes = {f"model.{key}": getattr(shape, key) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads")}
    sizes["model.num_key_value_heads"] = shape.num_key_value_heads
    layout = _layout(
        **sizes,
        **{"parallel.cp": 2, "parallel.pp": 1, "schedule.name": "1f1b", "schedule.microbatches": 1},
        **{"train.global_batch_size": 2, "train.seq_len": LENGTH, "train.recompute": recomputed},
    )
    (want,) = [volume for volume in volumes(layout) if volume.kind == "context"]
    counts, sent_bytes = zip(*run_ranks(exchanged, 2, recomputed), strict=True)
    assert counts == (want.count, want.count)
    assert sum(sent_bytes) == want.bytes


def summed(rank: int, sequence: bool, part: str) -> tuple[int, float]:
    """The collectives of hidden states of tensor-parallel layers in a step of one micro-batch, and their bytes on this rank."""
    tensor, real = tensor_parallel(sequence), collectives.dist
    loss, shape = token_loss(model(), tensor=tensor), MeshShape(tp=2)
    schedule = recomputing(build("1f1b", 1, 1), part=part) if part != "none" else build("1f1b", 1, 1)
    pipeline = Pipeline(layers(model(), 0, tensor=tensor), schedule, loss=loss, mesh=Mesh.of(shape))
    tokens = torch.randint(0, model().vocab_size, (2, 2, LENGTH), generator=torch.Generator().manual_seed(1))
    counter = _Counter(2)
    collectives.dist = counter  # type: ignore[assignment]
    try:
        pipeline.step(tokens[0], tokens[1])
    finally:
        collectives.dist = real
    pipeline.close()
    return counter.count, counter.bytes


@pytest.mark.slow
@pytest.mark.parametrize("part", ["attention", "mlp", "norms"])
@pytest.mark.parametrize("sequence", [False, True])
def test_tensor_volume_of_a_part(sequence: bool, part: str) -> None:
    shape = model()
    keys = {f"model.{key}": getattr(shape, key) for key in ("num_hidden_layers", "num_key_value_heads", "vocab_size")}
    keys |= {"parallel.tp": 2, "parallel.sp": sequence, "schedule.microbatches": 1, "train.recompute": part}
    (want,) = volumes(_layout(**keys, **{"train.global_batch_size": 2, "train.seq_len": LENGTH}))
    counts, sent_bytes = zip(*run_ranks(summed, 2, sequence, part), strict=True)
    assert counts == (want.count, want.count)
    assert sum(sent_bytes) == want.bytes


def test_dense_blocks_exchange_no_tokens() -> None:
    keys = {"model.num_experts": 4, "parallel.dp": 2, "parallel.ep": 2, "train.recompute": [0, 1]}
    blocks = _layout(**keys).config.model.num_hidden_layers
    every = volumes(_layout(**keys))[1]
    one = volumes(_layout(**keys, **{"model.moe_layer_freq": blocks}))[1]
    assert every.count / one.count == every.bytes / one.bytes == (4 * blocks + 2 * 2) / (4 + 2)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_message_counts_are_the_traffic(name: str) -> None:
    schedule = build(name, 4, 8)
    found: dict[Any, int] = {}
    for program in traffic(schedule):
        for entry in program:
            for message in entry.sends:
                found[message.channel] = found.get(message.channel, 0) + 1
    assert message_counts(schedule) == dict(sorted(found.items()))
