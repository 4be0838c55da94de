"""Documents packed into rows of one length: first-fit decreasing in a window (Johnson 1973), so that few places stay empty."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# Pieces that are packed with each other. More fill rows better: lengths evenly from 16 to 512 in rows of 512 leave 4.2 % of
# the places empty with 256, 0.8 % with 4,096 (benchmarks/data.py).
WINDOW = 4_096


class Spans(NamedTuple):
    """Runs of tokens of a store: [count] each."""

    starts: np.ndarray
    ends: np.ndarray

    @property
    def tokens(self) -> int:
        """Return how many tokens they hold."""
        return int((self.ends - self.starts).sum())


def split(starts: np.ndarray, every: int) -> tuple[Spans, Spans]:
    """Documents to train on, and those held out: one in `every`; of fewer documents, that part of the tokens at their end.

    Args:
        starts: of each document, and the end of the last.
    """
    count = len(starts) - 1
    if count >= every:
        held = np.arange(count) % every == every // 2
        begins, ends = starts[:-1], starts[1:]
        return Spans(begins[~held], ends[~held]), Spans(begins[held], ends[held])
    total = int(starts[-1])
    cut = total - total // every
    inner = np.union1d(starts, [cut]).astype(np.int64)
    inner = inner[np.append(True, np.diff(inner) > 0)]
    begins, ends = inner[:-1], inner[1:]
    return Spans(begins[ends <= cut], ends[ends <= cut]), Spans(begins[begins >= cut], ends[begins >= cut])


def runs(spans: Spans) -> Spans:
    """The same tokens in as few spans as possible."""
    if not len(spans.starts):
        return spans
    begins = np.append(True, spans.starts[1:] != spans.ends[:-1])
    return Spans(spans.starts[begins], spans.ends[np.append(begins[1:], True)])


def pieces_of(spans: Spans, length: int, counts: np.ndarray | None = None) -> np.ndarray:
    """Documents as pieces that fit a row: [pieces, 2] of first token and length; a document of n tokens has n - 1 places.

    The place of a token is where the token after it is predicted, so a long document's pieces meet in one token: each of its
    tokens but the first is a target once. Pieces without any target (`counts`) are left out.
    """
    places = np.maximum(spans.ends - spans.starts - 1, 0)
    number = -(-places // length)
    first = np.repeat(spans.starts, number)
    inner = np.arange(len(first)) - np.repeat(np.cumsum(number) - number, number)
    begins = first + inner * length
    sizes = np.minimum(length, np.repeat(spans.starts + places, number) - begins)
    found = np.stack([begins, sizes], axis=1).astype(np.int64)
    if counts is not None and len(found):
        known = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        found = found[known[found[:, 0] + found[:, 1] + 1] > known[found[:, 0] + 1]]
    return found


def packed(pieces: np.ndarray, length: int, window: int = WINDOW) -> tuple[np.ndarray, np.ndarray]:
    """Pieces in rows of `length` places: (the pieces [pieces, 2], row after row; where each row starts [rows + 1])."""
    order: list[np.ndarray] = []
    sizes: list[int] = []
    for start in range(0, len(pieces), window):
        for row in first_fit_decreasing(pieces[start : start + window, 1].tolist(), length):
            order.append(np.array(row) + start)
            sizes.append(len(row))
    if not order:
        return pieces, np.zeros(1, dtype=np.int64)
    return pieces[np.concatenate(order)], np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def first_fit_decreasing(sizes: Sequence[int], room: int) -> list[list[int]]:
    """Bins of numbers of items: each item, the largest first, goes to the first bin with room; each is at most `room`.

    A tree holds the largest room in each half of the bins, so that finding the first takes log2(items) steps.
    """
    count = len(sizes)
    leaves = 1 << max(0, count - 1).bit_length()
    tree = [room] * (2 * leaves)
    bins: list[list[int]] = []
    for item in sorted(range(count), key=lambda at: -sizes[at]):
        size, node = sizes[item], 1
        while node < leaves:
            node *= 2
            node += tree[node] < size
        where = node - leaves
        if where == len(bins):
            bins.append([])
        bins[where].append(item)
        tree[node] -= size
        while node > 1:
            node //= 2
            left, right = tree[2 * node], tree[2 * node + 1]
            tree[node] = left if left > right else right
    return bins
