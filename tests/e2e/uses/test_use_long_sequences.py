"""A plan for sequences of 128k tokens, and the dry run of the table's first row that fits an H100."""

from __future__ import annotations

import re
import tomllib

import pytest

from uses import Use


def test_a_plan_for_128k_tokens_fits_and_names_what_makes_it_fit(use: Use) -> None:
    said = use.run("long_sequences.md", "pipeloom plan --model llama3-8b --devices 8 --seq 131072")
    assert "8 sequences of 131072 tokens a step" in said.replace("\n", " ")
    run = tomllib.loads((use.folder / "long.toml").read_text())
    assert run["train"]["seq_len"] == 131072
    assert run["parallel"]["cp"] > 1
    assert 0 < len(run["train"]["recompute"]) < 32

    dry = use.run("long_sequences.md", "pipeloom train tiny --model.hidden_size 4096")
    (row,) = re.findall(
        r"^\| `--parallel.pp 8 --schedule.slices 16 --train.recompute full` \| (\S+) \| (\S+) \|$",
        use.text("long_sequences.md"),
        re.MULTILINE,
    )
    steps = re.search(r"step on h100: (\S+) to", dry)
    assert steps is not None
    assert float(steps[1]) == pytest.approx(float(row[0]), abs=0.06)  # to three digits
    assert f"{row[1]} GiB" in dry
    assert use.pages == ["long_sequences.md"]
