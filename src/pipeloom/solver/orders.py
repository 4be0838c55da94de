"""In which order micro-batches of different lengths go through the pipeline: first in, first out at every stage, once chosen."""

from __future__ import annotations

from collections.abc import Sequence


def orders_of(factors: Sequence[float]) -> list[tuple[int, ...]]:
    """Orders (position -> micro-batch) worth a search: as given (empty), short first, long first, short at both ends.

    Only the first where all factors are equal. Short micro-batches at the ends make the warm-up and the cool-down short.
    """
    numbers = range(len(factors))
    rising = sorted(numbers, key=factors.__getitem__)
    ends = [*rising[::2], *reversed(rising[1::2])]
    found: dict[tuple[float, ...], tuple[int, ...]] = {tuple(factors): ()}
    for order in (ends, rising, rising[::-1]):
        found.setdefault(tuple(factors[at] for at in order), tuple(order))
    return list(found.values())
