"""Tensors by name and losses on several stages between processes: both transports over gloo, shared memory, replicas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from named_models import CASES, data, plain

import pipeloom as pl
from models import gradients, worst
from pipeloom.mesh_shape import MeshShape
from pipeloom.parallel.mesh import Mesh
from pipeloom.runtime import Pipeline, RuntimeOptions
from pipeloom.runtime.batch import split_sizes
from processes import run_ranks


OPTIONS: list[dict[str, Any]] = [
    {"transport": "individual"},
    {"transport": "individual", "receive_depth": 1, "overlap_p2p": False},
    {"transport": "batched"},
    {"transport": "batched", "shapes": "each"},
    {"transport": "shared", "checksum": True},
]
RUNS = [
    ("gpt", "interleaved", 0),
    ("gpt", "zbv", 2),
    ("u-net", "interleaved", 2),
    ("u-net", "zbv", 1),
    ("residual stream", "zbv", 3),
    ("residual stream", "interleaved", 4),
    ("two towers", "dualpipe", 2),
    ("two towers", "1f1b", 0),
    ("heads", "zbv", 0),
    ("heads", "dualpipe", 4),
]


def differences(name: str, schedule: pl.Schedule, options: RuntimeOptions, mesh: Any = None) -> list[float]:
    """How far two steps and an evaluation of this rank are from one process."""
    case = CASES[name]
    parts = 1 if mesh is None else mesh.shape.dp
    part = 0 if mesh is None else mesh.place.dp
    rows = 2 * schedule.microbatches + 1
    x, y, keywords = data(case, rows * parts)
    mine = slice(part * rows, (part + 1) * rows)
    pipeline = Pipeline(case.layers(), schedule, loss=case.loss, options=replace(options, seed=3), mesh=mesh)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, {key: value.detach() for key, value in pipeline.state_dict().items()})
    state = {key: value for each in everyone for key, value in each.items()}
    want_loss, want, terms = plain(case, state, x, y, keywords, split_sizes(rows, schedule.microbatches) * parts)
    found = []
    given = x[mine], y[mine]
    named = {key: value[mine] for key, value in keywords.items()}
    for _ in range(2):
        pipeline.zero_grad()
        found.append(abs(pipeline.step(*given, **named).item() - want_loss))
        own = gradients(pipeline)
        found.append(worst(own, {key: want[key] for key in own}))
        found += [abs(pipeline.loss_terms[key].item() - value) for key, value in terms.items()]
    found.append(abs(pipeline.evaluate(*given, **named).item() - want_loss))
    found += [abs(pipeline.loss_terms[key].item() - value) for key, value in terms.items()]
    pipeline.close()
    return found


def two_ranks(rank: int) -> list[tuple[str, float]]:
    torch.manual_seed(0)
    found = []
    for name, family, option in RUNS:
        schedule = pl.schedules.build(family, 2, 4)
        found.append((f"{name} {family} {option}", max(differences(name, schedule, RuntimeOptions(**OPTIONS[option])))))
    return found


def test_two_processes() -> None:
    for each in run_ranks(two_ranks, 2, timeout=240.0):
        assert [words for words, error in each if not error <= 1e-5] == []


def four_ranks(rank: int) -> list[tuple[str, float]]:
    """Four stages in four processes; then two pipelines side by side, data-parallel and tensor-parallel."""
    torch.manual_seed(0)
    found = []
    for option in (0, 2):
        error = max(differences("u-net", pl.schedules.build("zb-h1", 4, 8), RuntimeOptions(**OPTIONS[option])))
        found.append((f"u-net {option}", error))
    for shape in (MeshShape(pp=2, dp=2), MeshShape(pp=2, tp=2)):
        for name in ("heads", "residual stream"):
            error = max(differences(name, pl.schedules.build("1f1b", 2, 4), RuntimeOptions(), Mesh.of(shape)))
            found.append((f"{name} {shape}", error))
    return found


def test_four_processes() -> None:
    for each in run_ranks(four_ranks, 4, timeout=240.0):
        assert [words for words, error in each if not error <= 1e-5] == []


def disagree(rank: int) -> str:
    layers = CASES["heads"].layers()
    if rank:
        term = layers[1].losses["one"]
        layers[1] = replace(layers[1], losses={"one": replace(term, weight=0.5)})
    try:
        Pipeline(layers, pl.schedules.build("1f1b", 2, 4), loss=CASES["heads"].loss)
    except pl.PipeloomError as error:
        return str(error)
    return ""


@pytest.mark.core
def test_ranks_with_other_weights_of_a_loss_are_refused() -> None:
    for words in run_ranks(disagree, 2):
        assert "losses of layers: {'one': 0.3, 'two': 2.0, 'three': 0.25} on rank 0" in words
