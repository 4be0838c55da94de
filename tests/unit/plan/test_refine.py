"""Schedules that a search finds for planned layouts: faster, within the memory, on the layout's stages."""

from __future__ import annotations

import json
import tomllib

import pytest

from pipeloom.cli import app
from pipeloom.errors import UsageError
from pipeloom.interop.systems import written
from pipeloom.plan import RUNTIMES, Planner, load_device, load_model, parse_layout
from pipeloom.plan.refine import refine
from pipeloom.schedule.json_form import from_json

TEXT = "pp=2,m=4,dp=2"


@pytest.fixture(scope="module")
def planner():
    return Planner(load_model("llama3-8b").with_layers(4), load_device("h100"), RUNTIMES["pipeloom"])


@pytest.fixture(scope="module")
def plain(planner):
    return planner.predict(parse_layout(TEXT))


@pytest.fixture(scope="module")
def searched(planner, plain):
    return refine(planner, [plain], 80e9, 0.1)[0]


def test_a_searched_schedule_is_faster_and_its_memory_is_its_own(planner, plain, searched):
    assert searched.step.idle < 0.9 * plain.step.idle  # 1F1B's bubble, of which W fills a part
    assert searched.searched is searched.schedule
    assert searched.schedule.placement == plain.schedule.placement
    assert (searched.stages, searched.layout) == (plain.stages, plain.layout)
    assert searched.step.compute == pytest.approx(plain.step.compute)
    assert searched.peak != plain.peak
    assert planner.predict(plain.layout) == plain  # which the search does not replace


def test_slices_are_searched_for_too(planner):
    cut = planner.predict(parse_layout("pp=4,m=4,slices=2"))
    (tight,) = refine(planner, [cut], cut.peak, 0.3)
    (roomy,) = refine(planner, [cut], 80e9, 0.3)
    assert (roomy.schedule.slices, roomy.schedule.microbatches) == (2, 4)
    assert roomy.schedule.splits_backward
    assert roomy.step.idle < 0.9 * cut.step.idle
    assert tight.peak <= cut.peak < roomy.peak


def test_no_more_memory_is_used_than_there_is(planner, plain):
    (tight,) = refine(planner, [plain], plain.peak, 0.1)
    assert tight.peak <= plain.peak


def test_a_layout_without_a_pipeline_stays_and_the_fastest_is_first(planner, plain):
    flat = planner.predict(parse_layout("pp=1,m=4,dp=2"))
    again = refine(planner, [flat, plain], 80e9, 0.1)
    assert flat in again
    assert plain not in again
    assert again[0].tokens >= again[1].tokens


def test_what_autograd_saves_may_be_less_than_what_w_needs(planner):
    """Recomputed stages keep their inputs alone, and what waits for W is far more."""
    full = planner.predict(parse_layout(TEXT + ",recompute=full"))
    sizes = planner.stage_costs(full.layout).bytes_in("device", 2)
    assert sizes["pending"][0] > sizes["saved"][0]
    (tight,) = refine(planner, [full], 1.001 * full.peak, 0.1)
    (roomy,) = refine(planner, [full], 80e9, 0.1)
    assert tight.peak <= 1.001 * full.peak < roomy.peak <= 80e9
    assert roomy.tokens > full.tokens


def test_torchtitan_reads_it_from_a_csv(planner, searched):
    with pytest.raises(UsageError, match="nearest: torch-csv"):
        written(searched, planner, "torchtitan")


def test_the_command_writes_the_schedule_beside_the_configuration(capsys, tmp_path):
    words = ["plan", "--model", "llama3-8b", "--layers", "4", "--layout", TEXT, "--refine", "0.1"]
    app([*words, "--output", str(tmp_path / "run.toml"), "--json"], standalone_mode=False)
    form = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert form["searched"] is True
    section = tomllib.loads((tmp_path / "run.toml").read_text())["schedule"]
    assert section == {"name": str(tmp_path / "run.json"), "microbatches": 4}
    assert from_json((tmp_path / "run.json").read_text()).splits_backward


def test_megatron_runs_no_searched_schedule():
    with pytest.raises(UsageError, match="nearest: --runtime pipeloom"):
        app(
            ["plan", "--model", "llama3-8b", "--devices", "8", "--refine", "1", "--runtime", "megatron"],
            standalone_mode=False,
        )
