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
from pipeloom.train.data.sampler import Remainder, Sampler
from pipeloom.train.data.sorting import MULTIPLE, cut_sorted, rounded

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
            _write_piece(self._tokens, self._counts, first, size, tokens[at:], targets[at:])
            positions[at : at + size] = np.arange(size)
            at += size
        positions[at:] = np.arange(self._length - at)  # what is left is a document of its own, without targets
        return tokens, targets, positions


class SortedDocuments:
    """Documents in batches of about one length, each padded to its longest at the end, where causal attention does not see it.

    All batches have about as many places, so that those of short documents have more rows. Which documents of one rounded
    length are in which of its batches changes from epoch to epoch; the lengths of the batches do not.

    Args:
        stores: of each source the tokens, which of them are targets (None: all), and the pieces: [pieces, 2] first token
            and places of each.
        rows, length: of a batch of the longest documents.
        multiple: of which a batch's length is one; `length` is.
        remainder: `pad`: the last batch, that of the shortest documents, is filled up with documents that it has already; `drop`:
            up to `rows - 1` of the shortest are left out.

    Attributes:
        fill: the share of the places that hold a token of a document.
    """

    def __init__(
        self,
        stores: Sequence[tuple[np.ndarray, np.ndarray | None, np.ndarray]],
        rows: int,
        length: int,
        seed: int,
        remainder: Remainder = "pad",
        multiple: int = MULTIPLE,
    ) -> None:
        self._stores, self._multiple, self._length, self._rows, self._seed = stores, multiple, length, rows, seed
        self._firsts = np.concatenate([[0], np.cumsum([len(pieces) for _, _, pieces in stores])])
        sizes = np.concatenate([pieces[:, 1] for _, _, pieces in stores])
        self._lengths = rounded(sizes, multiple, length)
        self._sorted = -np.sort(-self._lengths)
        self._batches = cut_sorted(self._sorted, rows, length, remainder)
        places = sum(count * int(self._sorted[first]) for first, count in self._batches)
        taken = sum(count for _, count in self._batches)
        self.fill = float(np.sort(sizes)[::-1][:taken].sum()) / max(1, places)
        self._known: tuple[int, np.ndarray] | None = None

    @property
    def documents(self) -> int:
        """Return how many there are, the pieces of a long one counted one by one."""
        return len(self._lengths)

    @property
    def count(self) -> int:
        """Return how many batches an epoch has."""
        return len(self._batches)

    def batch(self, number: int, epoch: int) -> Batch:
        """Batch `number` of an epoch, the longest documents first."""
        return self._padded(*self._batches[number], self._order(epoch))

    def spread(self, most: int) -> list[Batch]:
        """Up to `most` batches, from the longest documents to the shortest; none is filled up, and none left out."""
        batches = cut_sorted(self._sorted, self._rows, self._length, "keep")
        count = min(most, len(batches))
        return [self._padded(*batches[at * len(batches) // count], self._order(0)) for at in range(count)]

    def _order(self, epoch: int) -> np.ndarray:
        """All documents, the longest first, those of one rounded length in an order that (seed, epoch) decides."""
        if self._known is None or self._known[0] != epoch:
            generator = torch.Generator().manual_seed(stable_seed("sorted", self._seed, epoch))
            shuffled = torch.randperm(self.documents, generator=generator).numpy()
            self._known = epoch, shuffled[np.argsort(-self._lengths[shuffled], kind="stable")]
        return self._known[1]

    def _padded(self, first: int, rows: int, order: np.ndarray) -> Batch:
        chosen = np.resize(order[first : first + rows], rows)  # again from its first where there are too few
        length = int(self._lengths[chosen].max())
        tokens = np.zeros((rows, length), dtype=np.int64)
        targets = np.full((rows, length), IGNORE_INDEX, dtype=np.int64)
        for row, document in enumerate(chosen.tolist()):
            store = int(np.searchsorted(self._firsts, document, side="right")) - 1
            stored, counts, pieces = self._stores[store]
            begin, size = pieces[document - self._firsts[store]].tolist()
            _write_piece(stored, counts, begin, size, tokens[row], targets[row])
        return Batch(torch.from_numpy(tokens), torch.from_numpy(targets))


def _write_piece(
    stored: np.ndarray, counts: np.ndarray | None, first: int, size: int, tokens: np.ndarray, targets: np.ndarray
) -> None:
    """Writes `size` tokens of a document, from its token `first` on, and for each the one that follows, to the arrays' start."""
    tokens[:size] = stored[first : first + size]
    targets[:size] = stored[first + 1 : first + 1 + size]
    if counts is not None:
        targets[:size][~counts[first + 1 : first + 1 + size]] = IGNORE_INDEX


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

    def __init__(self, text: Tensor | Rows | Mixture | SortedDocuments, config: Config, replicas: int) -> None:
        """Raises ConfigError for data that is too short."""
        train, data = config.train, config.data
        if isinstance(text, Tensor):
            require_length(len(text), train.seq_len, "training text")
            text = TextRows(text, train.seq_len)
        self._rows, self._train = text, train
        order = data.sampling
        if order == "auto":
            whole = isinstance(text, PackedRows | Mixture | SortedDocuments)
            order = "shuffle-then-split" if whole else "anywhere"
        self._samplers: list[Sampler] = []
        if isinstance(text, SortedDocuments):
            if not text.count:
                raise ConfigError(
                    f'data.remainder = "drop": {text.documents} documents do not fill one batch of '
                    f"{train.global_batch_size}; set train.global_batch_size to at most {max(1, text.documents)}, or "
                    'data.remainder = "pad"'
                )
            self._samplers = [Sampler(text.count, 1, 1, train.seed, "shuffle-then-split", "drop")]
        elif isinstance(text, Mixture):
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
        """The batch of a step, counted from 0: windows that start anywhere, or rows in the sampler's order."""
        train = self._train
        if isinstance(self._rows, Mixture):
            return self._mixed(self._rows, step)
        if isinstance(self._rows, SortedDocuments):
            return self._rows.batch(int(self._samplers[0].batch(step)), step // self._rows.count)
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
