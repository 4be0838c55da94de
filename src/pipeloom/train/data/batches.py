"""Batches: which tokens a step trains on, a pure function of the seed and the step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from pipeloom.config import Config
from pipeloom.errors import ConfigError
from pipeloom.ops.random_state import stable_seed
from pipeloom.runtime.batch import IGNORE_INDEX
from pipeloom.train.data.corpus import require_length
from pipeloom.train.data.packing import Spans, runs
from pipeloom.train.data.sampler import Sampler

_GOLDEN = 0.6180339887498949  # multiples of it, without their whole parts, are spread evenly however many there are


class Batch(NamedTuple):
    """Tokens, and for each the one that follows, or -100 where it does not count: int64 [rows, seq_len].

    `positions`: of each token in its document, where rows hold documents that must not see each other.
    """

    tokens: Tensor
    targets: Tensor
    positions: Tensor | None = None

    def part(self, number: int, of: int) -> Batch:
        """The rows of data-parallel replica `number` of `of`: as many for each, in order; `of` divides the rows."""
        rows = len(self.tokens) // of
        return self.rows(slice(number * rows, (number + 1) * rows))

    def rows(self, which: Any) -> Batch:
        """Return the batch of the rows `which`, an index or a slice."""
        return Batch(*(None if part is None else part[which] for part in self))  # type: ignore[arg-type]

    def to(self, device: torch.device) -> Batch:
        return Batch(*(None if part is None else part.to(device) for part in self))  # type: ignore[arg-type]

    @property
    def keywords(self) -> dict[str, Tensor]:
        """Return what a pipeline's methods get beside tokens and targets."""
        return {} if self.positions is None else {"position_ids": self.positions}


class Rows(Protocol):
    """Rows of which batches are made. `count`: the rows that do not overlap."""

    @property
    def count(self) -> int: ...

    def take(self, numbers: Tensor) -> Batch:
        """Rows by their numbers."""

    def anywhere(self, rows: int, seed: int, step: int) -> Batch:
        """`rows` random rows, drawn from (seed, step) alone."""


class TextRows:
    """Windows of one text, which is in memory: [length], of any integer type."""

    def __init__(self, text: Tensor, seq_len: int) -> None:
        self._text, self._length = text, seq_len

    @property
    def count(self) -> int:
        return (len(self._text) - 1) // self._length

    def take(self, numbers: Tensor) -> Batch:
        return _windows(self._text, numbers * self._length, self._length)

    def anywhere(self, rows: int, seed: int, step: int) -> Batch:
        return sample(self._text, seed, step, rows, self._length)


class SpanRows:
    """Windows of the documents of a store, one behind the other, wherever they lie."""

    def __init__(self, tokens: np.ndarray, spans: Spans, seq_len: int) -> None:
        self.stored, self._spans, self._length = tokens, runs(spans), seq_len
        sizes = self._spans.ends - self._spans.starts
        self._before = np.concatenate([[0], np.cumsum(sizes)])

    @property
    def tokens(self) -> int:
        """Return how many there are."""
        return int(self._before[-1])

    @property
    def count(self) -> int:
        return max(0, self.tokens - 1) // self._length

    def take(self, numbers: Tensor) -> Batch:
        return self._at(numbers * self._length)

    def anywhere(self, rows: int, seed: int, step: int) -> Batch:
        return self._at(_starts(self.tokens, seed, step, rows, self._length))

    def _at(self, starts: Tensor) -> Batch:
        whole = torch.from_numpy(np.stack([self._window(int(start)) for start in starts]).astype(np.int64))
        return Batch(whole[:, :-1].contiguous(), whole[:, 1:].contiguous())

    def _window(self, start: int) -> np.ndarray:
        """The tokens from `start` on, counted over the spans alone: seq_len + 1 of them."""
        at = int(np.searchsorted(self._before, start, side="right")) - 1
        parts, left = [], self._length + 1
        while left:
            first = int(self._spans.starts[at]) + max(0, start - int(self._before[at]))
            part = self.stored[first : min(int(self._spans.ends[at]), first + left)]
            parts.append(part)
            left -= len(part)
            at += 1
        return np.concatenate(parts)


class PackedRows:
    """Rows of several documents each, which do not see each other.

    Args:
        tokens: of the store.
        counts: which of them are targets; None: all.
        pieces: [pieces, 2] first token and places of each, row after row.
        starts: where each row starts in `pieces`: [rows + 1].
    """

    def __init__(
        self, tokens: np.ndarray, counts: np.ndarray | None, pieces: np.ndarray, starts: np.ndarray, seq_len: int
    ) -> None:
        self._tokens, self._counts, self._pieces, self._starts = tokens, counts, pieces, starts
        self._length = seq_len

    @property
    def count(self) -> int:
        return len(self._starts) - 1

    @property
    def fill(self) -> float:
        """The share of the places that hold a token of a document."""
        return float(self._pieces[:, 1].sum()) / max(1, self.count * self._length)

    def take(self, numbers: Tensor) -> Batch:
        rows = [self._row(int(number)) for number in numbers]
        return Batch(*(torch.from_numpy(np.stack(part)) for part in zip(*rows, strict=True)))

    def anywhere(self, rows: int, seed: int, step: int) -> Batch:
        generator = torch.Generator().manual_seed(stable_seed("batch", seed, step))
        return self.take(torch.randint(0, self.count, (rows,), generator=generator))

    def _row(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        tokens = np.zeros(self._length, dtype=np.int64)
        targets = np.full(self._length, IGNORE_INDEX, dtype=np.int64)
        positions = np.empty(self._length, dtype=np.int64)
        at = 0
        for first, size in self._pieces[self._starts[number] : self._starts[number + 1]].tolist():
            tokens[at : at + size] = self._tokens[first : first + size]
            following = self._tokens[first + 1 : first + 1 + size].astype(np.int64)
            if self._counts is not None:
                following[~self._counts[first + 1 : first + 1 + size]] = IGNORE_INDEX
            targets[at : at + size] = following
            positions[at : at + size] = np.arange(size)
            at += size
        positions[at:] = np.arange(self._length - at)  # what is left is a document of its own, without targets
        return tokens, targets, positions


class Mixture:
    """Several sources, of which each gives its share of the rows, spread evenly; each goes through its own epochs."""

    def __init__(self, sources: Sequence[Rows], weights: Sequence[float]) -> None:
        self.sources, self._edges = tuple(sources), np.cumsum(weights)[:-1] / sum(weights)
        self._known = 0, np.zeros(len(self.sources), dtype=np.int64)

    def chosen(self, first: int, rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """For rows first, first + 1, … of a run: (their sources, how many rows each source gave before `first`)."""
        at, before = self._known
        if at > first:
            at, before = 0, np.zeros_like(before)
        while at < first:  # after resuming: a second for a hundred million rows
            end = min(first, at + 2**20)
            before = before + np.bincount(self._sources(at, end, seed), minlength=len(self.sources))
            at = end
        self._known = first, before
        return self._sources(first, first + rows, seed), before

    def _sources(self, first: int, end: int, seed: int) -> np.ndarray:
        phase = stable_seed("mixture", seed) % 2**32 / 2**32
        places = np.modf(np.arange(first, end) * _GOLDEN + phase)[0]
        return np.asarray(np.searchsorted(self._edges, places, side="right"))


class Batches:
    """The batches of a run over all replicas; each a function of the configuration, the data and the step alone."""

    def __init__(self, text: Tensor | Rows | Mixture, config: Config, replicas: int) -> None:
        """Raises ConfigError for data that is too short."""
        train, data = config.train, config.data
        if isinstance(text, Tensor):
            require_length(len(text), train.seq_len, "training text")
            text = TextRows(text, train.seq_len)
        self._rows, self._train = text, train
        order = data.sampling
        if order == "auto":
            order = "shuffle-then-split" if isinstance(text, PackedRows | Mixture) else "anywhere"
        self._samplers: list[Sampler] = []
        if isinstance(text, Mixture):
            if order == "split-then-shuffle":
                raise ConfigError(
                    f'data.sampling = "{order}": it is for one source, and there are {len(text.sources)}; '
                    'nearest: "shuffle-then-split"'
                )
            if order != "anywhere":
                self._samplers = [
                    Sampler(source.count, 1, 1, train.seed + at, order, "drop")
                    for at, source in enumerate(text.sources)
                ]
        elif order != "anywhere":
            self._samplers = [Sampler(text.count, train.global_batch_size, replicas, train.seed, order, data.remainder)]

    def of_step(self, step: int) -> Batch:
        """Windows that start anywhere, or those that do not overlap in the sampler's order; steps are counted from 0."""
        train = self._train
        if isinstance(self._rows, Mixture):
            return self._mixed(self._rows, step)
        if not self._samplers:
            return self._rows.anywhere(train.global_batch_size, train.seed, step)
        return self._rows.take(self._samplers[0].batch(step))

    def _mixed(self, mixture: Mixture, step: int) -> Batch:
        rows, seed = self._train.global_batch_size, self._train.seed
        which, before = mixture.chosen(step * rows, rows, seed)
        parts, places = [], []
        for number, source in enumerate(mixture.sources):
            mine = np.flatnonzero(which == number)
            if not len(mine):
                continue
            places.append(mine)
            if not self._samplers:
                parts.append(source.anywhere(len(mine), seed + number, step))
                continue
            items = range(int(before[number]), int(before[number]) + len(mine))
            parts.append(source.take(torch.cat([self._samplers[number].batch(item) for item in items])))
        order = torch.from_numpy(np.argsort(np.concatenate(places)))
        columns = zip(*parts, strict=True)
        whole = [None if column[0] is None else torch.cat(column) for column in columns]
        return Batch(*whole).rows(order)  # type: ignore[arg-type]


def sample(text: Tensor, seed: int, step: int, rows: int, seq_len: int) -> Batch:
    """`rows` windows of `text` (one dimension) that start anywhere, drawn from (seed, step) alone.

    Raises ConfigError when the text is shorter than a window and the token after it.
    """
    require_length(len(text), seq_len, "training text")
    return _windows(text, _starts(len(text), seed, step, rows, seq_len), seq_len)


def _starts(tokens: int, seed: int, step: int, rows: int, seq_len: int) -> Tensor:
    generator = torch.Generator().manual_seed(stable_seed("batch", seed, step))
    return torch.randint(0, tokens - seq_len, (rows,), generator=generator)


def spread(text: Tensor | Rows, rows: int, seq_len: int, most: int) -> list[Batch]:
    """Up to `most` batches of `rows` windows spread evenly over `text` that do not overlap; at least one window.

    The last batch may have fewer rows.
    """
    if isinstance(text, Tensor):
        require_length(len(text), seq_len, "held-out text")
        text = TextRows(text, seq_len)
    room = text.count
    count = min(rows * most, room)
    numbers = torch.tensor([at * room // count for at in range(count)])
    return [text.take(part) for part in torch.split(numbers, rows)]


def _windows(text: Tensor, starts: Tensor, seq_len: int) -> Batch:
    at = starts[:, None] + torch.arange(seq_len + 1)
    whole = text[at].to(torch.int64)
    return Batch(whole[:, :-1].contiguous(), whole[:, 1:].contiguous())
