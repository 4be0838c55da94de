"""Layouts as text, the search over them, and their forms for other systems."""

from __future__ import annotations

import importlib
import json
import tomllib
from dataclasses import replace
from functools import cache

import pytest

from pipeloom.config import load_layout
from pipeloom.errors import UsageError
from pipeloom.interop.systems import read_job, written
from pipeloom.plan import (
    OFFERED,
    RUNTIMES,
    PlannedLayout,
    Planner,
    PlanRequest,
    load_device,
    load_model,
    parse_layout,
    search,
)
from pipeloom.plan import predict as prediction_module
from pipeloom.plan.export import layers_by_rank, layout_string
from pipeloom.plan.layout import CHUNKS, problems
from pipeloom.plan.predict import shortened
from pipeloom.plan.report import advice, reason, what_if
from pipeloom.plan.run import predicted
from pipeloom.plan.search import (
    CLOSE,
    LONG,
    OFFLOADS,
    OVERLAPPED,
    Estimate,
    LayoutPlan,
    Space,
    _Sums,
    estimate,
    fastest,
    neighbouring,
    too_long,
)
from pipeloom.plan.time import AxisRates
from pipeloom.schedule import Costs, simulate
from pipeloom.schedule.csv_form import from_csv
from pipeloom.schedule.families import FAMILIES, ONE_ROUTE
from pipeloom.shapes.cut import expand, parse_stages
from pipeloom.shapes.hub import from_config
from pipeloom.shapes.ops import Adapters

H100 = load_device("h100")


def planner(model="llama3-8b", runtime="megatron", device=H100):
    return Planner(load_model(model), device, RUNTIMES[runtime])


def request_of(devices, sequences=64, seq=8192, runtime="megatron", **more):
    return PlanRequest(devices, H100.memory, sequences, seq, OFFERED[runtime], **more)


@cache
def flat_plan():
    """A small model on one node."""
    return search(planner(), request_of(8))


@cache
def deep_plan():
    """A model that does not fit without a pipeline or recomputation."""
    return search(planner("llama3-70b"), request_of(32, 32, seq=4096))


def test_a_layout_reads_what_it_writes():
    layout = PlannedLayout(dp=2, tp=4, pp=8, v=2, m=32, recompute="norms+activation", schedule="interleaved", zero=3)
    assert parse_layout(layout.text()) == layout
    assert parse_layout("") == PlannedLayout()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tq=2", "no key 'tq'"),
        ("tp", "tp has no value"),
        ("tp=two", "tp='two' is not a number; nearest: tp=1"),
        ("tp=0", "tp=0 is outside 1 to 1000000; nearest: tp=1"),
        ("zero=4", "zero=4 is outside 0 to 3; nearest: zero=3"),
        ("capacity=nan", "capacity=nan is outside 0 to 1000000; nearest: capacity=0"),
        ("tp=2,tp=4", "tp is given twice, as 2 and 4"),
        ("recompute=norm", "recompute='norm' is not known; did you mean 'norms'"),
        ("recompute=full+norms", "recompute='full+norms' is not known"),
        ("cut=evn", "cut='evn' is not known; did you mean 'even'"),
    ],
)
def test_bad_layouts_name_key_value_and_the_nearest(text, words):
    with pytest.raises(UsageError) as error:
        parse_layout(text)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tp": 3}, "tp=3 does not divide the 32 attention heads; nearest: tp=2"),
        ({"tp": 16}, "tp=16 does not divide the 8 key and value heads; nearest: tp=8"),
        ({"ep": 2, "dp": 2}, "ep=2: the model has no experts; nearest: 1"),
        ({"pp": 8, "v": 5}, "pp=8 times v=5 is more than the 32 blocks; nearest: v=4"),
        ({"pp": 64}, "pp=64 times v=1 is more than the 32 blocks; nearest: pp=32"),
        ({"cp": 3}, "cp=3: twice as many pieces do not divide the 4096 tokens of a sequence; nearest: cp=2"),
        ({"cp": 39, "seq": 4095}, "the 4095 tokens of a sequence; nearest: cp=1"),
        ({"cp": 7, "seq": 2040}, "the 2040 tokens of a sequence; nearest: cp=6"),
        ({"pp": 2, "group": 4}, "group=4: 1f1b takes no groups of micro-batches; nearest: group=0"),
    ],
)
def test_layouts_that_the_model_does_not_allow_say_why(changes, words):
    assert any(words in each for each in problems(load_model("llama3-8b"), PlannedLayout(**changes)))


@pytest.mark.parametrize("family", ["interleaved", "interleaved-zb", "gis"])
def test_families_with_rounds_take_groups(family):
    assert problems(load_model("llama3-8b"), PlannedLayout(pp=4, v=2, m=8, group=4, schedule=family)) == []


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "has no num_hidden_layers$"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0: it must be a whole number from 1"),
        ([], r"a model's configuration is an object, and this is \[\]"),
        (
            {"num_hidden_layers": 2, "hidden_size": 8.5, "num_attention_heads": 1},
            "hidden_size = 8.5: it must be a whole number",
        ),
    ],
)
def test_files_that_are_no_models_are_refused(values, words):
    with pytest.raises(UsageError, match=words):
        from_config(values)


SMALL = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "vocab_size": 100,
    "intermediate_size": 96,
}


QWEN = {
    **{"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4, "head_dim": 8},
    "moe_intermediate_size": 96,
}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, {"num_key_value_heads": 8, "head_width": 8, "gated": True, "num_experts": 0}),
        (QWEN | {"mlp_only_layers": [1]}, {"expert_blocks": (True, False, True, True), "expert_width": 96}),
        (QWEN | {"decoder_sparse_step": 2}, {"expert_blocks": (False, True, False, True)}),
        ({"model_type": "deepseek_v3", "n_routed_experts": 4, "first_k_dense_replace": 3, "n_shared_experts": 2,
          "moe_intermediate_size": 16, "num_experts_per_tok": 2},
         {"expert_blocks": (False, False, False, True), "expert_width": 16, "shared_width": 32}),
        ({"num_experts": 4, "num_experts_per_tok": 3, "moe_layer_freq": [1, 0]},
         {"expert_blocks": (True, False, True, False), "num_experts_per_tok": 3}),
        ({"model_type": "mistral"}, {"reaches": (4096,) * 4, "num_key_value_heads": 8}),
        ({"model_type": "mistral", "sliding_window": None}, {"reaches": (0,) * 4}),
        ({"model_type": "qwen3", "num_key_value_heads": 4, "sliding_window": 64}, {"reaches": (0,) * 4}),  # not used
    ],
)  # fmt: skip
def test_the_words_of_the_families_are_read(values, expected):
    shape = from_config(SMALL | values)
    assert {name: getattr(shape, name) for name in expected} == expected


def test_an_unknown_model_names_the_nearest_preset():
    with pytest.raises(UsageError, match="did you mean 'llama3-8b'"):
        load_model("llama3-8")


def test_megatrons_example_is_printed_by_rank_and_chunk():
    """Its table for DeepSeek-V3: 16 ranks of 2 chunks, and a layer of multi-token prediction."""
    text = "Et*3|(tt|)*29,m|L"
    assert [len(part) for part in expand(text).split("|")] == [4] + [2] * 29 + [1, 1]
    assert parse_stages(text, 61, 32, depths=1) == [4] + [2] * 29 + [1, 1]
    with pytest.raises(UsageError, match=r"holds 1 blocks for multi-token prediction \(m\), but .* is 0"):
        parse_stages(text, 61, 32)
    stages = parse_stages(text, 61, 32, depths=1)
    assert layout_string(stages, 1) == "Ettt|(tt|)*29m|L"
    schedule = PlannedLayout(pp=16, v=2, m=16, schedule="interleaved").built()
    assert layers_by_rank(schedule, stages, 1) == [
        ["rank", "chunk 0", "chunk 1"], ["0", "Ettt", "tt"], ["1-13", "tt", "tt"], ["14", "tt", "m"], ["15", "tt", "L"]
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("stages", "text"),
    [
        ((3, 2, 2, 2), "Ett|(tt|)*2tL"),
        ((7, 6), "Et*6|t*5L"),
        ((2,), "EL"),
        ((1, 5, 5, 4), "E|(t*5|)*2tttL"),
        ((4, 3, 3, 3, 1), "Ettt|(ttt|)*3L"),
    ],
)
def test_layout_strings_stand_for_the_stages(stages, text):
    assert layout_string(stages) == text
    assert [len(part) for part in expand(text).split("|")] == list(stages)


def test_the_search_returns_what_fits_the_fastest_first():
    plan = flat_plan()
    assert plan.predictions
    assert all(each.layout.world == 8 and each.layout.sequences == 64 for each in plan.predictions)
    assert all(each.peak <= H100.memory for each in plan.predictions)
    assert [each.tokens for each in plan.predictions] == sorted((e.tokens for e in plan.predictions), reverse=True)
    peaks = [each.peak for each in plan.pareto]
    assert peaks == sorted(peaks, reverse=True)
    assert plan.pareto[0] == plan.best


def test_fixed_values_are_kept():
    plan = search(planner(), request_of(8, fixed={"tp": 2, "pp": 2, "recompute": "full"}))
    assert {(e.layout.tp, e.layout.pp, e.layout.recompute) for e in plan.predictions} == {(2, 2, "full")}


@pytest.mark.parametrize(
    ("name", "v", "slices"),
    [("1f1b", 1, 1), ("1f1b", 1, 2), ("zb-h1", 1, 1), ("zb-h1", 1, 2), ("interleaved", 2, 1), ("zbv", 2, 1)],
)
def test_estimates_are_near_the_predictions(name, v, slices):
    layout = PlannedLayout(pp=4, tp=2, v=v, m=16, schedule=name, slices=slices, seq=32768)
    rough, exact = estimate(planner(), layout), planner().predict(layout)
    assert rough.seconds == pytest.approx(exact.step.total, rel=0.05)
    least = 0.9 if name == "zbv" else 0.94  # of zbv more than one of the last layer is kept
    assert least * exact.peak < rough.memory < CLOSE * exact.peak  # or what fits would be discarded


@pytest.mark.parametrize(
    "text",
    [
        "dp=2,pp=2,m=32,vocabulary=pp", "pp=4,v=3,m=16,micro_batch=2", "pp=4,m=4,slices=2", "pp=4,m=8,schedule=zb-h1",
        "pp=4,v=2,m=4,schedule=zbv", "dp=4,m=16", "pp=2,v=2,m=4,recompute=full", "dp=4,pp=2,m=64,zero=3",
        "tp=4,pp=2,v=6,m=16,micro_batch=4,seq=8192,recompute=full",
    ],
)  # fmt: skip
def test_no_step_is_shorter_than_its_work_and_a_share_of_its_ramps(text):
    """But for hundredths of a percent; the search leaves out what is slower so."""
    planned = planner(runtime="pipeloom")
    rough, exact = estimate(planned, parse_layout(text)), planned.predict(parse_layout(text)).step.total
    assert 0.5 * rough.seconds < rough.least <= exact
    assert 0.999 * rough.shortest < exact


def test_the_ramps_of_a_v_may_be_much_shorter_than_estimated():
    layout = parse_layout("pp=8,v=2,m=64,schedule=zbv")
    planned = planner("llama3-70b", runtime="pipeloom")
    rough, exact = estimate(planned, layout), planned.predict(layout).step.total
    assert rough.least < rough.shortest < exact < rough.least + 0.75 * (rough.seconds - rough.least)


@pytest.mark.parametrize(
    "text",
    ["pp=4,v=2,m=16,schedule=zbv", "pp=4,v=2,m=6,schedule=zbv", "pp=8,m=16,schedule=zb-h1", "pp=2,m=8,schedule=zb-h1"],
)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_what_waits_for_split_backwards_is_estimated(text, recompute):
    """Of blocks that are recomputed it is more than what they save."""
    planned = planner(runtime="pipeloom")
    layout = parse_layout(f"dp=8,{text},recompute={recompute}")
    assert 0.91 < estimate(planned, layout).memory / planned.predict(layout).peak < CLOSE


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("deepseek-v3", "dp=8,tp=2,pp=8,v=2,m=8"), ("llama3-70b", "dp=8,pp=4,v=3,m=12"),
        ("llama3-8b", "dp=8,tp=4,pp=4,v=3,m=12"), ("qwen3-30b-a3b", "dp=8,pp=2,ep=8,m=2,schedule=1f1b-overlap"),
        ("qwen3-30b-a3b", "dp=8,pp=4,ep=8,m=4,schedule=1f1b-overlap"),
        ("qwen3-30b-a3b", "dp=8,pp=8,ep=8,m=24,schedule=1f1b-overlap"),
    ],
)  # fmt: skip
def test_no_estimate_of_uneven_chunks_or_pairs_is_so_long_that_it_hides_a_layout(model, text):
    planned = planner(model)
    layout = parse_layout(text, PlannedLayout(seq=8192))
    assert 0.9 < estimate(planned, layout).seconds / planned.predict(layout).step.total < too_long(layout)


def test_work_of_pairs_is_without_what_they_hide():
    planned = planner("mixtral-8x7b", runtime="pipeloom")
    layout = parse_layout("dp=8,pp=2,ep=8,m=32,schedule=1f1b-overlap")
    assert (
        0.5 * estimate(planned, layout).seconds < estimate(planned, layout).least < planned.predict(layout).step.total
    )


def test_nothing_fits_a_small_device():
    assert not search(planner("llama3-405b"), request_of(8, 8)).predictions


@pytest.mark.parametrize(
    ("name", "v", "slices"),
    [("1f1b", 1, 1), ("zb-h1", 1, 1), ("zbv", 2, 1), ("interleaved", 2, 1), ("1f1b", 1, 2), ("1f1b-overlap", 1, 1)],
)
def test_long_steps_are_extrapolated_exactly(name, v, slices, monkeypatch):
    layout = PlannedLayout(pp=4, v=v, m=1100, schedule=name, seq=2048, slices=slices)
    quick = planner().predict(layout)
    assert shortened(layout).m < 1100
    monkeypatch.setattr(prediction_module, "SHORT_ROUNDS", 1100)
    whole = planner().predict(layout)
    assert shortened(layout) == layout
    assert quick.step.total == pytest.approx(whole.step.total, rel=1e-4)
    assert quick.step.idle == pytest.approx(whole.step.idle, rel=1e-3)
    assert [rank.total for rank in quick.ranks] == pytest.approx([rank.total for rank in whole.ranks])


@pytest.mark.parametrize(
    ("name", "v", "slices", "recompute"),
    [("1f1b", 1, 1, "full"), ("1f1b", 1, 2, "none"), ("interleaved", 2, 1, "none")],
)
def test_a_few_rounds_with_a_spread_output_layer_are_extrapolated(name, v, slices, recompute, monkeypatch):
    layout = PlannedLayout(
        pp=4, v=v, m=80, schedule=name, slices=slices, recompute=recompute, micro_batch=4, vocabulary="pp"
    )
    planned = planner(runtime="pipeloom")
    quick = planned.predict(layout)
    assert shortened(layout).m == 16 * 4 // slices
    monkeypatch.setattr(prediction_module, "SHORT_ROUNDS", 80)
    assert quick.step.total == pytest.approx(replace(planned).predict(layout).step.total, rel=0.01)


def test_a_rank_that_works_more_than_the_others_holds_a_long_step_up(monkeypatch):
    """Though not yet within the rounds that are simulated."""
    layout = PlannedLayout(tp=2, pp=4, v=4, m=512, micro_batch=2, recompute="full", schedule="interleaved")
    monkeypatch.setattr(prediction_module, "SHORT_STEP", 0)
    quick = planner(runtime="pipeloom").predict(layout)
    monkeypatch.setattr(prediction_module, "SHORT_ROUNDS", 512)
    assert quick.step.total == pytest.approx(planner(runtime="pipeloom").predict(layout).step.total, rel=2e-3)


def test_more_bytes_for_no_shorter_step_are_not_predicted():
    """Two slices of two sequences take as long as whole ones, and need more."""
    asked = PlanRequest.of("pipeloom", 8, 80 * 2**30, 64, 8192, fixed={"pp": 8, "vocabulary": "pp", "v": 1})
    planned = planner("llama3-8b", runtime="pipeloom")
    space = Space(planned, asked)
    whole, cut = (
        planned.predict(parse_layout(f"pp=8,{text},seq=8192,vocabulary=pp"))
        for text in ("m=64,slices=2", "m=32,micro_batch=2,slices=4")
    )
    assert cut.step.total == pytest.approx(whole.step.total, rel=1e-3)
    assert whole.peak < cut.peak < asked.memory
    assert space.estimate(whole.layout).seconds <= space.estimate(cut.layout).seconds
    layouts = [each.layout for each in search(planned, asked).predictions]
    assert whole.layout in layouts
    assert cut.layout not in layouts


def test_bounds_are_below_all_estimates():
    """Seconds, and bytes of the mean rank: what is not looked at has nothing that would be predicted."""
    asked = request_of(16, 32, runtime="pipeloom", zero=(1, 3), slices=(1, 4), vocabulary=("last", "pp"))
    for model, ep in (("llama3-70b", 1), ("mixtral-8x7b", 2)):
        space = Space(planner(model, runtime="pipeloom"), replace(asked, fixed={"tp": 2, "ep": ep, "cp": 1}))
        assert len(space.bounds) > 100
        assert {cut.schedule in OVERLAPPED for cut in space.bounds} == {False, ep > 1}
        for cut, seconds in space.bounds.items():
            each = [estimate for form in asked.forms for estimate in space.of(cut, form)]
            assert seconds <= min(estimate.seconds for estimate in each)
            assert space.least_bytes(cut) <= min(estimate.memory for estimate in each)


def test_what_is_too_slow_or_too_large_is_not_looked_at_further():
    """Nothing that was left out is faster, or fits."""
    asked = ours(64, 4096, fixed={"cp": 1}, slices=(1,), vocabulary=("last",), zero=(1, 3))
    planned = planner(runtime="pipeloom")
    plan = search(planned, asked)
    numbers, whole = plan.looked_at, list(Space(planned, asked).every())
    assert 0 < numbers["too_slow"] < numbers["layouts"]
    assert numbers["predicted"] < numbers["estimated"]
    assert plan.best.step.total <= min(each.seconds for each in whole if each.memory <= asked.memory) * LONG
    tight = search(planned, replace(asked, memory=0.25 * asked.memory)).looked_at
    assert tight["too_large"] > 0


def test_the_smallest_is_named_where_nothing_fits():
    """Though layouts are discarded by their mean rank, with the highest ZeRO level where there are replicas."""
    asked = replace(request_of(8, 64, seq=4096), zero=(1, 2, 3), slices=(1, 4), vocabulary=("last", "pp"))
    planned = planner("llama3-70b", runtime="pipeloom")
    every = sorted(Space(planned, replace(asked, memory=1e15)).every(), key=lambda each: each.memory)[:16]
    smallest = min((planned.predict(each.layout) for each in every), key=lambda each: each.peak)
    found = search(planned, asked).smallest
    assert found is not None
    assert (found.layout, found.peak) == (smallest.layout, smallest.peak)


def test_slower_links_make_exchanges_longer():
    layout = PlannedLayout(tp=8, m=4)
    slow = replace(H100, link=H100.link / 2)
    fast, late = planner().predict(layout), planner(device=slow).predict(layout)
    assert late.step.exchange == pytest.approx(2 * fast.step.exchange, rel=0.05)
    assert late.step.compute == pytest.approx(fast.step.compute)


def test_neighbours_say_why_they_lost():
    asked = request_of(8)
    plan = flat_plan()
    found = [each for _, each in neighbouring(planner(), plan.best, asked)]
    reasons = [reason(each, plan.best, asked.memory) for each in found]
    assert len(found) >= 5
    assert all("does not fit" in words or "slower" in words or "fast" in words for words in reasons)
    assert not [words for words in reasons if "% faster: " in words]
    assert "full" in {each.layout.recompute for each in found}
    fewer = neighbouring(planner(), plan.best, replace(asked, recompute=("none",)))
    assert {each.layout.recompute for _, each in fewer} == {"none", plan.best.layout.recompute}
    fixed = neighbouring(planner(), plan.best, replace(asked, fixed={"tp": plan.best.layout.tp}))
    assert [each.layout for _, each in fixed] == [each.layout for each in found]  # also those that were not asked for


def test_a_reason_names_the_missing_memory():
    best = planner().predict(PlannedLayout(dp=8, m=8, seq=8192, recompute="full"))
    large = planner().predict(PlannedLayout(dp=8, m=2, micro_batch=4, seq=8192))
    missing = f"{(large.peak - H100.memory) / 2**30:.1f} too many ("
    assert missing in (words := reason(large, best, H100.memory))
    assert words.startswith(f"does not fit: {large.peak / 2**30:.1f} GiB, ")
    rough = reason(Estimate(large.layout, large.peak, 2 * best.step.total), best, H100.memory)
    assert missing in rough
    assert rough.endswith("(about 100.0 % slower)")


@pytest.mark.parametrize(
    ("share", "words"), [(1.0004, "as fast"), (0.9998, "as fast"), (1.0006, "0.1 % slower"), (0.998, "0.2 % faster")]
)
def test_a_step_of_the_same_length_is_as_fast(share: float, words: str) -> None:
    best = planner().predict(PlannedLayout(dp=8, m=8, seq=8192, recompute="full"))
    rough = Estimate(best.layout, best.peak, share * best.step.total)
    assert reason(rough, best, H100.memory) == f"about {words}"
    assert reason(rough, best, best.peak / 2).endswith(f" too many (about {words})")
    step = replace(best.step, compute=best.step.compute + (share - 1) * best.step.total)
    said, colon, _ = reason(replace(best, step=step), best, H100.memory).partition(": ")
    assert (said, bool(colon)) == (words, "%" in words)


def test_small_models_need_no_pipeline_and_large_ones_do():
    large = load_device("h200")
    asked = PlanRequest(8, large.memory, 1024, 4096, OFFERED["megatron"])
    assert advice(search(planner(device=large), asked)).startswith("do not pipeline this")
    assert advice(deep_plan()).startswith(("the pipeline pays", "a pipeline is needed"))


def test_what_if_predicts_the_loss():
    asked = request_of(8)
    links, memory = what_if(planner(), replace(asked, fixed={"micro_batch": 1}), flat_plan())
    assert links.startswith("with links half as fast: ")
    assert memory.startswith("with a tenth less memory: ")


def ours(sequences=8, seq=131072, **more):
    """All that our trainer runs, for sequences that fill a device."""
    values = {
        "zero": (1, 2, 3),
        "recompute": ("none", "full"),
        "slices": (1, 2, 4, 8, 16, 32),
        "vocabulary": ("last", "pp"),
    }
    return request_of(8, sequences, seq, "pipeloom", **values | more)


def test_the_output_layer_is_spread_where_it_is_quick_to_place():
    asked = request_of(16, 64, 4096, "pipeloom", vocabulary=("last", "pp"), slices=(1, 4), fixed={"tp": 1})
    spread = [
        each.layout for each in Space(planner(runtime="pipeloom"), asked).every() if each.layout.vocabulary == "pp"
    ]
    assert {layout.schedule for layout in spread} == {"1f1b", "interleaved"}
    assert {layout.pp for layout in spread} == {2, 4, 8}
    assert {layout.v for layout in spread} == {1, 2}
    assert {layout.slices for layout in spread} == {1, 4}


@pytest.mark.parametrize("text", ["pp=4,m=16", "pp=4,m=16,slices=2", "pp=4,v=2,m=16"])
def test_a_spread_output_layer_keeps_a_forward_more(text):
    layout = parse_layout(f"{text},tp=2,seq=8192,vocabulary=pp")
    rough, exact = estimate(planner(runtime="pipeloom"), layout), planner(runtime="pipeloom").predict(layout)
    assert 0.94 * exact.peak < rough.memory < CLOSE * exact.peak
    assert rough.seconds == pytest.approx(exact.step.total, rel=0.02)


def test_a_higher_zero_level_is_estimated_where_it_is_faster():
    """Gathers in every layer hide what short stages, of eight chunks, do not hide of the sum at the step's end."""
    fixed = {"tp": 1, "cp": 1, "pp": 4, "v": 8, "m": 32, "recompute": "none"}
    asked = request_of(128, 1024, 4096, "pipeloom", zero=(1, 2, 3), fixed=fixed)
    found = {each.layout.zero: each for each in Space(planner(runtime="pipeloom"), replace(asked, memory=1e12)).every()}
    assert sorted(found) == [1, 3]
    assert found[3].seconds < found[1].seconds


@pytest.mark.parametrize(
    ("gain", "words"),
    [
        (0.02, "the pipeline pays: 2.0 % faster than the best layout with pp = 1 (dp=8,m=8)"),
        (0.0, "do not pipeline this: the best layout with pp = 1 (dp=8,m=8) is as fast as the best with a pipeline"),
        (
            -0.02,
            "do not pipeline this: the best layout with pp = 1 (dp=8,m=8) is 2.0 % faster than the best with a pipeline",
        ),
    ],
)
def test_whether_a_pipeline_pays(gain, words):
    flat, deep = (planner().predict(parse_layout(text)) for text in ("dp=8,m=8", "dp=4,pp=2,m=16"))
    both = tuple(sorted((flat, replace(deep, tokens=(1 + gain) * flat.tokens)), key=lambda each: -each.tokens))
    assert advice(LayoutPlan(both, flat_plan().space)) == words


@pytest.mark.slow
def test_long_sequences_fit_in_many_slices_and_with_a_spread_output_layer():
    few = ours(fixed={"tp": 1, "cp": 1, "dp": 1, "recompute": "full"}, slices=(1, 2, 4), vocabulary=("last",))
    assert not search(planner(runtime="pipeloom"), few).predictions
    best = search(planner(runtime="pipeloom"), replace(few, slices=ours().slices, vocabulary=("last", "pp"))).best
    assert best.layout.vocabulary == "pp"
    assert best.layout.slices > 4
    assert best.tokens > 1_590
    assert best.peak < 49.5 * 2**30  # of pp=8,m=8,slices=16,recompute=full,vocabulary=pp


@pytest.mark.parametrize("levels", [(3,), (1, 2, 3)])
def test_zero_levels_are_part_of_the_space(levels):
    flat = search(planner(runtime="pipeloom"), ours(1024, 4096, fixed={"pp": 1, "tp": 1}, zero=levels)).best
    assert flat.layout.dp == 8
    assert flat.layout.zero == levels[0]  # where a rank has one stage, higher ones gather and sum all of it
    assert flat.tokens > 7_500


@pytest.mark.slow
def test_less_memory_is_never_faster():
    asked, planned = ours(64, 8192, fixed={"cp": 1}), planner(runtime="pipeloom")
    found = [fastest(planned, replace(asked, memory=share * asked.memory)) for share in (1.0, 0.9, 0.75, 0.6)]
    tokens = [each.tokens if each is not None else 0.0 for each in found]
    assert tokens == sorted(tokens, reverse=True)
    assert all(
        each.peak <= share * asked.memory for each, share in zip(found, (1.0, 0.9, 0.75, 0.6), strict=True) if each
    )
    assert len(set(tokens)) > 1


def test_no_estimate_hides_the_fastest_layout():
    """Of a small space all layouts are predicted: none of those that fit is faster than what the search finds."""
    asked, planned = ours(16, 4096, fixed={"tp": 1, "micro_batch": 1}, slices=(1, 2)), planner(runtime="pipeloom")
    every = [planned.predict(each.layout) for each in Space(planned, asked).every()]
    fitting = [each.step.total for each in every if each.peak <= asked.memory]
    assert len(every) > 60
    assert search(planned, asked).best.step.total <= min(fitting)


def test_what_is_planned_for_megatron_is_in_the_layouts_words():
    """Pasted into `--layout`, which divides blocks evenly; and a dense model has no activation that is recomputed alone."""
    planned, request = planner(), request_of(16, 64, 8192)
    plan = search(planned, request)
    words = plan.best.layout.text()
    again = planned.predict(parse_layout(words, PlannedLayout(seq=request.seq, cut="even")))
    assert (again.step.total, again.peak) == (plan.best.step.total, plan.best.peak)
    assert not [each.layout for each in Space(planned, request).every() if "activation" in each.layout.recompute]


def test_several_chunks_are_interleaved_unless_a_schedule_is_named():
    assert parse_layout("pp=2,v=4").schedule == "interleaved"
    assert parse_layout("pp=2,v=2,schedule=zbv").schedule == "zbv"
    assert parse_layout("pp=2,v=1").schedule == "1f1b"


def exported():
    return planner(runtime="pipeloom").predict(PlannedLayout(dp=2, tp=2, pp=2, m=4, seq=2048))


def test_a_configuration_is_one_that_train_accepts(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(written(exported(), planner(runtime="pipeloom"), "pipeloom")[0])
    layout = load_layout(path)
    assert (layout.mesh.dp, layout.mesh.tp, layout.mesh.pp) == (2, 2, 2)
    assert layout.schedule.microbatches == 4
    assert layout.stage_layers == exported().stages
    assert layout.config.train.global_batch_size == 8
    assert (layout.config.optimizer.lr, layout.config.optimizer.min_lr) == (2.1e-4, 2.1e-5)
    seconds = layout.config.checkpoint.every * exported().step.total
    assert seconds == pytest.approx(1800, abs=exported().step.total)


def test_data_that_a_plan_was_given_are_trained_on(tmp_path):
    path, text = tmp_path / "run.toml", tmp_path / "text.txt"
    text.write_text("loom " * 1000)
    path.write_text(written(exported(), planner(runtime="pipeloom"), "pipeloom", data=str(text))[0])
    assert load_layout(path).config.data.source == (str(text),)


@pytest.mark.parametrize(("changes", "words"), [({"recompute": "norms+activation"}, "recompute=norms.activation")])
def test_what_train_does_not_have_is_refused_by_name(changes, words):
    prediction = planner().predict(PlannedLayout(**{"dp": 2, "seq": 2048, **changes}))
    with pytest.raises(UsageError, match=words):
        written(prediction, planner(), "pipeloom")


def test_flags_name_the_overlap_that_the_plan_counts_on():
    flags = {"--overlap-grad-reduce", "--overlap-param-gather"}
    waits = replace(planner(), runtime=replace(RUNTIMES["megatron"], hides_state=False))
    for text, planned, named in (
        ("dp=2,pp=2,m=4", planner(), flags),
        ("dp=2,pp=2,m=4,zero=0", planner(), {"--overlap-grad-reduce"}),
        ("pp=2,m=4", planner(), set()),
        ("dp=2,pp=2,m=4", waits, set()),
    ):
        words = written(planned.predict(parse_layout(text)), planned, "megatron")[0].split()
        assert flags & set(words) == named, text


def test_other_systems_read_the_same_layout():
    prediction = planner().predict(PlannedLayout(dp=2, tp=2, pp=2, v=2, m=4, schedule="interleaved", recompute="norms"))
    flags = written(prediction, planner(), "megatron")[0]
    assert "--tensor-model-parallel-size 2" in flags
    assert "--recompute-modules layernorm" in flags
    assert f"--pipeline-model-parallel-layout '{layout_string(prediction.stages)}'" in flags
    assert "--global-batch-size 8" in flags
    assert any(note.startswith("recompute=norms: ") for note in written(prediction, planner(), "torchtitan")[1])
    whole = planner().predict(replace(prediction.layout, recompute="full"))
    titan, notes = written(whole, planner(), "torchtitan")
    assert "activation-checkpoint:full" in titan
    assert not any("recompute" in note for note in notes)
    assert "--parallelism.pipeline-parallel-schedule Interleaved1F1B" in titan
    assert "--training.local-batch-size 4" in titan
    assert from_csv(written(prediction, planner(), "torch-csv")[0]).codes == prediction.layout.built().codes
    with pytest.raises(UsageError, match=r"no schedule 'zbv' \(pipeline_parallel/schedules.py\); nearest: interleaved"):
        written(planner().predict(PlannedLayout(pp=2, v=2, m=4, schedule="zbv")), planner(), "megatron")


def test_an_estimate_places_stages_as_the_schedule_does():
    """Under zbv the first rank holds the first and the last stage, so both ends of the model are on it."""
    layout = PlannedLayout(pp=4, v=2, m=16, schedule="zbv", seq=2048)
    links = AxisRates.of(layout, H100, load_model("llama3-8b"))
    sums = _Sums.of(planner(runtime="pipeloom"), layout, links)
    vee, loop = (sums.cut(replace(layout, schedule=name), sums, 1.0) for name in ("zbv", "interleaved"))
    ends = 2 * 128256 * 4096
    assert vee.ranks[0].shared > ends
    assert max(rank.shared for rank in loop.ranks) < vee.ranks[0].shared
    assert vee.ranks[0].shared == max(rank.shared for rank in vee.ranks)


def test_no_neighbour_is_faster():
    asked, planned = request_of(16, 32, 4096), planner("mixtral-8x7b")
    plan = search(planned, asked)
    assert len(plan.predictions) > 1
    reasons = [reason(each, plan.best, asked.memory) for _, each in neighbouring(planned, plan.best, asked)]
    assert not [words for words in reasons if "% faster: " in words]


def test_experts_on_several_nodes_receive_a_token_once_each():
    shape = load_model("deepseek-v3")
    layout, nodes = PlannedLayout(dp=64, ep=64, etp=1, m=1), 8
    across = 4 * (1 - 0.75**8) / 8 * (nodes - 1) / nodes  # routing reaches half of the nodes, 8 experts a token
    seconds = across / (0.8 * H100.network) + 7 / 8 / (0.45 * H100.link)
    assert AxisRates.of(layout, H100, shape).ep == pytest.approx(63 / 64 / seconds)
    assert AxisRates.of(layout, H100, replace(shape, topk_group=shape.n_group)).ep < 0.8 * 63 / 64 / seconds
    assert AxisRates.of(replace(layout, ep=8), H100, shape).ep == 0.45 * H100.link
    assert AxisRates.of(replace(layout, ep=8, tp=2, etp=0), H100, shape).ep < 0.45 * H100.link  # 16 ranks apart


def test_the_nodes_of_experts_are_written_for_the_runtime_that_uses_them():
    base = PlannedLayout(dp=16, ep=16, m=1, seq=2048)
    spread = planner("mixtral-8x22b").predict(replace(base, ep=8, tp=2, etp=0))
    assert spread.ep_nodes == 2
    assert "--moe-enable-deepep" in written(spread, planner("mixtral-8x22b"), "megatron")[0]
    assert tomllib.loads(written(spread, planner("mixtral-8x22b"), "pipeloom")[0])["parallel"]["ep_nodes"] == 2
    inside = planner("mixtral-8x22b").predict(replace(base, ep=8))
    assert inside.ep_nodes == 1
    assert "deepep" not in written(inside, planner("mixtral-8x22b"), "megatron")[0]


def test_a_search_whose_estimates_are_too_high_still_finds_what_fits(monkeypatch):
    """Where no layout that should fit does, those with the least memory are predicted."""
    asked = request_of(32, 32, seq=4096)
    small = min(Space(planner("llama3-70b"), asked).every(), key=lambda each: each.memory).layout
    tight = planner("llama3-70b").predict(small).peak * 1.001
    monkeypatch.setattr(importlib.import_module("pipeloom.plan.search"), "CLOSE", 0.1)
    plan = search(planner("llama3-70b"), replace(asked, memory=tight))
    assert plan.best.layout == small


@pytest.mark.parametrize(("pp", "v", "m", "slices"), [(4, 3, 27, 1), (6, 2, 41, 1), (4, 2, 36, 1), (3, 2, 25, 2)])
@pytest.mark.parametrize("name", CHUNKS)
def test_peaks_are_those_of_the_whole_program(name, pp, v, m, slices):
    """However few or uneven the rounds are; of families that are not here the whole program is built."""
    layout = PlannedLayout(pp=pp, v=min(v, max(CHUNKS[name])), m=m, schedule=name, slices=slices)
    whole, few = layout.built(), shortened(layout).built()
    stages = range(whole.stages)
    sizes = {"saved": tuple(10 + at % 3 for at in stages), "pending": tuple(4 + at % 2 for at in stages)}
    costs = Costs(bytes=sizes | {"backward": 2, "input_grad": 2})
    peaks = [simulate(each, costs).peak_bytes for each in (whole, few)]
    assert peaks[1] == peaks[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_dry_run_of_the_written_file_has_the_same_peaks(name, tmp_path):
    """Those of interleaved's in 6 rounds of 7 micro-batches and fewer."""
    pp, m = (6, 41) if "interleaved" in name else (4, 24)
    v, model = 2 if name in ONE_ROUTE["loop"] + ONE_ROUTE["vee"] else 1, planner(runtime="pipeloom")
    plan = model.predict(PlannedLayout(pp=pp, v=v, m=m, schedule=name, seq=1024))
    (tmp_path / "run.toml").write_text(written(plan, model, "pipeloom")[0])
    dry = predicted(load_layout(tmp_path / "run.toml"), H100)
    assert [rank.total for rank in plan.ranks] == pytest.approx([rank.total for rank in dry.ranks], rel=0.02)


@pytest.mark.parametrize(
    "text", ["recompute=full", "recompute=full,recompute_layers=3", "recompute=full,v=2,recompute_layers=2"]
)
def test_a_dry_run_of_the_written_file_recomputes_the_same_blocks(text, tmp_path):
    model = planner(runtime="pipeloom")
    plan = model.predict(parse_layout(f"pp=4,m=8,{text}", PlannedLayout(seq=1024)))
    (tmp_path / "run.toml").write_text(written(plan, model, "pipeloom")[0])
    dry = predicted(load_layout(tmp_path / "run.toml"), H100)
    assert dry.step.total == pytest.approx(plan.step.total, rel=1e-3)
    assert [rank.total for rank in dry.ranks] == pytest.approx([rank.total for rank in plan.ranks], rel=0.01)
    assert dry.layout.recompute_layers == plan.layout.recompute_layers or plan.layout.recompute_layers == 0


def test_a_last_row_needs_much_less_memory_and_is_the_fastest_that_does():
    plan = search(planner(runtime="pipeloom"), PlanRequest.of("pipeloom", 8, H100.memory, 64, 4096))
    *faster, small = plan.pareto
    limit = 0.75 * min(each.peak for each in faster)
    assert small.peak < limit
    others = [each for each in plan.space.known.values() if each.memory < limit and each.layout.vocabulary == "last"]
    assert len(others) > 1
    assert plan.space.known[small.layout].seconds == min(each.seconds for each in others if plan.space.is_offered(each))


@pytest.mark.parametrize("runtime", ["pipeloom", "megatron"])
def test_no_more_blocks_are_recomputed_than_memory_asks_for(runtime):
    asked = replace(PlanRequest.of(runtime, 2, H100.memory, 64, 4096), recompute=("none", "full"), offload=())
    planned = planner(runtime=runtime)
    best = search(planned, asked).best
    assert best.layout.recompute == "full"
    assert best.layout.recompute_layers > 1
    fewer = planned.predict(replace(best.layout, recompute_layers=best.layout.recompute_layers - 1))
    every = planned.predict(replace(best.layout, recompute_layers=0))
    assert fewer.peak > asked.memory >= best.peak
    assert best.tokens > 1.01 * every.tokens
    assert fastest(planned, asked).layout == best.layout
    assert search(planned, replace(asked, partial=False)).best.layout.recompute_layers == 0
    assert not PlanRequest.of("torchtitan", 2, H100.memory, 64, 4096).partial


def test_fewer_blocks_are_recomputed_than_estimates_ask_for():
    """Estimates of bytes are too high by a few percent: one block more would be recomputed, and look too slow."""
    shape = replace(load_model("llama3-8b"), num_hidden_layers=16)
    planned = Planner(shape, H100.with_links(0.1), RUNTIMES["pipeloom"])
    fixed = {"cp": 1, "tp": 1, "micro_batch": 1, "slices": 1, "vocabulary": "last"}
    best = fastest(planned, PlanRequest.of("pipeloom", 8, 29.5 * 2**30, 64, 4096, fixed=fixed))
    fewest = planned.predict(parse_layout("dp=2,pp=4,m=32,zero=1,recompute=full,recompute_layers=1"))
    assert fewest.peak < 29.5 * 2**30 < estimate(planned, fewest.layout).memory
    assert best.step.total <= fewest.step.total


def test_fewer_blocks_are_recomputed_where_estimates_of_bytes_are_too_low():
    """By 30 %: one block more would be recomputed than the bytes of the prediction ask for."""
    fixed = {"cp": 2, "tp": 2, "pp": 2, "slices": 4, "vocabulary": "last", "schedule": "1f1b"}
    planned, memory = planner(runtime="pipeloom"), 106 * 2**30
    best = fastest(planned, PlanRequest.of("pipeloom", 8, memory, 8, 131072, fixed=fixed))
    fewer = replace(best.layout, recompute_layers=best.layout.recompute_layers - 1)
    assert best.peak <= memory < planned.predict(fewer).peak


@pytest.mark.parametrize(("gib", "blocks"), [(50, 2), (65, 0)])
def test_no_other_number_of_chunks_is_faster(gib, blocks):
    """Though estimates of uneven chunks are too long, and blocks of unlike stages save unlike bytes."""
    asked, planned = PlanRequest.of("megatron", 4, gib * 2**30, 8, 4096, fixed={"tp": 1}), planner(runtime="megatron")
    best = fastest(planned, asked)
    for chunks in (1, 2, 3, 4, 8):
        other = fastest(planned, replace(asked, fixed={"tp": 1, "v": chunks}))
        assert other is None or other.step.total >= best.step.total
    assert best.layout.recompute_layers == blocks  # of 3 in the largest chunks


def copied():
    """A question in which Megatron's copies to host memory are faster than recomputation."""
    return PlanRequest.of(
        "megatron", 16, 0.9 * H100.memory, 32, 4096, fixed={"tp": 1, "pp": 2, "v": 8, "micro_batch": 1}
    )


def test_no_other_set_of_copied_modules_is_faster():
    asked, planned = copied(), planner("mixtral-8x7b")
    best = fastest(planned, asked)
    assert best.layout.offload != "none"
    others = [planned.predict(replace(best.layout, offload=modules)) for modules in ("none", *OFFLOADS)]
    assert best.step.total <= min(each.step.total for each in others if each.peak <= asked.memory)
    assert min(each.peak for each in others) <= asked.memory < max(each.peak for each in others)
    without = fastest(planned, replace(asked, offload=()))
    assert without.layout.recompute != "none"
    assert best.tokens > 1.05 * without.tokens


def test_what_is_copied_can_be_fixed_and_only_megatron_copies_it():
    asked, planned = copied(), planner("mixtral-8x7b")
    for modules in ("none", OFFLOADS[-1]):
        fixed = PlanRequest.of("megatron", 16, H100.memory, 32, 4096, fixed={**asked.fixed, "offload": modules})
        assert {each.layout.offload for each in search(planned, fixed).predictions} == {modules}
    assert not PlanRequest.of("pipeloom", 16, H100.memory, 32, 4096).offload
    prediction = planned.predict(parse_layout("pp=2,m=4,offload=core_attn"))
    assert "--offload-modules core_attn" in written(prediction, planned, "megatron")[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tp=2,pp=2,m=4,etp=1", "etp=1 is not there; nearest: etp=2"),
        ("pp=2,m=4,grads=bf16", "grads=bf16 is not there; nearest: grads=fp32"),
        ("pp=2,v=2,m=8,group=4", "group=4 is not there; nearest: group=0"),
        ("pp=2,m=4,offload=core_attn", "offload=core_attn is not there; nearest: offload=none"),
    ],
)
def test_what_our_trainer_does_not_have_is_not_written_as_something_else(text, words):
    planned = planner("mixtral-8x7b")
    with pytest.raises(UsageError, match=words):
        written(planned.predict(parse_layout(text)), planned, "pipeloom")


@pytest.mark.parametrize("text", ["pp=2,m=8,zero=0", "pp=2,m=8,dp=2,zero=2"])
def test_a_plan_for_torchtitan_loses_nothing_in_its_words(text):
    planned = Planner(load_model("llama3-8b"), H100, RUNTIMES["torchtitan"])
    prediction = planned.predict(parse_layout(text, PlannedLayout(cut="even")))
    _, losses = written(prediction, planned, "torchtitan")
    assert losses == []


@pytest.mark.parametrize(("ep", "divided"), [(8, 1), (1, 0)])
def test_a_plan_for_torchtitan_has_its_ranks_of_an_expert(ep, divided, tmp_path):
    """Spread experts are whole, since it divides none by default; those of one group are divided over tp."""
    planned = Planner(load_model("mixtral-8x7b"), H100, RUNTIMES["torchtitan"])
    best = fastest(planned, PlanRequest.of("torchtitan", 16, 4 * H100.memory, 64, 4096, fixed={"tp": 2, "ep": ep}))
    (tmp_path / "job.sh").write_text(written(best, planned, "torchtitan")[0])
    job = read_job(str(tmp_path / "job.sh"))
    assert job.layout.etp == divided
    assert planned.predict(replace(job.layout, ep=ep)).peak == pytest.approx(best.peak)
    for change, costs in neighbouring(planned, best, PlanRequest.of("torchtitan", 16, H100.memory, 64, 4096)):
        assert costs.layout.etp == (costs.layout.ep > 1), change


@pytest.mark.parametrize("gib", [24, 28])
def test_a_higher_zero_level_recomputes_fewer_blocks(gib):
    """Though the lower one leaves room where all are recomputed, and the search has looked at no higher one there."""
    fixed = {"tp": 2, "pp": 2, "cp": 1, "v": 4, "slices": 1, "vocabulary": "last", "micro_batch": 1}
    fixed |= {"schedule": "interleaved"}
    asked, planned = PlanRequest.of("pipeloom", 16, gib * 2**30, 64, 4096, fixed=fixed), planner(runtime="pipeloom")
    bare = PlannedLayout(dp=4, tp=2, pp=2, v=4, m=16, schedule="interleaved")
    some = [
        replace(bare, zero=zero, recompute="full", recompute_layers=count) for zero in (1, 2, 3) for count in range(5)
    ]
    every = [planned.predict(each) for each in (bare, replace(bare, zero=2), replace(bare, zero=3), *some)]
    best = max((each for each in every if each.peak <= asked.memory), key=lambda each: each.tokens)
    assert best.layout.zero > 1
    assert best.layout.recompute_layers > 0
    assert fastest(planned, asked).layout == best.layout


def test_a_block_is_recomputed_where_none_fits_by_its_estimate_alone():
    fixed = {"tp": 1, "pp": 2, "cp": 1, "v": 1, "slices": 1, "vocabulary": "pp", "micro_batch": 1, "schedule": "1f1b"}
    planned = planner(runtime="pipeloom")
    bare = planned.predict(parse_layout("dp=2,pp=2,m=32,vocabulary=pp"))
    memory = (estimate(planned, bare.layout).memory + bare.peak) / 2
    assert memory < bare.peak
    asked = replace(PlanRequest.of("pipeloom", 4, memory, 64, 4096, fixed=fixed), zero=(1,))
    best = fastest(planned, asked)
    assert best.layout.recompute_layers == 1


def test_nothing_is_recomputed_in_part_where_that_saves_no_bytes():
    """A stage of one block, whose recomputation needs as much as it frees."""
    asked = replace(PlanRequest.of("pipeloom", 32, 70 * 2**30, 32, 4096), slices=(1,), vocabulary=("last",))
    found = search(planner(runtime="pipeloom"), replace(asked, fixed={"pp": 32, "micro_batch": 4}))
    assert all(each.layout.recompute_layers >= 0 for each in found.predictions)


def test_slower_links_are_asked_of_the_best_layout_too_where_it_recomputes_some_blocks():
    asked = PlanRequest.of("pipeloom", 2, H100.memory, 64, 4096)
    planned = planner(runtime="pipeloom")
    plan = search(planned, asked)
    slower = replace(planned, device=H100.with_links(0.5))
    found = fastest(slower, asked, plan)
    assert found is not None
    assert plan.best.layout.recompute_layers > 0
    assert found.tokens >= slower.predict(plan.best.layout).tokens


@pytest.mark.parametrize(
    ("text", "counts"), [("pp=2,m=16", (2, 6)), ("pp=2,v=2,m=16", (2, 6)), ("pp=4,v=5,m=16", (1,))]
)
def test_estimates_of_some_recomputed_blocks_are_near_the_predictions(text, counts):
    """Of stages of unlike numbers of blocks too."""
    planned = planner(runtime="pipeloom")
    for count in counts:
        layout = parse_layout(f"{text},recompute=full,recompute_layers={count}")
        rough, exact = estimate(planned, layout), planned.predict(layout)
        assert rough.seconds == pytest.approx(exact.step.total, rel=0.025)
        assert 0.97 * exact.peak < rough.memory < CLOSE * exact.peak


def test_a_pipeline_is_compared_with_replicas_that_recompute_some_blocks_too():
    """Though the best of those is slower by more than estimates are too long."""
    asked = PlanRequest.of("pipeloom", 2, H100.memory, 64, 4096)
    found = search(planner(runtime="pipeloom"), asked)
    flat = next(each for each in found.predictions if each.layout.pp == 1)
    assert found.best.layout.pp > 1
    assert found.best.tokens > 1.01 * flat.tokens
    assert flat.layout.recompute_layers > 0


def test_with_slower_links_layouts_are_estimated_anew():
    """The search that was is only a place to begin."""
    asked = PlanRequest.of("megatron", 16, H100.memory, 64, 4096, fixed={"micro_batch": 1, "cp": 1, "ep": 8, "pp": 2})
    planned = planner("mixtral-8x7b")
    plan, slower = search(planned, asked), replace(planned, device=H100.with_links(0.5))
    anew = fastest(slower, asked)
    assert anew.layout != plan.best.layout
    assert fastest(slower, asked, plan).layout == anew.layout


def test_frozen_layers_exchange_their_keys_and_values_too():
    adapters = Adapters(8, r"model\.layers\.(2\d|3\d)\..*")
    layout, times = PlannedLayout(cp=2, m=2), []
    for each in (None, adapters):
        planned = Planner(load_model("llama3-8b"), H100, replace(RUNTIMES["pipeloom"], adapters=each))
        times.append(planned.layer_seconds(planned.layers(layout), layout, AxisRates.of(layout, H100, planned.shape)))
    assert times[1][1].sent_forward == times[0][1].sent_forward > 0
    assert times[1][1].sent_backward == 0.0  # a frozen layer before the first adapter has no backward


TARGETS = {"all": "all-linear", "two": ("q_proj", "v_proj"), "the last half": r"model\.layers\.[23]\..*"}


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("text", ["pp=2,m=8", "pp=2,m=8,schedule=zbv,v=2", "tp=2,dp=2,m=4", "dp=2,m=4,recompute=full"])
def test_a_dry_run_of_adapters_has_the_same_peaks_and_step(text, targets, tmp_path):
    values = {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 300, "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    adapters = Adapters(8, TARGETS[targets])
    model = Planner(from_config(values), H100, replace(RUNTIMES["pipeloom"], adapters=adapters))
    plan = model.predict(parse_layout(text, PlannedLayout(seq=1024)))
    (tmp_path / "run.toml").write_text(written(plan, model, "pipeloom", {"weights": str(tmp_path)})[0])
    dry = predicted(load_layout(tmp_path / "run.toml"), H100)
    ranks = [[rank.total - rank.overhead - rank.buffers for rank in each.ranks] for each in (plan, dry)]
    assert ranks[0] == pytest.approx(ranks[1], rel=0.02)
    assert dry.step.total == pytest.approx(plan.step.total, rel=0.02)
    for part in ("optimizer", "reduction"):
        assert getattr(dry.step, part) == pytest.approx(getattr(plan.step, part), rel=0.02), part
