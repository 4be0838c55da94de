"""Sizes above a limit, and files that are no files: one sentence with the documented exit code, at once, in little memory."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pipeloom as pl
from paths import ROOT
from pipeloom import limits
from pipeloom.config import Config
from pipeloom.errors import (
    LONGEST_ECHO,
    CapacityError,
    ConfigError,
    PipeloomError,
    UsageError,
    echo,
    first_line,
    sentence,
)
from pipeloom.schedule.families import FAMILIES, build
from pipeloom.schedule.files import load
from pipeloom.shapes.mesh import MeshShape
from pipeloom.train.data.sources import Fields, find, records
from pipeloom.train.workers.preflight import require_room

SOURCE = ROOT / "src" / "pipeloom"

# Runs command lines in one process and prints, for each, [exit code, longest run of one letter said, what was said].
RUNNER = """
import contextlib, io, json, resource, sys
from itertools import groupby
from pipeloom.cli import app
from pipeloom.cli.failures import exit_code_of
rows = []
for words in json.load(sys.stdin):
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        run = lambda: app(words, prog_name="pipeloom", standalone_mode=False)
        code = exit_code_of(run, as_json="--json" in words, given=words)
    longest = max((len(list(run)) for letter, run in groupby(said.getvalue()) if letter not in " \\n"), default=0)
    rows.append([code, longest, said.getvalue()[:3000]])
try:  # the kernel hands ru_maxrss on from the process that forked this one
    rss = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
except OSError:
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (1 if sys.platform != "darwin" else 1024)
print(json.dumps({"rows": rows, "MiB": rss / 1024}))
"""


def run_all(lines: list[list[str]]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", RUNNER],
        input=json.dumps(lines),
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.fixture
def hostile(tmp_path: Path) -> dict[str, str]:
    """Files that no schedule, configuration or text is read from."""
    files = {
        "empty lines.csv": "\n" * 5_000_000 + "0F0,0B0\n",
        "commas.csv": "," * 9_000_000 + "0B0",
        "deep.json": '{"format": ' + "[" * 20_000 + "]" * 20_000 + "}",
        "digits.json": '{"format": "pipeloom.schedule/1", "ranks": ' + "9" * 6_000 + "}",
        "word.csv": "x" * 100_000,
        "deep.toml": "a = " + "[" * 20_000 + "]" * 20_000,
        "digits.toml": "[train]\nsteps = " + "9" * 6_000,
        "hexadecimal.toml": "[train]\nsteps = 0x" + "f" * 6_000,
        "large.toml": "# " + "x" * 1_000_000,
        "config.json": '{"num_hidden_layers": 1000000000, "hidden_size": 8, "vocab_size": 9}',
        "text.toml": '[model]\nrouter = "' + "y" * 60_000 + '"\n' + "z" * 5_000 + " = 1",
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with (tmp_path / "sparse.csv").open("wb") as file:
        file.truncate(1 << 30)
    os.mkfifo(tmp_path / "pipe")
    return {name: str(tmp_path / name) for name in [*files, "sparse.csv", "pipe"]}


def test_sizes_and_files_above_a_limit_are_refused_at_once(hostile: dict[str, str]) -> None:
    many, tiny = "9" * 6_000, ["train", "tiny", "--train.device", "cpu"]
    lines = [
        [*tiny, "--parallel.pp", "1000000"],
        ["schedule", "1f1b", "--ranks", "2", "--microbatches", "100000000"],
        ["compare", "all", "--ranks", "100000", "--microbatches", "100000"],
        ["search", "--ranks", "4096", "--microbatches", "100000"],
        ["search", "--ranks", "2", "--microbatches", "2", "--time-limit", "1e308"],
        ["schedule", "zbv", "--ranks", "4000", "--microbatches", "100"],
        ["schedule", "1f1b", "--ranks", many, "--microbatches", "2"],
        ["schedule", "interleaved", "--ranks", "2", "--microbatches", "2", "--chunks", "1000000000"],
        ["schedule", "x" * 5_000, "--ranks", "2", "--microbatches", "2"],
        [*tiny, "--model.num_hidden_layers", "999999999999"],
        [*tiny, "--parallel.dp", "1000", "--train.global_batch_size", "8000"],
        [*tiny, "--model.num_hidden_layers", "100000", "--model.hidden_size", "1048576"],
        [*tiny, "--model.hidden_size", "1073741823"],
        [*tiny, "--train.global_batch_size", "1073741823", "--parallel.dp", "4"],
        [*tiny, "--train.timeout", "1e308"],
        [*tiny, "--train.steps", many],
        [*tiny, "--" + ".".join("a" * 30_000), "1"],
        [
            *tiny,
            "--schedule.name",
            "search",
            "--schedule.microbatches",
            "500000",
            "--train.global_batch_size",
            "500000",
        ],
        [*tiny, "--data.source", hostile["pipe"]],
        ["train", "--model.source", str(Path(hostile["config.json"]).parent)],
        [*tiny, "--debug.fault", "kill:" + many + ":1"],
        [*tiny, "--parallel.stages", "E(" * 30_000 + "t" + ")" * 30_000 + "L"],
        *(["check", hostile[name]] for name in hostile if not name.endswith(".toml")),
        *(["train", hostile[name]] for name in hostile if name.endswith((".toml", "pipe"))),
        ["verify", "--matrix", hostile["pipe"]],
    ]
    found = run_all(lines)
    for words, (code, longest, said) in zip(lines, found["rows"], strict=True):
        shown = " ".join(words)[:120], said
        assert code in (2, 3, 4), shown
        assert longest <= LONGEST_ECHO, shown
        assert "Traceback" not in said, shown
        assert "internal error" not in said, shown
    assert found["MiB"] < 300


@pytest.mark.parametrize(
    "name", ["num_hidden_layers", "n_layer", "depth", "num_local_experts", "n_head", "attention_types"]
)
def test_every_count_of_a_model_is_compared_with_its_limit(name: str) -> None:
    limits.require_counts({name: limits.MOST_LAYERS, "head_dim": limits.MOST_HEAD_WIDTH, "num_parameters": 10**12})
    limits.require_counts({"hidden_size": limits.MOST_WIDTH})
    for values in (
        {name: limits.MOST_LAYERS + 1},
        {"text_config": {name: [[10**9]]}},
        {"d_model": limits.MOST_WIDTH + 1},
        {"qk_rope_head_dim": limits.MOST_HEAD_WIDTH + 1},
    ):
        with pytest.raises(UsageError, match="it must be at most"):
            limits.require_counts(values)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_refuses_sizes_before_it_builds(name: str) -> None:
    for ranks, microbatches in ((2, 10**8), (10**6, 2), (4096, 4096), (2, 10**400)):
        with pytest.raises(UsageError) as refused:
            build(name, ranks, microbatches)
        assert len(str(refused.value)) < 400


def test_a_schedule_of_ones_own_has_the_same_limits() -> None:
    with pytest.raises(PipeloomError, match="at most 4096"):
        pl.Schedule.of([["0F0"]] * 5_000, placement=list(range(5_000)), microbatches=1)
    with pytest.raises(PipeloomError, match="more than 2,000,000 forwards"):
        pl.Schedule.of([["0F0"]], placement=[0], microbatches=2_000_001)
    assert pl.schedules.gpipe(ranks=1, microbatches=1_000).microbatches == 1_000


def integers(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(schema, dict):
        if schema.get("type") == "integer":
            yield path, schema
        for key, value in schema.items():
            yield from integers(value, f"{path}/{key}")
    elif isinstance(schema, list):
        for at, value in enumerate(schema):
            yield from integers(value, f"{path}/{at}")


def test_every_whole_number_of_a_configuration_has_an_upper_bound() -> None:
    found = list(integers(Config.model_json_schema()))
    assert len(found) > 25
    open_ended = [path for path, schema in found if "maximum" not in schema and "/recompute/" not in path]
    assert open_ended == []


def test_workers_of_a_run_and_of_a_machine_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="at most 131,072"):
        MeshShape(pp=4096, dp=64, tp=2)
    with pytest.raises(CapacityError, match="at most 1,024"):
        require_room(1_025)
    monkeypatch.setattr("pipeloom.train.workers.preflight.memory_of_machine", lambda: 10 * limits.WORKER_BYTES)
    require_room(10)
    with pytest.raises(CapacityError, match="at most 10 workers fit"):
        require_room(11)


def test_only_regular_files_of_a_bounded_size_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    assert limits.read_file(tmp_path / "file", 5, "a text") == b"12345"
    with pytest.raises(UsageError, match="has 5 bytes; a text has at most 4"):
        limits.read_file(tmp_path / "file", 4, "a text")
    os.mkfifo(tmp_path / "pipe")
    for path, kind in ((tmp_path / "pipe", "a pipe"), (Path("/dev/zero"), "a device")):
        with pytest.raises(UsageError, match=f"is {kind}, and a text is read from a file"):
            limits.read_file(path, 4, "a text")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(UsageError, match="is read from a file"):
            load(path)
    for source in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ConfigError, match="is read from a file"):
            list(records(Fields(find(str(source), "auto"), "")))


def test_messages_repeat_two_hundred_characters_of_input_at_most() -> None:
    assert sentence("there is no schedule " + "x" * 200) == "there is no schedule " + "x" * 200
    assert max(map(len, sentence("no " + "x" * 201 + " here").split())) <= LONGEST_ECHO
    assert len(echo("a b " * 1_000)) <= LONGEST_ECHO
    assert "too long to show" in echo(1 << 60_000)


def test_messages_that_repeat_a_value_say_how_much_of_it() -> None:
    """A `{value!r}` in a message of a package that reads what users write has a width, such as `{value!r:.200}`."""
    open_ended = []
    for package in ("schedule", "config", "cli", "solver"):
        for path in sorted((SOURCE / package).rglob("*.py")):
            for outer in ast.walk(ast.parse(path.read_text())):
                if not isinstance(outer, ast.Raise):
                    continue
                for node in ast.walk(outer):
                    if isinstance(node, ast.FormattedValue) and node.conversion == 114 and node.format_spec is None:
                        open_ended.append(f"{path.name}:{node.lineno}")
    assert open_ended == []


def test_a_size_divides_or_the_nearest_that_do_are_named() -> None:
    limits.require_divides("nodes", 4, 8, "8 ranks")
    for size, near in ((3, "2 or 4"), (0, "1"), (9, "8")):
        with pytest.raises(ConfigError, match=f"^nodes={size} does not divide 8 ranks; nearest: {near}$"):
            limits.require_divides("nodes", size, 8, "8 ranks")


def test_an_error_is_quoted_by_its_first_line_or_its_type() -> None:
    assert first_line(ValueError("\n  no such file\nin there")) == "no such file"
    assert first_line(KeyError()) == "KeyError"


def test_files_of_users_are_read_in_one_way() -> None:
    """`limits.read_file` alone opens what a user names: it refuses pipes and devices, and never reads more than a limit."""
    own = {
        "settings.py:built_in",
        "hub.py:presets",
        "settings.py:_text_of",
        "settings.py:other_names",
        "chrome.py:_is_trace",
    }  # of the package; a regular file's beginning
    direct = []
    for path in [
        *(SOURCE / "schedule").rglob("*.py"),
        *(SOURCE / "traces").rglob("*.py"),
        *(SOURCE / "config").rglob("*.py"),
        SOURCE / "train" / "data" / "sources.py",
    ]:
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef) and f"{path.name}:{function.name}" not in own:
                calls = {ast.unparse(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)}
                if any(re.fullmatch(r"open|.*\.(read_text|read_bytes|open)", call) for call in calls):
                    direct.append(f"{path.name}:{function.name}")
    assert direct == []
