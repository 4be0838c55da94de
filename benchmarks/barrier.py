"""Steps that follow one another: the optimizer with and without a barrier, against the simulated makespan and period.

    python benchmarks/barrier.py            all parts
    python benchmarks/barrier.py period

period: layers that sleep (F, I and W 5 ms each), 4 processes. Time from step to step over a run of steps, with the global norm
        waited for in each step and without; makespan and period are simulated with the action and message times of the same run.

The two ways alternate, run by run, in the same processes; figures are medians over the runs.
"""

from __future__ import annotations

import sys
import time
from statistics import fmean, median
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import pipeloom as pl
from layers import SleepLayer, mse
from parts import run_parts
from pipeloom import Costs
from pipeloom.config import load_layout
from pipeloom.runtime import Pipeline
from pipeloom.schedule.simulate import period as simulated_period
from pipeloom.schedule.timeline import Timeline
from pipeloom.traces.measured import hops
from pipeloom.train.data.batches import Batch
from pipeloom.train.loop import Trainer
from pipeloom.train.speculative import SpeculativeOptimizer
from processes import run_ranks

RANKS, MICROBATCHES, WIDTH = 4, 8, 8
STEPS, SETTLED = 11, 3  # steps of a run; those before the times are steady
RUNS = 5
SECONDS = 0.005


class Run(NamedTuple):
    """One rank's run: seconds from step to step, and when each action of the steady steps started and ended."""

    seconds: float
    starts: list[list[float]]
    ends: list[list[float]]


class Measured(NamedTuple):
    """Of one rank: its runs, and how often it stepped early and took that back."""

    barrier: list[Run]
    free: list[Run]
    speculations: int
    rollbacks: int


def measure(rank: int, name: str, chunks: int) -> Measured:
    schedule = pl.schedules.build(name, RANKS, MICROBATCHES, chunks if chunks > 1 else None)
    torch.manual_seed(0)
    pipeline = Pipeline([lambda: SleepLayer(SECONDS, 2 * SECONDS)] * schedule.stages, schedule, loss=mse)
    config = load_layout("tiny", {"optimizer.clip_norm": 0.0}).config
    context: Any = SimpleNamespace(rank=rank, device=pipeline.device, flags=0)
    trainer = Trainer(config, pipeline, context, None)
    speculative = SpeculativeOptimizer(pipeline, trainer.optimizer)
    batch = Batch(torch.randn(MICROBATCHES, WIDTH), torch.randn(MICROBATCHES, WIDTH))

    def run(step: Any) -> Run:
        dist.barrier()
        times, traces = [], []
        for _ in range(STEPS):
            step()
            times.append(time.perf_counter())
            traces.append(pipeline.stats)
        speculative.settle()
        steady = traces[SETTLED:]
        seconds = (times[-1] - times[SETTLED - 1]) / (STEPS - SETTLED)
        return Run(seconds, [list(trace.starts) for trace in steady], [list(trace.ends) for trace in steady])

    with_barrier, without = [], []
    for _ in range(RUNS):
        with_barrier.append(run(lambda: trainer.step(batch, 1e-6)))
        without.append(run(lambda: speculative.step(batch.arguments, 1e-6)))
    pipeline.close()
    return Measured(with_barrier, without, speculative.speculations, speculative.rollbacks)


def costs_of(schedule: pl.Schedule, ranks: list[Run]) -> Costs:
    """Each stage's mean F, I and W over the steady steps of one run, and a message's median seconds."""
    steps = [([run.starts[at] for run in ranks], [run.ends[at] for run in ranks]) for at in range(len(ranks[0].starts))]
    each = [Timeline.measured(schedule, starts, ends).costs for starts, ends in steps]

    def mean(kind: str) -> tuple[float, ...]:
        return tuple(fmean(values) for values in zip(*(getattr(costs, kind) for costs in each), strict=True))

    hop = median([seconds for starts, ends in steps for seconds in hops(schedule, starts, ends)])
    return Costs(forward=mean("forward"), input_grad=mean("input_grad"), weight_grad=mean("weight_grad"), p2p=hop)


class Figures(NamedTuple):
    """Of one run, in seconds: simulated makespan and period, and the measured time from step to step."""

    makespan: float
    period: float
    measured: float


def figures(schedule: pl.Schedule, ranks: list[Run]) -> Figures:
    costs = costs_of(schedule, ranks)
    makespan = pl.simulate(schedule, costs).makespan
    return Figures(makespan, simulated_period(schedule, costs), fmean(run.seconds for run in ranks))


def period() -> None:
    print(f"emulated compute: F, I and W {SECONDS * 1e3:.0f} ms each, {RANKS} processes, {RUNS} runs of {STEPS} steps")
    print(
        f"{'schedule':12}{'barrier ms':>11}{'÷makespan':>11}{'without ms':>12}{'÷period':>9}{'÷makespan':>11}"
        f"{'without÷barrier':>17}{'period÷makespan':>17}"
    )
    for name, chunks in (("1f1b", 1), ("zb-h1", 1), ("zb-h2", 1), ("zb-auto", 1), ("zbv", 2)):
        results: list[Measured] = run_ranks(measure, RANKS, name, chunks)
        schedule = pl.schedules.build(name, RANKS, MICROBATCHES, chunks if chunks > 1 else None)
        held = [figures(schedule, list(runs)) for runs in zip(*(r.barrier for r in results), strict=True)]
        free = [figures(schedule, list(runs)) for runs in zip(*(r.free for r in results), strict=True)]
        print(
            f"{name:12}{median(f.measured for f in held) * 1e3:11.1f}{median(f.measured / f.makespan for f in held):11.3f}"
            f"{median(f.measured for f in free) * 1e3:12.1f}{median(f.measured / f.period for f in free):9.3f}"
            f"{median(f.measured / f.makespan for f in free):11.3f}"
            f"{median(a.measured / b.measured for a, b in zip(free, held, strict=True)):17.3f}"
            f"{median(f.period / f.makespan for f in free):17.3f}"
        )
        early = [r.speculations for r in results]
        if early != [RUNS * STEPS - 1] * RANKS or any(r.rollbacks for r in results):
            sys.exit(f"steps made early {early}, taken back {[r.rollbacks for r in results]}: that is no fair run")


PARTS = {"period": period}

if __name__ == "__main__":
    run_parts(PARTS)
