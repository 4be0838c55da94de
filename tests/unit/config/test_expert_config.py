"""The keys of experts: what they count, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from paths import ROOT
from pipeloom.config import load, load_layout
from pipeloom.config.sections import RouterName
from pipeloom.errors import ConfigError
from pipeloom.measure.build import build_pipeline, model_layers, moe_classes
from pipeloom.models.layers import block_name
from pipeloom.shapes.decoder import ROUTERS
from pipeloom.shapes.layers import layer_sizes, parameter_count, training_flops
from resolved import resolve

EXPERTS = {"model.num_experts": 8, "parallel.dp": 4, "train.global_batch_size": 40}


def config(**changes: Any) -> Any:
    return load("tiny", EXPERTS | {key.replace("__", "."): value for key, value in changes.items()})


def test_the_configuration_accepts_every_router() -> None:
    assert get_args(RouterName) == tuple(ROUTERS)


def test_the_default_is_dense() -> None:
    assert load("tiny").model.num_experts == 0


def test_all_experts_are_held_and_the_chosen_ones_are_counted_as_work() -> None:
    """hidden 32, inner 24: an expert has 3 · 32 · 24 weights; the gate 8 · 32."""
    dense = config(model__num_experts=0, model__intermediate_size=24).model
    experts = config(model__moe_intermediate_size=24).model
    shared = config(model__moe_intermediate_size=24, model__num_shared_experts=2, model__router="noisy").model
    expert, gate = 3 * 32 * 24, 8 * 32
    blocks = [layer_sizes(model.shape(), 1)[1] for model in (dense, experts, shared)]
    assert blocks[1].parameters - blocks[0].parameters == 7 * expert + gate
    assert blocks[1].flops - blocks[0].flops == 6 * (expert + gate), "two experts, not one, and the gate"
    assert blocks[2].parameters - blocks[1].parameters == gate + 2 * expert + 32
    assert blocks[2].flops - blocks[1].flops == 6 * (gate + 2 * expert + 32)
    assert parameter_count(experts.shape()) - parameter_count(dense.shape()) == 4 * (7 * expert + gate)
    assert training_flops(experts.shape(), 1, 3) - training_flops(dense.shape(), 1, 3) == 3 * 4 * 6 * (expert + gate)


def test_dense_blocks_among_those_with_experts_are_counted_and_balanced() -> None:
    """Stages are even in cost, not in blocks: with all 8 experts chosen the first two are the most."""
    every, dense = config().model, config(model__num_experts=0).model
    sparse, plain = layer_sizes(every.shape(), 16)[1], layer_sizes(dense.shape(), 16)[1]
    for frequency, blocks in ((2, (1, 0, 1, 0)), ([0, 0, 1, 1], (0, 0, 1, 1)), (3, (1, 0, 0, 1))):
        mixed = config(model__moe_layer_freq=frequency).model
        assert mixed.expert_blocks == mixed.shape().expert_blocks == tuple(map(bool, blocks))
        assert list(layer_sizes(mixed.shape(), 16)[1:-1]) == [sparse if block else plain for block in blocks]
    keys = {"model__num_experts_per_tok": 8, "model__num_hidden_layers": 8, "parallel__pp": 2, "schedule__name": "1f1b"}
    layout = resolve(config(**keys, model__moe_layer_freq=[1, 1, 0, 0, 0, 0, 0, 0]))
    assert layout.stage_layers[0] < layout.stage_layers[1]


def test_experts_over_replicas_resolve() -> None:
    assert resolve(config(parallel__ep=4, parallel__ep_nodes=2, parallel__ep_chunks=3)).world_size == 8


def test_the_example_is_the_preset() -> None:
    """configs/moe.toml is a copy to change of what `pipeloom train moe` runs."""
    example = ROOT / "configs" / "moe.toml"
    assert load(example) == load("moe")
    assert resolve(load("moe")).world_size == 4


OWN = """
from pipeloom.models.gate import TopKGate
from pipeloom.parallel.expert import Experts


class MyExperts(Experts):
    pass


class MyRouter(TopKGate):
    pass


number = 3
"""


def test_own_classes_are_imported_from_the_folder_of_the_file_that_names_them(tmp_path: Path) -> None:
    (tmp_path / "own_experts_of_a_test.py").write_text(OWN)
    file = tmp_path / "own.toml"
    file.write_text(
        '[model]\nnum_experts = 4\nexperts_class = "own_experts_of_a_test:MyExperts"\n'
        'router_class = "own_experts_of_a_test:MyRouter"\n'
    )
    layout = load_layout(file, {"parallel.pp": 1, "schedule.name": "gpipe", "model.num_hidden_layers": 1})
    pipeline = build_pipeline(layout, torch.device("cpu"))
    block = pipeline.modules[block_name(0)]
    assert type(block.mlp.experts).__name__ == "MyExperts"
    assert type(block.mlp.gate).__name__ == "MyRouter"
    built = model_layers(layout.config, torch.float32, torch.device("cpu"), classes=moe_classes(layout))[1]()
    assert type(built.mlp.gate).__name__ == "MyRouter", "what verify compares with, too"


@pytest.mark.parametrize(
    ("key", "name", "words"),
    [
        ("experts_class", "own_experts_of_refusals:Nobody", "has no attribute 'Nobody'"),
        ("experts_class", "no_such_experts:Mine", "nor in "),
        ("router_class", "own_experts_of_refusals:MyExperts", "not a subclass of pipeloom.models.gate.TopKGate"),
        ("router_class", "own_experts_of_refusals:number", "is not a class"),
        ("router_class", "MyRouter", "it must be module:class"),
    ],
)
def test_own_classes_that_cannot_be_used_are_refused(tmp_path: Path, key: str, name: str, words: str) -> None:
    (tmp_path / "own_experts_of_refusals.py").write_text(OWN)
    with pytest.raises(ConfigError) as error:
        load_layout("tiny", {"model.num_experts": 4, f"model.{key}": name}, folder=tmp_path)
    assert words in str(error.value)
    assert f"model.{key}" in str(error.value)
