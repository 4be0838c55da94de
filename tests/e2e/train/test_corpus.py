"""Corpus, tokenizer and batches."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from pipeloom.errors import ConfigError
from pipeloom.train.data.batches import Batch, spread, windows_of
from pipeloom.train.data.sources import HELD_OUT_EVERY, read_corpus, split, stdlib_files
from pipeloom.train.data.tokenizers import ByteTokenizer


def sample(text: torch.Tensor, seed: int, step: int, rows: int, seq_len: int) -> Batch:
    return windows_of(text, seq_len, "training text").anywhere(rows, seed, step)


def test_the_standard_library_is_read_the_same_each_time() -> None:
    first, second = read_corpus("stdlib"), read_corpus("stdlib")
    assert first == second
    assert first.files > 300
    assert 0.01 < len(first.held_out) / len(first.train) < 0.2
    assert b"import" in first.held_out


def test_installed_packages_and_tests_are_left_out(tmp_path: Path) -> None:
    for name in ("b.py", "a/c.py", "site-packages/d.py", "test/e.py", "a/tests/f.py", "a.txt", "__pycache__/g.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    assert [str(path.relative_to(tmp_path)) for path in stdlib_files(tmp_path)] == ["a/c.py", "b.py"]


def test_files_are_held_out_whole() -> None:
    texts = [f"file {number}".encode() for number in range(2 * HELD_OUT_EVERY)]
    train, held_out = split(texts)
    assert held_out.split(b"\n") == [texts[10], texts[30]]
    assert sorted(train.split(b"\n") + held_out.split(b"\n")) == sorted(texts)


def test_of_few_files_the_end_is_held_out() -> None:
    train, held_out = split([b"a" * 99, b"b" * 100])
    assert train + held_out == b"a" * 99 + b"\n" + b"b" * 100
    assert held_out == b"b" * 10


def test_a_folder_is_its_text_files_in_order(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_bytes(b"two")
    (tmp_path / "sub" / "c.txt").write_bytes("drei ä".encode())
    (tmp_path / "a.md").write_bytes(b"one")
    (tmp_path / "image").write_bytes(b"\x00\x01")
    (tmp_path / ".hidden").write_bytes(b"secret")
    corpus = read_corpus(str(tmp_path))
    assert corpus.train + corpus.held_out == "one\ntwo\ndrei ä".encode()
    assert corpus.files == 3


def test_an_empty_folder_is_refused_by_the_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.source.*no text"):
        read_corpus(str(tmp_path))


def test_bytes_are_tokens_both_ways() -> None:
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode("aß")
    assert tokens.tolist() == [97, 195, 159]
    assert tokenizer.decode(tokens) == "aß"
    assert tokenizer.decode(torch.tensor([97, 195, 300])) == "a\ufffd\ufffd"
    assert tokenizer.encode("").numel() == 0


def test_a_batch_is_a_function_of_seed_and_step() -> None:
    text = torch.arange(200, dtype=torch.uint8)
    first = sample(text, 3, 5, 4, 8)
    torch.manual_seed(99)
    again = sample(text, 3, 5, 4, 8)
    assert torch.equal(first.tokens, again.tokens)
    assert not torch.equal(first.tokens, sample(text, 3, 6, 4, 8).tokens)
    assert not torch.equal(first.tokens, sample(text, 4, 5, 4, 8).tokens)


def test_targets_are_the_tokens_that_follow() -> None:
    text = torch.arange(200, dtype=torch.uint8)
    tokens, targets, _ = sample(text, 0, 0, 50, 8)
    assert tokens.dtype == targets.dtype == torch.int64
    assert tokens.shape == (50, 8)
    assert torch.equal(targets, tokens + 1)


def test_windows_reach_the_first_and_the_last_token() -> None:
    text = torch.arange(10, dtype=torch.uint8)
    starts = {row[0].item() for step in range(40) for row in sample(text, 0, step, 4, 8).tokens}
    assert starts == {0, 1}


def test_held_out_windows_are_spread_and_never_overlap() -> None:
    text = torch.arange(250, dtype=torch.uint8)
    rows = torch.cat([batch.tokens for batch in spread(text, rows=4, seq_len=8, most=3)])
    assert rows.shape == (12, 8)
    starts = rows[:, 0].tolist()
    assert starts[0] == 0
    assert starts[-1] > 200
    assert all(b - a >= 8 for a, b in pairwise(starts))
    assert [len(batch.tokens) for batch in spread(text[:50], rows=4, seq_len=8, most=3)] == [4, 2]


def test_a_text_too_short_is_refused_with_what_fits() -> None:
    with pytest.raises(ConfigError, match=r"train\.seq_len = 8.*8 tokens; use at most 7"):
        sample(torch.zeros(8, dtype=torch.uint8), 0, 0, 1, 8)
    with pytest.raises(ConfigError, match="held-out"):
        spread(torch.zeros(3, dtype=torch.uint8), 1, 8, 1)
