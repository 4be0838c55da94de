"""The JSON form: it keeps all that a Schedule says, ignores what it does not know, and refuses with the place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipeloom as pl
from pipeloom.errors import UsageError
from pipeloom.schedule.files import load
from pipeloom.schedule.json_form import from_json, to_dict, to_json

TWO_ROUTES = pl.Schedule.of(
    [["0F0", "(3F1;0B0)OVERLAP_F_B", "3B1"], ["2F1", "1F0", "1I0", "2B1", "1W0"]],
    placement=[0, 1, 1, 0],
    microbatches=2,
    name="two routes",
    routes=[(0, 1), (2, 3)],
    route_of=[0, 1],
    options={"sizes": (1, 2), "word": "x"},
)


@given(
    name=st.sampled_from(["gpipe", "1f1b", "interleaved", "looped-bfs"]),
    ranks=st.integers(1, 5),
    microbatches=st.integers(1, 9),
)
@settings(max_examples=40, deadline=None)
def test_round_trip_gives_an_equal_schedule(name: str, ranks: int, microbatches: int) -> None:
    made = pl.schedules.build(name, ranks, microbatches)
    assert from_json(to_json(made)) == made


def test_two_routes_pairs_and_options_survive() -> None:
    read = from_json(to_json(TWO_ROUTES))
    assert read == TWO_ROUTES
    assert hash(read) == hash(TWO_ROUTES)


def test_the_keys_are_the_documented_ones() -> None:
    assert list(to_dict(TWO_ROUTES)) == [
        "format",
        "name",
        "options",
        "ranks",
        "microbatches",
        "placement",
        "routes",
        "route_of",
        "programs",
    ]
    assert to_dict(TWO_ROUTES)["format"] == "pipeloom.schedule/1"
    assert to_dict(TWO_ROUTES)["programs"][0] == ["0F0", "(3F1;0B0)OVERLAP_F_B", "3B1"]


def test_unknown_keys_are_ignored_and_routes_are_optional(tmp_path: Path) -> None:
    made = pl.schedules.one_f_one_b(ranks=2, microbatches=3)
    raw = to_dict(made) | {"makespan": 3.0, "later": {"x": 1}}
    for key in ("routes", "route_of", "ranks", "options", "name"):
        del raw[key]
    path = tmp_path / "any.txt"
    path.write_text(json.dumps(raw))
    assert load(path).codes == made.codes


def _broken(**changes: Any) -> str:
    raw = to_dict(TWO_ROUTES)
    for key, value in changes.items():
        if value is ...:
            del raw[key]
        else:
            raw[key] = value
    return json.dumps(raw)


@pytest.mark.parametrize(
    ("text", "kind", "reason"),
    [
        ('{"format": ', UsageError, r"^x:1:12: this is not JSON"),
        ("[]", UsageError, "^x: a schedule is a JSON object"),
        (_broken(format="pipeloom.schedule/2"), UsageError, "this version reads 'pipeloom.schedule/1'"),
        (_broken(programs=...), UsageError, "'programs' is missing"),
        (_broken(placement=...), UsageError, "'placement' is missing"),
        (_broken(microbatches="2"), UsageError, "microbatches is '2'; it must be a whole number"),
        (_broken(placement=[0, 1, 1, True]), UsageError, "placement is .*True.*; it must be a list of whole numbers"),
        (_broken(programs=["0F0"]), UsageError, "programs is .*one list of cells"),
        (_broken(programs=[[0], []]), UsageError, "programs is .*; it must be one list of cells"),
        (_broken(ranks=3), pl.ScheduleError, "ranks is 3, and there are programs for 2"),
        (_broken(placement=[0, 1, 1, 5]), pl.ScheduleError, "stage 3 is placed on rank 5 of 2"),
        (_broken(route_of=[0]), pl.ScheduleError, "route_of must give each of the 2"),
        (_broken(routes=[[0, 1], [2, 2]]), pl.ScheduleError, "exactly once"),
        (_broken(programs=[["0F0", "0F0x"], ["1F0"]]), pl.ScheduleError, "rank 0, action 1: '0F0x' is not an action"),
        (_broken(microbatches=10**12), pl.ScheduleError, "8 actions are too few for 1000000000000 micro-batches"),
        (_broken(microbatches=1, route_of=[0]), pl.ScheduleError, "names micro-batch 1 of 1"),
    ],
)
def test_refusals(text: str, kind: type[Exception], reason: str) -> None:
    with pytest.raises(kind, match=reason):
        from_json(text, source="x")
