"""The comparison of tensor and pipeline parallelism over nodes."""

from __future__ import annotations

import pytest

from pipeloom.cli import app
from pipeloom.plan import OFFERED, RUNTIMES, Planner, PlanRequest, load_device, load_model, parse_layout
from pipeloom.plan.scaling import scaling

HALF = ", links half as fast"


@pytest.fixture(scope="module")
def lines():
    planner = Planner(load_model("gpt3-175b"), load_device("h100"), RUNTIMES["pipeloom"])
    request = PlanRequest(32, 80e9, 64, 2048, OFFERED["megatron"])
    return {name: dict(points) for name, points in scaling(planner, request).items()}


def test_tensor_parallelism_falls_where_it_leaves_the_node_and_a_pipeline_does_not(lines):
    tp, pp = lines["tp"], lines["pp"]
    assert list(tp) == list(pp) == [1, 2, 4, 8, 16, 32]
    assert 0.8 * tp[8] < tp[16] < 0.95 * tp[8]
    assert tp[32] < tp[16]
    assert pp[16] > 0.8 * pp[8]


def test_both_axes_are_tp_within_a_node_and_pp_beyond(lines):
    both = lines["tp up to 8, then pp"]
    assert all(both[count] == lines["tp"][count] for count in (1, 2, 4, 8))
    assert both[32] > lines["tp"][32]


def test_slower_links_cost_tensor_parallelism_more(lines):
    for count in (2, 8, 16):
        losses = [1 - lines[name + HALF][count] / lines[name][count] for name in ("tp", "pp")]
        assert losses[0] > losses[1] >= 0


def test_a_point_is_the_prediction_of_a_layout():
    planner = Planner(load_model("llama3-8b"), load_device("h100"), RUNTIMES["megatron"])
    points = dict(scaling(planner, PlanRequest(8, 80e9, 16, 4096, ("1f1b",)))["pp"])
    assert points[4] == planner.predict(parse_layout("dp=2,pp=4,m=8,zero=1")).tokens


def test_sizes_that_the_model_does_not_allow_are_left_out():
    planner = Planner(load_model("llama3-8b"), load_device("h100"), RUNTIMES["pipeloom"])
    lines = scaling(planner, PlanRequest(64, 80e9, 64, 4096, ("1f1b",)))
    assert [count for count, _ in lines["tp"]] == [1, 2, 4, 8]  # 8 key and value heads
    assert [count for count, _ in lines["pp"]] == [1, 2, 4, 8, 16, 32]  # 32 blocks


def test_the_command_draws_them(capsys, tmp_path):
    path = tmp_path / "scaling.svg"
    app(
        ["plan", "--model", "llama3-8b", "--devices", "16", "--global-batch", "16", "--svg", str(path)],
        standalone_mode=False,
    )
    text = path.read_text()
    assert "tokens/s of a device" in text
    assert "tp up to 8, then pp" in text
