"""The runtime against torch.distributed.pipelining, side by side in one run.

    python benchmarks/runtime.py            all parts
    python benchmarks/runtime.py emulated tiny blocks

emulated: layers that sleep (F 5 ms, B 10 ms), 4 processes: step / makespan simulated with costs calibrated in the run.
tiny:     layers that do next to nothing, 2 processes: microseconds a compute action.
blocks:   8 transformer blocks of width 256, 128 tokens, micro-batch 4, m = 8, 2 processes of one thread: step / torch's.

Ours and torch's alternate, step by step, in the same processes; figures are medians.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

import pipeloom as pl
from pipeloom.runtime import Pipeline
from processes import run_ranks

PAIRS = 15


class SleepFunction(torch.autograd.Function):
    """Takes the given seconds forward and backward, and passes its input on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        time.sleep(ctx.seconds)
        return gradients[0] * 1.0, None, None


class SleepLayer(nn.Module):
    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.seconds = forward, backward
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return SleepFunction.apply(x * self.scale, *self.seconds)  # type: ignore[no-any-return]


class TinyLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Block(nn.TransformerEncoderLayer):
    def __init__(self) -> None:
        super().__init__(256, 4, 1024, dropout=0.0, batch_first=True, norm_first=True)


def mse(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def total(output: Tensor, target: Tensor) -> Tensor:
    return output.sum()


def torch_step(
    name: str, rank: int, ranks: int, chunks: int, m: int, layers: list[nn.Module], loss: Any
) -> Callable[[Tensor, Tensor], None]:
    """One step of torch's own runtime over the same layers."""
    stages = ranks * chunks
    each = len(layers) // stages
    held = [c * ranks + rank for c in range(chunks)]
    parts = [
        PipelineStage(
            nn.Sequential(*layers[s * each : (s + 1) * each]), s, stages, torch.device("cpu"), group=dist.group.WORLD
        )
        for s in held
    ]
    if name == "interleaved":
        schedule: Any = ScheduleInterleaved1F1B(parts, m, loss_fn=loss)
    else:
        schedule = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[name](parts[0], m, loss_fn=loss)

    def step(x: Tensor, y: Tensor) -> None:
        arguments = (x,) if 0 in held else ()
        schedule.step(*arguments, target=y, losses=[]) if stages - 1 in held else schedule.step(*arguments)

    return step


def compare(
    rank: int,
    name: str,
    ranks: int,
    m: int,
    chunks: int,
    make: Callable[[int], nn.Module],
    each: int,
    shape: Any,
    loss: Any = mse,
) -> Any:
    """(our step times, torch's, our measured timeline) of alternating steps on this rank."""
    layers = ranks * chunks * each
    schedule = pl.schedules.build(name, ranks, m, chunks if chunks > 1 else None)
    torch.manual_seed(0)
    ours = Pipeline([lambda i=i: make(i) for i in range(layers)], schedule, loss=loss)
    theirs = torch_step(name, rank, ranks, chunks, m, [make(i) for i in range(layers)], loss)
    x, y = torch.randn(*shape), torch.randn(*shape)

    def timed(step: Callable[[Tensor, Tensor], Any]) -> float:
        dist.barrier()
        start = time.perf_counter()
        step(x, y)
        dist.barrier()
        return time.perf_counter() - start

    def barrier_only() -> float:
        dist.barrier()
        start = time.perf_counter()
        dist.barrier()
        return time.perf_counter() - start

    for _ in range(3):
        timed(ours.step)
        timed(theirs)
    pairs = [(timed(ours.step), timed(theirs)) for _ in range(PAIRS)]
    timelines = []
    for _ in range(5):
        timed(ours.step)
        timelines.append(ours.timeline())
    idle = median(barrier_only() for _ in range(20))
    hop = hop_seconds(rank, ranks, (shape[0] // m, *shape[1:]))
    ours.close()
    return [a - idle for a, _ in pairs], [b - idle for _, b in pairs], timelines, hop


def hop_seconds(rank: int, ranks: int, shape: Any) -> float:
    """Half the median round trip of a message of this shape between ranks 0 and 1."""
    times = []
    tensor = torch.zeros(*shape)
    for _ in range(60):
        start = time.perf_counter()
        if rank == 0:
            dist.send(tensor, 1)
            dist.recv(tensor, 1)
        elif rank == 1:
            dist.recv(tensor, 0)
            dist.send(tensor, 0)
        times.append((time.perf_counter() - start) / 2)
    return median(times[10:])


def calibrated(results: list[Any]) -> float:
    """The makespan simulated with the run's mean action costs and hop."""
    timelines, hop = results[0][2], results[0][3]
    makespans = [pl.simulate(t.schedule, replace(t.costs, p2p=hop)).makespan for t in timelines]
    return median(makespans)


def emulated() -> None:
    print("emulated compute: F 5 ms, B 10 ms a layer, 4 processes, medians of", PAIRS, "pairs")
    print(f"{'schedule':24}{'step ms':>9}{'÷calibrated':>12}{'÷nominal':>10}{'torch ms':>10}{'torch ÷nominal':>16}")
    for name, m, chunks in (("1f1b", 8, 1), ("interleaved", 8, 2)):
        results = run_ranks(compare, 4, name, 4, m, chunks, lambda i: SleepLayer(0.005, 0.010), 1, (m * 2, 64))
        ours, theirs = (median(r) for r in results[0][:2])
        schedule = results[0][2][0].schedule
        nominal = pl.simulate(schedule, pl.Costs(0.005, 0.005, 0.005)).makespan
        print(
            f"{name + f' p=4 m={m} v={chunks}':24}{ours * 1e3:9.1f}{ours / calibrated(results):12.3f}{ours / nominal:10.3f}"
            f"{theirs * 1e3:10.1f}{theirs / nominal:16.3f}"
        )


def tiny() -> None:
    print("next to no compute, 2 processes: microseconds a compute action of a rank, medians of", PAIRS, "pairs")
    print(f"{'schedule':24}{'ours':>8}{'torch':>8}{'ratio':>8}")
    for name, m, chunks in (("1f1b", 16, 1), ("interleaved", 16, 2)):
        results = run_ranks(compare, 2, name, 2, m, chunks, lambda i: TinyLayer(), 1, (m, 8), total)
        ours, theirs = (median(r) / (2 * m * chunks) * 1e6 for r in results[0][:2])
        print(f"{name + f' p=2 m={m} v={chunks}':24}{ours:8.0f}{theirs:8.0f}{ours / theirs:8.2f}")


def serial_seconds(m: int, blocks: int) -> float:
    """One process over the same blocks and micro-batches."""

    def work(rank: int) -> float:
        torch.manual_seed(0)
        model = nn.Sequential(*[Block() for _ in range(blocks)])
        x, y = torch.randn(m * 4, 128, 256), torch.randn(m * 4, 128, 256)
        times = []
        for _ in range(6):
            start = time.perf_counter()
            for a, b in zip(x.split(4), y.split(4), strict=True):
                (mse(model(a), b) / m).backward()
            times.append(time.perf_counter() - start)
        return median(times[1:])

    return float(run_ranks(work, 1)[0])


def blocks() -> None:
    m = 8
    alone = serial_seconds(m, 8)
    print(
        f"8 transformer blocks, width 256, 128 tokens, micro-batch 4, m = {m}, 2 processes; one process: {alone * 1e3:.0f} ms"
    )
    print(f"{'schedule':24}{'ours ms':>9}{'torch ms':>10}{'ratio':>8}{'efficiency':>12}{'torch':>8}")
    for name, chunks in (("1f1b", 1), ("interleaved", 2)):
        results = run_ranks(compare, 2, name, 2, m, chunks, lambda i: Block(), 8 // (2 * chunks), (m * 4, 128, 256))
        pairs = list(zip(results[0][0], results[0][1], strict=True))
        ours, theirs = median(a for a, _ in pairs), median(b for _, b in pairs)
        print(
            f"{name + f' p=2 m={m} v={chunks}':24}{ours * 1e3:9.0f}{theirs * 1e3:10.0f}{median(a / b for a, b in pairs):8.3f}"
            f"{alone / 2 / ours:12.3f}{alone / 2 / theirs:8.3f}"
        )


PARTS = {"emulated": emulated, "tiny": tiny, "blocks": blocks}

if __name__ == "__main__":
    chosen = sys.argv[1:] or list(PARTS)
    unknown = [name for name in chosen if name not in PARTS]
    if unknown:
        sys.exit(f"there is no part {unknown[0]!r}; parts: {', '.join(PARTS)}")
    for part in chosen:
        PARTS[part]()
        print()
