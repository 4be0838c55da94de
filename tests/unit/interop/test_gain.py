"""What a job could gain: against an exhaustive loop over what its system can run, and in the words of the system."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product

import pytest

from jobs import OVERLAPS, WORSE, gain_job, gain_space
from pipeloom.errors import UsageError
from pipeloom.interop import gain
from pipeloom.interop.gain import Neighbourhood, changed_flags, diff_lines, least_gain
from pipeloom.interop.systems import SYSTEMS, translated
from pipeloom.plan.job import Job, differences, normal
from pipeloom.plan.layout import PlannedLayout


def every(job: Job) -> Iterator[PlannedLayout]:
    """Every schedule, number of chunks, cut, size of a micro-batch and kind of recomputation on the same axes."""
    layout, megatron = job.layout, job.system == "megatron"
    families = ["1f1b", "interleaved", *(["interleaved-overlap"] if megatron else ["zbv", "dualpipev"])]
    recompute = [("none", 0), ("full", 0), *([("full", 2), ("norms", 0), ("norms+activation", 0)] if megatron else [])]
    sizes = [size for size in (1, 2, 4) if layout.m * layout.micro_batch % size == 0]
    for family, (kind, layers), size, cut in product(families, recompute, sizes, ("even", "balanced")):
        for v in (1,) if family == "1f1b" else (2, 3, 4, 6) if family.startswith("interleaved") else (2,):
            sized = replace(layout, schedule=family, v=v, micro_batch=size, m=layout.m * layout.micro_batch // size)
            yield replace(sized, recompute=kind, recompute_layers=layers, cut=cut, stages=())


def exhaustive(job: Job, space: Neighbourhood) -> float:
    """The seconds of the fastest run that fits."""
    best = float("inf")
    for layout in every(job):
        paired = layout.schedule == "interleaved-overlap"
        options = (*job.options, *(("overlap_experts", "delay_wgrad") if paired else ()))
        with suppress(UsageError):
            run = space.run(replace(job, layout=layout, options=tuple(sorted(options))))
            if run.prediction.peak <= space.memory and not SYSTEMS[job.system].refusals(run.job):
                best = min(best, run.seconds)
    return best


@pytest.mark.slow
@pytest.mark.parametrize(("system", "model", "text", "stages"), WORSE)
def test_changes_find_most_of_what_an_exhaustive_search_finds(system: str, model: str, text: str, stages: str) -> None:
    job = gain_job(system, model, text, stages)
    space = gain_space(job)
    now = space.run(job)
    best, least = space.best(now), exhaustive(job, space)
    assert best.prediction.peak <= space.memory
    assert now.seconds - best.seconds >= 0.8 * (now.seconds - least)
    assert least < 0.97 * now.seconds or now.prediction.peak > space.memory
    written, losses = translated(best.job, system)
    held = differences(best.job, normal(SYSTEMS[system].read(written, job.shape)))
    assert set(held) <= {sentence.partition("=")[0] for sentence in losses}


def test_a_job_that_overlaps_exchanges_of_tp_is_predicted_so() -> None:
    """And its neighbours without tp ask for no overlap, which Megatron-LM would refuse."""
    job = gain_job("megatron", "llama3-8b", "dp=2,tp=2,pp=2,m=16")
    space = gain_space(job, axes=True)
    flags = f"{SYSTEMS['megatron'].write(job).rstrip()} --tp-comm-overlap"
    beside = replace(normal(SYSTEMS["megatron"].read(flags, job.shape)), system="megatron")
    assert set(beside.options) - set(job.options) == {"overlap_tensor"}
    runs = space.run(job), space.run(beside)
    assert runs[1].prediction.step.exchange < 0.7 * runs[0].prediction.step.exchange
    assert runs[1].prediction.step.reduction == runs[0].prediction.step.reduction
    near = {each.job.layout.tp: each.job.options for each in space.around(runs[1])}
    assert "overlap_tensor" in near[4]
    assert "overlap_tensor" not in near[1]


SMALL = ("torchtitan", "llama3-8b", "dp=2,pp=4,m=16,zero=2,recompute=full", "")


@pytest.mark.parametrize("axes", [False, True])
def test_neighbours_are_runs_that_the_system_takes_on_the_same_devices(axes: bool) -> None:
    job = gain_job("megatron", "llama3-8b", "dp=2,pp=4,m=16,v=2")
    space = gain_space(job, axes=axes)
    now = space.run(job)
    near = space.around(now)
    assert now.job not in [each.job for each in near]
    assert len({(each.job.layout, each.job.options) for each in near}) == len(near)
    for each in near:
        assert SYSTEMS["megatron"].refusals(each.job) == []
        assert (each.job.layout.world, each.job.layout.sequences) == (8, 32)
    assert axes == any(each.job.layout.dp != 2 for each in near)
    ranks = [
        (each.prediction.peak > space.memory, each.seconds) for each in near if each.prediction.peak <= space.memory
    ]
    assert ranks == sorted(ranks)
    assert {each.job.layout.offload for each in near} > {"none", "core_attn", "core_attn+attn_proj"}
    assert {each.job.layout.group for each in near} == {0, 8}
    assert {2, 3, 4, 5, 6, 7, 8} <= {each.job.layout.v for each in near}
    assert {1, 2} == {each.job.layout.micro_batch for each in near}
    assert ("full", 2) in {(each.job.layout.recompute, each.job.layout.recompute_layers) for each in near}


def test_no_change_improves_on_the_best_run() -> None:
    job = gain_job(*SMALL)
    space = gain_space(job)
    best = space.best(space.run(job))
    assert best.seconds < 0.7 * space.run(job).seconds
    assert space.best(best) is best


@pytest.mark.slow
def test_a_larger_space_gives_no_slower_run() -> None:
    job = gain_job(*SMALL)
    same, wide = (space.best(space.run(job)) for space in (gain_space(job), gain_space(job, axes=True)))
    assert wide.seconds <= same.seconds


def test_a_job_that_does_not_fit_leads_to_one_that_does() -> None:
    job = gain_job("torchtitan", "llama3-8b", "dp=2,pp=4,m=16,zero=2,seq=8192")
    space = gain_space(job)
    now = space.run(job)
    best = space.best(now)
    assert now.prediction.peak > space.memory >= best.prediction.peak


def test_sums_of_gradients_that_are_not_hidden_make_a_step_longer() -> None:
    job = gain_job("megatron", "llama3-8b", "dp=8,m=4")
    space = gain_space(job)
    hidden, exposed = space.run(job), space.run(replace(job, options=()))
    assert exposed.prediction.step.reduction > 2 * hidden.prediction.step.reduction
    assert OVERLAPS in {each.job.options for each in space.around(exposed)}


def test_stages_are_cut_evenly_or_balanced() -> None:
    uneven = gain_job("torchtitan", "llama3-8b", "pp=4,m=16,zero=2", "Et*8|t*10|t*7|t*7L")
    space = gain_space(uneven)
    cuts = {each.job.layout.stages for each in space.around(space.run(uneven)) if each.job.layout.v == 1}
    assert cuts == {(9, 8, 8, 9), (9, 9, 9, 7), (9, 10, 7, 8)}


def test_a_change_is_a_diff_of_the_systems_own_flags() -> None:
    job = gain_job("megatron", "llama3-8b", "dp=2,pp=4,m=16,recompute=full")
    other = replace(job, layout=replace(job.layout, recompute="none", micro_batch=2, m=8))
    assert changed_flags(job, other) == {
        "--micro-batch-size": ("1", "2"),
        "--recompute-granularity": ("full", None),
        "--recompute-method": ("uniform", None),
        "--recompute-num-layers": ("1", None),
    }
    assert diff_lines(job, other)[:3] == [
        "- --micro-batch-size 1",
        "+ --micro-batch-size 2",
        "- --recompute-granularity full",
    ]


def test_the_least_gain_is_the_error_of_ratios_where_that_is_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gain, "RATIO_ERRORS", {"megatron": 0.02, "torchtitan": 0.05})
    assert least_gain("megatron") == (0.03, "the median error of ratios predicted for megatron is 2.0 %")
    assert least_gain("automodel") == (0.05, "the median error of ratios predicted for torchtitan is 5.0 %")


def test_recomputed_blocks_of_a_stage_lie_between_none_and_all() -> None:
    none, some, every_one, all_of_them = (
        gain_space(job).run(job)
        for job in (
            gain_job("megatron", "llama3-8b", f"pp=4,m=16,recompute={words}")
            for words in ("none", "full,recompute_layers=3", "full,recompute_layers=8", "full")
        )
    )
    assert none.seconds < some.seconds < every_one.seconds == all_of_them.seconds
    assert none.prediction.peak > some.prediction.peak > every_one.prediction.peak == all_of_them.prediction.peak
    saved = [each.prediction.ranks[1].activations for each in (none, some, all_of_them)]
    assert saved[1] == pytest.approx(saved[0] - 3 / 8 * (saved[0] - saved[2]), rel=0.02)
