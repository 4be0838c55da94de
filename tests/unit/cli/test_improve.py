"""`pipeloom improve`: what other schedules would have saved in a measured step."""

from __future__ import annotations

import dataclasses
import json

import pytest
from typer.testing import CliRunner

import pipeloom as pl
from pipeloom.cli import app
from pipeloom.cli.changes import Alternatives, Change, compare
from pipeloom.config import load_layout, to_toml
from pipeloom.errors import CapacityError, UsageError
from pipeloom.plan.run import predicted
from pipeloom.schedule.costs import activation_limit
from pipeloom.schedule.csv_form import from_csv
from pipeloom.schedule.timeline import Timeline
from pipeloom.traces import timelines as timeline_files
from pipeloom.traces.measured import predict


def improve(*words):
    result = CliRunner().invoke(app, ["improve", *words, "--time-limit", "0.1"])
    if result.exception is not None:
        raise result.exception
    return result.stdout


def trace(folder, schedule, costs):
    """A file with one measured step."""
    step = dataclasses.replace(pl.simulate(schedule, costs), source="measured")
    path = folder / "timelines.json"
    path.write_text(json.dumps(timeline_files.to_dict([step])))
    return str(path)


COSTS = pl.Costs(forward=0.01, input_grad=0.01, weight_grad=0.01)


def test_1f1b_would_have_gained_what_the_split_backward_saves(tmp_path):
    path = trace(tmp_path, pl.schedules.one_f_one_b(ranks=4, microbatches=8), COSTS)
    found = json.loads(improve(path, "--json", "--split", "--csv", str(tmp_path / "better.csv")))
    families = {each["change"]: each for each in found["changes"]}
    now, split = found["now"], pl.simulate(pl.schedules.zb_h1(ranks=4, microbatches=8), COSTS)
    assert now["makespan"] == pytest.approx(0.33)
    assert families["family zb-h1"]["makespan"] == pytest.approx(split.makespan)
    assert families["family zb-h1"]["saved"] == pytest.approx(1 - split.makespan / 0.33)
    assert found["best"]["makespan"] <= split.makespan + 1e-12
    assert found["split"] is None
    assert all(each["peak"] <= now["peak"] for each in found["changes"])
    written = from_csv((tmp_path / "better.csv").read_text())
    assert pl.simulate(written, COSTS).makespan == pytest.approx(found["best"]["makespan"])


def test_its_time_limit_is_that_of_a_search(tmp_path):
    path = trace(tmp_path, pl.schedules.one_f_one_b(ranks=2, microbatches=4), COSTS)
    assert CliRunner().invoke(app, ["improve", path, "--time-limit", "0.001"]).exit_code == 0
    with pytest.raises(UsageError, match=r"time_limit is 0.0; it must be a number above 0"):
        CliRunner().invoke(app, ["improve", path, "--time-limit", "0"], catch_exceptions=False)


def test_more_memory_allows_more(tmp_path):
    path = trace(tmp_path, pl.schedules.one_f_one_b(ranks=4, microbatches=8), COSTS)
    bests = [json.loads(improve(path, "--json", "--split", "--memory", str(limit)))["best"] for limit in (2, 4)]
    assert bests[1]["makespan"] < bests[0]["makespan"] - 1e-9
    assert bests[0]["peak"] <= 2
    assert bests[1]["peak"] <= 4


def test_bytes_limit_a_run_whose_configuration_gives_them(tmp_path):
    """Four blocks on two ranks; what stands there is less than half of a MiB, and activations of a micro-batch some KiB."""
    layout = load_layout("tiny", {"schedule.name": "1f1b", "schedule.microbatches": 8})
    path = trace(tmp_path, layout.schedule, COSTS)
    with pytest.raises(
        UsageError, match=r"--memory is '1MiB', and .* has no bytes, .*; nearest: --memory 2, in stage-"
    ):
        improve(path, "--memory", "1MiB")
    (tmp_path / "config.toml").write_text(to_toml(layout.config))
    sizes = predicted(layout).timeline.costs
    costs, limits = activation_limit(sizes, 2**20, layout.schedule.placement)
    found = json.loads(improve(path, "--memory", "1MiB", "--json"))
    assert found["best"] is None
    found = json.loads(improve(path, "--memory", "1MiB", "--json", "--split"))
    assert found["now"]["peak"] == pytest.approx(max(pl.simulate(layout.schedule, costs).peak_memory))
    assert max(limits) >= min(found["changes"], key=lambda each: each["makespan"])["peak"] >= found["now"]["peak"]
    assert "predicted bytes of activations" in improve(path, "--memory", "1")  # GiB
    with pytest.raises(CapacityError, match="stands for the whole step"):
        improve(path, "--memory", "1KiB")


def test_the_best_schedule_is_left_alone(tmp_path):
    path = trace(tmp_path, pl.schedules.one_f_one_b(ranks=1, microbatches=4), COSTS)
    better = tmp_path / "better.csv"
    assert "nothing worth changing: no schedule within this memory saves 1 %" in improve(path, "--csv", str(better))
    assert not better.exists()
    assert json.loads(improve(path, "--json"))["best"] is None


@pytest.mark.parametrize(("late", "worth"), [(0.0020, False), (0.0060, True)])
def test_a_change_of_less_than_a_percent_is_not_worth_making(tmp_path, late, worth):
    """The first forward could start a little earlier: the other order of two forwards saves so much of 330 ms."""
    step = pl.simulate(pl.schedules.one_f_one_b(ranks=4, microbatches=8), COSTS)
    now = Change("the measured schedule", step.schedule, step.makespan, 4)
    other = Change("another", step.schedule, step.makespan - late, 4)
    found = Alternatives(now, [now, other], None, in_bytes=False)
    assert (found.best is other) == worth
    assert ("change: another" in "\n".join(found.lines(1.0, "s"))) == worth


def test_a_schedule_with_a_name_is_chosen_before_a_searched_one_that_is_as_short():
    schedule = pl.schedules.one_f_one_b(ranks=2, microbatches=4)
    now, named, searched = (
        Change(words, schedule, time, 2) for words, time in zip("abc", (1.0, 0.9, 0.8995), strict=True)
    )
    assert Alternatives(now, [now, named, searched], None, in_bytes=False).best is named
    assert (
        Alternatives(now, [dataclasses.replace(named, makespan=1.2)], None, in_bytes=False).best.makespan == 1.2
    )  # the trace does not fit


def test_backwards_stay_whole_and_both_figures_are_printed(tmp_path):
    """1F1B's backwards are whole: that schedule is the best of such, and the split is an offer with its own figure."""
    path = trace(tmp_path, pl.schedules.one_f_one_b(ranks=4, microbatches=8), COSTS)
    found = json.loads(improve(path, "--json"))
    split = pl.simulate(pl.schedules.zb_h1(ranks=4, microbatches=8), COSTS).makespan
    assert found["best"] is None
    assert found["split"]["makespan"] <= split + 1e-9
    assert not [each for each in found["changes"] if each["change"] == "family zb-h1"]
    text = improve(path)
    assert "nothing worth changing" in text
    assert f"{100 * found['split']['saved']:.1f} % if each takes half of B (--split)" in " ".join(text.split())


def test_no_schedule_splits_what_the_trace_has_whole():
    step = dataclasses.replace(pl.simulate(pl.schedules.build("looped-bfs", 2, 4, 2), COSTS), source="measured")
    found = compare([step], predict([step]), None, 0.1)
    assert [each.words for each in found.changes][-1] == "searched"
    assert not any(each.schedule.splits_backward for each in found.changes)
    assert found.split.schedule.splits_backward
    both = compare([step], predict([step]), None, 0.1, split=True)
    assert both.split is None
    assert any(each.schedule.splits_backward for each in both.changes)


def test_what_is_printed_is_what_is_written(tmp_path):
    uneven = pl.Costs(*[(0.02, 0.01, 0.01, 0.02)] * 3)
    path, better = trace(tmp_path, pl.schedules.build("looped-bfs", 2, 4, 2), uneven), tmp_path / "better.csv"
    text = improve(path, "--csv", str(better))
    saved = 1 - pl.simulate(from_csv(better.read_text()), uneven).makespan / 0.51
    assert f"saves {100 * saved:.1f} % of the step" in text


def test_the_text_says_what_to_change_and_what_is_assumed(tmp_path):
    text = improve(trace(tmp_path, pl.schedules.one_f_one_b(ranks=4, microbatches=8), COSTS), "--split")
    assert "change: " in text
    assert "of the step" in text
    assert "half of B each" in text
    assert max(map(len, text.splitlines())) <= 130


def test_whole_backwards_stay_whole(tmp_path):
    uneven = pl.Costs(*[(0.02, 0.01, 0.01, 0.02)] * 3)
    path = trace(tmp_path, pl.schedules.build("looped-bfs", 2, 4, 2), uneven)
    found = json.loads(improve(path, "--json", "--csv", str(tmp_path / "better.csv")))
    written = from_csv((tmp_path / "better.csv").read_text())
    assert not written.splits_backward
    assert pl.simulate(written, uneven).makespan == pytest.approx(found["best"]["makespan"])
    assert found["now"]["makespan"] == pytest.approx(0.51)
    assert found["best"]["makespan"] == pytest.approx(0.45)


def test_a_split_that_was_measured_may_move(tmp_path):
    path = trace(tmp_path, pl.schedules.zb_h1(ranks=4, microbatches=8), COSTS)
    found = [json.loads(improve(path, "--json", *words))["changes"] for words in ((), ("--split",))]
    assert [each["change"] for each in found[0]] == [each["change"] for each in found[1]]


def test_micro_batches_count_as_alike(tmp_path):
    """What was longer in one step need not be in the next."""
    path = trace(
        tmp_path, pl.schedules.one_f_one_b(ranks=2, microbatches=4), dataclasses.replace(COSTS, microbatch=(1, 1, 1, 9))
    )
    improve(path, "--split", "--csv", str(tmp_path / "better.csv"))
    written = from_csv((tmp_path / "better.csv").read_text())
    assert [action.microbatch for action in written.programs[1] if action.kind == "F"] == [0, 1, 2, 3]


def test_the_hosts_time_before_an_action_is_counted_once_for_each_action(tmp_path):
    """Every action of the trace starts 2 ms after the rank could; I and W will do so twice where B did once."""
    schedule = pl.schedules.one_f_one_b(ranks=2, microbatches=4)
    late = dataclasses.replace(
        COSTS, forward=0.012, input_grad=0.011, weight_grad=0.011
    )  # as long as the actions and the host take
    whole = pl.simulate(schedule, late)
    starts = [[start + 0.002 for start in row] for row in whole.starts]
    step = Timeline.measured(schedule, starts, whole.ends)
    (folder := tmp_path / "timelines.json").write_text(json.dumps(timeline_files.to_dict([step])))
    found = json.loads(improve(str(folder), "--json", "--split"))
    assert found["now"]["makespan"] == pytest.approx(whole.makespan)
    split = pl.simulate(pl.schedules.zb_h1(ranks=2, microbatches=4), pl.Costs(0.012, 0.012, 0.012))
    families = {each["change"]: each for each in found["changes"]}
    assert families["family zb-h1"]["makespan"] == pytest.approx(split.makespan)
