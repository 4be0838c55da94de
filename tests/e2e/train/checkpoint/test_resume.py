"""A run that is killed or told to stop goes on where it was: `pipeloom train` as a user runs it."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from checkpoint_runs import command, runs, steps_of, wait_for, words
from checkpoint_states import contents
from commands import Command
from corpora import documents, json_lines
from pipeloom.train import loop
from pipeloom.train.checkpoint import save
from pipeloom.train.checkpoint.folder import complete
from pipeloom.train.loop import Trainer
from pipeloom.train.workers.context import SAVE, Requests

MOE = (
    *("--model.num_experts", "4", "--model.router", "sigmoid", "--parallel.pp", "1", "--parallel.dp", "2"),
    *("--parallel.ep", "2", "--schedule.name", "1f1b", "--schedule.microbatches", "4"),
)

PLANNED = (
    *("--data.source", "{documents}", "--data.batching", "planned", "--data.cache", "{documents}.cache"),
    *("--train.seq_len", "64", "--train.global_batch_size", "8", "--schedule.name", "zbv"),
)


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param((), id="dense", marks=pytest.mark.full),
        pytest.param(MOE, id="moe"),
        pytest.param(PLANNED, id="planned"),
    ],
)
def test_four_and_four_steps_are_eight(flags: tuple[str, ...], tmp_path: Path) -> None:
    """Killed after a checkpoint, resumed: the files of the last step are those of an undisturbed run, byte for byte."""
    source = json_lines(tmp_path / "documents.jsonl", ({"text": text} for text in documents(60)))
    flags = tuple(flag.format(documents=source) for flag in flags)
    base = ("--model.dropout", "0.1", "--train.steps", "8", "--checkpoint.every", "4", *flags)
    straight = command(tmp_path, "straight", *base)
    assert straight.returncode == 0, straight.stderr
    killed = command(tmp_path, "again", *base, "--debug.fault", "kill:0:6")
    assert killed.returncode == 6, killed.stderr
    (folder,) = runs(tmp_path / "again")
    assert [step for step, _ in complete(folder)] == [4]
    resumed = command(tmp_path, "again", *base, "--checkpoint.resume", "auto")
    assert resumed.returncode == 0, resumed.stderr
    assert f"resumed after step 4 from {folder / 'step-000004'}" in " ".join(resumed.stdout.split())
    took = re.search(r"\((\d+\.\d) s to load, (\d+\.\d) s since the worker's start\)", resumed.stdout)
    assert took is not None
    assert float(took[1]) <= float(took[2]) < 300
    assert runs(tmp_path / "again") == [folder]  # in the same folder
    assert json.loads((folder / "exit.json").read_text())["exit_code"] == 0
    (other,) = runs(tmp_path / "straight")
    wanted, found = contents(other / "step-000008"), contents(folder / "step-000008")
    assert wanted.keys() == found.keys()
    assert [key for key, value in wanted.items() if not torch.equal(value, found[key])] == []
    assert steps_of(folder)[-4:] == steps_of(other)[-4:]
    assert [step for step, _ in steps_of(folder)] == [*range(1, 7), *range(5, 9)]


def test_a_resumed_run_keeps_its_learning_rate(tmp_path: Path) -> None:
    """Where nobody names a rate, the checkpoint's is taken, and the last one."""
    constant = ("--optimizer.lr_schedule", "constant")
    rates = ("--optimizer.lr", "0.01", "--optimizer.min_lr", "0.005")
    assert command(tmp_path, "run", "--train.steps", "2", *constant, *rates).returncode == 0
    resumed = command(tmp_path, "run", "--train.steps", "4", "--checkpoint.resume", "auto", *constant)
    assert resumed.returncode == 0, resumed.stderr
    assert "changed since the checkpoint" not in resumed.stdout
    (folder,) = runs(tmp_path / "run")
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [record["lr"] for record in log if record["event"] == "step"] == [0.005, 0.01, 0.01, 0.01]
    written = (folder / "config.toml").read_text()
    assert f"lr = 0.01  # {folder / 'step-000002'}" in written
    assert f"min_lr = 0.005  # {folder / 'step-000002'}" in written


LEVELS = {
    0: (),
    1: ("--parallel.zero", "1"),
    2: ("--parallel.zero", "2", "--schedule.transforms", '["reduce-gradients"]'),
    3: ("--parallel.zero", "3"),
}


@pytest.mark.full
@pytest.mark.parametrize(("killed_at", "resumed_at"), [(3, 1), (1, 3), (3, 2)])
def test_a_killed_run_resumes_at_another_zero_level(killed_at: int, resumed_at: int, tmp_path: Path) -> None:
    """A process of one level is killed, and a run of another level goes on, bitwise as a run without ZeRO."""
    base = (
        *("--parallel.dp", "2", "--parallel.pp", "1", "--schedule.name", "interleaved", "--schedule.chunks", "2"),
        *("--schedule.microbatches", "2", "--optimizer.clip_norm", "0.5"),
        *("--train.steps", "4", "--checkpoint.every", "2"),
    )
    straight = command(tmp_path, "straight", *base)
    assert straight.returncode == 0, straight.stderr
    killed = command(tmp_path, "again", *base, *LEVELS[killed_at], "--debug.fault", "kill:0:3")
    assert killed.returncode == 6, killed.stderr
    (folder,) = runs(tmp_path / "again")
    assert [step for step, _ in complete(folder)] == [2]
    resumed = command(tmp_path, "again", *base, *LEVELS[resumed_at], "--checkpoint.resume", "auto")
    assert resumed.returncode == 0, resumed.stderr
    (other,), folder = runs(tmp_path / "straight"), runs(tmp_path / "again")[-1]
    wanted, resulting = contents(other / "step-000004"), contents(folder / "step-000004")
    assert wanted.keys() == resulting.keys()
    assert [key for key, value in wanted.items() if not torch.equal(value, resulting[key])] == []


@pytest.mark.core
def test_sigterm_saves_and_the_next_run_goes_on_with_the_next_batch(tmp_path: Path) -> None:
    run = Command(words(tmp_path, "a", "--train.steps", "100000", "--log.every", "1000"))
    wait_for(lambda: any(len(steps_of(folder)) > 3 for folder in runs(tmp_path / "a")), run)
    run.send_signal(signal.SIGUSR1)
    (folder,) = runs(tmp_path / "a")
    wait_for(lambda: len(complete(folder)) == 1, run)
    (folder / "save").write_text("")
    wait_for(lambda: len(complete(folder)) == 2 and not (folder / "save").exists(), run)
    run.send_signal(signal.SIGTERM)
    try:
        _, err = run.communicate(timeout=600)
    finally:
        run.kill()
    assert run.returncode == 75, err
    asked, noted, last = (step for step, _ in reversed(complete(folder)))
    assert asked < noted <= last == len(steps_of(folder))
    assert f"stopped after step {last} of 100000, as requested; saved as {folder / f'step-{last:06d}'}" in err
    assert json.loads((folder / "exit.json").read_text())["exit_code"] == 75
    assert not list(folder.glob(".*"))
    again = command(tmp_path, "a", "--train.steps", str(last + 2), "--checkpoint.resume", "auto")
    assert again.returncode == 0, again.stderr
    assert [step for step, _ in steps_of(folder)] == [*range(1, last + 3)]


def test_who_asks_while_a_checkpoint_is_saved_gets_another_one(tmp_path: Path) -> None:
    """The one being saved may be seen, complete, before the trainer goes on."""
    requests, file = Requests(SAVE), tmp_path / "save"
    file.write_text("")
    seen: list[tuple[bool, bool]] = []

    def save() -> None:
        seen.append((bool(requests.flags & SAVE), file.exists()))
        requests.note(signal.SIGUSR1)
        file.write_text("")

    context, checkpoints = SimpleNamespace(requests=requests), SimpleNamespace(save=save)
    trainer: Any = SimpleNamespace(_context=context, _save_file=file, checkpoints=checkpoints)
    Trainer.save(trainer, SAVE)
    assert seen == [(False, False)]
    assert requests.flags & SAVE
    assert file.exists()


POINTS: dict[str, tuple[Any, str, bool]] = {
    # where a signal comes in rank 0: (owner, function to wrap, whether a checkpoint must be there afterwards)
    "evaluation": (Trainer, "held_out_loss", False),
    "save": (save, "publish", True),
    "asynchronous save": (save, "publish", True),
    "start-up": (loop, "build_pipeline", False),
}


@pytest.mark.parametrize(
    ("point", "number", "code"),
    [
        pytest.param("evaluation", "SIGTERM", 75, marks=pytest.mark.full),
        pytest.param("save", "SIGTERM", 75, marks=pytest.mark.full),
        pytest.param("save", "SIGINT", 130, marks=pytest.mark.full),
        ("asynchronous save", "SIGTERM", 75),
        pytest.param("asynchronous save", "SIGINT", 130, marks=pytest.mark.full),
        ("start-up", "SIGTERM", 75),
    ],
)
def test_a_signal_at_any_moment(
    point: str, number: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, function, saved = POINTS[point]
    plain = getattr(owner, function)

    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        if os.environ.get("RANK") == "0":
            setattr(owner, function, plain)  # once: a second signal would end the run at once
            os.kill(os.getppid(), getattr(signal, number))
            time.sleep(0.5)
        return plain(*arguments, **keywords)

    monkeypatch.setattr(owner, function, wrapped)
    asynchronous = point == "asynchronous save"
    flags = ("--train.steps", "1000", "--checkpoint.every", "2", "--checkpoint.asynchronous", str(asynchronous).lower())
    done = command(tmp_path, "a", *flags)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    (folder,) = runs(tmp_path / "a")
    steps = [step for step, _ in complete(folder)]
    if asynchronous:  # training has gone on beside the writer
        assert f"stopped after step {steps[0]} of 1000" in done.stderr
        assert len(steps) >= 2
    else:
        assert steps == ([3, 2] if saved else [])  # it goes on to the end of a step
    assert not list(folder.glob(".*"))


def test_an_invalid_newest_checkpoint_is_named_and_the_one_before_it_taken(tmp_path: Path) -> None:
    base = ("--train.steps", "4", "--checkpoint.every", "1")
    assert command(tmp_path, "a", *base).returncode == 0
    (folder,) = runs(tmp_path / "a")
    assert [step for step, _ in complete(folder)] == [4, 3, 2]  # checkpoint.keep is 3
    file = folder / "step-000004/rank-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-9] ^= 4
    file.write_bytes(data)
    exact = command(tmp_path, "a", *base, "--checkpoint.resume", "4")
    assert exact.returncode == 5
    (line,) = [line for line in [" ".join(exact.stderr.split())] if "expected" in line]
    assert f"{file}: expected SHA-256" in line
    assert "Traceback" not in exact.stderr
    absent = command(tmp_path, "a", *base, "--checkpoint.resume", "1")
    assert absent.returncode == 5
    assert "has no complete checkpoint of that step; it has 2, 3, 4" in " ".join(absent.stderr.split())
    again = command(tmp_path, "a", *base, "--checkpoint.resume", "auto")
    assert again.returncode == 0, again.stderr
    said = " ".join(again.stdout.split())
    assert f"{file}: expected SHA-256" in said
    assert "taking the one before it" in said
    assert f"resumed after step 3 from {folder / 'step-000003'}" in said
    other = command(tmp_path, "b", *base, "--checkpoint.dir", str(folder))
    assert other.returncode == 2
    assert "it has checkpoints up to step 4, which new ones would be mixed with" in " ".join(other.stderr.split())


def test_a_failed_run_is_started_again_by_itself(tmp_path: Path) -> None:
    base = ("--train.steps", "6", "--checkpoint.every", "2")
    done = command(tmp_path, "a", *base, "--train.restarts", "2", "--debug.fault", "kill:1:4")
    assert done.returncode == 0, done.stderr
    assert "restart 1 of 2" in done.stderr
    (folder,) = runs(tmp_path / "a")
    # the fault is made in step 4 of any attempt, so the first one ends there and the second begins behind it
    assert [step for step, _ in steps_of(folder)] == [1, 2, 3, 4, 5, 6]
