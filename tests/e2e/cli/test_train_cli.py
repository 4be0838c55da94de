"""`pipeloom train` and `verify` before any worker starts: refusals, help, what is announced, and who starts whom."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from paths import DATA
from pipeloom.cli import app, train, verify, workers
from pipeloom.config.matrix import Matrix
from pipeloom.config.sections import SECTIONS
from pipeloom.errors import ConfigError, UsageError

pytestmark = pytest.mark.core
QUICK = DATA / "verify_quick.toml"


def pipeloom(*arguments: str, code: str = "") -> subprocess.CompletedProcess[str]:
    script = f"{code}\nfrom pipeloom.cli import main\nmain({list(arguments)!r})"
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What would have been started: (command, arguments, workers)."""
    calls: list[Any] = []

    def note(command: str, arguments: Any, world_size: int) -> int:
        calls.append((command, list(arguments), world_size))
        return 6

    monkeypatch.setattr(train, "start_workers", note)
    monkeypatch.setattr(workers, "start_workers", note)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return calls


def run(*words: str) -> Any:
    return app(words, standalone_mode=False)


def test_three_errors_at_once_are_printed_and_nothing_starts() -> None:
    done = pipeloom("train", "--train.stepz", "3", "--optimizer.lr", "fast", "--parallel.pp", "9")
    assert (done.returncode, done.stdout) == (2, "")
    assert "did you mean 'steps'?" in done.stderr
    assert 'optimizer.lr = "fast": it must be a number' in done.stderr
    words = "parallel.pp = 9: the model has 8 decoder layers, and each pipeline rank needs at least one"
    assert words in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_core_install_names_the_extra_and_starts_nothing() -> None:
    without_torch = """
import importlib.util, subprocess, sys
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name.split('.')[0] == 'torch' else real(name, package)
def refuse(*a, **k): raise AssertionError('a process was started')
subprocess.Popen = refuse
sys.modules['torch'] = None
"""
    for command in ("train", "verify"):
        done = pipeloom(command, code=without_torch)
        assert done.returncode == 2
        assert 'pip install -e ".[train]"' in " ".join(done.stderr.split())
        assert f"pipeloom {command} needs torch" in done.stderr
    shown = pipeloom("train", "--help", code=without_torch)
    assert shown.returncode == 0
    for section, model in SECTIONS.items():
        for key in model.model_fields:
            assert f"--{section}.{key} " in shown.stdout
    assert "(interleaved)" in shown.stdout
    section = pipeloom("train", "--help", "schedule", code=without_torch).stdout
    assert set(re.findall(r"^  --(\w+)\.", section, re.MULTILINE)) == {"schedule"}


def test_the_parent_never_imports_torch() -> None:
    code = """
import sys
from pipeloom.cli import train
train.start_workers = lambda *a: sys.exit(40 + ('torch' in sys.modules))
"""
    assert pipeloom("train", "tiny", code=code).returncode == 40


def test_workers_get_the_same_command_line(started: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "tiny",
        "--train.steps",
        "3",
        "--schedule.options.rounds=tail",
        "--schedule.microbatches",
        "3",
        "--parallel.dp",
        "2",
    ]
    assert run("train", *words) == 6
    out = " ".join(capsys.readouterr().out.split())
    assert "interleaved, rounds tail, 2 ranks of 2 stages, 3 micro-batches, 2 data-parallel replicas, 4 workers" in out
    assert "3 steps of 8 x 16 tokens" in out
    assert "uneven micro-batches: 4 sequences in 3: 1 of 2 and 2 of 1" in out
    assert run("verify", "tiny", "--json") == 6
    assert json.loads(capsys.readouterr().out)["error"]["exit_code"] == 6
    assert started == [("train", words, 4), ("verify", ["tiny", "--json"], 2)]


def test_start_workers_reruns_this_command(monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeloom.train.workers import launch

    seen: list[Any] = []
    monkeypatch.setattr(launch, "launch", lambda command, world, obedient: seen.append((command, world, obedient)) or 7)
    assert workers.start_workers("train", ["a.toml", "--train.steps", "3"], 4) == 7
    assert seen == [([sys.executable, "-P", "-m", "pipeloom", "train", "a.toml", "--train.steps", "3"], 4, True)]


def test_torchruns_world_size_must_fit(started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match="WORLD_SIZE is 3"):
        run("train", "tiny")
    with pytest.raises(UsageError, match="largest layout needs 4 workers"):
        run("verify", "--matrix", str(QUICK))
    assert started == []


# -- verify


@dataclass(frozen=True)
class Result:
    loss_error: float
    errors: dict[str, float]
    passed: bool


def request(*arguments: str, matrix: Path | None = None) -> Matrix:
    return verify.layouts_of(arguments, matrix)


def test_verify_reads_the_flags_of_train_over_every_layout_of_a_matrix() -> None:
    (layout,) = request("tiny", "--train.steps", "2").layouts
    assert layout.config.train.steps == 2
    asked = request("--train.seed", "9", matrix=QUICK)
    assert {layout.config.train.seed for layout in asked.layouts} == {9}


def test_verdicts_tell_passed_from_failed(capsys: pytest.CaptureFixture[str]) -> None:
    asked = request("tiny")
    good = verify.verdict("good", Result(1e-8, {"a": 2e-7, "b": 3e-7}, True), 1e-5)
    bad = verify.verdict("bad", Result(0.5, {"a": 0.25, "b": float("nan"), "c": 0.0}, False), 1e-5)
    assert (good["worst_parameter"], good["failing"]) == ("b", {})
    assert bad["worst_parameter"] == "b"
    assert set(bad["failing"]) == {"a", "b"}
    assert verify.row(good, 6).startswith("PASS  good    loss 1.0e-08  worst gradient 3.0e-07 b")
    assert verify.row(bad, 6).startswith("FAIL")
    assert verify.summarise(asked, [good], 1e-5, as_json=False) == 0
    assert "1 of 1 layouts pass at 1e-05 (fp32, max" in capsys.readouterr().out
    assert verify.summarise(request("tiny", "--train.dtype", "float64"), [good], 1e-5, as_json=False) == 0
    assert "1 of 1 layouts pass at 1e-05 (fp64, max" in capsys.readouterr().out
    assert verify.summarise(replace(asked, layouts=asked.layouts * 2), [good, bad], 1e-5, as_json=False) == 1
    out = capsys.readouterr().out
    assert "2.5e-01  a" in out
    assert "1 of 2 layouts pass" in out
    assert verify.summarise(request("tiny"), [bad], 1e-5, as_json=True) == 1
    text = capsys.readouterr().out
    assert "NaN" not in text
    report = json.loads(text)
    assert (report["passed"], report["layouts"][0]["failing"]) == (False, {"a": 0.25, "b": None})
