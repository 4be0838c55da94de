"""The planner's memory: of layers, along a rank's program, and against published measurements."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from statistics import mean

import pytest

from paths import ROOT
from pipeloom.config import load, load_layout
from pipeloom.errors import ConfigError
from pipeloom.plan import RUNTIMES, PlannedLayout, Planner, load_device, load_model
from pipeloom.plan.memory import state_bytes
from pipeloom.plan.run import predicted
from pipeloom.plan.time import AxisRates, stage_times
from pipeloom.schedule import Costs, simulate
from pipeloom.schedule.families import build
from pipeloom.shapes.hub import presets, shape_of
from pipeloom.shapes.ops import Adapters, LayerOps, Op, Split, layers_of, parameters_of

PUBLISHED = json.loads((ROOT / "benchmarks" / "planbench" / "fit.json").read_text())
GIB = 2**30


def published(row):
    """(planner, layout, the row) of one published measurement."""
    model = PUBLISHED["models"][row["model"]] | {"num_hidden_layers": row["layers"]}
    axes = {axis: row[axis] for axis in ("tp", "cp", "pp", "dp", "ep", "seq")}
    experts = 1.0 if "num_experts" in model else 0.0
    layout = PlannedLayout(**axes, m=row["microbatches"], cut="even", capacity=experts)
    return Planner(shape_of(model, row["model"]), load_device("b200"), RUNTIMES["megatron"]), layout


@pytest.mark.parametrize("at", range(len(PUBLISHED["rows"])))
def test_published_memory_is_predicted_within_one_and_a_half_percent(at):
    row = PUBLISHED["rows"][at]
    planner, layout = published(row)
    width = layout.tp * layout.cp * layout.dp
    for rank, memory in enumerate(planner.predict(layout).ranks):
        for device in range(rank * width, (rank + 1) * width):
            assert memory.allocated / GIB == pytest.approx(row["allocated_gib"][str(device)], rel=0.015)


def test_published_steps_follow_from_half_as_many_microbatches():
    errors = []
    for row in PUBLISHED["rows"]:
        half = [
            r
            for r in PUBLISHED["rows"]
            if r["microbatches"] == 4 and (r["model"], r["tp"]) == (row["model"], row["tp"])
        ]
        if row["microbatches"] == 8:
            planner, layout = published(row)
            again = planner.measured(planner.predict(layout), 4, half[0]["step_ms"] / 1e3)
            errors.append(abs(again.step.total * 1e3 / row["step_ms"] - 1))
    assert len(errors) == 3
    assert mean(errors) < 0.003


def test_a_measured_step_scales_the_times_of_the_pipeline_alone():
    planner = Planner(load_model("llama3-8b"), load_device("h100"), RUNTIMES["megatron"])
    prediction = planner.predict(PlannedLayout(dp=4, pp=2, m=8))
    scaled = planner.measured(prediction, 8, 2 * prediction.step.total)
    assert scaled.step.total == pytest.approx(2 * prediction.step.total)
    before, after = prediction.step.parts(), scaled.step.parts()
    ratios = {name: after[name] / before[name] for name in before if before[name]}
    outside = {"reduction", "optimizer", "host"}
    assert {name for name, ratio in ratios.items() if ratio == 1} == outside
    factors = [ratio for name, ratio in ratios.items() if name not in outside]
    assert factors == pytest.approx([factors[0]] * len(factors))
    assert scaled.tokens == pytest.approx(prediction.tokens / 2)
    # Less than what is outside of the pipeline takes: everything is faster than predicted.
    short = planner.measured(prediction, 8, 0.5 * before["optimizer"])
    assert short.step.parts() == pytest.approx(
        {n: each * short.step.total / prediction.step.total for n, each in before.items()}
    )


def test_ranks_of_tp_compute_latents_of_their_own_tokens_and_gather_them():
    """Megatron-Core's multi-head latent attention: each rank has the whole down projections, and its share of the heads."""
    shape, tokens = load_model("deepseek-v3"), 4096
    megatron = RUNTIMES["megatron"]
    blocks = (layers_of(shape, Split(megatron, tokens, tokens, tp=tp))[1] for tp in (8, 1))
    ops, whole = ({op.name: op for op in block.ops} for block in blocks)
    for name in ("query_down", "latent_down"):
        assert (ops[name].weights, ops[name].tp_bytes) == (whole[name].weights, 0.0)
        assert ops[name].flops == whole[name].flops / 8
    for name, width in (("query_up", 1536), ("latent_up", 512), ("attention", 64), ("o", 7168)):
        assert ops[name].tp_bytes == 2 * tokens * width * 7 / 8
        assert ops[name].flops == whole[name].flops / 8
    kept = {name: size for op in ops.values() for name, size in op.saves}
    assert (kept["query_down"], kept["query_norm"]) == (2 * tokens * 1536 / 8,) * 2
    assert (kept["latent"], kept["latent_norm"]) == (2 * tokens * 576 / 8, 2 * tokens * 512 / 8)


# Totals of the models' cards, in billions.
CARDS = {
    "llama3-8b": 8.03, "llama3-70b": 70.6, "llama3-405b": 405.9, "qwen3-30b-a3b": 30.5, "qwen3-235b-a22b": 235.1,
    "mixtral-8x7b": 46.7, "mixtral-8x22b": 140.6, "deepseek-v2": 235.7, "deepseek-v3": 682.6, "gpt3-175b": 175.0,
}  # fmt: skip


@pytest.mark.parametrize("name", presets())
def test_presets_are_trained_as_they_are_planned(name):
    shape = load_model(name)
    if shape.foreign:
        with pytest.raises(ConfigError, match=f'model.preset = "{name}": Pipeloom\'s own decoder cannot'):
            load(None, {"model.preset": name})
        return
    assert load(None, {"model.preset": name}).model.shape() == shape


@pytest.mark.parametrize("name", presets())
def test_presets_have_the_parameters_of_their_cards(name):
    shape = load_model(name)
    layers = layers_of(shape, Split(RUNTIMES["pipeloom"], 1, 1))
    total = sum(sum(layer.parameters) for layer in layers)
    total -= shape.vocab_size * shape.hidden_size * shape.tie_word_embeddings
    assert total / 1e9 == pytest.approx(CARDS[name], rel=0.005)


def test_a_tied_weight_is_there_once_on_a_rank_with_both_layers():
    shape = replace(load_model("llama3-8b"), tie_word_embeddings=True, num_hidden_layers=2)
    layers, table = layers_of(shape, Split(RUNTIMES["megatron"], 1, 1, tp=2)), shape.vocab_size * shape.hidden_size / 2
    total = sum(sum(layer.parameters) for layer in layers)
    assert sum(parameters_of(layers)) == total - table
    assert sum(parameters_of(layers[1:])) == total - table
    assert sum(parameters_of(layers[1:], has_embedding=True)) == total - 2 * table


def test_without_sequence_parallelism_a_rank_of_tp_has_every_token_outside_products():
    shape, runtime = load_model("llama3-8b"), RUNTIMES["pipeloom"]
    one, split, whole = (
        layers_of(shape, Split(each, 64, 64, tp=tp))[1].tensors
        for each, tp in ((runtime, 1), (runtime, 2), (replace(runtime, sequence=False), 2))
    )
    assert {name for name, size in whole.items() if size == one[name]} == {
        *("input_wide", "input_unit", "input_scale", "norm_1", "middle_wide", "middle_unit", "middle_scale", "norm_2")
    }
    assert split == {name: size / 2 for name, size in one.items()}


def test_every_rank_of_tp_has_a_part_of_each_row_of_the_experts():
    shape, runtime = load_model("mixtral-8x7b"), RUNTIMES["pipeloom"]
    one, *others = (
        layers_of(shape, Split(replace(runtime, sequence=sp), 64, 64, tp=tp, etp=tp))[1].tensors
        for tp, sp in ((1, True), (2, True), (2, False))
    )
    for each in others:
        assert each["dispatched"] == one["dispatched"]
        assert each["expert_gated"] == one["expert_gated"] / 2


def test_a_weights_gradient_beside_its_sum_is_scratch_of_its_product():
    runtime = replace(RUNTIMES["pipeloom"], sums_inside=False)
    block = layers_of(load_model("llama3-8b"), Split(runtime, 64, 64))[1]
    assert {op.name: op.scratch / 2**20 for op in block.ops if op.deferred} == {
        "qkv": 32.0,
        "o": 32.0,
        "up": 112.0,
        "down": 112.0,
    }


def test_packed_rows_keep_their_positions_and_on_a_gpu_a_mask():
    shape, runtime = load_model("llama3-8b"), replace(RUNTIMES["pipeloom"], packed=True)
    gpu, cpu = (layers_of(shape, Split(each, 64, 64))[1].tensors for each in (runtime, runtime.on_cpu()))
    assert gpu["positions"] == cpu["positions"] == 64 * 128 * 2
    assert gpu["mask"] == 64 * 64 * 2
    assert "mask" not in cpu


def test_a_dry_run_of_packed_documents_counts_what_they_keep():
    keys = {"parallel.pp": 2, "train.device": "cpu", "data.documents": "pack"}
    rows, packed = (predicted(load_layout("tiny", each)).ranks[0] for each in (keys | {"data.documents": "auto"}, keys))
    assert packed.activations > rows.activations


def test_rows_that_arrive_stay_beside_those_in_the_experts_order():
    shape = load_model("mixtral-8x7b")
    home, away, alone = (layers_of(shape, Split(RUNTIMES["pipeloom"], 64, 64, ep=ep))[1] for ep in (1, 2, 8))
    assert away.tensors["received"] == away.tensors["dispatched"]
    assert "received" not in home.tensors.keys() | alone.tensors.keys()
    assert away.backward_peak == away.input_peak
    assert home.backward_peak < home.input_peak


def adapted(name="llama3-8b", r=16, targets="all-linear", **changes):
    """The layers of a model on a CPU, with adapters; the same layers without."""
    shape, runtime = replace(load_model(name), **changes), RUNTIMES["pipeloom"].on_cpu()
    both = (replace(runtime, adapters=Adapters(r, targets)), runtime)
    return [layers_of(shape, Split(each, 64, 64)) for each in both]


def test_only_adapters_are_trained():
    """A linear layer's have r (inputs + outputs) parameters; gradients of weights are theirs alone, those of inputs are all."""
    layers, plain = adapted()
    queries, keys, inner, hidden, r = 4096, 1024, 14336, 4096, 16
    sums = 2 * (hidden + queries) + 2 * (hidden + keys) + 3 * (hidden + inner)  # q and o, k and v, gate, up and down
    assert [parameters_of([layer], trained=True) for layer in (layers[0], layers[5], layers[-1])] == [
        (0.0, 0.0),
        (r * sums, 0.0),
        (0.0, 0.0),
    ]
    assert sum(parameters_of(layers)) - sum(parameters_of(plain)) == 32 * r * sums
    attention = sum(op.flops for op in plain[5].ops if op.attends)
    products = sum(op.flops for op in plain[5].ops if not op.attends)
    assert layers[5].flops == 3 * attention + 2 * products + 3 * 2 * 64 * r * sums
    assert layers[0].flops == 0
    tied, _ = adapted(tie_word_embeddings=True)
    assert parameters_of(tied, trained=True) == parameters_of(layers, trained=True)


def test_a_frozen_weight_keeps_no_operand():
    layers, plain = adapted(targets=("o_proj",))
    gone = plain[5].tensors.keys() - layers[5].tensors.keys()
    assert gone == {"input_unit", "norm_1", "middle_unit", "norm_2", "gated"}
    assert layers[5].tensors.keys() - plain[5].tensors.keys() == {"o_low"}
    assert layers[5].tensors["o_low"] == 64 * 16 * 2
    assert {op.name for op in layers[5].ops if op.deferred} == {"o_lora_A", "o_lora_B"}
    assert layers[-1].tensors.keys() == plain[-1].tensors.keys() - {"input_unit", "last_norm"}


def test_before_the_first_adapter_nothing_is_kept_and_no_gradient_computed():
    layers, plain = adapted(targets=r"model\.layers\.[3-9]\.self_attn\.o_proj")
    assert [layer.saved for layer in layers[:4]] == [0.0] * 4
    assert layers[2].flops == pytest.approx(plain[2].flops / 3)
    assert layers[4].tensors.keys() < layers[5].tensors.keys()  # what comes before its adapter
    assert not any(op.carries for op in layers[4].ops[:4])
    # Later blocks without an adapter lack its operands alone.
    assert layers[5].saved - layers[20].saved == layers[5].tensors["mixed"] + layers[5].tensors["o_low"]
    device, layout = load_device("h100"), PlannedLayout(seq=64)
    planner = Planner(load_model("llama3-8b"), device, RUNTIMES["pipeloom"])
    links = AxisRates.of(layout, device, planner.shape)
    seconds = [planner.stage_seconds([layer], layout, links) for layer in (layers[2], layers[5], plain[5])]
    assert (seconds[0].input_grad, seconds[0].weight_grad, seconds[0].forward) == (0.0, 0.0, seconds[2].forward)
    assert 0 < seconds[1].weight_grad < 0.1 * seconds[2].weight_grad


def hand_made():
    """Two operations: the first keeps a and b, the second b and c; gradients 10 and 20, 5 of scratch in the first."""
    first = Op("first", (("a", 100.0), ("b", 40.0)), gradients=10, scratch=5)
    second = Op("second", (("b", 40.0), ("c", 7.0)), gradients=20)
    return LayerOps("t", (first, second), residual=3, input=8)


def test_a_layers_backward_frees_a_tensor_behind_the_first_operation_that_keeps_it():
    layer = hand_made()
    assert layer.saved == 147
    # second: 20 + 3 over what is held; first: c (7) is free by then, 10 + 5 + 3 - 7
    assert layer.backward_peak == 23
    big = replace(layer, ops=(replace(layer.ops[0], scratch=100), layer.ops[1]))
    assert big.backward_peak == 10 + 100 + 3 - 7


def test_a_recomputed_layer_keeps_its_input_and_rebuilds_the_rest():
    layer = hand_made().recomputed("full")
    assert (layer.saved, layer.rebuilt) == (8, 147)
    assert layer.backward_peak == 147 + 23


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipe"])
def test_bytes_and_activations_have_the_same_peak(name):
    schedule = build(name, 4, 8)
    saved = tuple(10.0 + stage for stage in range(schedule.stages))
    costs = Costs(activation=saved, held=tuple(4 / each for each in saved), bytes={"saved": saved, "pending": 4.0})
    timeline = simulate(schedule, costs)
    assert timeline.peak_memory == pytest.approx(timeline.peak_bytes["device"])


@pytest.mark.parametrize(("zero", "bytes_a_parameter"), [(0, 18), (1, 6 + 12 / 4), (2, 2 + 16 / 4), (3, 18 / 4)])
def test_zero_levels_divide_18_bytes_a_parameter(zero, bytes_a_parameter):
    layout = PlannedLayout(dp=4, zero=zero)
    *state, gathered = state_bytes([(1000.0, 1000.0, 4), (0.0, 0.0, 1)], 50.0, layout, RUNTIMES["megatron"])
    assert sum(state) == pytest.approx(1000 * bytes_a_parameter)
    assert gathered == {0: 0, 1: 0, 2: 200, 3: 400}[zero]


def test_state_is_that_of_what_is_trained():
    state = state_bytes([(1000.0, 10.0, 4), (0.0, 0.0, 1)], 50.0, PlannedLayout(dp=4, zero=1), RUNTIMES["pipeloom"])
    assert state == (2 * 1000, 4 * 10, 12 * 10 / 4, 0.0)


def test_fully_shard_divides_16_bytes_a_parameter_and_keeps_stages_gathered():
    one = state_bytes([(1000.0, 1000.0, 4), (0.0, 0.0, 1)], 50.0, PlannedLayout(dp=4), RUNTIMES["torchtitan"])
    assert one == (1000.0, 1000.0, 2000.0, 50 * (4 + 6))
    deep = state_bytes([(1000.0, 1000.0, 4), (0.0, 0.0, 1)], 50.0, PlannedLayout(dp=4, pp=2), RUNTIMES["torchtitan"])
    assert deep[3] == 1000 * (2 + 4)


@cache
def deep(**changes):
    """A 70B model on 8 pipeline ranks."""
    layout = replace(PlannedLayout(pp=8, tp=8, m=16, seq=8192), **changes)
    return Planner(load_model("llama3-70b"), load_device("h100"), RUNTIMES["megatron"]).predict(layout)


def test_recomputing_attention_frees_nothing_and_takes_time():
    plain, again = deep(), deep(recompute="attention")
    assert again.peak > 0.99 * plain.peak
    assert again.step.total > 1.01 * plain.step.total


def test_recomputing_parts_lies_between_nothing_and_everything():
    peaks = [deep(recompute=part).ranks[0].activations for part in ("none", "norms", "norms+activation", "full")]
    steps = [deep(recompute=part).step.total for part in ("none", "norms", "norms+activation", "full")]
    assert peaks == sorted(peaks, reverse=True)
    assert steps == sorted(steps)
    assert 0.5 < peaks[2] / peaks[0] < 0.75  # 20 of 34 in the published figure, for another feed-forward width


def test_more_chunks_do_not_save_memory():
    five, ten = deep(schedule="interleaved", v=5), deep(schedule="interleaved", v=10)
    assert ten.peak > 0.95 * five.peak


def test_experts_keep_what_is_routed_whatever_ep_is():
    shape = load_model("mixtral-8x7b")
    one, eight = (layers_of(shape, Split(RUNTIMES["megatron"], 4096, 4096, ep=ep))[1] for ep in (1, 8))
    assert one.saved == eight.saved
    assert one.parameters[1] == 8 * eight.parameters[1]
    padded = layers_of(shape, Split(RUNTIMES["megatron"], 4096, 4096, ep=8, capacity=2.0))[1]
    assert padded.tensors["dispatched"] == 2 * eight.tensors["dispatched"]


def test_experts_send_what_leaves_their_rank():
    shape = load_model("mixtral-8x7b")
    blocks = [layers_of(shape, Split(RUNTIMES["megatron"], 4096, 4096, ep=ep))[1] for ep in (1, 2, 8)]
    sent = [sum(op.ep_bytes for op in block.ops) for block in blocks]
    whole = 2 * 4096 * 2 * shape.hidden_size * 2  # there and back, two experts a token, bf16
    assert sent == [0, whole / 2, whole * 7 / 8]


def test_sharded_weights_are_gathered_twice_and_their_gradients_sent_once():
    shape, device = load_model("llama3-8b"), load_device("h100")
    slow = Planner(shape, replace(device, link=1e7, network=1e7), RUNTIMES["megatron"])
    layout = PlannedLayout(dp=2, m=2, seq=128, zero=3)
    layers = slow.layers(layout)
    links = AxisRates.of(layout, slow.device, shape)
    times = stage_times(layers[1:2], layout, slow.runtime, slow.device, links)
    gather = 2 * sum(layers[1].parameters) / 2 / links.dp
    assert times.forward == pytest.approx(gather, rel=1e-3)
    assert times.input_grad + times.weight_grad == pytest.approx(3 * gather, rel=1e-3)
