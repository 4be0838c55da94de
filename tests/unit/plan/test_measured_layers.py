"""Measured layers in place of a data sheet: what `pipeloom profile` writes, read by `plan`."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pipeloom.cli import app
from pipeloom.config import load
from pipeloom.errors import UsageError
from pipeloom.plan import RUNTIMES, PlannedLayout, Planner, load_device
from pipeloom.plan.measured import read
from pipeloom.schedule import Costs, simulate

SHAPE = load("tiny", {"model.num_hidden_layers": 6}).model.shape()
# F, I, W, B, (R;B) of the embedding, of a block, and of the output layer
KINDS = ("F", "I", "W", "B", "RB")
TIMES = {"E": (1, 2, 3, 4, 5), "t": (10, 12, 8, 19, 29), "L": (5, 4, 3, 6, 11)}
LAYOUT = PlannedLayout(pp=2, m=4, micro_batch=2, seq=16, stages=(4, 4))


def profile(**changes):
    """A profile of micro-batches of 2 sequences of 16 tokens, and of one, which takes three quarters of their time."""
    numbers = {"E": [0], "t": [1, 2, 3, 4, 5, 6], "L": [7]}

    def seconds(name, factor):
        return {kind: {"median": factor * each} for kind, each in zip(KINDS, TIMES[name], strict=True)}

    layers = [
        {"layers": numbers[name], "seconds": seconds(name, 1), "seconds_of_one_sequence": seconds(name, 0.75)}
        for name in TIMES
    ]
    costs = {"p2p": 0.5, "bandwidth": 1e6}
    return {"layers": layers, "microbatch": [2, 16], "costs": costs} | changes


@pytest.fixture
def planner(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(profile()))
    return Planner(SHAPE, load_device("h100"), RUNTIMES["pipeloom"], read(path, SHAPE))


def pipeline(**costs):
    return simulate(LAYOUT.built(), Costs(p2p=0.5, bandwidth=1e6, message=2 * 16 * 32 * 2, **costs)).makespan


def test_a_step_is_simulated_with_the_sums_of_its_stages_layers(planner):
    step = planner.predict(LAYOUT).step
    times = {"forward": (31, 35), "input_grad": (38, 40), "weight_grad": (27, 27)}
    assert step.total == pytest.approx(pipeline(**times, backward=(61, 63)))
    assert step.reduction == step.optimizer == step.host == 0


def test_recomputed_blocks_run_their_forward_again(planner):
    step = planner.predict(replace(LAYOUT, recompute="full")).step
    times = {"forward": (31, 35), "input_grad": (68, 70), "weight_grad": (27, 27)}
    assert step.total == pytest.approx(pipeline(**times, backward=(91, 93)))


def test_a_block_that_recomputes_takes_what_was_measured(planner):
    costs = planner.stage_costs(LAYOUT)
    assert costs.recompute == pytest.approx((31, 35))  # (R;B) less B
    assert costs.backward == pytest.approx((61, 63))


def test_so_does_a_backward_that_is_split(planner):
    layout = replace(LAYOUT, recompute="full", schedule="zb-h1")
    costs = Costs(forward=(31, 35), input_grad=(68, 70), weight_grad=(27, 27), p2p=0.5, bandwidth=1e6, message=2048)
    assert planner.predict(layout).step.total == pytest.approx(simulate(layout.built(), costs).makespan, rel=1e-3)


def test_times_of_other_micro_batches_are_on_the_line_through_both(planner):
    layout = replace(LAYOUT, pp=1, stages=(8,))
    four, two, one = (planner.predict(replace(layout, micro_batch=size)).step.total for size in (4, 2, 1))
    assert two == pytest.approx(4 * (66 + 124))
    assert (four, one) == (pytest.approx(1.5 * two), pytest.approx(0.75 * two))


@pytest.mark.parametrize(
    ("sequences", "one", "two"),
    [
        (1, 1.0, 2.0),  # only one was measured
        (2, 0.3, 2.0),  # two take more than twice as long as one
        (2, 1.5, 1.0),  # two take less than one, which cannot be
    ],
)
def test_no_time_is_below_zero(tmp_path, sequences, one, two):
    form = profile(microbatch=[sequences, 16])
    for layer in form["layers"]:
        layer["seconds"] = {kind: {"median": two * sequences / 2} for kind in KINDS}
        layer["seconds_of_one_sequence"] = {kind: {"median": one} for kind in KINDS}
    (tmp_path / "costs.json").write_text(json.dumps(form))
    fixed, each = read(tmp_path / "costs.json", SHAPE).seconds["t", False]["F"]
    assert fixed >= 0
    assert each >= 0
    assert fixed + sequences * each == pytest.approx(two * sequences / 2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tp": 2}, "the layers were measured whole, and tp=2 cuts them; nearest: tp=1"),
        ({"seq": 32}, "sequences of 16 tokens were measured, not of 32; nearest: --seq 16"),
    ],
)
def test_layouts_that_were_not_measured_are_refused(planner, changes, words):
    with pytest.raises(UsageError, match=words):
        planner.predict(replace(LAYOUT, **changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layers": profile()["layers"][:2]}, "it measures 7 layers, and the model has 8"),
        ({"microbatch": None}, "it is not a profile"),
    ],
)
def test_files_that_are_no_profiles_of_the_model_are_refused(tmp_path, changes, words):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(profile(**changes)))
    with pytest.raises(UsageError, match=words):
        read(path, SHAPE)


def test_the_command_reads_a_profile_and_searches_what_was_measured(tmp_path, capsys):
    (tmp_path / "run.toml").write_text('extends = "tiny"\n[model]\nnum_hidden_layers = 6\n')
    (tmp_path / "costs.json").write_text(json.dumps(profile()))
    words = ["plan", "--model", str(tmp_path / "run.toml"), "--costs", str(tmp_path / "costs.json"), "--seq", "16"]
    app([*words, "--devices", "2", "--global-batch", "8", "--json"], standalone_mode=False)
    layouts = json.loads(capsys.readouterr().out)["layouts"]
    assert layouts
    assert not any(axis in each["layout"] for each in layouts for axis in ("tp=", "cp=", "ep="))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"microbatch": [0, 16]}, "microbatch = 0: it must be a whole number from 1"),
        ({"microbatch": [2]}, "it is not a profile"),
        ({"costs": {"p2p": "x"}}, "p2p is 'x'"),
        ({"costs": {"bandwidth": 0}}, "bandwidth is 0; it must be above 0"),
        ({"costs": []}, "it is not a profile"),
        ({"layers": [{**profile()["layers"][0], "layers": []}, *profile()["layers"][1:]]}, "it measures 7 layers"),
        (
            {"layers": [{**profile()["layers"][0], "seconds": {"F": {"median": 10**400}}}, *profile()["layers"][1:]]},
            "F = 1",
        ),
    ],
)
def test_numbers_of_a_profile_are_finite_and_in_range(tmp_path, changes, words):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(profile(**changes)))
    with pytest.raises(UsageError, match=words):
        read(path, SHAPE)
