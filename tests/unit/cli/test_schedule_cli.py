"""`pipeloom schedule`: drawing, the other forms, and one clear message for every bad request."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from typer.testing import CliRunner

import pipeloom as pl
from pipeloom.cli import app
from pipeloom.schedule.csv_form import from_csv
from pipeloom.schedule.families import FAMILIES
from pipeloom.schedule.json_form import from_json

Run = Callable[[str], Any]
FIGURES = [
    "makespan",
    "busy",
    "idle",
    "spans",
    "bubble_ratio",
    "bubble_rate",
    "span_bubble_rate",
    "period",
    "peak_activations",
    "peak_memory",
    "lower_bound",
    "gap",
]


def test_it_draws_at_80_columns(pipeloom: Run) -> None:
    ended = pipeloom("schedule interleaved --ranks 4 --microbatches 9")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.startswith("interleaved, 4 ranks, 2 chunks, 9 micro-batches, rounds=balanced\n")
    assert max(map(len, ended.out.splitlines())) <= 80
    assert "\x1b" not in ended.out


def test_json_is_the_text_form_and_the_figures(pipeloom: Run) -> None:
    ended = pipeloom("schedule interleaved --ranks 4 --microbatches 9 --input-grad 0.5 --weight-grad .5 --json")
    assert (ended.code, ended.err) == (0, "")
    found = json.loads(ended.out)
    assert [key for key in FIGURES if key not in found] == []
    assert from_json(ended.out) == pl.schedules.interleaved(ranks=4, microbatches=9)
    assert found["makespan"] == 42
    assert found["idle"] == [6] * 4
    assert found["peak_activations"] == [12, 10, 8, 6]
    assert all(len(found[key]) == 4 for key in ("busy", "idle", "spans", "peak_activations", "peak_memory"))


def test_families_are_listed_and_described(pipeloom: Run) -> None:
    ended = pipeloom("schedule")
    assert (ended.code, ended.err) == (0, "")
    assert re.findall(r"^\S+", ended.out, re.MULTILINE) == list(FAMILIES)
    assert [line.split()[0] for line in json.loads(pipeloom("schedule --json").out)["families"]] == list(FAMILIES)
    for name in ("interleaved", "VPP"):
        described = " ".join(pipeloom(f"schedule {name} --help").out.split())
        assert "Options of interleaved (--option KEY=VALUE), with their defaults: cooldown: whole" in described
        assert "rounds: balanced" in described
        assert described.startswith("Usage: ")
    assert "Options of" not in pipeloom("schedule --help").out


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("schedule inter", ["interleaved", "interleaved-zb", "interleaved-overlap"]),
        ("train --data.s", ["--data.source", "--data.sampling"]),
        ("verify --mat", ["--matrix"]),
    ],
)
def test_a_shell_completes_names_options_and_keys(line: str, words: list[str]) -> None:
    typed = f"pipeloom {line}"
    variables = {"_PIPELOOM_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(line.count(" ") + 1)}
    assert CliRunner(env=variables).invoke(app, [], prog_name="pipeloom").stdout.split() == words


@pytest.mark.parametrize(
    "words",
    [
        "interleaved --option group-size=5 --chunks 3",
        "interleaved:group_size=5 --option chunks=3",
        "interleaved:chunks=3,group-size=5 --chunks 2",
    ],
)
def test_options_reach_the_family(pipeloom: Run, words: str) -> None:
    found = json.loads(pipeloom(f"schedule {words} --ranks 4 --microbatches 9 --json").out)
    assert found["options"] == {"chunks": 3, "group_size": 5}


def test_costs_by_stage_and_hop(pipeloom: Run) -> None:
    line = "schedule gpipe --ranks 2 --microbatches 1 --forward 1,2 --input-grad 3,4 --weight-grad 5,6 --p2p 0.5 --json"
    assert json.loads(pipeloom(line).out)["makespan"] == 1 + 2 + (4 + 6) + (3 + 5) + 2 * 0.5


def test_held_share_of_the_memory(pipeloom: Run, tmp_path: Path) -> None:
    path = tmp_path / "split.csv"
    path.write_text("0F0,0I0,0F1,0I1,0W0,0W1\n")
    whole = json.loads(pipeloom(f"schedule {path} --json").out)
    part = json.loads(pipeloom(f"schedule {path} --held-until-weight-grad 0.25 --json").out)
    assert whole["peak_memory"] == [2]
    assert part["peak_memory"] == [1.25]
    assert whole["peak_activations"] == part["peak_activations"] == [2]


def test_csv_and_back_from_the_file(pipeloom: Run, tmp_path: Path) -> None:
    ended = pipeloom("schedule 1f1b --ranks 3 --microbatches 5 --csv")
    assert from_csv(ended.out).codes == pl.schedules.one_f_one_b(ranks=3, microbatches=5).codes
    path = tmp_path / "mine.csv"
    path.write_text(ended.out)
    drawn = pipeloom(f"schedule {path} --ranks 3")
    assert drawn.code == 0
    assert drawn.out.startswith("mine, 3 ranks, 5 micro-batches\n")
    (tmp_path / "mine.json").write_text(pipeloom(f"schedule {path} --json").out)
    assert pipeloom(f"schedule {tmp_path / 'mine.json'}").out == drawn.out


def test_svg_and_trace_are_written(pipeloom: Run, tmp_path: Path) -> None:
    ended = pipeloom(
        f"schedule gpipe --ranks 2 --microbatches 2 --json --svg {tmp_path}/a.svg --trace {tmp_path}/a.json"
    )
    assert ended.code == 0
    assert ended.err == f"wrote {tmp_path}/a.svg\nwrote {tmp_path}/a.json\n"
    json.loads(ended.out)
    assert ET.parse(tmp_path / "a.svg").getroot().tag.endswith("svg")
    assert len(json.loads((tmp_path / "a.json").read_text())["traceEvents"]) > 8


def test_a_function_of_ones_own(pipeloom: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_schedules.py").write_text(
        "import pipeloom as pl\ndef mine(ranks, microbatches, twist=1):\n"
        "    return pl.schedules.gpipe(ranks, microbatches * twist)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "loom_beside.py").write_text((tmp_path / "my_schedules.py").read_text())
    (folder / "my-schedules.py").write_text("from loom_beside import mine as renamed\n")
    for name in ("my_schedules:mine", f"{tmp_path}/my_schedules.py:mine", f"{folder}/my-schedules.py:renamed"):
        found = json.loads(pipeloom(f"schedule {name} --ranks 2 --microbatches 2 --option twist=3 --json").out)
        assert found["microbatches"] == 6


def test_sizes_must_be_the_files(pipeloom: Run, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("0F0,0B0\n1F0,1B0\n")
    ended = pipeloom(f"schedule {path} --microbatches 3")
    assert ended.code == 2
    assert "--microbatches is 3, and" in ended.err
    assert pipeloom(f"schedule {path} --option x=1").code == 2


def test_a_deadlock_ends_with_3_and_the_cycle(pipeloom: Run) -> None:
    as_json = pipeloom("schedule interleaved --ranks 4 --microbatches 5 --chunks 3 --option rounds=paper --json")
    assert (as_json.code, as_json.err) == (3, "")
    error = json.loads(as_json.out)["error"]
    assert (error["type"], error["exit_code"]) == ("ScheduleError", 3)
    assert "the schedule deadlocks; the shortest cycle:" in error["message"]


PLACED = "torchtitan places its stages with --parallelism.pipeline-parallel-schedule ZBVZeroBubble\n"


def test_transforms_are_applied_in_order(pipeloom: Run) -> None:
    ended = pipeloom("schedule dualpipev --ranks 2 --microbatches 8 --transform unpair --transform half-split=1 --csv")
    assert (ended.code, ended.err) == (0, PLACED)
    wanted = pl.schedules.half_split(pl.schedules.unpair(pl.schedules.dualpipev(2, 8)), 1)
    assert from_csv(ended.out).programs == wanted.programs


def test_even_slices_of_attention_warn(pipeloom: Run) -> None:
    words = "schedule 1f1b --ranks 4 --microbatches 8 --option slices=4 --attention 0.6 --json"
    balanced, even = pipeloom(words), pipeloom(f"{words} --even-slices")
    assert (round(json.loads(balanced.out)["makespan"], 2), balanced.err) == (26.25, "")
    assert even.err.startswith("warning: 4 slices of unequal time take 36.7 and whole sequences 33: ")
    assert pipeloom("schedule 1f1b --ranks 4 --microbatches 8 --even-slices").err.startswith(
        "pipeloom: --attention and --even-slices are about slices"
    )
