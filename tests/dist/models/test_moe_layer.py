"""`MoELayer` with experts of any modules over ranks against one process; its example."""

from __future__ import annotations

import contextlib
import io
import math
import runpy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pipeloom as pl
from documents import run_python
from host_reads import HostReads
from layouts import worst
from moe_steps import joined, mesh_of
from paths import ROOT
from pipeloom.errors import ArgumentError
from pipeloom.models import GateShape, MoELayer, TopKGate
from pipeloom.models.gate import take_loads
from pipeloom.ops.layer import MicrobatchContext
from pipeloom.ops.segments import Compute, Segment, in_order
from pipeloom.parallel.dispatch import ExpertParallel
from pipeloom.parallel.expert import ExpertLinear, Experts
from pipeloom.parallel.mesh import Axis, Mesh
from pipeloom.parallel.sharding import shardings_of
from pipeloom.parallel.tensor import TensorParallel
from pipeloom.runtime import Layer, LocalPipeline, Pipeline
from pipeloom.shapes.mesh import MeshShape
from processes import run_ranks

EXAMPLE, PORT = (ROOT / f"examples/{name}.py" for name in ("moe_layer", "moe_port"))
HIDDEN, EXPERTS, MICROBATCHES = 6, 4, 4


def expert() -> nn.Module:
    return nn.Sequential(nn.Linear(HIDDEN, 8), nn.GELU(), nn.Linear(8, HIDDEN))


class Grouped(nn.Module):
    """The same as a module of all of a rank's experts."""

    def __init__(self, parallel: Any = None, tensor: Any = None) -> None:
        super().__init__()
        self.up = ExpertLinear(EXPERTS, HIDDEN, 8, 1, parallel, tensor, bias=True)
        self.down = ExpertLinear(EXPERTS, 8, HIDDEN, 2, parallel, tensor, bias=True)

    def forward(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        inner = nn.functional.gelu(self.up(rows, counts))
        return self.down(inner, counts)  # type: ignore[no-any-return]


class Block(nn.Module):
    """A layer of one's own with the mixture's segments among its own."""

    def __init__(self, parallel: Any = None, tensor: Any = None, grouped: bool = False) -> None:
        super().__init__()
        self.first, self.shared = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        gate = TopKGate(GateShape(HIDDEN, EXPERTS, aux_loss_coef=0.1), tensor)
        experts = Grouped(parallel, tensor) if grouped else expert
        self.moe = MoELayer(gate, experts, parallel, tensor=tensor, shared_expert=None if tensor else self.shared)

    def forward(self, x: Tensor, microbatch: MicrobatchContext | None = None) -> Tensor:
        out: Tensor = in_order(self.segments(microbatch=microbatch), (x,))[0]
        return out

    def segments(self, *, microbatch: MicrobatchContext | None = None) -> Sequence[Segment]:
        return [
            Compute("before", lambda values: (torch.tanh(self.first(values[0])), values[0])),
            *self.moe.segments(microbatch=microbatch),
            Compute("sum", lambda values: (values[0] + values[1],)),
        ]


def batch(replica: int, rows: int = 3) -> tuple[Tensor, Tensor]:
    both = torch.randn(2, MICROBATCHES * rows, 5, HIDDEN, generator=torch.Generator().manual_seed(20 + replica))
    return both[0], both[1]


def blocks(count: int, **more: Any) -> list[Callable[[], nn.Module]]:
    """Factories of blocks with the same first values on every rank."""

    def build(at: int) -> nn.Module:
        torch.manual_seed(at)
        return Block(**more)

    return [Layer(f"block{at}", lambda at=at: build(at)) for at in range(count)]


def mean(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def serial(count: int, replicas: int, grouped: bool = False) -> tuple[float, dict[str, Tensor]]:
    """The mean over all replicas' micro-batches in one process."""
    built = {layer.name: layer() for layer in blocks(count, grouped=grouped)}
    total = 0.0
    for replica in range(replicas):
        for x, target in zip(*(each.chunk(MICROBATCHES) for each in batch(replica)), strict=True):
            share = 1 / (MICROBATCHES * replicas)
            context = MicrobatchContext(step=1, index=0, share=share, first=0, samples=len(x))
            for module in built.values():
                x = module(x, microbatch=context)
            loss = mean(x, target) * share
            loss.backward()
            total += loss.item()
    return total, {f"{name}.{inner}": p.grad for name, m in built.items() for inner, p in m.named_parameters()}


def whole(gradients: Mapping[str, Tensor], ranks: int) -> dict[str, Tensor]:
    """Gradients of one process as the layer over ranks names them: experts of the same place on all ranks are one."""
    out: dict[str, Tensor] = {}
    held = EXPERTS // ranks
    for name, gradient in gradients.items():
        head, found, tail = name.partition(".experts.")
        if found and tail[0].isdigit():
            at, _, leaf = tail.partition(".")
            key = f"{head}.experts.{int(at) % held}.{leaf}"
            out[key] = torch.cat([out[key], gradient]) if key in out else gradient
        else:
            out[name] = gradient
    return out


def in_a_pipeline(rank: int, grouped: bool) -> None:
    """`Pipeline` sums each expert's gradient over its own replicas alone, and the gate's over all."""
    mesh = mesh_of(dp=2, ep=2)
    layers = blocks(2, parallel=ExpertParallel(mesh.ep), grouped=grouped)
    pipeline = Pipeline(layers, pl.schedules.gpipe(1, MICROBATCHES), loss=mean, mesh=mesh)
    loss = pipeline.step(*batch(rank))
    want = serial(2, 2, grouped)
    assert loss.item() == pytest.approx(want[0], rel=1e-5)
    gradients = joined(pipeline.modules, mesh, reduced=True)
    assert worst(gradients, want[1] if grouped else whole(want[1], 2)) < 1e-5


def in_pairs(rank: int) -> None:
    """In overlapped pairs the all-to-alls are waited for outside of the layers, and every gradient stays."""
    group = dist.group.WORLD
    for schedule in (
        pl.schedules.build("dualpipev", 2, MICROBATCHES),
        pl.schedules.build("1f1b-overlap", 2, MICROBATCHES),
    ):
        pipeline = LocalPipeline(blocks(4, parallel=ExpertParallel.of(group)), schedule, loss=mean)
        assert pipeline.schedule.has_pairs
        loss = pipeline.step(*batch(rank))
        dist.all_reduce(loss)
        mesh = mesh_of(dp=2, ep=2)
        want = serial(4, 2)
        assert loss.item() / 2 == pytest.approx(want[0], rel=1e-5)
        gradients = {name: g / 2 for name, g in joined(pipeline.modules, mesh).items()}
        assert worst(gradients, whole(want[1], 2)) < 1e-5, schedule.name


def under_tensor_parallelism(rank: int) -> None:
    """An expert's bias counts once, though two ranks hold it."""
    mesh = mesh_of(dp=1, tp=2)
    torch.manual_seed(0)
    block = Block(tensor=TensorParallel(mesh.tp), grouped=True)
    torch.manual_seed(0)
    alone = Block(grouped=True)
    alone.moe.shared_expert = None
    x, target = batch(0)
    mean(block(x), target).backward()
    mean(alone(x), target).backward()
    gradients = joined({"moe": block.moe}, mesh)
    want = {f"moe.{name}": p.grad for name, p in alone.moe.named_parameters()}
    assert worst(gradients, want) < 1e-5


@pytest.mark.core
@pytest.mark.parametrize("grouped", [False, True], ids=["modules", "grouped"])
def test_a_pipeline_of_two_replicas_is_one_process(grouped: bool) -> None:
    run_ranks(in_a_pipeline, 2, grouped)


@pytest.mark.parametrize("function", [in_pairs, under_tensor_parallelism])
def test_it_is_one_process(function: Callable[[int], None]) -> None:
    run_ranks(function, 2)


def test_experts_are_drawn_as_in_one_process_and_must_divide_the_ranks() -> None:
    parallel = ExpertParallel(Axis((0, 1), 1, None))
    torch.manual_seed(3)
    own = MoELayer(TopKGate(GateShape(HIDDEN, EXPERTS)), expert, parallel)
    torch.manual_seed(3)
    all_of_them = MoELayer(TopKGate(GateShape(HIDDEN, EXPERTS)), expert)
    assert torch.equal(own.gate.weight, all_of_them.gate.weight)
    assert torch.equal(own.experts[0][2].bias, all_of_them.experts[2][2].bias)
    assert shardings_of(own)["experts.0.2.bias"].over("ep") is not None
    with pytest.raises(ArgumentError, match="does not divide 3 experts"):
        MoELayer(TopKGate(GateShape(HIDDEN, 3)), expert, parallel)


def test_loads_and_a_shared_expert_with_its_gate() -> None:
    shared, gate = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 1)
    layer = MoELayer(TopKGate(GateShape(HIDDEN, EXPERTS)), expert, shared_expert=shared, shared_expert_gate=gate)
    x = torch.randn(3, 7, HIDDEN)
    out = layer(x)
    assert take_loads(layer.gate)[:-1].sum() == 3 * 7 * 2
    layer.shared_expert = None
    torch.testing.assert_close(out, layer(x) + gate(x).sigmoid() * shared(x))


def test_the_example_trains_alike_in_one_process_and_in_two() -> None:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    one = output.getvalue().splitlines()
    two = run_ranks(run_python, 2, EXAMPLE.read_text("utf-8"), lambda: {"__name__": "__main__"})[0].splitlines()
    losses = [[float(line.split()[3].strip(",")) for line in lines[:-1]] for lines in (one, two)]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    assert losses[0][-1] < 0.6 * losses[0][0]
    assert (one[-1], two[-1]) == ("8 of 8 experts in this process", "4 of 8 experts in this process")


def test_the_ported_model_trains_alike_in_a_loop_and_in_a_pipeline() -> None:
    """In one process, and in two, of which the loop spreads the experts, and the pipeline the layers."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        runpy.run_path(str(PORT), run_name="__main__")
    two, nothing = run_ranks(run_python, 2, PORT.read_text("utf-8"), lambda: {"__name__": "__main__"})
    assert nothing == ""
    losses = [float(word.strip(",")) for line in (output.getvalue(), two) for word in line.split() if "." in word]
    assert len(losses) == 4
    assert losses == pytest.approx([losses[0]] * 4, rel=0.05)
    assert max(losses) < 0.36  # the variance of the targets


def host_reads(rank: int, ep: int = 1, nodes: int = 1) -> dict[tuple[float, bool], list[str]]:
    """Capacity factor, and whether rows are padded to it -> what the host reads of the device in a forward and a backward."""
    mesh = Mesh.of(MeshShape(dp=ep, ep=ep, ep_nodes=nodes)) if ep > 1 else None
    parallel = None if mesh is None else ExpertParallel(mesh.ep)
    if mesh is not None and nodes > 1:
        parallel = ExpertParallel(mesh.ep, nodes, mesh.inside, mesh.across)
    found = {}
    for capacity, pads in ((0.0, False), (0.5, False), (0.5, True)):
        if pads and nodes > 1:
            continue
        gate = TopKGate(GateShape(HIDDEN, EXPERTS, capacity_factor=capacity, pad_to_capacity=pads))
        layer = MoELayer(gate, Experts(EXPERTS, HIDDEN, 8, parallel), parallel)
        x = torch.randn(16 if pads else 16 + rank, HIDDEN, requires_grad=True)
        with HostReads() as counted:
            out = layer(x)
            (out.sum() + layer.aux_loss).backward()
        assert x.grad is not None
        found[capacity, pads] = counted.reads
    return found


def test_the_host_reads_the_counts_of_rows_and_nothing_else() -> None:
    """One read a layer, of all ranks' counts where there are several, and none where rows are padded to a capacity."""
    assert host_reads(0) == {(0.0, False): ["tolist"], (0.5, False): ["tolist"], (0.5, True): []}
    for ep, nodes in ((2, 1), (4, 2)):
        want = {(0.0, False): ["cpu"], (0.5, False): ["cpu"]} | ({(0.5, True): []} if nodes == 1 else {})
        assert run_ranks(host_reads, ep, ep, nodes) == [want] * ep


def test_a_gate_pads_to_a_capacity_alone_and_in_training() -> None:
    with pytest.raises(ArgumentError, match="pad_to_capacity=1 needs a capacity; nearest: capacity_factor 1"):
        TopKGate(GateShape(HIDDEN, EXPERTS, pad_to_capacity=True))
    gate = TopKGate(GateShape(HIDDEN, EXPERTS, capacity_factor=1.2, pad_to_capacity=True))
    seen = []

    class Seen(nn.Linear):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            seen.append(len(rows))
            return super().forward(rows)

    layer, x = MoELayer(gate, lambda: Seen(HIDDEN, HIDDEN)), torch.randn(32, HIDDEN)
    out = layer(x)
    assert seen == [math.ceil(1.2 * 32 * 2 / EXPERTS)] * EXPERTS
    seen.clear()
    layer.eval()
    torch.testing.assert_close(layer(x), out)
    assert sum(seen) <= 32 * 2
    for name, parallel in (("ep_nodes", {"nodes": 2}), ("ep_chunks", {"chunks": 2})):
        with pytest.raises(ArgumentError, match=f"pad_to_capacity=1 pads rows .* nearest: {name} 1"):
            MoELayer(gate, lambda: nn.Linear(HIDDEN, HIDDEN), ExpertParallel(Axis((0, 1), 0, None), **parallel))
