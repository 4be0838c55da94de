"""Search over order, recomputation and copies at a quarter of 1F1B's memory: `python benchmarks/memory_search.py`.

Eight ranks and 32 micro-batches; a stage is 1/8 of a model whose norms and activations are 59 of the 100 that F saves and take a
tenth of F to recompute; its inputs are 6, and W needs 70. Copies take so many F each way. Searched with one and with two chunks
(of half the costs), the shorter counts; the bound is the smaller of both. Named: v-min with its norms recomputed, 1F1B recomputed
whole, 1F1B under `offload=4/4`, and PipeOffload's orders with one of two chunks or both copied; `-` exceeds the memory. Seconds
are those of the clock.

With `--exact 100`, so many small cases (up to 3 ranks) are compared with constraint programming (the extra `opt`) instead; those
that it does not prove in the seconds of a row are printed, and others follow.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from dataclasses import replace
from itertools import count, product

import pipeloom as pl
from exact_programs import least_makespan, small_case
from pipeloom.schedule import Costs, Schedule, simulate
from pipeloom.schedule.costs import TIME_TOLERANCE
from pipeloom.schedule.families import build
from pipeloom.schedule.offload import offload
from pipeloom.schedule.transforms import recompute
from recompute import SETTINGS, costs_of

RANKS, MICROBATCHES, MEMORY = 8, 32, 200.0
COPIES = (0.5, 1.0, 1.5, 2.0)  # in units of F
MOVES = 20_000, 100_000, 200_000  # of small cases: more where the fewer were not proved to be enough


def named(costs: Costs) -> dict[str, tuple[Schedule, Costs]]:
    """name -> (schedule, costs of its stages)."""
    half = costs.resized(0.5)
    sizes = RANKS, MICROBATCHES
    return {
        "v-min, R of norms": (recompute(build("v-min", *sizes, costs=half), part="norms"), half),
        "1f1b, R": (recompute(build("1f1b", *sizes), True), costs),
        "1f1b, offload": (offload(build("1f1b", *sizes), costs, 4, 4), costs),
        "PO-H": (build("gis", *sizes, 2, {"offload_chunks": 1}, costs=half), half),
        "PO-F": (build("gis", *sizes, 2, {"offload_chunks": 2}, costs=half), half),
    }


def row(setting: tuple[float, float, float], copy: float, seconds: float) -> str:
    costs = replace(costs_of(*setting), host_bandwidth=94 / (copy * setting[0]))
    cells, best_named = [], math.inf
    for schedule, its_costs in named(costs).values():
        timeline = simulate(schedule, its_costs)
        fits = max(timeline.peak_memory) <= MEMORY + TIME_TOLERANCE
        cells.append(f"{timeline.makespan:.1f}" if fits else "-")
        best_named = min(best_named, timeline.makespan) if fits else best_named
    begin = time.monotonic()
    results = [
        pl.search(RANKS, MICROBATCHES, each, memory=MEMORY, chunks=chunks, time_limit=share * seconds)
        for chunks, each, share in ((1, costs, 0.25), (2, costs.resized(0.5), 0.75))
    ]
    took = time.monotonic() - begin
    best = min(results, key=lambda result: result.value)
    bound = min(result.lower_bound for result in results)
    assert max(best.timeline.peak_memory) <= MEMORY + TIME_TOLERANCE
    assert best.value <= best_named + TIME_TOLERANCE, f"{best} is longer than a named schedule"
    ratio = ":".join(f"{time:g}" for time in setting)
    return (
        f"| {ratio} | {copy:g} | {' | '.join(cells)} | {best.value:.1f} | {best.value / best_named:.3f} | "
        f"{best.value / bound:.4f} | {best.origin} | {took:.0f} |"
    )


def compare(cases: int, first: int, seconds: float) -> None:
    """Print in which of so many small cases that are proved the search and the least differ, and which were not proved."""
    outcomes = dict.fromkeys(("equal", "longer", "shorter", "not proved"), 0)
    for seed in count(first):
        case = small_case(seed)
        for moves in MOVES:
            value = pl.search(*case, iterations=moves).value
            least, bound = least_makespan(*case, value, seconds)
            outcome = "longer" if least < value - 0.01 else "shorter" if value < bound - 0.01 else "equal"
            outcome = "not proved" if outcome == "equal" and bound < value - 0.01 else outcome
            if outcome == "equal":
                break
            words = f"searched {value:g} in {moves} moves, least {least:g}, its bound {bound:g}: {outcome}"
            print(f"case {seed}: p {case[0]}, m {case[1]}: {words}", flush=True)
        outcomes[outcome] += 1
        if sum(outcomes.values()) - outcomes["not proved"] == cases:
            break
    print(f"cases {first} to {seed}: {', '.join(f'{number} {outcome}' for outcome, number in outcomes.items())}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=55.0, help="for each row or proof")
    parser.add_argument("--copies", type=float, nargs="*", default=COPIES, help="times of a copy, in units of F")
    parser.add_argument("--exact", type=int, metavar="CASES", help="compare so many small cases with the least instead")
    parser.add_argument("--first", type=int, default=0, help="the number of the first small case")
    options = parser.parse_args()
    if options.exact:
        compare(options.exact, options.first, options.seconds)
        return 0
    heads = "F:I:W", "copy ÷ F", *named(replace(costs_of(1, 1, 1), host_bandwidth=94.0))
    print(f"| {' | '.join(heads)} | searched | ÷ named | ÷ bound | from | seconds |")
    print("| --- " * (len(heads) + 5) + "|")
    for setting, copy in product(SETTINGS, options.copies):
        print(row(setting, copy, options.seconds), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
