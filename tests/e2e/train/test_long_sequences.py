"""The table of docs/long_sequences.md that says which axis, slices, recomputation and offload take, against its command."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import pytest

from paths import ROOT
from pipeloom.config import load_layout
from pipeloom.plan.run import predicted
from pipeloom.plan.time import device


@pytest.mark.core
def test_the_table_is_what_its_command_predicts() -> None:
    text = (ROOT / "docs" / "long_sequences.md").read_text(encoding="utf-8")
    command = re.search(r"^pipeloom train tiny (.*) --dry-run --parallel", text, re.MULTILINE)
    rows = re.findall(r"^\| `(--parallel[^`]*)` \| (\S+) \| (\S+) \|$", text, re.MULTILINE)
    assert command is not None
    assert len(rows) == 11
    for flags, seconds, gib in rows:
        words = shlex.split(f"{command[1]} {flags}")
        values = {key.removeprefix("--"): _value(word) for key, word in zip(words[::2], words[1::2], strict=True)}
        prediction = predicted(load_layout("tiny", values), device("h100"))
        assert prediction.step is not None
        peak = max(rank.total for rank in prediction.ranks)
        assert (f"{prediction.step.total:.4g}", f"{peak / 2**30:.3g}") == (seconds, gib), flags


def _value(word: str) -> Any:
    return json.loads(word) if re.fullmatch(r"\d+|\[.*\]", word) or word == "true" else word
