"""Batches: which tokens a step trains on, a pure function of the seed and the step."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pipeloom.config import Config
from pipeloom.ops.random_state import stable_seed
from pipeloom.train.corpus import require_length
from pipeloom.train.sampler import Sampler


class Batch(NamedTuple):
    """Tokens, and for each the one that follows: int64 [rows, seq_len]."""

    tokens: Tensor
    targets: Tensor

    def part(self, number: int, of: int) -> Batch:
        """The rows of data-parallel replica `number` of `of`: as many for each, in order; `of` divides the rows."""
        rows = len(self.tokens) // of
        where = slice(number * rows, (number + 1) * rows)
        return Batch(self.tokens[where], self.targets[where])


class Batches:
    """The batches of a run over all replicas; each a function of the configuration, the text and the step alone."""

    def __init__(self, text: Tensor, config: Config, replicas: int) -> None:
        """Raises ConfigError for a text that is too short."""
        train, data = config.train, config.data
        require_length(len(text), train.seq_len, "training text")
        self._text, self._train = text, train
        self._sampler: Sampler | None = None
        if data.sampling != "anywhere":
            windows = (len(text) - 1) // train.seq_len
            self._sampler = Sampler(
                windows, train.global_batch_size, replicas, train.seed, data.sampling, data.remainder
            )

    def of_step(self, step: int) -> Batch:
        """Windows that start anywhere, or those that do not overlap in the sampler's order; steps are counted from 0."""
        train = self._train
        if self._sampler is None:
            return sample(self._text, train.seed, step, train.global_batch_size, train.seq_len)
        return _windows(self._text, self._sampler.batch(step) * train.seq_len, train.seq_len)


def sample(text: Tensor, seed: int, step: int, rows: int, seq_len: int) -> Batch:
    """`rows` windows of `text` (one dimension) that start anywhere, drawn from (seed, step) alone.

    Raises ConfigError when the text is shorter than a window and the token after it.
    """
    require_length(len(text), seq_len, "training text")
    generator = torch.Generator().manual_seed(stable_seed("batch", seed, step))
    starts = torch.randint(0, len(text) - seq_len, (rows,), generator=generator)
    return _windows(text, starts, seq_len)


def spread(text: Tensor, rows: int, seq_len: int, most: int) -> list[Batch]:
    """Up to `most` batches of `rows` windows spread evenly over `text` that do not overlap; at least one window.

    The last batch may have fewer rows.
    """
    require_length(len(text), seq_len, "held-out text")
    room = (len(text) - 1) // seq_len
    count = min(rows * most, room)
    starts = torch.tensor([at * room // count * seq_len for at in range(count)])
    return [_windows(text, part, seq_len) for part in torch.split(starts, rows)]


def _windows(text: Tensor, starts: Tensor, seq_len: int) -> Batch:
    at = starts[:, None] + torch.arange(seq_len + 1)
    whole = text[at].to(torch.int64)
    return Batch(whole[:, :-1].contiguous(), whole[:, 1:].contiguous())
