"""`plan --job`: what a job costs and could gain, in the words of its system."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from pipeloom.cli import app
from pipeloom.cli.gains import gain_of
from pipeloom.errors import CapacityError, UsageError
from pipeloom.interop.systems import read_job
from pipeloom.plan import load_device

TORCHTITAN = """\
torchrun --nnodes 1 --nproc_per_node 8 -m torchtitan.train --module llama3 --config llama3_8b --training.seq-len 4096 \\
  --training.local-batch-size 4 --training.global-batch-size 16 --parallelism.data-parallel-shard-degree 4 \\
  --parallelism.pipeline-parallel-degree 2 --parallelism.pipeline-parallel-schedule 1F1B activation-checkpoint:full
"""


def run(*words: str) -> Result:
    return CliRunner().invoke(app, ["plan", "--job", *words])


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.sh"
    path.write_text(TORCHTITAN)
    return str(path)


def values_of(*words: str) -> dict[str, Any]:
    result = run(*words, "--json")
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


def test_a_job_is_predicted_and_its_best_change_written(script: str, tmp_path: Path) -> None:
    better = tmp_path / "better.sh"
    result = run(script, "--output", str(better))
    assert result.exit_code == 0, result.output
    assert "GiB are" in result.stdout
    assert "without activation-checkpoint:full, with activation-checkpoint:none" in result.stdout
    assert "less computation" in result.stdout
    assert "  + activation-checkpoint:none" in result.stdout.partition("change, which saves ")[2]
    before, after = read_job(script), read_job(str(better))
    assert (before.layout.recompute, after.layout.recompute) == ("full", "none")
    values = values_of(script)
    assert values_of(str(better))["job"]["step_seconds"] == pytest.approx(values["best"]["step_seconds"], rel=1e-6)
    gain = 1 - values["best"]["step_seconds"] / values["job"]["step_seconds"]
    assert values["best"]["gain"] == pytest.approx(gain)
    assert f"saves {100 * gain:.1f} %" in result.stdout


def test_a_slower_change_that_makes_a_job_fit_saves_nothing(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(TORCHTITAN.replace("activation-checkpoint:full", "activation-checkpoint:none"))
    result = run(str(tmp_path / "train.sh"), "--memory", "28")
    assert result.exit_code == 0, result.output
    assert "change, so that the job fits: it needs " in result.stdout
    assert "which saves" not in result.stdout


@pytest.mark.slow
def test_a_good_job_has_nothing_worth_changing(tmp_path: Path) -> None:
    path, better = tmp_path / "train.sh", tmp_path / "better.sh"
    path.write_text(TORCHTITAN)
    run(str(path), "--output", str(better))
    again = tmp_path / "again.sh"
    result = run(str(better), "--output", str(again))
    assert "nothing worth changing: no change is faster, and 3.2 % would be" in " ".join(result.stdout.split())
    assert "the median error of ratios predicted for torchtitan is 3.2 %" in " ".join(result.stdout.split())
    assert not again.exists()
    assert values_of(str(better))["best"] is None


def test_what_the_system_refuses_and_what_is_left_out_is_said(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    text = TORCHTITAN.replace("size 4", "size 5").replace("size 16", "size 20").replace("1F1B", "Interleaved1F1B")
    path.write_text(text.replace("activation", "--training.nonsense 1 activation"))
    notes = values_of(str(path))["notes"]
    words = "torchtitan refuses this job: Interleaved1F1B: its 2 rounds do not divide m=5 (torch, schedules.py); nearest: m=4"
    assert notes[0] == words
    assert notes[1].startswith("not understood: training.nonsense is not known")
    path.write_text(TORCHTITAN.replace("1F1B", "DualPipeV").replace("size 4", "size 2").replace("size 16", "size 8"))
    message = "torchtitan refuses this job: DualPipeV: m=2 is too few (torch, schedules.py); nearest: m=4; dualpipev at 2 ranks"
    assert str(run(str(path)).exception).startswith(message)


def test_a_job_for_which_nothing_fits_ends_with_the_code_of_capacity(script: str) -> None:
    result = run(script, "--memory", "4GiB")
    assert isinstance(result.exception, CapacityError)
    assert result.exit_code
    assert "the smallest run near it needs" in str(result.exception)
    assert "no change makes it fit; the nearest needs " in result.stdout
    assert "so that the job fits" not in result.stdout


@pytest.mark.parametrize("words", ["--seq 8192", "--layout pp=4", "--as megatron", "--fixed tp=1", "--global-batch 8"])
def test_what_the_job_says_is_not_said_again(script: str, words: str) -> None:
    result = run(script, *words.split())
    assert isinstance(result.exception, UsageError)
    assert (
        str(result.exception) == f"{words.split()[0]}: the job says what is trained on what; leave it out beside --job"
    )


def test_a_plan_needs_a_model_or_a_job() -> None:
    result = CliRunner().invoke(app, ["plan", "--devices", "8"])
    assert str(result.exception) == "plan needs --model, or --job with a job that describes its model"


def test_a_job_without_its_model_names_the_flag(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(TORCHTITAN.replace("llama3_8b", "mine"))
    assert str(run(str(path)).exception) == "the job does not describe its model; give it with --model"
    assert values_of(str(path), "--model", "llama3-8b")["system"] == "torchtitan"


@pytest.mark.parametrize(("name", "there"), [("pipeloom.toml", False), ("torchtitan_zbv.sh", True)])
def test_layers_stand_in_for_names_of_modules_alone(name: str, there: bool) -> None:
    gain = gain_of(read_job(str(Path(__file__).parents[2] / "data/interop" / name)), load_device("h100"), axes=False)
    assert ("layers E" in "\n".join(gain.lines())) == there
