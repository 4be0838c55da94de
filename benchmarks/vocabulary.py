"""The output layer spread over the pipeline against the best cut with it on the last stage: `python benchmarks/vocabulary.py`.

8 layers that take 1 for a micro-batch (a third each for F, I and W) and an output layer that takes 6, 16 micro-batches on 4
processes. Computation is emulated (it sleeps), messages, broadcasts and reductions are real, of 8 tokens of width 8. The best cut
is that of all contiguous cuts of the 9 layers with the shortest simulated 1F1B. The two take turns; figures are medians over the
rounds. Spread evenly, a micro-batch takes a rank 14 / 4 = 3.5; on the slowest rank of any cut it takes 6: 0.583.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations, pairwise
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pipeloom as pl
from pipeloom.measure.rehearse import Clock, EmulatedLayer
from pipeloom.parallel.vocabulary import VocabularyShare
from pipeloom.runtime import Layer, Pipeline
from pipeloom.schedule.segments import LayerSegments, PhaseTimes
from pipeloom.schedule.vocabulary import costs_of_all
from pipeloom.shapes.mesh import uneven_parts
from processes import run_ranks

RANKS, MICROBATCHES, LAYERS, HEAD = 4, 16, 8, 6.0
WIDTH, TOKENS, VOCABULARY = 8, 8, 64


class _Timed(torch.autograd.Function):
    """Passes on its input, and takes a time in the forward and one in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock, forward: float, backward: float) -> Tensor:
        ctx.work = clock, backward
        clock.compute("vocabulary", "S", forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        clock, seconds = ctx.work
        clock.compute("vocabulary", "T", seconds)
        return gradients[0], None, None, None


class EmulatedShare(VocabularyShare):
    """A share of the vocabulary whose S and T take given seconds."""

    def __init__(self, rank: int, clock: Clock, scores: float, gradients: float) -> None:
        super().__init__(WIDTH, uneven_parts(VOCABULARY, RANKS), rank)
        nn.init.zeros_(self.weight)
        self.clock, self.seconds = clock, (scores, gradients)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = _Timed.apply(super().forward(hidden), self.clock, *self.seconds)  # type: ignore[no-untyped-call]
        return out


@dataclass(frozen=True)
class Contestant:
    """A schedule and its costs, with a stage's work of a micro-batch as its unit."""

    name: str
    schedule: pl.Schedule
    costs: pl.Costs

    def pipeline(self, rank: int, unit: float) -> Pipeline:
        clock, positions = Clock(), self.schedule.positions
        times = zip(
            *(self.costs.per_stage(n, positions) for n in ("forward", "input_grad", "weight_grad")), strict=True
        )
        layers = []
        for at, each in enumerate(times):
            segments = LayerSegments(PhaseTimes(*(unit * t for t in each)), PhaseTimes(0, 0, 0))
            layers.append(Layer(f"stage.{at}", partial(EmulatedLayer, clock, segments)))
        if self.schedule.vocabulary:
            parts = [unit * float(each) for each in (self.costs.scores, self.costs.scores_grad)]  # type: ignore[arg-type]
            layers.append(Layer("share", lambda: EmulatedShare(rank, clock, *parts)))
        return Pipeline(layers, self.schedule, loss=lambda output, targets: output.mean())


@dataclass
class Measured:
    """Steps of one contestant.

    Attributes:
        simulated: its makespan in units of a layer's work.
        peaks: rank -> the most micro-batches alive, counted in a real step.
    """

    contestant: Contestant
    simulated: float
    peaks: Sequence[int] = ()
    seconds: list[float] = field(default_factory=list)


def costs_of(work: Sequence[float], **times: Any) -> pl.Costs:
    """Costs of stages with this work: a third each for F, I and W."""
    third = tuple(each / 3 for each in work)
    return pl.Costs(third, third, third, **times)


def simulated(contestant: Contestant) -> float:
    schedule, costs = contestant.schedule, contestant.costs
    return pl.simulate(schedule, costs_of_all(costs, schedule) if schedule.vocabulary else costs).makespan


def best_cut() -> Contestant:
    """The shortest 1F1B of all cuts of the layers, the output layer the last of them."""
    layers, schedule = [1.0] * LAYERS + [HEAD], pl.schedules.build("1f1b", RANKS, MICROBATCHES)
    cuts = [pairwise((0, *inner, LAYERS + 1)) for inner in combinations(range(1, LAYERS + 1), RANKS - 1)]
    works = [[sum(layers[start:end]) for start, end in cut] for cut in cuts]
    every = [Contestant(f"1f1b, cut {' '.join(f'{w:g}' for w in work)}", schedule, costs_of(work)) for work in works]
    return min(every, key=simulated)


def spread(form: str) -> Contestant:
    """1F1B with equal stages of layers, and the vocabulary over the ranks."""
    third = HEAD / RANKS / 3
    scores = 2 * third if form == "fused" else third
    costs = costs_of([LAYERS / RANKS] * RANKS, scores=scores, scores_grad=HEAD / RANKS - scores)
    plain = pl.schedules.build("1f1b", RANKS, MICROBATCHES)
    return Contestant(f"1f1b, vocabulary={form}", pl.schedules.transformed(plain, [f"vocabulary={form}"], costs), costs)


def work(rank: int, rounds: int, unit: float) -> list[Measured]:
    contestants = [best_cut(), spread("fused"), spread("two")]
    rows = [Measured(each, simulated(each)) for each in contestants]
    pipelines = [each.pipeline(rank, unit) for each in contestants]
    inputs = torch.ones(MICROBATCHES, TOKENS, WIDTH)
    targets = torch.randint(VOCABULARY, (MICROBATCHES, TOKENS), generator=torch.Generator().manual_seed(0))
    for number in range(rounds + 1):
        for row, pipeline in zip(rows, pipelines, strict=True):
            dist.barrier()
            start = time.perf_counter()
            pipeline.step(inputs, targets)
            dist.barrier()
            if number:
                row.seconds.append(time.perf_counter() - start)
    for row, pipeline in zip(rows, pipelines, strict=True):
        peaks: list[Any] = [None] * RANKS
        dist.all_gather_object(peaks, pipeline.peak_activations)
        row.peaks = peaks
        pipeline.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--unit", type=float, default=0.05, help="seconds that a layer takes for a micro-batch")
    args = parser.parse_args()
    rows: list[Measured] = run_ranks(work, RANKS, args.rounds, args.unit)[0]
    first = rows[0]
    print(f"{'schedule':28}{'simulated':>11}{'step s':>9}{'÷ best cut':>12}{'(least)':>9}{'simulated':>11}   peaks")
    for row in rows:
        ratio = median(mine / other for mine, other in zip(row.seconds, first.seconds, strict=True))
        least = min(row.seconds) / min(first.seconds)
        peaks = " ".join(map(str, row.peaks))
        print(
            f"{row.contestant.name:28}{row.simulated:11.2f}{median(row.seconds):9.3f}{ratio:12.3f}{least:9.3f}"
            f"{row.simulated / first.simulated:11.3f}   {peaks}"
        )
    print(
        f"a rank's work for a micro-batch: {(LAYERS + HEAD) / RANKS:g} against {HEAD:g}: {(LAYERS + HEAD) / RANKS / HEAD:.3f}"
    )


if __name__ == "__main__":
    main()
