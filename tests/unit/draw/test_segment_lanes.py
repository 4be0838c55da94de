"""`--segments`: the table of docs/pairs.md, the lanes of a pair, and files of segment times."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from paths import ROOT
from pipeloom.draw.segments import WAYS, segment_lanes
from pipeloom.errors import UsageError
from pipeloom.schedule.segments import LayerSegments
from pipeloom.traces.segment_times import read_segments

Run = Callable[[str], Any]
TIMES = {
    "layers": 2,
    "attention": [1, 2, 3],
    "experts": [2, 2, 2],
    "dispatch": 1.5,
    "combine": 0.5,
    "dispatch_backward": 2,
}


def test_the_table_of_the_documentation_is_printed(pipeloom: Run) -> None:
    text = (ROOT / "docs/pairs.md").read_text("utf-8")
    command = re.search(r"^pipeloom (schedule .* --segments [0-9.,]+)", text, re.MULTILINE)
    assert command is not None
    printed = pipeloom(command[1]).out.splitlines()
    rows = [
        re.split(r" {2,}", line.strip())
        for line in printed[printed.index(next(filter(re.compile("all-to-all ").match, printed))) :]
    ]
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    at = table.index(["all-to-all", *WAYS])
    assert rows == [table[at], *table[at + 2 : at + 8]]


def test_a_file_gives_costs_and_pairs(pipeloom: Run, tmp_path: Path) -> None:
    (tmp_path / "times.json").write_text(json.dumps(TIMES))
    found = json.loads(
        pipeloom(f"schedule 1f1b-overlap --ranks 2 --microbatches 4 --segments {tmp_path / 'times.json'} --json").out
    )
    (row,) = found["segments"]
    assert (row["segments"], row[WAYS[0]]) == ("times", "33")
    assert found["costs"]["forward"] == 2 * (1 + 2 + 1.5 + 0.5)
    assert found["costs"]["input_grad"] == 2 * (2 + 2 + 2 + 0.5)
    assert float(row[WAYS[2]]) == found["costs"]["pair"] < float(row[WAYS[0]])


def test_a_file_with_chunks_and_two_levels_gives_shorter_forwards(pipeloom: Run, tmp_path: Path) -> None:
    words = "schedule 1f1b --ranks 2 --microbatches 4 --segments {} --json"
    forwards = []
    for more in ({"inside": 1}, {"inside": 1, "chunks": 2}):
        file = tmp_path / "times.json"
        file.write_text(json.dumps(TIMES | more))
        forwards.append(json.loads(pipeloom(words.format(file)).out)["costs"]["forward"])
    # the first chunk's hops, both experts, one behind what a link still carries, and the second chunk's way back
    assert forwards == [2 * (1 + 1.5 + 1 + 2 + 1 + 0.5), 2 * (1 + 1.5 + 1 + 1 + 0.5 + 0.25)]


@pytest.mark.parametrize(
    "content",
    [
        "",
        [],
        TIMES | {"inside": "x"},
        {"attention": 3},
        TIMES | {"gate": 1},
        TIMES | {"dispatch": "x"},
        TIMES | {"combine": 10**400},
    ],
)
def test_another_file_is_refused_with_its_form(content: Any, tmp_path: Path) -> None:
    (tmp_path / "times.json").write_text(json.dumps(content))
    with pytest.raises(UsageError, match=r"not a file of segment times .*; it holds an object with \"attention\""):
        read_segments(str(tmp_path / "times.json"))


@pytest.mark.parametrize(("name", "most"), [("layers", "100,000"), ("chunks", "1,000")])
@pytest.mark.parametrize("number", [0, -1, 10**400, 2.5, "2", True])
def test_numbers_of_layers_and_chunks_are_whole_ones_within_limits(
    name: str, most: str, number: Any, tmp_path: Path
) -> None:
    (tmp_path / "times.json").write_text(json.dumps(TIMES | {name: number}))
    with pytest.raises(UsageError, match=rf"{name} = .*: it must be a whole number from 1 to {most}"):
        read_segments(str(tmp_path / "times.json"))


def test_lanes_show_each_segment_at_its_time() -> None:
    """Unit computation, all-to-all 1.5: 12, 7 and 6.5 units on one scale."""
    root = ET.fromstring(segment_lanes((LayerSegments(dispatch=1.5, combine=1.5),), 1024))
    rects = root.findall("{*}rect")[1:]
    unit = (1024 - 124 - 24) / 12
    idle = [rect for rect in rects if rect.get("fill") == "#eef0f4"]
    assert [round(float(rect.attrib["width"]) / unit, 2) for rect in idle] == [12, 12, 7, 7, 6.5, 6.5]
    assert len(rects) - len(idle) == 8 + 8 + 10
    lane = [rect for rect in rects if rect.get("y") == idle[-1].get("y")][1:]
    starts = [round((float(rect.attrib["x"]) - 124) / unit, 2) for rect in lane]
    assert starts == [0, 1.5, 3, 4.5], "B.combine, F.dispatch, B.dispatch, F.combine"
    words = [text.text for text in root.findall("{*}text")]
    assert words.count("F.dispatch") == 3
    assert "overlapped, dW apart: 6.5" in words


def test_drawing_and_page_hold_the_lanes(pipeloom: Run, tmp_path: Path) -> None:
    line = f"schedule dualpipev --ranks 2 --microbatches 4 --svg {tmp_path / 'a.svg'} --html {tmp_path / 'a.html'}"
    assert pipeloom(f"{line} --segments 1.5").code == 0
    assert len(ET.parse(tmp_path / "a.svg").getroot().findall("{*}svg")) == 1
    page = (tmp_path / "a.html").read_text("utf-8")
    assert "overlapped, dW apart: 6.5" in page
    assert page.split("style-src ")[1].split(";")[0].count("sha256-") == 2
    assert pipeloom(line).code == 0
    assert "overlapped, dW apart" not in (tmp_path / "a.html").read_text("utf-8")


def test_the_lanes_are_of_the_number_that_gains_most(pipeloom: Run, tmp_path: Path) -> None:
    """At 1 a pair takes 6 of 10, at 1.5 with its weight gradients apart 6.5 of 12, at 2 it takes 8 of 14."""
    line = "schedule 1f1b-overlap --ranks 2 --microbatches 4 --svg"
    several, best = tmp_path / "several.svg", tmp_path / "best.svg"
    assert pipeloom(f"{line} {several} --segments 2,1.5,1").code == 0
    assert pipeloom(f"{line} {best} --segments 1.5").code == 0
    lanes = [text[text.index("F of one micro-batch") :] for text in (several.read_text(), best.read_text())]
    assert lanes[0] == lanes[1]
