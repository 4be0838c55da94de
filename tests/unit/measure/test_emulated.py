"""Emulated computation: it takes the times of its costs, on a clock that the test turns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import count
from random import Random
from threading import Event
from typing import Any

import pytest
import torch

import pipeloom as pl
from pipeloom.measure import rehearse
from pipeloom.measure.rehearse import Clock, EmulatedLayer, Rehearsal
from pipeloom.runtime import LocalPipeline, RuntimeOptions
from pipeloom.runtime.pipeline import run_beside
from pipeloom.schedule import Action, Costs, Schedule, simulate
from pipeloom.schedule.actions import parse_action
from pipeloom.schedule.segments import LayerSegments, PhaseTimes, segment_costs
from pipeloom.schedule.transforms import unpair


class Hands:
    """Stands for the module `time`: sleeping turns the clock, and `late` seconds too far."""

    def __init__(self, late: float = 0.0) -> None:
        self.now, self.late = 100.0, late

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now += seconds + self.late * (seconds > 0)


@pytest.fixture
def hands(monkeypatch: pytest.MonkeyPatch) -> Hands:
    clock = Hands()
    monkeypatch.setattr(rehearse, "time", clock)
    return clock


def test_oversleeping_does_not_add_up(hands: Hands) -> None:
    hands.late = 0.003
    clock = Clock()
    for _ in range(10):
        clock.compute("layer", "F", 0.010)
        hands.now += 0.0005  # the engine, which is no error of a sleep
    assert hands.now - 100.0 == pytest.approx(10 * 0.0105 + 0.003)


def test_time_spent_on_waiting_is_not_made_up_for(hands: Hands) -> None:
    hands.late = 0.003
    clock = Clock()
    clock.compute("layer", "F", 0.010)
    hands.now += 0.1  # a message
    clock.compute("layer", "F", 0.010)
    assert hands.now - 100.0 == pytest.approx(0.013 + 0.1 + 0.013)


def test_an_error_longer_than_the_next_computation_is_carried_on(hands: Hands) -> None:
    clock, hands.late = Clock(), 0.025
    clock.compute("layer", "F", 0.010)
    hands.late = 0.0
    for _ in range(4):
        clock.compute("layer", "F", 0.010)
    assert hands.now - 100.0 == pytest.approx(0.05)


def test_a_communication_that_has_ended_takes_no_time(hands: Hands) -> None:
    clock = Clock()
    end = clock.communicate("across", 0.010)
    clock.compute("layer", "F", 0.020)
    clock.wait(end)
    clock.compute("layer", "F", 0.010)
    assert (hands.now - 100.0, clock.exposed) == pytest.approx((0.03, 0.0))


def _run(rehearsal: Rehearsal, hands: Hands) -> dict[tuple[str, str], list[float]]:
    """(part, kind) -> the times of a step of one rank."""
    clock = Clock()
    pipeline = LocalPipeline(rehearsal.layers(0, clock), rehearsal.schedule, loss=lambda out, _: out.mean())
    batch = torch.ones(rehearsal.schedule.microbatches, 4)
    pipeline.step(batch, batch)
    return clock.seconds


def _split(ranks: int, microbatches: int) -> Schedule:
    """I and then W, on one rank."""
    cells = [cell for mb in range(microbatches) for cell in (f"0F{mb}", f"0I{mb}", f"0W{mb}")]
    return Schedule.of([cells], placement=[0], microbatches=microbatches, name="split")


@pytest.mark.parametrize("build", [pl.schedules.one_f_one_b, _split])
def test_a_stage_takes_its_costs_times_its_unit_and_what_slows_it(build: Any, hands: Hands) -> None:
    costs = Costs(forward=1, input_grad=2, weight_grad=3, microbatch=(1.0, 0.5))
    taken = _run(Rehearsal(build(1, 2), costs, unit=0.01, slow={0: 1.1}), hands)
    assert taken["attention", "F"] == pytest.approx([0.011, 0.0055])
    assert taken["attention", "I"] == pytest.approx([0.022, 0.011])
    assert taken["attention", "W"] == pytest.approx([0.033, 0.0165])


def test_a_part_takes_its_time_in_its_recomputation_alone(hands: Hands) -> None:
    costs = Costs(2, 1, 3, parts={"norms": 0.5}, bytes={"saved": 10, "saved:norms": 5}, microbatch=(1.0, 0.5))
    schedule = pl.schedules.recompute(pl.schedules.one_f_one_b(1, 2), part="norms")
    rehearsal = Rehearsal(schedule, costs, unit=0.01, slow={0: 2.0})
    begun = hands.now
    taken = _run(rehearsal, hands)
    assert taken["norms", "R"] == pytest.approx([0.01, 0.005])
    assert taken["attention", "F"] == pytest.approx([0.04, 0.02])
    assert hands.now - begun == pytest.approx(2 * rehearsal.simulated().makespan)


def test_all_to_all_takes_its_share_and_its_simulation_is_the_blocks(hands: Hands) -> None:
    """1F1B on one rank: nothing hides an all-to-all but the weight gradient behind it."""
    costs = Costs(forward=10, input_grad=10, weight_grad=4, all_to_all=0.4)
    rehearsal = Rehearsal(pl.schedules.one_f_one_b(1, 2), costs, unit=0.01)
    begun = hands.now
    taken = _run(rehearsal, hands)
    assert taken["attention", "F"] == taken["experts", "I"] == pytest.approx([0.03, 0.03])
    assert taken["attention", "W"] == pytest.approx([0.02, 0.02])
    assert hands.now - begun == pytest.approx(rehearsal.simulated().makespan)
    assert rehearsal.simulated().makespan < 2 * 0.24


def test_replicas_of_a_position_are_the_stages_of_their_rank(hands: Hands) -> None:
    """Two routes: rank 0 holds the first stage of one and the last of the other, and each is slowed by its own factor."""
    schedule = pl.schedules.dualpipe(ranks=2, microbatches=4)
    rehearsal = Rehearsal(schedule, Costs(), unit=0.01, slow={schedule.stages_of[1][0]: 2.0})
    for rank in range(2):
        times = [layer().times.attention.forward for layer in rehearsal.layers(rank, Clock())]
        slowed = schedule.position_of[schedule.stages_of[1][0]]
        assert times == [0.02 if rank == 1 and at == slowed else 0.01 for at in range(2)]


def test_a_weight_gradient_hides_an_all_to_all(hands: Hands) -> None:
    clock, part = Clock(), PhaseTimes(0.01, 0.01, 0.01)
    build = partial(EmulatedLayer, clock, LayerSegments(part, part, 0.02, 0.02))
    pipeline = LocalPipeline([build], pl.schedules.one_f_one_b(1, 1), loss=lambda out, _: out.mean())
    begun = hands.now
    pipeline.step(torch.ones(1, 1), torch.ones(1, 1))
    assert hands.now - begun == pytest.approx(0.13)


def test_two_levels_in_chunks_hide_more_than_a_flat_exchange(hands: Hands) -> None:
    """ep 4 as 2 x 2, links between nodes 1/8 as fast: a flat all-to-all takes 1.5 of a computation. Top 2 sends 2 copies of a
    token, one of them to the other node; with two levels 3/4 of a token, and one copy inside a node.
    """

    def exposed(talk: float, inside: float, chunks: int, blocks: int, microbatches: int) -> float:
        clock, part = Clock(), PhaseTimes(0.01, 0.01, 0.01)
        block = partial(EmulatedLayer, clock, LayerSegments(part, part, talk, talk, inside=inside, chunks=chunks))
        schedule = pl.schedules.build("1f1b-overlap", 1, microbatches)
        pipeline = LocalPipeline([block] * blocks, schedule, loss=lambda out, _: out.mean())
        begun, x = hands.now, torch.ones(microbatches, 1)
        pipeline.step(x, x)
        assert clock.exposed == pytest.approx(hands.now - begun - 0.06 * blocks * microbatches, abs=hands.late + 1e-9)
        return clock.exposed

    for blocks, microbatches, late in ((1, 1, 0.0), (1, 8, 0.0), (2, 4, 0.0), (2, 16, 0.0), (2, 4, 0.0003)):
        hands.late = late  # sleeps that end late change nothing
        flat = exposed(0.015, 0.0, 1, blocks, microbatches)
        levels = exposed(0.75 * 0.015, 0.015 / 8, 4, blocks, microbatches)
        whole = exposed(0.75 * 0.015, 0.015 / 8, 1, blocks, microbatches)
        assert levels < 0.52 * flat
        assert levels < 0.52 * whole


def some_layer(random: Random) -> LayerSegments:
    """Random times, in one level or two, in one chunk to four; one in five is dense."""

    def some() -> float:
        return random.choice([0.5, 1, 2, 3 * random.random()])

    if random.random() < 0.2:
        return LayerSegments(PhaseTimes(some(), some(), some()), PhaseTimes(0, 0, 0))
    parts = [PhaseTimes(some(), some(), some()) for _ in range(2)]
    inside = random.choice([0.0, some()])
    return LayerSegments(*parts, *(some() for _ in range(4)), inside=inside, chunks=random.randint(1, 4))


@pytest.mark.parametrize("paired", [True, False])
def test_chunks_and_levels_take_as_long_as_their_simulation(paired: bool, hands: Hands) -> None:
    """Stages of one to three layers, whose F, B and pairs take what `simulate` has of the same segments."""
    random = Random(paired)
    whole = LayerSegments(dispatch=0.5, combine=1, inside=1)  # nothing computes while a hop inside a node is under way
    for layers in ((whole,), *(tuple(some_layer(random) for _ in range(random.randint(1, 3))) for _ in range(7))):
        schedule = pl.schedules.build("1f1b-overlap", 1, 3)
        costs = segment_costs([layers])
        rehearsal = Rehearsal(schedule if paired else unpair(schedule), costs, unit=0.01, segments=layers)
        begun = hands.now
        _run(rehearsal, hands)
        assert hands.now - begun == pytest.approx(rehearsal.simulated().makespan)
        assert rehearsal.simulated().makespan == pytest.approx(0.01 * simulate(rehearsal.schedule, costs).makespan)


def test_slices_take_their_shares_of_the_times_and_of_the_messages(hands: Hands) -> None:
    costs = Costs(2, 1, 3, message=400, slice_times=(0.25, 0.75), slice_sizes=(0.6, 0.4))
    rehearsal = Rehearsal(pl.schedules.cut_sequences(pl.schedules.one_f_one_b(1, 1), 2), costs, unit=0.01)
    clock = Clock()
    pipeline = LocalPipeline(
        rehearsal.layers(0, clock),
        rehearsal.schedule,
        loss=lambda out, _: out.mean(),
        options=RuntimeOptions(slice_tokens=rehearsal.slice_tokens),
    )
    pipeline.step(torch.ones(1, 100), torch.ones(1, 100))
    assert rehearsal.slice_tokens == (60, 40)
    assert clock.seconds["attention", "F"] == pytest.approx([0.005, 0.015])
    assert clock.seconds["attention", "W"] == pytest.approx([0.0225, 0.0075])


def test_a_copy_sleeps_before_what_it_brings_is_there_and_after_what_it_takes_is_complete(hands: Hands) -> None:
    cells = ["0F0", "0O0:1/2", "0L0:1/2", "0B0"]
    schedule = Schedule.of([cells], placement=[0], microbatches=1)
    rehearsal = Rehearsal(schedule, Costs(activation=3, host_bandwidth=5), unit=0.1)
    run, executed = rehearsal.beside(0), []
    for action in [parse_action(cell) for cell in cells[1:3]]:
        run(action, lambda: executed.append(hands.now - 100))
    assert executed == pytest.approx([0.0, 0.06])  # half of 3 / 5 of a cost, one after the other
    assert hands.now - 100 == pytest.approx(0.06)
    assert rehearsal.simulated().makespan == pytest.approx(0.1 * simulate(schedule, rehearsal.costs).makespan)
    sized = Rehearsal(schedule, Costs(bytes={"saved": 3}, host_bandwidth=5), unit=0.1)
    assert sized.simulated().peak_bytes == simulate(schedule, sized.costs).peak_bytes


def test_parts_are_saved_and_used_in_shares_of_the_time(hands: Hands, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first half is copied while the second half of the forward runs, and back while that of the backward does."""
    cells = ["0F0", "0O0:1/2", "0O0:2/2", "0L0:2/2", "0L0:1/2", "0B0"]
    rehearsal = Rehearsal(Schedule.of([cells], placement=[0], microbatches=1), Costs(), unit=0.01)
    pipeline = LocalPipeline(rehearsal.layers(0, Clock()), rehearsal.schedule, loss=lambda out, _: out.mean())
    events: dict[object, Event] = defaultdict(Event)
    naps = count()

    def sleep(seconds: float) -> None:
        nap = next(naps)
        events[nap].set()
        if nap == 7:  # the second one in the second step: only then is it known how much a forward saves
            assert events["0O0:1/2"].wait(10)

    def beside(action: Action, execute: Callable[[], None]) -> None:
        if str(action) == "0L0:1/2" and events[6].is_set():
            assert events[8].wait(10)  # the first one of the backward
        execute()
        if events[6].is_set():
            events[str(action)].set()

    monkeypatch.setattr(hands, "sleep", sleep)
    run_beside(pipeline, beside)
    for _ in range(2):
        pipeline.step(torch.ones(1, 4), torch.ones(1, 4))
    assert next(naps) == 12  # two each of F, I and W
