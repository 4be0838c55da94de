"""`pipeloom plan`: one layout, a search, refusals, and files."""

from __future__ import annotations

import json
import re
import tomllib

import pytest

from pipeloom.cli import app
from pipeloom.errors import CapacityError, UsageError
from pipeloom.plan.report import step_words
from pipeloom.plan.time import StepTime

LLAMA = {"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 4096, "num_attention_heads": 32}
LLAMA |= {"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 1000}


def run(capsys, *words):
    """What the command prints."""
    app(["plan", *words], standalone_mode=False)
    return capsys.readouterr().out


def test_one_layout_as_json(capsys):
    text = run(capsys, "--model", "llama3-8b", "--layout", "tp=2,pp=2,dp=2,m=4", "--json", "--runtime", "megatron")
    found = json.loads(text)
    assert found["world"] == 8
    assert found["step_seconds"] == pytest.approx(sum(found["step_parts"].values()))
    for at in (0, 1):
        lines = {k: v for k, v in found["memory"][at].items() if k not in ("reserve", "overhead", "peak_action")}
        assert found["allocated_bytes"][at] == pytest.approx(sum(lines.values()), abs=5)
    assert found["fits"] is (found["peak_bytes"] <= 79.1 * 2**30)


def test_a_layout_that_does_not_fit_is_shown_and_ends_with_4(capsys):
    with pytest.raises(CapacityError, match=r"^--layout dp=1 needs \d+\.\d GiB, and a device has 79.1$"):
        app(["plan", "--model", "llama3-8b", "--layout", "dp=1"], standalone_mode=False)
    assert "rank 0 needs the most" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "other"), [(("--layout", "pp=2"), "the other --layout"), (("--fixed", "tp=2"), "--fixed")]
)
def test_one_layout_is_predicted(more, other):
    with pytest.raises(UsageError, match=f"^--layout dp=8: one layout is predicted at a time; leave out {other}$"):
        app(["plan", "--model", "llama3-8b", "--layout", "dp=8", *more], standalone_mode=False)


def test_a_number_of_recomputed_blocks_is_not_fixed():
    with pytest.raises(
        UsageError, match=r"^--fixed: recompute_layers follows from the memory; leave it out, or predict one"
    ):
        app(["plan", "--model", "llama3-8b", "--devices", "8", "--fixed", "recompute_layers=2"], standalone_mode=False)


def test_a_measured_step_scales_the_time(capsys):
    words = ("--model", "llama3-8b", "--layout", "tp=2,pp=2,dp=2,m=4", "--json")
    found = json.loads(run(capsys, *words, "--measured", "m=4:1234ms"))
    assert found["step_seconds"] == pytest.approx(1.234)


def test_a_step_is_a_range_where_nothing_was_measured(capsys):
    words = ("--model", "llama3-8b", "--layout", "tp=2,pp=2,dp=2,m=4")
    text = " ".join(run(capsys, *words).split())
    low, high = map(
        float, re.search(r"step on h100: (\S+) to (\S+) s, since releases .* by 39 %; at best", text).groups()
    )
    assert high / low == pytest.approx(1.39, rel=0.01)
    text = run(capsys, *words, "--measured", "m=4:1234ms")
    assert "step: 1.234 s, " in text
    assert " to " not in text


def test_a_search_explains_itself(capsys, tmp_path):
    path = tmp_path / "run.toml"
    words = ("--model", "llama3-8b", "--devices", "4", "--global-batch", "4")
    text = run(capsys, *words, "--output", str(path))
    for words in ("tokens/s", "total GiB", "one step away from the best layout:", "with links half as fast"):
        assert words in text
    lines = text.split("\n\n")[0].splitlines()
    start = next(at for at, line in enumerate(lines) if re.match("layout +tokens/s", line))
    head, *rows = lines[start : next(at for at, line in enumerate(lines) if "pipeline" in line)]
    assert max(map(len, text.splitlines())) <= 80
    assert len([row for row in rows if row.startswith(("dp=", "pp=", "tp=", "m="))]) > 1
    assert {len(row) for row in rows if len(row.split()) > 1} == {len(head)}
    written = tomllib.loads(path.read_text())
    assert written["parallel"]["pp"] >= 1
    assert written["optimizer"]["lr"] == 2.1e-4  # of a model from scratch
    assert "lora" not in written


def test_adapters_are_planned_and_written(capsys, tmp_path, monkeypatch):
    """As those of a configuration, with the same bytes and seconds, which are less than where all weights are trained."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA))
    lora = ("--lora.r", "8", "--lora.target_modules", '["q_proj", "v_proj"]')
    words = ("--layout", "pp=2,m=4", "--seq", "2048", "--json")
    whole, adapted = (
        json.loads(run(capsys, "--model", "model", *words, "--output", "run.toml", *more)) for more in ((), lora)
    )
    written = tomllib.loads((tmp_path / "run.toml").read_text())
    assert written["lora"] == {"r": 8, "target_modules": ["q_proj", "v_proj"]}
    assert written["optimizer"]["lr"] == 2e-4
    assert adapted["peak_bytes"] < whole["peak_bytes"]
    assert adapted["step_seconds"] < whole["step_seconds"]
    app(["train", "run.toml", "--dry-run"], standalone_mode=False)
    assert "adapters of rank 8" in capsys.readouterr().out
    assert json.loads(run(capsys, "--model", "run.toml", *words)) == adapted


def test_stages_are_read_in_megatrons_notation(capsys):
    words = ("--model", "llama3-8b", "--layout", "pp=4,m=8", "--json")
    assert json.loads(run(capsys, *words, "--stages", "Et*5|(t*9|)*2t*9L"))["stages"] == [6, 9, 9, 10]


def test_parts_that_are_next_to_nothing_of_a_step_are_left_out() -> None:
    words = step_words(StepTime(8.0, 1.0, 0.9, 0.001, 0.1, 0.009), 5.0, "h100", measured=True)
    assert words.endswith("(compute 8 s, exchange 1 s, idle 0.9 s, optimizer 0.1 s)")
