"""Runs as a plan writes them: a dry run takes the seconds and the bytes that the plan predicts."""

from __future__ import annotations

import pytest

from pipeloom.config import load_layout
from pipeloom.interop.systems import written
from pipeloom.plan import RUNTIMES, Planner, PlanRequest, load_device, load_model
from pipeloom.plan.export import train_flags
from pipeloom.plan.layout import PlannedLayout, parse
from pipeloom.plan.run import RunPrediction, predicted
from pipeloom.plan.search import closest, search

GIB = 2**30
LAYOUTS = [
    ("llama3-8b", 4096, "dp=2,pp=4,m=16,zero=0"),
    ("llama3-8b", 4096, "dp=8,m=2,zero=3,recompute=full"),
    ("llama3-8b", 4096, "dp=2,pp=4,v=4,m=32,zero=2,recompute=full"),
    ("llama3-8b", 4096, "dp=2,pp=4,v=4,m=64,zero=3"),
    ("llama3-8b", 4096, "dp=2,pp=4,m=48,zero=3,schedule=zbv"),
    ("llama3-8b", 4096, "pp=8,m=64,schedule=zb-h1,recompute=full,recompute_layers=2"),
    ("llama3-8b", 4096, "pp=4,v=2,m=24,dp=2,micro_batch=2,vocabulary=pp"),
    ("llama3-8b", 4096, "pp=4,v=2,m=24,dp=2,zero=2,vocabulary=pp"),
    ("llama3-8b", 32768, "pp=2,m=32,cp=2,tp=2,recompute=full,slices=4,vocabulary=pp"),
    ("llama3-70b", 4096, "pp=4,v=2,m=32,dp=2,tp=4,micro_batch=2,zero=3,recompute=full,vocabulary=pp"),
    ("llama3-8b", 32768, "cp=8,m=16,zero=2"),
    ("llama3-8b", 32768, "pp=8,v=4,m=64,schedule=interleaved,recompute=full"),
    ("llama3-8b", 32768, "pp=4,cp=2,m=32,slices=4"),
    ("mixtral-8x7b", 4096, "pp=4,dp=4,ep=4,m=8,recompute=full"),
    ("mixtral-8x7b", 4096, "pp=2,dp=8,m=2,micro_batch=4,zero=3,recompute=full,slices=4"),
    ("mixtral-8x7b", 4096, "pp=4,dp=4,tp=2,ep=4,m=32,zero=3,schedule=dualpipev,recompute=full"),
    ("mixtral-8x7b", 4096, "pp=4,v=2,dp=4,ep=4,m=32,schedule=interleaved-overlap,recompute=full"),
]


def planner_of(model):
    return Planner(load_model(model), load_device("h100"), RUNTIMES["pipeloom"])


def dry_run(planner: Planner, prediction, folder) -> RunPrediction:
    file = folder / "run.toml"
    file.write_text(written(prediction, planner, "pipeloom", data="stdlib")[0])
    return predicted(load_layout(file, world_size=0), planner.device)


@pytest.mark.parametrize(("model", "seq", "text"), LAYOUTS)
def test_a_dry_run_of_a_written_plan_takes_what_is_predicted(model, seq, text, tmp_path):
    planner = planner_of(model)
    plan = planner.predict(parse(text, PlannedLayout(seq=seq)))
    run = dry_run(planner, plan, tmp_path)
    assert [each.total for each in plan.ranks] == pytest.approx([each.total for each in run.ranks], rel=0.005)
    assert run.step is not None
    assert plan.step.total == pytest.approx(run.step.total, rel=0.01)
    assert [each.gathered for each in plan.ranks] == pytest.approx([each.gathered for each in run.ranks], rel=0.005)


@pytest.mark.parametrize(
    ("model", "devices", "seq", "sequences", "memory"),
    [
        ("llama3-8b", 8, 4096, 16, 79),
        ("llama3-8b", 8, 32768, 16, 79),
        ("llama3-8b", 16, 4096, 64, 40),
        ("llama3-8b", 4, 8192, 32, 79),
        ("mixtral-8x7b", 16, 4096, 32, 79),
        ("llama3-70b", 32, 4096, 64, 79),
    ],
)
def test_the_best_layout_fits_in_a_dry_run_too(model, devices, seq, sequences, memory, tmp_path):
    planner = planner_of(model)
    best = search(planner, PlanRequest.of("pipeloom", devices, memory * GIB, sequences, seq)).best
    assert dry_run(planner, best, tmp_path).peak <= memory * GIB


def test_the_closest_layout_is_another_one():
    """Also where the layout itself would fit."""
    planner, layout = planner_of("llama3-8b"), parse("dp=2,pp=4,m=16,zero=0")
    request = PlanRequest(8, planner.device.memory, layout.sequences, layout.seq, ("1f1b",), zero=(0,))
    assert planner.predict(layout).peak < request.memory
    other = closest(planner, request, layout)
    assert other is not None
    assert train_flags(other.layout, layout)
