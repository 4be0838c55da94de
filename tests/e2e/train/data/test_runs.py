"""Whole runs on packed documents of a vocabulary: resumed bit by bit, exported with the tokenizer beside the model."""

from __future__ import annotations

import json
from pathlib import Path

from checkpoint_runs import BRIEF
from commands import pipeloom
from corpora import documents, json_lines, tokenizer_file


def train(folder: Path, *flags: str) -> dict[int, float]:
    """The losses of a run, by step."""
    common = ["--data.source", "a.jsonl", "--data.tokenizer", "tokenizer.json", "--data.documents", "pack"]
    common += ["--data.cache", "cache", "--log.dir", "runs", "--train.device", "cpu", "--train.seq_len", "64"]
    done = pipeloom("train", "tiny", *common, *BRIEF, *flags, folder=folder)
    assert done.returncode == 0, done.stderr
    assert 'field "text": 120 documents' in done.stdout
    assert "% full" in done.stdout
    assert "nats per token" in done.stdout
    newest = max((folder / "runs").iterdir(), key=lambda path: path.stat().st_mtime)
    records = [json.loads(line) for line in (newest / "log.jsonl").read_text().splitlines()]
    return {record["step"]: record["loss"] for record in records if record["event"] == "step"}


def test_a_run_on_packed_documents_is_resumed_bit_by_bit(tmp_path: Path) -> None:
    tokenizer_file(tmp_path / "tokenizer.json")
    json_lines(tmp_path / "a.jsonl", ({"text": text} for text in documents()))
    whole = train(tmp_path, "--checkpoint.every", "2", "--checkpoint.keep", "0")
    (run,) = (tmp_path / "runs").iterdir()
    resumed = train(tmp_path, "--checkpoint.resume", str(run / "step-000002"))
    assert sorted(whole) == [1, 2, 3, 4]
    assert {step: resumed[step] for step in (3, 4)} == {step: whole[step] for step in (3, 4)}
