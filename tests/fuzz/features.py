"""Random sets of features on one schedule, as in the table of pairs of docs/memory.md, against one process.

A case is some of `pairs.FEATURES`, a number of micro-batches, and a seed of which micro-batches of which stages are recomputed
or copied, such as `R+O, L+tp:6:17`. Its schedule is checked and simulated, and its step on up to 4 processes compared.
"""

from __future__ import annotations

from random import Random

from fuzz._loop import run_cases
from pairs import FEATURES, TOLERANCE, Combination, errors
from pipeloom.errors import UsageError
from processes import run_ranks

CASES = 100


def main(seed: int, cases: int | None, deadline: float | None) -> int:
    return run_cases("features", CASES, (seed, cases, deadline), lambda number: failure(drawn(number)))


def replay(text: str) -> int:
    features, microbatches, seed = text.split(":")
    problem = failure(Combination(tuple(features.split("+")), int(microbatches), int(seed)))
    print(problem or "equal")
    return int(problem is not None)


def drawn(number: int) -> Combination:
    random = Random(number)
    features = tuple(random.sample(FEATURES, random.randint(1, 6)))
    return Combination(features, 2 * random.randint(2, 4), random.randrange(1, 1000))


def failure(combination: Combination) -> str | None:
    """Return what is wrong; None: it is equal, or its schedule does not exist on so few ranks."""
    text = f"{'+'.join(combination.features)}:{combination.microbatches}:{combination.seed}"
    try:
        combination.schedule()
    except UsageError:
        return None  # dualpipe on one rank
    try:
        (error,) = run_ranks(errors, combination.processes, [combination])[0]
    except AssertionError as problem:
        error = str(problem)
    return None if isinstance(error, float) and error <= TOLERANCE else f"{error}\n  --case {text!r}"
