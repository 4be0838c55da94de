"""Links of groups over nodes, and sums of gradients and gathers of weights beside the computation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeloom import schedules
from pipeloom.plan import RUNTIMES, PlannedLayout, Planner, load_device, load_model
from pipeloom.plan.time import AxisRates, exposed
from pipeloom.schedule import Costs, simulate

H100 = load_device("h100")
LINK, PORT = 0.45 * 450e9, 0.8 * 50e9


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
    ],
)
def test_a_ring_leaves_a_node_through_the_port_of_each_of_its_devices_there(axes, axis, rate):
    rates = AxisRates.of(PlannedLayout(**axes), H100, load_model("llama3-8b"))
    assert getattr(rates, axis) == pytest.approx(min(LINK, rate))


def hops(device=H100, **axes):
    planned = replace(planner(), device=device)
    costs = planned.stage_costs(PlannedLayout(**axes))
    p, size = axes["pp"], 4096 * planned.row / axes.get("tp", 1) / axes.get("slices", 1)
    return [size / (costs.hop(r, (r + 1) % p, 1 / axes.get("slices", 1)) - 15e-6) for r in range(p)]


def test_a_message_that_leaves_a_node_goes_at_the_networks_rate():
    assert hops(tp=8, pp=2, m=2) == pytest.approx([PORT] * 2)
    assert hops(tp=4, pp=2, m=2) == pytest.approx([LINK] * 2)
    assert hops(tp=2, dp=2, pp=4, m=4) == pytest.approx([LINK, PORT, LINK, PORT])
    assert hops(pp=16, v=2, m=16, schedule="interleaved") == pytest.approx([*[LINK] * 7, PORT] * 2)
    assert hops(dp=3, pp=4, m=4) == pytest.approx(
        [LINK, PORT, PORT, PORT]
    )  # rank 2 has devices 6 to 8, the last hop is 3 to 0
    assert hops(dp=3, tp=2, pp=4, m=4) == pytest.approx([PORT] * 4)
    assert hops(tp=4, pp=4, m=4, slices=2) == pytest.approx([LINK, PORT, LINK, PORT])


def test_devices_without_a_switch_have_one_link_for_each_other_device():
    """A message takes the link between two devices, a ring of n devices the n - 1 links of each."""
    amd = load_device("mi300x")
    assert hops(amd, pp=4, m=4) == pytest.approx([0.8 * 64e9] * 4)
    rates = [AxisRates.of(PlannedLayout(tp=tp), amd, load_model("llama3-8b")).tp for tp in (2, 4, 8)]
    assert rates == pytest.approx([0.8 * 64e9, 3 * 0.8 * 64e9, 0.45 * 448e9])


def test_a_device_has_the_memory_that_its_driver_offers_and_what_all_have_in_common():
    sizes = {"a100": 79.25, "h100": 79.1, "h200": 139.8, "b200": 178.4, "gb200": 184.3, "b300": 267.7, "gb300": 276.5}
    for name, gib in (sizes | {"mi300x": 191.98, "mi355x": 287.98}).items():
        assert load_device(name).memory == pytest.approx(gib * 2**30)
    assert (H100.latency, H100.launch, H100.host, H100.host_link) == pytest.approx((15e-6, 4e-6, 0.02, 50e9))
    assert load_device("a100").host_link == 25e9  # its own, in place of the common one


def test_exchanges_of_tp_and_their_products_run_in_as_many_parts_as_ranks():
    """All but one part of an exchange is hidden, of tp alone; no more than its product takes."""
    assert not any(each.overlaps_exchange for each in RUNTIMES.values())
    beside = replace(planner(), runtime=replace(RUNTIMES["megatron"], overlaps_exchange=True))
    for axes, share in (({"tp": 2}, 1 / 2), ({"cp": 8}, 1.0)):
        layout = PlannedLayout(m=4, seq=8192, **axes)
        steps = [each.predict(layout).step for each in (beside, planner())]
        assert steps[0].exchange == pytest.approx(share * steps[1].exchange, rel=0.02)
        assert steps[0].compute == pytest.approx(steps[1].compute)
    layouts = [PlannedLayout(tp=tp, m=4, seq=8192) for tp in (4, 8)]
    steps = [[each.predict(layout).step for each in (beside, planner())] for layout in layouts]
    shares = [hidden.exchange / waits.exchange for hidden, waits in steps]
    assert 1 / 4 < shares[0] < shares[1] < 1  # products of more ranks are shorter, and their exchanges are not
    assert steps[1][1].exchange - steps[1][0].exchange < steps[1][0].compute


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
