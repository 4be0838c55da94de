"""Packed rows: full, no token lost or repeated, targets inside their document; windows over spans; mixtures."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from corpora import config, data, documents, json_lines
from pipeloom.errors import ConfigError
from pipeloom.train.data.batches import Batch, Batches, Mixture, PackedRows, SpanRows, windows_of
from pipeloom.train.data.packing import Spans, best_fit_decreasing, packed, pieces_of, runs, split


def spans_of(*pairs: tuple[int, int]) -> Spans:
    return Spans(np.array([a for a, _ in pairs]), np.array([b for _, b in pairs]))


def test_best_fit_decreasing_puts_each_item_into_the_fullest_bin_with_room() -> None:
    draw = np.random.default_rng(0)
    for count in (0, 1, 2, 7, 64, 100):
        sizes = draw.integers(1, 11, count).tolist()
        bins: list[list[int]] = []
        for item in sorted(range(count), key=lambda at: -sizes[at]):
            fitting = [b for b in bins if sum(sizes[i] for i in b) + sizes[item] <= 10]
            if fitting:
                max(fitting, key=lambda b: (sum(sizes[i] for i in b), -bins.index(b))).append(item)
            else:
                bins.append([item])
        assert best_fit_decreasing(sizes, 10) == bins


def test_rows_are_95_percent_full() -> None:
    sizes = np.random.default_rng(1).integers(16, 513, 20_000)
    ends = np.cumsum(sizes)
    pieces, rows = packed(pieces_of(Spans(ends - sizes, ends), 512), 512)
    fill = pieces[:, 1].sum() / (512 * (len(rows) - 1))
    assert fill >= 0.95
    assert np.add.reduceat(pieces[:, 1], rows[:-1]).max() <= 512


def test_every_token_but_a_documents_first_is_a_target_once() -> None:
    draw = np.random.default_rng(2)
    sizes = draw.integers(1, 50, 300)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    tokens = np.arange(starts[-1])  # each is its own number
    pieces, rows = packed(pieces_of(Spans(starts[:-1], starts[1:]), 16), 16, window=40)
    batch = PackedRows(tokens, None, pieces, rows, 16).rows_at(torch.arange(len(rows) - 1))
    assert batch.positions is not None
    real = batch.targets != -100
    assert torch.equal(batch.targets[real], batch.tokens[real] + 1)  # a target follows its token, in the same document
    assert sorted(batch.targets[real].tolist()) == sorted(set(tokens.tolist()) - set(starts[:-1].tolist()))
    # a position is 0 where a piece begins, and 1 more than the one before it elsewhere
    begins = batch.positions == 0
    assert bool(begins[:, 0].all())
    steps = batch.positions[:, 1:] - batch.positions[:, :-1]
    assert bool(((steps == 1) | begins[:, 1:]).all())
    inner = ~begins[:, 1:] & real[:, 1:]
    assert torch.equal(batch.tokens[:, 1:][inner], batch.tokens[:, :-1][inner] + 1)


def test_pieces_without_targets_are_left_out() -> None:
    counts = np.zeros(40, dtype=bool)
    counts[[0, 12, 25]] = True  # the first token of a document is never a target
    found = pieces_of(spans_of((0, 11), (11, 21), (21, 40)), 8, counts)
    assert found.tolist() == [[11, 8], [21, 8]]
    batch = PackedRows(np.arange(40), counts, found, np.array([0, 1, 2]), 8).rows_at(torch.tensor([0, 1]))
    assert [row[row != -100].tolist() for row in batch.targets] == [[12], [25]]


def test_one_document_in_twenty_or_the_end_is_held_out() -> None:
    train, held = split(np.arange(0, 410, 10), 20)
    assert held.starts.tolist() == [100, 300]
    assert train.tokens == 380
    assert runs(train) == (pytest.approx([0, 110, 310]), pytest.approx([100, 300, 400]))
    train, held = split(np.array([0, 60, 100]), 10)
    assert (train.starts.tolist(), train.ends.tolist()) == ([0, 60], [60, 90])
    assert (held.starts.tolist(), held.ends.tolist()) == ([90], [100])


def test_windows_of_spans_are_those_of_their_tokens_joined() -> None:
    tokens = np.random.default_rng(3).integers(0, 100, 500)
    spans = spans_of((3, 4), (10, 11), (20, 120), (120, 130), (300, 301), (400, 500))
    joined = torch.from_numpy(np.concatenate([tokens[a:b] for a, b in zip(*spans, strict=True)]))
    rows, plain = SpanRows(tokens, spans, 16), windows_of(joined, 16, "text")
    assert rows.count == plain.count == (len(joined) - 1) // 16
    for batch in (rows.rows_at(torch.arange(rows.count)), plain.rows_at(torch.arange(rows.count))):
        assert torch.equal(batch.tokens.flatten(), joined[: 16 * rows.count])
        assert torch.equal(batch.targets.flatten(), joined[1 : 16 * rows.count + 1])
    same(rows.random_rows(9, 5, 2), plain.random_rows(9, 5, 2))


def same(a: Batch, b: Batch) -> None:
    assert torch.equal(a.tokens, b.tokens)
    assert torch.equal(a.targets, b.targets)


def mixture(tmp_path: Path, **keys: Any) -> Batches:
    sources = [windows_of(torch.arange(start, start + 321), 16, "text") for start in (0, 1000, 2000)]
    return Batches(Mixture(sources, (6.0, 3.0, 1.0)), config(tmp_path, train__seq_len=16, **keys), 1)


def test_sources_give_their_share_of_each_epoch_of_their_own(tmp_path: Path) -> None:
    """Each source's rows come all once before any comes twice, and the shares are kept to a row, also after few steps."""
    batches = mixture(tmp_path)
    firsts = torch.cat([batches.of_step(step).tokens[:, 0] for step in range(50)])
    for rows in (20, 100, 200):
        shares = [int((firsts[:rows] // 1000 == number).sum()) / rows for number in range(3)]
        assert shares == pytest.approx([0.6, 0.3, 0.1], abs=3 / rows)
    for number, share in ((0, 120), (1, 60), (2, 20)):
        mine = firsts[firsts // 1000 == number].tolist()
        for epoch in range(len(mine) // 20):
            assert len(set(mine[20 * epoch : 20 * epoch + 20])) == 20, (number, epoch)
        assert abs(len(mine) - share) <= 2


def test_a_mixture_that_is_resumed_goes_on(tmp_path: Path) -> None:
    through = [mixture(tmp_path).of_step(step) for step in range(30)]
    later = mixture(tmp_path)
    for step in (17, 18, 29, 4):  # also back, as after a rollback
        same(later.of_step(step), through[step])


def test_packed_documents_come_all_once_an_epoch_and_resume(tmp_path: Path) -> None:
    json_lines(tmp_path / "a.jsonl", ({"text": text} for text in documents()))
    keys: dict[str, Any] = {"source": str(tmp_path / "a.jsonl"), "documents": "pack", "train__seq_len": 256}
    found = data(tmp_path, **keys)
    rows = found.train
    assert isinstance(rows, PackedRows)
    chosen = config(tmp_path, **keys, remainder="pad")
    batches = Batches(rows, chosen, 2)
    steps = -(-rows.count // 4)
    epoch = [batches.of_step(step) for step in range(steps)]
    kept = Counter(bytes(row.tolist()).rstrip(b"\0") for batch in epoch for row in batch.tokens)
    assert set(kept.values()) <= {1, 2}  # the last batch is filled up
    assert sum(kept.values()) == 4 * steps
    words = b"".join(sorted(kept))
    for at, text in enumerate(documents()):
        assert words.count(text.encode()) == (0 if at % 20 == 10 else 1), text
    resumed = Batches(data(tmp_path, **keys).train, chosen, 2)
    same(resumed.of_step(steps + 1), batches.of_step(steps + 1))
    half = epoch[0].part(1, 2)
    assert half.positions is not None
    assert epoch[0].positions is not None
    assert torch.equal(half.positions, epoch[0].positions[2:])


def test_a_source_of_several_that_is_too_short_is_named(tmp_path: Path) -> None:
    json_lines(tmp_path / "a.jsonl", ({"text": text} for text in documents()))
    json_lines(tmp_path / "b.jsonl", [{"text": "red wool"}] * 3)
    with pytest.raises(ConfigError, match=r"the training text of .*b\.jsonl has 26 tokens; use at most 25"):
        data(tmp_path, source=[str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")])
