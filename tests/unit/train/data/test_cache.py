"""The cache: keyed by content, private, whole or not there, the same for two runs at once."""

from __future__ import annotations

import json
import os
import stat
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corpora import config, data, documents, json_lines, tokenizer_file
from pipeloom.errors import ConfigError
from pipeloom.train.data import cache
from pipeloom.train.data.batches import SpanRows
from pipeloom.train.data.prepare import prepare
from pipeloom.train.data.tokenizers import ByteTokenizer


@pytest.fixture
def source(tmp_path: Path) -> str:
    return str(json_lines(tmp_path / "a.jsonl", ({"text": text} for text in documents())))


def entries(folder: Path) -> set[str]:
    return {path.name for path in (folder / "cache").iterdir()}


def test_what_changes_tokens_changes_the_entry_and_nothing_else_does(tmp_path: Path, source: str) -> None:
    tokenizer = str(tokenizer_file(tmp_path / "tokenizer.json"))
    keys: dict[str, Any] = {"source": source, "tokenizer": tokenizer, "model__vocab_size": 400}
    data(tmp_path, **keys)
    (first,) = entries(tmp_path)
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    (moved / "b.jsonl").write_bytes(Path(source).read_bytes())
    data(tmp_path, **keys | {"source": str(moved / "b.jsonl"), "train__seq_len": 32, "held_out": 0.25})
    assert entries(tmp_path) == {first}
    changes: list[dict[str, Any]] = [
        {"tokenizer": str(tokenizer_file(tmp_path / "other.json", 310))},
        {"eos": "none"},
        {"bos": "<s>"},
        {"on_error": "skip"},
        {"tokenizer": "bytes"},
    ]
    for number, change in enumerate(changes, 2):
        data(tmp_path, **keys | change)
        assert len(entries(tmp_path)) == number, change
    Path(source).write_text(Path(source).read_text().replace("loom", "room"))
    data(tmp_path, **keys)
    assert len(entries(tmp_path)) == len(changes) + 2


def test_a_second_run_does_not_tokenize(tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = data(tmp_path, source=source)

    def refuse(*_: object) -> None:
        raise AssertionError("tokenized again")

    monkeypatch.setattr(ByteTokenizer, "encode_batch", refuse)
    second = data(tmp_path, source=source)
    assert first.facts == second.facts
    rows = second.train
    assert isinstance(rows, SpanRows)
    assert isinstance(rows.stored, np.memmap)  # the array is mapped, not read


def test_a_damaged_entry_is_made_again(tmp_path: Path, source: str) -> None:
    rows = data(tmp_path, source=source).train
    assert isinstance(rows, SpanRows)
    want, count = np.array(rows.stored), rows.tokens  # a copy: what is mapped is damaged below
    (name,) = entries(tmp_path)
    folder = tmp_path / "cache" / name
    index = (folder / cache.INDEX).read_text()
    flipped = bytearray((folder / "tokens.raw").read_bytes())
    flipped[7] ^= 1
    for damage in (
        lambda: os.truncate(folder / "tokens.raw", 10),
        lambda: (folder / cache.INDEX).write_text("{"),
        lambda: (folder / "tokens.raw").write_bytes(flipped),
        lambda: (folder / cache.INDEX).write_text(index.replace("|u1", "|i1")),
    ):
        damage()
        found = data(tmp_path, source=source)
        assert entries(tmp_path) == {name}
        assert isinstance(found.train, SpanRows)
        assert found.train.tokens == count
        assert np.array_equal(found.train.stored, want)
        assert found.train.stored.dtype == np.uint8


def test_an_index_cannot_name_objects(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / cache.INDEX).write_text(json.dumps({"arrays": {"a": ["|O", 1, ""]}, "facts": {}}))
    (tmp_path / "x/a.raw").write_bytes(b"\0" * 8)
    with pytest.raises(ValueError, match="type object"):
        cache.Entry(tmp_path / "x")


def test_two_runs_at_once_make_one_whole_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2, timeout=600)
    folder = cache.folder_of(str(tmp_path / "cache"))
    found: list[list[int]] = []

    def write(writer: cache.Writer) -> None:
        both.wait()  # both are writing now
        writer.add("a", "<i8", np.arange(5))

    def run() -> None:
        found.append(cache.entry(folder, "e", write)["a"].tolist())

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=600)
    assert found == [[0, 1, 2, 3, 4]] * 2
    assert entries(tmp_path) == {"e"}


def test_a_failed_run_leaves_nothing(tmp_path: Path) -> None:
    json_lines(tmp_path / "bad.jsonl", [{"text": "x"}, {"text": 1}])
    with pytest.raises(ConfigError):
        data(tmp_path, source=str(tmp_path / "bad.jsonl"))
    assert entries(tmp_path) == set()


def test_the_folder_is_private(tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data(tmp_path, source=source)
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert cache.folder_of("") == tmp_path / "home" / "pipeloom"
    (tmp_path / "cache").chmod(0o777)
    with pytest.raises(ConfigError, match="other users can write there"):
        prepare(config(tmp_path, source=source))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="it is a file, not a folder"):
        prepare(config(tmp_path, source=source, cache=str(tmp_path / "file")))
