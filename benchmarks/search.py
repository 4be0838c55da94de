"""What the search gains over the published families: `python benchmarks/search.py [--ranks 4 8] [--seconds 20] [--sample N]`.

One line a cell: p, m, v, memory (share of 1F1B's), costs, the best one-route family that fits with the same v or less, the
search's makespan, the lower bound. At the end, how many cells are worse (must be none), proved optimal, and of the others
strictly better. The families come from the function that gives the search its starts
(tests/solver compares with families built one by one), and are simulated here.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from itertools import product
from random import Random
from typing import NamedTuple

import pipeloom as pl
from pipeloom.errors import CapacityError
from pipeloom.schedule import Costs, check, simulate
from pipeloom.solver.placements import placements_of
from pipeloom.solver.problem import Problem
from pipeloom.solver.prove import ROUNDING, certify
from pipeloom.solver.seeds import family_schedules

MEMORIES = (0.5, 0.75, 1.0, 2.0)
COSTS = ("equal", "10/12/8", "heavy", "random")


class Cell(NamedTuple):
    """One question to the search."""

    ranks: int
    microbatches: int
    chunks: int
    share: float
    costs: str

    @property
    def memory(self) -> float:
        """In stage-micro-batches; 1F1B's first rank holds p full-rank ones."""
        return self.share * self.ranks * self.chunks


def cells(ranks: list[int]) -> Iterator[Cell]:
    for p in ranks:
        for m, v, share, costs in product((p, 2 * p, 3 * p + 1, 4 * p), (1, 2), MEMORIES, COSTS):
            yield Cell(p, m, v, share, costs)


def costs_of(cell: Cell) -> Costs:
    stages = cell.ranks * cell.chunks
    if cell.costs == "equal":
        return Costs()
    if cell.costs == "10/12/8":
        return Costs(10, 12, 8, 1)
    if cell.costs == "heavy":
        return Costs(*(tuple([value] * (stages - 1) + [1.5 * value]) for value in (10.0, 12.0, 8.0)), p2p=1)
    random = Random(f"{cell}")
    forward, grad, weight = (tuple(random.uniform(5, 15) for _ in range(stages)) for _ in range(3))
    return Costs(forward, grad, weight, 1)


def best_family(cell: Cell, costs: Costs) -> float:
    best = math.inf
    for placement in placements_of(cell.ranks, cell.chunks, None):
        for made in family_schedules(placement, cell.microbatches, costs, cell.memory):
            timeline = simulate(made, costs)
            if max(timeline.peak_memory) <= cell.memory + 1e-9:
                best = min(best, timeline.makespan)
    return best


def is_optimal(cell: Cell, costs: Costs, value: float, seconds: float) -> bool:
    """Whether constraint programming shows, on every placement searched, that nothing is better."""
    problems = [
        Problem(place, cell.microbatches, costs, cell.memory) for place in placements_of(cell.ranks, cell.chunks, None)
    ]
    return all(certify(problem, value, seconds).bound >= value * (1 - ROUNDING) for problem in problems)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="*", default=[4, 8, 16])
    parser.add_argument("--seconds", type=float, default=20.0, help="time limit of a cell")
    parser.add_argument("--sample", type=int, help="only this many cells, drawn at random (seed 0)")
    parser.add_argument("--prove", type=float, default=0.0, help="seconds for a proof of what is left open (extra opt)")
    args = parser.parse_args()
    chosen = list(cells(args.ranks))
    if args.sample is not None:
        chosen = sorted(Random(0).sample(chosen, min(args.sample, len(chosen))))
    worse = proved = better = slow = 0
    print("| p | m | v | memory | costs | best family | search | bound | gap | seconds |\n| " + "--- | " * 10)
    for cell in chosen:
        costs = costs_of(cell)
        family = best_family(cell, costs)
        begin = time.monotonic()
        try:
            found = pl.search(
                cell.ranks, cell.microbatches, costs, cell.memory, chunks=cell.chunks, time_limit=args.seconds
            )
        except CapacityError:
            print(f"{cell}: no schedule fits; best family {family}", flush=True)
            worse += family < math.inf
            continue
        seconds = time.monotonic() - begin
        check(found.schedule)
        certified = found.proved or (args.prove > 0 and is_optimal(cell, costs, found.value, args.prove))
        slow += seconds > args.seconds + 1
        worse += found.value > family + 1e-6
        proved += certified
        better += not certified and found.value < family - 1e-6
        row = (
            *cell[:3],
            f"{cell.share:g}",
            cell.costs,
            f"{family:.6g}",
            f"{found.value:.6g}",
            f"{found.lower_bound:.6g}",
        )
        gap = "optimal" if certified else f"{100 * found.gap:.1f} %"
        print(f"| {' | '.join(map(str, row))} | {gap} | {seconds:.1f} |", flush=True)
    open_cells = len(chosen) - proved
    print(
        f"\n{len(chosen)} cells: {worse} worse than a family, {proved} proved optimal, {better} of the other {open_cells} "
        f"strictly better ({100 * better / max(1, open_cells):.0f} %), {slow} took longer than {args.seconds:g} s"
    )


if __name__ == "__main__":
    main()
