"""The runtime against torch.distributed.pipelining, side by side in one run.

    python benchmarks/runtime.py            all parts
    python benchmarks/runtime.py emulated tiny blocks split
    python benchmarks/runtime.py --tuned blocks    after the trainer's tune_process() in every process, for both sides

emulated: layers that sleep (F 5 ms, B 10 ms), 4 processes: step / makespan simulated with costs calibrated in the run.
tiny:     layers that do next to nothing, 2 processes: microseconds a compute action.
blocks:   8 transformer blocks of width 256, 128 tokens, micro-batch 4, m = 8, 2 processes of one thread: step / torch's.
          *Cool-down split*: the same schedule with `cooldown=split`, beside torch's as it is. With `--tuned` both sides have
          the same allocator, and where the machine prefers it our products go through oneDNN (`pipeloom.ops.products`),
          which torch's runtime cannot; *PyTorch's products* is our step without that, the ratio of like with like.
split:    I + W against B on a stage of 4 such blocks, fresh processes in turn.

Ours and torch's alternate, step by step, in the same processes; figures are medians.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

import pipeloom as pl
from layers import Block, SleepLayer, TinyLayer, mse, total
from parts import run_parts
from pipeloom.ops import products, use_onednn_linear
from pipeloom.ops.deferred import WeightGradContext, defer_weight_gradients
from pipeloom.runtime import Pipeline
from pipeloom.schedule.transforms import unpair
from pipeloom.traces.measured import hops
from processes import run_ranks

PAIRS = 15
PLAIN = (("1f1b", 1), ("interleaved", 2), ("interleaved-zb", 2), ("zbv", 2), ("dualpipev", 2))
SPLIT = (("1f1b", 1), ("interleaved", 2), ("dualpipev", 2))
ROWS = (*((*row, "whole") for row in PLAIN), *((*row, "split") for row in SPLIT))  # schedule, chunks, cool-down
Step = Callable[[Tensor, Tensor], None]


TORCH: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "interleaved-zb": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}


def torch_step(name: str, held: tuple[int, ...], stages: int, m: int, layers: Sequence[nn.Module], loss: Any) -> Step:
    """One step of torch's own runtime over the same layers, of which this process holds the stages `held`."""
    each = len(layers) // stages
    parts = [
        PipelineStage(
            nn.Sequential(*layers[s * each : (s + 1) * each]), s, stages, torch.device("cpu"), group=dist.group.WORLD
        )
        for s in held
    ]
    schedule = TORCH[name](parts if len(parts) > 1 else parts[0], m, loss_fn=loss)

    def step(x: Tensor, y: Tensor) -> None:
        arguments = (x,) if 0 in held else ()
        schedule.step(*arguments, target=y, losses=[]) if stages - 1 in held else schedule.step(*arguments)

    return step


@contextlib.contextmanager
def pytorchs_products() -> Iterator[None]:
    """Inside, our linear layers multiply as PyTorch's do."""
    used = products.uses_onednn()
    use_onednn_linear(False)
    try:
        yield
    finally:
        use_onednn_linear(used)


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
    cooldown: str = "whole",
) -> Any:
    """(our step times, torch's, our measured timelines, ours with PyTorch's products) of alternating steps on this rank.

    With `cooldown="split"` ours is planned anew with the costs measured in the first steps.
    """
    plain = unpair(pl.schedules.build(name, ranks, m, chunks if chunks > 1 else None))
    schedule = pl.schedules.split_cooldown(plain) if cooldown == "split" else plain
    layers = schedule.stages * each
    torch.manual_seed(0)
    ours = Pipeline([partial(make, i) for i in range(layers)], schedule, loss=loss)
    theirs = torch_step(name, schedule.stages_of[rank], schedule.stages, m, [make(i) for i in range(layers)], loss)
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
    if cooldown == "split":
        ours.adopt(pl.schedules.split_cooldown(plain, ours.timeline().costs))
        timed(ours.step)
    own, usual, plainly, timelines = [], [], [], []
    for _ in range(PAIRS):
        own.append(timed(ours.step))
        timelines.append(ours.timeline())
        usual.append(timed(theirs))
        if products.uses_onednn():
            with pytorchs_products():
                plainly.append(timed(ours.step))
    idle = median(barrier_only() for _ in range(20))
    ours.close()
    return [a - idle for a in own], [b - idle for b in usual], timelines, [c - idle for c in plainly or own]


def over_calibrated(results: list[Any]) -> float:
    """Median of a step's time over the makespan simulated with that step's mean action costs and the run's median hop."""
    steps, timelines = results[0][0], results[0][2]
    hop = median(seconds for t in timelines for seconds in hops(t.schedule, t.starts, t.ends))
    simulated = [pl.simulate(t.schedule, replace(t.costs, p2p=hop)).makespan for t in timelines]
    return float(median(step / makespan for step, makespan in zip(steps, simulated, strict=True)))


def label(name: str, ranks: int, m: int, chunks: int, cooldown: str) -> str:
    return name + (f" p={ranks} m={m} v={chunks}" if cooldown == "whole" else ", cool-down split")


def emulated() -> None:
    print("emulated compute: F 5 ms, B 10 ms a layer, 4 processes, medians of", PAIRS, "pairs")
    print(
        f"{'schedule':24}{'step ms':>9}{'÷calibrated':>12}{'÷nominal':>10}{'torch ms':>10}{'÷nominal':>10}{'ratio':>8}"
    )
    m, nominal = 8, pl.Costs(0.005, 0.005, 0.005)
    for name, chunks, cooldown in ROWS:
        sizes = 1, (m * 2, 64)
        results = run_ranks(compare, 4, name, 4, m, chunks, lambda i: SleepLayer(0.005, 0.010), *sizes, mse, cooldown)
        ours, theirs = (median(r) for r in results[0][:2])
        plain = unpair(pl.schedules.build(name, 4, m, chunks if chunks > 1 else None))
        own, usual = (pl.simulate(s, nominal).makespan for s in (results[0][2][0].schedule, plain))
        print(
            f"{label(name, 4, m, chunks, cooldown):24}{ours * 1e3:9.1f}{over_calibrated(results):12.3f}{ours / own:10.3f}"
            f"{theirs * 1e3:10.1f}{theirs / usual:10.3f}{ours / theirs:8.3f}"
        )


def tiny() -> None:
    print("next to no compute, 2 processes: microseconds a compute action of a rank, medians of", PAIRS, "pairs")
    print(f"{'schedule':24}{'ours':>8}{'torch':>8}{'ratio':>8}")
    for name, m, chunks in (("1f1b", 16, 1), ("interleaved", 16, 2)):
        results = run_ranks(compare, 2, name, 2, m, chunks, lambda i: TinyLayer(), 1, (m, 8), total)
        ours, theirs = (median(r) / (2 * m * chunks) * 1e6 for r in results[0][:2])
        print(f"{name + f' p=2 m={m} v={chunks}':24}{ours:8.0f}{theirs:8.0f}{ours / theirs:8.2f}")


def serial_seconds(m: int, blocks: int, plain: bool) -> float:
    """One process over the same blocks and micro-batches. `plain`: with PyTorch's products."""

    def work(rank: int) -> float:
        torch.manual_seed(0)
        model = nn.Sequential(*[Block() for _ in range(blocks)])
        if not plain:
            defer_weight_gradients(model, WeightGradContext())  # its layers multiply as a pipeline's do
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
    alone, alone_plain = serial_seconds(m, 8, False), serial_seconds(m, 8, True)
    print(
        f"8 transformer blocks, width 256, 128 tokens, micro-batch 4, m = {m}, 2 processes; one process: {alone * 1e3:.0f} ms, "
        f"with PyTorch's products {alone_plain * 1e3:.0f} ms"
    )
    print(f"{'ms a step, ÷ torch, efficiency':32}{'torch':>14}{'ours':>20}{'PyTorch products':>19}")
    for name, chunks, cooldown in ROWS:
        sizes = 8 // (2 * chunks), (m * 4, 128, 256)
        results = run_ranks(compare, 2, name, 2, m, chunks, lambda i: Block(), *sizes, mse, cooldown)
        own, usual, _, plainly = results[0]
        ours, theirs, plain = median(own), median(usual), median(plainly)
        ratio, same = (median(a / b for a, b in zip(steps, usual, strict=True)) for steps in (own, plainly))
        print(
            f"{label(name, 2, m, chunks, cooldown):28}{theirs * 1e3:8.0f}{alone_plain / 2 / theirs:6.3f}"
            f"{ours * 1e3:8.0f}{ratio:6.3f}{alone / 2 / ours:6.3f}"
            f"{plain * 1e3:7.0f}{same:6.3f}{alone_plain / 2 / plain:6.3f}"
        )


def one_backward(split: bool) -> float:
    """Seconds of the backwards of 8 micro-batches on a stage of 4 blocks, in one fresh process."""

    def work(rank: int) -> float:
        torch.manual_seed(0)
        name = "zb-h1" if split else "1f1b"
        pipeline = Pipeline([Block for _ in range(4)], pl.schedules.build(name, 1, 8), loss=mse)
        x, y = torch.randn(32, 128, 256), torch.randn(32, 128, 256)
        times = []
        for _ in range(6):
            pipeline.step(x, y)
            timeline = pipeline.timeline()
            kinds = [cell.kind for cell in timeline.schedule.programs[0]]  # type: ignore[union-attr]
            spans = zip(kinds, timeline.starts[0], timeline.ends[0], strict=True)
            times.append(sum(end - start for kind, start, end in spans if kind != "F"))
        return median(times[1:])

    return float(run_ranks(work, 1)[0])


def split() -> None:
    """I + W against B."""
    pairs = [(one_backward(True), one_backward(False)) for _ in range(7)]
    ratio = median(a / b for a, b in pairs)
    apart, fused = median(a for a, _ in pairs), median(b for _, b in pairs)
    print(
        "backward of a stage of 4 blocks, width 256, 128 tokens, micro-batch 4, m = 8; fresh processes in turn, 7 pairs"
    )
    print(f"I + W {apart * 1e3:.0f} ms, B {fused * 1e3:.0f} ms, ratio {ratio:.3f}")


PARTS = {"emulated": emulated, "tiny": tiny, "blocks": blocks, "split": split}

if __name__ == "__main__":
    run_parts(PARTS)
