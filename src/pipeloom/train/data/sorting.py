"""Documents sorted by length, and cut into batches that are padded to their longest."""

from __future__ import annotations

from typing import Literal

import numpy as np

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
            up, beyond the documents left, `drop` leaves out fewer than `rows` documents, `keep` makes a smaller batch.
    """
    batches: list[tuple[int, int]] = []
    at = 0
    while at < len(sizes):
        left = len(sizes) - at
        count = rows * (length // int(sizes[at]))
        if count > left:
            count = {"pad": -(-left // rows) * rows, "drop": left // rows * rows, "keep": left}[remainder]
            if not count:
                break
        batches.append((at, count))
        at += count
    return batches
