"""Batches sorted by length: full, no document lost or repeated, resumed, and computed as if each document were alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from corpora import config, data, documents, json_lines
from pipeloom.errors import ConfigError
from pipeloom.measure.build import build_pipeline
from pipeloom.train.data.batches import Batch, Batches, SortedDocuments
from resolved import resolve

SIZES = np.random.default_rng(5).integers(2, 65, 100)  # of documents; their places are one fewer


def of_sizes(sizes: np.ndarray, **options: Any) -> tuple[SortedDocuments, np.ndarray]:
    """Documents whose tokens are all different, and these."""
    ends = np.cumsum(sizes)
    tokens = np.arange(ends[-1])
    pieces = np.stack([ends - sizes, sizes - 1], axis=1)
    half = len(pieces) // 2  # in two stores
    stores = [(tokens, None, pieces[:half]), (tokens, None, pieces[half:])]
    return SortedDocuments(stores, 4, 64, 0, **options), tokens


def firsts(batch: Batch) -> list[int]:
    return batch.tokens[:, 0].tolist()


def test_each_document_is_in_one_batch_of_an_epoch_padded_to_about_its_length() -> None:
    found, tokens = of_sizes(SIZES)
    assert found.fill > 0.8  # documents are short here, so rounding lengths up to 8 costs more
    kept: Counter[int] = Counter()
    for number in range(found.count):
        batch = found.batch(number, 0)
        rows, length = batch.tokens.shape
        assert rows % 4 == 0
        assert rows * length <= 4 * 64
        real = batch.targets != -100
        assert torch.equal(batch.targets[real], batch.tokens[real] + 1)
        assert bool((batch.tokens[~real] == 0).all())
        sizes = real.sum(1)
        assert int(sizes.max()) - int(sizes.min()) <= 16  # neighbours of two rounded lengths at most
        assert bool((real.long().diff(dim=1) <= 0).all())  # padded at the end
        kept.update(batch.targets[real].tolist() if number + 1 < found.count else set(batch.targets[real].tolist()))
    starts = set((np.cumsum(SIZES) - SIZES).tolist())
    assert kept == Counter(set(tokens.tolist()) - starts)


def test_epochs_mix_documents_of_one_length_and_keep_the_shapes() -> None:
    found, _ = of_sizes(SIZES)
    epochs = [[found.batch(number, epoch) for number in range(found.count)] for epoch in (0, 1)]
    assert [b.tokens.shape for b in epochs[0]] == [b.tokens.shape for b in epochs[1]]
    assert sorted(map(firsts, epochs[0])) != sorted(map(firsts, epochs[1]))
    whole = [sorted({first for batch in batches for first in firsts(batch)}) for batches in epochs]
    assert whole[0] == whole[1]


def test_what_is_left_is_filled_up_dropped_or_kept() -> None:
    sizes = np.full(30, 33)  # 32 places: 8 rows a batch
    shapes = {}
    for remainder in ("pad", "drop"):
        found, _ = of_sizes(sizes, remainder=remainder)
        shapes[remainder] = [tuple(found.batch(number, 0).tokens.shape) for number in range(found.count)]
    assert shapes == {"pad": [(8, 32)] * 4, "drop": [(8, 32)] * 3 + [(4, 32)]}
    found, _ = of_sizes(sizes)
    last = found.batch(3, 0)
    assert firsts(last)[6:] == firsts(last)[:2]
    assert [len(batch.tokens) for batch in found.evenly_spaced(9)] == [8, 8, 8, 6]
    assert [len(batch.tokens) for batch in found.evenly_spaced(2)] == [8, 8]
    found, _ = of_sizes(np.full(3, 33), remainder="drop")
    assert tuple(found.batch(0, 0).tokens.shape) == (4, 32)  # the only batch


def test_a_batch_is_as_long_as_tensor_parallel_ranks_can_divide(tmp_path: Path) -> None:
    json_lines(tmp_path / "a.jsonl", ({"text": text} for text in documents()))
    keys: dict[str, Any] = {"source": str(tmp_path / "a.jsonl"), "documents": "sort", "train__seq_len": 72}
    found = data(tmp_path, **keys, parallel__tp=3, parallel__sp=True, model__num_attention_heads=6,
                 model__num_key_value_heads=3, model__hidden_size=48, model__intermediate_size=96).train  # fmt: skip
    assert isinstance(found, SortedDocuments)
    lengths = {found.batch(number, 0).tokens.shape[1] for number in range(found.count)}
    assert len(lengths) > 1
    assert all(length % 24 == 0 for length in lengths)


def test_a_run_goes_through_shuffled_batches_and_resumes(tmp_path: Path) -> None:
    json_lines(tmp_path / "a.jsonl", ({"text": text} for text in documents()))
    json_lines(tmp_path / "b.jsonl", ({"text": text} for text in documents(30, seed=1)))
    sources = [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl")]
    keys: dict[str, Any] = {"source": sources, "documents": "sort", "train__seq_len": 256, "remainder": "pad"}
    found = data(tmp_path, **keys)
    assert "sorted by length: 143 documents in" in found.words
    assert isinstance(found.train, SortedDocuments)
    assert all(batch.positions is None for batch in found.held_out)
    assert sum(len(batch.tokens) for batch in found.held_out) == 7  # none filled up
    chosen = config(tmp_path, **keys)
    batches = Batches(found.train, chosen, 2)
    lengths = [batches.of_step(step).tokens.shape[1] for step in range(found.train.count)]
    assert lengths != sorted(lengths)
    assert lengths != sorted(lengths, reverse=True)
    later = Batches(data(tmp_path, **keys).train, chosen, 1)
    for step in (found.train.count + 1, 1, 0):
        assert torch.equal(later.of_step(step).tokens, batches.of_step(step).tokens)
    ordered = [sorted(firsts(batches.of_step(epoch * found.train.count))) for epoch in (0, 1)]
    assert ordered[0] != ordered[1]


def test_a_step_has_as_many_rows_as_its_batch(tmp_path: Path) -> None:
    json_lines(tmp_path / "a.jsonl", ({"text": "a short one"} for _ in range(20)))
    keys: dict[str, Any] = {"source": str(tmp_path / "a.jsonl"), "documents": "sort", "train__seq_len": 48}
    layout = resolve(config(tmp_path, **keys, parallel__pp=1))
    pipeline = build_pipeline(layout, torch.device("cpu"))
    batch = data(tmp_path, **keys).train.batch(0, 0)
    assert len(batch.tokens) == 3 * sum(layout.microbatch_sizes)
    assert pipeline.step(batch.tokens, batch.targets) > 0
    pipeline.close()


def test_what_does_not_go_with_sorted_documents_is_refused(tmp_path: Path) -> None:
    source = str(json_lines(tmp_path / "a.jsonl", ({"text": text} for text in documents(40))))
    with pytest.raises(ConfigError, match=r"data.weights = \[1.0, 2.0\]: batches sorted by length take each document"):
        resolve(config(tmp_path, source=[source, source], weights=[1, 2], documents="sort"))
    with pytest.raises(ConfigError, match=r'data.sampling = "anywhere": .*nearest: "shuffle-then-split"'):
        resolve(config(tmp_path, source=source, sampling="anywhere", documents="sort"))
    with pytest.raises(ConfigError, match=r'data.documents = "sort": the shortest batches have too few tokens to cut'):
        resolve(config(tmp_path, source=source, documents="sort", schedule__slices=2))
