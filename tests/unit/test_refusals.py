"""What is refused, and in which words: the table of tests/data/refusals.toml."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pipeloom.measure.rehearse  # noqa: F401  # imports torch here, not in a test's call
from paths import DATA
from pipeloom.config import load_layout
from pipeloom.errors import ConfigError

TABLE = tomllib.loads((DATA / "refusals.toml").read_text(encoding="utf-8"))


def title(value: Any) -> str:
    return str(value)[:80]


@pytest.mark.parametrize(
    ("settings", "words"),
    [(group["of"] | settings, words) for group in TABLE["settings"] for settings, words in group["rows"]],
    ids=title,
)
def test_settings(settings: dict[str, Any], words: str) -> None:
    keys = {key: value for key, value in settings.items() if key}
    with pytest.raises(ConfigError) as refusal:
        load_layout(settings.get(""), keys)
    assert refusal.value.exit_code == 2
    problems = refusal.value.problems
    assert any(words in problem and any(key in problem for key in keys) for problem in problems), problems


@pytest.mark.parametrize(("line", "code", "words"), TABLE["commands"], ids=title)
def test_commands(
    pipeloom: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, line: str, code: int, words: str
) -> None:
    """One message, and no worker starts."""
    for module in ("train", "hub", "workers"):  # the others import from the last
        monkeypatch.setattr(f"pipeloom.cli.{module}.start_workers", lambda *_: pytest.fail("a worker was started"))
    monkeypatch.setattr("pipeloom.train.workers.preflight.memory_of_machine", lambda: 64 * 2**30)
    ended = pipeloom(line)
    assert ended.code == code, ended
    if "--json" in line:
        assert ended.err == ""
        assert words in json.loads(ended.out)["error"]["message"]
    else:
        assert ended.out == ""
        assert ended.err.startswith("pipeloom: ")
        assert words in ended.err


@pytest.mark.parametrize(("text", "code", "words"), TABLE["schedules"], ids=title)
def test_schedules(
    pipeloom: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, code: int, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.csv").write_text(text)
    ended = pipeloom("check bad.csv")
    assert (ended.code, ended.out) == (code, "")
    assert words in ended.err
