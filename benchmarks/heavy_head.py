"""A searched schedule against every family on a real decoder with a heavy head: `python benchmarks/heavy_head.py`.

8 blocks of width 128 and an output layer over 8,192 words (about five blocks' work), 32 tokens, 8 micro-batches of 4, on 2
processes of one thread. Every stage gets as many blocks, so that the last one is heavy; with `--cut balanced` stages are cut by
operations, as the trainer does it. First 1f1b and interleaved are measured, with every second backward split, then the schedule
is searched for what their stages took (one and two chunks, every placement), then all take turns, in a new order each round.
Figures are medians, and the least of all rounds; families that plan with costs get the measured ones.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import pipeloom as pl
from pipeloom.config import Layout, load_layout
from pipeloom.measure.build import build_pipeline
from pipeloom.runtime import Pipeline
from pipeloom.schedule.transforms import half_split
from pipeloom.schedules import FAMILIES
from pipeloom.solver.merge_backward import merge_backwards
from pipeloom.traces.measured import costs_of
from pipeloom.train.data.batches import Batch
from pipeloom.train.report.verify import make_batch
from processes import run_ranks

RANKS, MICROBATCHES = 2, 8
SIZES = {
    "model.num_hidden_layers": 8,
    "model.hidden_size": 128,
    "model.vocab_size": 8192,
    "train.seq_len": 32,
    "train.global_batch_size": 4 * MICROBATCHES,
    "train.device": "cpu",
    "parallel.pp": RANKS,
    "schedule.microbatches": MICROBATCHES,
}
CALIBRATION = ("1f1b", "interleaved")
MEMORIES = (1.0, 2.0)  # of 1F1B's, which holds p micro-batches in all of its stages


@dataclass
class Runner:
    """One schedule's pipeline, its makespan at the measured costs, and what its steps took."""

    name: str
    pipeline: Pipeline
    simulated: float
    seconds: list[float]

    def step(self, batch: Batch) -> float:
        dist.barrier()
        start = time.perf_counter()
        self.pipeline.step(batch.tokens, batch.targets)
        dist.barrier()
        self.pipeline.zero_grad()
        return time.perf_counter() - start


def layout_of(schedule: pl.Schedule, cut: str) -> Layout:
    """The decoder cut into this schedule's stages."""
    stages = schedule.positions
    named = {"schedule.name": "1f1b"} if stages == RANKS else {"schedule.chunks": stages // RANKS}
    blocks = "t" * (SIZES["model.num_hidden_layers"] // stages)  # type: ignore[operator]
    even = {"parallel.stages": f"E{'|'.join([blocks] * stages)}L"} if cut == "even" else {}
    return replace(load_layout(None, SIZES | named | even), schedule=schedule)


def calibrate(rounds: int, cut: str) -> dict[int, pl.Costs]:
    """Number of stages -> their measured costs, seconds, of pipelines that take turns; the same on every rank."""
    families = [pl.schedules.build(name, RANKS, MICROBATCHES) for name in CALIBRATION]
    layouts = [layout_of(half_split(schedule), cut) for schedule in families]
    pipelines = [build_pipeline(layout, torch.device("cpu")) for layout in layouts]
    batch = make_batch(layouts[0])
    timelines: list[list[pl.Timeline]] = [[] for _ in families]
    for at in range(rounds + 1):
        for schedule, pipeline, kept in zip(families, pipelines, timelines, strict=True):
            pipeline.adopt(half_split(schedule, at))
            pipeline.step(batch.tokens, batch.targets)
            pipeline.zero_grad()
            kept.append(pipeline.timeline())
    for pipeline in pipelines:
        pipeline.close()
    box = [{schedule.stages: costs_of(kept[1:]) for schedule, kept in zip(families, timelines, strict=True)}]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def searched(costs: dict[int, pl.Costs], memory: float, iterations: int) -> pl.Schedule:
    """The best at these costs with one or two chunks, within `memory` times 1F1B's; the same on every rank."""
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        found = []
        for stages, own in costs.items():
            apart = replace(own, backward=None)
            result = pl.search(
                RANKS, MICROBATCHES, apart, memory * stages, chunks=stages // RANKS, iterations=iterations
            )
            found += [merge_backwards(result.schedule, own)]
        box = [min(found, key=lambda schedule: pl.simulate(schedule, costs[schedule.stages]).makespan)]
    dist.broadcast_object_list(box, src=0)
    best: pl.Schedule = box[0]
    return best


def contestants(costs: dict[int, pl.Costs], iterations: int) -> dict[str, pl.Schedule]:
    """The searched schedules, then every family that takes these sizes."""
    found = {f"searched, {share:g} x 1F1B's memory": searched(costs, share, iterations) for share in MEMORIES}
    for name in FAMILIES:
        for stages in costs:
            try:
                schedule = pl.schedules.build(name, RANKS, MICROBATCHES, costs=replace(costs[stages], backward=None))
            except pl.PipeloomError:
                continue
            if schedule.positions == stages:
                found[name] = schedule
    return found


def cost_for(schedule: pl.Schedule, costs: dict[int, pl.Costs]) -> pl.Costs:
    """The costs of its stages; replicas of a stage cost the same."""
    own = costs[schedule.positions]
    spread = {
        name: tuple(own.per_stage(name, schedule.positions)[at] for at in schedule.position_of)
        for name in ("forward", "input_grad", "weight_grad", "backward")
    }
    return replace(own, **spread)  # type: ignore[arg-type]


def work(rank: int, rounds: int, iterations: int, cut: str) -> Any:
    costs = calibrate(rounds, cut)
    runners = []
    for name, schedule in contestants(costs, iterations).items():
        pipeline = build_pipeline(layout_of(schedule, cut), torch.device("cpu"))
        runners.append(Runner(name, pipeline, pl.simulate(schedule, cost_for(schedule, costs)).makespan, []))
    batch = make_batch(layout_of(runners[0].pipeline.schedule, cut))
    for runner in runners:
        runner.step(batch)
    order, random = list(runners), Random(0)
    for _ in range(rounds):
        random.shuffle(order)
        for runner in order:
            runner.seconds.append(runner.step(batch))
    rows = []
    for runner in runners:
        schedule = runner.pipeline.schedule
        peak = max(pl.simulate(schedule).peak_activations) / schedule.chunks
        runner.pipeline.close()
        rows.append((runner.name, schedule, runner.simulated, runner.seconds, peak))
    return costs, rows


def show(costs: dict[int, pl.Costs], rows: Sequence[Any]) -> None:
    for stages, own in costs.items():
        parts = ", ".join(
            f"{kind} {' '.join(f'{1e3 * value:.1f}' for value in own.per_stage(name, stages))}"
            for kind, name in (("F", "forward"), ("I", "input_grad"), ("W", "weight_grad"), ("B", "backward"))
        )
        hop = own.hop(0, 1)
        print(f"measured stage costs of {stages} stages, ms: {parts}; hop {1e3 * hop:.2f}")
    ours = [row for row in rows if row[0].startswith("searched")]
    families = sorted((row for row in rows if row not in ours), key=lambda row: median(row[3]))
    head = f"{'schedule':34}{'placement':>18}{'peak':>6}{'simulated ms':>14}{'step ms':>9}{'least':>8}"
    print(head + "".join(f"{f'÷ searched {share:g}x':>15}" for share in MEMORIES))
    for name, schedule, simulated, seconds, peak in (*ours, *families):
        ratios = [median(b / a for a, b in zip(own[3], seconds, strict=True)) for own in ours]
        place = "".join(map(str, schedule.placement))
        print(
            f"{name:34}{place:>18}{peak:6.1f}{1e3 * simulated:14.1f}{1e3 * median(seconds):9.1f}{1e3 * min(seconds):8.1f}"
            + "".join(f"{ratio:15.3f}" for ratio in ratios)
        )
    once = [row for row in families if len(row[1].routes) == 1]
    for own in ours:
        for words, best in (("one route", once[0]), ("any", families[0])):
            ratio = median(a / b for a, b in zip(own[3], best[3], strict=True))
            least = min(own[3]) / min(best[3])
            print(f"ratio: {own[0]} / best family, {words} ({best[0]}): {ratio:.3f}, of the least {least:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--iterations", type=int, default=2000, help="moves of each search")
    parser.add_argument("--cut", choices=["even", "balanced"], default="even")
    args = parser.parse_args()
    start = time.perf_counter()
    costs, rows = run_ranks(work, RANKS, args.rounds, args.iterations, args.cut)[0]
    show(costs, rows)
    print(f"{args.cut} cut, {args.rounds} rounds, {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
