"""Overlapped pairs, which hide the exchange with experts on other ranks, as the planner predicts them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeloom.config import load_layout
from pipeloom.errors import UsageError
from pipeloom.interop.systems import written
from pipeloom.plan import OFFERED, RUNTIMES, PlannedLayout, Planner, PlanRequest, load_device, load_model, search
from pipeloom.plan.run import predicted
from pipeloom.plan.search import LONG, OVERLAPPED, Space, _Estimator, _schedules, estimate, neighbouring
from pipeloom.plan.time import EXCHANGE_SHARE, AxisRates, StageSeconds, with_pairs
from pipeloom.schedule import Costs
from pipeloom.schedule.segments import LayerSegments, PhaseTimes, length, run_block

H100 = load_device("h100")
LAYOUT = PlannedLayout(dp=16, pp=4, ep=16, m=32, seq=4096)  # experts on two nodes
CHUNKS = {"1f1b-overlap": 1, "interleaved-overlap": 2, "dualpipev": 2}


def planner(model="qwen3-30b-a3b", runtime="pipeloom"):
    return Planner(load_model(model), H100, RUNTIMES[runtime])


def with_schedule(name, **changes):
    return replace(LAYOUT, schedule=name, v=CHUNKS.get(name, 2 if name in ("interleaved", "zbv") else 1), **changes)


def test_a_pair_takes_its_computation_slowed_by_the_exchange_or_the_exchange():
    stage = StageSeconds(10.0, 12.0, 6.0, 5.0, 5.0, exchanged=4.0)
    assert stage.hidden(stage) == pytest.approx(8 * (1 - EXCHANGE_SHARE))
    assert replace(stage, exchanged=9.0).hidden(replace(stage, exchanged=9.0)) == 10.0  # 18 s of exchange, 28 of all
    assert replace(stage, exchanged=9.0).hidden(replace(stage, exchanged=9.0), split=True) == 4.0
    dense = replace(stage, exchanged=0.0)
    assert dense.hidden(dense) == 0
    assert dense.hidden(stage) == stage.hidden(dense) == pytest.approx(4 * (1 - EXCHANGE_SHARE))
    chunks = replace(stage, beside_forward=1.0, beside_backward=2.0)  # 5 of 8 s of exchange stand alone
    assert chunks.hidden(chunks) == pytest.approx(5 * (1 - EXCHANGE_SHARE))
    assert chunks.hidden(dense) == pytest.approx(3 * (1 - EXCHANGE_SHARE))


def test_a_pair_is_the_forward_of_one_stage_and_the_backward_of_another():
    a, b = StageSeconds(10.0, 12.0, 6.0, 9.0, 9.0, exchanged=9.0), StageSeconds(1.0, 2.0, 3.0, 0.5, 0.5, exchanged=0.5)
    costs = with_pairs(Costs(), [a, b])
    for at, forward in enumerate((a, b)):
        for other, backward in enumerate((a, b)):
            exchanged = forward.exchanged + backward.exchanged
            computed = forward.forward + backward.input_grad - exchanged
            slowed = EXCHANGE_SHARE * exchanged
            assert costs.pair_split[at][other] == pytest.approx(max(computed + slowed, exchanged))
            computed += backward.weight_grad
            assert costs.pair[at][other] == pytest.approx(max(computed + slowed, exchanged))


def stage(layout, ep_nodes=0, **device):
    """The seconds of a block with experts."""
    of = Planner(load_model("qwen3-30b-a3b"), replace(H100, **device), RUNTIMES["pipeloom"])
    links = AxisRates.of(layout, of.device, of.shape, ep_nodes)
    return of.stage_seconds(of.timed_layers(layout)[1:2], layout, links)


@pytest.mark.parametrize("ep", [8, 16])  # on one node, and on two
def test_chunks_hide_what_their_segments_hide(ep):
    """Without what a launch and an exchange take besides, and with products as fast in parts: F is the segments' F."""
    ideal = {"launch": 0.0, "latency": 0.0, "half_rate_side": 0.0, "bandwidth": 1e30}
    layout = replace(LAYOUT, dp=ep, ep=ep)
    whole = stage(layout, **ideal)
    share = AxisRates.of(layout, H100, load_model("qwen3-30b-a3b")).inside
    assert (share > 0) == (ep > 8)
    talk, gained = whole.exchanged / 2, []
    bare = stage(replace(layout, ep=1), **ideal)
    experts = bare.forward - stage(replace(layout, ep=1), **ideal, grouped_share=1e30).forward
    across, inside = (1 - share) * talk, share * talk
    for chunks in (2, 4):
        cut = stage(replace(layout, ep_chunks=chunks), **ideal)
        layer = LayerSegments(
            PhaseTimes(0, 0, 0), PhaseTimes(experts, 0, 0), across, across, inside=inside, chunks=chunks
        )
        hidden = experts + 2 * talk - length(run_block([layer], ()))
        assert cut.beside_forward == pytest.approx(hidden)
        assert cut.beside_backward == pytest.approx(hidden)  # without times of elementwise work I takes as long as F
        assert cut.exchanged == pytest.approx(whole.exchanged)
        for name in ("forward", "backward"):
            beside = getattr(cut, f"beside_{name}")
            before, after = (getattr(each, "input_grad" if name == "backward" else name) for each in (whole, cut))
            assert before - after == pytest.approx((1 - EXCHANGE_SHARE) * beside)
            sent = (getattr(each, f"sent_{name}") for each in (whole, cut))
            assert beside == pytest.approx(next(sent) - next(sent))
        gained.append(whole.forward - cut.forward)
    assert 0 < gained[0] < gained[1]


def test_each_chunk_has_launches_and_latencies_of_its_own():
    layout = replace(LAYOUT, dp=8, ep=8)
    for slow in ({"launch": 1e-3}, {"latency": 1e-3}):
        two, four = (
            stage(replace(layout, ep_chunks=n), **slow).forward - stage(replace(layout, ep_chunks=n)).forward
            for n in (2, 4)
        )
        assert four > two + 1e-3


def test_recomputed_blocks_repeat_what_their_chunks_hide():
    layout = replace(LAYOUT, ep_chunks=4)
    bare, full = stage(layout), stage(replace(layout, recompute="full"))
    assert full.sent_backward - bare.sent_backward == pytest.approx(bare.sent_forward)
    assert full.input_grad - bare.input_grad == pytest.approx(bare.forward)


def test_a_flat_exchange_between_nodes_takes_longer_than_one_of_two_levels():
    """ep 16 on two nodes: of 15 rows to other ranks 8 leave the node, each through the port of its device."""
    flat, levels = stage(LAYOUT, 1), stage(LAYOUT)
    assert levels == stage(LAYOUT, 2)
    within, port = H100.within(8), H100.port
    rate = AxisRates.of(LAYOUT, H100, load_model("qwen3-30b-a3b"), 1).ep
    assert rate == pytest.approx(15 / max(8 / port, 7 / within))
    wide = AxisRates.of(LAYOUT, replace(H100, network=1e15), load_model("qwen3-30b-a3b"), 1).ep
    assert wide == pytest.approx(15 / (7 / replace(H100, network=1e15).within(8)))
    assert flat.exchanged > 1.5 * levels.exchanged
    assert stage(replace(LAYOUT, dp=8, ep=8), 1) == stage(replace(LAYOUT, dp=8, ep=8))


def test_other_runtimes_have_no_chunks():
    for runtime in ("megatron", "torchtitan"):
        with pytest.raises(UsageError, match=f"ep_chunks=4: {runtime} does not cut .* nearest: ep_chunks=1"):
            planner(runtime=runtime).predict(with_schedule("1f1b", ep_chunks=4))


def test_a_search_for_other_runtimes_names_whole_exchanges_as_the_nearest():
    asked = PlanRequest.of("megatron", 8, H100.memory, 64, 4096, fixed={"ep_chunks": 2})
    with pytest.raises(UsageError, match=r"--fixed ep_chunks=2: there is no such layout .* nearest: ep_chunks=1"):
        search(planner(runtime="megatron"), asked)


def test_without_a_pipeline_pairs_hide_the_exchange_too(tmp_path):
    sizes = {"pp": 1, "tp": 1, "cp": 1, "micro_batch": 1}
    best = search(planner("mixtral-8x7b"), PlanRequest.of("pipeloom", 64, H100.memory, 1024, 4096, fixed=sizes)).best
    assert (best.layout.schedule, best.layout.v) == ("1f1b-overlap", 1)
    other = planner("mixtral-8x7b").predict(replace(best.layout, schedule="1f1b"))
    assert best.tokens > 1.03 * other.tokens
    (tmp_path / "run.toml").write_text(written(best, planner("mixtral-8x7b"), "pipeloom")[0])
    dry = predicted(load_layout(tmp_path / "run.toml"), H100)
    assert dry.step.total == pytest.approx(best.step.total, rel=0.001)
    whole = Space(planner(), PlanRequest.of("pipeloom", 64, H100.memory, 1024, 4096, fixed=sizes | {"ep": 1})).bounds
    assert {cut.schedule for cut in whole} == {"1f1b"}


@pytest.mark.parametrize("experts", [(1,), (0, 1), (0, 0, 0, 1), (0,)])  # of every so many blocks
@pytest.mark.parametrize("link", [0.1, 0.25])
def test_no_step_is_shorter_than_the_bound_of_its_pairs(experts, link):
    """Dense blocks, and the output layer, hide exchanges of the blocks with experts on their stage."""
    shape = replace(load_model("qwen3-30b-a3b"), num_hidden_layers=16, moe_layer_freq=experts * (16 // len(experts)))
    planned = Planner(shape, H100.with_links(link), RUNTIMES["pipeloom"])
    fixed = {"cp": 1, "tp": 1, "micro_batch": 1, "ep": 8, "slices": 1, "vocabulary": "last"}
    space = Space(planned, PlanRequest.of("pipeloom", 16, H100.memory, 256, 4096, fixed=fixed))
    pairs = {cut: seconds for cut, seconds in space.bounds.items() if cut.schedule in OVERLAPPED}
    assert {(cut.schedule, cut.pp) for cut in pairs} == {(name, 2) for name in OVERLAPPED} | {("1f1b-overlap", 1)}
    shares = []
    for cut, seconds in pairs.items():
        step = planned.predict(cut).step.total
        shares.append(seconds / step)
        assert seconds <= space.estimate(cut).seconds <= LONG * step
    assert 0.75 < max(shares) <= 1


@pytest.mark.parametrize("layout", [LAYOUT, replace(LAYOUT, dp=64, pp=1)])
def test_estimates_hide_only_what_chunks_leave_of_an_exchange(layout):
    paired = replace(layout, schedule="1f1b-overlap", ep_chunks=4)
    of = Planner(load_model("qwen3-30b-a3b"), H100.with_links(2), RUNTIMES["pipeloom"])
    assert estimate(of, paired).seconds == pytest.approx(of.predict(paired).step.total, rel=0.005)


def test_the_search_plans_chunks_where_they_are_fixed():
    request = PlanRequest(64, H100.memory, 96, 4096, ("1f1b",), recompute=("none",), fixed={"pp": 4, "ep": 16})
    plain, chunks = (
        search(planner(), replace(request, fixed=request.fixed | more)).best for more in ({}, {"ep_chunks": 4})
    )
    assert chunks.layout.ep_chunks == 4
    assert chunks.step.total < plain.step.total
    estimator = _Estimator(planner())  # which keeps the times of layers
    layouts = [replace(chunks.layout, ep_chunks=count) for count in (1, 4)]
    assert estimator.estimate(layouts[0]).seconds > estimator.estimate(layouts[1]).seconds


@pytest.mark.parametrize("name", CHUNKS)
def test_pairs_hide_the_exchange_and_hold_more_where_more_are_under_way(name):
    plain, paired = (planner().predict(with_schedule(each)) for each in (OVERLAPPED[name], name))
    assert paired.step.compute == pytest.approx(plain.step.compute, rel=0.01)
    assert paired.step.exchange < 0.5 * plain.step.exchange
    held, of_plain = (sum(rank.activations for rank in each.ranks) for each in (paired, plain))
    more = held / of_plain - 1  # a pair frees what it makes
    assert more == pytest.approx(0, abs=1e-3) if name == "interleaved-overlap" else more > 0.01
    assert not any("OVERLAP" in rank.peak_action for rank in paired.ranks)


@pytest.mark.parametrize("name", CHUNKS)
def test_experts_on_their_own_rank_leave_nothing_to_hide(name):
    plain, paired = (planner().predict(with_schedule(each, ep=1)) for each in (OVERLAPPED[name], name))
    parts = [each.step.compute + each.step.exchange for each in (plain, paired)]
    assert parts[1] == pytest.approx(parts[0])


@pytest.mark.parametrize("name", CHUNKS)
def test_an_estimate_of_pairs_is_near_the_prediction(name):
    rough, exact = estimate(planner(), with_schedule(name)), planner().predict(with_schedule(name))
    assert rough.seconds == pytest.approx(exact.step.total, rel=0.05)
    assert rough.memory == pytest.approx(exact.peak, rel=0.1 if name == "dualpipev" else 0.02)


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("name", ["1f1b", *CHUNKS])
def test_a_dry_run_predicts_the_same_step(name, chunks, tmp_path):
    plan = planner().predict(with_schedule(name, m=8, ep_chunks=chunks))
    text = written(plan, planner(), "pipeloom")[0]
    (tmp_path / "run.toml").write_text(text)
    step = predicted(load_layout(tmp_path / "run.toml"), H100).step
    assert (step.compute, step.exchange, step.idle) == pytest.approx(
        (plan.step.compute, plan.step.exchange, plan.step.idle), rel=0.01
    )
    assert "ep_nodes = 2\n" in text
    (tmp_path / "flat.toml").write_text(text.replace("ep_nodes = 2\n", "ep_nodes = 1\n"))
    assert predicted(load_layout(tmp_path / "flat.toml"), H100).step.total > step.total


def test_the_search_pairs_where_experts_are_on_other_ranks():
    request = PlanRequest(64, H100.memory, 96, 4096, OFFERED["pipeloom"], recompute=("none",), fixed={"pp": 4})
    plan = search(planner(), request)
    paired = [each.layout for each in plan.space.every() if each.layout.schedule in OVERLAPPED]
    assert paired
    assert min(layout.ep for layout in paired) > 1
    assert all(layout.m >= 2 * layout.pp for layout in paired if layout.schedule == "dualpipev")
    assert all(layout.m % layout.pp == 0 for layout in paired if layout.schedule == "interleaved-overlap")
    many = search(
        planner(), replace(request, memory=1.2 * H100.memory, sequences=512, fixed={"pp": 4, "ep": 16, "m": 32})
    )
    assert many.best.layout.schedule in OVERLAPPED


def test_neighbours_have_pairs_or_not_and_keep_them_with_more_chunks():
    assert set(_schedules(with_schedule("1f1b"))) == {(1, "1f1b-overlap"), (2, "interleaved")}
    assert set(_schedules(with_schedule("1f1b", ep=1))) == {(2, "interleaved")}
    paired = {(2, "interleaved"), (4, "interleaved-overlap"), (1, "1f1b-overlap")}
    assert set(_schedules(with_schedule("interleaved-overlap"))) == paired
    assert set(_schedules(with_schedule("dualpipev"))) == {(2, "zbv")}
    request = PlanRequest(64, H100.memory, 512, 4096, ("1f1b",))
    best = planner().predict(with_schedule("1f1b"))
    assert {each.layout.schedule for _, each in neighbouring(planner(), best, request)} == {"1f1b"}


def test_megatron_pairs_interleaved_schedules_without_full_recomputation():
    request = PlanRequest(64, H100.memory, 512, 4096, OFFERED["megatron"], fixed={"pp": 4, "ep": 16, "m": 32})
    plan = search(planner(runtime="megatron"), request)
    paired = {each.layout for each in plan.space.every() if each.layout.schedule in OVERLAPPED}
    assert {(layout.schedule, layout.recompute == "full") for layout in paired} == {("interleaved-overlap", False)}
    prediction = planner(runtime="megatron").predict(with_schedule("interleaved-overlap"))
    flags = written(prediction, planner(runtime="megatron"), "megatron")[0].split()
    assert {"--overlap-moe-expert-parallel-comm", "--delay-wgrad-compute", "--moe-token-dispatcher-type"} <= set(flags)
    full = planner(runtime="megatron").predict(with_schedule("interleaved-overlap", recompute="full"))
    with pytest.raises(UsageError, match="does not recompute whole blocks"):
        written(full, planner(), "megatron")


def test_torchtitan_runs_dualpipev():
    plan = planner(runtime="torchtitan").predict(with_schedule("dualpipev"))
    assert "--parallelism.pipeline-parallel-schedule DualPipeV" in written(plan, planner(), "torchtitan")[0]
