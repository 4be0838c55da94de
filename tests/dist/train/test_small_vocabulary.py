"""Vocabularies of fewer tokens than ranks: gradients, training, checkpoints and generation are those of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from checkpoint_states import TEXT, Run, layout_of
from commands import pipeloom
from pipeloom import checkpoint
from pipeloom.train.data.batches import Batches
from pipeloom.train.hub.generate import Sampling, extend
from processes import run_ranks

MATRIX = """
[[layout]]
parallel.pp = 2
parallel.tp = 2
parallel.vocabulary = "pp"
schedule.name = "zbv"
model.tie_word_embeddings = true
[[layout]]
parallel.pp = 4
parallel.vocabulary = "pp"
schedule.name = "1f1b"
schedule.transforms = ["vocabulary=two", "embedding"]
[[layout]]
parallel.tp = 4
parallel.sp = true
parallel.pp = 1
model.num_key_value_heads = 4
model.tie_word_embeddings = true
"""
LAYOUTS: list[dict[str, Any]] = [
    {"parallel__pp": 2, "parallel__tp": 2, "parallel__vocabulary": "pp"},
    {"parallel__tp": 4, "parallel__sp": True},
    {"parallel__pp": 4, "parallel__vocabulary": "pp"},
]


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    """A tokenizer of three words."""
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "c": 2}, "unk_token": "a"}}))
    return str(path)


def test_loss_and_every_gradient(tmp_path: Path, tokenizer: str) -> None:
    matrix = tmp_path / "matrix.toml"
    matrix.write_text(MATRIX)
    flags = ["--model.vocab_size", "3", "--data.tokenizer", tokenizer, "--train.label_smoothing", "0.1"]
    done = pipeloom("verify", "tiny", "--json", "--matrix", str(matrix), *flags)
    report = json.loads(done.stdout)
    assert done.returncode == 0, report
    assert [layout["passed"] for layout in report["layouts"]] == [True] * 3


def trained(rank: int, folder: str, layouts: list[dict[str, Any]], tokenizer: str) -> list[tuple[list[float], Any]]:
    """Steps and tokens of each layout, which continues the one before from its checkpoint."""
    results = []
    common: dict[str, Any] = {"model__dropout": 0.0, "model__num_key_value_heads": 4, "schedule__microbatches": 4}
    common |= {"model__tie_word_embeddings": True, "model__vocab_size": 3, "data__tokenizer": tokenizer}
    for at, keys in enumerate(layouts):
        run = Run(layout_of("one", **common, **keys, train__global_batch_size=8))
        run.batches = Batches(TEXT % 3, run.config, run.pipeline.mesh.shape.dp)
        if at:
            checkpoint.load(folder, run.pipeline, run.optimizer)
        losses = run.steps(2)
        run.pipeline.eval()
        results.append((losses, extend(run.pipeline, [[1, 2, 0], [2]], 4, Sampling(temperature=0))))
        checkpoint.save(folder, 2 * at + 2, run.pipeline, run.optimizer)
        run.pipeline.close()
    return results


def test_runs_continue_in_other_layouts_and_generate(tmp_path: Path, tokenizer: str) -> None:
    alone = trained(0, str(tmp_path / "one"), [{}] * len(LAYOUTS), tokenizer)
    assert len({str(tokens) for _, tokens in alone}) > 1
    for results in run_ranks(trained, 4, str(tmp_path / "four"), LAYOUTS, tokenizer):
        for (losses, tokens), (want, chosen) in zip(results, alone, strict=True):
            assert losses == pytest.approx(want, rel=1e-5)
            assert tokens == chosen
