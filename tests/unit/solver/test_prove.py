"""Certificates: optima that are known, bounds that never pass them, and the missing extra."""

from __future__ import annotations

import math
import sys

import pytest

import pipeloom as pl
from pipeloom.errors import UsageError
from pipeloom.schedule import Costs, check, simulate
from pipeloom.solver.exact import certify
from pipeloom.solver.instance import Instance


def test_without_the_extra_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools.sat.python.cp_model", None)
    with pytest.raises(UsageError, match="a proof needs OR-Tools"):
        pl.search(4, 8, memory=2, prove=True)


@pytest.mark.parametrize(("memory", "optimum"), [(2, 41), (3, 31), (4, 27)])
def test_proven_optima(memory: int, optimum: float) -> None:
    pytest.importorskip("ortools")
    found = pl.search(4, 8, memory=memory, iterations=3000, prove=True)
    assert found.proved
    assert found.value == found.lower_bound == optimum
    check(found.schedule)


def test_two_chunks_are_proved_on_all_placements() -> None:
    pytest.importorskip("ortools")
    found = pl.search(4, 8, memory=4, chunks=2, iterations=500, prove=True, time_limit=600)
    assert found.proved
    assert found.value == 59


def test_the_solver_finds_what_the_search_was_not_given_time_for() -> None:
    pytest.importorskip("ortools")
    instance = Instance((0, 1, 2, 3), 8, Costs(), 3)
    found = certify(instance, 33, 600)
    assert found.value == found.bound == 31
    assert found.sequences is not None
    assert instance.fits(found.sequences)


def test_a_pair_waits_for_both_of_its_messages_at_once() -> None:
    """Where receivers wait for hops: no bound has each action wait for its own."""
    pytest.importorskip("ortools")
    costs = Costs(1, 1, 1, p2p=5)
    reached = simulate(pl.schedules.one_f_one_b_overlap(3, 5), costs, overlap_p2p=False).makespan
    instance = Instance((0, 1, 2), 5, costs, math.inf, overlap_p2p=False)
    assert reached == 66
    assert 50 < certify(instance, 100.0, 5).bound <= reached


def test_a_rank_may_begin_its_span_with_a_later_micro_batch() -> None:
    """The span of a rank 1 that begins with the second micro-batch, 6 units later, is its work alone: no bound is larger."""
    pytest.importorskip("ortools")
    costs = Costs(forward=(6.0, 1.0, 1.0, 26.0), weight_grad=23.0)
    late = ["1F1", "1F0", "3F1", "3I1", "3F0", "3I0", "1I1", "1W1", "1I0", "1W0", "3W1", "3W0"]
    early = ["0F0", "0F1", "2F1", "2F0", "2I1", "2W1", "2I0", "0I1", "0W1", "0I0", "0W0", "2W0"]
    schedule = pl.Schedule.of([early, late], placement=(0, 1, 0, 1), microbatches=2)
    check(schedule)
    reached = max(simulate(schedule, costs).spans)
    found = pl.search(
        2, 2, costs, 6.0, placement=(0, 1, 0, 1), objective="span", iterations=100, prove=True, time_limit=60
    )
    assert found.lower_bound <= reached < 151
    assert not found.proved or found.value <= reached
