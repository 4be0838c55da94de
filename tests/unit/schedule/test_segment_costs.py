"""Segments on two resources: the published band, order, and costs that come out of the layers' times."""

from __future__ import annotations

import heapq
import math
from dataclasses import replace
from random import Random

import pytest

from pipeloom import schedules
from pipeloom.errors import UsageError
from pipeloom.schedule import Costs, simulate
from pipeloom.schedule.bounds import lower_bound
from pipeloom.schedule.segments import LayerSegments, PhaseTimes, exposed, length, run_block, segment_costs


def unit(x: float) -> LayerSegments:
    """Unit compute, every all-to-all x."""
    return LayerSegments(dispatch=x, combine=x)


def times(x: float, layers: int = 1) -> tuple[float, float, float]:
    """(serial, overlapped, overlapped with dW split) of a forward and a backward."""
    whole = (unit(x),) * layers
    serial = length(run_block(whole, ())) + length(run_block((), whole, "fused"))
    return serial, length(run_block(whole, whole, "fused")), length(run_block(whole, whole, "split"))


def test_the_published_literals() -> None:
    assert times(1.5) == (12, 7, 6.5)


@pytest.mark.parametrize("x", [0, 0.25, 0.5, 0.9, 1, 1.1, 1.3, 1.5, 1.7, 1.9, 2, 2.2, 3, 10])
def test_dw_split_helps_between_one_and_two_only(x: float) -> None:
    serial, overlapped, split = times(x)
    assert serial == pytest.approx(6 + 4 * x)
    assert overlapped - split == pytest.approx(max(0.0, min(x - 1, 2 - x)))
    assert overlapped == pytest.approx(max(6, 4 * x) if not 1 < x < 2 else 2 * x + 4)


def test_order_and_starts_by_hand() -> None:
    block = run_block([unit(1.5)], [unit(1.5)])
    rows = {
        resource: [(s.name, s.start, s.end) for s in block if s.resource == resource]
        for resource in ("computation", "communication")
    }
    assert rows["computation"] == [
        ("F.attention", 0, 1),
        ("B.experts", 1.5, 2.5),
        ("W.experts", 2.5, 3.5),
        ("F.experts", 3.5, 4.5),
        ("B.attention", 4.5, 5.5),
        ("W.attention", 5.5, 6.5),
    ]
    assert rows["communication"] == [
        ("B.combine", 0, 1.5),
        ("F.dispatch", 1.5, 3),
        ("B.dispatch", 3, 4.5),
        ("F.combine", 4.5, 6),
    ]
    assert exposed(block) == 0.5


def test_alone() -> None:
    layers = [unit(1.5)] * 3
    assert length(run_block(layers, ())) == 3 * 5
    assert length(run_block((), layers, "later")) == 3 * 5
    assert length(run_block((), layers, "fused")) == 3 * 7
    # W of the experts hides the dispatch, W of the attention the next layer's combine
    assert length(run_block((), [unit(1.5)], "split")) == 6
    assert [s.layer for s in run_block((), layers) if s.name == "B.experts"] == [2, 1, 0]


def test_resources_are_never_used_twice_and_needs_are_kept() -> None:
    random = Random(1)

    def some() -> LayerSegments:
        talk = [random.choice([0.0, random.random() * 3]) for _ in range(4)]
        parts = [PhaseTimes(*(random.random() * 2 for _ in range(3))) for _ in range(2)]
        return LayerSegments(*parts, *talk)

    for _ in range(200):
        ahead, back = [some() for _ in range(random.randrange(4))], [some() for _ in range(random.randrange(4))]
        alone = length(run_block(ahead, ())) + length(run_block((), back, "fused"))
        for weights in ("split", "fused"):
            block = run_block(ahead, back, weights)  # type: ignore[arg-type]
            for resource in ("computation", "communication"):
                spans = [(s.start, s.end) for s in block if s.resource == resource]
                assert all(b[0] >= a[1] for a, b in zip(spans, spans[1:], strict=False))
                assert length(block) >= sum(e - s for s, e in spans) - 1e-9
            ends = {(s.name, s.layer): s for s in block}
            for layer in range(len(ahead)):
                chain = [ends.get((f"F.{n}", layer)) for n in ("attention", "dispatch", "experts", "combine")]
                present = [s for s in chain if s is not None]
                assert all(b.start >= a.end - 1e-9 for a, b in zip(present, present[1:], strict=False))
            assert length(block) <= alone + 1e-9


def first_come(chunks: int, stations: list[tuple[str, float]]) -> float:
    """The end of so many chunks that pass stations in order; each resource serves the one that comes first."""
    waiting, free, end = [(0.0, chunk, 0) for chunk in range(chunks)], dict[str, float](), 0.0
    while waiting:
        came, chunk, at = heapq.heappop(waiting)
        resource, time = stations[at]
        end = free[resource] = max(came, free.get(resource, 0.0)) + time
        if at + 1 < len(stations):
            heapq.heappush(waiting, (end, chunk, at + 1))
    return max(free.values())


@pytest.mark.parametrize("chunks", [1, 2, 3, 8])
def test_chunks_of_one_level_are_a_pipeline_of_dispatch_experts_and_combine(chunks: int) -> None:
    """Dispatch and combine on one link: the longest of its four critical paths, and what an event simulation finds."""
    random, nothing = Random(chunks), PhaseTimes(0, 0, 0)
    for _ in range(50):
        d, e, c = (random.choice([0.0, 3 * random.random()]) for _ in range(3))
        layer = LayerSegments(nothing, PhaseTimes(e, e, 0), d, c, chunks=chunks)
        paths = d + c, (d + e) / chunks + c, (d + c) / chunks + e, d + (e + c) / chunks
        events = first_come(chunks, [("link", d / chunks), ("device", e / chunks), ("link", c / chunks)])
        assert length(run_block([layer], ())) == pytest.approx(max(paths))
        assert length(run_block([layer], ())) == pytest.approx(events)
        assert length(run_block((), [layer], "later")) == pytest.approx(max(paths))


def test_two_levels_by_hand() -> None:
    """Hops inside a node run beside those between nodes: two chunks of 1 there, and of 1/2 inside."""
    layer = LayerSegments(experts=PhaseTimes(2, 2, 2), dispatch=2, combine=2, inside=1, chunks=2)
    block = run_block([layer], ())
    rows = [(s.name, s.start, s.end) for s in block if s.resource == "inside"]
    assert rows == [
        ("F.dispatch", 2, 2.5),
        ("F.dispatch", 3, 3.5),
        ("F.combine", 4, 4.5),
        ("F.combine", 5, 5.5),
    ]
    assert length(block) == 7
    assert exposed(block) == 4
    whole = run_block([replace(layer, chunks=1)], ())
    assert length(whole) == 1 + 2 + 2 + 2 + 2 * 1
    costs = segment_costs([(layer,)])
    assert (costs.forward, costs.all_to_all) == (7, pytest.approx(8 / 14))


def test_costs_of_uniform_stages() -> None:
    costs = segment_costs([(unit(1.5),)], p2p=0.25)
    assert costs == Costs(5, 5, 2, 0.25, all_to_all=0.6, pair=6.5, pair_split=6, backward=6)
    assert segment_costs([(unit(0.5),) * 4]).pair == 24  # all hidden


def test_stages_that_differ() -> None:
    dense = LayerSegments(PhaseTimes(2, 2, 2), PhaseTimes(0, 0, 0))
    costs = segment_costs([(dense,), (unit(1),), (unit(1), dense)])
    assert costs.forward == (2, 4, 6)
    assert costs.all_to_all == (0, 0.5, pytest.approx(4 / 12))
    assert isinstance(costs.pair, tuple)
    assert costs.pair[0][0] == 6
    assert costs.pair[0][1] == length(run_block([dense], [unit(1)]))
    assert costs.pair[2][1] != costs.pair[1][2]
    # a backward that sends nothing computes while the forward's dispatch is under way, and not before
    rows = [(each.name, each.start) for each in run_block([unit(1)], [dense])]
    assert rows[:3] == [("F.attention", 0), ("F.dispatch", 1), ("B.attention", 1)]
    assert costs.pair[1][0] == 7


def test_the_simulator_runs_on_them() -> None:
    """F|B, F|I, B alone and both stages of a pair enter the simulation, and the bound stays below."""
    layers = unit(1.5), unit(1)
    costs = segment_costs([(unit(0.5),), layers])
    programs = [["0F0", "0F1", "0B0", "0I1", "0W1"], ["1F0", "(1F1;1B0)OVERLAP_F_B", "1I1", "1W1"]]
    schedule = schedules.gpipe(2, 2).__class__.of(programs, placement=[0, 1], microbatches=2)
    timeline = simulate(schedule, costs)
    assert timeline.ends[1][1] - timeline.starts[1][1] == pytest.approx(length(run_block(layers, layers)))
    assert timeline.ends[0][2] - timeline.starts[0][2] == pytest.approx(costs.per_stage("backward", 2)[0])
    assert lower_bound(schedule, costs) <= timeline.makespan
    mixed = schedules.interleaved_overlap(2, 8, 2)
    four = segment_costs([(unit(x),) for x in (0.2, 0.7, 1.4, 2.5)])
    timeline = simulate(mixed, four)
    found = {
        (pair.forward.stage, pair.backward.stage): end - start
        for row, starts, ends in zip(mixed.programs, timeline.starts, timeline.ends, strict=True)
        for pair, start, end in zip(row, starts, ends, strict=True)
        if hasattr(pair, "forward")
    }
    assert len(found) > 2
    assert isinstance(four.pair, tuple)
    assert all(time == pytest.approx(four.pair[s][t]) for (s, t), time in found.items())  # type: ignore[index]
    assert lower_bound(mixed, four) <= timeline.makespan + 1e-9


def test_scaled_and_refused() -> None:
    costs = segment_costs([(unit(1),), (unit(2),)])
    half = costs.scaled(0.5)
    assert isinstance(half.pair, tuple)
    assert isinstance(costs.pair, tuple)
    assert half.pair[0][1] == costs.pair[0][1] / 2  # type: ignore[index]
    assert half.backward == tuple(b / 2 for b in costs.backward)  # type: ignore[union-attr]
    with pytest.raises(UsageError, match="pair is not a 4 x 4 matrix"):
        simulate(schedules.one_f_one_b_overlap(4, 8), costs.scaled(1).__class__(pair=costs.pair))
    for bad in (-1, math.inf):
        for name in ("dispatch", "inside"):
            with pytest.raises(UsageError, match="a segment's time is"):
                LayerSegments(**{name: bad})
    with pytest.raises(UsageError, match="chunks are 0; nearest: 1"):
        LayerSegments(chunks=0)
