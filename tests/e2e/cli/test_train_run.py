"""`pipeloom train` and `verify` as a user runs them: real workers, real training, faults on purpose."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from checkpoint_runs import BRIEF
from commands import Command, pipeloom
from paths import DATA
from pipeloom.config.matrix import expand

CORPUS = "".join(
    f"line {n}: the loom weaves thread {n * 7919 % 10007} over thread {n * 31 % 997}\n" for n in range(3000)
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text(CORPUS, encoding="utf-8")
    return path


def train(corpus: Path, log: Path, *flags: str) -> list[str]:
    words = ["tiny", "--data.source", str(corpus), "--log.dir", str(log), "--train.device", "cpu", *BRIEF, *flags]
    return ["train", *words]


def test_an_exception_on_one_rank_ends_all_with_its_traceback(tmp_path: Path, corpus: Path) -> None:
    """With Pythons of their own, as a shell starts them."""
    command = [sys.executable, "-m", "pipeloom", *train(corpus, tmp_path, "--debug.fault", "raise:1:3F2")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode not in (0, 2, 75)
    assert "--debug.fault raised at 3F2" in done.stderr
    assert "Traceback" in done.stderr
    assert "rank 1 (process " in done.stderr
    (log,) = tmp_path.glob("*/rank_1.log")
    assert "Traceback" in log.read_text()
    assert "--debug.fault raised at 3F2" in log.read_text()


def test_a_lost_message_ends_with_6_and_a_report_a_rank(tmp_path: Path, corpus: Path) -> None:
    done = pipeloom(*train(corpus, tmp_path, "--debug.fault", "drop-send:0:3", "--train.timeout", "15"))
    assert done.returncode == 6
    assert "[rank 0] " in done.stderr
    assert "[rank 1] " in done.stderr
    assert "waits for the output of stage 2 micro-batch" in done.stderr
    assert done.stderr.splitlines()[-1] == "pipeloom: no rank failed: the run stalled, and its workers were stopped"


def test_ctrl_c_exits_130_quietly(tmp_path: Path, corpus: Path) -> None:
    run = Command(train(corpus, tmp_path, "--train.steps", "100000"))
    _wait_for_steps(tmp_path, 3)
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=600)
    assert run.returncode == 130, err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("matrix", "layouts"),
    [("verify_quick.toml", 26), ("verify_families.toml", 138)],
)
@pytest.mark.full
def test_verify_matrix_passes(matrix: str, layouts: int) -> None:
    done = pipeloom("verify", "--matrix", str(DATA / matrix))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{layouts} of {layouts} layouts pass at 1e-05" in done.stdout
    assert done.stdout.count("PASS") == layouts


def sample_of(matrix: Path, seed: int) -> str:
    """A matrix with a combination of each table and schedule of `matrix`, chosen at random."""
    tables = tomllib.loads(matrix.read_text(encoding="utf-8"))
    chance = random.Random(seed)
    chosen: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for number, table in enumerate(tables["layout"]):
        for combination in expand(table):
            chosen.setdefault((number, combination["schedule.name"]), []).append(combination)
    head = matrix.read_text(encoding="utf-8").partition("[[layout]]")[0]
    rows = [chance.choice(choices) for choices in chosen.values()]
    return head + "\n".join(
        "[[layout]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in row.items()) for row in rows
    )


def test_a_sample_of_every_family_passes(tmp_path: Path) -> None:
    """A size of each family in each table of verify_families.toml, another one in each run; `make full` runs them all."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    (tmp_path / "sample.toml").write_text(sample_of(DATA / "verify_families.toml", seed), encoding="utf-8")
    done = pipeloom("verify", "--matrix", str(tmp_path / "sample.toml"))
    assert done.returncode == 0, done.stdout + done.stderr
    count = done.stdout.count("PASS")
    assert count >= 20
    assert f"{count} of {count} layouts pass at 1e-05" in done.stdout


def _wait_for_steps(log: Path, steps: int) -> None:
    until = time.monotonic() + 600
    while time.monotonic() < until:
        files = list(log.rglob("*.jsonl"))
        if files and files[0].read_text(encoding="utf-8").count('"grad_norm"') >= steps:
            return
        time.sleep(0.1)
    raise AssertionError(f"no {steps} steps in 600 s")
