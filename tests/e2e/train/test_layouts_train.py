"""Training in different layouts of the same run: bit by bit again, and equal to one process."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_runs import BRIEF
from commands import pipeloom
from pipeloom.config import Layout, load_layout
from pipeloom.measure.build import build_pipeline
from pipeloom.train.data.batches import Batches
from pipeloom.train.data.tokenizers import ByteTokenizer
from pipeloom.train.loop import Trainer
from processes import run_ranks
from run_notes import context

CPU = torch.device("cpu")
TEXT = ByteTokenizer().encode("".join(f"def f{number}(x):\n    return x + {number}\n" for number in range(100)))
STEPS = 3
ONE = {
    "parallel.pp": 1,
    "schedule.name": "1f1b",
    "schedule.microbatches": 4,
    "train.global_batch_size": 8,
    "train.steps": STEPS,
    "model.num_key_value_heads": 4,
    "model.tie_word_embeddings": True,
    "optimizer.clip_norm": 1.0,
}
REPLICAS: dict[str, dict[str, Any]] = {
    "dp 2": {"parallel.dp": 2, "schedule.microbatches": 2},
    "zero1": {"parallel.dp": 2, "schedule.microbatches": 2, "optimizer.zero1": True},
    "gathers": {
        "parallel.dp": 2,
        "schedule.microbatches": 2,
        "optimizer.zero1": True,
        "schedule.transforms": ["shard=1"],
    },
    "no barrier": {"parallel.dp": 2, "schedule.microbatches": 2, "optimizer.barrier": False},
    "tp 2": {"parallel.tp": 2, "parallel.sp": True},
    "cp 2": {"parallel.cp": 2},
    "vocabulary": {"parallel.pp": 2, "parallel.vocabulary": "pp"},
}


def layout_of(keys: dict[str, Any]) -> Layout:
    return load_layout("tiny", keys)


def train(rank: int, keys: dict[str, Any]) -> tuple[list[tuple[float, float]], str]:
    """(loss, norm) of each step, a held-out loss, and a fingerprint of this rank's weights after the steps."""
    layout = layout_of(keys)
    pipeline = build_pipeline(layout, CPU)
    trainer = Trainer(layout.config, pipeline, context(rank), None)
    pipeline.train()
    place, replicas = pipeline.mesh.place, pipeline.mesh.shape.dp
    batches = Batches(TEXT, layout.config, replicas)
    steps = []
    for step in range(STEPS):
        batch = batches.of_step(step).part(place.dp, replicas)
        if layout.config.optimizer.barrier:
            outcomes = [trainer.step(batch, 1e-2)]
        else:
            outcomes = trainer.step_early(batch, 1e-2, step + 1 == STEPS)
        steps += [(outcome.loss, outcome.norm) for outcome in outcomes]
    steps.append((trainer.held_out_loss([batches.of_step(STEPS)]), 0.0))
    digest = hashlib.sha256()
    for _, parameter in sorted(pipeline.named_parameters()):
        digest.update(parameter.detach().float().numpy().tobytes())
    pipeline.close()
    return steps, digest.hexdigest()


def all_replicas(rank: int) -> dict[str, Any]:
    return {name: train(rank, {**ONE, **keys}) for name, keys in REPLICAS.items()}


def test_every_layout_trains_as_one_process() -> None:
    """The same global batches, clipped by the same norms; with and without sharded optimizer state, and no barrier."""
    want, _ = train(0, ONE)
    for found in run_ranks(all_replicas, 2):
        for name, (steps, _) in found.items():
            assert torch.allclose(torch.tensor(steps), torch.tensor(want), rtol=2e-5), name
        assert found["gathers"] == found["zero1"]  # bitwise


@pytest.mark.parametrize("sharded", [False, True])
def test_shares_over_all_ranks_of_a_replica_count_once_in_the_norm(sharded: bool) -> None:
    keys = {
        **ONE,
        "optimizer.zero1": sharded,
        "parallel.pp": 2,
        "parallel.tp": 2,
        "parallel.vocabulary": "pp",
        "model.tie_word_embeddings": False,
    }
    want, _ = train(0, {**ONE, "model.tie_word_embeddings": False})
    for steps, _ in run_ranks(train, 4, keys):
        assert torch.allclose(torch.tensor(steps), torch.tensor(want), rtol=2e-5)


def bfloat(rank: int) -> Any:
    keys = {**ONE, "parallel.dp": 2, "schedule.microbatches": 2, "train.dtype": "bfloat16"}
    return [train(rank, {**keys, "optimizer.zero1": sharded}) for sharded in (False, True)]


def test_bfloat16_trains_close_to_float32() -> None:
    want, _ = train(0, ONE)
    for runs in run_ranks(bfloat, 2):
        for steps, _ in runs:
            assert torch.allclose(torch.tensor(steps), torch.tensor(want), rtol=3e-2)
        assert torch.allclose(torch.tensor(runs[0][0]), torch.tensor(runs[1][0]), rtol=1e-4)


def test_the_command_trains_on_four_workers_and_says_what_each_holds(tmp_path: Path) -> None:
    source = tmp_path / "text.py"
    source.write_bytes(bytes(TEXT.tolist()))
    axes = ["--parallel.pp", "1", "--parallel.dp", "2", "--parallel.tp", "2", "--train.global_batch_size", "12"]
    others = [
        "--schedule.name",
        "1f1b",
        "--schedule.microbatches",
        "2",
        "--train.steps",
        "2",
        "--data.source",
        str(source),
        "--log.dir",
        str(tmp_path / "runs"),
    ]
    done = pipeloom("train", "tiny", *axes, *others, *BRIEF)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "2 data-parallel replicas, each layer over 2 ranks, 4 workers" in lines[0]
    start = next(at for at, line in enumerate(lines) if line.startswith("rank  dp  tp  parameters"))
    rows = [line.split() for line in lines[start + 1 : start + 5]]
    assert [row[:3] for row in rows] == [[str(r), str(r // 2), str(r % 2)] for r in range(4)]
    assert all(len(line) <= 80 for line in lines[start : start + 5])
    assert any(line.startswith("step: 2/2") for line in lines)
