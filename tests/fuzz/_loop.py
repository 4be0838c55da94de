"""What the parts have in common: cases one after another until enough fail or the time is over, and shrinking."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

Case = TypeVar("Case")
MOST_FAILURES = 10


def smallest(
    case: Case, fails: Callable[[Case], bool], simpler: Callable[[Case], Iterable[Case]], seconds: float = 60.0
) -> Case:
    """Take the first simpler case that still fails, again and again, until none does or the time is over."""
    deadline, tried, progress = time.monotonic() + seconds, {case}, True
    while progress:
        progress = False
        for candidate in simpler(case):
            if time.monotonic() > deadline:
                return case
            if candidate not in tried:
                tried.add(candidate)
                if fails(candidate):
                    case, progress = candidate, True
                    break
    return case


def run_cases(
    part: str,
    default: int,
    amount: tuple[int, int | None, float | None],
    run: Callable[[int], str | None],
    said: Callable[[], str] = str,
) -> int:
    """Run the cases of a part; return the number of failures.

    Args:
        default: how many cases there are without a limit.
        amount: seed, number of cases, deadline (see `tests.fuzz.__main__`).
        run: number of a case -> what to print of its failure; None: it passes.
        said: for the last line, what else there is to say.
    """
    seed, cases, deadline = amount
    if cases is None:
        cases = default if deadline is None else sys.maxsize
    begun, failures, count = time.monotonic(), 0, 0
    for count in range(1, cases + 1):
        failure = run(1_000_000 * seed + count)
        if failure is not None:
            failures += 1
            print(f"{part}: case {count} of seed {seed}: {failure}", flush=True)
        if failures == MOST_FAILURES or (deadline is not None and time.monotonic() > deadline):
            break
    seconds = time.monotonic() - begun
    print(f"{part}: {count} cases from seed {seed}, {failures} failed{said()}, {seconds:.1f} s", flush=True)
    return failures
