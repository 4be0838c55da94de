"""Training as a whole: the command, its losses bit by bit, its end, and a rank's steps against one process."""

from __future__ import annotations

import json
import math
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from commands import pipeloom
from pipeloom.config import load_layout
from pipeloom.measure.build import build_pipeline
from pipeloom.schedule.channels import size_words
from pipeloom.train.data.batches import windows_of
from pipeloom.train.data.tokenizers import ByteTokenizer
from pipeloom.train.hub.generate import generate
from pipeloom.train.loop import Trainer
from pipeloom.train.report.verify import make_batch
from processes import run_ranks

CPU = torch.device("cpu")
TEXT = "".join(f"def f{number}(x):\n    return x + {number}\n" for number in range(400))


def context(rank: int = 0, stop: bool = False) -> Any:
    return SimpleNamespace(rank=rank, device=CPU, flags=int(stop))


def train(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """`pipeloom train tiny` on a small text, its runs below `folder`."""
    source = folder / "text.py"
    source.write_text(TEXT)
    return pipeloom("train", "tiny", "--data.source", str(source), "--log.dir", str(folder / "runs"), *flags)


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    (log,) = (folder / "runs").glob("*/log.jsonl")
    return [event for event in map(json.loads, log.read_text().splitlines()) if event["event"] == kind]


@pytest.mark.core
def test_two_runs_are_equal_bit_by_bit_and_tell_what_they_did(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    for folder in (first, second):
        folder.mkdir()
        done = train(folder, "--train.steps", "6", "--sample.tokens", "20")
        assert done.returncode == 0, done.stderr
    assert events(first, "step") == events(second, "step")
    assert [event["step"] for event in events(first, "step")] == [1, 2, 3, 4, 5, 6]
    assert events(first, "held-out") == events(second, "held-out")
    assert events(first, "sample") == events(second, "sample")
    held_out = events(first, "held-out")[0]
    assert abs(held_out["before"] - math.log(256)) < 0.5
    assert held_out["after"] < held_out["before"]
    shown = re.search(r"^held-out loss: ([\d.]+) nats per byte", done.stdout, re.MULTILINE)
    assert shown is not None
    assert float(shown[1]) == pytest.approx(held_out["after"], abs=1e-4)
    assert re.search(r"\nbubble rate +0\.\d+ +0\.\d+ +0\.\d+\n", done.stdout)
    assert [line for line in done.stdout.splitlines() if len(line) > 80 and "/" not in line] == []
    paths = [re.search(rf"^{word}: +(\S+)", done.stdout, re.MULTILINE) for word in ("log", "trace", "svg")]
    assert all(match is not None and Path(match[1]).is_file() for match in paths)
    (bytes_,) = events(first, "bytes")
    assert bytes_["measured"] == pytest.approx(bytes_["predicted"], rel=0.03)  # whether the device is named or not
    sizes = zip(*(bytes_[name] for name in ("measured", "predicted")), strict=True)
    (most, expected), worst = max((size, rank) for rank, size in enumerate(sizes))
    words = f"at most {size_words(most)}, on rank {worst} (predicted {size_words(expected)})"
    assert f"bytes at the peak: {words}\n" in done.stdout
    (traced,) = first.glob("runs/*/timelines.json")
    assert len(json.loads(traced.read_text())["timelines"]) == 5  # without the second, whose bytes were counted
    bubble = events(first, "bubble")[0]
    assert 0 <= bubble["simulated"] < 1  # either may be the larger in a step of a few milliseconds
    assert 0 <= bubble["measured"] < 1
    (prediction,) = events(second, "prediction")
    step = prediction["step, s"]
    assert step["measured"] == events(second, "bubble")[0]["makespan_measured"]
    assert sum(prediction["causes"].values()) == pytest.approx(step["measured"] - step["predicted"])
    assert prediction["bytes"]["measured"] == max(bytes_["measured"])
    assert ("largest cause of error: " in done.stdout) <= ("waits, " not in prediction["largest_cause"])
    assert "\npredicted: times from FLOPs at the measured speed\n" in done.stdout
    (page,) = first.glob("runs/*/timeline.html")
    assert "predicted: " in page.read_text()


def test_a_run_that_diverges_says_so(tmp_path: Path) -> None:
    done = train(tmp_path, "--train.steps", "50", "--optimizer.lr", "1e30", "--optimizer.min_lr", "1e30")
    assert done.returncode == 1
    assert re.search(r"step \d+: .*training diverged: use a smaller optimizer\.lr", done.stderr)
    assert "Traceback" not in done.stderr
    assert done.stderr.endswith("pipeloom: the ranks failed together: exit code 1\n")
    (ended,) = tmp_path.glob("runs/*/exit.json")
    assert json.loads(ended.read_text())["ranks"] == []


def test_one_rank_learns_a_text() -> None:
    layout = load_layout(
        "tiny", {"parallel.pp": 1, "schedule.name": "1f1b", "train.steps": 60, "optimizer.lr": 1e-2, "log.every": 20}
    )
    pipeline = build_pipeline(layout, CPU)
    trainer = Trainer(layout.config, pipeline, context(), None)
    text = ByteTokenizer().encode("abcdefgh" * 40)
    held_out = [windows_of(text, 16, "text").random_rows(4, 1, 0)]
    before = trainer.held_out_loss(held_out)
    trainer.train(text)
    after = trainer.held_out_loss(held_out)
    assert abs(before - math.log(256)) < 0.5
    assert after < 0.2
    assert len(trainer.log.traces) == 3
    prompt = list(b"abc")
    written = generate(pipeline, ByteTokenizer(), prompt, 160, 16, seed=0)
    assert len(written) == 3 + 160
    assert "abcdefghabcdefgh" in written
    assert generate(pipeline, ByteTokenizer(), prompt, 160, 16, seed=0) == written


def stop_of(rank: int) -> bool:
    layout = load_layout("tiny")
    pipeline = build_pipeline(layout, CPU)
    outcome = Trainer(layout.config, pipeline, context(rank, stop=rank == 1), None).step(make_batch(layout), 1e-3)
    pipeline.close()
    return bool(outcome.flags)


def test_all_ranks_stop_when_one_was_told_to() -> None:
    assert run_ranks(stop_of, 2) == [True, True]
