"""Searches and proofs where a whole backward takes less than I and W, against known optima.

    python benchmarks/whole_backward.py               30 random cells: 3,000 moves, and --prove within 8 seconds
    python benchmarks/whole_backward.py --moves 1000 --seed 2

The optima of `whole_backward.json` are of an enumeration that knows nothing of the search (tests/fuzz/_brute_force.py), or, where
that does not finish, of a proof by CP-SAT.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pipeloom as pl

CELLS = Path(__file__).with_suffix(".json")


def search(cell: dict[str, Any], **options: Any) -> Any:
    costs = pl.Costs(
        forward=tuple(cell["forward"]),
        input_grad=tuple(cell["input_grad"]),
        weight_grad=tuple(cell["weight_grad"]),
        p2p=cell["p2p"],
        backward=tuple(cell["backward"]),
    )
    return pl.search(cell["ranks"], cell["microbatches"], costs, cell["memory"], placement="linear", **options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moves", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each proof; 0: none")
    options = parser.parse_args()
    cells = json.loads(CELLS.read_text("utf-8"))
    gaps, proved = [], 0
    print("  p  m  memory  optimum  searched    gap  proved")
    for cell in cells:
        searched = search(cell, iterations=options.moves, seed=options.seed).value
        gaps.append(searched / cell["optimum"] - 1)
        proof = search(cell, time_limit=options.seconds, prove=True) if options.seconds else None
        if proof is not None and proof.proved:
            assert abs(proof.value - cell["optimum"]) <= 1e-6 * cell["optimum"], (proof.value, cell)
            proved += 1
        print(
            f"{cell['ranks']:>3}{cell['microbatches']:>3}{cell['memory']:>8}{cell['optimum']:>9.1f}{searched:>10.1f}"
            f"{100 * gaps[-1]:>6.2f}%  {'-' if proof is None else 'yes' if proof.proved else 'no'}"
        )
    best = sum(gap < 1e-6 for gap in gaps)
    print(
        f"{best} of {len(cells)} at the optimum, worst {100 * max(gaps):.2f} %; {proved} proved in {options.seconds:g} s each"
    )


if __name__ == "__main__":
    main()
