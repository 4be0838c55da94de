"""Masters, bf16 and sharded optimizer states: the same steps as plain AdamW on one process, in less memory."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from optimizer_states import optimizer_states
from pipeloom.config import load
from pipeloom.config.sections import OptimizerSection
from pipeloom.ops.deferred import WeightGradContext, defer_weight_gradients
from pipeloom.parallel import collectives
from pipeloom.parallel.buckets import BucketParameter
from pipeloom.parallel.data import GradientSync
from pipeloom.parallel.grad_norm import exact_sum, global_norm
from pipeloom.parallel.mesh import Mesh
from pipeloom.shapes.mesh import MeshShape
from pipeloom.train.optimizer import Optimizer
from pipeloom.train.speculative import OptimizerCopy
from processes import run_ranks

pytestmark = pytest.mark.core

STEPS, RATE = 5, 1e-2


def options(**changes: Any) -> OptimizerSection:
    given = {"clip_norm": 2.0, "weight_decay": 0.3, **changes}
    return load("tiny", {f"optimizer.{key}": value for key, value in given.items()}).optimizer


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(5)
    # sizes that no number of ranks divides, vectors between matrices
    layers = [nn.Embedding(7, 19), nn.LayerNorm(19), nn.Linear(19, 23), nn.ReLU(), nn.Linear(23, 7, bias=False)]
    return nn.Sequential(*layers).to(dtype)


def tokens_of(step: int, rank: int) -> Tensor:
    return torch.randint(0, 7, (4, 6), generator=torch.Generator().manual_seed(10 * step + rank))


def merge_states(states: list[Any]) -> dict[str, dict[str, Any]]:
    """One state from those of ranks that stepped slices of the same parameters."""
    merged: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(name for state in states for name in state):
        parts = sorted((state[name] for state in states if name in state), key=lambda part: part["start"])
        kinds = ("master", "exp_avg", "exp_avg_sq")
        joined = {kind: torch.cat([part[kind] for part in parts]) for kind in kinds}
        merged[name] = {**parts[0], "stop": parts[0]["start"] + len(joined["master"]), **joined}
    return merged


class Replica:
    """One dp rank: a network, its reduction and its optimizer."""

    def __init__(self, mesh: Mesh, dtype: torch.dtype, sharded: bool, shared: bool = False) -> None:
        self.mesh, self.net, grad_context = mesh, network(dtype), WeightGradContext()
        named = list(self.net.named_parameters())
        held = [BucketParameter(n, p, (0,)) for n, p in named]
        self.sync = GradientSync(held, mesh, sharded=sharded, share_memory=shared, capacity=2000)
        grad_context.main = self.sync.main
        defer_weight_gradients(self.net, grad_context)
        first = sharded or mesh.place.dp == 0
        self.optimizer = Optimizer(named, options(), self.sync, counts=lambda name: first)

    def gradients(self, step: int) -> float:
        """Forward and backward; returns the global norm."""
        self.optimizer.wait()
        self.sync.begin()
        (self.net(tokens_of(step, self.mesh.place.dp)).float().square().sum() * 0.01).backward()
        self.sync.stage_done(0)
        self.sync.finish()
        own = torch.tensor(exact_sum(self.optimizer.squares()), dtype=torch.float64)
        if self.mesh.everyone.group is None:
            return global_norm([float(own)])
        rows = [torch.empty_like(own) for _ in range(self.mesh.everyone.size)]
        dist.all_gather(rows, own)
        return global_norm([float(row) for row in rows])

    def train(self, first: int = 0, last: int = STEPS) -> list[float]:
        norms = []
        for step in range(first, last):
            norms.append(self.gradients(step))
            self.optimizer.step(norms[-1], RATE)
        return norms

    def weights(self) -> dict[str, Tensor]:
        self.optimizer.wait()
        return {name: p.detach().clone() for name, p in self.net.named_parameters()}


def serial(ranks: int, dtype: torch.dtype = torch.float32) -> tuple[list[float], dict[str, Tensor]]:
    """Plain AdamW on one process that sees every rank's data."""
    net, norms = network(dtype), []
    optimizer = Optimizer(list(net.named_parameters()), options())
    for step in range(STEPS):
        for rank in range(ranks):
            (net(tokens_of(step, rank)).square().sum() * 0.01).backward()
        norms.append(math.sqrt(exact_sum(optimizer.squares())))
        optimizer.step(norms[-1], RATE)
    return norms, dict(net.named_parameters())


def a_rank_without_a_slice(rank: int) -> tuple[int, list[list[float]]]:
    """A weight smaller than one rank's slice: the state's bytes here, the weights after two steps, and after one is undone."""
    mesh = Mesh.of(MeshShape(dp=2))
    assert mesh is not None
    layer = nn.Linear(2, 2, bias=False)
    layer.weight.data.copy_(torch.arange(4.0).view(2, 2))
    sync = GradientSync([BucketParameter("weight", layer.weight, (0,))], mesh, sharded=True)
    optimizer = Optimizer([("weight", layer.weight)], options(), sync)
    copies, seen = OptimizerCopy(), []
    for _ in range(2):
        copies.take(optimizer)
        sync.begin()
        layer(torch.ones(1, 2)).sum().backward()
        sync.stage_done(0)
        sync.finish()
        optimizer.step(None, RATE)
        optimizer.wait()
        seen.append(layer.weight.flatten().tolist())
    copies.restore(optimizer)
    return optimizer.state_bytes, [*seen, layer.weight.flatten().tolist()]


def test_a_rank_whose_slice_holds_no_parameter_takes_part() -> None:
    """It steps nothing, gets what the other stepped, and takes it back."""
    (first, weights), (second, others) = run_ranks(a_rank_without_a_slice, 2)
    assert first > second == 0
    assert others == weights
    assert weights[2] == weights[0] != weights[1]


def four_ranks(rank: int) -> None:
    mesh = Mesh.of(MeshShape(dp=4))
    assert mesh is not None
    norms, want = serial(4)
    assert max(norms) > 2.0 > min(norms), "the steps must be some clipped and some not"
    states: dict[bool, list[Any]] = {}
    weights: dict[bool, dict[str, Tensor]] = {}
    held: dict[bool, int] = {}
    for sharded in (False, True):
        replica = Replica(mesh, torch.float32, sharded)
        assert replica.train() == pytest.approx(norms, rel=1e-5)
        weights[sharded] = replica.weights()
        for name, value in weights[sharded].items():
            torch.testing.assert_close(value, want[name], rtol=2e-5, atol=2e-6)
        states[sharded] = [None] * 4
        dist.all_gather_object(states[sharded], optimizer_states(replica.optimizer))
        held[sharded] = replica.optimizer.state_bytes
        everywhere = torch.tensor(held[sharded])
        dist.all_reduce(everywhere)
        elements = sum(p.numel() for p in replica.net.parameters())
        assert int(everywhere) == 2 * 4 * elements * (1 if sharded else 4)
    for name, value in weights[False].items():
        torch.testing.assert_close(weights[True][name], value, rtol=1e-6, atol=1e-7)
    gathered: list[Any] = [None] * 4
    dist.all_gather_object(gathered, weights)
    for other in gathered:  # bitwise the same on all ranks
        for sharded in (False, True):
            assert all(torch.equal(other[sharded][name], value) for name, value in weights[sharded].items())
    # slices put together are the unsharded state
    merged = merge_states(states[True])
    for name, state in states[False][0].items():
        assert (merged[name]["start"], merged[name]["stop"]) == (0, weights[True][name].numel())
        for key in ("master", "exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(merged[name][key], state[key], rtol=1e-5, atol=1e-7)


def test_sharded_states_step_as_whole_ones() -> None:
    run_ranks(four_ranks, 4)


class Recorder:
    """torch.distributed; notes which collectives the reductions start."""

    def __init__(self) -> None:
        self.started: list[str] = []

    def __getattr__(self, name: str) -> Any:
        value = getattr(dist, name)
        if name.startswith(("all_", "reduce_")):
            self.started.append(name.removesuffix("_tensor").removesuffix("_single").removesuffix("_into"))
        return value


def collectives_of_a_step(mesh: Mesh) -> None:
    """A bucket and step: one all-reduce, or one reduce-scatter (on gloo an exchange) and one all-gather."""
    plain = collectives.dist
    for sharded, wanted in ((False, ["all_reduce"]), (True, ["all_gather", "all_to_all"])):
        replica = Replica(mesh, torch.float32, sharded)
        collectives.dist = recorder = Recorder()  # type: ignore[assignment]
        replica.train(0, 1)
        collectives.dist = plain
        marks = ["all_reduce"] * sharded  # which parameters have a gradient anywhere: one small sum a step
        assert sorted(recorder.started) == sorted(wanted * len(replica.sync.buckets) + marks)
        assert len(replica.sync.buckets) > 1


def two_ranks(rank: int) -> None:
    mesh = Mesh.of(MeshShape(dp=2))
    assert mesh is not None
    collectives_of_a_step(mesh)
    # of two ranks a sum has one order: bitwise the same steps, for fp32 and for bf16 with fp32 masters
    for dtype in (torch.float32, torch.bfloat16):
        whole = Replica(mesh, dtype, False)
        whole.train()
        for sharded, shared in ((True, False), (False, True), (True, True)):
            other = Replica(mesh, dtype, sharded, shared)
            other.train()
            for name, value in whole.weights().items():
                assert value.dtype == dtype
                assert torch.equal(other.weights()[name], value), (dtype, sharded, shared, name)
    # what a dp rank sees of the others' data matters: without the reduction the weights differ
    lonely = Replica(mesh, torch.float32, False)
    with lonely.sync.no_sync():
        lonely.train()
    both: list[Any] = [None, None]
    dist.all_gather_object(both, lonely.weights())
    assert not torch.equal(both[0]["0.weight"], both[1]["0.weight"])


def test_two_ranks_bitwise() -> None:
    run_ranks(two_ranks, 2)


def test_bf16_follows_fp32() -> None:
    """Steps that bf16 weights alone would lose are kept in the masters."""
    mesh = Mesh.of(MeshShape())
    assert mesh is not None
    replica = Replica(mesh, torch.bfloat16, False)
    start = {name: value.float() for name, value in replica.weights().items()}
    for step in range(40):
        replica.optimizer.step(replica.gradients(step), 2e-5)  # below bf16's resolution of weights near 1
    moved = {name: state["master"] for name, state in optimizer_states(replica.optimizer).items()}
    norm = moved["1.weight"]  # LayerNorm's weights start at 1, where bf16's steps are 2^-8
    assert 1e-4 < float((norm - start["1.weight"]).abs().max()) < 2**-8
    assert all(
        torch.equal(replica.weights()[name].view(-1), master.to(torch.bfloat16)) for name, master in moved.items()
    )
    assert all(p.grad is None for p in replica.net.parameters())
    elements = sum(p.numel() for p in replica.net.parameters())
    assert replica.optimizer.state_bytes == 12 * elements


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_can_be_taken_back_and_redone(dtype: torch.dtype) -> None:
    mesh = Mesh.of(MeshShape())
    assert mesh is not None
    wanted, replica = Replica(mesh, dtype, False), Replica(mesh, dtype, False)
    wanted.train(0, 1)
    replica.train(0, 1)
    wanted.optimizer.step(wanted.gradients(1) * 100, RATE)  # clipped
    copy = OptimizerCopy()
    replica.gradients(1)
    norm = math.sqrt(exact_sum(replica.optimizer.squares())) * 100
    copy.take(replica.optimizer)
    restore_gradients = replica.optimizer.masters.hold()
    replica.optimizer.step(None, RATE)
    assert not all(torch.equal(value, wanted.weights()[name]) for name, value in replica.weights().items())
    replica.gradients(2)
    replica.optimizer.zero_grad()
    copy.restore(replica.optimizer)
    restore_gradients()
    replica.optimizer.step(norm, RATE)
    for name, value in replica.weights().items():
        assert torch.equal(value, wanted.weights()[name]), name
    wanted.train(2, 3)
    replica.train(2, 3)
    assert all(torch.equal(value, wanted.weights()[name]) for name, value in replica.weights().items())


def test_masters_learn_of_weights_that_were_loaded() -> None:
    mesh = Mesh.of(MeshShape())
    assert mesh is not None
    replica = Replica(mesh, torch.bfloat16, False)
    replica.train(0, 1)
    with torch.no_grad():
        for parameter in replica.net.parameters():
            parameter.fill_(0.5)
    for changed in replica.sync.changed:
        changed()
    masters = [state["master"] for state in optimizer_states(replica.optimizer).values()]
    assert all(torch.equal(master, torch.full_like(master, 0.5)) for master in masters)
