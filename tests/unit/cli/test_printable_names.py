"""Names and texts from files, users and other ranks cannot steer a terminal, and cannot break a drawing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import pipeloom as pl
from pipeloom import draw
from pipeloom.config import load
from pipeloom.errors import ConfigError, ScheduleError, printable
from pipeloom.schedule.json_form import from_json, to_dict, to_json
from pipeloom.train.report.report import make_folder

BAD = ["\x1b[31mred", "bell\a", "two\nlines", "\x9b2J", "lone \ud800", "right \u202e to left", "nul\0"]


@pytest.mark.parametrize("name", BAD, ids=ascii)
def test_a_schedule_has_no_name_that_steers_a_terminal(name: str) -> None:
    plain = pl.schedules.gpipe(2, 2)
    with pytest.raises(ScheduleError, match="a schedule cannot be called"):
        pl.Schedule.of([["0F0", "0B0"]], placement=[0], microbatches=1, name=name)
    text = json.dumps(to_dict(plain) | {"name": name})
    with pytest.raises(ScheduleError) as refused:
        from_json(text)
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("value", BAD, ids=ascii)
def test_an_option_is_escaped_wherever_it_is_shown(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    schedule = from_json(json.dumps(to_dict(pl.schedules.gpipe(2, 2)) | {"options": {"rounds": value}}))
    timeline = pl.simulate(schedule)
    picture = draw.svg(timeline)
    ElementTree.fromstring(picture)
    for text in (picture, str(draw.terminal(timeline, width=100))):
        assert value not in text
    json.dumps(draw.trace(timeline)).encode("ascii")
    to_json(schedule).encode("ascii")


def test_an_error_is_printed_without_control_characters(pipeloom: Callable[[str], Any]) -> None:
    ended = pipeloom("schedule no\x1b[31msuch --ranks 2 --microbatches 2")
    assert ended.code == 2
    assert "\x1b" not in ended.err
    assert "no" in ended.err


def test_a_run_folder_is_its_users_alone(tmp_path: Path) -> None:
    folder = make_folder(load(None, {"log.dir": str(tmp_path / "runs"), "schedule.name": "x[red]\x1b/../y.csv"}))
    assert folder.stat().st_mode & 0o777 == 0o700
    assert folder.parent == tmp_path / "runs"
    assert folder.name.isascii()


def test_a_value_that_no_file_can_hold_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data.source is 'a.udcff.txt': it is not text \(UTF-8\)"):
        load(None, {"data.source": "a\udcff.txt"})


def test_printable_keeps_text() -> None:
    assert printable("Σ idle\n\tü ☃") == "Σ idle\n\tü ☃"
    assert printable("\x1b[0m\x9b\r") == "\\x1b[0m\\x9b\\x0d"
