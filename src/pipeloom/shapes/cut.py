"""The layers of a model as stages hold them: a balanced cut, and the stages string.

`"Et*3|(tt|)*29|mL"` says which layers each stage holds: E is the embedding, t a block, m one that predicts tokens further ahead,
L the final norm and output layer; `|` separates stages; `x*3` repeats a letter and `(…)*n` a group, including its `|`.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from heapq import heapify, heapreplace
from itertools import accumulate, pairwise

from pipeloom.errors import UsageError
from pipeloom.limits import MOST_LAYERS
from pipeloom.schedule.model import Schedule

_REPEATED_LETTER = re.compile(r"([EtL|])\*(\d{1,9})")
_REPEATED_GROUP = re.compile(r"\(([EtL|]*)\)(?:\*(\d{1,9}))?")
_MARKS = 1_000  # most repetitions in a text, so that nested ones are soon expanded
_MOST_LETTERS = 2 * MOST_LAYERS  # letters of the text written out: layers, and as many ends of stages


def even_sizes(total: int, parts: int) -> tuple[int, ...]:
    """Return `total` in `parts` as even as possible, larger ones first: part i gets total // parts, and one more if
    i < total % parts."""
    base, larger = divmod(total, parts)
    return (base + 1,) * larger + (base,) * (parts - larger)


def spans(schedule: Schedule, stage_layers: Sequence[int]) -> list[tuple[int, int]]:
    """Return stage -> (index of its first layer, index after its last layer).

    A share of the vocabulary is one layer behind all others, which lists of the layers of stages do not have.
    """
    count = sum(stage_layers)
    ends = [*pairwise([0, *accumulate(stage_layers)]), *[(count, count + 1)] * len(schedule.vocabulary)]
    return [ends[position] for position in schedule.position_of]


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
    # furthest[k]: the most layers that the first k stages hold; those from nearest[k] on fit into the last k
    furthest = _ends(before, stages, limit)
    nearest = [count - end for end in _ends([before[-1] - each for each in reversed(before)], stages, limit)]
    # least[k][i]: the least sum of squares of the layers from i on, in k stages, none above the limit
    least = [[never] * (count + 1) for _ in range(stages + 1)]
    cut = [[0] * (count + 1) for _ in range(stages + 1)]
    least[0][count] = 0
    for k in range(1, stages + 1):
        for i in range(max(nearest[k], stages - k), min(furthest[stages - k], count - k) + 1):
            for j in range(max(i + 1, nearest[k - 1]), count - k + 2):
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
    largest = max(b - a for a, b in pairwise(before))
    low = max(largest, -(-before[-1] // stages))
    high = low + largest  # a stage that is filled up to its limit lacks less than one layer
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _ends(before, stages, middle)[-1] == len(before) - 1 else (middle + 1, high)
    return low


def _ends(before: Sequence[int], stages: int, limit: int) -> list[int]:
    """Return number of stages, from 0 on -> the most layers that so many first stages hold, none of them above the limit."""
    ends = [0]
    for _ in range(stages):
        ends.append(bisect_right(before, before[ends[-1]] + limit) - 1)
    return ends


def parse_stages(text: str, blocks: int, stages: int, depths: int = 0) -> list[int]:
    """The number of layers of each stage in `text`, for a model of `blocks` blocks cut into `stages` stages.

    `depths` of blocks that predict tokens further ahead follow the others.

    A `|` at the end closes the last stage; `||` asks for a stage without layers. Raises UsageError for other
    characters, wrong counts, and layers out of order.
    """
    letters = expand(text)
    parts = letters.removesuffix("|").split("|")
    counts = {letter: letters.count(letter) for letter in "EtmL"}
    if counts["m"] != depths:
        raise UsageError(
            f"it holds {counts['m']} blocks for multi-token prediction (m), but num_nextn_predict_layers is {depths}"
        )
    if counts["t"] != blocks:
        raise UsageError(f"it holds {counts['t']} blocks (t), but num_hidden_layers is {blocks}")
    for letter, what in (("E", "embedding"), ("L", "output layer")):
        if counts[letter] != 1:
            raise UsageError(f"it must hold the {what} ({letter}) once; it holds it {counts[letter]} times")
    order = letters.replace("|", "")
    if order != "E" + "t" * blocks + "m" * depths + "L":
        raise UsageError("its layers must be E, then every t, then every m, then L")
    if len(parts) != stages:
        empty = f" ({parts.count('')} of them empty: `||`)" if "" in parts else ""
        raise UsageError(f"it makes {len(parts)} stages{empty}, but the schedule has {stages} (ranks times chunks)")
    if not parts[0] or not parts[-1]:
        raise UsageError("its first stage must hold E and its last one L")
    return [len(part) for part in parts]


def expand(text: str) -> str:
    """`text` with its repetitions written out, without spaces, commas and backslashes.

    Raises UsageError for other characters, an incomplete repetition, and a text that is too long.
    """
    plain = re.sub(r"[\s,\\]", "", text)
    wrong = re.search(r"[^EtmL|()*\d]", plain)
    if wrong:
        raise UsageError(f"{wrong[0]!r:.200} is not a layer code; stages are written with E, t, m, L, |, *n and (…)*n")
    if plain.count("*") + plain.count("(") > _MARKS or len(plain) > _MOST_LETTERS:
        raise UsageError(f"it holds more than {_MARKS:,} repetitions, or {_MOST_LETTERS:,} letters")
    while True:
        plain, letters = _REPEATED_LETTER.subn(lambda match: _repeat(match[1], match[2]), plain)
        plain, groups = _REPEATED_GROUP.subn(lambda match: _repeat(match[1], match[2]), plain)
        if len(plain) > _MOST_LETTERS:
            raise UsageError(f"it stands for more than {_MOST_LETTERS:,} letters")
        if not letters and not groups:
            break
    wrong = re.search(r"[^EtmL|]", plain)
    if wrong:
        raise UsageError(f"{wrong[0]!r:.200} has no partner; repetitions are written t*3 and (tt|)*3")
    return plain


def _repeat(what: str, times: str | None) -> str:
    count = int(times) if times is not None else 1
    if len(what) * count > _MOST_LETTERS:
        raise UsageError(f"({what:.200})*{count} is longer than {_MOST_LETTERS:,} letters")
    return what * count
