"""Gathered outputs, unsplit inputs and fused projections of tensor-parallel layers: one process's values and gradients."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pipeloom as pl
from layouts import tensor_parallel
from pipeloom import checkpoint
from pipeloom.errors import ArgumentError, UsageError
from pipeloom.models.lora import AdaptedLinear
from pipeloom.ops.deferred import WeightGradContext, WeightGradQueue, defer_weight_gradients
from pipeloom.parallel.mesh import Axis, Mesh
from pipeloom.parallel.sharding import ParameterSharding, Shard, from_plain, join, shard_of, shardings_of, to_plain
from pipeloom.parallel.tensor import (
    TensorParallel,
    column_linear,
    fused_column_linear,
    row_linear,
    split_projections,
    sum_over_ranks,
)
from pipeloom.runtime import Layer, Pipeline, RuntimeOptions
from pipeloom.shapes.mesh import MeshShape
from pipeloom.train.checkpoint.boxes import Box
from pipeloom.train.checkpoint.manifest import read_manifest
from pipeloom.train.checkpoint.reader import Reader
from processes import run_ranks

WIDTH, HEAD, LENGTH, BATCHES = 8, 2, 8, (2, 3)
QKV, GATE_UP, MIXED = (8 * HEAD, 4 * HEAD, 4 * HEAD), (12, 12), (8, 4)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Block(nn.Module):
    """Grouped-query attention and SwiGLU with fused projections, and layers with whole outputs and whole inputs."""

    def __init__(self, tensor: TensorParallel | None) -> None:
        super().__init__()
        self.qkv = fused_column_linear(WIDTH, QKV, tensor, "heads", unit=HEAD, bias=True)
        self.out = row_linear(QKV[0], WIDTH, tensor, bias=True)
        self.gate_up = fused_column_linear(WIDTH, GATE_UP, tensor, bias=True)
        self.down = row_linear(GATE_UP[0], WIDTH, tensor)
        self.wide = column_linear(WIDTH, 12, tensor, bias=True, gather_output=True)
        self.narrow = row_linear(12, WIDTH, tensor, bias=True, input_is_parallel=False)
        self.mixed = fused_column_linear(WIDTH, MIXED, tensor, bias=True, gather_output=True)
        self.register_buffer("ramp", torch.linspace(0.5, 2, 12), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in split_projections(self.qkv(x), QKV)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        gate, up = split_projections(self.gate_up(x), GATE_UP)
        x = x + self.down(F.silu(gate) * up)
        whole = torch.tanh(self.wide(x)) * self.ramp  # of every output another
        x = x + self.narrow(whole * self.mixed(x).cumsum(-1))
        return x


def adapted(block: Block) -> Block:
    """With a low-rank adapter at every linear layer."""
    shapes = {name: tuple(child.weight.shape) for name, child in Block(None).named_children()}
    for at, (name, (outputs, inputs)) in enumerate(shapes.items()):
        down, up = normal(2, inputs, seed=50 + at), normal(outputs, 2, seed=70 + at)
        setattr(block, name, AdaptedLinear(getattr(block, name), down, up, 0.5))
    return block


def made(tensor: TensorParallel | None, adapters: bool, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The block with the same weights on any layout."""
    block: nn.Module = Block(tensor)
    block = adapted(block).double() if adapters else block.double()  # type: ignore[arg-type]
    layouts = shardings_of(block)
    with torch.no_grad():
        for at, (name, parameter) in enumerate(sorted(block.named_parameters())):
            if ".lora_" not in name:
                full = normal(*layouts[name].full_shape(parameter.shape), seed=at + 1) / 4
                parameter.copy_(shard_of(full, layouts[name], {"tp": 0 if tensor is None else tensor.index}))
    return block.to(dtype)


def own_tokens(x: Tensor, tensor: TensorParallel | None) -> Tensor:
    return x.chunk(tensor.size, 1)[tensor.index] if tensor is not None and tensor.sequence else x


def step(
    tensor: TensorParallel | None, *, split: bool = False, adapters: bool = False, autocast: bool = False
) -> tuple[list[Tensor], dict[str, Tensor], dict[str, ParameterSharding]]:
    """Two micro-batches of different data: outputs, the gradients of parameters and inputs, layouts."""
    block = made(tensor, adapters, torch.float32 if autocast else torch.float64)
    grad_context, queues, outputs = WeightGradContext(), [], []
    if split:
        defer_weight_gradients(block, grad_context)
    gradients: dict[str, Tensor] = {}
    for at, rows in enumerate(BATCHES):
        grad_context.queue = WeightGradQueue() if split else None
        queues.append(grad_context.queue)
        x, seed = normal(rows, LENGTH, WIDTH, seed=90 + at), normal(rows, LENGTH, WIDTH, seed=95 + at)
        kind = torch.float32 if autocast else torch.float64
        mine = own_tokens(x, tensor).to(kind).clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            out = block(mine)
        out.backward(own_tokens(seed, tensor).to(out.dtype))
        outputs.append(out.detach())
        assert mine.grad is not None
        gradients[f"input {at}"] = mine.grad
    if split and not adapters:
        assert block.get_parameter("qkv.weight").grad is None
    for queue in queues:
        if queue is not None:
            queue.flush()
    layouts = shardings_of(block)
    for name, parameter in block.named_parameters():
        if parameter.grad is not None:
            gradients[name] = parameter.grad
    return outputs, gradients, layouts


CASES: list[dict[str, bool]] = [{}, {"split": True}, {"adapters": True, "split": True}, {"autocast": True}]


def require_close(found: Tensor, wanted: Tensor, case: dict[str, bool], what: str) -> None:
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), (case, what)
    error = float((found - wanted).abs().max() / wanted.abs().max())
    assert error < (0.05 if case.get("autocast") else 1e-12), (case, what, error)


def compared(rank: int) -> None:
    for sequence in (False, True):
        tensor = tensor_parallel(sequence)
        for case in CASES:
            want_out, want, _ = step(None, **case)
            out, found, layouts = step(tensor, **case)
            for one, whole in zip(out, want_out, strict=True):
                require_close(one, own_tokens(whole, tensor), case, f"sequence {sequence} output")
            assert found.keys() == want.keys(), case
            for name, gradient in found.items():
                if name.startswith("input"):
                    wanted = own_tokens(want[name], tensor)
                else:
                    sharding = layouts[name]
                    wanted = shard_of(want[name], sharding, {"tp": rank})
                    if sharding.partial:
                        gradient = sum_over_ranks(gradient.clone(), TensorParallel(tensor.axis))
                require_close(gradient, wanted, case, f"sequence {sequence} {name}")


def test_every_gradient_is_that_of_one_process() -> None:
    """Whole sequences and spread ones; fused and split backward; adapters; bf16 autocast."""
    run_ranks(compared, 4)


# -- through a pipeline, and to and from a checkpoint ------------------------------------------------------------------------


def build(tensor: TensorParallel | None, number: int) -> nn.Module:
    block = made(tensor, False)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.mul_(1 + number / 8)
    return block


def stepped(tensor: TensorParallel | None, mesh: Any, steps: int) -> tuple[Pipeline, torch.optim.Optimizer, float]:
    named = [Layer(f"layer{number}", partial(build, tensor, number)) for number in range(2)]
    pipeline = Pipeline(
        named,
        pl.schedules.zb_h1(1, 2),
        loss=lambda out, target: (out - target).square().mean(),
        mesh=mesh,
        options=RuntimeOptions(seed=1, monitor=False),
    )
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=0.01)
    loss = 0.0
    for _ in range(steps):
        optimizer.zero_grad()
        loss = float(pipeline.step(normal(4, LENGTH, WIDTH, seed=7), normal(4, LENGTH, WIDTH, seed=8)))
        optimizer.step()
    return pipeline, optimizer, loss


def saved(rank: int, folder: str, other: str) -> tuple[float, dict[str, Any]]:
    """Trains and saves on two ranks; loads what one process has saved, and saves that."""
    tensor = tensor_parallel(False)
    mesh = Mesh.of(MeshShape(tp=2))
    pipeline, optimizer, loss = stepped(tensor, mesh, 1)
    gradients = {name: p.grad.numpy() for name, p in pipeline.named_parameters() if p.grad is not None}
    plain = {name: to_plain(pipeline.layouts[name]) for name in gradients}
    checkpoint.save(f"{folder}/two", 1, pipeline, optimizer)
    pipeline.close()
    pipeline, optimizer, _ = stepped(tensor, mesh, 0)
    checkpoint.load(other, pipeline, optimizer)
    checkpoint.save(f"{folder}/again", 1, pipeline, optimizer)
    pipeline.close()
    return loss, {name: (gradients[name], plain[name]) for name in gradients}


def contents(path: Path) -> dict[str, Tensor]:
    manifest = read_manifest(path)
    reader = Reader(path, manifest)
    return {key: reader.region(key, Box((0,) * len(shape), shape)) for key, shape in reader.tensors.items()}


@pytest.mark.core
def test_a_fused_weight_is_saved_as_one_process_has_it(tmp_path: Path) -> None:
    """A step's gradients, and a checkpoint from one process to two ranks and back, bit by bit."""
    pipeline, optimizer, want_loss = stepped(None, None, 1)
    want = {name: parameter.grad for name, parameter in pipeline.named_parameters()}
    one = checkpoint.save(tmp_path / "one", 1, pipeline, optimizer)
    results = run_ranks(saved, 2, str(tmp_path), str(one))
    for name, wanted in want.items():
        assert wanted is not None
        parts = {(rank,): torch.from_numpy(found[name][0]) for rank, (_, found) in enumerate(results)}
        sharding = from_plain(results[0][1][name][1])
        whole = join(parts if sharding.shards else {(): parts[(0,)]}, sharding)
        torch.testing.assert_close(whole, wanted, msg=lambda m, n=name: f"{n}: {m}")  # type: ignore[misc]
    assert all(abs(loss - want_loss) < 1e-12 * want_loss for loss, _ in results)
    first, again = contents(one), contents(tmp_path / "again/step-000001")
    assert first.keys() == again.keys()
    assert any("qkv.weight.exp_avg" in key for key in first)
    assert all(torch.equal(first[key], again[key]) for key in first)
    two = read_manifest(tmp_path / "two/step-000001")
    offsets = sorted(box.box.offset[0] for box in two.tensors["model.layer0.qkv.weight"].boxes)
    assert offsets == [0, 8, 16, 20, 24, 28], "of queries, keys and values a part for each rank"
    checkpoint.load(tmp_path / "two/step-000001", pipeline, optimizer)
    checkpoint.save(tmp_path / "from two", 1, pipeline, optimizer)
    first, again = contents(tmp_path / "two/step-000001"), contents(tmp_path / "from two/step-000001")
    assert all(torch.equal(first[key], again[key]) for key in first)


# -- without processes -----------------------------------------------------------------------------------------------------


def of_ranks(size: int) -> TensorParallel:
    return TensorParallel(Axis(tuple(range(size)), 0, None))


@pytest.mark.core
@pytest.mark.parametrize(
    ("outputs", "size", "words"),
    [
        ((4 * HEAD, 2 * HEAD, 2 * HEAD), 4, "tp=4 does not divide 2 heads of projection 1; nearest: 2"),
        ((3 * HEAD, HEAD, HEAD), 3, "tp=3 does not divide 1 heads of projection 1; nearest: 1"),
        ((8 * HEAD, 7, 7), 2, r"outputs=\[16, 7, 7\]: projection 1 is no whole number of units of 2"),
    ],
)
def test_heads_that_cannot_be_cut_are_refused(outputs: tuple[int, ...], size: int, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        fused_column_linear(WIDTH, outputs, of_ranks(size), "heads", unit=HEAD)


@pytest.mark.core
def test_projections_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(UsageError, match=r"projections of \[4, 3\] cannot be cut"):
        Shard("tp", 0, (4, 3), (4, 3))
    with pytest.raises(UsageError, match=r"projections of \[4, 4\] cannot be cut into parts of \[4, 2\]"):
        Shard("tp", 0, (4, 2), (4, 4))


@pytest.mark.core
def test_parts_of_fused_projections_join_to_the_whole() -> None:
    sharding = ParameterSharding((Shard("tp", 1, (4, 4), (4, 2, 2)),))
    full = torch.arange(24.0).view(3, 8)
    parts = {(rank,): shard_of(full, sharding, {"tp": rank}) for rank in range(2)}
    assert parts[(1,)][0].tolist() == [2, 3, 5, 7]
    assert torch.equal(join(parts, sharding), full)
    assert from_plain(to_plain(sharding)) == sharding
