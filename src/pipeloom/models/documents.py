"""Several documents in one row: attention masks from position numbers that restart with each document."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Mean tokens per document in a batch from which attention runs document by document on a CPU: one call per document then costs
# less than the masked scores of tokens of different documents. Shorter documents share a call and a mask.
OWN_CALL_TOKENS = 64


def document_numbers(position_ids: Tensor) -> Tensor:
    """Return the number of each token's document in its row, from 0: [batch, length] int64.

    A document begins wherever a position is not the one before it plus 1, as `transformers` reads packed rows.

    Args:
        position_ids: [batch, length], each token's position in its document.
    """
    begins = torch.ones_like(position_ids, dtype=torch.bool)
    begins[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
    return begins.cumsum(1) - 1


def visible(position_ids: Tensor, start: int = 0, end: int | None = None) -> Tensor:
    """Return whether a query may attend to a key: one of its own document, and not after it: bool [batch, 1, queries, keys].

    Args:
        start, end: range of the queries' positions; the keys are those before `end`. Default: all.
    """
    documents = document_numbers(position_ids)
    end = documents.shape[1] if end is None else end
    same = documents[:, start:end, None] == documents[:, None, :end]
    return same.tril_(start)[:, None]


def attend(query: Tensor, key: Tensor, value: Tensor, position_ids: Tensor) -> Tensor:
    """Return causal attention inside each document: [batch, heads, length, width], with as many key heads or fewer.

    On a GPU it is always one call with a mask, since reading the documents' lengths would wait for the device.
    """
    grouped = key.shape[1] < query.shape[1]
    if query.device.type == "cpu":
        sizes = [torch.bincount(row).tolist() for row in document_numbers(position_ids)]
        if OWN_CALL_TOKENS * sum(map(len, sizes)) <= position_ids.numel():
            rows = zip(sizes, *(torch.split(each, 1) for each in (query, key, value)), strict=True)
            return torch.cat([_one_by_one(lengths, q, k, v, grouped) for lengths, q, k, v in rows])
    mask = visible(position_ids)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=grouped)


def _one_by_one(sizes: list[int], query: Tensor, key: Tensor, value: Tensor, grouped: bool) -> Tensor:
    documents = zip(*(torch.split(tensor, sizes, 2) for tensor in (query, key, value)), strict=True)
    attended = [F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped) for q, k, v in documents]
    return torch.cat(attended, 2)
