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
from pipeloom.plan.memory import StageMemory, at_peaks, peak, stage_memory, state_bytes
from pipeloom.plan.messages import MessageBytes
from pipeloom.plan.run import predicted
from pipeloom.plan.time import AxisRates, stage_times
from pipeloom.runtime.layer_bytes import LayerBytes, stage_bytes
from pipeloom.schedule import Costs, simulate
from pipeloom.schedule.families import build
from pipeloom.schedule.transforms import half_split, recompute
from pipeloom.shapes.hub import from_config, presets
from pipeloom.shapes.ops import LayerOps, Op, Split, layers_of, parameters_of

PUBLISHED = json.loads((ROOT / "benchmarks" / "planbench" / "measured.json").read_text())
GIB = 2**30


def published(row):
    """(planner, layout, the row) of one published measurement."""
    model = PUBLISHED["models"][row["model"]] | {"num_hidden_layers": row["layers"]}
    axes = {axis: row[axis] for axis in ("tp", "cp", "pp", "dp", "ep", "seq")}
    experts = 1.0 if "num_experts" in model else 0.0
    layout = PlannedLayout(**axes, m=row["microbatches"], cut="even", capacity=experts)
    return Planner(from_config(model, row["model"]), load_device("b200"), RUNTIMES["megatron"]), layout


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
    assert mean(errors) < 0.03


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


def at_peak(schedule, stages, gradients=0.0, messages=None, slices=(), **options):
    """Each rank's bytes at its peak: those of the simulation, and what `at_peaks` adds."""
    names = {"saved": [each.saved for each in stages], "pending": [each.pending for each in stages]}
    costs = Costs(bytes={name: tuple(sizes) for name, sizes in names.items()} | {"grads": gradients})
    if slices:
        costs = replace(costs, slice_times=slices, slice_sizes=slices)
    timeline = simulate(schedule, costs)
    nothing = [MessageBytes(0.0, (0.0,) * len(program), (0.0,) * len(program)) for program in schedule.programs]
    there = at_peaks(timeline, stages, [gradients] * len(stages), messages or nothing, slices, **options)
    changed = [sum(there[name][stage] for name in there) - gradients for stage in range(len(stages))]
    own = [sum(changed[stage] for stage in mine) for mine in schedule.stages_of]
    return [level + more for level, more in zip(timeline.peak_bytes["device"], own, strict=True)]


def test_gradients_count_from_a_stages_first_weight_gradient():
    """Under gpipe none is there while all micro-batches are alive."""
    schedule, stages = build("gpipe", 1, 4), [StageMemory(10.0, 0.0, 3.0)]
    assert at_peak(schedule, stages, 100.0, from_first=True) == pytest.approx([133.0])  # at 0B1
    assert at_peak(schedule, stages, 9.0, from_first=True) == pytest.approx([43.0])  # at 0B0
    assert at_peak(schedule, stages, 9.0) == pytest.approx([52.0])


def test_sums_at_the_steps_end_count_beside_all_gradients():
    schedule, stages = build("gpipe", 1, 4), [StageMemory(10.0, 0.0, 3.0)]
    for at_end, most in (10.0, 133.0), (40.0, 140.0):
        assert at_peak(schedule, stages, 100.0, from_first=True, at_end=[at_end]) == pytest.approx([most])


@pytest.mark.parametrize(("name", "temporary"), [("1f1b", 3.0), ("zb-h1", 50.0)])
def test_an_i_has_temporaries_of_its_own(name, temporary):
    stages = [StageMemory(10.0, 4.0, 3.0, extra_input=50.0)]
    assert at_peak(build(name, 1, 4), stages) == pytest.approx([10.0 + temporary])


def test_what_waits_for_w_is_no_temporary_of_an_i_that_leaves_it():
    """Blocks of two layers: 20 again, 6 beside, and 15 of the other layer's W, where 30 wait in the end."""
    layer = LayerBytes(20.0, 1.0, 1.0, True, pending=15.0, backward=4.0, split=6.0, again=True)
    schedule = recompute(half_split(build("1f1b", 1, 1)))
    sizes = {name: size for name, (size,) in stage_bytes(schedule, [[layer, layer]]).items()}
    temporary, extra = sizes.pop("temporary"), sizes.pop("temporary of I")
    timeline = simulate(schedule, Costs(bytes=sizes | {"temporary of B": 0.0, "grads": 0.0}))
    messages = [MessageBytes(0.0, (0.0,) * 3, (0.0,) * 3)]
    there = at_peaks(timeline, [StageMemory(0.0, 0.0, 0.0, extra_input=extra)], [0.0], messages)
    (most,) = timeline.peak_bytes["device"]
    assert most == sizes["pending"]
    assert temporary == sum(there["temporaries"]) == 11.0


def test_smaller_micro_batches_have_smaller_temporaries():
    schedule, stages = build("gpipe", 1, 2), [StageMemory(0.0, 0.0, 30.0)]
    timeline = simulate(schedule, Costs(microbatch=(0.5, 0.5), bytes={"saved": 0.0, "grads": 0.0}))
    entries = MessageBytes(0.0, (0.0,) * 4, (0.0,) * 4)
    assert at_peaks(timeline, stages, [0.0], [entries])["temporaries"] == (15.0,)


def test_summed_gradients_of_keys_and_values_shrink_slice_by_slice():
    """3 slices of one stage: 2/3 are summed when the last one's backward ends, and are there until the second's does."""
    schedule, thirds = build("seq1f1b", 1, 1, None, {"slices": 3}), (1 / 3,) * 3
    stages = [StageMemory(15.0, 0.0, 0.0, summed=12.0)]
    assert at_peak(schedule, stages, slices=thirds) == pytest.approx([10.0 + 8.0])
    late = [StageMemory(0.0, 0.0, 0.0, summed=12.0)]
    assert at_peak(schedule, late, slices=thirds) == pytest.approx([8.0])


def test_receive_buffers_hold_inputs_that_are_counted_as_kept():
    schedule, stages = build("gpipe", 1, 1), [StageMemory(10.0, 0.0, 0.0)]
    assert at_peak(schedule, stages, messages=[MessageBytes(7.0, (5.0, 3.0), (0.0, 0.0))]) == pytest.approx([14.0])
    assert at_peak(schedule, stages, messages=[MessageBytes(7.0, (5.0, 7.0), (0.0, 4.0))]) == pytest.approx([14.0])


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


def test_a_stages_backward_frees_layer_by_layer():
    layer = hand_made()
    head = LayerOps("L", (Op("loss", (("logits", 50.0),), gradients=1, scratch=30),), 0.0)
    assert stage_memory([layer, head]).extra == 31
    assert stage_memory([layer, layer]).extra == 23
    heavy = replace(layer, residual=200.0)
    assert stage_memory([heavy, head]).extra == 220 - 50  # the loss's tensors are free by then


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipe"])
def test_the_peak_along_a_program_is_the_simulated_one(name):
    schedule = build(name, 4, 8)
    stages = [StageMemory(10.0 + stage, 4.0, 0.0) for stage in range(schedule.stages)]
    costs = Costs(
        activation=tuple(each.saved for each in stages), held=tuple(each.pending / each.saved for each in stages)
    )
    timeline = simulate(schedule, costs)
    for rank in range(4):
        saved, extra, _ = peak(schedule, rank, stages)
        # a pair claims its forward before its backward frees, in the planner; the simulation lets its halves run in turns
        within = 14.0 if name == "dualpipe" else 1e-9
        assert extra == 0
        assert timeline.peak_memory[rank] - 1e-9 <= saved <= timeline.peak_memory[rank] + within


def test_a_micro_batch_that_is_recomputed_saves_less_than_the_others():
    schedule = recompute(build("1f1b", 2, 4), True, actions=[(0, 0)])
    saved, _, action = peak(schedule, 0, [StageMemory(1.0, 0.0, 0.0)] * 2)
    assert (saved, action) == (2.0, "0R0")


def test_temporaries_count_where_the_backward_runs():
    schedule = build("1f1b", 2, 4)
    stages = [StageMemory(10.0, 0.0, 3.0), StageMemory(10.0, 0.0, 50.0)]
    assert peak(schedule, 0, stages) == (20.0, 3.0, "0B0")
    assert peak(schedule, 1, stages) == (10.0, 50.0, "1B0")


@pytest.mark.parametrize(("zero", "bytes_a_parameter"), [(0, 18), (1, 6 + 12 / 4), (2, 2 + 16 / 4), (3, 18 / 4)])
def test_zero_levels_divide_18_bytes_a_parameter(zero, bytes_a_parameter):
    layout = PlannedLayout(dp=4, zero=zero)
    *state, gathered = state_bytes([(1000.0, 4), (0.0, 1)], 50.0, layout, RUNTIMES["megatron"])
    assert sum(state) == pytest.approx(1000 * bytes_a_parameter)
    assert gathered == {0: 0, 1: 0, 2: 200, 3: 400}[zero]


def test_fully_shard_divides_16_bytes_a_parameter_and_keeps_stages_gathered():
    one = state_bytes([(1000.0, 4), (0.0, 1)], 50.0, PlannedLayout(dp=4), RUNTIMES["torchtitan"])
    assert one == (1000.0, 1000.0, 2000.0, 50 * (4 + 6))
    deep = state_bytes([(1000.0, 4), (0.0, 1)], 50.0, PlannedLayout(dp=4, pp=2), RUNTIMES["torchtitan"])
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
