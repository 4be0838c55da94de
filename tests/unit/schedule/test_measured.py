"""Slow stages, drift and predictions from measured steps with noise."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

import pipeloom as pl
from pipeloom.schedule.timeline import Exposed, Timeline
from pipeloom.schedule.transforms import recompute
from pipeloom.traces import timelines as timeline_files
from pipeloom.traces.measured import (
    SPENT,
    costs_of,
    drift,
    predict,
    predict_another,
    slow_stages,
    step_time,
    time_spent,
    with_overhead,
)


def _steps(slow: int | None, seed: int, count: int = 9) -> list[pl.Timeline]:
    """Steps whose stages differ by 1 % noise, each, of the 8 stages of 4 ranks; `slow` takes 10 % longer."""
    rng = random.Random(seed)
    schedule = pl.schedules.interleaved(ranks=4, chunks=2, microbatches=8)
    steps = []
    for _ in range(count):
        factors = [rng.gauss(1, 0.01) * (1.1 if stage == slow else 1) for stage in range(8)]
        factors[0] *= 1.3  # the embedding is no layer
        factors[-1] *= 1.6  # nor is the head
        forward, backward = (tuple(base * factor for factor in factors) for base in (2e-3, 1.9e-3))
        costs = pl.Costs(forward=forward, input_grad=backward, weight_grad=backward)
        steps.append(replace(pl.simulate(schedule, costs), source="measured"))
    return steps


@pytest.mark.parametrize("seed", range(20))
def test_a_stage_slowed_by_a_tenth_is_named_and_no_other(seed: int) -> None:
    slow = 1 + seed % 6
    found = slow_stages(_steps(slow, seed))
    assert [one.stage for one in found] == [slow]
    assert found[0].excess == pytest.approx(0.1, abs=0.03)
    assert found[0].rank == slow % 4
    assert slow_stages(_steps(None, 100 + seed)) == ()


def test_layers_explain_what_a_stage_takes() -> None:
    steps = _steps(3, 1)
    assert slow_stages(steps, [1.3, 1, 1, 1.1, 1, 1, 1, 1.6]) == ()
    assert [one.stage for one in slow_stages(steps, [1.3, 1, 1, 1, 1, 1, 1, 1.6])] == [3]


@pytest.mark.parametrize(
    ("times", "ranks", "makespan"),
    [((1, 2, 3, 4), 4, 1 + 2 + 3 + 4 + 4), ((1, 2, 3, 4), 2, 3 + 7 + 7), ((6, 3), 3, 4 + 4 + 3 + 2)],
)
def test_costs_of_stages_are_cut_and_joined_for_another_number_of_them(
    times: tuple[float, ...], ranks: int, makespan: float
) -> None:
    costs = pl.Costs(forward=times, input_grad=0, weight_grad=0)
    other = pl.simulate(pl.schedules.gpipe(ranks, 2))
    assert predict_another(costs, pl.schedules.gpipe(len(times), 2), [other])[0] == pytest.approx(makespan)


def test_all_times_of_stages_are_joined_for_another_number_of_them() -> None:
    times = {
        "forward": (1, 2, 3, 4),
        "backward": (2, 2, 4, 4),
        "recompute": (1, 1, 3, 3),
        "parts": {"norms": (1, 0, 0, 1)},
    }
    joined = {"forward": (3, 7), "backward": (4, 8), "recompute": (2, 6), "parts": {"norms": (1, 1)}}
    for part in ("", "norms"):
        other = pl.simulate(recompute(pl.schedules.gpipe(2, 2), False, part=part))
        simulated, _ = predict_another(pl.Costs(**times), pl.schedules.gpipe(4, 2), [other])
        assert simulated == pl.simulate(other.schedule, pl.Costs(**joined)).makespan
    assert predict_another(pl.Costs(1, 0, 0), pl.schedules.gpipe(4, 2), [pl.simulate(pl.schedules.gpipe(2, 2))])[0] == 6


def test_the_host_takes_its_time_before_each_action_of_a_part_too() -> None:
    """A step in which each action starts 0.5 after the one before, which two of three recomputed parts name."""
    schedule = recompute(pl.schedules.gpipe(1, 3), False, part="norms")
    costs = pl.Costs(2, 1, 3, parts={"norms": (0.25,)})
    run = pl.simulate(schedule, costs)
    late = [[time + 0.5 * at for at, time in enumerate(row)] for row in run.starts]
    ends = [[time + 0.5 * at for at, time in enumerate(row)] for row in run.ends]
    step = Timeline.measured(schedule, late, ends)
    longer = with_overhead(replace(costs_of([step]), p2p=2.0), [step])
    assert (longer.forward, longer.input_grad, longer.weight_grad, longer.backward) == ((2.5,), (2.5,), (2.5,), (4.5,))
    assert (longer.parts, longer.p2p) == ((("norms", (0.75,)),), 1.5)


def test_fitted_costs_have_the_times_of_gathers_and_sums_that_the_steps_have() -> None:
    steps = [
        pl.simulate(pl.schedules.gpipe(2, 2), pl.Costs(gather=(0.5, time), reduce=1.5)) for time in (0.5, 1.0, 4.0)
    ]
    costs = costs_of(steps)
    assert (costs.gather, costs.reduce, costs.recompute) == ((0.5, 1.0), (1.5, 1.5), None)
    assert costs_of([*steps, pl.simulate(steps[0].schedule)]).gather is None


def test_costs_of_replicas_are_those_of_their_position() -> None:
    """DualPipe's stages 4 to 7 hold the layers of stages 0 to 3 again."""
    fitted, other = pl.schedules.dualpipe(4, 8), pl.schedules.one_f_one_b(4, 8)
    times = tuple(1.0 + at for at in fitted.position_of)
    simulated, _ = predict_another(pl.Costs(times, times, times), fitted, [pl.simulate(other)])
    assert simulated == pytest.approx(pl.simulate(other, pl.Costs(*[(1.0, 2.0, 3.0, 4.0)] * 3)).makespan)


def test_a_faster_machine_is_told_from_a_wrong_order() -> None:
    """Actions that all take a fifth less explain the whole error; a rank that waits for something else explains none of it."""
    schedule = pl.schedules.one_f_one_b(ranks=4, microbatches=8)

    def steps(*factors: float, p2p: float = 0.0) -> list[pl.Timeline]:
        return [
            replace(pl.simulate(schedule, pl.Costs(1e-3, 1e-3, 1e-3, p2p=p2p).scaled(factor)), source="measured")
            for factor in factors
        ]

    faster = predict([*steps(*[1.0] * 5), *steps(*[0.8] * 4)])
    assert faster.error == pytest.approx(0.25)
    assert faster.speed == pytest.approx(0.8)
    assert faster.error_at_speed == pytest.approx(0)
    late = predict([*steps(*[1.0] * 5), *steps(*[1.0] * 4, p2p=1e-3)])
    assert late.speed == pytest.approx(1)
    assert late.error == late.error_at_speed == pytest.approx(late.simulated / late.measured - 1)
    assert late.error < -0.1


def _uneven_steps(factors: tuple[float, ...], count: int) -> list[pl.Timeline]:
    """Steps of micro-batches of different length, with 1 % noise, and costs that are means over them."""
    rng = random.Random(1)
    schedule = pl.schedules.zb_h1(ranks=2, microbatches=4)
    steps = []
    for _ in range(count):
        costs = pl.Costs(2e-3, 1e-3, 1e-3, microbatch=tuple(rng.gauss(factor, 0.01) for factor in factors))
        step = pl.simulate(schedule, costs)
        steps.append(replace(step, costs=replace(costs, microbatch=()), source="measured"))
    return steps


def test_a_stall_in_another_stage_of_each_step_is_part_of_the_prediction() -> None:
    """The medians of the stages leave out all stalls: a step simulated with them takes 24."""
    schedule = pl.schedules.one_f_one_b(3, 6)
    stalls = [pl.Costs(forward=tuple(3.0 if stage == step % 3 else 1.0 for stage in range(3))) for step in range(12)]
    prediction = predict([pl.simulate(schedule, costs) for costs in stalls])
    assert prediction.simulated == prediction.measured == 34


def test_costs_of_steps_have_the_factors_of_their_micro_batches() -> None:
    factors = (0.8, 1.6, 0.4, 1.2)
    fitted = costs_of(_uneven_steps(factors, 5))
    assert fitted.microbatch == pytest.approx(factors, abs=0.03)
    assert abs(predict(_uneven_steps(factors, 8)).error) < 0.02
    assert costs_of(_uneven_steps((1.0, 1.03, 0.97, 1.0), 5)).microbatch == ()


def test_the_stages_of_a_single_step_tell_factors_from_noise() -> None:
    factors = (0.8, 1.6, 0.4, 1.2)
    (step,) = _uneven_steps(factors, 1)
    assert costs_of([step]).microbatch == pytest.approx(factors, abs=0.03)
    assert abs(predict([step]).error) < 0.02
    # a stall of 4 actions' length in one stage is not a longer micro-batch
    forward = next(at for at, cell in enumerate(step.schedule.programs[1]) if str(cell) == "1F1")
    (even,) = _uneven_steps((1.0, 1.0, 1.0, 1.0), 1)
    starts = tuple(time + 8e-3 * (at > forward) for at, time in enumerate(even.starts[1]))
    ends = tuple(time + 8e-3 * (at >= forward) for at, time in enumerate(even.ends[1]))
    stalled = replace(even, starts=(even.starts[0], starts), ends=(even.ends[0], ends))
    assert costs_of([stalled]).microbatch == ()


def test_drift_is_the_median_slope() -> None:
    schedule = pl.schedules.gpipe(ranks=2, microbatches=3)
    spans = [5.0, 1.0, 1.01, 1.02, 9.0, 1.04, 1.05]  # the first step, and one that was held up, do not count
    steps = [replace(pl.simulate(schedule, pl.Costs().scaled(span)), source="measured") for span in spans]
    assert drift(steps) == pytest.approx(0.05, rel=0.2)
    with pytest.raises(pl.PipeloomError, match="no measured step"):
        drift([])


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1", "dualpipe", "1f1b-overlap", "gpipe"])
def test_where_the_time_went_adds_up_to_the_step(name: str) -> None:
    """For any costs, hops, delays of the host and communications, on every rank; and after a round trip through JSON."""
    rng = random.Random(name)
    for _ in range(15):
        schedule = pl.schedules.build(name, 4, rng.choice([8, 10]))
        costs = [tuple(rng.uniform(0.5, 1.5) * 1e-2 for _ in range(schedule.stages)) for _ in range(3)]
        timeline = pl.simulate(schedule, pl.Costs(*costs, p2p=rng.choice([0.0, 1e-3])))
        late = [rng.uniform(0, 1e-3) for _ in range(4)]  # the host's, before each rank's last action
        ends = tuple((*row[:-1], row[-1] + late[rank]) for rank, row in enumerate(timeline.ends))
        starts = tuple((*row[:-1], row[-1] + late[rank]) for rank, row in enumerate(timeline.starts))
        exposed = tuple(
            Exposed(
                {"tp": rng.uniform(0, 0.01), "all-to-all": rng.uniform(0, 0.02)},
                {"dp": rng.uniform(0, 0.01), "p2p": rng.uniform(0, 0.01)},
                row[-1] + rng.choice([0.0, 0.005, 0.03]),
            )
            for row in ends
        )
        step = replace(timeline, source="measured", starts=starts, ends=ends, exposed=exposed)
        whole = step_time(step)
        assert whole == max(step.makespan, *(each.end for each in exposed))
        for row, each, last, busy in zip(time_spent([step]), exposed, ends, step.busy, strict=True):
            assert set(row) == set(SPENT)
            assert sum(row.values()) == pytest.approx(whole, abs=2e-8)
            assert min(row.values()) > -2e-8
            assert row["tp"] == each.inside["tp"]
            assert row["computation"] == pytest.approx(busy - sum(each.inside.values()))
            assert row["dp"] <= min(each.after["dp"], each.end - last[-1]) + 1e-12
        both = time_spent([step, timeline])
        for row in both:
            assert sum(row.values()) == pytest.approx((whole + timeline.makespan) / 2, abs=2e-8)
        (read,) = timeline_files.from_json(json.dumps(timeline_files.to_dict([step])))
        assert read == step


def test_each_communication_has_its_column() -> None:
    """One rank, by hand: 2 s of actions with 0.5 s of tp in them, then 1 s until the gradients are summed, 0.75 of it dp."""
    schedule = pl.schedules.gpipe(ranks=1, microbatches=1)
    costs = pl.Costs(1, 0.5, 0.5)
    exposed = (Exposed({"tp": 0.5}, {"dp": 0.75}, 3.0),)
    step = replace(pl.simulate(schedule, costs), source="measured", exposed=exposed)
    assert step_time(step) == 3
    (row,) = time_spent([step])
    wanted = {"computation": 1.5, "tp": 0.5, "dp": 0.75, "overhead": 0.25}
    assert row == pytest.approx(dict.fromkeys(SPENT, 0.0) | wanted)


def test_recomputations_are_fitted_whole_and_by_part() -> None:
    """The costs of steps with R of a stage and of a part simulate those steps again."""
    costs = pl.Costs((2, 1), 1, 1, recompute=(1.5, 0.5), parts={"norms": (0.25, 0.5)})
    schedule = recompute(pl.schedules.zb_h1(2, 4), True, [(0, 1)])
    schedule = recompute(schedule, actions=[(0, 2), (1, 3)], part="norms")
    steps = [pl.simulate(schedule, costs.scaled(factor)) for factor in (1.0, 3.0, 1.0)]
    found = costs_of([Timeline.measured(step.schedule, step.starts, step.ends) for step in steps])
    assert found.recompute == (1.5, 0.0)
    assert dict(found.parts) == {"norms": (0.25, 0.5)}
    assert pl.simulate(schedule, found).makespan == steps[0].makespan
