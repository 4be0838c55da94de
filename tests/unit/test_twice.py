"""Tests in two rounds: what the last line says of them, and the exit code."""

from __future__ import annotations

from pathlib import Path

import pytest

import twice

TESTS = """
import pathlib, pytest
def test_sound(): pass
def test_broken(): assert 0
@pytest.mark.parametrize("name", ["a", "b"])
def test_flaky(name):
    path = pathlib.Path(name)
    before = path.exists()
    path.touch()
    assert before
"""


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A project of its own, without the plugins, whose import takes most of the time."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")


def test_a_failure_that_passes_alone_is_flaky(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    said = []
    for code in (1, 1, 0):
        assert twice.main([] if code else ["-k", "not broken"]) == code
        said.append(capfd.readouterr().out.splitlines())
    flaky = "flaky (failed first, passed alone): test_it.py::test_flaky[a], test_it.py::test_flaky[b]"
    assert said[0][-1] == f"failed twice: test_it.py::test_broken; {flaky}"
    assert said[1][-1] == "failed twice: test_it.py::test_broken"
    assert "once more, alone:" in said[1]
    assert said[2][-1].startswith("3 passed, 1 deselected")  # one round


@pytest.mark.parametrize(("count", "code"), [(1, 0), (2, 0), (3, 1)])
def test_more_than_two_flaky_tests_are_a_failure(count: int, code: int) -> None:
    tests = ["x", "y", "z"][:count]
    line = f"flaky (failed first, passed alone): {', '.join(tests)}"
    if code:
        line += "; 3 flaky tests, and at most 2 are let pass"
    assert twice.verdict(tests, []) == (line, code)


def test_what_pytest_cannot_run_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("import there_is_no_such_module\n")
    assert twice.main([]) == 2
    assert twice.main(["--no-such-flag"]) == 4
