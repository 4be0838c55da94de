"""A sample of the fuzzer of files, and the fuzzer itself: it finds what it is there for."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from fuzz import files
from fuzz._answers import inside


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    files.make(folder)
    return folder


def test_a_sample_of_damaged_files_is_answered_as_documented(good: Path) -> None:
    codes: Counter[tuple[str, int]] = Counter()
    assert [wrong for seed in range(11, 23) if (wrong := files.failure(good, seed, codes))] == []
    assert {code for _, code in codes} == {0, 2, 5}


def test_a_defect_is_found(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise AttributeError("'list' object has no attribute 'items'")

    monkeypatch.setattr("pipeloom.train.hub.generate.newest_checkpoint", broken)
    monkeypatch.setattr(files, "KINDS", ("checkpoint",))
    monkeypatch.setattr(files, "commands", lambda _, bad: [("generate", str(bad), "--prompt", "a")])
    wrong = files.failure(good, 1, Counter()) or ""
    assert wrong.startswith("exit code 1: ")
    assert "has no attribute 'items'" in wrong


def test_settings_that_a_family_refuses_in_its_forward_are_answered(good: Path, tmp_path: Path) -> None:
    folder = tmp_path / "llama"
    shutil.copytree(good / "llama", folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "attention_dropout": 2**63}))
    with inside(str(tmp_path)):
        found = files.answer((*files.TRAIN, "--model.source", str(folder), "--data.tokenizer", "bytes"))
    assert files.complaint(found.code, found.err, found.seconds, 0.0, (2,)) is None
    assert found.err.rstrip().endswith("dropout probability has to be between 0 and 1, but got 9.22337e+18")


def test_a_folder_without_files_is_damaged_no_more(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    assert files.damage(tmp_path, Random(1)) == "nothing is left"


def test_slow_answers_echoes_and_silence_are_failures() -> None:
    assert files.complaint(2, "a sentence", 1.0, 1.0) is None
    assert files.complaint(2, "x" * 301, 1.0, 1.0) == "echo: a word of 301 characters"
    assert files.complaint(5, " ", 1.0, 1.0) == "no message"
    assert files.complaint(5, "a sentence", 201.0, 1.0) == "slow: 201.0 s"
    assert files.complaint(0, "", 1.0, 701.0) == "memory: 701 MB"
    assert (files.complaint(6, "", 1.0, 1.0) or "").startswith("exit code 6")


def test_checksums_of_a_damaged_checkpoint_are_made_right(good: Path, tmp_path: Path) -> None:
    from pipeloom.train.checkpoint.manifest import read_manifest

    (step,) = (good / "checkpoint").glob("step-*")
    content = json.loads((step / "manifest.json").read_text())
    assert files.changed(content, Random(1))[1]
    (tmp_path / "manifest.json").write_text(
        json.dumps({**content, "step": 7, "files": {}, "tensors": {}, "stored": []})
    )
    files.signed(tmp_path)
    assert read_manifest(tmp_path).step == 7
