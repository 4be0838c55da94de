"""The losses of a run, from the lines of its log to the points of a chart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from pipeloom.draw.chart import Panel, chart
from pipeloom.draw.losses import MOST_LOSSES, loss_curve, thinned


def _log(path: Path, *events: dict[str, Any], more: str = "") -> Path:
    path.write_text("".join(json.dumps(event) + "\n" for event in events) + more)
    return path


def _texts(svg: str, style: str) -> list[str | None]:
    return [
        text.text for text in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text") if text.get("class") == style
    ]


def _points(svg: str) -> list[str | None]:
    return [title.text for title in ET.fromstring(svg).findall(".//{*}circle/{*}title")]


def test_the_curve_has_every_step_as_it_was_done_last_and_the_held_out_losses(tmp_path: Path) -> None:
    step = {"event": "step", "grad_norm": 1.0}
    events = [
        {"event": "messages", "volumes": []},
        *(
            {**step, "step": at, "loss": loss}
            for at, loss in ((1, 5.5), (2, 9.0), (3, 4.5), (2, 5.0), (4, float("nan")))
        ),
        {"event": "evaluation", "step": 1, "loss": 5.25},
        {"event": "evaluation", "step": 3, "loss": 4.75},
        {"event": "figures", "step": 3, "loss": 1.0},
        {"event": "step", "step": [1], "loss": {}},
    ]
    drawn = loss_curve(_log(tmp_path / "log.jsonl", *events, more='[1]\n"step"\n{"event": "step", "st'), 960)
    assert _points(drawn) == [
        "of each step: 5.5 at 1", "of each step: 5 at 2", "of each step: 4.5 at 3",
        "held-out: 5.25 at 1", "held-out: 4.75 at 3",
    ]  # fmt: skip
    assert _texts(drawn, "e") == ["4.4", "4.6", "4.8", "5", "5.2", "5.4", "5.6"]


@pytest.mark.parametrize("events", [(), ({"event": "step", "step": 1, "loss": 2.0},)], ids=["no step", "one step"])
def test_there_is_no_curve_of_less_than_two_steps(tmp_path: Path, events: Any) -> None:
    assert loss_curve(tmp_path / "log.jsonl", 960) == ""
    assert loss_curve(_log(tmp_path / "log.jsonl", *events), 960) == ""


def test_a_point_of_many_steps_is_their_mean() -> None:
    points = thinned({step: float(step % 4) for step in range(1, 4 * MOST_LOSSES)})
    assert len(points) == MOST_LOSSES
    assert points[:2] == [(4, 1.5), (8, 1.5)]
    assert points[-1] == (4 * MOST_LOSSES - 1, 2.0)  # of the three that are left


@pytest.mark.parametrize("value", [0.0, 2.0, -3.0])
def test_a_line_without_slope_is_drawn(value: float) -> None:
    drawn = chart("", "", [Panel("", {"level": [(1, value), (2, value)]}, from_zero=False)])
    (line,) = ET.fromstring(drawn).findall(".//{*}polyline")
    heights = {float(point.split(",")[1]) for point in line.attrib["points"].split()}
    assert len(heights) == 1
    assert 0 < heights.pop() < float(ET.fromstring(drawn).attrib["height"])
