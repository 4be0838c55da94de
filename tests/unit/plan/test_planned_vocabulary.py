"""The output layer spread over the pipeline, as a dry run and the planner predict it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeloom.config import load_layout
from pipeloom.errors import UsageError
from pipeloom.interop.systems import written
from pipeloom.plan import RUNTIMES, Planner, PlanRequest, load_device, load_model, parse_layout, search
from pipeloom.plan.export import layers_by_rank
from pipeloom.plan.layout import problems
from pipeloom.plan.measured import MeasuredLayers
from pipeloom.plan.run import predicted
from pipeloom.plan.search import estimate

KEYS = {
    "parallel.pp": 2,
    "schedule.name": "1f1b",
    "schedule.microbatches": 4,
    "train.global_batch_size": 4,
    "train.seq_len": 64,
    "train.device": "cpu",
    "model.vocab_size": 4096,
    "model.tie_word_embeddings": False,
    "model.hidden_size": 64,
}


def run(**keys):
    return predicted(load_layout("tiny", KEYS | {key.replace("__", "."): value for key, value in keys.items()}))


@pytest.fixture(scope="module")
def spread():
    return run(parallel__vocabulary="pp")


def test_every_rank_has_its_share_of_the_weight(spread):
    whole = run()
    assert sum(each.parameters for each in spread.ranks) == sum(each.parameters for each in whole.ranks)
    sizes = spread.timeline.costs.bytes_in("device", 4)
    assert sizes["params"][2:] == (2 * 4096 // 2 * 64 * 4,) * 2  # of the embedding and of the output layer
    assert sizes["optimizer"][2:] == (2 * 4096 // 2 * 64 * 8,) * 2
    tied = run(parallel__vocabulary="pp", model__tie_word_embeddings=True).timeline.costs
    assert tied.bytes_in("device", 4)["params"][2:] == (4096 // 2 * 64 * 4,) * 2


def test_a_share_keeps_a_copy_its_logits_and_their_exponentials(spread):
    sizes = spread.timeline.costs.bytes_in("device", 4)
    assert sizes["hidden"] == (0, 0, 64 * 64 * 4, 64 * 64 * 4)
    assert sizes["scores"] == (0, 0, *[64 * 2048 * (4 + 4)] * 2)


def test_a_frozen_share_keeps_the_same(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 64, "vocab_size": 512, "num_attention_heads": 4, '
        '"intermediate_size": 128}'
    )
    keys = {key: value for key, value in KEYS.items() if not key.startswith("model.")}
    keys |= {"model.source": str(tmp_path), "parallel.vocabulary": "pp", "data.tokenizer": "bytes"}
    whole, adapters = (
        predicted(load_layout("tiny", keys | {"lora.r": rank})).timeline.costs.bytes_in("device", 4) for rank in (0, 4)
    )
    assert adapters["hidden"] == whole["hidden"]
    assert adapters["scores"] == whole["scores"]


def test_s_has_the_forward_and_with_one_reduction_the_input_gradient(spread):
    fused, two = (
        spread.timeline.costs,
        run(parallel__vocabulary="pp", schedule__transforms=["vocabulary=two"]).timeline.costs,
    )
    product = 2 * 64 * 2048 * 64 / (64 / (64 + 192))  # operations at the rate of 64 rows
    assert (fused.scores, fused.scores_grad) == (pytest.approx(2 * product), pytest.approx(product))
    assert (two.scores, two.scores_grad) == (pytest.approx(product), pytest.approx(2 * product))


def test_the_last_stage_keeps_its_norm_alone(spread):
    whole = run()
    times = [each.timeline.costs.forward[1] for each in (whole, spread)]
    assert times[1] < times[0]
    layers = spread.timeline.schedule
    assert spread.layout.stages == load_layout("tiny", KEYS | {"parallel.vocabulary": "pp"}).stage_layers
    assert len(layers.vocabulary) == 2


def test_t_has_the_weights_gradient_beside_its_sum(spread):
    """Both ranks are at their peaks in a T."""
    there = [rank.temporaries + rank.gradients for rank in spread.ranks]
    share = 4096 // 2 * 64 * 4
    assert max(there) >= share


def test_of_a_profile_a_share_takes_its_part():
    times = {kind: (0.1, 0.4) for kind in ("F", "I", "W", "B", "RB")}
    layers = MeasuredLayers(dict.fromkeys((("E", False), ("t", False), ("L", False)), times), 64, 0.0, 1e9)
    costs = predicted(load_layout("tiny", KEYS | {"parallel.vocabulary": "pp"}), measured_layers=layers).timeline.costs
    assert (costs.scores, costs.scores_grad) == (pytest.approx(2 * (0.1 + 0.4 / 2)), pytest.approx(0.1 + 0.4 / 2))
    whole = predicted(load_layout("tiny", KEYS), measured_layers=layers).timeline.costs
    layers_of_last = tuple(
        load_layout("tiny", KEYS | each).stage_layers[-1] for each in ({}, {"parallel.vocabulary": "pp"})
    )
    assert whole.forward[1] == pytest.approx(0.5 * layers_of_last[0])
    assert costs.forward[1] == pytest.approx(0.5 * (layers_of_last[1] - 1))  # the norm takes none


@pytest.fixture(scope="module")
def planner():
    """Of a model whose output layer costs about nine of its eight blocks."""
    shape = load_model("llama3-8b").with_layers(8)
    shape = replace(shape, hidden_size=1024, intermediate_size=2048, num_attention_heads=8, vocab_size=64_000)
    return Planner(replace(shape, num_key_value_heads=8), load_device("h100"), RUNTIMES["pipeloom"])


@pytest.mark.parametrize(
    "text", ["pp=4,m=8", "pp=4,m=8,schedule=zb-h1", "pp=2,v=2,m=4,schedule=zbv", "pp=4,tp=2,m=6", "pp=4,m=6,slices=2"]
)
def test_the_planner_predicts_what_the_dry_run_does(planner, text, tmp_path):
    plan = planner.predict(parse_layout(text + ",vocabulary=pp"))
    (tmp_path / "run.toml").write_text(written(plan, planner, "pipeloom")[0])
    dry = predicted(load_layout(tmp_path / "run.toml"), planner.device)
    assert plan.schedule == dry.timeline.schedule
    assert sum(getattr(plan.step, part) for part in ("compute", "exchange", "idle")) == pytest.approx(
        dry.timeline.makespan, rel=0.005
    )
    assert [rank.total for rank in plan.ranks] == pytest.approx([rank.total for rank in dry.ranks], rel=0.03)


def test_the_search_spreads_an_output_layer_that_is_longer_than_a_stage(planner):
    fixed = {"pp": 4, "tp": 1, "cp": 1, "recompute": "none", "micro_batch": 1}
    request = PlanRequest(4, 80e9, 8, 4096, ("1f1b",), vocabulary=("last", "pp"), fixed=fixed)
    plan = search(planner, request)
    assert plan.best.layout.vocabulary == "pp"
    assert plan.best.tokens > 1.25 * planner.predict(replace(plan.best.layout, vocabulary="last")).tokens
    rough = estimate(planner, plan.best.layout)
    assert rough.seconds == pytest.approx(plan.best.step.total, rel=0.1)


def test_the_place_of_the_output_layer_can_be_fixed(planner):
    fixed = {"pp": 4, "tp": 1, "cp": 1, "recompute": "none", "micro_batch": 1}
    request = PlanRequest(4, 80e9, 8, 4096, ("1f1b",), vocabulary=("last", "pp"), fixed=fixed)
    small = replace(planner, shape=replace(planner.shape, vocab_size=2048))
    for place in ("last", "pp"):
        forced = replace(request, fixed=fixed | {"vocabulary": place})
        assert search(small, forced).best.layout.vocabulary == place


def test_where_it_cannot_be_spread(planner):
    spread = parse_layout("pp=2,m=4,vocabulary=pp")
    assert not problems(planner.shape, spread)
    for shape, layout in (
        (planner.shape, replace(spread, pp=1)),
        (replace(planner.shape, num_nextn_predict_layers=1), spread),
    ):
        assert problems(shape, layout)[0].endswith('nearest: "last"')
    with pytest.raises(UsageError, match="megatron does not spread the output layer"):
        replace(planner, runtime=RUNTIMES["megatron"]).predict(spread)
    with pytest.raises(UsageError, match="nearest: vocabulary=last"):
        written(planner.predict(spread), planner, "megatron")
    assert layers_by_rank(spread.built(), (5, 5)) == [
        ["rank", "chunk 0", "share"],
        ["0", "t*4", "E/2 L/2"],
        ["1", "t*4L", "E/2 L/2"],
    ]


def test_the_step_on_a_device_counts_s_and_t(spread):
    layout = load_layout("tiny", KEYS | {"parallel.vocabulary": "pp"})
    step = predicted(layout, load_device("h100")).step
    costs = predicted(layout, load_device("h100")).timeline.costs
    assert costs.broadcast == costs.combine > 0
    assert step.compute + step.exchange > 4 * (costs.scores + costs.scores_grad)
    assert replace(spread.layout, stages=()) == replace(predicted(layout).layout, stages=())


def test_looked_up_rows_are_kept_where_the_first_stage_is_recomputed_whole():
    """A batch is there anyway; its rows are there from F to R only because F keeps them."""
    recomputed = {"schedule__transforms": ["recompute=whole"]}
    spread, whole = run(parallel__vocabulary="pp", **recomputed), run(**recomputed)
    kept = [
        each.timeline.costs.bytes_in("device", each.timeline.schedule.stages)["kept"][0] for each in (spread, whole)
    ]
    assert kept == [64 * 64 * 4, 0]
