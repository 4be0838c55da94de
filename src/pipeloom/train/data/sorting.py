"""Documents sorted by length, for batches that are padded to their longest: how many of them each batch has."""

from __future__ import annotations

from typing import Literal

import numpy as np

# Batches are as long as a multiple of this many tokens: documents of one rounded length change places with each other from epoch
# to epoch, and few shapes occur. It leaves half of it empty in each row, 1.5 % of the places for lengths from 16 to 512.
MULTIPLE = 8


def rounded(sizes: np.ndarray, multiple: int, length: int) -> np.ndarray:
    """Return each size rounded up to a multiple of `multiple`, at most `length`."""
    up: np.ndarray = np.minimum(-(-sizes // multiple) * multiple, length)
    return up


def cut_sorted(
    sizes: np.ndarray, rows: int, length: int, remainder: Literal["pad", "drop", "keep"]
) -> list[tuple[int, int]]:
    """Return each batch's first document and number of rows, of documents sorted by length, the longest first.

    A batch has a multiple of `rows` documents: as many as have room in `rows * length` places when padded to its longest.

    Args:
        sizes: of the documents, falling; each is at most `length`.
        rows: of a batch of the longest documents.
        remainder: what becomes of the last documents, where they do not fill a multiple of `rows`: `pad` makes the batch
            larger than what is left, `drop` leaves fewer than `rows` out, `keep` makes a smaller batch.
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
