"""Search over order and recomputation at half of 1F1B's memory, against named schedules: `python benchmarks/recompute.py`.

A stage is 1/p of a model whose norms and activations are 59 of the 100 that F saves (20 of 34 s·b·h of a dense layer) and take a
tenth of F to recompute; its inputs are 6. Searched with one and with two chunks (of half the costs), the shorter counts.
Named: v-min, and 1F1B with every micro-batch recomputed in an action of its own or in blocks, or its norms alone; `-` exceeds
the memory. With `--exact`, small cases are compared with the least over all sets of micro-batches, each solved by constraint
programming (the extra `opt`).
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import replace
from itertools import product

import pipeloom as pl
from pipeloom.schedule import Costs, Schedule, simulate
from pipeloom.schedule.costs import TIME_TOLERANCE
from pipeloom.schedule.families import build
from pipeloom.schedule.transforms import recompute
from pipeloom.solver.exact import certify
from pipeloom.solver.instance import Instance
from pipeloom.solver.recompute import choices_of

SETTINGS = ((1, 1, 1), (1.2, 1, 1), (1, 1.2, 0.8), (0.6, 1, 1.4), (1.4, 1, 1))  # F, I, W
BYTES = {"saved": 94, "kept": 6, "saved:norms": 59, "pending": 70, "layer": 12}
SMALL = (
    (2, 2, Costs(recompute=1, kept=0.1)),
    (2, 2, Costs(2, recompute=1, kept=0.1)),
    (2, 3, Costs(recompute=1, kept=0.2, p2p=0.5)),
    (3, 2, Costs(recompute=0.5, kept=0.1)),
)


def costs_of(forward: float, input_grad: float, weight_grad: float) -> Costs:
    return Costs(
        forward,
        input_grad,
        weight_grad,
        activation=100.0,
        kept=0.06,
        held=0.7,
        recompute=forward,
        parts={"norms": 0.1 * forward},
        bytes=BYTES,
    )


def named(ranks: int, microbatches: int, costs: Costs) -> dict[str, tuple[Schedule, Costs]]:
    plain = build("1f1b", ranks, microbatches)
    return {
        "v-min": (build("v-min", ranks, microbatches, costs=costs.resized(0.5)), costs.resized(0.5)),
        "R whole": (recompute(plain, True), costs),
        "R in blocks": (recompute(plain), costs),
        "R of norms": (recompute(plain, part="norms"), costs),
    }


def row(ranks: int, microbatches: int, setting: tuple[float, float, float], seconds: float) -> str:
    costs = costs_of(*setting)
    memory = 0.5 * 100.0 * ranks
    cells, values = [], []
    for schedule, its_costs in named(ranks, microbatches, costs).values():
        timeline = simulate(schedule, its_costs)
        fits = max(timeline.peak_memory) <= memory + TIME_TOLERANCE
        cells.append(f"{timeline.makespan:.1f}" if fits else "-")
        values.append(timeline.makespan if fits else math.inf)
    results = [
        pl.search(ranks, microbatches, each, memory=memory, chunks=chunks, time_limit=seconds / 2)
        for chunks, each in ((1, costs), (2, costs.resized(0.5)))
    ]
    best = min(results, key=lambda result: result.value)
    assert max(best.timeline.peak_memory) <= memory + TIME_TOLERANCE
    assert best.value <= min(values) + TIME_TOLERANCE, f"{best} is longer than a named schedule"
    gain = f"{100 * (1 - best.value / min(values)):.1f} %" if min(values) < math.inf else "-"
    ratio = ":".join(f"{time:g}" for time in setting)
    return f"| {ranks} | {microbatches} | {ratio} | {' | '.join(cells)} | {best.value:.1f} | {gain} |"


def exact(ranks: int, microbatches: int, costs: Costs, memory: float) -> float:
    """The least makespan over all ways to recompute."""
    instance = Instance(tuple(range(ranks)), microbatches, costs, memory)
    ways = choices_of(costs, ranks)
    options = [
        [None, *{step for way in ways for step in way[node // microbatches]}] for node in range(ranks * microbatches)
    ]
    least = 1000.0
    for picks in product(*options):
        recomputed = tuple((node, pick) for node, pick in enumerate(picks) if pick is not None)
        least = certify(replace(instance, recomputed=recomputed), least, 20.0).value
    return least


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each row")
    parser.add_argument("--exact", action="store_true", help="compare small cases with exact answers instead")
    options = parser.parse_args()
    if options.exact:
        for ranks, microbatches, costs in SMALL:
            value = pl.search(ranks, microbatches, costs, memory=1.3, iterations=2000).value
            least = exact(ranks, microbatches, costs, 1.3)
            print(f"p {ranks}, m {microbatches}: searched {value:g}, exact {least:g}")
            assert value == least
        return 0
    print("| p | m | F:I:W | v-min | R whole | R in blocks | R of norms | searched | shorter |")
    print("| --- " * 9 + "|")
    for ranks, microbatches in ((4, 8), (8, 16)):
        for setting in SETTINGS:
            print(row(ranks, microbatches, setting, options.seconds), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
