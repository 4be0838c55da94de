"""Documents arranged in rows of equal length, or sorted by length and cut into batches."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

# Number of pieces that are packed together. More fill the rows better: with lengths spread evenly from 16 to 512 and rows of 512,
# 256 leave 4.2 % of the places empty, and 4,096 leave 0.8 % (benchmarks/data.py).
WINDOW = 4_096


class Spans(NamedTuple):
    """Runs of tokens of a store: where each starts and ends (exclusive), [count] each."""

    starts: np.ndarray
    ends: np.ndarray

    @property
    def tokens(self) -> int:
        """Return the number of tokens in all of them."""
        return int((self.ends - self.starts).sum())


def split(starts: np.ndarray, every: int) -> tuple[Spans, Spans]:
    """Split documents into those to train on and those held out: one in `every`.

    With fewer documents than that, the last 1/`every` of the tokens are held out.

    Args:
        starts: start of each document, and the end of the last: [documents + 1].
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
    """Join adjacent spans: return the same tokens in as few spans as possible."""
    if not len(spans.starts):
        return spans
    begins = np.append(True, spans.starts[1:] != spans.ends[:-1])
    return Spans(spans.starts[begins], spans.ends[np.append(begins[1:], True)])


def pieces_of(spans: Spans, length: int, counts: np.ndarray | None = None) -> np.ndarray:
    """Cut documents into pieces that fit a row. Return [pieces, 2]: first token and number of places of each.

    At a token's place the token after it is predicted, so a document of n tokens has n - 1 places. The last target of a piece is
    the first token of the next: each token of a document but the first is a target once. Pieces without any target (`counts`)
    are left out.
    """
    places = np.maximum(spans.ends - spans.starts - 1, 0)
    number = -(-places // length)
    first = np.repeat(spans.starts, number)
    inner = np.arange(len(first)) - np.repeat(np.cumsum(number) - number, number)
    begins = first + inner * length
    sizes = np.minimum(length, np.repeat(spans.starts + places, number) - begins)
    pieces = np.stack([begins, sizes], axis=1).astype(np.int64)
    if counts is not None and len(pieces):
        known = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        pieces = pieces[known[pieces[:, 0] + pieces[:, 1] + 1] > known[pieces[:, 0] + 1]]
    return pieces


def packed(pieces: np.ndarray, length: int, window: int = WINDOW) -> tuple[np.ndarray, np.ndarray]:
    """Pack pieces into rows of `length` places. Return (pieces [pieces, 2], row by row; where each row starts [rows + 1])."""
    order: list[np.ndarray] = []
    sizes: list[int] = []
    for start in range(0, len(pieces), window):
        for row in best_fit_decreasing(pieces[start : start + window, 1].tolist(), length):
            order.append(np.array(row) + start)
            sizes.append(len(row))
    if not order:
        return pieces, np.zeros(1, dtype=np.int64)
    return pieces[np.concatenate(order)], np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def best_fit_decreasing(sizes: Sequence[int], room: int) -> list[list[int]]:
    """Put each item, the largest first, into the fullest bin with room for it. Return the item numbers of each bin.

    No size may exceed `room`.
    """
    bins: list[list[int]] = []
    left: list[tuple[int, int]] = []  # (room in a bin, its number), in ascending order
    for item in sorted(range(len(sizes)), key=lambda at: -sizes[at]):
        fullest = bisect_left(left, (sizes[item],))
        if fullest == len(left):
            left.append((room, len(bins)))
            bins.append([])
        free, number = left.pop(fullest)
        bins[number].append(item)
        insort(left, (free - sizes[item], number))
    return bins


# -- sorted by length --------------------------------------------------------------------------------------------------

# The length of a batch is a multiple of this many tokens, so that documents of the same rounded length can change places from
# epoch to epoch, and few shapes occur. On average half of it stays empty per row: 1.5 % of the places for lengths from 16 to 512.
MULTIPLE = 8


def rounded(sizes: np.ndarray, multiple: int, length: int) -> np.ndarray:
    """Return each size rounded up to a multiple of `multiple`, at most `length`."""
    up: np.ndarray = np.minimum(-(-sizes // multiple) * multiple, length)
    return up


def cut_sorted(
    sizes: np.ndarray, rows: int, length: int, remainder: Literal["pad", "drop", "keep"]
) -> list[tuple[int, int]]:
    """Cut documents that are sorted by length, longest first, into batches. Return (first document, number of rows) of each.

    A batch has a multiple of `rows` documents: as many as fit into `rows * length` places when padded to the longest of them.

    Args:
        sizes: lengths of the documents, in descending order; each is at most `length`.
        rows: number of rows in a batch of the longest documents.
        remainder: treatment of the last documents, where they do not fill a multiple of `rows`: `pad` rounds the number of rows
            up, beyond the documents left, `drop` leaves out fewer than `rows` documents unless they are all, `keep` makes a
            smaller batch.
    """
    batches: list[tuple[int, int]] = []
    at = 0
    while at < len(sizes):
        left = len(sizes) - at
        count = rows * (length // int(sizes[at]))
        if count > left:
            full = left // rows * rows
            count = {"pad": -(-left // rows) * rows, "drop": full or (0 if batches else rows), "keep": left}[remainder]
            if not count:
                break
        batches.append((at, count))
        at += count
    return batches
