"""Assignment of layers to stages: contiguous, and as even in cost as whole layers allow."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace
from itertools import accumulate, pairwise


def balance(costs: Sequence[int], stages: int) -> list[int]:
    """The number of layers of each stage: sums to len(costs), each at least 1.

    Of all contiguous cuts, those whose largest stage costs least are preferred; among these, those with the smallest sum of
    squared costs; and among these, the one with larger first stages. For L layers and S stages the time is O(L log S) where
    all layers but the first and the last cost the same, as a model's blocks do, and O(S L^2) otherwise.

    Raises ValueError unless 1 <= stages <= len(costs).
    """
    count = len(costs)
    if not 1 <= stages <= count:
        raise ValueError(f"{count} layers do not make {stages} stages")
    before = [0, *accumulate(costs)]
    if stages > 1 and len(set(costs[1:-1])) <= 1:
        return _of_equal_blocks(costs, stages)
    limit = _smallest_largest(before, stages)
    never = sum(costs) ** 2 + 1
    # least[k][i]: the least sum of squares of the layers from i on, in k stages, none above the limit
    least = [[never] * (count + 1) for _ in range(stages + 1)]
    cut = [[0] * (count + 1) for _ in range(stages + 1)]
    least[0][count] = 0
    for k in range(1, stages + 1):
        for i in range(count - k + 1):
            for j in range(i + 1, count - k + 2):
                cost = before[j] - before[i]
                if cost > limit:
                    break
                total = cost * cost + least[k - 1][j]
                if total <= least[k][i] and least[k - 1][j] < never:
                    least[k][i], cut[k][i] = total, j
    sizes, start = [], 0
    for k in range(stages, 0, -1):
        sizes.append(cut[k][start] - start)
        start = cut[k][start]
    return sizes


def _of_equal_blocks(costs: Sequence[int], stages: int) -> list[int]:
    """Return the result of `balance` where all layers between the first and the last cost the same.

    Each of them is assigned to the cheapest stage so far, the first of several. The costs of all other cuts majorize the
    resulting ones, so every convex measure of them is smallest.
    """
    sizes = [1] * stages
    block = costs[1] if len(costs) > 2 else 0
    loads = [(block if 0 < at < stages - 1 else costs[-1 if at else 0], at) for at in range(stages)]
    heapify(loads)
    for _ in range(len(costs) - stages):
        load, at = loads[0]
        sizes[at] += 1
        heapreplace(loads, (load + block, at))
    return sizes


def _smallest_largest(before: Sequence[int], stages: int) -> int:
    """Return the least possible cost of the largest stage; `before[i]` is the cost of the first i layers."""
    count = len(before) - 1
    low, high = max(b - a for a, b in pairwise(before)), before[-1]
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _fits(before, stages, middle, count) else (middle + 1, high)
    return low


def _fits(before: Sequence[int], stages: int, limit: int, count: int) -> bool:
    used, start = 1, 0
    for end in range(1, count + 1):
        if before[end] - before[start] > limit:
            used, start = used + 1, end - 1
    return used <= stages
