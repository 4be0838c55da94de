"""The library does not know its trainer: what it imports, what its messages say, what it does to its process."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pipeloom
from pipeloom.cli.options import message_with_flags
from pipeloom.config.problems import KEYS, naming_keys, sentence
from pipeloom.config.sections import SECTIONS, ModelSection, ParallelSection
from pipeloom.errors import ArgumentError, ConfigError, ScheduleError
from pipeloom.limits import usable_cores
from pipeloom.schedule import Costs
from pipeloom.shapes.decoder import DecoderShape
from pipeloom.shapes.mesh import MeshShape

HOME = Path(pipeloom.__file__).parent
LIBRARY = ("schedule", "shapes", "solver", "traces", "draw", "ops", "parallel", "models", "runtime")
SINGLE = ("errors.py", "limits.py", "schedules.py")
KEY = re.compile(
    r"(?<![\w.])(" + "|".join(f"{s}\\.{k}" for s, model in SECTIONS.items() for k in model.model_fields) + r")(?!\w)"
)
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
OTHERS = {"--nproc-per-node", "--local-dir"}  # of torchrun and of hf download


def library_files() -> list[Path]:
    return [
        *(HOME / name for name in SINGLE),
        *(path for package in LIBRARY for path in sorted((HOME / package).rglob("*.py"))),
    ]


def texts(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each string in a file that is no docstring, and of each constant part of an f-string."""
    tree = ast.parse(source)
    bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in bare:
            yield node.lineno, node.value


def trainers_words(source: str) -> list[tuple[int, str]]:
    return [
        (line, found)
        for line, text in texts(source)
        for found in (*KEY.findall(text), *(flag for flag in FLAG.findall(text) if flag not in OTHERS))
    ]


def test_messages_name_no_key_and_no_flag() -> None:
    found = [
        f"{path.relative_to(HOME)}:{line}: {word}"
        for path in library_files()
        for line, word in trainers_words(path.read_text())
    ]
    assert len(library_files()) > 100
    assert not found


def test_the_scan_finds_keys_and_flags() -> None:
    source = '"""Of parallel.tp."""\n\ng(f"parallel.tp = {size}", x.schedule.name)\ng("give --memory")\n'
    assert sorted(trainers_words(source)) == [(3, "parallel.tp"), (4, "--memory")]


def test_one_function_counts_cores() -> None:
    words = re.compile("sched_getaffinity|cpu_count")
    counting = [str(path.relative_to(HOME)) for path in HOME.rglob("*.py") if words.search(path.read_text())]
    assert counting == ["limits.py"]


def test_the_machine_counts_where_the_system_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.sched_getaffinity", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 7)
    assert usable_cores() == 7
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {3, 5}, raising=False)
    assert usable_cores() == 2


IMPORTS = """
import importlib, pkgutil, sys
import pipeloom.shapes.mesh, pipeloom.shapes.decoder
from pipeloom.runtime import Pipeline, LocalPipeline, RuntimeOptions, Layer
def loaded():
    return sorted(n for n in sys.modules if n.split(".")[0] in ("pydantic", "pydantic_core", "typer", "tomllib")
                  or n.split(".")[:2] in (["pipeloom", "config"], ["pipeloom", "train"], ["pipeloom", "cli"]))
print("runtime", loaded())
print("modules", sum(name.split(".")[0] == "pipeloom" for name in sys.modules) <= 104)
for package in %r:
    home = importlib.import_module("pipeloom." + package)
    for module in pkgutil.walk_packages(home.__path__, home.__name__ + "."):
        importlib.import_module(module.name)
print("all", loaded())
"""


def test_the_library_imports_neither_pydantic_nor_the_configuration_nor_the_families() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", IMPORTS % (LIBRARY,)], capture_output=True, text=True, timeout=600, check=True
    )
    assert ran.stdout.splitlines() == ["runtime []", "modules True", "all []"]


def test_a_configuration_says_the_key() -> None:
    with pytest.raises(ConfigError) as refusal, naming_keys():
        MeshShape(dp=8, ep=3)
    assert refusal.value.problems == ["parallel.ep = 3: it does not divide dp 8; nearest: 2 or 4"]
    assert not isinstance(refusal.value, ArgumentError)
    with pytest.raises(ScheduleError, match="as it was"), naming_keys():
        raise ScheduleError("as it was")
    assert sentence(ArgumentError("unknown", "=3 is odd")) == "unknown=3 is odd"
    for key in KEYS.values():
        section, _, name = key.partition(".")
        assert name in {"model": ModelSection, "parallel": ParallelSection}[section].model_fields


@pytest.mark.parametrize(
    ("costs", "words"),
    [
        ({"input_grad": -1.0}, "--input-grad is -1.0; a cost is a finite number of at least 0"),
        ({"all_to_all": 2.0}, "--all-to-all is 2.0; it is a share between 0 and 1"),
        ({"bandwidth": 0}, "bandwidth is 0; it must be above 0"),
    ],
)
def test_a_command_says_the_flag(costs: dict[str, float], words: str) -> None:
    with pytest.raises(ArgumentError) as refusal:
        Costs(**costs)
    assert message_with_flags(refusal.value) == words
    assert "--" not in str(refusal.value)


def test_a_shape_has_the_configurations_attributes() -> None:
    own = set(ModelSection.model_fields) - {"source", "preset", "weights", "experts_class", "router_class"}
    assert set(DecoderShape.__dataclass_fields__) - own == {
        *("gated", "mlp_bias", "n_positions", "shared_expert_intermediate_size", "shared_expert_gate"),
        *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "n_group", "topk_group"),
        *("model_type", "name", "reach", "counted"),
    }
    assert own <= set(DecoderShape.__dataclass_fields__)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (
            {"num_attention_heads": 3},
            "num_attention_heads=3 does not cut hidden_size 32 into heads of one even width; nearest: 2 or 4",
        ),
        (
            {"hidden_size": 31},
            "num_attention_heads=4 does not cut hidden_size 31 into heads of one even width; make hidden_size even",
        ),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 does not divide 4 attention heads; nearest: 2 or 4"),
        ({"head_dim": 5}, "head_dim=5 is not an even width, which rotary position embeddings need; nearest: 4 or 6"),
        ({"vocab_size": 0}, "vocab_size=0 is below 1; nearest: 1"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(sizes: dict[str, int], words: str) -> None:
    usual = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4}
    with pytest.raises(ArgumentError, match=f"^{words}$"):
        DecoderShape(**(usual | {"intermediate_size": 64, "vocab_size": 64} | sizes))
