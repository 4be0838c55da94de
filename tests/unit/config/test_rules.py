"""Rules between features: each is refused in a configuration that has both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeloom.config import load_layout
from pipeloom.config.rules import EXCLUSIONS, EXCLUSIONS_OF_SCHEDULES, FEATURES
from pipeloom.errors import ConfigError
from pipeloom.shapes.rules import Exclusion

EXPERTS = {"model.num_experts": 4}
# Feature -> keys with which it is in use, where they are not simply another value of its key than the default.
USED: dict[str, dict[str, Any]] = {
    "router": {"model.router": "switch", "model.num_experts_per_tok": 1, **EXPERTS},
    "capacity_factor": {"model.capacity_factor": 1.5, **EXPERTS},
    "pad_to_capacity": {"model.pad_to_capacity": True, **EXPERTS},
    "dropless": {"model.capacity_factor": 0.0},
    "experts": EXPERTS,
    "dense model": {},
    "num_shared_experts": {"model.num_shared_experts": 1},
    "moe_layer_freq": {"model.moe_layer_freq": 2},
    "experts_class": {"model.experts_class": "a:B"},
    "router_class": {"model.router_class": "a:B"},
    "num_nextn_predict_layers": {"model.num_nextn_predict_layers": 1},
    "source": {"model.source": "."},
    "lora": {"lora.r": 4},
    "untrained weights": {},
    "lora_dropout": {"lora.r": 4, "lora.lora_dropout": 0.5},
    "tp": {"parallel.tp": 2},
    "one tensor rank": {},
    "ep": {"parallel.ep": 2, "parallel.dp": 2},
    "ep_nodes": {"parallel.ep_nodes": 2},
    "ep_chunks": {"parallel.ep_chunks": 2},
    "ep_blocks": {"parallel.ep_blocks": 2},
    "cut": {"parallel.cp": 2},
    "cp": {"parallel.cp": 2},
    "sp": {"parallel.sp": True},
    "whole weights": {"parallel.zero": 2, "parallel.dp": 2},
    "unshard_slots": {"parallel.unshard_slots": 3},
    "vocabulary": {"parallel.vocabulary": "pp"},
    "whole vocabulary": {},
    "one pipeline rank": {"parallel.pp": 1},
    "recompute": {"train.recompute": "full"},
    "recomputed part": {"train.recompute": "norms"},
    "compile": {"train.compile": "blocks"},
    "reproducible": {"train.reproducible": True},
    "search": {"schedule.name": "search"},
    "search in bytes": {"schedule.name": "search", "schedule.options.memory": "1GiB"},
    "replan": {"schedule.replan": 5},
    "dualpipev": {"schedule.name": "dualpipev", "schedule.microbatches": 8},
    "own schedule": {"schedule.name": "own.csv"},
    "schedule options": {"schedule.name": "interleaved", "schedule.options.rounds": "tail"},
    "own transforms": {"schedule.transforms": ["recompute"]},
    "sharded gradients": {"parallel.zero": 2, "parallel.dp": 2},
    "two routes": {"schedule.name": "dualpipe", "schedule.microbatches": 8},
    "pairs": {"schedule.name": "1f1b-overlap"},
    "other kinds": {"schedule.transforms": ["shard=2"]},
    "slices": {"schedule.slices": 2},
    "transforms": {"schedule.transforms": ["recompute"]},
    "spread vocabulary": {"schedule.transforms": ["vocabulary"]},
    "overlap_p2p": {"schedule.overlap_p2p": False},
    "shared memory": {"schedule.transport": "shared"},
    "planned": {"data.batching": "planned"},
    "concatenated documents": {"data.documents": "concatenate"},
    "sorted documents": {"data.documents": "sort"},
    "source weights": {"data.weights": [1.0]},
    "several sources": {"data.source": ["a.txt", "b.txt"]},
    "split sampling": {"data.sampling": "split-then-shuffle"},
    "sampling": {"data.sampling": "split-then-shuffle"},
    "nesterov": {"optimizer.name": "sgd", "optimizer.nesterov": True},
    "no momentum": {"optimizer.momentum": 0.0},
    "no barrier": {"optimizer.barrier": False},
    "muon": {"optimizer.name": "muon"},
    "on_nan": {"train.on_nan": "rollback"},
    "on_spike": {"train.on_spike": "skip"},
    "norms": {"log.norms": "layer"},
}


def problems(keys: dict[str, Any]) -> list[str]:
    try:
        load_layout("tiny", {"schedule.name": "1f1b", **keys})
    except ConfigError as error:
        return error.problems
    return []


@pytest.mark.parametrize(
    "rule", [*EXCLUSIONS, *EXCLUSIONS_OF_SCHEDULES], ids=lambda rule: f"{rule.feature} and {rule.other}"
)
def test_two_features_that_do_not_go_together_are_refused(rule: Exclusion, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 64, "vocab_size": 512, "num_attention_heads": 4, '
        '"intermediate_size": 128}'
    )
    key, end = FEATURES[rule.feature][0].split()[0], rule.reason.rpartition("}")[2]
    both = problems(
        USED[rule.feature] | USED[rule.other] | ({"model.source": str(tmp_path)} if rule.other == "source" else {})
    )
    assert any(problem.startswith(f"{key} = ") and problem.endswith(end) for problem in both), both


def test_what_slices_exclude_is_said_in_the_order_of_the_rules() -> None:
    keys = {"model.capacity_factor": 1.5, "train.compile": "blocks", "schedule.transforms": ["slices=2"]}
    found = problems({**USED["router"], **keys, "parallel.ep_blocks": 2})
    named = [problem.partition(" = ")[0] for problem in found if "slices" in problem or "slice;" in problem]
    assert named == ["model.router", "model.capacity_factor", "parallel.ep_blocks", "train.compile"]
