"""Messages by hand: who receives and sends what, which receives are open before each entry, how many messages and how large."""

from __future__ import annotations

import pytest

import pipeloom as pl
from pipeloom.schedule import Costs, Schedule
from pipeloom.schedule.channels import (
    Channel,
    Edge,
    Message,
    message_counts,
    message_sizes,
    posting_plan,
    size_words,
    smallest_depths,
    traffic,
)

FORTH, BACK = Channel(0, 1, "activation"), Channel(1, 0, "gradient")


def two_ranks(*second: str) -> Schedule:
    """Rank 0 runs three forwards and then their backwards; rank 1 the given entries."""
    first = ["0F0", "0F1", "0F2", "0B0", "0B1", "0B2"]
    return Schedule.of([first, list(second)], placement=(0, 1), microbatches=3)


def numbers(plan: tuple[tuple[Message, ...], ...]) -> list[list[int]]:
    return [[message.number for message in entry] for entry in plan]


ORDERLY = ("1F0", "1B0", "1F1", "1B1", "1F2", "1B2")
LAST_FIRST = ("1F2", "1F0", "1F1", "1B0", "1B1", "1B2")


def test_an_output_goes_forth_and_its_gradient_back() -> None:
    first, second = traffic(two_ranks(*ORDERLY))
    edge = Edge(0, 1, "output")
    assert [entry.sends for entry in first] == [*((Message(FORTH, edge, mb, mb),) for mb in range(3)), (), (), ()]
    assert [entry.receives for entry in first] == [(), (), (), *((Message(BACK, edge, mb, mb),) for mb in range(3))]
    assert [entry.receives for entry in second[::2]] == [entry.sends for entry in first[:3]]
    assert [entry.sends for entry in second[1::2]] == [entry.receives for entry in first[3:]]
    forth, back = first[1].sends[0], first[4].receives[0]
    assert (forth.producer, forth.consumer, forth.words) == (0, 1, "the output of stage 0 micro-batch 1")
    assert (back.producer, back.consumer, back.words) == (1, 0, "the input gradient of stage 1 micro-batch 1")


@pytest.mark.parametrize(
    ("second", "least", "when_needed", "one_ahead", "two_ahead"),
    [
        (ORDERLY, 1, [[0], [], [1], [], [2], []], [[0], [1], [], [2], [], []], [[0, 1], [2], [], [], [], []]),
        (
            LAST_FIRST,
            3,
            [[0, 1, 2], [], [], [], [], []],
            [[0, 1, 2], [], [], [], [], []],
            [[0, 1, 2], [], [], [], [], []],
        ),
    ],
)
def test_receives_are_posted_in_order_as_far_ahead_as_asked(
    second: tuple[str, ...],
    least: int,
    when_needed: list[list[int]],
    one_ahead: list[list[int]],
    two_ahead: list[list[int]],
) -> None:
    program = traffic(two_ranks(*second))[1]
    assert smallest_depths(program) == {FORTH: least}
    assert numbers(posting_plan(program, 1, ahead=False)) == when_needed
    assert numbers(posting_plan(program, 1, ahead=True)) == one_ahead
    assert numbers(posting_plan(program, 2, ahead=True)) == two_ahead


def test_nothing_is_posted_before_the_entry_that_needs_it() -> None:
    program = traffic(two_ranks(*ORDERLY))[0]
    assert numbers(posting_plan(program, 1, ahead=False)) == [[], [], [], [0], [1], [2]]


def test_messages_are_counted_and_weighed_by_route() -> None:
    """Two routes of two ranks in opposite directions: micro-batches 0 and 1 take the first, 2 the second."""
    routes = [(0, 1), (2, 3)]
    rest = {0: ["0F0", "0F1", "3F2", "3B2", "0B0", "0B1"], 1: ["2F2", "1F0", "1F1", "1B0", "1B1", "2B2"]}
    schedule = Schedule.of(
        [rest[0], rest[1]], placement=(0, 1, 1, 0), microbatches=3, routes=routes, route_of=(0, 0, 1)
    )
    pl.check(schedule)
    there, here = Channel(0, 1, "activation"), Channel(1, 0, "activation")
    assert message_counts(schedule) == {there: 2, Channel(0, 1, "gradient"): 1, here: 1, Channel(1, 0, "gradient"): 2}
    costs = Costs(message=10.0, microbatch=(1.0, 2.0, 4.0))
    assert message_sizes(schedule, costs) == {
        there: 30.0,
        Channel(0, 1, "gradient"): 40.0,
        here: 40.0,
        Channel(1, 0, "gradient"): 30.0,
    }


def test_stages_of_one_rank_send_no_message() -> None:
    """A rank's own stages, and a route that no micro-batch takes."""
    schedule = Schedule.of(
        [["0F0", "1F0", "1B0", "0B0"], []],
        placement=(0, 0, 1, 0),
        microbatches=1,
        routes=[(0, 1), (2, 3)],
        route_of=(0,),
    )
    assert message_counts(schedule) == message_sizes(schedule, Costs()) == {}
    assert [entry.receives + entry.sends for entry in traffic(schedule)[0]] == [()] * 4


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (1023, "1023 B"),
        (2**10, "1 KiB"),
        (1.5 * 2**20, "1.5 MiB"),
        (2**20 - 1, "1024 KiB"),
        (2**30, "1 GiB"),
        (2**40, "1 TiB"),
        (3 * 2**41, "6 TiB"),
    ],
)
def test_sizes_in_words(count: float, words: str) -> None:
    assert size_words(count) == words
