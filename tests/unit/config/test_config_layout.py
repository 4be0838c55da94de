"""From a configuration to its layout: schedule, stages, micro-batches, notes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.config import load, load_layout, stage_costs
from pipeloom.errors import ConfigError, ScheduleError
from pipeloom.schedule.csv_form import to_csv
from pipeloom.schedule.families import build
from pipeloom.schedule.model import parts
from pipeloom.schedule.transforms import recompute
from pipeloom.shapes.cut import even_sizes
from pipeloom.shapes.layers import layer_sizes, parameter_count, training_flops
from resolved import resolve


@given(st.integers(1, 60), st.integers(1, 20))
def test_even_sizes(total: int, parts: int) -> None:
    sizes = even_sizes(total, parts)
    assert sum(sizes) == total
    assert len(sizes) == parts
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)


def test_uneven_microbatches_are_announced() -> None:
    layout = load_layout(None, {"schedule.microbatches": 9})
    assert layout.microbatch_sizes == (4, 4, 4, 4, 4, 3, 3, 3, 3)
    assert any("5 of 4 and 4 of 3" in note for note in layout.notes)
    even = load_layout()
    assert even.microbatch_sizes == (4,) * 8
    assert not any("micro-batches" in note for note in even.notes)


def test_planned_micro_batches_are_announced_instead_of_equal_ones() -> None:
    keys = {"train.global_batch_size": 22, "schedule.microbatches": 5, "train.seq_len": 64, "data.batching": "planned"}
    (note,) = load_layout("tiny", keys).notes
    assert "packs 22 documents into micro-batches of at most 320 tokens" in note


def test_stages_as_many_as_blocks_carry_embedding_and_output_along() -> None:
    assert load_layout().stage_layers == (2, 1, 1, 1, 1, 1, 1, 2)


def test_uneven_stages_are_announced() -> None:
    layout = load_layout("tiny", {"parallel.pp": 3, "schedule.name": "1f1b"})
    assert sum(layout.stage_layers) == 6
    assert any(note.startswith("uneven stages") for note in layout.notes)


def test_a_heavy_output_layer_gets_fewer_blocks_beside_it() -> None:
    overrides = {"model.vocab_size": 4096, "model.num_hidden_layers": 16}
    layout = load_layout(None, overrides)
    costs = stage_costs(layout.config, layout.stage_layers)
    blocks = layout.stage_layers[-1] - 1
    even = stage_costs(layout.config, (3, *(2,) * 6, 3))
    assert blocks < 2
    assert max(costs) < max(even)


def test_stages_string_decides() -> None:
    layout = load_layout("tiny", {"schedule.name": "1f1b", "parallel.stages": "Et*3|tL"})
    assert layout.stage_layers == (4, 2)


def test_sizes_of_a_schedule_file_replace_those_that_nobody_gave(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(to_csv(build("gpipe", 2, 3)))
    assert load_layout("tiny", {"schedule.name": str(path)}).schedule.microbatches == 3
    layout = load_layout(None, {"schedule.name": str(path)})
    assert (layout.world_size, layout.schedule.microbatches, layout.config.parallel.pp) == (2, 3, 2)
    with pytest.raises(ConfigError, match=r"set schedule.microbatches = 3"):
        load_layout(None, {"schedule.name": str(path), "schedule.microbatches": 4})
    with pytest.raises(ConfigError, match=r"set parallel.pp = 2"):
        load_layout(None, {"schedule.name": str(path), "parallel.pp": 4})
    path.write_text("0F0,0B0\n1F0,1B0x\n")
    with pytest.raises(ScheduleError, match="1B0x"):
        load_layout(None, {"schedule.name": str(path)})


def test_a_function_in_the_working_directory_is_a_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loom_schedule_here.py").write_text(
        "from pipeloom.schedules import gpipe\n"
        "def make(ranks, microbatches, wrong=False):\n"
        "    return gpipe(ranks + wrong, microbatches)\n"
        "def broken(ranks, microbatches):\n"
        "    raise KeyError('lost')\n"
    )
    monkeypatch.chdir(tmp_path)
    layout = load_layout("tiny", {"schedule.name": "loom_schedule_here:make"})
    assert layout.schedule == build("gpipe", 2, 5)
    with pytest.raises(ConfigError, match=r"set parallel.pp = 3"):
        load_layout("tiny", {"schedule.name": "loom_schedule_here:make", "schedule.options.wrong": True})
    with pytest.raises(ConfigError, match="raised KeyError"):
        load_layout("tiny", {"schedule.name": "loom_schedule_here:broken"})


def test_layer_sizes_of_a_shape_counted_by_hand() -> None:
    model = load("tiny").model  # width 32, 4 heads of 8, 2 key-value heads, 64 inside, vocabulary 256
    sizes = layer_sizes(model.shape(), 16)
    matrices = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 64
    assert [size.letter for size in sizes] == ["E", "t", "t", "t", "t", "L"]
    assert [size.parameters for size in sizes] == [256 * 32, *[matrices + 64] * 4, 256 * 32 + 32]
    assert sizes[1].flops == 3 * 16 * (2 * matrices + 2 * 16 * 32)
    assert sizes[-1].flops == 3 * 16 * 2 * 256 * 32
    assert parameter_count(model.shape()) == sum(size.parameters for size in sizes)
    wide = load("tiny", {"model.head_dim": 20, "model.qkv_bias": True}).model
    matrices = 32 * 80 + 2 * 32 * 40 + 80 * 32 + 3 * 32 * 64
    block = layer_sizes(wide.shape(), 16)[1]
    assert (block.parameters, block.flops) == (matrices + 80 + 2 * 40 + 64, 3 * 16 * (2 * matrices + 2 * 16 * 80))
    both = load("tiny", {"model.attention_bias": True}).model
    assert layer_sizes(both.shape(), 16)[1].parameters - sizes[1].parameters == 32 + 2 * 16 + 32
    tied = load("tiny", {"model.tie_word_embeddings": True}).model
    assert parameter_count(tied.shape()) == parameter_count(model.shape()) - 256 * 32
    assert training_flops(model.shape(), 16, 3) == 3 * sum(size.flops for size in sizes)


def test_the_fault_is_parsed() -> None:
    fault = load_layout(None, {"debug.fault": "raise:2:6F3"}).fault
    assert fault is not None
    assert (fault.kind, fault.rank, str(fault.action)) == ("raise", 2, "6F3")
    swap = load_layout(None, {"debug.fault": "swap-microbatches:0,1"}).fault
    assert swap is not None
    assert (swap.a, swap.b) == (0, 1)
    drop = load_layout(None, {"debug.fault": "drop-send:3:7"}).fault
    assert drop is not None
    assert (drop.rank, drop.number) == (3, 7)
    kill = load_layout(None, {"debug.fault": "kill:1:2"}).fault
    assert kill is not None
    assert (kill.rank, kill.step) == (1, 2)
    assert load_layout().fault is None


def test_the_layout_of_many_replicas() -> None:
    """Each replica's part of the batch is cut into as many micro-batches; sequence parallelism cuts the sequences."""
    axes = {"parallel.dp": 2, "parallel.tp": 2, "parallel.sp": True, "train.global_batch_size": 22}
    layout = load_layout("tiny", axes)
    assert (layout.world_size, layout.mesh.pp, layout.mesh.dp, layout.mesh.tp) == (8, 2, 2, 2)
    assert layout.microbatch_sizes == (3, 2, 2, 2, 2)
    with pytest.raises(ConfigError, match=r"train.seq_len = 15: parallel.tp 2 must divide it.*nearest: 14 or 16"):
        load_layout("tiny", {**axes, "train.seq_len": 15})


def test_recompute_is_a_word_or_blocks() -> None:
    assert load_layout("tiny").config.train.recompute == "none"
    assert load_layout("tiny", {"train.recompute": "full"}).config.train.recompute == "full"
    assert load_layout("tiny", {"train.recompute": [0, 3]}).config.train.recompute == (0, 3)
    parts, plain = (load_layout("tiny", {"train.recompute": word}).schedule for word in ("norms", "none"))
    assert parts == recompute(plain, part="norms")
    both = load_layout("tiny", {"train.recompute": "norms", "schedule.transforms": ["recompute=norms"]}).schedule
    assert both == parts  # not a second time


def test_compiled_blocks_are_said_to_split_no_backward() -> None:
    keys = {"train.compile": "blocks", "schedule.microbatches": 4}
    split, whole = (load_layout("tiny", {**keys, "schedule.name": name}).notes for name in ("zbv", "1f1b"))
    assert split == ("compiled blocks compute their weight gradients in I, so their W takes no time",)
    assert whole == ()


def test_too_few_micro_batches_are_said_to_leave_ranks_idle() -> None:
    keys = {"parallel.pp": 4, "schedule.name": "1f1b", "schedule.chunks": 1}
    few, enough = (load_layout("tiny", {**keys, "schedule.microbatches": count}).notes for count in (2, 4))
    idle = (
        "2 micro-batches on 4 ranks: about 60% of each step is idle time; schedule.microbatches = 8 or more fills the "
    )
    assert few[0].startswith(idle)
    assert enough == ()


def test_slices_are_cut_where_they_take_the_same_time() -> None:
    keys = {"schedule.name": "1f1b", "schedule.microbatches": 8, "parallel.pp": 4, "train.seq_len": 1024}
    balanced = load_layout("tiny", {**keys, "schedule.slices": 4})
    assert (balanced.schedule.slices, balanced.schedule.microbatches, balanced.notes) == (4, 8, ())
    assert balanced.cuts is not None
    assert balanced.cuts.times == pytest.approx([0.25] * 4, abs=0.001)
    assert balanced.cuts.sizes[0] > 1.5 * balanced.cuts.sizes[3]  # attention takes half of the time
    spread = load_layout("tiny", {**keys, "schedule.transforms": ["slices=4"], "parallel.tp": 2, "parallel.cp": 2})
    assert spread.cuts is not None
    assert not any(position % 8 for position in spread.cuts.positions)


SPREAD = {"parallel.vocabulary": "pp"}


def test_a_spread_output_layer_leaves_the_last_stage_to_blocks() -> None:
    keys = {**SPREAD, "parallel.pp": 4, "schedule.name": "1f1b", "model.vocab_size": 8192, "model.num_hidden_layers": 8}
    assert load_layout("tiny", {**keys, "parallel.vocabulary": "last"}).stage_layers == (3, 3, 3, 1)
    layout = load_layout("tiny", keys)
    assert layout.stage_layers == (3, 2, 2, 3)
    assert len(layout.schedule.vocabulary) == 4
    assert load_layout("tiny", {**keys, "schedule.transforms": ["vocabulary=two"]}).schedule.options == (
        ("vocabulary", "two"),
    )
    sharded = load_layout("tiny", {**keys, "parallel.dp": 2, "parallel.zero": 2, "schedule.microbatches": 4}).schedule
    assert sharded.vocabulary
    assert "REDUCE_GRAD" in sharded.stage_actions


def test_transforms_beside_a_spread_vocabulary_have_the_costs_of_the_stages_that_there_are() -> None:
    keys = {**SPREAD, "parallel.pp": 2, "schedule.name": "1f1b", "schedule.transforms": ["cut-stages=2", "offload"]}
    schedule = load_layout("tiny", keys).schedule
    assert (schedule.vocabulary, schedule.positions) == (range(4, 6), 4)
    copies = [part for program in schedule.programs for cell in program for part in parts(cell) if part.kind == "O"]
    assert len(copies) == 4 * schedule.microbatches


@pytest.mark.parametrize(
    ("level", "given", "transforms"),
    [
        (0, (), ()),
        (1, (), ()),
        (2, (), ("reduce-gradients=1",)),
        (3, (), ("shard=2",)),
        (3, ("shard=3",), ("shard=3",)),
    ],
)
def test_a_zero_level_is_a_sharded_optimizer_and_a_transform(level, given, transforms):
    keys = {"parallel.dp": 2, "parallel.zero": level, "schedule.transforms": list(given), "train.global_batch_size": 36}
    layout = load_layout(None, keys)
    assert layout.config == resolve(load(None, keys)).config
    assert (layout.config.optimizer.zero1, layout.config.schedule.transforms) == (level > 0, transforms)
    assert layout.origins["optimizer.zero1"] == ("parallel.zero" if level else "default")


def test_slots_of_gathered_stages():
    keys = {"parallel.dp": 2, "parallel.zero": 3, "parallel.unshard_slots": 3, "train.global_batch_size": 36}
    assert load_layout(None, keys).config.schedule.transforms == ("shard=3",)


@pytest.mark.parametrize(
    ("keys", "ranks", "chunks"),
    [
        ({}, 2, 2),
        ({"parallel.pp": 4}, 4, 1),
        ({"model.num_hidden_layers": 3}, 2, 1),
        ({"model.num_hidden_layers": 1}, 1, 1),
        ({"model.num_hidden_layers": 3, "schedule.name": "zbv"}, 1, 2),
        ({"model.num_hidden_layers": 3, "schedule.chunks": 2}, 1, 2),
    ],
)
def test_ranks_and_chunks_that_nobody_set_fit_the_layers(keys: dict[str, Any], ranks: int, chunks: int) -> None:
    schedule = load_layout("tiny", keys).schedule
    assert (schedule.ranks, schedule.chunks) == (ranks, chunks)


def test_the_nearest_sizes_are_those_that_the_family_takes() -> None:
    """zbv has two stages per rank, whatever is asked."""
    with pytest.raises(ConfigError, match=r"8 stages.*; nearest: --parallel\.pp 2 or 8 layers$"):
        load_layout("tiny", {"parallel.pp": 4, "schedule.name": "zbv"})
    with pytest.raises(ConfigError, match=r"nearest: --parallel\.pp 2 or --schedule\.chunks 1 or 8 layers$"):
        load_layout("tiny", {"parallel.pp": 4, "schedule.chunks": 2})
