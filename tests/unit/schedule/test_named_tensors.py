"""Tensors that stages read by name: their messages, their check, their times, against ones worked out another way."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from batch_walk import check_batches
from fuzz._simulator import Times, simulated_spans
from pipeloom.errors import ScheduleError, UsageError
from pipeloom.schedule import Action, Costs, NamedTensor, Schedule, check, simulate
from pipeloom.schedule.channels import Message, message_counts, posting_plan, smallest_depths, traffic
from pipeloom.schedule.families import FAMILIES, build
from pipeloom.schedule.json_form import from_json, to_json
from pipeloom.schedule.model import parts
from pipeloom.schedule.transforms import cut_stages, forward_only, recompute, split_cooldown, unpair


def drawn(draw: random.Random, positions: int) -> list[NamedTensor]:
    """Some tensors; a name is written again now and then."""
    tensors, readers = [], set()
    for at in range(draw.randint(1, 4)):
        name, producer = f"t{at % 3}", draw.randrange(positions - 1)
        consumers = [c for c in range(producer + 1, positions) if draw.random() < 0.5 and (name, c) not in readers]
        if consumers and (name, producer) not in {(t.name, t.producer) for t in tensors}:
            readers |= {(name, c) for c in consumers}
            tensors.append(NamedTensor(name, producer, tuple(consumers)))
    return tensors or [NamedTensor("t", 0, (positions - 1,))]


def cases(family: str) -> list[Schedule]:
    draw = random.Random(family)
    found = []
    for ranks, microbatches in ((2, 4), (3, 6), (4, 8)):
        try:
            schedule = build(family, ranks, microbatches)
        except UsageError:
            continue
        found += [schedule.with_tensors(drawn(draw, schedule.positions)) for _ in range(3)]
    assert found
    return found


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_times_messages_and_check(family: str) -> None:
    draw = random.Random(family)
    ways = (lambda s: s, lambda s: s.with_tensors(()), recompute, lambda s: recompute(s.with_tensors(()), whole=True))
    for schedule in (way(case) for case in cases(family) for way in ways):
        ranks = range(schedule.ranks)
        costs = Costs(
            forward=tuple(draw.uniform(0.5, 2) for _ in range(schedule.stages)),
            p2p=tuple(tuple(draw.uniform(0, 0.5) for _ in ranks) for _ in ranks),
            message=draw.uniform(0, 1),
            bandwidth=2.0,
            tensors={"t0": draw.uniform(0, 60), "t1": 0.0},
        )
        for overlap in (True, False):
            timeline = simulate(schedule, costs, overlap_p2p=overlap)
            for ends, spans in zip(timeline.ends, simulated_spans(schedule, costs, overlap), strict=True):
                assert ends == pytest.approx([end for _, end in spans])
            path = timeline.critical_path  # each entry starts when one before it ends, or its message arrives
            assert timeline.ends[path[-1][0]][path[-1][1]] == max(map(max, timeline.ends))
            assert "overhead" not in {gap.cause for gaps in timeline.gaps for gap in gaps}
        assert simulate(schedule).ends == simulate(schedule.with_tensors(())).ends  # they add order nowhere
        check(schedule)
        check_batches(traffic(schedule))
        check_batches(traffic(schedule), ahead=False)
        _check_traffic(schedule)


def _check_traffic(schedule: Schedule) -> None:
    programs, times = traffic(schedule), Times(schedule, Costs())
    sent: list[Message] = []
    for rank, program in enumerate(programs):
        for entry in program:
            actions = parts(entry.cell)
            want = Counter(
                ("activation", other, stage, name, mb)
                if kind == "F"
                else ("gradient", other, stage, "input gradient" if name == "output" else name, mb)
                for kind, stage, mb, _ in actions
                for (_, other, _), name in times.origins(Action(kind, stage, mb))
                if name and schedule.placement[other] != rank
            )
            got = Counter((m.channel.kind, m.producer, m.consumer, m.name, m.microbatch) for m in entry.receives)
            assert got == want
            sent += entry.sends
        for ahead in (True, False):
            open_ = set()
            for entry, posts in zip(program, posting_plan(program, 2, ahead), strict=True):
                open_.update(posts)
                assert open_.issuperset(entry.receives)
        for channel, messages in {c: [m for m in sent if m.channel == c] for c in {m.channel for m in sent}}.items():
            assert [m.number for m in messages] == list(range(len(messages)))
            assert channel.source != channel.destination
    received = [m for program in programs for entry in program for m in entry.receives]
    assert sorted(sent) == sorted(received)
    assert len(set(sent)) == len(sent)
    assert message_counts(schedule) == dict(sorted(Counter(m.channel for m in sent).items()))


def test_a_large_skip_is_waited_for() -> None:
    """1F1B, one micro-batch, three ranks, F 1 each and hops of 1: a skip of size 10 arrives at 1 + 11."""
    schedule = build("1f1b", 3, 1).with_tensors([("skip", 0, [2])])
    costs = Costs(p2p=1.0, message=0.0, bandwidth=1.0, tensors={"skip": 10.0})
    timeline = simulate(schedule, costs)
    assert timeline.starts[2] == (12.0, 13.0)
    assert timeline.starts[0] == (0.0, 15.0 + 11.0)  # the gradient of the skip is as large
    assert timeline.critical_path == ((0, 0), (2, 0), (2, 1), (0, 1))
    assert timeline.idle_by_cause[2]["message"] == 11.0
    assert simulate(schedule, Costs(p2p=1.0, bandwidth=1.0)).starts[2][0] == 4.0


def test_a_message_kept_for_later_needs_more_open_receives() -> None:
    """On the channel from rank 0 to rank 1 the skip of chunk 0 is used by chunk 1, behind other micro-batches' outputs."""
    schedule = build("interleaved", 2, 4).with_tensors([("skip", 0, [3])])
    depth = max(max(smallest_depths(program).values()) for program in traffic(schedule))
    assert depth > 1
    check(schedule, receive_depth=depth)
    words = f"receive depth {depth - 1} deadlocks: .* out of order or several at once, and needs {depth} receives open"
    with pytest.raises(ScheduleError, match=words):
        check(schedule, receive_depth=depth - 1)


def test_transforms_and_json_keep_them() -> None:
    schedule = build("dualpipe", 4, 8).with_tensors([("b", 1, (3, 2)), ("a", 0, [2])])
    assert schedule.tensors == (NamedTensor("a", 0, (2,)), NamedTensor("b", 1, (2, 3)))
    assert "tensors=2" in repr(schedule)
    for other in (unpair(schedule), split_cooldown(schedule), from_json(to_json(schedule)), forward_only(schedule, 3)):
        assert other.tensors == schedule.tensors
    assert from_json(to_json(schedule)) == schedule
    with pytest.raises(UsageError, match="cut_stages: nothing says which piece of a stage writes or reads tensor 'a'"):
        cut_stages(build("1f1b", 4, 8).with_tensors([("a", 0, [2])]), 2)
    sent = [m for program in traffic(forward_only(schedule, 3)) for entry in program for m in entry.sends]
    assert {m.channel.kind for m in sent} == {"activation"}
    assert "tensor 'b' of stage 1 for stage 3 micro-batch 0" in {m.words for m in sent}


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (("x", 2, [1]), "tensor 'x' goes from position 2 to position 1, .* every order of actions deadlocks"),
        (("x", 1, [1]), "tensor 'x' goes from position 1 to position 1"),
        (("x", 0, [4]), r"tensor 'x' names the stage position 4; there are 4 \(0\.\.3\)"),
        (("x", 0, []), "tensor 'x' of position 0 is read by no stage"),
        (("x", 0, [2, 2]), "position 2 reads tensor 'x' from two positions"),
        (("output", 0, [2]), "a tensor is called 'output'"),
        (("a b", 0, [2]), "a tensor is called 'a b'"),
    ],
)
def test_refused(tensor: tuple[str, int, list[int]], words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        build("1f1b", 4, 8).with_tensors([tensor])


@pytest.mark.parametrize("tensors", [{"x": -1.0}, {"x": "big"}, 3, [("x",)], {"x": float("inf")}])
def test_refused_sizes(tensors: object) -> None:
    with pytest.raises(UsageError, match="tensors"):
        Costs(tensors=tensors)  # type: ignore[arg-type]
