"""Batches: which tokens a step trains on, a pure function of the seed and the step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pipeloom.config import Config
from pipeloom.errors import ConfigError
from pipeloom.models import ahead
from pipeloom.ops.random_state import stable_seed
from pipeloom.runtime.batch import IGNORE_INDEX
from pipeloom.train.data.packing import MULTIPLE, Spans, cut_sorted, rounded, runs
from pipeloom.train.data.sources import require_length
from pipeloom.train.data.store import Tokens

Order = Literal["shuffle-then-split", "split-then-shuffle"]
Remainder = Literal["pad", "drop"]


class Sampler:
    """Item numbers of each step's batch, and of each replica's part of it. All replicas get the same number of items.

    `shuffle-then-split`: one shuffled order of all items per epoch, of which every step takes the next ones: the batch does
    not depend on the number of replicas, and a replica sees other items in each epoch. `split-then-shuffle`: a replica has
    the same items in all epochs (every `replicas`-th one), and shuffles those: for data that is stored where it is used.

    The last batch of an epoch is filled up with items from the epoch's start (`pad`, and wherever it is the only one), or left
    out (`drop`). The length of an epoch does not depend on the number of replicas.

    Args:
        items: number of items.
        rows: rows of a batch over all replicas; `replicas` must divide it.

    Raises:
        ConfigError: `replicas` does not divide `rows`, there are no items, or `split-then-shuffle` leaves a replica without
            items.
    """

    def __init__(self, items: int, rows: int, replicas: int, seed: int, order: Order, remainder: Remainder) -> None:
        self.items, self.rows, self.replicas = items, rows, replicas
        self._seed, self._order = seed, order
        self._known: tuple[int, list[Tensor]] | None = None
        self.steps_per_epoch = max(1, items // rows) if remainder == "drop" else -(-items // rows)
        if rows % replicas:
            raise ConfigError(f"a batch of {rows} sequences cannot be split evenly over {replicas} replicas")
        if items < 1:
            raise ConfigError("data.source: no text is left to train on")
        if order == "split-then-shuffle" and items < replicas:
            raise ConfigError(
                f'data.sampling = "split-then-shuffle": {items} windows cannot be split over {replicas} replicas; '
                f'use "shuffle-then-split"'
            )

    def batch(self, step: int) -> Tensor:
        """Return the item numbers [rows] of the whole batch of `step`, replica by replica."""
        return torch.cat([self.part(step, replica) for replica in range(self.replicas)])

    def part(self, step: int, replica: int) -> Tensor:
        """Return the item numbers [rows / replicas] of one replica's part; steps are counted from 0 over all epochs."""
        epoch, at = divmod(step, self.steps_per_epoch)
        per_replica = self.rows // self.replicas
        if self._order == "split-then-shuffle":
            return self._orders(epoch)[replica][at * per_replica : (at + 1) * per_replica]
        start = at * self.rows + replica * per_replica
        return self._orders(epoch)[0][start : start + per_replica]

    def _orders(self, epoch: int) -> list[Tensor]:
        """Return the epoch's order of all items, or of each replica's; the last epoch's is cached."""
        if self._known is None or self._known[0] != epoch:
            if self._order == "shuffle-then-split":
                orders = [self._shuffled(torch.arange(self.items), epoch, 0, self.steps_per_epoch * self.rows)]
            else:
                count = self.steps_per_epoch * self.rows // self.replicas
                parts = [torch.arange(replica, self.items, self.replicas) for replica in range(self.replicas)]
                orders = [self._shuffled(part, epoch, replica, count) for replica, part in enumerate(parts)]
            self._known = epoch, orders
        return self._known[1]

    def _shuffled(self, items: Tensor, epoch: int, replica: int, count: int) -> Tensor:
        """Return `count` items in an order that (seed, epoch, replica) decides, repeated from the start where there are fewer."""
        generator = torch.Generator().manual_seed(stable_seed("order", self._seed, epoch, replica))
        shuffled = items[torch.randperm(len(items), generator=generator)]
        return shuffled.repeat(-(-count // len(items)))[:count]


_GOLDEN = 0.6180339887498949  # the fractional parts of its multiples are spread evenly, however many there are


class Batch(NamedTuple):
    """Tokens and targets, int64 [rows, seq_len]: a token's target is the next token, or -100 where it has no loss.

    `positions`: each token's position in its document, where rows hold several documents that must not attend to each other.
    `tokens_ahead`, `targets_ahead`: [rows, seq_len, depth], those further ahead (`with_ahead`).
    """

    tokens: Tensor
    targets: Tensor
    positions: Tensor | None = None
    tokens_ahead: Tensor | None = None
    targets_ahead: Tensor | None = None

    def with_ahead(self, depth: int) -> Batch:
        """Return the batch with what `depth` blocks that predict tokens further ahead need, of whole rows."""
        if not depth:
            return self
        keywords = ahead(self.tokens, self.targets, depth, self.positions)
        return self._replace(tokens_ahead=keywords["mtp_tokens"], targets_ahead=keywords["mtp_targets"])

    def part(self, number: int, of: int) -> Batch:
        """Return the rows of data-parallel replica `number` of `of`: an equal part each, in order; `of` divides the rows."""
        rows = len(self.tokens) // of
        return self.rows(slice(number * rows, (number + 1) * rows))

    def rows(self, which: Any) -> Batch:
        """Return the batch of the rows `which`, an index or a slice."""
        return Batch(*(None if part is None else part[which] for part in self))  # type: ignore[arg-type]

    def to(self, device: torch.device) -> Batch:
        return Batch(*(None if part is None else part.to(device) for part in self))  # type: ignore[arg-type]

    @property
    def arguments(self) -> dict[str, Tensor]:
        """Return the arguments for a pipeline's methods."""
        return {"inputs": self.tokens, "targets": self.targets, **self.keywords}

    @property
    def keywords(self) -> dict[str, Tensor]:
        """Return the keyword arguments for a pipeline's methods besides tokens and targets."""
        keywords = {"position_ids": self.positions, "mtp_tokens": self.tokens_ahead, "mtp_targets": self.targets_ahead}
        return {name: tensor for name, tensor in keywords.items() if tensor is not None}


class SpanRows:
    """Windows of documents, joined end to end wherever they are stored.

    Rows, of windows and of packed documents, have numbers below `count`, the number of rows that do not overlap.
    """

    def __init__(self, tokens: Tokens, spans: Spans, seq_len: int) -> None:
        self.stored, self._spans, self._length = tokens, runs(spans), seq_len
        sizes = self._spans.ends - self._spans.starts
        self._before = np.concatenate([[0], np.cumsum(sizes)])

    @property
    def tokens(self) -> int:
        """Return the number of tokens in all documents."""
        return int(self._before[-1])

    @property
    def count(self) -> int:
        return max(0, self.tokens - 1) // self._length

    def rows_at(self, numbers: Tensor) -> Batch:
        """Return the rows with these numbers."""
        return self._at(numbers * self._length)

    def random_rows(self, rows: int, seed: int, step: int) -> Batch:
        """Return `rows` random rows, which depend on (seed, step) alone."""
        generator = torch.Generator().manual_seed(stable_seed("batch", seed, step))
        return self._at(torch.randint(0, self.tokens - self._length, (rows,), generator=generator))

    def _at(self, starts: Tensor) -> Batch:
        whole = torch.from_numpy(np.stack([self._window(int(start)) for start in starts]).astype(np.int64))
        return Batch(whole[:, :-1].contiguous(), whole[:, 1:].contiguous())

    def _window(self, start: int) -> np.ndarray:
        """Return seq_len + 1 tokens from position `start`, which is counted over the spans alone."""
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
    """Rows of several documents each, which do not attend to each other.

    Args:
        tokens: the tokens of the store.
        counts: for each token whether it is a target; None: all are.
        pieces: [pieces, 2], first token and number of places of each, row by row.
        starts: [rows + 1], where each row starts in `pieces`, and the end of the last.
    """

    def __init__(
        self, tokens: Tokens, counts: np.ndarray | None, pieces: np.ndarray, starts: np.ndarray, seq_len: int
    ) -> None:
        self._tokens, self._counts, self._pieces, self._starts = tokens, counts, pieces, starts
        self._length = seq_len

    @property
    def count(self) -> int:
        return len(self._starts) - 1

    @property
    def fill(self) -> float:
        """Return the share of the places that hold a token of a document."""
        return float(self._pieces[:, 1].sum()) / max(1, self.count * self._length)

    def rows_at(self, numbers: Tensor) -> Batch:
        rows = [self._row(int(number)) for number in numbers]
        return Batch(*(torch.from_numpy(np.stack(part)) for part in zip(*rows, strict=True)))

    def random_rows(self, rows: int, seed: int, step: int) -> Batch:
        generator = torch.Generator().manual_seed(stable_seed("batch", seed, step))
        return self.rows_at(torch.randint(0, self.count, (rows,), generator=generator))

    def _row(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        tokens = np.zeros(self._length, dtype=np.int64)
        targets = np.full(self._length, IGNORE_INDEX, dtype=np.int64)
        positions = np.empty(self._length, dtype=np.int64)
        at = 0
        for first, size in self._pieces[self._starts[number] : self._starts[number + 1]].tolist():
            _write_piece(self._tokens, self._counts, first, size, tokens[at:], targets[at:])
            positions[at : at + size] = np.arange(size)
            at += size
        positions[at:] = np.arange(self._length - at)  # the rest of the row is one more document, without targets
        return tokens, targets, positions


Rows = SpanRows | PackedRows


class SortedDocuments:
    """Batches of documents of similar length. Rows are padded at the end, where causal attention does not see the padding.

    All batches have about the same number of places, so that those of short documents have more rows. Documents of the same
    rounded length change batches from epoch to epoch; the lengths of the batches stay the same.

    Args:
        stores: for each source (tokens, which of them are targets (None: all), pieces); pieces is [pieces, 2], first token and
            number of places of each.
        rows, length: shape of a batch of the longest documents.
        multiple: the length of each batch is a multiple of it, as `length` must be.
        remainder: `pad`: the last batch, that of the shortest documents, is filled up by repeating its documents; `drop`: up to
            `rows - 1` of the shortest documents are left out, unless there is no other batch.

    Attributes:
        fill: the share of the places that hold a token of a document.
    """

    def __init__(
        self,
        stores: Sequence[tuple[Tokens, np.ndarray | None, np.ndarray]],
        rows: int,
        length: int,
        seed: int,
        remainder: Remainder = "pad",
        multiple: int = MULTIPLE,
    ) -> None:
        self._stores, self._length, self._rows, self._seed = stores, length, rows, seed
        self._firsts = np.concatenate([[0], np.cumsum([len(pieces) for _, _, pieces in stores])])
        sizes = np.concatenate([pieces[:, 1] for _, _, pieces in stores])
        self._lengths = rounded(sizes, multiple, length)
        self._sorted = -np.sort(-self._lengths)
        self._batches = cut_sorted(self._sorted, rows, length, remainder)
        places = sum(count * int(self._sorted[first]) for first, count in self._batches)
        used = sum(count for _, count in self._batches)
        self.fill = float(np.sort(sizes)[::-1][:used].sum()) / max(1, places)
        self._known: tuple[int, np.ndarray] | None = None

    @property
    def documents(self) -> int:
        """Return the number of documents, where each piece of a long document counts as one."""
        return len(self._lengths)

    @property
    def count(self) -> int:
        """Return the number of batches per epoch."""
        return len(self._batches)

    def batch(self, number: int, epoch: int) -> Batch:
        """Return batch `number` of an epoch, counted from the batch of the longest documents."""
        return self._padded(*self._batches[number], self._order(epoch))

    def evenly_spaced(self, most: int) -> list[Batch]:
        """Return up to `most` batches, from the longest documents to the shortest; the last one is neither padded nor dropped."""
        batches = cut_sorted(self._sorted, self._rows, self._length, "keep")
        count = min(most, len(batches))
        return [self._padded(*batches[at * len(batches) // count], self._order(0)) for at in range(count)]

    def _order(self, epoch: int) -> np.ndarray:
        """Return the numbers of all documents, longest first; (seed, epoch) decides the order within one rounded length."""
        if self._known is None or self._known[0] != epoch:
            generator = torch.Generator().manual_seed(stable_seed("sorted", self._seed, epoch))
            shuffled = torch.randperm(self.documents, generator=generator).numpy()
            self._known = epoch, shuffled[np.argsort(-self._lengths[shuffled], kind="stable")]
        return self._known[1]

    def _padded(self, first: int, rows: int, order: np.ndarray) -> Batch:
        documents = np.resize(order[first : first + rows], rows)  # repeats them from the first where too few are left
        length = int(self._lengths[documents].max())
        tokens = np.zeros((rows, length), dtype=np.int64)
        targets = np.full((rows, length), IGNORE_INDEX, dtype=np.int64)
        for row, document in enumerate(documents.tolist()):
            store = int(np.searchsorted(self._firsts, document, side="right")) - 1
            stored, counts, pieces = self._stores[store]
            begin, size = pieces[document - self._firsts[store]].tolist()
            _write_piece(stored, counts, begin, size, tokens[row], targets[row])
        return Batch(torch.from_numpy(tokens), torch.from_numpy(targets))


def _write_piece(
    stored: Tokens, counts: np.ndarray | None, first: int, size: int, tokens: np.ndarray, targets: np.ndarray
) -> None:
    """Write `size` tokens of a store, from its token `first` on, and their targets to the start of the arrays."""
    tokens[:size] = stored[first : first + size]
    targets[:size] = stored[first + 1 : first + 1 + size]
    if counts is not None:
        targets[:size][~counts[first + 1 : first + 1 + size]] = IGNORE_INDEX


class Mixture:
    """Several sources, each of which provides its share of the rows, spread evenly; each has its own epochs."""

    def __init__(self, sources: Sequence[Rows], weights: Sequence[float]) -> None:
        self.sources, self._edges = tuple(sources), np.cumsum(weights)[:-1] / sum(weights)
        self._known = 0, np.zeros(len(self.sources), dtype=np.int64)

    def chosen(self, first: int, rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (the source of each row, how many rows each source provided before) for rows first, first + 1, … of a run."""
        at, before = self._known
        if at > first:
            at, before = 0, np.zeros_like(before)
        while at < first:  # after resuming; takes about a second for a hundred million rows
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
    """The batches of a run over all replicas; each depends on the configuration, the data and the step alone."""

    def __init__(self, text: Tensor | Rows | Mixture | SortedDocuments, config: Config, replicas: int) -> None:
        """Raise ConfigError for data that is too short."""
        train, data = config.train, config.data
        if isinstance(text, Tensor):
            text = windows_of(text, train.seq_len, "training text")
        self._rows, self._train = text, train
        order = data.sampling
        if order == "auto":
            whole = isinstance(text, PackedRows | Mixture | SortedDocuments)
            order = "shuffle-then-split" if whole else "anywhere"
        self._samplers: list[Sampler] = []
        if order != "anywhere" and isinstance(text, SpanRows | PackedRows):
            self._samplers = [Sampler(text.count, train.global_batch_size, replicas, train.seed, order, data.remainder)]
        elif order != "anywhere":  # one by one: batches, or rows of several sources
            parts = text.sources if isinstance(text, Mixture) else [text]
            self._samplers = [
                Sampler(part.count, 1, 1, train.seed + at, order, "drop") for at, part in enumerate(parts)
            ]

    def of_step(self, step: int) -> Batch:
        """Return the batch of a step, counted from 0: windows that start anywhere, or rows in the sampler's order."""
        train = self._train
        if isinstance(self._rows, Mixture):
            return self._mixed(self._rows, step)
        if isinstance(self._rows, SortedDocuments):
            return self._rows.batch(int(self._samplers[0].batch(step)), step // self._rows.count)
        if not self._samplers:
            return self._rows.random_rows(train.global_batch_size, train.seed, step)
        return self._rows.rows_at(self._samplers[0].batch(step))

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
                parts.append(source.random_rows(len(mine), seed + number, step))
                continue
            items = range(int(before[number]), int(before[number]) + len(mine))
            parts.append(source.rows_at(torch.cat([self._samplers[number].batch(item) for item in items])))
        order = torch.from_numpy(np.argsort(np.concatenate(places)))
        columns = zip(*parts, strict=True)
        whole = [None if column[0] is None else torch.cat(column) for column in columns]
        return Batch(*whole).rows(order)  # type: ignore[arg-type]


def windows_of(text: Tensor, seq_len: int, what: str) -> SpanRows:
    """Return the windows of one text in memory ([length], of any integer type), which messages call `what`.

    Raises ConfigError if the text is shorter than a window and the token after it.
    """
    require_length(len(text), seq_len, what)
    return SpanRows(text.numpy(), Spans(np.array([0]), np.array([len(text)])), seq_len)


def evenly_spaced(text: Tensor | Rows, rows: int, seq_len: int, most: int) -> list[Batch]:
    """Return up to `most` batches of `rows` windows, spread evenly over `text` without overlap; at least one window.

    The last batch may have fewer rows. Raises ConfigError for a tensor that is too short for one window.
    """
    if isinstance(text, Tensor):
        text = windows_of(text, seq_len, "held-out text")
    room = text.count
    count = min(rows * most, room)
    numbers = torch.tensor([at * room // count for at in range(count)])
    return [text.rows_at(part) for part in torch.split(numbers, rows)]
