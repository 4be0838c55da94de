"""Pipeline on gloo processes against one process: transports, overlap, shapes, steps, evaluation, trace, buffers."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from samples import FAMILIES

import pipeloom as pl
from models import batch, blocks, gradients, mse, serial, worst
from pipeloom.runtime import Pipeline, RuntimeOptions
from processes import run_ranks


S = pl.schedules
QUIET = [RuntimeOptions(monitor=False, transport=name) for name in ("individual", "shared")]
INDIVIDUAL = [
    RuntimeOptions(transport="individual"),
    RuntimeOptions(transport="shared"),
    RuntimeOptions(transport="individual", overlap_p2p=False),
    RuntimeOptions(transport="individual", shapes="each"),
    RuntimeOptions(transport="individual", receive_depth=1),
    RuntimeOptions(transport="individual", receive_depth=5, deallocate=False),
    RuntimeOptions(transport="shared", shapes="each", deallocate=False),
]
OUT_OF_ORDER = pl.Schedule.of(  # messages are used in another order than they come, and backwards are split
    [
        ["0F0", "0F1", "0F2", "2F1", "2F0", "2F2", "2I0", "2B1", "2I2", "0I1", "0B0", "2W0", "0B2", "0W1", "2W2"],
        ["1F2", "1F1", "1F0", "3F0", "3F1", "3F2", "3B1", "3I2", "3B0", "1I0", "1I1", "1B2", "1W1", "3W2", "1W0"],
    ],
    placement=[0, 1, 0, 1],
    microbatches=3,
    name="out of order",
)
BATCHED = [RuntimeOptions(transport="batched"), RuntimeOptions(transport="batched", shapes="each")]


def plans(ranks: int) -> list[tuple[str, Any, tuple[int, ...], RuntimeOptions]]:
    """(name, schedule, layers of each stage, options): every family with every option at least once."""
    found = []
    for at, (family, make) in enumerate(FAMILIES.items()):
        chunks = 1 if family in ("gpipe", "1f1b") else 2 + at % 2
        schedule = make(ranks, 2 * ranks + 1 + at % 3, chunks)
        stages = tuple(1 + (stage + at) % 2 for stage in range(schedule.stages))
        options = INDIVIDUAL if family in ("1f1b", "balanced", "bfs") else INDIVIDUAL[at % 2 : at % 2 + 1]
        found += [(f"{family} {number}", schedule, stages, option) for number, option in enumerate(options)]
    chosen = [S.one_f_one_b(ranks, 7), S.interleaved(ranks, ranks - 1), S.interleaved(ranks, 2 * ranks + 1, 2)]
    chosen += [S.looped_bfs(ranks, 5, 2), S.zbv(ranks, 2 * ranks), S.interleaved_overlap(ranks, 5)]
    chosen += [S.dualpipev(ranks, 2 * ranks), *[OUT_OF_ORDER] * (ranks == 2)]
    for schedule in chosen:
        stages = (1,) * schedule.stages
        found += [(f"batched {schedule!r} {option.shapes}", schedule, stages, option) for option in BATCHED]
    found += [(f"out of order {option}", OUT_OF_ORDER, (1,) * 4, option) for option in INDIVIDUAL if ranks == 2]
    return found


def equal_to_serial(name: str, schedule: Any, stages: tuple[int, ...], options: RuntimeOptions) -> dict[str, Any]:
    """One plan on this rank: what the test then asserts."""
    layers, sizes = blocks(sum(stages)), [1 + at % 3 for at in range(schedule.microbatches)]
    options = replace(options, microbatch_sizes=tuple(sizes), monitor=False)  # no store connection for each plan
    pipeline = Pipeline(layers, schedule, loss=mse, stages=stages, options=options)
    x, y = batch(sum(sizes))
    loss = pipeline.step(x, y)
    want_loss, want = serial(layers, x, y, sizes)
    own = own_layers(schedule, stages, pipeline.rank)
    mine = {key: value for key, value in want.items() if key.partition(".")[0] in own}
    report = {
        "name": name,
        "loss": loss.item(),
        "want": want_loss.item(),
        "worst": worst(gradients(pipeline), mine),
        "layers": {key.partition(".")[0] for key, _ in pipeline.named_parameters()} == own,
        "bytes": sum(p.numel() for p in pipeline.parameters()) == sum(v.numel() for v in mine.values()),
        "peak": pipeline.peak_activations,
        "expected peak": pl.simulate(schedule, pl.Costs(1, 1, 1, 0)).peak_activations[pipeline.rank],
    }
    pipeline.close()
    return report


def own_layers(schedule: Any, stages: tuple[int, ...], rank: int) -> set[str]:
    starts = [sum(stages[:at]) for at in range(len(stages) + 1)]
    return {f"block{i}" for s in schedule.stages_of[rank] for i in range(starts[s], starts[s + 1])}


def evaluation(rank: int, schedule: Any, options: RuntimeOptions) -> dict[str, Any]:
    """Two steps before zero_grad, evaluations of other batch sizes in between and after; then an optimizer's step."""
    layers = blocks(schedule.stages)
    pipeline = Pipeline(layers, schedule, loss=mse, options=options)
    first, second = batch(3 * schedule.microbatches, seed=1), batch(schedule.microbatches + 1, seed=2)
    pipeline.step(*first)
    evaluated = {}
    for rows in (1, 2, schedule.microbatches, 40):
        x, y = batch(rows, seed=rows)
        serial_loss = serial(layers, x, y, [rows])[0].item()
        evaluated[rows] = (pipeline.evaluate(x, y).item(), serial_loss)
        outputs = pipeline.predict(x)
        assert (outputs is not None) == (schedule.placement[-1] == rank)
        if outputs is not None:
            evaluated[-rows] = (mse(outputs, y).item(), serial_loss)
    pipeline.step(*second)
    pipeline.evaluate(*first)
    one = serial(layers, *first, split(len(first[0]), schedule.microbatches))[1]
    two = serial(layers, *second, split(len(second[0]), schedule.microbatches))[1]
    got = gradients(pipeline)
    off = worst(got, {name: one[name] + two[name] for name in got})
    before = {name: p.detach().clone() for name, p in pipeline.named_parameters()}
    torch.optim.SGD(pipeline.parameters(), lr=0.5).step()
    moved = worst(dict(pipeline.named_parameters()), {n: before[n] - 0.5 * (one[n] + two[n]) for n in before})
    pipeline.zero_grad()
    report = {"evaluated": evaluated, "worst": off, "moved": moved, "zeroed": not gradients(pipeline)}
    pipeline.close()
    return report


def split(rows: int, count: int) -> list[int]:
    base, larger = divmod(rows, count)
    return [base + (at < larger) for at in range(count)]


def buffers(rank: int, schedule: Any, options: RuntimeOptions) -> dict[str, Any]:
    """Receive buffers made, tensors alive, and sends kept, over several steps."""
    pipeline = Pipeline(blocks(schedule.stages), schedule, loss=mse, options=options)
    gc.collect()
    gc.freeze()  # what is there already need not be looked through again
    made, alive = [], []
    for step in range(4):
        pipeline.step(*batch(2 * schedule.microbatches, seed=step))
        pipeline.zero_grad()
        gc.collect()
        made.append(pipeline.stats.receive_buffers)
        alive.append(sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()))
    timeline = pipeline.timeline()
    report = {
        "made": made,
        "shared segments": pipeline.stats.send_segments,
        "sends": pipeline.stats.messages_sent,
        "alive": alive,
        "messages": pipeline.stats.messages_received,
        "peak": pl.simulate(schedule, pl.Costs(1, 1, 1, 0)).peak_activations[rank],
        "boxes": tuple(map(len, timeline.starts)),
        "ordered": all(
            a <= b <= c
            for s, e in zip(timeline.starts, timeline.ends, strict=True)
            for a, b, c in zip(s, e, [*s[1:], float("inf")], strict=True)
        ),
        "late": lateness(timeline),
        "makespan": timeline.makespan,
    }
    pipeline.close()
    return report


def lateness(timeline: Any) -> float:
    """The most seconds by which a forward starts before the one that it depends on has ended: the clocks' error."""
    schedule = timeline.schedule
    at = {cell: (r, i) for r, program in enumerate(schedule.programs) for i, cell in enumerate(program)}
    worst_case = float("-inf")
    for action, (rank, index) in at.items():
        if action.kind == "F" and action.stage:
            r, i = at[pl.Action("F", action.stage - 1, action.microbatch)]
            worst_case = max(worst_case, timeline.ends[r][i] - timeline.starts[rank][index])
    return worst_case


def work(rank: int, ranks: int) -> dict[str, Any]:
    looped = S.interleaved(ranks, 2 * ranks + 1, 2)
    evaluated = [looped, S.one_f_one_b(ranks, 3), S.looped_bfs(ranks, ranks, 2)]
    measured = [looped, S.one_f_one_b(ranks, 9), S.looped_bfs(ranks, 5, 3), *([OUT_OF_ORDER] if ranks == 2 else [])]
    return {
        "plans": [equal_to_serial(*plan) for plan in plans(ranks)],
        "evaluation": [evaluation(rank, s, options) for s in evaluated for options in QUIET],
        "buffers": [buffers(rank, s, options) for s in measured for options in QUIET],
    }


@pytest.fixture(scope="module", params=[2, 4])
def reports(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """One spawn for all tests of this file: rank -> its reports."""
    return run_ranks(work, request.param, request.param, timeout=150)


def test_step_equals_one_process(reports: list[dict[str, Any]]) -> None:
    for found in zip(*(report["plans"] for report in reports), strict=True):
        assert len({each["loss"] for each in found}) == 1, found  # bitwise the same on every rank
        for rank, each in enumerate(found):
            assert each["loss"] == pytest.approx(each["want"], rel=1e-6), (rank, each)
            assert each["worst"] <= 1e-6, (rank, each)


@pytest.mark.core
def test_a_rank_holds_its_own_stages_only(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert all(each["layers"] and each["bytes"] for each in report["plans"])


@pytest.mark.core
def test_activations_alive_equal_the_simulated_peaks(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert [each["peak"] for each in report["plans"]] == [each["expected peak"] for each in report["plans"]]


@pytest.mark.core
def test_evaluation_between_steps_leaves_gradients_alone(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        for each in report["evaluation"]:
            for rows, (got, want) in each["evaluated"].items():
                assert got == pytest.approx(want, rel=1e-5), rows
            assert each["worst"] <= 1e-6
            assert each["moved"] <= 1e-6
            assert each["zeroed"]


@pytest.mark.core
def test_buffers_do_not_grow(reports: list[dict[str, Any]]) -> None:
    """Receive buffers are a pool: all are made in the first step, fewer than messages; nothing else is kept either."""
    for report in reports:
        for each in report["buffers"]:
            assert each["made"][1:] == each["made"][:1] * 3, each
            if each["shared segments"] is None:
                assert each["alive"][1] >= each["alive"][2] >= each["alive"][3], each
            else:  # how many are on their way at once depends on time, up to all of a step
                assert each["shared segments"] <= each["sends"], each
            assert each["made"][0] <= each["messages"]
    looped = [each for report in reports for each in report["buffers"][:2]]
    assert all(each["made"][0] <= each["peak"] + 2 * 2 for each in looped), looped  # alive, and two open a channel
    assert sum(each["made"][0] for each in looped) < sum(each["messages"] for each in looped)


@pytest.mark.core
def test_the_measured_timeline_has_the_simulated_boxes(reports: list[dict[str, Any]]) -> None:
    ranks = len(reports)
    schedule = S.interleaved(ranks, 2 * ranks + 1, 2)
    for report in reports:
        each = report["buffers"][0]
        assert each["boxes"] == tuple(map(len, schedule.programs))
        assert each["ordered"]
        assert each["makespan"] > 0
        assert each["late"] < 0.05  # no effect before its cause, but for the error of the clocks
    assert len({report["buffers"][0]["makespan"] for report in reports}) == 1
