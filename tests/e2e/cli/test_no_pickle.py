"""Pipeloom unpickles nothing that another process gives it: a pickle is a program."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pipeloom
from checkpoint_runs import BRIEF

SOURCE = Path(pipeloom.__file__).parent
FORBIDDEN_MODULES = {"pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "multiprocessing"}
FORBIDDEN_CALLS = {
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list", "Unpickler"),
}
BUILT_IN = {"eval", "exec"}

# every way to unpickle raises, before anything else is imported
POISON = """
import pickle

def refuse(*arguments, **keywords):
    raise SystemExit("something was unpickled")

class Unpickler(pickle.Unpickler):
    __init__ = refuse

pickle.load = pickle.loads = pickle._load = pickle._loads = refuse
pickle.Unpickler = pickle._Unpickler = Unpickler
"""


def uses(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names]
            modules = names if isinstance(node, ast.Import) else [node.module or "", *names]
            for module in modules:
                if module.split(".")[0] in FORBIDDEN_MODULES | FORBIDDEN_CALLS or module == "torch.multiprocessing":
                    yield f"{path.name}:{node.lineno}: imports {module}"
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            of = node.func.value if isinstance(node.func, ast.Attribute) else None
            if name in FORBIDDEN_CALLS or (of is None and name in BUILT_IN):
                yield f"{path.name}:{node.lineno}: calls {name}"
            if name == "load" and isinstance(of, ast.Name) and of.id == "torch":
                safe = [word.arg == "weights_only" and getattr(word.value, "value", None) for word in node.keywords]
                if True not in safe:
                    yield f"{path.name}:{node.lineno}: calls torch.load"


def test_the_source_calls_nothing_that_unpickles() -> None:
    files = sorted(SOURCE.rglob("*.py"))
    assert len(files) > 100
    assert [use for path in files for use in uses(path)] == []


def test_the_scan_finds_what_it_looks_for(tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    path.write_text(
        "import pickle\nfrom torch import multiprocessing\ndist.all_gather_object([], 1)\ntorch.load('x')\n"
        "torch.load('x', weights_only=True)\njson.loads('1')\n"
    )
    assert [use.split(":")[1] for use in uses(path)] == ["1", "2", "3", "4"]


RUNS = {
    "pipeline": "--parallel.pp 2 --schedule.name interleaved",
    "gloo": "--parallel.pp 2 --schedule.transport individual",
    "two routes": "--parallel.pp 2 --schedule.name dualpipe --schedule.microbatches 4",
    "mesh": "--parallel.pp 1 --parallel.dp 2 --parallel.tp 2 --optimizer.zero1 --schedule.name 1f1b --schedule.microbatches 4",
    "search": "--parallel.pp 2 --schedule.name search --train.steps 14 --schedule.options.iterations 50",
}


def run(tmp_path: Path, *words: str) -> str:
    """Run the command where every way to unpickle raises; return what it prints."""
    (tmp_path / "sitecustomize.py").write_text(POISON)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    poisoned = subprocess.run(
        [sys.executable, "-c", "import pickle; pickle.loads(b'N.')"], env=environment, capture_output=True, text=True
    )
    assert "something was unpickled" in poisoned.stderr
    command = [sys.executable, "-m", "pipeloom", *words, "--train.device", "cpu"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "name", [name if name == "search" else pytest.param(name, marks=pytest.mark.full) for name in RUNS]
)
def test_a_training_run_unpickles_nothing(name: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the loom weaves thread over thread\n" * 3000)
    words = [
        "tiny",
        "--data.source",
        str(tmp_path / "text.txt"),
        "--log.dir",
        str(tmp_path / "log"),
        "--train.steps=3",
        *BRIEF,
    ]
    run(tmp_path, "train", *words, *RUNS[name].split())


def test_verify_unpickles_nothing(tmp_path: Path) -> None:
    assert "PASS" in run(tmp_path, "verify", "tiny")
