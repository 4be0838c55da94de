"""Megatron-LM's timers: F and B of each pipeline rank from a log, and what they say of a job."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from typer.testing import CliRunner

import pipeloom as pl
from pipeloom.cli import app
from pipeloom.cli.gains import gain_of
from pipeloom.errors import UsageError
from pipeloom.interop import timers
from pipeloom.interop.systems import SYSTEMS
from pipeloom.plan import RUNTIMES, Planner, load_device, load_model, parse_layout
from pipeloom.plan.job import Job, normal
from pipeloom.plan.layout import PlannedLayout
from pipeloom.plan.predict import LayoutCosts
from pipeloom.schedule.costs import StageCosts
from pipeloom.traces import timelines as timeline_files

H100 = load_device("h100")
UNEVEN = "Et*8|t*8|t*8|t*8L"


def log(times: Sequence[Sequence[tuple[float, float]]], prefix: str = "", more: str = "") -> str:
    """A log of steps, each rank -> milliseconds of (forward-compute, backward-compute), of `--timing-log-option all`."""
    lines = ["using world size: 8"]
    for at, step in enumerate(times):
        lines += [f" iteration {at + 1:8}/ 100 | elapsed time per iteration (ms): 900.0 |", "times across ranks (ms):"]
        for place, name in enumerate(("forward-compute", "backward-compute")):
            lines += [f"  {name}:", *(f"     rank {rank:2d}: {both[place]:.2f}" for rank, both in enumerate(step))]
        lines += ["  optimizer:", *(f"     rank {rank:2d}: 9.99" for rank in range(len(step)))]
    return "\n".join(prefix + line for line in lines) + more + "\n"


LAYOUTS = ["pp=4,m=8", "pp=2,dp=2,m=4", "pp=4,tp=2,m=16", "pp=2,v=2,m=4", "pp=4,dp=2,v=2,m=8,micro_batch=2"]
PREFIXES = ["", "[default0]:", "3: ", "", ""]


@pytest.mark.parametrize(("text", "prefix"), list(zip(LAYOUTS, PREFIXES, strict=True)))
def test_stage_times_are_those_of_the_log_within_rounding(text: str, prefix: str, tmp_path: Path) -> None:
    layout, draw = parse_layout(text), Random(text)
    truth = [(draw.uniform(5, 9), draw.uniform(9, 20)) for _ in range(layout.pp)]  # of a micro-batch
    each = layout.world // layout.pp
    slow = [[(9 * f, 9 * b) for f, b in truth for _ in range(each)]]  # the first step warms up
    steps = [[(layout.m * f, layout.m * b) for f, b in truth for _ in range(each)]]
    path = tmp_path / "train.log"
    path.write_text(log([*slow, *steps], prefix))
    assert timers.accepts(path)
    for rank, (stages, forward, backward) in enumerate(timers.read(path, layout)):
        assert stages == tuple(range(rank, layout.pp * layout.v, layout.pp))
        assert (1e3 * forward, 1e3 * backward) == pytest.approx(truth[rank], abs=0.005)


def test_other_logs_are_refused_in_a_sentence(tmp_path: Path) -> None:
    path, layout = tmp_path / "train.log", parse_layout("pp=4,m=8")
    path.write_text(log([[(1.0, 2.0)] * 2]))
    with pytest.raises(UsageError, match="forward-compute has the times of 2 ranks, and the job has 4 devices"):
        timers.read(path, layout)
    path.write_text(log([[(1.0, 2.0)] * 4]).replace("backward-compute", "backward"))
    with pytest.raises(UsageError, match="there is no timer backward-compute; log with --timing-log-level 2"):
        timers.read(path, layout)
    path.write_text(log([[(1.0, 2.0)] * 3 + [(1.0, 0.0)]]))
    with pytest.raises(
        UsageError, match=r"train\.log: backward-compute of rank 3 takes 0 ms; a time is above 0 and fin"
    ):
        timers.read(path, layout)
    path.write_text("nothing\n")
    with pytest.raises(UsageError, match="there is no timer forward-compute"):
        timers.read(path, layout)
    assert not timers.accepts(tmp_path)
    result = CliRunner().invoke(app, ["improve", str(path)])
    assert str(result.exception).endswith(
        "whose timers give times and no order; nearest: --job JOB, the job that it is of"
    )


def planned(stages: str) -> tuple[Job, Planner, LayoutCosts]:
    shape = load_model("llama3-8b")
    counts = tuple(word.count("t") if "*" not in word else int(word.strip("EtL*")) for word in stages.split("|"))
    counts = tuple(count + ("E" in word) + ("L" in word) for count, word in zip(counts, stages.split("|"), strict=True))
    layout = PlannedLayout(pp=4, dp=2, m=16, cut="even", stages=counts)
    options = ("overlap_grads", "overlap_params")
    job = normal(Job(shape, layout, options=options, system="megatron"))
    planner = Planner(shape, H100, RUNTIMES["megatron"])
    return job, planner, planner.predict(job.layout)


def times_of(planner: Planner, layout: PlannedLayout, scale: Callable[[int], float]) -> list[tuple[float, float]]:
    """Rank -> milliseconds of F and B of a step, those of the planner times `scale`."""
    each = StageCosts(planner.stage_costs(layout), layout.pp * layout.v)
    return [
        (
            1e3 * layout.m * scale(at) * sum(each.forward[at :: layout.pp]),
            1e3 * layout.m * scale(at) * sum(each.backward[at :: layout.pp]),
        )
        for at in range(layout.pp)
    ]


def test_a_calibrated_planner_predicts_what_was_measured() -> None:
    job, planner, _ = planned(UNEVEN)
    truth = [(0.02, 0.05), (0.021, 0.049), (0.018, 0.048), (0.03, 0.06)]
    again = planner.calibrated(job.layout, [((at,), *both) for at, both in enumerate(truth)])
    costs = StageCosts(again.stage_costs(job.layout), 4)
    assert costs.forward == pytest.approx([f for f, _ in truth])
    assert costs.backward == pytest.approx([b for _, b in truth])
    blocks = [factor for factor, _ in again.factors[1:-1]]
    assert blocks[-1] == pytest.approx(sorted({*blocks[:24]})[1])  # the median of the three other ranks
    assert again.factors[-1][0] > 1.2 * blocks[-1]
    quick = planner.calibrated(job.layout, [((at,), *both) for at, both in enumerate([*truth[:3], (0.001, 0.002)])])
    assert len(set(quick.factors[-8:])) == 1  # its blocks alone would take longer
    moved = replace(job.layout, stages=(8, 8, 8, 10))
    assert again.stage_costs(moved).per_stage("forward", 4)[0] == pytest.approx(0.02 * 7 / 8, rel=0.02)


def test_an_output_layer_that_takes_longer_loses_blocks(tmp_path: Path) -> None:
    """The output layer takes three times as long as predicted: blocks leave its stage, and the gain is that of the times."""
    job, planner, prediction = planned(UNEVEN)
    script, path, better = tmp_path / "train.sh", tmp_path / "train.log", tmp_path / "better.sh"
    script.write_text(SYSTEMS["megatron"].write(job))
    times = times_of(planner, job.layout, lambda at: 1.5 if at == 3 else 1.0)
    path.write_text(log([[both for both in times for _ in range(2)]] * 3))
    result = CliRunner().invoke(app, ["improve", str(path), "--job", str(script), "--output", str(better), "--json"])
    assert result.exit_code == 0, result.output
    values = json.loads(result.stdout)
    assert values["job"]["step_seconds"] > 1.2 * prediction.step.total
    again = SYSTEMS["megatron"].read(better.read_text())
    assert (again.layout.dp, again.layout.pp, again.layout.tp) == (2, 4, 1)
    assert values["best"]["gain"] > 0.1
    flags = [line for line in values["best"]["diff"] if "layout" in line or "chunks" in line]
    assert flags


@pytest.mark.slow
def test_less_than_a_percent_of_measured_times_is_not_worth_changing(tmp_path: Path) -> None:
    """The best job, with the times that it was predicted with: no change saves a percent, and none is written."""
    job, planner, _ = planned(UNEVEN)
    script, path, better, again = (tmp_path / name for name in ("train.sh", "train.log", "better.sh", "again.sh"))
    script.write_text(SYSTEMS["megatron"].write(job))
    assert CliRunner().invoke(app, ["improve", "--job", str(script), "--output", str(better)]).exit_code == 0
    layout = normal(SYSTEMS["megatron"].read(better.read_text())).layout
    path.write_text(log([[both for both in times_of(planner, layout, lambda _: 1.0) for _ in range(2)]] * 2))
    result = CliRunner().invoke(app, ["improve", str(path), "--job", str(better), "--output", str(again)])
    words = " ".join(result.stdout.split())
    assert "nothing worth changing: " in words
    assert "and 1.0 % would be (stage times are measured)" in words
    assert not again.exists()


def test_a_trace_of_another_job_is_refused(tmp_path: Path) -> None:
    job, *_ = planned(UNEVEN)
    script, path = tmp_path / "train.sh", tmp_path / "timelines.json"
    script.write_text(SYSTEMS["megatron"].write(job))
    step = pl.simulate(pl.schedules.one_f_one_b(ranks=2, microbatches=4), pl.Costs().scaled(1e-2))
    path.write_text(json.dumps(timeline_files.to_dict([replace(step, source="measured")])))
    result = CliRunner().invoke(app, ["improve", str(path), "--job", str(script)])
    message = "has 2 ranks, 2 stages and 4 micro-batches, and the job 4, 4 and 16: it is of another job"
    assert message in str(result.exception)


@pytest.mark.slow
def test_times_of_a_trace_count_as_those_of_timers(tmp_path: Path) -> None:
    job, planner, _ = planned(UNEVEN)
    script, logged, traced = tmp_path / "train.sh", tmp_path / "train.log", tmp_path / "timelines.json"
    script.write_text(SYSTEMS["megatron"].write(job))
    costs = planner.stage_costs(job.layout)
    slow = [1.0, 1.0, 1.4, 1.0]
    fields = {
        name: tuple(map(float.__mul__, slow, costs.per_stage(name, 4)))
        for name in ("forward", "input_grad", "weight_grad")
    }
    step = replace(
        pl.simulate(pl.schedules.one_f_one_b(ranks=4, microbatches=16), pl.Costs(**fields)), source="measured"
    )
    traced.write_text(json.dumps(timeline_files.to_dict([step])))
    times = times_of(planner, job.layout, slow.__getitem__)
    logged.write_text(log([[both for both in times for _ in range(2)]]))
    answers = [
        json.loads(CliRunner().invoke(app, ["improve", str(path), "--job", str(script), "--json"]).stdout)
        for path in (logged, traced)
    ]
    assert answers[0]["best"]["diff"] == answers[1]["best"]["diff"]
    assert answers[0]["job"]["step_seconds"] == pytest.approx(answers[1]["job"]["step_seconds"], rel=1e-4)


def test_sums_of_gradients_may_be_hidden_beside_measured_times() -> None:
    job, planner, _ = planned(UNEVEN)
    job = replace(job, options=())
    times = times_of(planner, job.layout, lambda _: 1.0)
    measured = [((at,), *(each / 1e3 / job.layout.m for each in both)) for at, both in enumerate(times)]
    gain = gain_of(job, H100, axes=False, times=lambda _: measured)
    hidden = [run.seconds for run in gain.neighbours if "overlap_grads" in run.job.options]
    assert hidden
    assert min(hidden) < gain.now.seconds


@pytest.mark.slow
def test_a_job_alone_changes_on_its_own_axes(tmp_path: Path) -> None:
    job, *_ = planned("Et*12|t*4|t*4|t*12L")
    script = tmp_path / "train.sh"
    script.write_text(SYSTEMS["megatron"].write(job))
    values = json.loads(CliRunner().invoke(app, ["improve", "--job", str(script), "--json"]).stdout)
    assert values["least_gain"] == 0.03
    assert not [row for row in values["neighbours"] if "pp=4" not in row["layout"] or "dp=2" not in row["layout"]]
    assert values["best"]["gain"] > 0.2
