"""Layers that are not Pipeloom's, and the record of those with which `pipeloom verify` has passed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeloom.cli.train import announce
from pipeloom.cli.verify import record_verified, unverified
from pipeloom.config import Layout, load_layout
from pipeloom.parallel.expert import Experts

CODE = f"from {Experts.__module__} import Experts\n\n\nclass Mine(Experts):\n    pass\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a user's experts, in which modules are found."""
    (tmp_path / "experts_to_verify.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "experts_to_verify", raising=False)
    return tmp_path


def layout_in(folder: Path) -> Layout:
    keys = {"model.num_experts": 4, "model.experts_class": "experts_to_verify:Mine", "log.dir": str(folder / "runs")}
    return load_layout("tiny", keys)


def verified(layout: Layout, passed: bool) -> None:
    record_verified((layout,), [{"passed": passed}])


def test_code_is_unverified_until_a_layout_with_it_passes(folder: Path) -> None:
    layout = layout_in(folder)
    assert unverified(layout) == ["model.experts_class"]
    verified(layout, passed=False)
    assert unverified(layout) == ["model.experts_class"]
    verified(layout, passed=True)
    assert unverified(layout) == []


def test_code_that_has_changed_is_unverified_again(folder: Path) -> None:
    layout = layout_in(folder)
    verified(layout, passed=True)
    (folder / "experts_to_verify.py").write_text(CODE + "\n# another version\n")
    assert unverified(layout) == ["model.experts_class"]
    verified(layout, passed=True)
    (folder / "experts_to_verify.py").write_text(CODE)
    assert unverified(layout) == []  # a version that has passed before


def test_a_damaged_record_is_as_none(folder: Path) -> None:
    layout = layout_in(folder)
    verified(layout, passed=True)
    (folder / "runs" / "verified.json").write_text("{")
    assert unverified(layout) == ["model.experts_class"]


def test_own_layers_leave_no_record(tmp_path: Path) -> None:
    layout = load_layout("tiny", {"log.dir": str(tmp_path / "runs")})
    assert unverified(layout) == []
    verified(layout, passed=True)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("kind", "names"), [("gpt2", []), ("a_new_kind", ["the model's family"])])
def test_families_of_the_matrix_count_as_verified(tmp_path: Path, kind: str, names: list[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    config = SimpleNamespace(model=SimpleNamespace(source=str(tmp_path)), log=SimpleNamespace(dir=str(tmp_path)))
    layout: Any = SimpleNamespace(config=config, classes={})
    assert unverified(layout) == names


def test_training_says_so_in_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout = layout_in(folder)
    announce(layout)
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "never verified" in line)
    assert line.startswith("  never verified: model.experts_class; pipeloom verify, with the same ")
    verified(layout, passed=True)
    capsys.readouterr()
    announce(layout)
    assert "never verified" not in capsys.readouterr().out
