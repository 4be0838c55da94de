"""What each method of the search adds: `python benchmarks/search_methods.py [METHOD …]`.

Random searches of at most 260 nodes with 400 moves, whose results depend on the moves alone, are repeated without each method:
the table counts the searches that end longer and shorter without it, and the geometric mean of the ratios of their values. A
method without which fewer than 2 % end longer is one that nobody needs.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from random import Random
from typing import Any
from unittest.mock import patch

import pipeloom as pl
from pipeloom.schedule import Costs
from pipeloom.solver import driver, period_search

MOST_NODES, MOVES = 260, 400
TIMES = ((1, 1, 1), (10, 12, 8), (2, 3, 1), (8, 8, 6))  # F, I, W
Case = tuple[int, int, Costs, float | None, dict[str, Any]]


def nothing(*_: Any, **__: Any) -> Iterator[Any]:
    return iter(())


def without(name: str, module: Any, value: Any) -> tuple[str, Callable[[], Any]]:
    """Return a method's name, and what takes it out of the search for as long as it is entered."""
    return name, lambda: patch.object(module, *value)


PLAIN = (
    without("list scheduling", driver, ("list_scheduled", nothing)),
    without("interleaved's rounds", driver, ("interleaved_rounds", nothing)),
    without("one period", driver, ("PeriodSearches", lambda _, *rest: period_search.PeriodSearches((), *rest))),
    without("packed periods", period_search, ("modulo_starts", nothing)),
    without("repeated parts", period_search, ("periodic_part", lambda *_: None)),
    without("wider periods", period_search, ("WIDEST_PERIOD", 1)),
    without("restarts", driver, ("RESTART_TURN", math.inf)),
    without("the best walk's turns", driver, ("BEST_TURNS", 0)),
)
PAIRED = (
    without("list scheduling, pairs", driver, ("list_scheduled", nothing)),
    without("the first pairing rules", driver, ("FIRST_RULES", ())),
    without("the other pairing rules", driver, ("OTHER_RULES", ())),
)


def plain_cases() -> Iterator[Case]:
    random = Random(1)
    for _ in range(60):
        p, chunks = random.choice((2, 3, 4, 6, 8)), random.choice((1, 1, 2, 2, 3))
        m = random.choice((p, p + 1, 2 * p, 3 * p, 4 * p))
        f, i, w = random.choice(TIMES)
        stages, hop = p * chunks, random.choice((0, 0, f / 10))
        forward = tuple(f * random.choice((0.5, 1, 1, 1.5)) for _ in range(stages)) if random.random() < 0.35 else f
        memory = random.choice((None, None, stages, *(math.ceil(share * stages) for share in (0.75, 0.5, 0.4))))
        held = random.choice((1, 0.7))
        sizes = tuple(random.choice((0.5, 1, 2)) for _ in range(m)) if random.random() < 0.15 else ()
        whole = 0.95 * (i + w) if random.random() < 0.25 and forward == f else None
        costs = Costs(forward, i, w, hop, held=held, microbatch=sizes, backward=whole)
        options = {"chunks": chunks, "objective": random.choice(("makespan", "makespan", "span"))}
        yield p, m, costs, memory, options


def paired_cases() -> Iterator[Case]:
    random = Random(2)
    for _ in range(24):
        p, chunks = random.choice((2, 3, 4, 6, 8)), random.choice((1, 2, 2))
        m, share = random.choice((p, 2 * p, 3 * p)), random.choice((0.2, 0.3, 0.5))
        stages = p * chunks
        memory = random.choice((None, None, stages, stages + 2, math.ceil(0.75 * stages)))
        costs = Costs(1, 1, 1 - share, random.choice((0, 0.1)), all_to_all=share, held=random.choice((1, 0.7)))
        yield p, m, costs, memory, {"chunks": chunks, "pairs": True}


def values(cases: list[Case]) -> list[float]:
    found = []
    for ranks, microbatches, costs, memory, options in cases:
        try:
            found.append(pl.search(ranks, microbatches, costs, memory, iterations=MOVES, **options).value)
        except pl.PipeloomError:
            found.append(math.inf)
    return found


def main(names: list[str]) -> None:
    print("| without | searches | longer | shorter | mean ratio |\n| --- | --- | --- | --- | --- |")
    for methods, cases in ((PLAIN, plain_cases()), (PAIRED, paired_cases())):
        chosen = [method for method in methods if not names or method[0] in names]
        small = [each for each in cases if 3 * each[0] * each[1] * each[4]["chunks"] <= MOST_NODES] if chosen else []
        before = values(small)
        for name, taken_out in chosen:
            with taken_out():
                pairs = [(old, new) for old, new in zip(before, values(small), strict=True) if old < math.inf]
            ratios = [new / old for old, new in pairs]
            longer, shorter = sum(each > 1 + 1e-9 for each in ratios), sum(each < 1 - 1e-9 for each in ratios)
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            print(f"| {name} | {len(pairs)} | {longer} | {shorter} | {mean:.4f} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
