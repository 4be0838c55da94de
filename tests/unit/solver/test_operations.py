"""Blocks: the same times as the simulator, moves that keep a schedule valid, and starts that fit."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from random import Random

import pytest

from pipeloom.schedule import Costs, Schedule, check, simulate
from pipeloom.schedule.costs import TIME_TOLERANCE
from pipeloom.schedule.families import build
from pipeloom.schedule.model import parts
from pipeloom.schedule.segments import LayerSegments, segment_costs
from pipeloom.solver.construct import FIRST_RULES, OTHER_RULES, sequences_of, with_pairs
from pipeloom.solver.evaluate import evaluate
from pipeloom.solver.instance import Instance, Sequences
from pipeloom.solver.merge_backward import merge_weight_grads
from pipeloom.solver.neighbourhood import SequenceState, critical_blocks, estimate, neighbours, shift
from pipeloom.solver.tabu import WITH_PAIRS

MODEL = segment_costs([(LayerSegments(dispatch=1.5, combine=1.5),)], p2p=0.25, held=0.5)
COSTS = [
    Costs(weight_grad=0.7, all_to_all=0.3),
    Costs(1, 1.5, 0.5, 0.3, all_to_all=0.6, held=0.5),
    Costs(pair=2.0),
    MODEL,
]
FAMILIES = ["1f1b", "zb-h1", "1f1b-overlap", "interleaved", "interleaved-overlap", "zbv", "dualpipev"]


def instance_of(schedule: Schedule, costs: Costs, objective: str = "makespan") -> Instance:
    memory_limit = max(simulate(schedule, costs).peak_memory)
    return Instance(schedule.placement, schedule.microbatches, costs, memory_limit, objective)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("objective", ["makespan", "span"])
def test_times_are_the_simulators(name: str, costs: Costs, objective: str) -> None:
    schedule = build(name, 3, 6)
    before = simulate(schedule, costs)
    instance = instance_of(schedule, costs, objective)
    table = instance.table
    sequences = sequences_of(instance, schedule, pairs=True)
    found = evaluate(instance, sequences)
    assert found is not None
    assert instance.fits(sequences)
    made = instance.schedule_of(sequences)
    check(made)
    after = simulate(made, costs)
    assert found.value == pytest.approx(after.makespan if objective == "makespan" else max(after.spans))
    assert after.makespan <= before.makespan + TIME_TOLERANCE
    assert max(after.peak_memory) <= max(before.peak_memory) + TIME_TOLERANCE
    for sequence, starts in zip(sequences, after.starts, strict=True):
        assert [found.start[table.first[operation]] for operation in sequence] == pytest.approx(list(starts))
    tails = found.tails(instance)
    through = [
        found.start[table.first[operation]] + tails[table.first[operation]]
        for sequence in sequences
        for operation in sequence
    ]
    assert max(through) == pytest.approx(found.value)


def test_a_backward_that_is_cheaper_in_one_stays_one() -> None:
    schedule = build("1f1b-overlap", 2, 4)
    instance = instance_of(schedule, MODEL)
    table = instance.table
    kinds = {
        len(table.nodes[operation])
        for sequence in sequences_of(instance, schedule, pairs=True)
        for operation in sequence
    }
    assert kinds == {1, 2, 3}  # F; B; F|B
    tight = instance_of(schedule, COSTS[0])
    loose = replace(tight, memory_limit=tight.memory_limit + 1)
    apart = sequences_of(loose, schedule, pairs=True)
    assert {len(loose.table.nodes[operation]) for sequence in apart for operation in sequence} == {1, 2}


def test_a_pair_that_frees_with_its_w_keeps_it_where_the_room_is_short() -> None:
    schedule = build("1f1b-overlap", 2, 4)
    tight = instance_of(schedule, COSTS[0])
    sequences = sequences_of(tight, schedule, pairs=True)
    assert tight.fits(sequences)
    assert 3 in {len(tight.table.nodes[operation]) for operation in sequences[0]}


def actions_of(instance: Instance, sequences: Sequences) -> list[list[int]]:
    return [
        sorted(node for operation in sequence for node in instance.table.nodes[operation]) for sequence in sequences
    ]


@pytest.mark.parametrize("name", ["1f1b-overlap", "interleaved-overlap", "dualpipev", "zbv"])
@pytest.mark.parametrize("costs", COSTS)
def test_a_long_walk_of_moves_stays_valid(name: str, costs: Costs) -> None:
    """Memory, order on the rank, the actions themselves; the way back; times from the moved place on."""
    random = Random(3)
    schedule = build(name, 3, 6)
    instance = instance_of(schedule, costs)
    table = instance.table
    state = SequenceState(instance, sequences_of(instance, schedule, pairs=True))
    held = actions_of(instance, state.sequences)
    found = evaluate(instance, state.sequences)
    made = 0
    for step in range(60):
        assert found is not None
        moves = list(neighbours(state, critical_blocks(state, found, random), random, WITH_PAIRS))
        move = random.choice(moves)
        before = [list(sequence) for sequence in state.sequences]
        guess = estimate(state, found, found.tails(instance), move)
        assert guess > 0
        back = state.apply(move)
        after = evaluate(instance, state.sequences, (found, move.rank, move.low))
        again = evaluate(instance, state.sequences)
        assert (after is None) == (again is None)
        if after is None or again is None:
            state.apply(back)
            assert state.sequences == before
            continue
        assert after.value == again.value
        assert after.end[: table.none] == again.end[: table.none]
        firsts = [table.first[operation] for sequence in state.sequences for operation in sequence]
        assert [after.start[node] for node in firsts] == [again.start[node] for node in firsts]
        found = after
        made += 1
        if step % 5:
            continue
        assert actions_of(instance, state.sequences) == held
        assert instance.fits(state.sequences)
        for rank, sequence in enumerate(state.sequences):
            levels = [0.0, *accumulate(table.change[operation] for operation in sequence)][:-1]
            assert state.levels[rank] == pytest.approx(levels)
            peaks = [level + table.rise[operation] for level, operation in zip(levels, sequence, strict=True)]
            assert state.peaks[rank] == pytest.approx(peaks)
            assert instance.peak(sequence) == pytest.approx(max(peaks))
            assert all(state.place[n] == at for at, operation in enumerate(sequence) for n in table.nodes[operation])
    assert made > 30
    final = instance.schedule_of(state.sequences)
    check(final)
    assert simulate(final, costs).makespan == pytest.approx(found.value if found else 0)


@pytest.mark.parametrize("name", ["interleaved-overlap", "dualpipev", "zbv"])
@pytest.mark.parametrize("costs", [*COSTS, Costs(pair=3.0, held=0.5)])  # at last: F, then I
def test_a_shift_is_allowed_where_what_it_makes_is(name: str, costs: Costs) -> None:
    """The quick check of a shift, from places and levels, against the one that runs through all operations."""
    random = Random(5)
    schedule = build(name, 3, 6)
    instance = instance_of(schedule, costs)
    sequences = instance.numbered(entries_of(schedule), together=True)
    instance = replace(instance, memory_limit=max(map(instance.peak, sequences)))
    state = SequenceState(instance, instance.numbered(entries_of(schedule), together=True))
    answers = set()
    for _ in range(400):
        rank = random.randrange(3)
        sequence = state.sequences[rank]
        source, target = random.sample(range(len(sequence)), 2)
        rest = [*sequence[:source], *sequence[source + 1 :]]
        low, high = sorted((source, target))
        operations = (*rest[:target], sequence[source], *rest[target:])[low : high + 1]
        move = shift(state, rank, source, target)
        assert (move is not None) == state.allows(rank, low, operations)
        answers.add(move is not None)
        if move is not None:
            assert (move.low, move.high, move.operations) == (low, high, operations)
            state.apply(move)
            assert instance.fits(state.sequences)
    assert answers == {True, False}


def entries_of(schedule: Schedule) -> list[list[list[tuple[str, int]]]]:
    """The (kind, stage) of every entry, W apart from every pair."""
    programs: list[list[list[tuple[str, int]]]] = []
    for program in schedule.programs:
        programs.append([])
        for cell in program:
            actions = [(action.kind, action.stage) for action in parts(cell)]
            apart = len(actions) > 1 and actions[1][0] == "B"
            programs[-1] += [[actions[0], ("I", actions[1][1])], [("W", actions[1][1])]] if apart else [actions]
    return programs


def test_mutations_that_are_not_allowed() -> None:
    """One rank: nodes out of order, W before its I, a pair of a micro-batch with itself, more than the memory holds."""
    instance = Instance((0,), 3, Costs(weight_grad=0.5, all_to_all=0.5), 2.0)
    table = instance.table
    f, i, w = (list(range(at, at + 3)) for at in (0, 3, 6))
    state = SequenceState(
        instance, [[f[0], table.pair(f[1], i[0], False), w[0], table.pair(f[2], i[1], False), w[1], i[2], w[2]]]
    )
    assert evaluate(instance, state.sequences) is not None
    assert state.allows(0, 0, tuple(state.sequences[0]))
    refused = {
        "order": (0, (f[1], table.pair(f[0], i[0], False))),
        "W first": (1, (w[0], table.pair(f[1], i[0], False))),
        "itself": (0, (table.pair(f[0], i[0], False), f[1])),
        "I before F": (3, (i[1], w[1], i[2], f[2], w[2])),
        "memory": (0, (f[0], f[1], i[0], f[2], w[0], i[1], w[1])),
    }
    for low, new in refused.values():
        assert not state.allows(0, low, new)
    assert Instance((0,), 3, Costs(), 3.0).fits([[f[0], f[1], i[0], f[2], w[0], i[1], w[1], i[2], w[2]]])


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved", "interleaved-overlap", "zbv", "v-half"])
@pytest.mark.parametrize("costs", [COSTS[0], COSTS[1], MODEL])
def test_starts_fit_and_run(name: str, costs: Costs) -> None:
    schedule = build(name, 4, 8)
    instance = instance_of(schedule, costs)
    sequences = sequences_of(instance, schedule, pairs=True)
    held = actions_of(instance, sequences)
    values = []
    for rule in (*FIRST_RULES, *OTHER_RULES):
        start = with_pairs(instance, sequences, rule)
        if start is None:
            continue  # the memory is too small for the rule
        found = evaluate(instance, start)
        assert found is not None
        assert actions_of(instance, start) == held
        assert instance.fits(start)
        check(instance.schedule_of(start))
        values.append(found.value)
    assert len(values) >= 3


@pytest.mark.parametrize("name", ["1f1b", "interleaved-overlap", "dualpipev", "zb-h1"])
@pytest.mark.parametrize("costs", [COSTS[0], MODEL])
def test_weights_go_back_where_that_costs_nothing(name: str, costs: Costs) -> None:
    schedule = build(name, 4, 8)
    instance = instance_of(schedule, costs)
    sequences = sequences_of(instance, schedule, pairs=True)
    before, made = evaluate(instance, sequences), merge_weight_grads(instance, sequences)
    after = evaluate(instance, made)
    assert before is not None
    assert after is not None
    assert after.value <= before.value + TIME_TOLERANCE
    assert actions_of(instance, made) == actions_of(instance, sequences)
    assert instance.fits(made)
    assert sum(map(len, made)) < sum(map(len, sequences)) or costs is MODEL
    check(instance.schedule_of(made))
