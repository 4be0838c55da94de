"""The decoder with experts under overlapped pairs: bitwise one action after the other, in every way of running it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import pipeloom as pl
from models import gradients
from pipeloom.config import ModelSection, load
from pipeloom.models import layers, token_loss
from pipeloom.models.gate import gates_of, take_loads
from pipeloom.parallel.dispatch import ExpertParallel
from pipeloom.parallel.mesh import Mesh
from pipeloom.runtime import LocalPipeline, RuntimeOptions
from pipeloom.schedule.model import Schedule
from pipeloom.schedule.transforms import unpair
from pipeloom.shapes.mesh import MeshShape
from processes import run_ranks

LENGTH, ROWS = 8, 7
SHAPES: list[dict[str, Any]] = [
    {"router": "softmax", "num_shared_experts": 1, "aux_loss_coef": 0.1, "z_loss_coef": 0.01},
    {
        "router": "gshard",
        "capacity_factor": 1.2,
        "dropout": 0.1,
        "num_hidden_layers": 4,
        "moe_layer_freq": (0, 1, 1, 0),
    },
]
OPTIONS = [RuntimeOptions(), RuntimeOptions(recompute="full")]


def schedules() -> list[Schedule]:
    build = pl.schedules.build
    return [build("1f1b-overlap", 1, 3), build("interleaved-overlap", 2, 4, 2)]


def shape_of(changes: dict[str, Any]) -> ModelSection:
    small = {"num_hidden_layers": 2, "num_experts": 4, "moe_intermediate_size": 24, "hidden_size": 32}
    return load("tiny", {f"model.{key}": value for key, value in {**small, **changes}.items()}).model


def one_step(
    shape: ModelSection, schedule: Schedule, options: RuntimeOptions, expert: ExpertParallel
) -> tuple[float, dict[str, torch.Tensor], list[Any], float]:
    pipeline = LocalPipeline(
        layers(shape, 5, torch.float32, "cpu", None, expert), schedule, loss=token_loss(shape), options=options
    )
    generator = torch.Generator().manual_seed(7 + expert.axis.index)
    tokens, targets = torch.randint(0, 256, (2, ROWS, LENGTH), generator=generator)
    loss = pipeline.step(tokens, targets).item()
    loads = [take_loads(gate).tolist() for gate in gates_of(pipeline.modules.values())]
    stood = pipeline.exposed or 0.0
    return loss, gradients(pipeline), loads, stood


def _both_ways(rank: int, world: int, levels: bool, chunks: int) -> list[str]:
    """What differs between pairs and one action after the other; with two levels, from the flat exchange too."""
    mesh = Mesh.of(MeshShape(dp=world, ep=world, ep_nodes=2 if levels else 1))
    assert mesh is not None
    flat = ExpertParallel(mesh.ep, 2 if levels else 1, chunks=chunks)
    expert = replace(flat, inside=mesh.inside, across=mesh.across) if levels else flat
    differences = []
    for changes in SHAPES[: 1 if levels else None]:
        shape = shape_of(changes)
        for schedule in schedules():
            for options in OPTIONS[: 1 if levels else None]:
                label = f"{changes['router']} {schedule.name} {options}"
                found = one_step(shape, schedule, options, expert)
                want = one_step(shape, unpair(schedule), options, expert)
                if found[0] != want[0] or found[2] != want[2]:
                    differences.append(f"{label}: loss {found[0]} {want[0]}, loads {found[2]} {want[2]}")
                if found[1].keys() != want[1].keys():
                    differences.append(f"{label}: gradients of other weights")
                differences += [f"{label}: {k}" for k, g in found[1].items() if not torch.equal(g, want[1][k])]
                if levels:
                    other = one_step(shape, schedule, options, flat)[1]
                    differences += [f"{label}, flat: {k}" for k, g in found[1].items() if not torch.equal(g, other[k])]
                if not found[3] > 0:
                    differences.append(f"{label}: no communication was waited for")
    return differences


@pytest.mark.parametrize(
    ("world", "levels", "chunks"),
    [
        (2, False, 1),
        pytest.param(4, True, 1, marks=pytest.mark.full),
        pytest.param(2, False, 3, marks=pytest.mark.full),
        (4, True, 4),
    ],
)
def test_pairs_are_bitwise_one_after_the_other(world: int, levels: bool, chunks: int) -> None:
    for differences in run_ranks(_both_ways, world, world, levels, chunks):
        assert differences == []
