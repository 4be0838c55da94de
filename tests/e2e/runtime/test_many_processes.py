"""8 and 16 processes: expert-parallel ranks, pipeline ranks and both, against one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paths import ROOT

TRAIN = ["train", "tiny", "--data.source", "text.py", "--log.dir", "runs", "--train.steps", "3"]
MODEL = {
    "model.num_hidden_layers": 8,
    "model.num_experts": 16,
    "model.aux_loss_coef": 0.0,
    "train.global_batch_size": 32,
    "schedule.name": "1f1b",
}
LAYOUTS = {
    "one process": {"parallel.pp": 1, "schedule.microbatches": 32},
    "ep 8": {"parallel.pp": 1, "parallel.dp": 8, "parallel.ep": 8, "schedule.microbatches": 4},
    "ep 16": {"parallel.pp": 1, "parallel.dp": 16, "parallel.ep": 16, "schedule.microbatches": 2},
    "pp 8": {"parallel.pp": 8, "schedule.microbatches": 32},
    "pp 8 with ep 2": {"parallel.pp": 8, "parallel.dp": 2, "parallel.ep": 2, "schedule.microbatches": 16},
}


def pipeloom(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "pipeloom", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=folder, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.full
def test_gradients_equal_those_of_one_process() -> None:
    report = json.loads(pipeloom(ROOT, "verify", "--matrix", "tests/data/verify_many.toml", "--json"))
    assert len(report["layouts"]) == 4
    assert all(layout["worst_error"] <= 1e-5 for layout in report["layouts"])


@pytest.mark.full
@pytest.mark.timeout(1000)
def test_training_has_the_losses_of_one_process(tmp_path: Path) -> None:
    losses = {}
    for name, keys in LAYOUTS.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "text.py").write_text("".join(f"def f{n}(x):\n    return x + {n}\n" for n in range(400)))
        pipeloom(folder, *TRAIN, *(str(word) for key, value in (MODEL | keys).items() for word in (f"--{key}", value)))
        (log,) = folder.glob("runs/*/log.jsonl")
        steps = [event for event in map(json.loads, log.read_text().splitlines()) if event["event"] == "step"]
        losses[name] = [step["loss"] for step in steps]
        assert losses[name] == pytest.approx(losses["one process"], rel=1e-4), name
    assert len(losses["one process"]) == 3
