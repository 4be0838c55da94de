"""Links of groups over nodes, and sums of gradients and gathers of weights beside the computation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeloom import schedules
from pipeloom.plan import RUNTIMES, PlannedLayout, Planner, load_device, load_model
from pipeloom.plan.time import LINK_SHARE, NETWORK_SHARE, AxisRates, exposed
from pipeloom.schedule import Costs, simulate

H100 = load_device("h100")
LINK, PORT = LINK_SHARE * H100.link, NETWORK_SHARE * H100.network


def planner(runtime="megatron"):
    return Planner(load_model("llama3-8b"), H100, RUNTIMES[runtime])


@pytest.mark.parametrize(
    ("axes", "axis", "rate"),
    [
        ({"tp": 8}, "tp", LINK),
        ({"tp": 16}, "tp", LINK),  # eight ports are faster than the links of a node
        ({"tp": 2, "dp": 8}, "dp", 4 * PORT),
        ({"tp": 8, "dp": 8}, "dp", PORT),
        ({"dp": 48}, "dp", LINK),
        ({"tp": 2, "cp": 2, "dp": 8}, "dp", 4 * PORT),  # the ranks of cp sum gradients too
        ({"tp": 4, "cp": 4}, "cp", 2 * PORT),
        ({"tp": 8, "pp": 2}, "pp", PORT),
        ({"tp": 4, "pp": 2}, "pp", LINK),
    ],
)
def test_a_ring_leaves_a_node_through_the_port_of_each_of_its_devices_there(axes, axis, rate):
    rates = AxisRates.of(PlannedLayout(**axes), H100, load_model("llama3-8b"))
    assert getattr(rates, axis) == pytest.approx(min(LINK, rate))


def timeline(ranks, microbatches):
    return simulate(schedules.build("1f1b", ranks, microbatches), Costs(1, 1, 1))


@pytest.mark.parametrize(
    ("sums", "gathers", "layers", "seconds"),
    [
        (5.0, 0.0, 1, 5.0),  # the whole stage's gradients are there at its end
        (5.0, 0.0, 4, 3.5),  # from the last layer's backward on, 1.5 before the end
        (1.0, 0.0, 4, 0.25),  # the first layer's sum alone
        (0.0, 3.0, 4, 2.25),  # the last layer may begin after 0.75
        (0.0, 0.4, 4, 0.1),
    ],
)
def test_what_the_last_backward_and_the_first_forward_hide(sums, gathers, layers, seconds):
    for microbatches in (1, 4):
        assert exposed(timeline(1, microbatches), [(sums, gathers, layers)]) == pytest.approx(seconds)


def test_the_waits_at_the_ends_of_a_pipeline_hide_more():
    """Rank 1 of 2 has its last backward 2 before the end, and its first forward 1 after the beginning."""
    assert exposed(timeline(2, 4), [(0.0, 0.0, 1), (2.0, 1.0, 1)]) == 0.0
    assert exposed(timeline(2, 4), [(0.0, 0.0, 1), (2.5, 1.25, 1)]) == pytest.approx(0.75)
    assert exposed(timeline(2, 4), [(2.0, 1.0, 1), (0.0, 0.0, 1)]) == pytest.approx(3.0)


def test_the_exposed_share_moves_with_the_micro_batches_replicas_and_tp():
    def reduction(**axes):
        return planner().predict(PlannedLayout(**{"dp": 16, "tp": 8, "m": 1} | axes)).step.reduction

    base = reduction()
    assert reduction(m=8) == pytest.approx(base)  # the first and the last one alone hide
    assert reduction(micro_batch=4) < 0.6 * base  # longer ones hide more
    assert reduction(dp=32) > base
    assert reduction(tp=1) < 0.5 * base  # eight ports, and layers that take eight times as long
    whole = replace(planner(), runtime=replace(RUNTIMES["megatron"], hides_state=False))
    assert whole.predict(PlannedLayout(dp=16, tp=8, m=1)).step.reduction > base
