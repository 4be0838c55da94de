"""`build`: names, options, chunks and functions of the user's."""

from __future__ import annotations

from typing import Any

import pytest

from pipeloom import schedules
from pipeloom.errors import UsageError
from pipeloom.schedule import Schedule
from pipeloom.schedule.families import ALIASES, FAMILIES, build, canonical_name


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_a_function_of_the_public_face(name: str) -> None:
    assert any(FAMILIES[name] is public for public in vars(schedules).values())
    schedule = build(name, 4, 8)
    assert (schedule.name, schedule.ranks, schedule.microbatches) == (name, 4, 8)
    assert hash(schedule) == hash(build(name, 4, 8))
    assert schedule == build(name, 4, 8)
    assert str(schedule).startswith(f"Schedule({name}, ranks=4")
    assert "arXiv" in (FAMILIES[name].__doc__ or "") + str(
        __import__(FAMILIES[name].__module__, fromlist=["x"]).__doc__
    )


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("p", "m"), [(0, 4), (4, 0), (-1, 1), (2.5, 4), (True, 4)])
def test_impossible_sizes(name: str, p: object, m: object) -> None:
    with pytest.raises(UsageError, match=r"(ranks|microbatches) is .*; it must be a whole number"):
        build(name, p, m)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "chunks", "options", "words"),
    [
        ("interleavd", None, {}, "there is no schedule 'interleavd'; did you mean 'interleaved'"),
        ("interleaved", None, {"round": "tail"}, "schedule interleaved has no option 'round'; did you mean 'rounds'"),
        ("1f1b", None, {"rounds": "tail"}, "schedule 1f1b has no option 'rounds'; known: cooldown"),
        ("zbv", None, {"costs": 1}, "schedule zbv has no option 'costs'"),
        ("zbv", None, {"ranks": 2}, "schedule zbv has no option 'ranks'"),
        (f"{__name__}:mine", None, {"microbatches": 2}, "mine has no option 'microbatches'; known: cooldown, letters"),
        ("zbv", 3, {}, "schedule zbv holds 2 chunks per rank, not 3; .*interleaved"),
        ("1f1b", 2, {}, "schedule 1f1b holds 1 chunk per rank, not 2"),
        ("no.such.module:make", None, {}, "schedule 'no.such.module:make'"),
        ("builtins:dict", None, {}, "schedule 'builtins:dict'"),
        (None, None, {}, "there is no schedule 'None'; known: 1f1b"),
        (["1f1b"], None, {}, "there is no schedule .*1f1b"),
        (":make", None, {}, "schedule ':make' is not of the form module:function"),
        ("1f1b:", None, {}, "schedule '1f1b:' is not of the form module:function"),
    ],
)
def test_refusals(name: Any, chunks: int | None, options: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        build(name, 4, 8, chunks, options)


def test_chunks_that_a_family_has_anyway() -> None:
    assert build("zbv", 4, 8, 2) == build("zbv", 4, 8)
    assert build("1f1b", 4, 8, 1) == build("1f1b", 4, 8)
    assert build("interleaved", 4, 8, 3).chunks == 3


def mine(ranks: int, microbatches: int, letters: str = "FB") -> Schedule:
    """A user's own: everything on each rank in turn."""
    return Schedule.of(
        [[f"{r}{kind}{mb}" for kind in letters for mb in range(microbatches)] for r in range(ranks)],
        placement=range(ranks),
        microbatches=microbatches,
    )


def test_a_function_of_the_user() -> None:
    assert build(f"{__name__}:mine", 2, 3) == mine(2, 3)
    assert build(f"{__name__}:mine", 2, 3, None, {"letters": "FIW"}) == mine(2, 3, "FIW")


NAMES = {
    "1F1B": "1f1b",
    "Schedule1F1B": "1f1b",
    "PipeDream-Flush": "1f1b",
    "GPipe": "gpipe",
    "ScheduleGPipe": "gpipe",
    "AFAB": "gpipe",
    "F-then-B": "gpipe",
    "vpp": "interleaved",
    "VPP": "interleaved",
    "Interleaved1F1B": "interleaved",
    "ScheduleInterleaved1F1B": "interleaved",
    "LoopedBFS": "looped-bfs",
    "ScheduleLoopedBFS": "looped-bfs",
    "looped_bfs": "looped-bfs",
    "InterleavedZeroBubble": "interleaved-zb",
    "ScheduleInterleavedZeroBubble": "interleaved-zb",
    "ZBVZeroBubble": "zbv",
    "ScheduleZBVZeroBubble": "zbv",
    "zb-v": "zbv",
    "DualPipeV": "dualpipev",
    "ScheduleDualPipeV": "dualpipev",
    "DualPipe": "dualpipe",
    "ZBH1": "zb-h1",
    "zb_h2": "zb-h2",
    "V-Half": "v-half",
    "VMin": "v-min",
}


@pytest.mark.parametrize(("alias", "name"), NAMES.items())
def test_other_names_of_a_family(alias: str, name: str) -> None:
    for spelling in (alias, alias.lower(), alias.upper()):
        assert canonical_name(spelling) == name
        assert build(spelling, 4, 8) == build(name, 4, 8)


def test_every_class_of_torch_has_a_family() -> None:
    module = pytest.importorskip("torch.distributed.pipelining.schedules")
    bases = {"PipelineScheduleSingle", "PipelineScheduleMulti"}
    own = [kind for name, kind in vars(module).items() if name.startswith("Schedule") and isinstance(kind, type)]
    classes = {kind.__name__ for kind in own} - bases
    assert len(classes) >= 7
    assert {name for name in classes if canonical_name(name) not in FAMILIES} == set()


def test_names_that_hide_no_other() -> None:
    assert set(ALIASES.values()) <= set(FAMILIES)
    assert all(canonical_name(name) == name for name in FAMILIES)
    assert all(canonical_name(alias) == name for alias, name in ALIASES.items())
    assert canonical_name("my.module:F") == "my.module:F"
    assert canonical_name("Table.csv") == "Table.csv"


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("1F1C", "'1f1b'"), ("GPIPEE", "'gpipe'"), ("ZBVZeroBuble", "'zbv'"), ("ScheduleDualPipe5", "'dualpipe'")],
)
def test_near_misses_name_the_family(name: str, nearest: str) -> None:
    with pytest.raises(UsageError, match=f"there is no schedule '{name}'; did you mean .*{nearest}"):
        build(name, 4, 8)
