"""Equal numbers of moves on a fixed grid of searches: `python benchmarks/search_moves.py [--compare FILE] [--write FILE]`.

Guards changes of the solver that should not change its results. Each cell is a search with a fixed number of moves, a seed and
no time limit, so its value depends on the code alone. `benchmarks/search_moves.json` holds the values from before the solvers
with and without pairs became one. With `--compare`, exits with 1 if the mean is worse or a cell is more than 0.5 % worse. Seconds
are processor seconds; compare moves per second only between alternating runs on one machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from itertools import product
from pathlib import Path

import pipeloom as pl

SEEDS = (0, 1)
WORST = 1.005  # of a single cell, relative to the file compared with

UNEQUAL = pl.Costs(10, 12, 8, 1)
OVERLAP = pl.Costs(3, 3, 2, 1, all_to_all=1)
CASES: dict[str, dict[str, object]] = {
    "equal p4 m8": {"ranks": 4, "microbatches": 8, "memory": 3},
    "loop p4 m8 v2": {"ranks": 4, "microbatches": 8, "chunks": 2, "costs": UNEQUAL, "memory": 6},
    "vee p4 m12 v2": {"ranks": 4, "microbatches": 12, "costs": UNEQUAL, "memory": 4, "placement": "vee"},
    "span p6 m13": {"ranks": 6, "microbatches": 13, "costs": UNEQUAL, "memory": 4, "objective": "span"},
    "one B p4 m8": {"ranks": 4, "microbatches": 8, "costs": pl.Costs(10, 12, 8, 1, backward=17), "memory": 4},
    "uneven p4 m6": {"ranks": 4, "microbatches": 6, "costs": pl.Costs(3, 3, 2, 1, microbatch=(1, 2, 1, 3, 1, 2)), "memory": 9},
    "pairs p4 m8": {"ranks": 4, "microbatches": 8, "costs": OVERLAP, "memory": 5, "pairs": True},
    "pairs vee p4 m10": {"ranks": 4, "microbatches": 10, "costs": OVERLAP, "memory": 9, "placement": "vee", "pairs": True},
    "pairs span p4 m9": {
        "ranks": 4, "microbatches": 9, "costs": OVERLAP, "memory": 5, "objective": "span", "pairs": True,
    },
}  # fmt: skip


def run(moves: int) -> dict[str, dict[str, float]]:
    """cell -> value, moves made, and seconds of this process."""
    rows = {}
    for (name, arguments), seed in product(CASES.items(), SEEDS):
        begin = time.process_time()
        result = pl.search(**arguments, iterations=moves, seed=seed)  # type: ignore[arg-type]
        seconds = time.process_time() - begin
        row = {"value": result.value, "moves": result.iterations, "seconds": round(seconds, 3)}
        rows[f"{name}, seed {seed}"] = row
        print(f"{name}, seed {seed}: {result.value:g} after {result.iterations} moves in {seconds:.2f} s", flush=True)
    return rows


def compare(rows: dict[str, dict[str, float]], before: dict[str, dict[str, float]]) -> bool:
    """Print the cells that differ; return whether the mean and every cell are good enough."""
    ratios = {cell: row["value"] / before[cell]["value"] for cell, row in rows.items()}
    for cell, ratio in ratios.items():
        if ratio != 1:
            print(f"{cell}: {before[cell]['value']:g} -> {rows[cell]['value']:g} ({100 * ratio - 100:+.2f} %)")
    mean = sum(ratios.values()) / len(ratios)
    speed = [
        sum(row["moves"] for row in side.values()) / sum(row["seconds"] for row in side.values())
        for side in (before, rows)
    ]
    print(f"mean {100 * mean - 100:+.3f} %, moves per second {speed[0]:.0f} -> {speed[1]:.0f}")
    return mean <= 1 + 1e-9 and max(ratios.values()) <= WORST


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--moves", type=int, default=600, help="moves of the local search per cell")
    parser.add_argument("--write", type=Path, help="write the values to this file")
    parser.add_argument("--compare", type=Path, help="file of values to compare with")
    args = parser.parse_args()
    rows = run(args.moves)
    if args.write is not None:
        args.write.write_text(json.dumps(rows, indent=1) + "\n")
    if args.compare is not None and not compare(rows, json.loads(args.compare.read_text())):
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
