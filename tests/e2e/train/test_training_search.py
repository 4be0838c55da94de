"""`schedule.name = "search"` in training: measured, given, taken over; same losses as its schedule from the start."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import pipeloom as pl
from checkpoint_runs import BRIEF
from commands import pipeloom
from pipeloom.config import Layout, load_layout
from pipeloom.measure.build import build_pipeline
from pipeloom.schedule.files import load
from pipeloom.traces.measured import costs_of
from pipeloom.train import schedule_search
from pipeloom.train.data.tokenizers import ByteTokenizer
from pipeloom.train.loop import Trainer
from pipeloom.train.schedule_search import (
    FILE,
    MeasureThenSearch,
    SearchOutcome,
    earlier_outcome,
    fingerprint,
    resolve_before_start,
    save_outcome,
    search_for,
    to_plain,
)
from processes import run_ranks
from run_notes import Notes, context

CPU = torch.device("cpu")
TEXT = "".join(f"def f{number}(x):\n    return x + {number}\n" for number in range(400))
COSTS = {"forward": [1, 1, 1, 3], "input_grad": [1, 1, 1, 3], "weight_grad": [1, 1, 1, 2], "p2p": 0.1}
SEARCH = {"schedule.name": "search", "schedule.chunks": 2, "schedule.options.iterations": 100}


def trained(rank: int, folder: Path, overrides: dict[str, Any], world_size: int = 2) -> dict[str, Any]:
    """Losses of a run on this rank, and what became of its schedule."""
    layout = load_layout("tiny", {"log.dir": str(folder), "train.steps": 5, **overrides})
    where = context(rank, world_size)
    root = folder / "run"
    root.mkdir(parents=True, exist_ok=True)
    report: Any = Notes(root) if rank == 0 else None
    layout = resolve_before_start(layout, where, report)
    pipeline = build_pipeline(layout, CPU)
    trainer = Trainer(layout.config, pipeline, where, report)
    started = pipeline.schedule.codes
    if layout.search is not None:
        trainer.measuring = MeasureThenSearch(layout, pipeline, where, report)
    trainer.train(ByteTokenizer().encode(TEXT))
    peak = pipeline.peak_activations
    pipeline.close()
    return {
        "losses": [event["loss"] for event in report.of("step")] if report else [],
        "codes": pipeline.schedule.codes,
        "changed": pipeline.schedule.codes != started,
        "peak": peak,
        "said": report.said if report else [],
        "search": report.of("search") if report else [],
        "trial": report.of("trial") if report else [],
        "traces": len(trainer.log.traces),
        "weights": {name: value.tolist() for name, value in pipeline.named_parameters()},
    }


def measured_then_named(rank: int, folder: Path, barrier: bool) -> list[dict[str, Any]]:
    """A search that measures; then a run with the schedule that it kept, from the first step on; then the same search again."""
    more = {**SEARCH, "schedule.options.memory": 3, "optimizer.barrier": barrier}
    first = trained(rank, folder, more)
    named = trained(rank, folder / "b", {"schedule.name": str(folder / "run" / FILE), "optimizer.barrier": barrier})
    again = trained(rank, folder, more)
    return [first, named, again]


@pytest.mark.parametrize("barrier", [pytest.param(True, marks=pytest.mark.full), False])
def test_a_measured_search_trains_as_its_schedule_does_from_the_start(tmp_path: Path, barrier: bool) -> None:
    everyone = run_ranks(measured_then_named, 2, tmp_path, barrier)
    (first, named, again), (first1, named1, _) = everyone
    assert len(first["losses"]) == 5
    assert first["changed"]
    assert not named["changed"]
    assert first["losses"] == pytest.approx(named["losses"], rel=1e-6)
    for ours, theirs in ((first, named), (first1, named1)):
        assert ours["codes"] == theirs["codes"]
        for name, value in ours["weights"].items():
            torch.testing.assert_close(torch.tensor(value), torch.tensor(theirs["weights"][name]), rtol=1e-5, atol=1e-6)
    assert first["traces"] == 2  # steps 4 and 5: those before were another schedule's
    (event,) = first["search"]
    assert event["objective"] == ("makespan" if barrier else "span")
    assert event["source"] == "measured in steps 2 to 3"
    assert 0 < event["lower_bound"] <= event["value"] + 1e-12 <= event["was"] + 1e-9
    assert len(event["costs"]["forward"]) == 4
    assert event["costs"]["microbatch"] == pytest.approx(
        (1.25, 1.25, 1.25, 0.625, 0.625)
    )  # the rows, whatever was measured
    kept = pl.simulate(load(tmp_path / "run" / FILE), pl.Costs(microbatch=(2, 2, 2, 1, 1)))
    assert (first["peak"], first1["peak"]) == kept.peak_activations
    assert max(kept.peak_memory) <= 3 * 2  # as much as three of the largest micro-batches
    assert all(min(event["costs"][name]) > 0 for name in ("forward", "input_grad", "weight_grad", "backward"))
    line = next(line for line in first["said"] if line.startswith("searched schedule"))
    for words in (
        "ms, was",
        f"with {event['family']}, bound",
        "gap",
        "%",
        "costs measured in steps 2 to 3; searched for",
    ):
        assert words in line
    # the second search found the first one's schedule in the run's folder, and began with it
    assert not again["changed"]
    assert again["codes"] == first["codes"]
    assert str(tmp_path / "run" / FILE) in again["said"][0]
    assert not any(line.startswith("searching") for line in again["said"])
    assert any(line.startswith("searching for a schedule for the measured costs") for line in first["said"])
    assert again["losses"] == pytest.approx(first["losses"], rel=1e-6)


def within_bytes(rank: int, folder: Path) -> list[dict[str, Any]]:
    """A search within bytes; a run with its schedule, and the search again."""
    more = {**SEARCH, "schedule.options.memory": "760KiB", "schedule.options.time_limit": 2.0, "train.steps": 3}
    first = trained(rank, folder, more)
    named = trained(rank, folder / "b", {"schedule.name": str(folder / "run" / FILE), "train.steps": 3})
    return [first, named, trained(rank, folder, more)]


def test_a_search_within_bytes_trains_as_its_schedule_does(tmp_path: Path) -> None:
    (first, named, again), _ = run_ranks(within_bytes, 2, tmp_path)
    assert not first["changed"]  # searched before the first step
    schedule = load(tmp_path / "run" / FILE)
    (event,) = first["search"]
    costs = pl.Costs(**event["costs"])
    assert max(pl.simulate(schedule, costs).peak_bytes["device"]) <= 760 * 2**10
    family = load_layout("tiny", SEARCH).search.family  # type: ignore[union-attr]
    assert max(pl.simulate(family, costs).peak_bytes["device"]) > 760 * 2**10
    assert costs.host_bandwidth < float("inf")
    assert event["value"] == pytest.approx(pl.simulate(schedule, costs).makespan)
    assert event["source"] == "measured in a layer of each kind"
    assert (event["memory"], again["codes"], named["codes"]) == (760 * 2**10, first["codes"], first["codes"])
    said = "\n".join(first["said"])
    assert "of 760 KiB per device (interleaved: " in said
    assert f"of 20 stage-micro-batches {len(schedule._remade)} are recomputed" in said
    layers = iter("EttttL")
    text = "|".join("".join(next(layers) for _ in range(size)) for size in event["stage_layers"])
    assert f"and --parallel.stages '{text}'" in said
    assert first["losses"] == pytest.approx(named["losses"], rel=1e-6)
    assert first["losses"] == pytest.approx(again["losses"], rel=1e-6)


def tried(rank: int, folder: Path, medians: tuple[float, float]) -> list[dict[str, Any]]:
    """A run whose trial shows these times, and the same run again."""
    schedule_search.trial_medians = lambda steps: medians  # of this process only
    more = {**SEARCH, "schedule.options.memory": 3, "train.steps": 9, "schedule.options.trial": 2}
    return [trained(rank, folder, more) for _ in range(2)]


@pytest.mark.parametrize("medians", [(0.1, 0.2), (0.2, 0.1)])
def test_the_faster_of_two_tried_schedules_stays(tmp_path: Path, medians: tuple[float, float]) -> None:
    everyone = run_ranks(tried, 2, tmp_path, medians)
    (first, again), (first1, _) = everyone
    request = load_layout("tiny", {**SEARCH, "schedule.options.memory": 3}).search
    assert request is not None
    family = request.family
    assert first["codes"] == first1["codes"]
    assert (first["codes"] == family.codes) == (medians[0] > medians[1])
    (event,) = first["trial"]
    assert (event["searched"], event["family"]) == medians
    # Three steps were measured, and each schedule had two; of the family the last one before steps 8 and 9 has the same schedule.
    assert first["traces"] == (3 if medians[0] > medians[1] else 2)
    kept = family.name if medians[0] > medians[1] else "the searched one"
    took = f"searched {medians[0] * 1e3:.1f} ms, {family.name} {medians[1] * 1e3:.1f} ms"
    assert f"tried in turn, 2 steps each: {took} (medians); {kept} stays" in first["said"]
    assert again["codes"] == first["codes"]  # taken over, and not tried again
    assert not again["changed"]
    assert not again["trial"]
    assert again["losses"] == pytest.approx(first["losses"], rel=1e-6)


def test_a_trial_leaves_out_first_steps() -> None:
    assert schedule_search.trial_medians([9.0, 18.0, 1.0, 2.0, 3.0, 6.0]) == (2.0, 4.0)
    assert schedule_search.trial_medians([9.0, 18.0]) == (9.0, 18.0)


def given(rank: int, folder: Path) -> list[dict[str, Any]]:
    overrides = {**SEARCH, "schedule.options.costs": COSTS, "schedule.options.reuse": False, "train.steps": 3}
    return [trained(rank, folder / name, overrides) for name in "ab"]


def test_with_costs_given_two_runs_are_equal_bit_by_bit(tmp_path: Path) -> None:
    (one, two), (one1, two1) = run_ranks(given, 2, tmp_path)
    assert one["losses"] == two["losses"]
    assert (one["weights"], one1["weights"]) == (two["weights"], two1["weights"])
    assert one["codes"] == one1["codes"] == two["codes"] == two1["codes"]
    assert not one["changed"]  # known before the first step
    (event,) = one["search"]
    assert event["source"] == "as given"
    assert event["value"] <= event["was"]
    kept = load(tmp_path / "a" / "run" / FILE)
    assert kept.codes == one["codes"]
    assert pl.simulate(kept, pl.Costs(**event["costs"])).makespan == pytest.approx(event["value"])


def request_of(overrides: dict[str, Any]) -> Any:
    return load_layout("tiny", {**SEARCH, **overrides}).search


def test_what_is_found_is_never_worse_than_what_runs_first() -> None:
    costs = pl.Costs(forward=(1, 2, 1, 4), input_grad=(1, 2, 1, 4), weight_grad=(1, 1, 1, 3), p2p=0.1)
    request = request_of({"schedule.options.iterations": 0})
    found = search_for(request, costs, "as given")
    assert found.lower_bound <= found.value <= found.was
    assert found.was == pytest.approx(pl.simulate(request.family, costs).makespan, rel=1e-12)
    assert max(pl.simulate(found.schedule).peak_activations) <= request.memory
    assert found.schedule.placement == request.first.placement


def test_costs_are_the_medians_of_steps() -> None:
    schedule = pl.schedules.zb_h1(ranks=2, microbatches=4)
    steps = [pl.simulate(schedule, pl.Costs(forward=(f, 2.0), weight_grad=(1.0, f), p2p=0.5)) for f in (1.0, 9.0, 2.0)]
    found = costs_of(steps)
    assert found.forward == (2.0, 2.0)
    assert found.weight_grad == (1.0, 2.0)
    assert found.p2p == pytest.approx(0.5)
    alone = pl.simulate(pl.schedules.zb_h1(ranks=1, microbatches=2))
    assert costs_of([alone]).p2p == 0.0


def test_another_configuration_is_searched_anew(tmp_path: Path) -> None:
    """The fingerprint tells what matters from what does not, and a damaged or foreign file is passed over."""

    def config(**overrides: Any) -> Any:
        return load_layout("tiny", {**SEARCH, **{k.replace("__", "."): v for k, v in overrides.items()}}).config

    same = fingerprint(config(), CPU)
    assert (
        fingerprint(config(train__steps=9, train__seed=3, schedule__options__reuse=False, optimizer__lr=1.0), CPU)
        == same
    )
    for other in (
        {"model__hidden_size": 64},
        {"schedule__options__memory": 5},
        {"train__seq_len": 8},
        {"train__dtype": "float64"},
    ):
        assert fingerprint(config(**other), CPU) != same
    layout = load_layout("tiny", {**SEARCH, "log.dir": str(tmp_path)})
    assert _kept(tmp_path, layout, "not JSON {") is None
    assert _kept(tmp_path, layout, json.dumps({"format": "pipeloom.schedule/1"})) is None
    request = layout.search
    saved = to_plain(request, SearchOutcome(request.first, pl.Costs(), request.objective, 2.0, 3.0, 1.0, "measured"))
    saved["searched"]["fingerprint"] = "another"
    assert _kept(tmp_path, layout, json.dumps(saved)) is None
    saved["searched"]["fingerprint"] = same
    found = _kept(tmp_path, layout, json.dumps(saved))
    assert found is not None
    assert found.schedule == layout.search.first
    tight = load_layout("tiny", {**SEARCH, "log.dir": str(tmp_path)})
    small = replace(tight.search, memory=1.0)
    assert earlier_outcome(tight.config, small, CPU) is None


def test_a_schedule_of_uneven_microbatches_is_taken_over(tmp_path: Path) -> None:
    """The memory is that of so many of the largest micro-batches, and holds more of the small ones."""
    layout = load_layout("tiny", {**SEARCH, "log.dir": str(tmp_path)})
    request = replace(layout.search, memory=3.5)
    schedule = pl.schedules.build("interleaved", 2, 5, chunks=2)
    costs = pl.Costs(1.0, 1.0, 0.5, microbatch=(1.5, 0.5, 0.5, 0.5, 1.5))
    assert max(pl.simulate(schedule, costs).peak_memory) <= 3.5 * 1.5
    assert max(pl.simulate(schedule, replace(costs, microbatch=())).peak_memory) > 3.5
    outcome = SearchOutcome(schedule, costs, request.objective, 2.0, 3.0, 1.0, "measured")
    report: Any = Notes(tmp_path / "20260101-000000-search")
    report.folder.root.mkdir()
    save_outcome(report, fingerprint(layout.config, CPU), request, outcome)
    found = earlier_outcome(layout.config, request, CPU)
    assert found is not None
    assert found.schedule.codes == schedule.codes
    assert found.costs == costs
    assert (found.value, found.was, found.lower_bound) == (2.0, 3.0, 1.0)


def _kept(folder: Path, layout: Layout, text: str) -> Any:
    (folder / "20260101-000000-search").mkdir(exist_ok=True)
    (folder / "20260101-000000-search" / FILE).write_text(text)
    return earlier_outcome(layout.config, layout.search, CPU)


def test_the_command(tmp_path: Path) -> None:
    source = tmp_path / "text.py"
    source.write_text(TEXT)
    flags = ["--data.source", str(source), "--log.dir", str(tmp_path / "runs"), "--train.steps", "4"]
    flags += ["--schedule.name", "search", "--schedule.options.iterations", "100", *BRIEF]
    done = pipeloom("train", "tiny", *flags)
    assert done.returncode == 0, done.stderr
    assert "search, starting with 1f1b" in done.stdout
    assert "costs measured in steps 2 to 3;" in done.stdout
    (kept,) = (tmp_path / "runs").glob(f"*/{FILE}")
    assert pipeloom("check", str(kept)).returncode == 0
