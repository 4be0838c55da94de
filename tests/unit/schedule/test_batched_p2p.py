"""The batches of the batched transport: all meet, in NCCL's order."""

from __future__ import annotations

import random
from collections import defaultdict
from functools import cache

import pytest

import pipeloom as pl
from batch_walk import check_batches
from pipeloom.errors import ScheduleError, UsageError
from pipeloom.schedule import batched_p2p
from pipeloom.schedule.batched_p2p import batches_of
from pipeloom.schedule.channels import Message, traffic
from pipeloom.schedule.families import FAMILIES
from pipeloom.schedule.model import Pair

S = pl.schedules


@cache
def schedules_of(family: str) -> list[pl.Schedule]:
    found = []
    for ranks in (1, 2, 3, 4):
        for microbatches in (1, 2, 5, 8):
            try:
                found.append(pl.schedules.build(family, ranks, microbatches))
            except UsageError:
                continue
    return found


def shuffled(schedule: pl.Schedule, draw: random.Random) -> pl.Schedule:
    """Neighbouring cells exchanged at random, as long as the schedule can run."""
    programs = [list(program) for program in schedule.programs]
    for _ in range(6 * len(programs)):
        row = draw.choice(programs)
        at = draw.randrange(len(row) - 1) if len(row) > 1 else 0
        row[at : at + 2] = row[at : at + 2][::-1]
        try:
            pl.check(of(programs, schedule))
        except ScheduleError:
            row[at : at + 2] = row[at : at + 2][::-1]
    return of(programs, schedule)


def of(programs: list[list[pl.Action | Pair]], like: pl.Schedule) -> pl.Schedule:
    return pl.Schedule.of(
        programs,
        placement=like.placement,
        microbatches=like.microbatches,
        routes=like.routes,
        route_of=like.route_of,
        name="shuffled",
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_the_batches_of_every_family_meet(family: str) -> None:
    draw = random.Random(family)
    for schedule in schedules_of(family):
        cases = [schedule]
        if schedule.ranks in (2, 4) and schedule.microbatches in (5, 8):
            cases.append(shuffled(schedule, draw))
        for case in cases:
            for ahead in (True, False):
                check_batches(traffic(case), ahead)


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_both_ends_have_the_messages_of_a_pair_of_ranks_in_one_order(family: str, ahead: bool) -> None:
    """On one communicator NCCL matches them in order: there are no tags, and activations and gradients share it."""
    for schedule in schedules_of(family):
        programs = traffic(schedule)
        orders: dict[tuple[int, int, bool], list[Message]] = defaultdict(list)
        for rank in range(schedule.ranks):
            for gap in batches_of(programs, rank, ahead):
                for message in (message for batch in gap for message in batch):
                    orders[*message.channel[:2], message.channel.source == rank].append(message)
        for (source, destination, sending), order in orders.items():
            assert order == orders[source, destination, not sending]
            assert len(set(order)) == len(order)


def test_one_call_between_two_actions_where_nothing_waits_for_half_of_it() -> None:
    for schedule in (S.one_f_one_b(4, 8), S.interleaved(4, 8, 2)):
        for rank in range(4):
            calls = batches_of(traffic(schedule), rank)
            assert max(map(len, calls)) == 1
            assert sum(map(len, calls)) < sum(len(batch) for gap in calls for batch in gap)


def test_the_walk_finds_batches_that_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = S.interleaved(2, 4, 2)
    check_batches(traffic(schedule))
    monkeypatch.setattr(batched_p2p, "bisect_right", lambda ends, moves: len(ends) - 1)
    with pytest.raises(ScheduleError, match="wait for one another for ever"):
        check_batches(traffic(schedule))
