"""`compare --sweep`: a schedule's figures at every value, as a table, JSON, SVG and PNG."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

import pipeloom as pl
from pipeloom.cli import app
from pipeloom.cli.sweep import Sweep
from pipeloom.errors import UsageError


def _run(*words: str) -> str:
    result = CliRunner().invoke(app, ["compare", *words])
    if result.exception is not None:
        raise result.exception
    return result.stdout


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("microbatches=8..11", (8, 9, 10, 11)),
        ("ranks=2..9:3", (2, 5, 8)),
        ("chunks=1,2,4,2", (1, 2, 4)),
        ("microbatches=1..200", tuple(range(1, 201, 4))),
    ],
)
def test_values_of_a_sweep(text: str, values: tuple[int, ...]) -> None:
    assert Sweep.of(text).values == values


def test_figures_are_those_of_each_schedule_alone(tmp_path: Path) -> None:
    svg, png = tmp_path / "x.svg", tmp_path / "x.png"
    words = ["1f1b", "interleaved", "--ranks", "4", "--sweep", "microbatches=4..12:4", "--json"]
    found = json.loads(_run(*words, "--svg", str(svg), "--png", str(png)))
    assert found["sweep"] == {"size": "microbatches", "values": [4, 8, 12]}
    for point in found["series"][0]["points"]:
        timeline = pl.simulate(pl.schedules.one_f_one_b(ranks=4, microbatches=point["value"]))
        assert point["makespan"] == timeline.makespan
        assert point["bubble_ratio"] == timeline.bubble_ratio
        assert point["memory"] == max(timeline.peak_memory)
    looped = pl.simulate(pl.schedules.interleaved(ranks=4, microbatches=8), pl.Costs().resized(0.5))
    assert found["series"][1]["points"][1]["makespan"] == looped.makespan
    root = ElementTree.fromstring(svg.read_text())
    lines = root.findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 6  # two schedules in three panels
    assert all(len(line.attrib["points"].split()) == 3 for line in lines)
    texts = " ".join(text.text or "" for text in root.iter("{http://www.w3.org/2000/svg}text"))
    assert "4 ranks, costs of 1/p of the model: F 1, I 1, W 1; p2p 0" in texts
    data = png.read_bytes()
    assert data.startswith(b"\x89PNG")
    assert int.from_bytes(data[16:20], "big") == 2 * 960


def test_a_family_without_chunks_is_one_line(tmp_path: Path) -> None:
    words = ["1f1b", "interleaved", "--ranks", "4", "--microbatches", "8", "--sweep", "chunks=1..3"]
    lines = _run(*words, "--svg", str(tmp_path / "x.svg")).splitlines()
    assert [line.split()[:2] for line in lines[1:5]] == [["1f1b", "any"], *(["interleaved", str(v)] for v in (1, 2, 3))]
    drawn = ElementTree.parse(tmp_path / "x.svg").getroot().findall("{http://www.w3.org/2000/svg}polyline")
    assert all(len(line.attrib["points"].split()) == 3 for line in drawn)


def test_what_a_schedule_refuses_is_a_gap_with_its_reason() -> None:
    text = _run("dualpipe", "gpipe", "--ranks", "4", "--sweep", "microbatches=6..8")
    assert "dualpipe refuses microbatches 6, 7:" in text
    assert len([line for line in text.splitlines() if line.startswith("gpipe")]) == 3
    with pytest.raises(UsageError, match="no schedule supports"):
        _run("dualpipe", "--ranks", "3", "--sweep", "microbatches=8..9")
