"""What the search gains over the published families: `python benchmarks/search.py [--ranks 4 8] [--seconds 20] [--sample N]`.

A cell is p, m, v, memory (share of 1F1B's) and costs. For each: the best one-route family that fits with the same v or less, the
search's makespan, the lower bound. At the end a summary by p, costs and memory: how many cells are worse than a family (must be
none), proved optimal, and of the others strictly better. Seconds are of this process's own time, so that a busy machine does not
matter. `--results FILE` keeps a line a cell; cells that are in it already are not run again. The families come from the function
that gives the search its starts (tests/solver compares with families built one by one), and are simulated here.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from random import Random
from typing import NamedTuple

import pipeloom as pl
from pipeloom.errors import CapacityError
from pipeloom.schedule import Costs, check, simulate
from pipeloom.solver.construct import family_schedules
from pipeloom.solver.exact import RELATIVE_ROUNDING, certify
from pipeloom.solver.instance import Instance
from pipeloom.solver.search import placements_of

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
        forward, grad, weight = ((*[value] * (stages - 1), 1.5 * value) for value in (10.0, 12.0, 8.0))
        return Costs(forward, grad, weight, p2p=1)
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
    instances = [
        Instance(place, cell.microbatches, costs, cell.memory) for place in placements_of(cell.ranks, cell.chunks, None)
    ]
    return all(certify(instance, value, seconds).bound >= value * (1 - RELATIVE_ROUNDING) for instance in instances)


def run_cell(cell: Cell, seconds: float, proof: float) -> dict[str, object]:
    """What the families, the search and the proof say of a cell; a proof is tried where the search is no better than a family."""
    costs = costs_of(cell)
    family = best_family(cell, costs)
    begin = time.process_time()
    try:
        found = pl.search(cell.ranks, cell.microbatches, costs, cell.memory, chunks=cell.chunks, time_limit=seconds)
    except CapacityError:
        return {"family": family, "value": math.inf, "bound": 0.0, "certified": False, "seconds": 0.0}
    used = time.process_time() - begin
    check(found.schedule)
    certified = found.proved
    if not certified and proof and found.value >= family - 1e-6:
        certified = is_optimal(cell, costs, found.value, proof)
    figures = {"family": family, "value": found.value, "bound": found.lower_bound, "certified": certified}
    return figures | {"seconds": round(used, 2), "limit": seconds, "origin": found.origin}


def summary(rows: list[tuple[Cell, dict]], by: str) -> list[str]:  # type: ignore[type-arg]
    lines = [
        f"| {by} | cells | worse | proved optimal | strictly better, of the rest | mean gain | mean gap | slowest |"
    ]
    lines.append("| " + "--- | " * 8)
    for key in dict.fromkeys(getattr(cell, by) for cell, _ in rows):
        own = [row for cell, row in rows if getattr(cell, by) == key]
        rest = [row for row in own if not row["certified"]]
        better = [row for row in rest if row["value"] < row["family"] - 1e-6]
        worse = sum(row["value"] > row["family"] + 1e-6 for row in own)
        gains = [1 - row["value"] / row["family"] for row in better if row["family"] < math.inf]
        gaps = [row["value"] / row["bound"] - 1 for row in rest if row["bound"]]
        share = f"{len(better)} of {len(rest)}" + (f" ({100 * len(better) / len(rest):.0f} %)" if rest else "")
        means = (f"{100 * sum(values) / len(values):.1f} %" if values else "" for values in (gains, gaps))
        slowest = max(row["seconds"] for row in own)
        cells_ = (key, len(own), worse, len(own) - len(rest), share, *means, f"{slowest:.1f} s")
        lines.append(f"| {' | '.join(map(str, cells_))} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="*", default=[4, 8, 16])
    parser.add_argument("--seconds", type=float, default=20.0, help="time limit of a cell, in seconds of this process")
    parser.add_argument("--sample", type=int, help="only this many cells, drawn at random (seed 0)")
    parser.add_argument(
        "--prove", type=float, default=0.0, help="seconds for a proof where nothing better was found (extra opt)"
    )
    parser.add_argument("--results", type=Path, help="file of results, one JSON object a line; it is continued")
    parser.add_argument("--report", action="store_true", help="only summarise the file of results")
    args = parser.parse_args()
    time.monotonic = time.process_time  # a limit counts this process's time
    chosen = list(cells(args.ranks))
    if args.sample is not None:
        chosen = Random(0).sample(chosen, min(args.sample, len(chosen)))
    done: dict[Cell, dict] = {}  # type: ignore[type-arg]
    if args.results is not None and args.results.exists():
        for line in args.results.read_text().splitlines():
            row = json.loads(line)
            done[Cell(*row.pop("cell"))] = row
    for cell in chosen:
        if cell in done or args.report:
            continue
        done[cell] = run_cell(cell, args.seconds, args.prove)
        line = json.dumps({"cell": cell, **done[cell]})
        print(line, flush=True)
        if args.results is not None:
            with args.results.open("a") as file:
                file.write(line + "\n")
    rows = [(cell, done[cell]) for cell in chosen if cell in done]
    for by in ("ranks", "chunks", "share", "costs", "microbatches"):
        print("\n".join(["", *summary(rows, by)]))


if __name__ == "__main__":
    main()
