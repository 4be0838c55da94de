"""Several documents in one row: which positions see each other, from position numbers that restart with each document."""

from __future__ import annotations

import torch
from torch import Tensor


def document_numbers(position_ids: Tensor) -> Tensor:
    """Which document of its row each token belongs to, from 0: [batch, length] int64.

    A document begins wherever a position is not the one before it plus 1, as `transformers` reads packed rows.

    Args:
        position_ids: [batch, length], each token's position in its document.
    """
    begins = torch.ones_like(position_ids, dtype=torch.bool)
    begins[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
    return begins.cumsum(1) - 1


def visible(position_ids: Tensor, start: int = 0, end: int | None = None) -> Tensor:
    """Whether a query may attend to a key: one of its own document, and not after it: bool [batch, 1, queries, keys].

    Args:
        start, end: the queries, a run of positions; the keys are those before `end`. Default: all.
    """
    documents = document_numbers(position_ids)
    end = documents.shape[1] if end is None else end
    same = documents[:, start:end, None] == documents[:, None, :end]
    return same.tril_(start)[:, None]
