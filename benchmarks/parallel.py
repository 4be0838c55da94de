"""Layers spread over processes against torch's own, on 2 gloo processes.

    python benchmarks/parallel.py           all parts
    python benchmarks/parallel.py tensor
    python benchmarks/parallel.py data
    python benchmarks/parallel.py gathers

tensor: a column -> row pair (width 256, inner 1024, 1024 tokens) forward and backward, against the same pair under
        torch.distributed.tensor.parallel (ColwiseParallel and RowwiseParallel on DTensor); without and with sequence
        parallelism.
data:   a decoder (4 blocks, width 256, 4 sequences of 128 tokens a replica), forward, backward and sum of the gradients over
        2 replicas, against torch.nn.parallel.DistributedDataParallel, whose gradients go through gloo. Ours go through shared
        memory, as a Pipeline does on one machine by default, or through gloo. In one micro-batch, and in four, of which
        DistributedDataParallel reduces the last (no_sync).
gathers: ZeRO-1 over 2 replicas (12 blocks, width 256, one per bucket), steps whose all-gather goes on beside the next forward
        against steps that wait for it. Through gloo, and over an emulated link of 1 Gbit/s: a gather is complete no earlier
        than its bytes, and those before it, would take. A pair is two steps of each.

The two sides alternate, step by step, in the same processes; a step's time is that of its slower process. Printed are
medians over the pairs of steps, and the median of their ratios.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from parts import run_parts
from pipeloom import schedules
from pipeloom.config import load
from pipeloom.models import cross_entropy, layers
from pipeloom.parallel import data as data_parallel
from pipeloom.parallel.collectives import PendingCollective, start_gather_slices
from pipeloom.parallel.data import GradientSync
from pipeloom.parallel.mesh import Axis, Mesh
from pipeloom.parallel.sharding import shard_of, shardings_of
from pipeloom.parallel.shared_memory_sum import SharedMemoryAllReduce
from pipeloom.parallel.tensor import TensorParallel, column_linear, row_linear
from pipeloom.runtime import Layer, Pipeline, RuntimeOptions, grad_sync
from pipeloom.shapes.mesh import MeshShape
from pipeloom.train.optimizer import Optimizer
from processes import run_ranks

PROCESSES = 2
PAIRS, SETTLED = 60, 10  # pairs of steps; those before the times are steady


class Times(NamedTuple):
    """Seconds of each step, ours and theirs."""

    ours: list[float]
    theirs: list[float]


def alternate(ours: Callable[[], None], theirs: Callable[[], None], pairs: int = PAIRS) -> Times:
    """Steps of both, in turn; every process calls this."""
    times = Times([], [])
    for at in range(SETTLED + pairs):
        for step, kept in ((ours, times.ours), (theirs, times.theirs)):
            dist.barrier()
            start = time.perf_counter()
            step()
            seconds = time.perf_counter() - start
            if at >= SETTLED:
                kept.append(seconds)
    return times


def report(what: str, results: list[Times]) -> None:
    """One line of what the processes measured."""
    ours, theirs = ([max(step) for step in zip(*side, strict=True)] for side in zip(*results, strict=True))
    ratio = median(a / b for a, b in zip(ours, theirs, strict=True))
    print(f"{what:34}{1e3 * median(ours):10.2f}{1e3 * median(theirs):12.2f}{ratio:9.3f}{len(ours):7}")


def header(part: str, theirs: str) -> None:
    print(f"{part:34}{'ours ms':>10}{theirs:>12}{'ratio':>9}{'pairs':>7}")


WIDTH, INNER, TOKENS = 256, 1024, 1024


class Pair(nn.Module):
    def __init__(self, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.up(x)))
        return out


def plain_pair() -> Pair:
    torch.manual_seed(0)
    return Pair(nn.Linear(WIDTH, INNER, bias=False), nn.Linear(INNER, WIDTH, bias=False))


def our_pair(sequence: bool) -> Pair:
    mesh = Mesh.of(MeshShape(tp=PROCESSES))
    assert mesh is not None
    tensor = TensorParallel(
        mesh.tp, sequence, SharedMemoryAllReduce.over(mesh.tp, PROCESSES, 60.0)
    )  # as the trainer has it on one machine
    pair, plain = Pair(column_linear(WIDTH, INNER, tensor), row_linear(INNER, WIDTH, tensor)), plain_pair()
    layouts = shardings_of(pair)
    with torch.no_grad():
        for name, parameter in pair.named_parameters():
            parameter.copy_(shard_of(plain.get_parameter(name), layouts[name], {"tp": tensor.index}))
    return pair


def their_pair(sequence: bool) -> Pair:
    plan = {
        "up": ColwiseParallel(input_layouts=Shard(0)) if sequence else ColwiseParallel(),
        "down": RowwiseParallel(output_layouts=Shard(0)) if sequence else RowwiseParallel(),
    }
    return parallelize_module(plain_pair(), init_device_mesh("cpu", (PROCESSES,)), plan)  # type: ignore[return-value]


def measure_tensor(rank: int, sequence: bool) -> Times:
    sides = [our_pair(sequence), their_pair(sequence)]
    x, seed = (torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(at)) for at in (1, 2))
    if sequence:
        x, seed = (value.chunk(PROCESSES)[rank].clone() for value in (x, seed))
    inputs = [x.clone().requires_grad_() for _ in sides]
    outs: list[Any] = [None, None]

    def step(at: int) -> None:
        sides[at].zero_grad()
        inputs[at].grad = None
        outs[at] = sides[at](inputs[at])
        outs[at].backward(seed)

    for at in range(2):
        step(at)
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(sides[0].parameters(), sides[1].parameters(), strict=True):
        assert ours.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad.to_local(), rtol=1e-4, atol=1e-3)  # type: ignore[union-attr]
    return alternate(lambda: step(0), lambda: step(1))


def tensor() -> None:
    header("column -> row pair, 2 processes", "DTensor ms")
    for sequence in (False, True):
        report("sequence parallel" if sequence else "tensor parallel", run_ranks(measure_tensor, PROCESSES, sequence))


LAYERS, SEQUENCES, LENGTH = 4, 4, 128


def decoder(blocks: int = LAYERS) -> list[Layer]:
    sizes = {"num_hidden_layers": blocks, "hidden_size": WIDTH, "intermediate_size": 688, "vocab_size": 256}
    return layers(load("tiny", {f"model.{key}": size for key, size in sizes.items()}).model.shape(), seed=0)


def measure_data(rank: int, transport: Literal["shared", "individual"], microbatches: int) -> Times:
    tokens = torch.randint(0, 256, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(rank))
    mesh = Mesh.of(MeshShape(dp=PROCESSES))
    assert mesh is not None
    schedule, options = schedules.one_f_one_b(1, microbatches), RuntimeOptions(transport=transport)
    pipeline = Pipeline(decoder(), schedule, loss=cross_entropy, mesh=mesh, options=options)
    replicated = DistributedDataParallel(nn.Sequential(*[layer() for layer in decoder()]))

    def ours() -> None:
        pipeline.zero_grad()
        pipeline.step(tokens, tokens)

    def theirs() -> None:
        replicated.zero_grad()
        parts = tokens.chunk(microbatches)
        for part in parts:
            with contextlib.nullcontext() if part is parts[-1] else replicated.no_sync():
                (cross_entropy(replicated(part), part) / microbatches).backward()

    for step in (ours, theirs):
        step()
    for (name, own), (_, other) in zip(pipeline.named_parameters(), replicated.named_parameters(), strict=True):
        assert own.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-4, atol=1e-6, msg=name)
    times = alternate(ours, theirs)
    pipeline.close()
    return times


def data() -> None:
    header("decoder, 2 replicas", "DDP ms")
    for microbatches in (1, 4):
        for transport, through in (("shared", "shared memory"), ("individual", "gloo")):
            what = f"{microbatches} micro-batch{'es' if microbatches > 1 else ''}, {through}"
            report(what, run_ranks(measure_data, PROCESSES, transport, microbatches))


BLOCKS, STEPS, GATHER_PAIRS = 12, 2, 12
CAPACITY = 4 * 2**20  # bytes of a bucket: about one block
BYTES_PER_SECOND = 125e6


class SlowLink:
    """All-gathers that are complete no earlier than a link of a given rate would have carried them, one after the other."""

    def __init__(self) -> None:
        self._free = 0.0

    def start(self, flat: Tensor, axis: Axis) -> PendingCollective[Tensor]:
        gather = start_gather_slices(flat, axis)
        begun = max(self._free, time.perf_counter())
        self._free = begun + flat.nbytes * (axis.size - 1) / axis.size / BYTES_PER_SECOND
        done = self._free

        def wait() -> None:
            gather.wait()
            time.sleep(max(0.0, done - time.perf_counter()))

        return PendingCollective(SimpleNamespace(wait=wait), lambda: flat, flat)


def measure_gathers(rank: int, emulated: bool) -> Times:
    if emulated:
        vars(data_parallel)["start_gather_slices"] = SlowLink().start
    vars(grad_sync)["GradientSync"] = partial(GradientSync, capacity=CAPACITY)
    tokens = torch.randint(0, 256, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(rank))
    mesh = Mesh.of(MeshShape(dp=PROCESSES))
    assert mesh is not None
    options = RuntimeOptions(shard_gradients=True)
    pipeline = Pipeline(decoder(BLOCKS), schedules.gpipe(1, 1), loss=cross_entropy, mesh=mesh, options=options)
    named, section = list(pipeline.named_parameters()), load("tiny", {"optimizer.zero1": True}).optimizer
    optimizer = Optimizer(named, section, pipeline.sync, pipeline.counts_in_norm)

    def steps(waits: bool) -> None:
        for _ in range(STEPS):
            pipeline.step(tokens, tokens)
            optimizer.step(None, 1e-4)
            if waits:
                optimizer.wait()
        optimizer.wait()

    times = alternate(lambda: steps(False), lambda: steps(True), GATHER_PAIRS)
    pipeline.close()
    return times


def gathers() -> None:
    header("ZeRO-1, 2 replicas, 2 steps", "waiting ms")
    for emulated, name in ((False, "gloo"), (True, "emulated link of 1 Gbit/s")):
        report(name, run_ranks(measure_gathers, PROCESSES, emulated))


PARTS = {"tensor": tensor, "data": data, "gathers": gathers}

if __name__ == "__main__":
    run_parts(PARTS)
