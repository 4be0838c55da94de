"""`pipeloom plan`: one layout, a search, refusals, and files."""

from __future__ import annotations

import json
import tomllib

import pytest

from pipeloom.cli import app
from pipeloom.errors import CapacityError, PipeloomError, UsageError

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
    assert found["fits"] is (found["peak_bytes"] <= 80e9)


def test_a_measured_step_scales_the_time(capsys):
    words = ("--model", "llama3-8b", "--layout", "tp=2,pp=2,dp=2,m=4", "--json")
    found = json.loads(run(capsys, *words, "--measured", "m=4:1234ms"))
    assert found["step_seconds"] == pytest.approx(1.234)


def test_a_search_explains_itself(capsys, tmp_path):
    path = tmp_path / "run.toml"
    words = ("--model", "llama3-8b", "--devices", "4", "--global-batch", "4")
    text = run(capsys, *words, "--output", str(path))
    for words in ("tokens/s/device", "allocated", "one step away from the best layout:", "with links half as fast"):
        assert words in text
    head, *rows = text.split("\n\n")[0].splitlines()[2:-1]  # between the two lines of the question and the advice
    start = head.index("layout")
    assert rows
    assert all(row[start - 1] == " " != row[start] for row in rows)
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


@pytest.mark.parametrize(
    ("words", "kind", "message"),
    [
        (["--model", "llama3-9b", "--devices", "8"], UsageError, "did you mean 'llama3-8b'"),
        (["--model", "llama3-8b", "--devices", "8", "--device", "h10"], UsageError, "did you mean 'h100'"),
        (["--model", "llama3-8b"], UsageError, "plan needs --devices"),
        (
            ["--model", "llama3-8b", "--layout", "pp=2", "--lora.r", "8", "--runtime", "megatron"],
            UsageError,
            "--lora.r: megatron's adapters are not planned; nearest: --lora.r 0",
        ),
        (
            ["--model", "llama3-8b", "--layout", "pp=2", "--lora.r", "8", "--lora.target_modules", "c_attn"],
            UsageError,
            "choose none of the planned layers; nearest: lm_head, mlp.down_proj",
        ),
        (
            ["--model", "llama3-8b", "--layout", "pp=2", "--lora.r", "8", "--output", "run.toml"],
            UsageError,
            "adapters without a Hugging Face directory",
        ),
        (
            ["--model", "llama3-8b", "--devices", "8", "--nodes", "3"],
            UsageError,
            "--nodes 3 does not divide --devices 8; nearest: 2 or 4",
        ),
        (["--model", "llama3-8b", "--devices", "8", "--layers", "33"], UsageError, "--layers 33: llama3-8b has 32"),
        (["--model", "llama3-8b", "--devices", "8", "--stages", "EtL"], UsageError, "--stages divides the layers of"),
        (
            ["--model", "llama3-8b", "--layout", "m=4", "--costs", "none.json"],
            UsageError,
            "--costs 'none.json' cannot be",
        ),
        (["--model", "llama3-8b", "--devices", "8", "--fixed", "tp=3"], UsageError, "--fixed tp=3: there is no such"),
        (
            ["--model", "llama3-8b", "--devices", "8", "--fixed", "v=3,schedule=interleaved"],
            UsageError,
            "nearest: v=2,schedule=interleaved",
        ),
        (
            ["--model", "llama3-8b", "--devices", "524287"],
            UsageError,
            "--devices 524287: there is no layout of llama3-8b",
        ),
        (["--model", "llama3-8b", "--devices", "4", "--layout", "tp=2"], UsageError, "nearest: --devices 2"),
        (["--model", "llama3-8b", "--devices", "8", "--measured", "m=4:1s"], UsageError, "give it with --layout"),
        (["--model", "llama3-8b", "--layout", "tp=2", "--measured", "4s"], UsageError, "such as m=4:843ms"),
        (["--model", "llama3-8b", "--layout", "pp=4,m=8", "--stages", "Et|L"], UsageError, "it holds 1 blocks"),
        (["--model", "llama3-8b", "--devices", "8", "--fixed", "tq=2"], UsageError, "--fixed: there is no key 'tq'"),
        (["--model", "llama3-405b", "--devices", "8"], CapacityError, "no layout of llama3-405b fits into 74.5 GiB"),
    ],
)
def test_refusals(words, kind, message):
    with pytest.raises(PipeloomError) as error:
        app(["plan", *words], standalone_mode=False)
    assert isinstance(error.value, kind)
    assert message in str(error.value)
