"""`train --dry-run`: what is refused before a start is refused, all else is printed, and nothing is left behind."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import pipeloom.train.observers  # noqa: F401  # imports torch here, not in a test's call
from pipeloom.cli import app, train
from pipeloom.cli.dry_run import expected_timeline, rank_table
from pipeloom.config import load_layout
from pipeloom.errors import CapacityError, ConfigError, UsageError
from pipeloom.plan import load_device
from pipeloom.plan.memory import RankMemory
from pipeloom.plan.report import memory_lines
from pipeloom.plan.run import predicted, rank_parameters
from pipeloom.schedule.channels import size_words
from pipeloom.shapes.layers import parameter_count
from pipeloom.shapes.mesh import MeshShape
from pipeloom.train.checkpoint.manifest import Manifest
from pipeloom.train.checkpoint.save import write_alone

H100 = load_device("h100")


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
        " peak\n0  ",
        "learning rate (wsd): step 1 ",
        "around the steps, in this order:\n  record, and bad steps  every step\n  replica check ",
        "\n  checkpoint             every 5 steps, on SIGUSR1\n",
        "every 5 steps and at the end",
        "dry run: 2 workers would start",
    ):
        assert words in shown, words
    heads = next(line.split() for line in shown.splitlines() if line.startswith("rank ") and "params" in line)
    explained = " ".join(shown.split("params: parameters; ")[1].split("\nlearning rate")[0].split())
    assert ["rank", "params", *(each.split(": ")[0] for each in explained.split("; ")), "peak"] == heads
    assert not (tmp_path / "runs").exists()


def test_the_start_says_the_rate_and_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, "--checkpoint.resume", "auto")
    rate = "learning rate 0.003 after 2 steps (auto: for a new model of this size); a checkpoint that is resumed keeps its own"
    assert rate in " ".join(capsys.readouterr().out.split())
    for steps, words in ((0, "0.003 (auto"), (1, "0.003 after 1 step (auto")):
        run(tmp_path, "--optimizer.warmup_steps", str(steps))
        assert f"learning rate {words}" in capsys.readouterr().out
    run(tmp_path, "--optimizer.lr", "0.1")
    assert "learning rate 0.1" not in capsys.readouterr().out


def test_a_plan_without_data_is_described_and_not_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "start_workers", lambda *_: pytest.fail("a worker was started"))
    assert run(tmp_path, "--data.source", "") == 0
    assert 'data.source = "": a run needs data: --data.source FILE' in capsys.readouterr().out
    with pytest.raises(
        ConfigError, match=r'data\.source = "": a plan does not know your data; nearest: --data\.source FILE'
    ):
        app(["train", "tiny", "--data.source", ""], standalone_mode=False)


def test_any_model_is_described_on_a_laptop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither this machine's memory, nor its devices, packages or variables count: 4 TB of a model, for 64 workers."""
    monkeypatch.setattr("pipeloom.train.workers.preflight.memory_of_machine", lambda: 8 * 2**30)
    sizes = {"vocab_size": 200_000, "hidden_size": 16384, "num_attention_heads": 128, "num_key_value_heads": 8}
    flags = [f"--model.{key}={size}" for key, size in sizes.items()] + ["--model.num_hidden_layers=64"]
    flags += ["--parallel.pp=16", "--parallel.tp=4", "--parallel.dp=-1", "--train.seq_len=256", "--train.device=cuda"]
    monkeypatch.setattr(train, "missing_of_trainer", lambda: ["torch"])
    assert run(tmp_path, *flags, "--schedule.name=1f1b", "--train.dtype=bfloat16", "--memory=200") == 0
    out = capsys.readouterr().out
    assert " peak\n0 " in out
    assert re.search(r"step on h100: [\d.]+ to [\d.]+ s", out)
    assert "files were not checked" in out
    assert "dry run: 64 workers would start" in out


def test_a_run_that_does_not_fit_ends_with_the_closest_one_that_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "missing_of_trainer", lambda: ["torch"])
    flags = ["--model.preset=llama3-8b", "--parallel.pp=2", "--parallel.dp=4", "--schedule.name=1f1b"]
    flags += ["--schedule.microbatches=16", "--train.global_batch_size=64", "--train.seq_len=4096"]
    with pytest.raises(CapacityError) as error:
        run(tmp_path, *flags, "--train.dtype=bfloat16", "--device=h100")
    words = str(error.value)
    short = r"rank 0 needs (\S+) GiB, (\S+) GiB more than there are; the closest layout that fits, with (\S+) GiB: "
    match = re.match(short, words)
    assert match is not None, words
    need, missing, enough = map(float, match.groups())
    assert need - missing == pytest.approx(79.1, abs=0.6), "three digits are printed"
    assert enough < need - missing
    assert words.endswith(": --parallel.zero 1")
    assert "dry run: 8 workers would start" in capsys.readouterr().out


def test_missing_bytes_are_in_a_unit_that_shows_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "missing_of_trainer", lambda: ["torch"])
    with pytest.raises(CapacityError, match=r"rank \d needs \d+ KiB, \d+ KiB more than there are; no layout"):
        run(tmp_path, "--memory=100KiB")


def test_flags_of_a_dry_run_need_it(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--device and --memory are for --dry-run"):
        app(["train", "tiny", "--memory=3"], standalone_mode=False)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_zero_divides_what_it_names(zero: int) -> None:
    """By the replicas: the optimizer's state, from 2 on the summed gradients, from 3 on the weights."""
    keys = {"parallel.dp": 4, "train.global_batch_size": 20, "schedule.name": "1f1b", "train.dtype": "bfloat16"}
    before, after = (predicted(load_layout("tiny", keys | {"parallel.zero": level}), H100) for level in (0, zero))
    for one, other in zip(before.ranks, after.ranks, strict=True):
        for level, name in ((1, "optimizer"), (2, "gradients"), (3, "parameters")):
            assert getattr(one, name) / getattr(other, name) == pytest.approx(4 if level <= zero else 1), name
        whole = one.parameters * (zero == 3) + one.gradients * (zero >= 2)  # of a stage, until gradients are summed
        assert other.gathered - one.gathered == pytest.approx(whole)
    assert after.peak < before.peak
    assert after.step is not None


def test_what_cannot_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.seq_len"):
        run(tmp_path, "--train.device", "cpu", "--train.seq_len", "1000000")


def test_rows_of_conversations_count_as_packed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chats, shown = tmp_path / "chats.jsonl", []
    chats.write_text('{"prompt": "warp and weft", "completion": "a loom"}\n' * 400)
    for documents in ("auto", "pack"):
        flags = ["--data.source", str(chats), "--data.documents", documents, "--data.cache", str(tmp_path / "cache")]
        app(["train", "tiny", *flags, "--train.device", "cpu", "--dry-run"], standalone_mode=False)
        shown.append(capsys.readouterr().out.partition(" peak\n")[2])
    assert shown[0] == shown[1] != ""


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
        {"parallel.vocabulary": "pp", "model.vocab_size": 1025},
    ],
)
def test_ranks_hold_the_whole_model(flags: dict[str, object]) -> None:
    layout = load_layout("tiny", flags)
    held = sum(rank_parameters(layout))
    assert max(rank_parameters(layout)) < 0.8 * held
    assert held == parameter_count(layout.config.model.shape()) * len(layout.schedule.routes)
    timeline = expected_timeline(layout)
    assert timeline.schedule == layout.schedule
    assert min(timeline.busy) > 0.3 * max(timeline.busy)
    assert 0 <= timeline.bubble_rate < 1


def test_columns_without_bytes_on_any_rank_are_left_out() -> None:
    ranks = [
        replace(RankMemory(*[0.0] * 9, "0F0"), parameters=1024.0),
        replace(RankMemory(*[0.0] * 9, "0F0"), buffers=2048.0),
    ]
    head, *_, last = memory_lines(ranks, size_words, "peak")
    assert last == "params: parameters; buffers: of messages and libraries"
    rows = [line.split()[0] for line in memory_lines(ranks * 10)[1:-1]]
    assert rows == ["0", "1", "2", "10", "18", "19"]
    assert head.split() == ["rank", "params", "buffers", "peak"]


def test_all_but_a_path_is_of_80_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "--parallel.tp", "2", "--parallel.dp", "2", "--schedule.microbatches", "3") == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line for line in shown if len(line) > 80 and str(tmp_path) not in line] == []
    assert any(line.startswith("    to each stage's FLOPs") for line in shown)


@pytest.mark.parametrize("command", ["train", "verify", "rehearse"])
def test_no_task_of_several_starts_a_run_of_its_own(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "4")
    words = ["1f1b", "--ranks", "2", "--microbatches", "2"] if command == "rehearse" else ["tiny"]
    with pytest.raises(UsageError, match=r"^SLURM_NTASKS is 4 .* srun .* torchrun .* -m pipeloom " + command):
        app([command, *words], standalone_mode=False)


def test_a_section_is_no_option(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"'--model'; it is a section: give one of its keys, such as --model\.source$"):
        run(tmp_path, "--model", "folder")


def test_checkpoints_that_a_run_could_not_begin_with_are_refused(pipeloom: Any, tmp_path: Path) -> None:
    wide = {"model.model.embed_tokens.weight": torch.zeros(256, 8), "optimizer.x.exp_avg": torch.zeros(2)}
    holds = Manifest(1, ("model", "optimizer", "extra"), {}, {}, {})
    path = write_alone(tmp_path / "wide", holds, [wide], {"config": {"optimizer": {"name": "adamw"}}})
    cut = write_alone(tmp_path / "cut", holds, [wide], {})
    file = cut / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    (tmp_path / "empty").mkdir()
    for words, code, reason in (
        (f"--checkpoint.resume {tmp_path / 'empty'}", 5, "the checkpoint is not complete"),
        (f"--model.weights {tmp_path / 'empty'}", 5, "holds no complete checkpoint"),
        (f"--checkpoint.resume {cut}", 5, "bytes, found"),
        (f"--checkpoint.resume {path} --optimizer.name sgd", 5, 'it holds the state of optimizer.name = "adamw"'),
        (f"--checkpoint.resume {path} --model.tie_word_embeddings true", 5, "expected shape [256, 32], found [256, 8]"),
        (f"--checkpoint.resume {path} --model.hidden_size 8", 5, "the checkpoint holds no 'model.layers."),
        (f"--checkpoint.dir {tmp_path / 'wide'}", 2, "new ones would be mixed with"),
        ("--data.eos x", 2, 'data.eos = "x": bytes have no such token'),
        ("--data.bos nan", 2, 'data.bos = "nan": bytes have no such token'),
    ):
        ended = pipeloom(f"train tiny --dry-run --model.hidden_size 32 {words}")
        assert (ended.code, reason in " ".join(ended.err.split())) == (code, True), (words, ended)
    assert pipeloom(f"train tiny --dry-run --checkpoint.dir {tmp_path / 'empty'}").code == 0
    assert not any((tmp_path / "empty").iterdir())
