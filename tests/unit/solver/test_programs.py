"""The search over whole programs: its times are the simulation's, and small cases are as short as exact ones."""

from __future__ import annotations

from random import Random

import pytest

from pipeloom.schedule import Costs, simulate
from pipeloom.schedule.families import build
from pipeloom.schedule.offload import copies_beside
from pipeloom.solver.instance import Instance
from pipeloom.solver.programs import STUCK, ProgramTable

# One micro-batch is larger; parts, blocks and whole stages can be recomputed.
BYTES = {"saved": 90, "kept": 10, "saved:norms": 60, "pending": 70, "layer": 30, "forward": 80}
COSTS = Costs(1, 1.5, 0.5, 0.25, kept=0.1, held=0.7, recompute=1, parts={"norms": 0.25}, bytes=BYTES, host_bandwidth=80)


@pytest.mark.parametrize("costs", [COSTS, Costs(kept=0.1, held=1, host_bandwidth=0.6, microbatch=(1, 2, 1))])
def test_times_and_memory_are_those_of_the_simulation(costs: Costs) -> None:
    random, instance = Random(1), Instance((0, 1), 3, costs, 1.5)
    table = ProgramTable(instance, costs.recompute is not None, True)
    _, state = table.start(build("zb-h1", 2, 3), random)
    ways = set()
    for _ in range(60):
        other = table.changed(state, random)
        value, excess = table.evaluate(other)
        if (value, excess) != STUCK:
            state = other
            schedule = table.schedule_of(state)
            timeline = simulate(schedule, costs)
            assert value == pytest.approx(timeline.makespan)
            assert excess == pytest.approx(sum(max(0, peak - 1.5) for peak in timeline.peak_memory), abs=1e-6)
            assert table.state_of(schedule) == state
            ways |= set(state.ways)
    assert len(ways) >= 3


def test_copies_back_wait_for_slots() -> None:
    costs = Costs(kept=0.1, host_bandwidth=0.6)
    plain = copies_beside(simulate(build("1f1b", 2, 4), costs), range(2), 4, 4)
    schedule = plain.with_slots({"saved": 1.25})
    table = ProgramTable(Instance((0, 1), 4, costs, 1.0), False, True)
    state = table.state_of(schedule)
    assert state is not None
    peaks = simulate(schedule, costs).peak_memory
    assert table.evaluate(state) == (15, pytest.approx(sum(max(0, peak - 1) for peak in peaks)))


def test_a_claim_of_a_slot_that_is_never_free_gets_stuck() -> None:
    """Of gpipe's forwards the second waits for a slot that only its own rank's later backward frees."""
    table = ProgramTable(Instance((0,), 2, Costs(host_bandwidth=1), 9), False, True)
    rows = table.state_of(build("gpipe", 1, 2))
    assert rows is not None
    slots = table.schedule_of(rows).with_slots({"saved": 1})
    state = table.state_of(slots)
    assert state is not None
    assert table.evaluate(rows) != STUCK == table.evaluate(state)
