"""Steps that follow one another: the optimizer with and without a barrier, against the simulated makespan and period.

    python benchmarks/barrier.py            all parts
    python benchmarks/barrier.py period

period: layers that sleep (F, I and W 5 ms each), 4 processes. Time from step to step over a run of steps, with the global norm
        waited for in each step and without; makespan and period are simulated with the costs and the hop measured in the run.

The two ways alternate, run by run, in the same processes; figures are medians over the runs.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from functools import partial
from statistics import fmean, median
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pipeloom as pl
from pipeloom import Costs
from pipeloom.config import load_layout
from pipeloom.runtime import Pipeline
from pipeloom.schedule.period import period as simulated_period
from pipeloom.train.batches import Batch
from pipeloom.train.loop import Trainer
from pipeloom.train.speculative import SpeculativeOptimizer
from processes import run_ranks
from runtime import hop_seconds, mse

RANKS, MICROBATCHES, WIDTH = 4, 8, 8
STEPS, SETTLED = 11, 3  # steps of a run; those before the times are steady
RUNS = 5
SECONDS = 0.005


class SleepInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        time.sleep(SECONDS)
        return gradients[0] * 1.0


class SleepLayer(nn.Module):
    """A small linear layer whose F and I take their time; W's is taken by `slow_weight_gradients`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(SECONDS)
        return SleepInBackward.apply(self.linear(x))  # type: ignore[no-any-return, no-untyped-call]


def slow_weight_gradients(pipeline: Pipeline) -> None:
    """W of every stage here takes its time, alone or as the second half of a fused B."""
    for stage in pipeline._rank.stages.values():

        def weight_gradient(microbatch: int, plain: Any) -> None:
            time.sleep(SECONDS)
            plain(microbatch)

        stage.weight_gradient = partial(weight_gradient, plain=stage.weight_gradient)  # type: ignore[method-assign]


class Measured(NamedTuple):
    """Of one rank: seconds from step to step of each run, how often it speculated, and the costs of the run."""

    barrier: list[float]
    free: list[float]
    speculations: int
    rollbacks: int
    costs: list[Costs]
    hop: float


def measure(rank: int, name: str, chunks: int) -> Measured:
    schedule = pl.schedules.build(name, RANKS, MICROBATCHES, chunks if chunks > 1 else None)
    torch.manual_seed(0)
    pipeline = Pipeline([SleepLayer for _ in range(schedule.stages)], schedule, loss=mse)
    slow_weight_gradients(pipeline)
    config = load_layout("tiny", {"optimizer.clip_norm": 0.0}).config
    context: Any = SimpleNamespace(rank=rank, device=pipeline.device, stop_requested=False)
    trainer = Trainer(config, pipeline, context, None)
    speculative = SpeculativeOptimizer(pipeline, trainer._optimizer, 0.0)
    batch = Batch(torch.randn(MICROBATCHES, WIDTH), torch.randn(MICROBATCHES, WIDTH))
    costs: list[Costs] = []

    def run(step: Any) -> float:
        """Seconds from one step's end to the next's, on this rank."""
        dist.barrier()
        ends = []
        for _ in range(STEPS):
            step()
            ends.append(time.perf_counter())
        speculative.settle()
        costs.append(pipeline.timeline().costs)
        return (ends[-1] - ends[SETTLED - 1]) / (STEPS - SETTLED)

    with_barrier, without = [], []
    for _ in range(RUNS):
        with_barrier.append(run(lambda: trainer.step(batch, 1e-6)))
        without.append(run(lambda: speculative.step(*batch, 1e-6)))
    hop = hop_seconds(rank, RANKS, (1, WIDTH))
    pipeline.close()
    return Measured(with_barrier, without, speculative.speculations, speculative.rollbacks, costs, hop)


def typical(costs: list[Costs], hop: float) -> Costs:
    """The median over the runs of each stage's cost; the mean over the stages where a step has too few of them."""

    def stages(kind: str) -> tuple[float, ...]:
        return tuple(median(values) for values in zip(*(getattr(each, kind) for each in costs), strict=True))

    return replace(
        costs[0], forward=stages("forward"), input_grad=stages("input_grad"), weight_grad=stages("weight_grad"), p2p=hop
    )


def period() -> None:
    print(f"emulated compute: F, I and W {SECONDS * 1e3:.0f} ms each, {RANKS} processes, {RUNS} runs of {STEPS} steps")
    print(
        f"{'schedule':18}{'makespan':>9}{'period':>8}{'barrier':>9}{'÷makespan':>11}{'without':>9}{'÷period':>9}"
        f"{'without÷barrier':>17}{'(simulated)':>12}   ms"
    )
    for name, chunks in (("1f1b", 1), ("zb-h1", 1), ("zb-h2", 1), ("zb-auto", 1), ("zbv", 2)):
        results: list[Measured] = run_ranks(measure, RANKS, name, chunks)
        schedule = pl.schedules.build(name, RANKS, MICROBATCHES, chunks if chunks > 1 else None)
        costs = typical(results[0].costs, results[0].hop)
        makespan, between = pl.simulate(schedule, costs).makespan, simulated_period(schedule, costs)
        barrier = median(fmean(values) for values in zip(*(r.barrier for r in results), strict=True))
        free = median(fmean(values) for values in zip(*(r.free for r in results), strict=True))
        print(
            f"{name:18}{makespan * 1e3:9.1f}{between * 1e3:8.1f}{barrier * 1e3:9.1f}{barrier / makespan:11.3f}"
            f"{free * 1e3:9.1f}{free / between:9.3f}{free / barrier:17.3f}{between / makespan:12.3f}"
        )
        early = [r.speculations for r in results]
        if early != [RUNS * STEPS - 1] * RANKS or any(r.rollbacks for r in results):
            sys.exit(f"steps made early {early}, taken back {[r.rollbacks for r in results]}: that is no fair run")


PARTS = {"period": period}

if __name__ == "__main__":
    chosen = sys.argv[1:] or list(PARTS)
    unknown = [name for name in chosen if name not in PARTS]
    if unknown:
        sys.exit(f"there is no part {unknown[0]!r}; parts: {', '.join(PARTS)}")
    for part in chosen:
        PARTS[part]()
        print()
