"""`train --dry-run`: what is refused before a start is refused, all else is printed, and nothing is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

import pipeloom.train.report.step_bytes  # noqa: F401  # imports torch here, not in a test's call
from pipeloom.cli import app, train
from pipeloom.cli.dry_run import expected_timeline, rank_table
from pipeloom.config import load_layout, parameter_count
from pipeloom.config.standing_bytes import rank_parameters
from pipeloom.errors import ConfigError
from pipeloom.mesh_shape import MeshShape


def run(folder: Path, *flags: str) -> object:
    text = folder / "text.txt"
    text.write_text("loom " * 4000)
    words = ["tiny", "--data.source", str(text), "--log.dir", str(folder / "runs"), "--dry-run", *flags]
    return app(["train", *words], standalone_mode=False)


def test_it_prints_the_run_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "start_workers", lambda *_: pytest.fail("a worker was started"))
    assert run(tmp_path, "--optimizer.lr_schedule", "wsd", "--checkpoint.every", "5", "--train.device", "cpu") == 0
    shown = capsys.readouterr().out
    for words in (
        "bubble rate",
        "bytes at the peak\n0  ",
        "learning rate (wsd): step 1 ",
        "around the steps, in this order:\n  record, and bad steps  every step\n  replica check ",
        "\n  checkpoint             every 5 steps, on SIGUSR1\n",
        "every 5 steps and at the end",
        "dry run: 2 workers would start",
    ):
        assert words in shown, words
    assert not (tmp_path / "runs").exists()


def test_any_model_is_described_on_a_laptop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither this machine's memory, nor its devices or variables count: 4 TB of a model with 200,000 tokens, for 64 workers."""
    monkeypatch.setattr("pipeloom.train.workers.preflight.memory_of_machine", lambda: 8 * 2**30)
    sizes = {"vocab_size": 200_000, "hidden_size": 16384, "num_attention_heads": 128, "num_key_value_heads": 8}
    flags = [f"--model.{key}={size}" for key, size in sizes.items()] + ["--model.num_hidden_layers=64"]
    flags += ["--parallel.pp=16", "--parallel.tp=4", "--parallel.dp=-1", "--train.seq_len=256", "--train.device=cuda"]
    assert run(tmp_path, *flags, "--schedule.name=1f1b", "--train.dtype=bfloat16") == 0
    out = capsys.readouterr().out
    assert "bytes at the peak\n0 " in out
    assert "dry run: 64 workers would start" in out


def test_what_cannot_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.seq_len"):
        run(tmp_path, "--train.device", "cpu", "--train.seq_len", "1000000")


def test_the_table_of_workers_follows_the_order() -> None:
    lines = rank_table(MeshShape(pp=2, dp=4, tp=1, ep=2, order="dp-pp-ep-tp"))
    assert lines[0] == "workers in the order dp-pp-ep-tp, the fastest axis first:"
    assert [line.split() for line in lines[1:]] == [
        ["dp", "0", "dp", "1", "dp", "2", "dp", "3"],
        ["ep", "0", "ep", "0", "ep", "1", "ep", "1"],
        ["pp", "0", "0", "1", "4", "5"],
        ["pp", "1", "2", "3", "6", "7"],
    ]
    assert rank_table(MeshShape(pp=4)) == []
    many = rank_table(MeshShape(pp=20, dp=4, tp=4))
    assert len(many) == 3 + 16 + 1
    assert max(map(len, many)) <= 85


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"schedule.name": "zbv", "schedule.microbatches": 4},
        {"schedule.name": "dualpipe", "schedule.microbatches": 4},
    ],
)
def test_ranks_hold_the_whole_model(flags: dict[str, object]) -> None:
    layout = load_layout("tiny", flags)
    held = sum(rank_parameters(layout))
    assert max(rank_parameters(layout)) < 0.8 * held
    assert held == parameter_count(layout.config.model) * len(layout.schedule.routes)
    timeline = expected_timeline(layout)
    assert timeline.schedule == layout.schedule
    assert min(timeline.busy) > 0.3 * max(timeline.busy)
    assert 0 <= timeline.bubble_rate < 1
