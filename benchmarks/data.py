"""Real tokens per second of packed rows against batches padded to their longest, in random order and sorted by length.

Documents of 16 to 512 tokens, evenly; packed and sorted as the trainer does. Each way makes the same step (forward and
backward of the decoder in one process) on batches of about as many places, and counts the tokens that are targets. Ratios are
of steps in turns, so that a busy machine slows all ways alike.

    python benchmarks/data.py [--rounds N] [--hidden N] [--layers N]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

import pipeloom as pl
from pipeloom.config import load
from pipeloom.models import layers, token_loss
from pipeloom.runtime import LocalPipeline
from pipeloom.runtime.batch import IGNORE_INDEX
from pipeloom.train.data.batches import Batch, PackedRows, SortedDocuments
from pipeloom.train.data.packing import Spans, packed, pieces_of

SHORTEST, LONGEST, ROWS, VOCABULARY, DOCUMENTS = 16, 512, 8, 2048, 4096


def main() -> None:
    flags = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    flags.add_argument("--rounds", type=int, default=8)
    flags.add_argument("--hidden", type=int, default=256)
    flags.add_argument("--layers", type=int, default=4)
    given = flags.parse_args()
    sizes = np.random.default_rng(0).integers(SHORTEST, LONGEST + 1, DOCUMENTS)
    ends = np.cumsum(sizes)
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, int(ends[-1]))
    spans = Spans(ends - sizes, ends)
    run = step_of(given.hidden, given.layers)
    for window in (256, 1024, 4096):
        begun = time.perf_counter()
        pieces, rows = packed(pieces_of(spans, LONGEST), LONGEST, window)
        fill = pieces[:, 1].sum() / (LONGEST * (len(rows) - 1))
        seconds = time.perf_counter() - begun
        print(f"best-fit decreasing, window {window}: {fill:.4f} full, {1e6 * seconds / len(pieces):.1f} µs a document")
    ways: dict[str, Iterator[Batch]] = {
        "packed": packed_batches(tokens, pieces, rows),
        "padded, random order": padded(tokens, spans),
        "sorted by length": sorted_batches(tokens, pieces),
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    fills: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(given.rounds + 1):
        for name, batches in ways.items():
            real = places = 0
            begun = time.perf_counter()
            for _ in range(3):  # sorted batches differ in length, so one alone says little
                batch = next(batches)
                run(batch)
                real += int((batch.targets != IGNORE_INDEX).sum())
                places += batch.targets.numel()
            if number:  # the first round warms up
                rates[name].append(real / (time.perf_counter() - begun))
                fills[name].append(real / places)
    for name in ways:
        print(f"{name}: {statistics.median(rates[name]):,.0f} real tokens/s, {statistics.mean(fills[name]):.3f} full")
    print(
        f"hidden {given.hidden}, {given.layers} layers, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}"
    )
    for name in list(ways)[1:]:
        ratios = [ours / theirs for ours, theirs in zip(rates["packed"], rates[name], strict=True)]
        print(f"packed over {name}: median {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


def step_of(hidden: int, count: int) -> Callable[[Batch], None]:
    """Forward and backward of a decoder in this process."""
    heads = hidden // 64
    model = load(
        None,
        {
            "model.hidden_size": hidden,
            "model.num_hidden_layers": count,
            "model.num_attention_heads": heads,
            "model.num_key_value_heads": heads,
            "model.intermediate_size": 8 * hidden // 3 // 8 * 8,
            "model.vocab_size": VOCABULARY,
        },
    ).model
    pipeline = LocalPipeline(layers(model.shape(), 0), pl.schedules.gpipe(1, 1), loss=token_loss(model.shape()))

    def run(batch: Batch) -> None:
        pipeline.step(batch.tokens, batch.targets, **batch.keywords)
        pipeline.zero_grad()

    return run


def packed_batches(tokens: np.ndarray, pieces: np.ndarray, rows: np.ndarray) -> Iterator[Batch]:
    """Batches of packed rows, again and again."""
    source, at = PackedRows(tokens, None, pieces, rows, LONGEST), 0
    while True:
        yield source.rows_at(torch.arange(at, at + ROWS) % source.count)
        at += ROWS


def sorted_batches(tokens: np.ndarray, pieces: np.ndarray) -> Iterator[Batch]:
    """Batches sorted by length, in random order, as sorted ones must be."""
    source = SortedDocuments([(tokens, None, pieces)], ROWS, LONGEST, 2)
    while True:
        for pick in np.random.default_rng(2).permutation(source.count).tolist():
            yield source.batch(pick, 0)


def padded(tokens: np.ndarray, spans: Spans) -> Iterator[Batch]:
    """Batches of whole documents, each padded to its longest, of at most ROWS * LONGEST places, in the documents' order."""
    groups: list[list[int]] = [[]]
    longest = 0
    for document in range(DOCUMENTS):
        size = int(spans.ends[document] - spans.starts[document]) - 1
        longest = max(longest, size)
        if (len(groups[-1]) + 1) * longest > ROWS * LONGEST:
            groups.append([])
            longest = size
        groups[-1].append(document)
    while True:
        for group in groups:
            parts = [torch.from_numpy(tokens[spans.starts[d] : spans.ends[d]]) for d in group]
            length = max(len(part) for part in parts) - 1
            inputs = torch.zeros(len(parts), length, dtype=torch.int64)
            targets = torch.full((len(parts), length), IGNORE_INDEX)
            for row, part in enumerate(parts):
                inputs[row, : len(part) - 1], targets[row, : len(part) - 1] = part[:-1], part[1:]
            yield Batch(inputs, targets)


if __name__ == "__main__":
    main()
