"""Sources of every kind give the same documents; what cannot be read is named in one sentence."""

from __future__ import annotations

import gzip
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from corpora import data, documents, json_lines, tokenizer_file
from pipeloom.errors import ConfigError
from pipeloom.train.data.batches import SpanRows
from pipeloom.train.data.conversations import BadDocument
from pipeloom.train.data.sources import Fields, Record, find, records
from pipeloom.train.data.store import Joined


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "cache").mkdir(mode=0o700)
    return tmp_path


def read(path: Path | str, kind: str = "auto", field: str = "") -> list[Record]:
    return list(records(Fields(find(str(path), kind), field)))


def texts(path: Path | str, kind: str = "auto", field: str = "") -> list[str]:
    found = read(path, kind, field)
    assert all(isinstance(record.value, str) for record in found)
    return [record.value for record in found]


def test_all_kinds_hold_the_same_documents(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    want = documents(50)
    json_lines(tmp_path / "a.jsonl", ({"id": at, "text": text} for at, text in enumerate(want)))
    with gzip.open(tmp_path / "b.jsonl.gz", "wb") as file:
        file.write((tmp_path / "a.jsonl").read_bytes())
    pq.write_table(pa.table({"id": list(range(50)), "text": want}), tmp_path / "c.parquet", row_group_size=7)
    json_lines(tmp_path / "d.jsonl", ({"body": text, "text": "other"} for text in want))
    for name in ("a.jsonl", "b.jsonl.gz", "c.parquet"):
        assert texts(tmp_path / name) == want, name
    assert texts(tmp_path / "d.jsonl", field="body") == want
    assert texts(f"{tmp_path}/[ab].jsonl*") == want + want
    (tmp_path / "texts").mkdir()
    for at, text in enumerate(want[:3]):
        (tmp_path / f"texts/{at}.txt").write_text(text)
    assert texts(tmp_path / "texts") == want[:3]


def test_a_directory_of_datasets_is_read_without_being_loaded(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    want = documents(2500)
    datasets.Dataset.from_dict({"id": list(range(2500)), "text": want}).save_to_disk(str(tmp_path / "plain"))
    splits = {"train": datasets.Dataset.from_dict({"text": want[:9]})}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "splits"))
    assert find(str(tmp_path / "plain"), "auto").kind == "dataset"
    assert texts(tmp_path / "plain") == want
    assert texts(tmp_path / "splits") == want[:9]
    with pytest.raises(ConfigError, match='has no column "body"; it has id, text'):
        texts(tmp_path / "plain", field="body")


def test_an_array_of_objects_is_read_as_records(folder: Path) -> None:
    array = '\ufeff[ {"text": "one"},\n {"text": 2},\n {"text": "three"}]'
    (folder / "a.json").write_text(array)
    one, two, three = read(folder / "a.json")
    assert [one, three] == [Record(f"{folder}/a.json, record {at}", text) for at, text in ((1, "one"), (3, "three"))]
    assert two.place == f"{folder}/a.json, record 2"
    assert isinstance(two.value, BadDocument)
    assert str(two.value) == 'field "text" is 2, not a string or a list of messages'
    (folder / "a.json").write_text(array[:-1])
    (broken,) = read(folder / "a.json")
    assert isinstance(broken.value, BadDocument)
    assert str(broken.value).startswith("it is not JSON: ")


@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
def test_tables_are_not_trained_on_as_text_unasked(tmp_path: Path, name: str) -> None:
    (tmp_path / "data").mkdir()
    file = tmp_path / "data" / name
    file.write_text("text\nx\n")
    with pytest.raises(ConfigError, match=r'its files are tables; set data.format = "dataset" .* or "text"'):
        find(str(file), "auto")
    assert find(str(file), "text").kind == "text"
    (tmp_path / "data/b.py").write_text("x = 1\n")
    assert find(str(tmp_path / "data"), "auto").kind == "text"  # beside other files, as in a folder of source code


def test_a_source_whose_documents_are_all_bad_says_why(folder: Path) -> None:
    json_lines(folder / "a.jsonl", [{"text": None}, {"text": ["x"]}])
    words = (
        r'it holds no text to train on \(bad ones left out: 2; .*line 1: field "text" is None.*'
        r"\['x'\], not a string"
    )
    with pytest.raises(ConfigError, match=words):
        data(folder, source=str(folder / "a.jsonl"), on_error="skip")


def test_what_datasets_reads_is_streamed_from_local_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CSV files stand for what only `datasets` reads; nothing is copied to its cache, and no more is read than asked for."""
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "none"))
    want = documents(30)
    (tmp_path / "repo/data").mkdir(parents=True)
    for at, name in enumerate(("train-00000.csv", "train-00001.csv", "test.csv")):
        rows = "".join(f'{number},"{text}"\n' for number, text in enumerate(want[10 * at : 10 * at + 10]))
        (tmp_path / "repo/data" / name).write_text(f"id,body\n{rows}")

    def found(name: str, field: str = "body") -> list[str]:
        source = find(str(tmp_path / name), "dataset")
        return [record.value for record in records(Fields(source, field)) if isinstance(record, Record)]

    assert found("repo") == want[:20]
    assert found("repo/data/test.csv") == want[20:]
    assert found("repo/data/t*-0000?.csv") == want[:20]
    with pytest.raises(ConfigError, match='it has no column "text"; it has id, body'):
        found("repo", "text")
    monkeypatch.setattr("pipeloom.train.data.sources._ROWS", 4)
    (tmp_path / "repo/data/train-00001.csv").write_bytes(b"id,body\n\xff\n")
    opened = records(Fields(find(str(tmp_path / "repo"), "dataset"), "body"))
    assert [next(opened).value for _ in range(5)] == want[:5]  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="datasets cannot read it after row 8: "):
        list(opened)
    assert not (tmp_path / "none").exists()


def test_a_long_text_comes_in_parts_that_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeloom.train.data.sources._PART", 1000)
    text = "\n".join(documents(200)) + "x" * 3000
    (tmp_path / "long.txt").write_text(text)
    found = [record for record in read(tmp_path / "long.txt") if isinstance(record, Record)]
    assert len(found) > 5
    assert "".join(record.value for record in found) == text
    assert [record.first for record in found] == [True] + [False] * (len(found) - 1)
    assert [record.last for record in found] == [False] * (len(found) - 1) + [True]


@pytest.mark.parametrize(
    ("dtype", "name"), [(np.uint16, "a.bin"), (np.uint16, "llm.c.bin"), (np.uint32, "b.bin"), (np.int64, "c.npy")]
)
def test_files_of_tokens_are_mapped(folder: Path, dtype: Any, name: str) -> None:
    tokens = np.random.default_rng(0).integers(0, 250, 5000).astype(dtype)
    header = np.array([20240520, 1, 5000, *[0] * 253] if "llm.c" in name else [], dtype=np.int32)
    if name.endswith(".npy"):
        np.save(folder / name, tokens)
    else:
        (folder / name).write_bytes(header.tobytes() + tokens.tobytes())
    kind = "uint32" if dtype == np.uint32 else "auto"
    rows = data(folder, source=str(folder / name), token_type=kind, eos="none").train
    assert isinstance(rows, SpanRows)
    batch = rows.rows_at(torch.arange(rows.count))
    assert np.array_equal(batch.tokens.flatten().numpy(), tokens[: 64 * rows.count])
    assert rows.tokens == 4750  # the last twentieth is held out


def test_token_files_of_several_parts_are_mapped_and_read_as_one(folder: Path) -> None:
    sizes = (700, 1, 0, 2300, 1999)
    parts = [np.random.default_rng(size).integers(1, 250, size).astype(np.uint16) for size in sizes]
    for at, part in enumerate(parts):
        part.tofile(folder / f"{at}.bin")
    whole = np.concatenate(parts)
    keys: dict[str, Any] = {"eos": "none", "train__seq_len": 64}
    rows = data(folder, source=f"{folder}/*.bin", **keys).train
    assert isinstance(rows, SpanRows)
    assert isinstance(rows.stored, Joined)
    batch = rows.rows_at(torch.arange(rows.count))
    assert np.array_equal(batch.tokens.flatten().numpy(), whole[: 64 * rows.count])
    assert all(np.array_equal(rows.stored[a:b], whole[a:b]) for a in (0, 699, 700, 701, 3000) for b in (a, a + 1, 4000))


def test_tokens_that_the_model_does_not_know_are_refused(folder: Path) -> None:
    np.full(5000, 300, dtype=np.uint16).tofile(folder / "a.bin")
    with pytest.raises(ConfigError, match=r"holds the token 300, and the model has 256 tokens \(model.vocab_size\)"):
        data(folder, source=str(folder / "a.bin"))
    np.save(folder / "signed.npy", np.array([1, -100, 2], dtype=np.int32))
    with pytest.raises(ConfigError, match=r"signed.npy holds the token -100, and the model has 256 tokens"):
        data(folder, source=str(folder / "signed.npy"))
    header = np.array([20240520, 1, 9, *[0] * 253], dtype=np.int32).tobytes()
    (folder / "cut.bin").write_bytes(header + bytes(16))
    with pytest.raises(ConfigError, match=r"cut.bin holds 8 tokens, and its header promises 9: it was cut short"):
        data(folder, source=str(folder / "cut.bin"))
    (folder / "odd.bin").write_bytes(b"123")
    with pytest.raises(ConfigError, match="has 3 bytes, which is not a whole number of uint16"):
        data(folder, source=str(folder / "odd.bin"))


def test_json_lines_under_the_name_of_a_text_are_not_trained_on_as_bytes(tmp_path: Path) -> None:
    for name in ("a.txt", "a.json", "a"):
        json_lines(tmp_path / name, ({"text": text} for text in documents(5)))
        with pytest.raises(ConfigError, match=r'is JSON lines; set data.format = "jsonl"'):
            find(str(tmp_path / name), "auto")
        assert find(str(tmp_path / name), "text").kind == "text"
        assert texts(tmp_path / name, "jsonl") == documents(5)
    json_lines(tmp_path / "one.json", [{"text": "x"}])
    with pytest.raises(ConfigError, match="is JSON lines"):
        find(str(tmp_path / "one.json"), "auto")
    (tmp_path / "code.txt").write_text("{ this is code }\n{ and this }\n")
    assert find(str(tmp_path / "code.txt"), "auto").kind == "text"


def test_a_folder_of_several_kinds_is_refused_until_one_is_chosen(tmp_path: Path) -> None:
    json_lines(tmp_path / "a.jsonl", [{"text": "x"}])
    (tmp_path / "readme.md").write_text("about")
    with pytest.raises(ConfigError, match=r"1 of jsonl and 1 of text; set data\.format"):
        find(str(tmp_path), "auto")
    assert [file.name for file in find(str(tmp_path), "jsonl").files] == ["a.jsonl"]


BAD = [
    (b'{"text": "x"', "it is not JSON"),
    (b'{"text": "\xff"}', r"it is not UTF-8 \(byte 11\)"),
    (b'{"text": "a\0b"}', "zero bytes"),
    (b'["text"]', r"it is \['text'\], not an object"),
    (b'{"other": 1}', 'it has no field "text"'),
    (b'{"text": 7}', 'field "text" is 7, not a string'),
    (b'{"text": null}', 'field "text" is None, not a string'),
    (b'{"text": "\\ud800"}', "half of a surrogate pair"),
    (b'{"text": ' + b"[" * 100_000 + b"}", "nested too deeply|not JSON"),
    (b'{"text": "' + b"x" * 3000 + b'"}', "it has more than 2,000 bytes"),
]


@pytest.mark.parametrize(("line", "why"), BAD)
def test_a_bad_line_is_named_or_left_out(folder: Path, line: bytes, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "2,000" in why:
        monkeypatch.setattr("pipeloom.train.data.sources.LINE_BYTES", 2000)
    good = [json.dumps({"text": text}).encode() for text in documents(60)]
    (folder / "a.jsonl").write_bytes(b"\n".join([*good[:2], b"", line, *good[2:]]) + b"\n")
    source = str(folder / "a.jsonl")
    with pytest.raises(ConfigError, match=rf"a\.jsonl, line 4: .*({why}).*on_error = \"skip\""):
        data(folder, source=source)
    found = data(folder, source=source, on_error="skip")
    assert "60 documents, 1 bad one left out" in found.words
    assert "a.jsonl, line 4" in found.words


def test_hostile_files_get_one_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(folder / "pipe.jsonl")
    (folder / "empty.jsonl").write_bytes(b"")
    (folder / "blank.jsonl").write_bytes(b"\n\n\n")
    (folder / "bad.parquet").write_bytes(b"PAR1 no table")
    (folder / "bad.jsonl.gz").write_bytes(b"no gzip")
    (folder / "gone.jsonl").symlink_to(folder / "nowhere")
    (folder / "bad.npy").write_bytes(b"\x93NUMPY\x01\x00")
    np.save(folder / "object.npy", np.array([{"a": 1}], dtype=object))
    (folder / "latin.txt").write_bytes("caf\xe9".encode("latin-1") * 400)
    (folder / "nothing").mkdir()
    tokenizer = str(tokenizer_file(folder / "tokenizer.json"))
    cases = {
        "pipe.jsonl": "is a pipe, and a text is read from a file",
        "empty.jsonl": "it holds no text to train on",
        "blank.jsonl": "it holds no text to train on",
        "bad.parquet": r"datasets cannot read .*bad\.parquet: ",
        "bad.jsonl.gz": "cannot read",
        "gone.jsonl": "cannot read .*No such file",
        "bad.npy": "cannot read",
        "object.npy": "cannot read",
        "latin.txt": r"latin\.txt, line 1: it is not UTF-8",
        "nothing": "it holds no files",
    }
    for name, words in cases.items():
        keys = {"tokenizer": tokenizer, "model__vocab_size": 300} if name == "latin.txt" else {}
        with pytest.raises(ConfigError, match=words) as caught:
            data(folder, source=str(folder / name), **keys)
        assert len(str(caught.value).splitlines()) == 1, name


@pytest.mark.parametrize(
    ("package", "source", "keys"),
    [("datasets", "a.parquet", {}), ("tokenizers", "a.jsonl", {"tokenizer": True}), ("datasets", "ds", {})],
)
def test_a_missing_package_is_one_sentence(
    folder: Path, package: str, source: str, keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tokenizer_file(folder / "tokenizer.json")
    json_lines(folder / "a.jsonl", [{"text": "x"}])
    (folder / "a.parquet").write_bytes(b"PAR1")
    (folder / "ds").mkdir()
    (folder / "ds/state.json").write_text("{}")
    (folder / "ds/dataset_info.json").write_text("{}")
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    given = {"tokenizer": str(tokenizer), "model__vocab_size": 400} if keys else {}
    with pytest.raises(ConfigError, match=rf'needs the package {package}: pip install -e "\.\[data\]"'):
        data(folder, source=str(folder / source), **given)


def test_the_first_record_decides_on_the_field(tmp_path: Path) -> None:
    json_lines(tmp_path / "a.jsonl", [{"body": "x", "title": "y"}])
    with pytest.raises(ConfigError, match=r"none of .text., .messages., .* \(it has body, title\); name .* data.field"):
        read(tmp_path / "a.jsonl")


def test_tokens_are_those_of_the_tokenizer(folder: Path) -> None:
    """Concatenated with its eos behind each document; every twentieth document is held out."""
    name = tokenizer_file(folder / "tokenizer.json")
    inner = Tokenizer.from_file(str(name))
    json_lines(folder / "a.jsonl", ({"text": text} for text in documents()))
    found = data(folder, source=str(folder / "a.jsonl"), tokenizer=str(name), model__vocab_size=300)
    rows = found.train
    assert isinstance(rows, SpanRows)
    want = [[*inner.encode(text).ids, 0] for at, text in enumerate(documents()) if at % 20 != 10]
    flat = [token for document in want for token in document]
    batch = rows.rows_at(torch.arange(rows.count))
    assert batch.tokens.flatten().tolist() == flat[: 64 * rows.count]
    assert batch.targets.flatten().tolist() == flat[1 : 64 * rows.count + 1]
    held = [token for at, text in enumerate(documents()) if at % 20 == 10 for token in [*inner.encode(text).ids, 0]]
    assert found.held_out[0].tokens[0].tolist() == held[:64]
    assert found.unit == "token"
