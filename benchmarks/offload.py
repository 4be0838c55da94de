"""Copies of saved tensors to host memory: simulated, and in real steps of two processes.

    python benchmarks/offload.py simulate
    python benchmarks/offload.py rehearse --unit 0.1
    python benchmarks/offload.py real --width 384 --turns 5

simulate: 1F1B with copies as long as a forward: peak activations and step against those without copies.
rehearse: the same in processes that sleep for the time of each action and copy (`pipeloom rehearse`), 4 and 8 of them, with
          `--unit` seconds for a forward: peaks and medians of `--turns` steps of the measured timelines.
real:     8 transformer blocks, interleaved on 2 processes of one thread, chunks of one block. Steps with and without copies in
          turn, in the same processes; the ratios are those of the medians, of seconds and of CPU seconds. Bytes: the most that
          one step allocates at once, without host memory; then with weights and gradients, on the fullest rank, of the plain
          step's fullest. A copy's time falls against a forward's as 1 / width.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import pipeloom as pl
from commands import answer
from layers import Block, mse
from pipeloom.runtime import Layer, Pipeline, RuntimeOptions
from pipeloom.schedule import Costs, Schedule, simulate
from processes import run_ranks, step_bytes

WORLD, BLOCKS, TOKENS, ROWS = 2, 8, 128, 4
COSTS = Costs(host_bandwidth=4)  # a forward of these blocks takes longer than their copies


def simulated() -> None:
    costs = Costs(host_bandwidth=1)
    print("ranks  parts  peak activations  of 1F1B's  step")
    for ranks in (4, 8):
        plain = pl.schedules.one_f_one_b(ranks, 4 * ranks)
        before = simulate(plain, costs)
        for count in (1, 4, 8):
            after = simulate(pl.schedules.offload(plain, costs, count, count), costs)
            peak, whole = max(after.peak_memory), max(before.peak_memory)
            print(f"{ranks:5}  {count:5}  {peak:16g}  {peak / whole:10.3f}  {after.makespan / before.makespan:.3f}")


def rehearsed(ranks: int, unit: float, turns: int, transform: tuple[str, ...] = ()) -> tuple[float, float]:
    """Return the largest rank's peak activations in the typical rehearsed step, and the seconds of a step."""
    words = ["1f1b", "--ranks", str(ranks), "--microbatches", str(4 * ranks), "--host-bandwidth", "1", *transform]
    report = answer("rehearse", *words, "--unit", str(unit), "--steps", str(turns))
    return max(report["peak_memory"]), report["rehearsal"]["rehearsed"]


def rehearsals(unit: float, turns: int, rows: tuple[tuple[int, int], ...] = ((4, 1), (4, 4), (8, 1), (8, 8))) -> None:
    print("ranks  parts  peak activations  of 1F1B's  step, s  of 1F1B's")
    plain = {ranks: rehearsed(ranks, unit, turns) for ranks, _ in dict(rows).items()}
    for ranks, count in rows:
        peak, step = rehearsed(ranks, unit, turns, ("--transform", f"offload={count}/{count}"))
        whole, base = plain[ranks]
        print(f"{ranks:5}  {count:5}  {peak:16.4g}  {peak / whole:10.3f}  {step:7.2f}  {step / base:.3f}", flush=True)


def worker(rank: int, schedules: list[Schedule], width: int, turns: int) -> dict[str, Any]:
    """Return the seconds of each schedule's steps, its bytes, and those of weights and gradients."""
    pipelines = []
    for schedule in schedules:
        torch.manual_seed(1)
        layers = [Layer(f"block{at}", lambda: Block(width, 8)) for at in range(BLOCKS)]
        pipelines.append(Pipeline(layers, schedule, loss=mse, options=RuntimeOptions(monitor=False)))
    rows = schedules[0].microbatches * ROWS
    inputs, targets = torch.randn(rows, TOKENS, width), torch.randn(rows, TOKENS, width)
    seconds: list[list[float]] = [[] for _ in schedules]
    cpu: list[list[float]] = [[] for _ in schedules]
    for turn in range(turns + 1):
        for at, pipeline in enumerate(pipelines):
            dist.barrier()
            began, busy = time.perf_counter(), time.process_time()
            pipeline.step(inputs, targets)
            busy = time.process_time() - busy
            dist.barrier()
            if turn:  # the first one allocates gradients and buffers
                seconds[at].append(time.perf_counter() - began)
                cpu[at].append(busy)
    allocated = [step_bytes(pipeline, inputs, targets) for pipeline in pipelines]
    standing = sum(2 * parameter.nbytes for parameter in pipelines[0].parameters())
    gradients = [[parameter.grad for parameter in pipeline.parameters()] for pipeline in pipelines]
    pairs = [pair for other in gradients[1:] for pair in zip(gradients[0], other, strict=True)]
    same = all(a is not None and b is not None and torch.equal(a, b) for a, b in pairs)
    return {"seconds": seconds, "cpu": cpu, "bytes": allocated, "standing": standing, "same": same}


def real(width: int, turns: int) -> None:
    plain = pl.schedules.interleaved(WORLD, microbatches=8, chunks=BLOCKS // WORLD)
    names = {
        "plain": plain,
        "whole": pl.schedules.offload(plain, COSTS),
        "4 parts": pl.schedules.offload(plain, COSTS, 4, 4),
    }
    reports = run_ranks(worker, WORLD, list(names.values()), width, turns)
    print(
        "copies   step, ms  of plain  CPU of plain  MB allocated per rank  with weights, gradients: of plain  bitwise"
    )
    base = median(reports[0]["seconds"][0])
    work = [sum(median(report["cpu"][at]) for report in reports) for at in range(len(names))]
    for at, name in enumerate(names):
        step = median(reports[0]["seconds"][at])
        sizes = [report["bytes"][at] / 1e6 for report in reports]
        peaks = [max(report["bytes"][case] + report["standing"] for report in reports) for case in (at, 0)]
        share = peaks[0] / peaks[1]
        words = " ".join(f"{size:6.1f}" for size in sizes)
        same = all(report["same"] for report in reports)
        print(
            f"{name:7}  {1e3 * step:8.1f}  {step / base:8.3f}  {work[at] / work[0]:12.3f}  {words:>21}  {share:33.3f}  {same}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("simulate", "rehearse", "real"))
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--unit", type=float, default=0.1)
    given = parser.parse_args()
    if given.part == "simulate":
        simulated()
    elif given.part == "rehearse":
        rehearsals(given.unit, given.turns)
    else:
        real(given.width, given.turns)
