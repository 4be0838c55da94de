"""Data parallelism: sums over dp, each exactly once, started early and in one order; nothing at all under no_sync."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from documents import blocks
from paths import ROOT
from pipeloom.ops.deferred import WeightGradContext, WeightGradQueue, defer_weight_gradients
from pipeloom.parallel.buckets import BucketParameter
from pipeloom.parallel.data import AFTER_TIES, GradientSync, allreduce_gradients
from pipeloom.parallel.mesh import Mesh
from pipeloom.parallel.sharding import WHOLE, ParameterSharding, Shard
from pipeloom.runtime import Pipeline
from pipeloom.schedules import gpipe
from pipeloom.shapes.mesh import MeshShape
from processes import run_ranks

pytestmark = pytest.mark.core

EXPERT = ParameterSharding((Shard("ep", 0, (1, 1)),))


class Net(nn.Module):
    """Two "stages": 0 is everything before `last`. `unused` gets no gradient, `frozen` must not have one."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(11, 16)
        self.norm = nn.LayerNorm(16)
        self.first = nn.Linear(16, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))
        self.last = nn.Linear(16, 11)
        self.to(dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.first(self.norm(self.embed(tokens)))
        out: Tensor = self.last(torch.relu(self.first(self.frozen(x))))
        return out

    def held(self, layouts: dict[str, ParameterSharding] | None = None) -> list[BucketParameter]:
        chosen = layouts or {}
        return [
            BucketParameter(name, parameter, (int(name.startswith("last")),), chosen.get(name, WHOLE))
            for name, parameter in self.named_parameters()
        ]


def tokens_of(step: int, micro: int, rank: int) -> Tensor:
    return torch.randint(0, 11, (4, 6), generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))


def reference(net: Net, steps: list[int], ranks: int, micros: int = 2) -> dict[str, Tensor | None]:
    """The gradients of one process that sees every rank's micro-batches."""
    single = Net(torch.float64)
    single.load_state_dict({name: value.double() for name, value in net.state_dict().items()})
    for step in steps:
        for micro in range(micros):
            for rank in range(ranks):
                single(tokens_of(step, micro, rank)).square().sum().backward()
    return {name: parameter.grad for name, parameter in single.named_parameters()}


def run_step(
    net: Net, grad_context: WeightGradContext, sync: GradientSync, step: int, split: bool, micros: int = 2
) -> list[str]:
    """A step as an engine would run it. Returns the order of events."""
    rank, events, queues = dist.get_rank(), [], []
    sync.begin()
    for micro in range(micros):
        grad_context.queue = WeightGradQueue() if split else None
        loss = net(tokens_of(step, micro, rank)).square().sum()
        if micro == micros - 1 and not split:
            sync.last_backward(0)
        loss.backward()
        events.append("backward")
        queues.append(grad_context.queue)
    for queue in queues:
        if queue is not None:
            queue.flush()
    for stage in (1, 0):
        sync.stage_done(stage)
    sync.finish()
    return events


def close(net: Net, sync: GradientSync, want: dict[str, Tensor | None], case: str) -> None:
    for name, parameter in net.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is sync.gradient(name), (case, name)
            wanted = want[name]
            assert (parameter.grad is None) == (wanted is None), (case, name)
            if parameter.grad is None or wanted is None:
                continue
            error = (parameter.grad.double() - wanted).abs().max() / wanted.abs().max().clamp(min=1e-9)
            assert error <= 1e-5, (case, name, float(error))
        else:
            assert parameter.grad is None


@contextlib.contextmanager
def collectives() -> Iterator[list[tuple[str, int]]]:
    """Every collective that starts inside: its name and the number of elements."""
    seen: list[tuple[str, int]] = []
    names = [
        n for n in ("all_reduce", "all_to_all_single", "reduce_scatter_single", "all_gather_single") if hasattr(dist, n)
    ]
    originals: dict[str, Callable[..., Any]] = {name: getattr(dist, name) for name in names}

    def logged(name: str) -> Callable[..., Any]:
        def call(tensor: Tensor, *arguments: Any, **keywords: Any) -> Any:
            seen.append((name, tensor.numel()))
            return originals[name](tensor, *arguments, **keywords)

        return call

    for name in names:
        setattr(dist, name, logged(name))
    try:
        yield seen
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def prepared(mesh: Mesh, **options: Any) -> tuple[Net, WeightGradContext, GradientSync]:
    net, grad_context = Net(), WeightGradContext()
    sync = GradientSync(net.held(), mesh, **options)
    grad_context.main = sync.main
    defer_weight_gradients(net, grad_context)
    return net, grad_context, sync


def sums(rank: int) -> list[Any]:
    mesh = Mesh.of(MeshShape(dp=2))
    assert mesh is not None
    for split, shared in ((False, False), (True, False), (False, True), (True, True)):
        net, grad_context, sync = prepared(mesh, share_memory=shared)
        with collectives() as seen:
            run_step(net, grad_context, sync, 0, split)
        count = 0 if shared else len(sync.buckets)
        assert [name for name, _ in seen] == ["all_reduce"] * count, seen
        assert len(sync.buckets) == 2
        close(net, sync, reference(net, [0], 2), f"one step, split {split}")
        # a second step before zero_grad: what is reduced is not reduced again
        run_step(net, grad_context, sync, 1, split)
        close(net, sync, reference(net, [0, 1], 2), f"two steps, split {split}")
        # two steps of which the first is not reduced
        sync.zero_grad()
        assert all(p.grad is None for p in net.parameters())
        with collectives() as seen, sync.no_sync():
            run_step(net, grad_context, sync, 2, split)
        assert seen == []
        alone = torch.cat([p.grad.reshape(-1) for p in net.parameters() if p.grad is not None])
        with collectives() as seen:
            run_step(net, grad_context, sync, 3, split)
        assert len(seen) == count
        close(net, sync, reference(net, [2, 3], 2), f"no_sync then sync, split {split}")
        # reduced, then local, then reduced
        with sync.no_sync():
            run_step(net, grad_context, sync, 4, split)
        run_step(net, grad_context, sync, 5, split)
        close(net, sync, reference(net, [2, 3, 4, 5], 2), f"reduced, local, reduced, split {split}")
        # torch's own zero_grad drops everything too, and one gradient alone can be dropped
        torch.optim.SGD(net.parameters()).zero_grad()
        run_step(net, grad_context, sync, 6, split)
        close(net, sync, reference(net, [6], 2), f"after torch's zero_grad, split {split}")
        net.first.weight.grad = None
        run_step(net, grad_context, sync, 7, split)
        want = reference(net, [6, 7], 2)
        want["first.weight"] = reference(net, [7], 2)["first.weight"]
        close(net, sync, want, f"one gradient dropped, split {split}")
    return [float(alone.double().sum())]


def exceptions(rank: int) -> None:
    mesh = Mesh.of(MeshShape(dp=2))
    assert mesh is not None
    net, grad_context, sync = prepared(mesh)
    with contextlib.suppress(ZeroDivisionError), sync.no_sync():
        sync.begin()
        net(tokens_of(0, 0, rank)).sum().backward()
        raise ZeroDivisionError
    assert sync.syncing
    sync.zero_grad()
    run_step(net, grad_context, sync, 1, False)
    close(net, sync, reference(net, [1], 2), "after an exception")
    # a backward of one's own between steps leaves the sums alone and stands in .grad as torch would have it
    before = sync.gradient("last.bias").clone()
    net(tokens_of(2, 0, rank)).sum().backward()
    assert torch.equal(sync.gradient("last.bias"), before + net_bias_gradient(net, tokens_of(2, 0, rank)))


def net_bias_gradient(net: Net, tokens: Tensor) -> Tensor:
    twin = Net()
    twin.load_state_dict(net.state_dict())
    twin(tokens).sum().backward()
    assert twin.last.bias.grad is not None
    return twin.last.bias.grad


def by_hand(rank: int) -> None:
    net = Net()
    net(tokens_of(0, 0, rank)).square().sum().backward()
    with collectives() as seen:
        allreduce_gradients(net.parameters())
    assert len(seen) == 1
    want = reference(net, [0], 2, micros=1)
    for name, parameter in net.named_parameters():
        wanted = want[name] if parameter.requires_grad else None
        assert (parameter.grad is None) == (wanted is None), name
        if parameter.grad is not None and wanted is not None:
            torch.testing.assert_close(parameter.grad.double(), wanted, rtol=1e-5, atol=1e-5)


def averaged(rank: int) -> None:
    """The loop of docs/from_papers.md, and DistributedDataParallel and a Pipeline, both under no_sync but for the last batch."""
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 1))
    by_loop, by_ddp, by_pipeline = (copy.deepcopy(start) for _ in range(3))
    data = torch.randn(3, 2, 5, 9)[:, rank]  # batches of this rank: inputs, and a target
    batches = [(rows[:, :8], rows[:, 8:]) for rows in data]
    loss = nn.functional.mse_loss

    (block,) = [block for block in blocks(ROOT / "docs" / "from_papers.md") if block.language == "python"]
    exec(block.text, {"batches": batches, "model": by_loop, "loss": loss, "dist": dist})

    model = nn.parallel.DistributedDataParallel(by_ddp)
    pipeline = Pipeline([by_pipeline], gpipe(1, 1), loss=loss, mesh=Mesh.of(MeshShape(dp=2)))
    for number, (inputs, targets) in enumerate(batches):
        last = number == len(batches) - 1
        with contextlib.nullcontext() if last else model.no_sync():
            loss(model(inputs), targets).backward()
        with contextlib.nullcontext() if last else pipeline.no_sync():
            pipeline.step(inputs, targets)
    pipeline.close()
    for mine, ddp, piped in zip(by_loop.parameters(), by_ddp.parameters(), by_pipeline.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, ddp.grad)
        torch.testing.assert_close(piped.grad, ddp.grad)


def test_averages_by_hand_are_those_of_ddp_and_of_a_pipeline() -> None:
    run_ranks(averaged, 2)


def two(rank: int) -> None:
    sums(rank)
    exceptions(rank)
    by_hand(rank)


def test_two_ranks() -> None:
    run_ranks(two, 2)


def four(rank: int, shared: bool) -> None:
    """dp 2 with tp 2, then dp 4 with ep 2: who is summed with whom."""
    mesh = Mesh.of(MeshShape(dp=2, tp=2))
    assert mesh is not None
    whole, own = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))
    held = [BucketParameter("whole", whole, (0,), ParameterSharding(partial=True)), BucketParameter("own", own, (0,))]
    sync = GradientSync(held, mesh, share_memory=shared)
    for turn in (1.0, 2.0):
        sync.begin()
        ((whole.sum() + own.sum()) * 10.0**rank).backward()
        sync.stage_done(0)
        sync.finish()
        assert whole.grad is not None
        assert own.grad is not None
        assert whole.grad.tolist() == [1111.0 * turn] * 2
        assert own.grad.tolist() == [(101.0 if rank % 2 == 0 else 1010.0) * turn] * 3
    mesh = Mesh.of(MeshShape(dp=4, ep=2))
    assert mesh is not None
    expert, tied = nn.Parameter(torch.zeros(1, 2)), nn.Parameter(torch.zeros(3))
    sync = GradientSync(
        [BucketParameter("tied", tied, (0, AFTER_TIES)), BucketParameter("expert", expert, (0,), EXPERT)],
        mesh,
        share_memory=shared,
    )
    sync.begin()
    ((expert.sum() + tied.sum()) * 10.0**rank).backward()
    with collectives() as seen:
        sync.stage_done(0)
        size = next(bucket.size for bucket in sync.buckets if bucket.slots[0].held.name == "expert")
        assert [count for _, count in seen] == ([] if shared else [size]), (
            "the tied weight waits for its sum over pipeline ranks"
        )
        sync.main.of(tied).add_(1.0)
        sync.stage_done(AFTER_TIES)
        assert len(seen) == (0 if shared else 2)
        sync.finish()
    assert tied.grad is not None
    assert expert.grad is not None
    assert tied.grad.tolist() == [1115.0] * 3
    assert expert.grad.tolist() == [[101.0 if rank % 2 == 0 else 1010.0] * 2]


def both_ways(rank: int) -> None:
    for shared in (False, True):
        four(rank, shared)


def test_four_ranks() -> None:
    run_ranks(both_ways, 4)
