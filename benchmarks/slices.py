"""Sequence slices: bytes and time of steps over long sequences, on 2 processes of one thread, against whole sequences.

    python benchmarks/slices.py                          16 slices of 32,768 tokens
    python benchmarks/slices.py --tokens 16384 --slices 8
    python benchmarks/slices.py --from-host              slices of 2,048 tokens, of 16,384 and of 65,536 in all

2 layers of width 64 with one head, one per process, 1F1B over 2 micro-batches of one sequence, in fp32. *bytes*: the most that
one step allocates at once, keys and values kept for later slices among it; weights and gradients aside. *step*: median of steps
of the two in turn, in the same processes. *CPU*: processor seconds of the same steps, which other load on the machine disturbs
less.

--from-host: bytes alone, of one sequence with every slice recomputed. *host*: its inputs, keys and values are in host memory
until its backward, and later slices read keys and values from there piece by piece; *device*: they stay on the device. The
caller's batch is not counted.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pipeloom as pl
from pipeloom.models.decoder import Block
from pipeloom.runtime import Layer, Pipeline, RuntimeOptions
from pipeloom.schedule import Schedule
from pipeloom.shapes.decoder import DecoderShape
from processes import run_ranks, step_bytes

WORLD, WIDTH, MICROBATCHES = 2, 64, 2
SHAPE = DecoderShape(WORLD, WIDTH, 1, 1, intermediate_size=4 * WIDTH, vocab_size=16)


def block() -> nn.Module:
    return Block(SHAPE)


def mean_square(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).square().mean()


def worker(rank: int, schedules: list[Schedule], slice_tokens: list[int], tokens: int, turns: int) -> dict[str, Any]:
    """Return the seconds of each schedule's steps, its bytes, and the largest relative difference of gradients."""
    pipelines = []
    for schedule in schedules:
        torch.manual_seed(1)
        layers = [Layer(f"block{at}", block) for at in range(WORLD)]
        options = RuntimeOptions(monitor=False, slice_tokens=tuple(slice_tokens))
        pipelines.append(Pipeline(layers, schedule, loss=mean_square, options=options))
    inputs, targets = torch.randn(2, schedules[0].microbatches, tokens, WIDTH)
    seconds: list[list[float]] = [[] for _ in schedules]
    processor: list[list[float]] = [[] for _ in schedules]
    allocated, gradients = [], []
    for pipeline in pipelines:
        allocated.append(step_bytes(pipeline, inputs, targets))
        gradients.append([each.grad.clone() for each in pipeline.parameters() if each.grad is not None])
    for _ in range(turns):
        for at, pipeline in enumerate(pipelines):
            dist.barrier()
            began, work = time.perf_counter(), time.process_time()
            pipeline.step(inputs, targets)
            processor[at].append(time.process_time() - work)
            dist.barrier()
            seconds[at].append(time.perf_counter() - began)
    error = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(gradients[1], gradients[0], strict=True))
    return {"seconds": seconds, "processor": processor, "bytes": allocated, "error": error}


def from_host(slice_tokens: int, lengths: tuple[int, ...]) -> None:
    """Print the bytes of the two schedules at each length, and how they grow."""
    rows = []
    for tokens in lengths:
        count = tokens // slice_tokens
        resident = pl.schedules.transformed(pl.schedules.seq1f1b(WORLD, 1, count), ["recompute=whole"])
        schedules = [pl.schedules.transformed(resident, ["offload=kept"]), resident]
        reports = run_ranks(worker, WORLD, schedules, [slice_tokens] * count, tokens, 0)
        print(
            f"{tokens:,} tokens, {count} slices; gradients differ by {max(r['error'] for r in reports):.1e}", flush=True
        )
        rows.append([report["bytes"] for report in reports])
    print(
        "rank  "
        + "  ".join(f"{name} MB at {tokens:,}" for name in ("host", "device") for tokens in lengths)
        + "  growth"
    )
    for rank in range(WORLD):
        words = [f"{row[rank][at] / 1e6:.1f}" for at in range(2) for row in rows]
        growth = [f"{rows[-1][rank][at] / rows[0][rank][at] - 1:+.1%}" for at in range(2)]
        print(f"{rank:4}  {'  '.join(words)}  {' '.join(growth)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--slices", type=int, default=16)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--from-host", action="store_true")
    given = parser.parse_args()
    if given.from_host:
        from_host(2048, (16_384, 65_536))
        return
    plain = pl.schedules.one_f_one_b(WORLD, MICROBATCHES)
    tokens = [given.tokens // given.slices] * given.slices
    schedules = [plain, pl.schedules.seq1f1b(WORLD, MICROBATCHES, slices=given.slices)]
    reports = run_ranks(worker, WORLD, schedules, tokens, given.tokens, given.turns)
    print(f"{given.tokens:,} tokens, {given.slices} slices; gradients differ by {max(r['error'] for r in reports):.1e}")
    print("rank  MB whole  sliced  of whole  step whole, s  sliced  of whole  CPU whole, s  sliced  of whole")
    for rank, report in enumerate(reports):
        whole, cut = report["bytes"]
        words = f"{rank:4}  {whole / 1e6:8.1f}  {cut / 1e6:6.1f}  {cut / whole:8.3f}"
        for name in ("seconds", "processor"):
            before, after = map(median, report[name])
            words += f"  {before:13.2f}  {after:6.2f}  {after / before:8.3f}"
        print(words)


if __name__ == "__main__":
    main()
