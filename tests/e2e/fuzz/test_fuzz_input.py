"""A sample of the fuzzer of inputs, and the fuzzer itself: it finds what it is there for."""

from __future__ import annotations

from typing import Any

import pytest

from fuzz import input as part
from fuzz._loop import smallest
from pipeloom.errors import UsageError


def test_a_sample_of_inputs_is_answered_as_documented(capsys: pytest.CaptureFixture[str]) -> None:
    assert part.main(seed=11, cases=15, deadline=None) == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("breaks", "words"),
    [
        (RuntimeError("x"), "exit code 1"),
        (UsageError("y" * 300 + " Traceback"), "a traceback"),
    ],
)
def test_a_defect_is_found_and_shrunk(monkeypatch: pytest.MonkeyPatch, breaks: Exception, words: str) -> None:
    def load(path: str) -> Any:
        raise breaks

    monkeypatch.setattr("pipeloom.cli.check.load", load)
    case = part.Case(("check", "DIR/s.csv", "--json"), (("s.csv", "0F0,0B0\n"),))
    assert (part.failure(case) or "").startswith(words)
    small = smallest(case, lambda one: (part.failure(one) or "").startswith(words), part.simplifications, seconds=600)
    assert len(repr(small)) < len(repr(case))
    assert part.replay(repr(small)) == 1


def test_slow_answers_and_long_echoes_are_failures() -> None:
    case = part.Case(("check", "x"))
    assert part.complaint(case, part.Answer(2, 3.5, "", ""), 3.0) == "slow: 3.5 s"
    assert part.complaint(case, part.Answer(2, 0.0, "no " + "x" * 231, ""), 3.0) == "echo: a word of 231 characters"
    assert part.complaint(part.Case(("check", "x", "--json")), part.Answer(0, 0.0, "{", "{"), 3.0) is not None
    assert part.complaint(case, part.Answer(4, 0.0, "", ""), 3.0) is not None  # check never runs out of room
