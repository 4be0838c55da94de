"""The SVG: well formed, one box for each action, at its time, on a scale shared by all timelines."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

import pytest

import pipeloom as pl
from paths import DATA
from pipeloom.draw import svg
from pipeloom.draw.palette import CURVE_COLOUR
from pipeloom.draw.svg import text_width
from pipeloom.schedule.files import load
from pipeloom.schedule.sharding import shard

GOLDEN = DATA / "torch"
SPACE = {"s": "http://www.w3.org/2000/svg"}


def _boxes(text: str) -> list[list[ET.Element]]:
    """A list of rectangles for each rank of each timeline."""
    root = ET.fromstring(text)
    return [group.findall("s:rect", SPACE) for group in root.findall("s:g[@class='b']", SPACE)]


def test_one_box_for_each_action_at_its_time() -> None:
    timeline = pl.simulate(pl.schedules.interleaved(ranks=4, microbatches=9))
    rows = _boxes(svg(timeline))
    assert [len(row) for row in rows] == [36] * 4
    first = rows[0]
    unit = float(first[0].attrib["width"])
    left = float(first[0].attrib["x"])
    for rank, row in enumerate(rows):
        for box, start, end in zip(row, timeline.starts[rank], timeline.ends[rank], strict=True):
            assert float(box.attrib["x"]) == pytest.approx(left + start * unit, abs=0.5)
            assert float(box.attrib["width"]) == pytest.approx((end - start) * unit, abs=0.05)


def test_numbers_and_words() -> None:
    timeline = pl.simulate(pl.schedules.one_f_one_b(ranks=2, microbatches=3))
    root = ET.fromstring(svg(timeline))
    groups = root.findall("s:g[@class='n']", SPACE)
    assert [[text.text for text in group] for group in groups] == [list("010212"), list("001122")]
    titles = [title.text for title in root.iter("{http://www.w3.org/2000/svg}title")]
    assert titles[0] == "1f1b, 2 ranks, 3 micro-batches"
    assert "B of stage 1 micro-batch 0, 2 to 4, steady" in titles
    words = " ".join(text.text or "" for text in root.iter("{http://www.w3.org/2000/svg}text"))
    assert "makespan 12 · bubble ratio 0.3333 (idle / busy) · bubble rate 0.2500 (idle / p·makespan)" in words


def test_timelines_share_the_scale_of_time() -> None:
    short = pl.simulate(pl.schedules.gpipe(ranks=2, microbatches=2))
    long = pl.simulate(pl.schedules.gpipe(ranks=2, microbatches=4))
    rows = _boxes(svg([short, long]))
    assert len(rows) == 4
    assert rows[0][0].attrib["width"] == rows[2][0].attrib["width"]
    assert ET.fromstring(svg([short, long])).attrib["width"] == "960"


def test_a_pair_has_its_forward_above_its_backward() -> None:
    timeline = pl.simulate(load(GOLDEN / "dualpipev.csv"))
    row = _boxes(svg(timeline))[0]
    pairs = [at for at, cell in enumerate(timeline.schedule.programs[0]) if isinstance(cell, pl.Pair)]
    above, below = row[pairs[0]], row[pairs[0] + 1]
    assert above.attrib["x"] == below.attrib["x"]
    assert float(below.attrib["y"]) == float(above.attrib["y"]) + float(above.attrib["height"])
    assert above.attrib["class"] != below.attrib["class"]


def test_all_to_all_is_a_row_at_the_foot_of_its_box() -> None:
    """30 % of F 1 and of I 1: in an F alone 0.3 of its time, in a pair of 2.4 an eighth for each half."""
    timeline = pl.simulate(pl.schedules.build("dualpipev", 2, 4), pl.Costs(all_to_all=0.3))
    root = ET.fromstring(svg(timeline))
    rows = [group.findall("s:rect[@class]", SPACE) for group in root.findall("s:g[@class='t']", SPACE)]
    boxes = _boxes(svg(timeline))
    unit = float(boxes[0][0].attrib["width"])
    assert float(rows[0][0].attrib["width"]) == pytest.approx(0.3 * unit, abs=0.02)
    assert all(float(rect.attrib["width"]) == pytest.approx(0.3 * unit, abs=0.02) for row in rows for rect in row)
    assert "foot of a box: its all-to-all" in "".join(root.itertext())
    assert "all-to-all" not in svg(pl.simulate(pl.schedules.gpipe(2, 2)))


def test_tooltips_can_be_left_out_and_are_for_many_boxes() -> None:
    small = pl.simulate(pl.schedules.gpipe(ranks=2, microbatches=2))
    assert svg(small).count("<title>") == 1 + 8
    assert svg(small, tooltips=False).count("<title>") == 1
    many = pl.simulate(pl.schedules.gpipe(ranks=2, microbatches=1200))
    assert svg(many).count("<title>") == 1


def test_names_are_escaped_and_nothing_is_fetched() -> None:
    schedule = pl.Schedule.of([["0F0", "0B0"]], placement=[0], microbatches=1, name='<a "b" & c>')
    text = svg(pl.simulate(schedule))
    assert ET.fromstring(text).attrib["aria-label"].startswith('<a "b" & c>')
    assert re.findall(r"https?://[^\"]*", text) == ["http://www.w3.org/2000/svg"]
    assert "<script" not in text


def test_nothing_to_draw_is_an_error() -> None:
    with pytest.raises(pl.PipeloomError, match="at least one"):
        svg([])


def test_zero_makespan() -> None:
    ET.fromstring(svg(pl.simulate(pl.schedules.gpipe(ranks=2, microbatches=2), pl.Costs(0, 0, 0))))


def test_long_idle_times_have_room() -> None:
    timeline = pl.simulate(pl.schedules.one_f_one_b(ranks=2, microbatches=1), pl.Costs(0.0001234, 0.0002222, 0.0003333))
    text = svg(timeline)
    ends = [float(box.attrib["x"]) + float(box.attrib["width"]) for row in _boxes(text) for box in row]
    idle, _ = [
        word for word in ET.fromstring(text).iter("{http://www.w3.org/2000/svg}text") if word.get("class") == "e"
    ][:2]
    assert idle.text == "0.0006789"
    assert float(idle.attrib["x"]) - text_width(idle.text, 11.5) > max(ends)


def test_bytes_are_a_curve_for_each_rank_and_pool_under_the_limit() -> None:
    """Weights of 2, and 4 of each micro-batch that is alive; the copies on the host stand for the whole step."""
    costs = pl.Costs(bytes={"saved": 4.0, "params": 2.0, "copy": 8.0, "none": 0.0}, pools={"copy": "host", "none": "x"})
    timeline = pl.simulate(pl.schedules.one_f_one_b(2, 2), costs)
    document = svg(timeline, limit=20.0)
    paths = [
        path.get("d") or ""
        for path in ET.fromstring(document).iter("{http://www.w3.org/2000/svg}path")
        if path.get("fill") == CURVE_COLOUR
    ]
    first, host, _, _ = [[float(y) for y in re.findall(r"V([\d.]+)", path)] for path in paths]
    foot = first[-1]
    assert [round((foot - y) * 20 / 24, 1) for y in first[:-1]] == [2, 6, 10, 6, 2]
    assert [round((host[-1] - y) * 8 / 24, 1) for y in host[:-1]] == [8]
    (line,) = {float(y) for y in re.findall(r'class="limit" d="M[\d.]+ ([\d.]+)H', document) if float(y) < foot}
    assert foot - line == 24
    assert "bytes in device and host, the peak at the right, dashed: the limit 20 B" in document
    assert ">10 B<" in document


def test_collectives_have_a_lane_and_actions_without_time_leave_the_numbers() -> None:
    timeline = pl.simulate(shard(pl.schedules.one_f_one_b(2, 4), 1), pl.Costs(gather=1.0, reduce=1.0))
    document = svg(timeline)
    assert document.count(">collective<") == 2
    assert document.count(">3</text>") >= 4
    for words in ("UNSHARD gather", "RESHARD release", "REDUCE_GRAD sum"):
        assert f">{words} of the " in document
