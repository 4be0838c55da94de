"""`verify` over data, tensor and sequence parallel layouts; and what it says when a sum is forgotten."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from commands import pipeloom
from paths import ROOT
from pipeloom.config import Layout, load_layout
from pipeloom.models import tied
from pipeloom.parallel.data import GradientSync
from pipeloom.parallel.mesh import Mesh
from pipeloom.parallel.sharding import ParameterSharding, Shard, shard_of
from pipeloom.runtime import grad_sync as gradients
from pipeloom.shapes.mesh import MeshShape
from pipeloom.train.report.verify import ComparedStep, compare, pipeline_step, serial_step
from processes import run_ranks

CPU = torch.device("cpu")


def test_a_sample_of_all_layouts_passes() -> None:
    """13 layouts on up to 8 processes; `pipeloom verify --matrix tests/data/verify_parallel.toml` runs them all."""
    done = pipeloom("verify", "--matrix", "tests/data/verify_parallel_quick.toml", "--json", folder=ROOT)
    report = json.loads(done.stdout)
    assert done.returncode == 0, report
    assert len(report["layouts"]) == 13
    assert not report["skipped"]
    assert all(layout["worst_error"] <= 1e-5 for layout in report["layouts"])


BASE = {"model.num_key_value_heads": 4, "schedule.microbatches": 2, "model.tie_word_embeddings": True}
SHARDED = {"parallel.dp": 2, "parallel.pp": 2, "optimizer.zero1": True, "schedule.microbatches": 4}
MUTATIONS: dict[str, dict[str, Any]] = {
    "sound": {"parallel.tp": 2, "parallel.sp": True, "parallel.dp": 2},
    "no sum over tp": {"parallel.tp": 2, "parallel.sp": True, "parallel.dp": 2},
    "no sum over dp": {"parallel.dp": 2},
    "no sum over ties": {"parallel.dp": 2},
    "shares of one replica": {"parallel.dp": 2},
    "sound slices": {"parallel.dp": 2, "parallel.pp": 2, "optimizer.zero1": True},
    "sound slices of tensor parallel layers": {"parallel.dp": 2, "parallel.tp": 2, "optimizer.zero1": True},
    "sound gathers": {**SHARDED, "schedule.name": "1f1b", "schedule.transforms": ["shard=1"]},
    "sound gathers between others": {**SHARDED, "schedule.name": "interleaved", "schedule.transforms": ["shard=1"]},
    "sound gathers of experts": {
        **SHARDED,
        "schedule.name": "zbv",
        "schedule.transforms": ["recompute", "shard=1"],
        "model.num_experts": 4,
        "parallel.ep": 2,
    },
    "sound gathers of tensor parallel layers": {
        **SHARDED,
        "schedule.name": "zbv",
        "schedule.transforms": ["shard=1"],
        "parallel.tp": 2,
        "parallel.sp": True,
    },
    "sound reductions": {**SHARDED, "schedule.name": "interleaved", "schedule.transforms": ["reduce-gradients=1"]},
    "sound reductions of experts": {
        **SHARDED,
        "schedule.name": "zbv",
        "schedule.transforms": ["reduce-gradients=3"],
        "model.num_experts": 4,
    },
    "half of a slice": {"parallel.dp": 2, "optimizer.zero1": True},
}


def layout_of(name: str) -> Layout:
    keys = {"parallel.pp": 2 if name == "no sum over ties" else 1, "schedule.name": "1f1b"}
    return load_layout("tiny", {**BASE, **keys, **MUTATIONS[name]})


def mutated(rank: int, name: str) -> list[Any] | None:
    """A step with something left out; what rank 0 finds."""
    mesh = Mesh.of(layout_of(name).mesh)
    assert mesh is not None
    if name == "no sum over tp":
        sync_finish = GradientSync.finish

        def forgotten(self: GradientSync) -> None:
            for bucket in self.buckets:
                bucket.partial = False
            sync_finish(self)

        GradientSync.finish = forgotten  # type: ignore[method-assign]
    elif name == "no sum over dp":
        start = GradientSync.begin
        GradientSync.begin = lambda self: (setattr(self, "syncing", False), start(self))[1]  # type: ignore[method-assign]
    elif name == "no sum over ties":
        gradients.ties.sum_over = lambda holders, rank, weights, parts, group: list(parts)  # type: ignore[assignment]
    elif name == "shares of one replica":
        from pipeloom.runtime import pipeline

        pipeline.sum_over_replicas = lambda weight, **_: weight
    elif name == "half of a slice":
        finish = GradientSync.finish

        def halved(self: GradientSync) -> None:
            finish(self)
            for bucket in self.buckets:
                if self.sharded:
                    bucket.part[len(bucket.part) // 2 :] = 0

        GradientSync.finish = halved  # type: ignore[method-assign]
    found = pipeline_step(layout_of(name), CPU, mesh)
    return [
        (loss, {key: None if g is None else g.numpy() for key, g in held.items()}, *rest) for loss, held, *rest in found
    ]


@pytest.mark.parametrize("name", MUTATIONS)
def test_what_is_left_out_is_seen(name: str) -> None:
    layout = layout_of(name)
    found = run_ranks(mutated, layout.world_size, name)[0]
    steps = [
        ComparedStep(loss, {key: None if g is None else torch.from_numpy(g) for key, g in held.items()}, *rest)
        for loss, held, *rest in found
    ]
    result = compare(steps, serial_step(layout, CPU), tied(layout.config.model), 1e-5)
    assert result.passed == name.startswith("sound"), (result.loss_error, max(result.errors.values()))


@pytest.mark.parametrize("wrong", ["", "value", "missing", "other rank's"])
def test_a_part_is_compared_with_its_place_in_the_whole(wrong: str) -> None:
    shape, sharding = MeshShape(1, 1, 2), ParameterSharding((Shard("tp", 0, (2, 3)),))
    whole = torch.arange(20.0).reshape(5, 4)
    steps = []
    for number in range(2):
        place = shape.place(number)
        part: Any = shard_of(whole, sharding, place._asdict()).clone()
        if number == 0 and wrong == "value":
            part[0, 0] += 1  # relative to the largest element of the other part
        if number == 1 and wrong == "missing":
            part = None
        if wrong == "other rank's":
            place = shape.place(0)
        steps.append(ComparedStep(1.0, {"cut": part}, place, {"cut": sharding}))
    result = compare(steps, ComparedStep(1.0, {"cut": whole}), (), 1e-5)
    assert result.errors["cut"] == {"": 0.0, "value": 1 / 19}.get(wrong, math.inf)
    assert result.passed == (not wrong)
