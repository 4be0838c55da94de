"""`build`: names, options, chunks and functions of the user's."""

from __future__ import annotations

import pytest

from pipeloom import schedules
from pipeloom.errors import UsageError
from pipeloom.schedule import Schedule
from pipeloom.schedule.families import FAMILIES, build


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_a_function_of_the_public_face(name: str) -> None:
    assert FAMILIES[name] in [getattr(schedules, public) for public in schedules.__all__]
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
    with pytest.raises(UsageError, match=r"(ranks|microbatches) is .*; it must be a whole number of at least 1"):
        build(name, p, m)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "chunks", "options", "words"),
    [
        ("interleavd", None, {}, "there is no schedule 'interleavd'; did you mean 'interleaved'"),
        ("interleaved", None, {"round": "tail"}, "schedule interleaved has no option 'round'; did you mean 'rounds'"),
        ("1f1b", None, {"rounds": "tail"}, "schedule 1f1b has no option 'rounds'; known: cooldown"),
        ("zbv", None, {"costs": 1}, "schedule zbv has no option 'costs'"),
        ("zbv", 3, {}, "schedule zbv holds 2 chunks a rank, not 3; .*interleaved"),
        ("1f1b", 2, {}, "schedule 1f1b holds 1 chunk a rank, not 2"),
        ("no.such.module:make", None, {}, "schedule 'no.such.module:make'"),
        ("builtins:dict", None, {}, "schedule 'builtins:dict'"),
    ],
)
def test_refusals(name: str, chunks: int | None, options: dict[str, object], words: str) -> None:
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
