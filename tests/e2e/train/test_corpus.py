"""Corpus, tokenizer and batches."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import torch

from corpora import data
from pipeloom.train.data.batches import Batch, SpanRows, evenly_spaced, windows_of
from pipeloom.train.data.sources import stdlib_files
from pipeloom.train.data.tokenizers import ByteTokenizer


def sample(text: torch.Tensor, seed: int, step: int, rows: int, seq_len: int) -> Batch:
    return windows_of(text, seq_len, "training text").random_rows(rows, seed, step)


def test_installed_packages_and_tests_are_left_out(tmp_path: Path) -> None:
    for name in ("b.py", "a/c.py", "site-packages/d.py", "test/e.py", "a/tests/f.py", "a.txt", "__pycache__/g.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    assert [str(path.relative_to(tmp_path)) for path in stdlib_files(tmp_path)] == ["a/c.py", "b.py"]


def test_a_folder_is_its_text_files_in_order(tmp_path: Path) -> None:
    """As bytes; of few files, the end of the last one is held out."""
    folder = tmp_path / "texts"
    (folder / "sub").mkdir(parents=True)
    (folder / "b.txt").write_bytes(b"two")
    (folder / "sub" / "c.txt").write_bytes("drei ä".encode() * 20)
    (folder / "a.md").write_bytes(b"one")
    (folder / "image").write_bytes(b"\x00\x01")
    (folder / ".hidden").write_bytes(b"secret")
    found = data(tmp_path, source=str(folder), train__seq_len=4)
    assert isinstance(found.train, SpanRows)
    text = found.train.stored.tobytes()
    assert text == b"one\ntwo\n" + "drei ä".encode() * 20 + b"\n"
    assert found.train.tokens == len(text) - len(text) // 20
    assert found.held_out[0].tokens[0].tolist() == list(text[found.train.tokens :][:4])
    assert "(text, 4 files): 3 documents" in found.words
    assert found.unit == "byte"


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
    tokens, targets, *_ = sample(text, 0, 0, 50, 8)
    assert tokens.dtype == targets.dtype == torch.int64
    assert tokens.shape == (50, 8)
    assert torch.equal(targets, tokens + 1)


def test_windows_reach_the_first_and_the_last_token() -> None:
    text = torch.arange(10, dtype=torch.uint8)
    starts = {row[0].item() for step in range(40) for row in sample(text, 0, step, 4, 8).tokens}
    assert starts == {0, 1}


def test_held_out_windows_are_spread_and_never_overlap() -> None:
    text = torch.arange(250, dtype=torch.uint8)
    rows = torch.cat([batch.tokens for batch in evenly_spaced(text, rows=4, seq_len=8, most=3)])
    assert rows.shape == (12, 8)
    starts = rows[:, 0].tolist()
    assert starts[0] == 0
    assert starts[-1] > 200
    assert all(b - a >= 8 for a, b in pairwise(starts))
    assert [len(batch.tokens) for batch in evenly_spaced(text[:50], rows=4, seq_len=8, most=3)] == [4, 2]
