"""What is imported from where: nothing from the working directory; a user's schedule from beside its configuration."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from checkpoint_runs import BRIEF
from pipeloom.config import load_layout
from pipeloom.config.matrix import load_matrix
from pipeloom.errors import ConfigError

TRAPS = ("queue", "tempfile", "json", "typing", "dataclasses", "apex", "onnx", "numpy", "torch")
MODULE = """
import pipeloom as pl

def mine(ranks, microbatches):
    import helper_beside_it
    return pl.schedules.gpipe(ranks, microbatches)
"""
FAST = ("--train.device", "cpu", "--train.steps", "1", *BRIEF)


@pytest.fixture
def trapped(tmp_path: Path) -> Path:
    """A working directory whose modules leave a mark when they are imported."""
    here = tmp_path / "here"
    here.mkdir()
    for name in TRAPS:
        mark = tmp_path / f"imported-{name}"
        (here / f"{name}.py").write_text(f"open({str(mark)!r}, 'w').close()\nraise ImportError('a trap')\n")
    return here


def marks(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("imported-*"))


def run(here: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], cwd=here, capture_output=True, text=True, timeout=600, env=os.environ | environment
    )


def user_module(folder: Path, name: str) -> Path:
    """A configuration in `folder`, and beside it the module with its schedule."""
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(MODULE.replace("helper_beside_it", f"{name}_helper"))
    (folder / f"{name}_helper.py").write_text("")
    path = folder / "run.toml"
    path.write_text(f'extends = "tiny"\n[schedule]\nname = "{name}:mine"\nmicrobatches = 4\n[parallel]\npp = 2\n')
    return path


def test_python_m_imports_nothing_from_the_working_directory(trapped: Path) -> None:
    done = run(trapped, "-m", "pipeloom", "schedule", "1f1b", "--ranks", "2", "--microbatches", "2")
    assert done.returncode == 0, done.stderr
    assert marks(trapped.parent) == []


def test_workers_import_nothing_from_the_working_directory(trapped: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the loom weaves thread over thread\n" * 3000)
    path = user_module(tmp_path / "there", "schedule_of_the_workers")
    words = ["train", str(path), *FAST, "--data.source", str(tmp_path / "text.txt"), "--log.dir", str(tmp_path / "log")]
    done = run(trapped, "-m", "pipeloom", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert marks(tmp_path) == []
    line = f"the schedule is code: schedule_of_the_workers:mine from {tmp_path / 'there'}/schedule_of_the_workers.py"
    assert line in " ".join(done.stdout.split())
    worker = run(trapped, "-m", "pipeloom", *words, "--parallel.pp", "1", RANK="0", WORLD_SIZE="1")
    assert worker.returncode == 0, worker.stdout + worker.stderr
    assert marks(tmp_path) == []
    assert line in " ".join(worker.stdout.split())


def test_a_user_schedule_is_found_beside_its_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = user_module(tmp_path / "there", "schedule_beside")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    before = list(sys.path)
    layout = load_layout(path)
    assert layout.schedule.name == "gpipe"
    assert layout.code == str(tmp_path / "there" / "schedule_beside.py")
    assert sys.path == before
    child = tmp_path / "child.toml"
    child.write_text(f'extends = "{path}"\n')
    assert load_layout(child).code == layout.code


def test_a_module_of_the_working_directory_is_not_that_of_a_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = user_module(tmp_path / "there", "schedule_elsewhere")
    for name in ("schedule_elsewhere.py", "schedule_elsewhere_helper.py"):
        (tmp_path / "there" / name).rename(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=rf"No module named 'schedule_elsewhere' .* nor in {tmp_path}/there"):
        load_layout(path)
    assert load_layout(path, {"schedule.name": "schedule_elsewhere:mine"}).code is not None


def test_a_matrix_imports_from_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user_module(tmp_path / "there", "schedule_of_a_matrix")
    matrix = tmp_path / "there" / "matrix.toml"
    matrix.write_text('[[layout]]\nschedule.name = "schedule_of_a_matrix:mine"\n')
    monkeypatch.chdir(tmp_path)
    found = load_matrix(matrix, "tiny", {"parallel.pp": 2, "schedule.microbatches": 4})
    assert found.layouts[0].code == str(tmp_path / "there" / "schedule_of_a_matrix.py")


def test_a_dry_run_needs_no_torch(tmp_path: Path) -> None:
    """1,024 workers of a model that is known by name."""
    absent = "import sys; sys.modules.update(torch=None, numpy=None, safetensors=None); from pipeloom.cli import main; main()"
    words = ["train", "--dry-run", "--model.preset", "llama3-70b", "--device", "h100", "--train.seq_len", "4096"]
    words += [
        "--train.global_batch_size",
        "1024",
        "--train.dtype",
        "bfloat16",
        "--parallel.pp",
        "8",
        "--parallel.tp",
        "8",
    ]
    words += [
        "--parallel.dp",
        "16",
        "--schedule.name",
        "1f1b",
        "--schedule.microbatches",
        "64",
        "--parallel.sp",
        "true",
    ]
    done = run(tmp_path, "-c", absent, *words, "--memory", "20")
    assert done.returncode == 4, done.stderr
    assert "dry run: 1024 workers would start" in done.stdout
    assert "; the closest layout that fits, with " in " ".join(done.stderr.split())
