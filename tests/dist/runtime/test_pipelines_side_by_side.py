"""Pipelines side by side: data-parallel replicas with different data, against one process that sees all of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

import pipeloom as pl
from models import batch, blocks, gradients, mse, serial, worst
from pipeloom.mesh_shape import MeshShape
from pipeloom.parallel.mesh import Mesh
from pipeloom.runtime import Pipeline, RuntimeOptions
from processes import run_ranks

pytestmark = pytest.mark.core


S = pl.schedules
BOUND = 2e-6


@dataclass(frozen=True)
class Case:
    """A schedule, on a mesh of replicas whose micro-batches have these rows."""

    name: str
    schedule: pl.Schedule
    shape: MeshShape
    rows: tuple[tuple[int, ...], ...]
    transport: Literal["auto", "individual", "batched"] = "auto"
    tied: tuple[tuple[str, ...], ...] = ()


def uneven(replicas: int, microbatches: int) -> tuple[tuple[int, ...], ...]:
    """Rows of every replica's micro-batches: no two replicas have as many."""
    return tuple(tuple(1 + (mb + 2 * replica) % 3 for mb in range(microbatches)) for replica in range(replicas))


TIED = (("block0.linear.weight", "block3.linear.weight"), ("block1.norm.weight", "block2.norm.weight"))
CASES = [
    Case("1f1b", S.one_f_one_b(2, 3), MeshShape(2, 2), uneven(2, 3)),
    Case("interleaved", S.interleaved(2, 5, 2), MeshShape(2, 2), uneven(2, 5)),
    Case("zb-h1", S.zb_h1(2, 4), MeshShape(2, 2), uneven(2, 4)),
    Case("zbv tied", S.zbv(2, 5), MeshShape(2, 2), uneven(2, 5), tied=TIED),
    Case("tied", S.interleaved(2, 3, 2), MeshShape(2, 2), uneven(2, 3), tied=TIED),
    Case("two routes", S.dualpipe(2, 4), MeshShape(2, 2), uneven(2, 4)),
    Case("pp 1", S.one_f_one_b(1, 3), MeshShape(1, 4), uneven(4, 3)),
    Case("batched", S.one_f_one_b(2, 3), MeshShape(2, 2), uneven(2, 3), "batched"),
    Case("individual", S.zb_h1(2, 3), MeshShape(2, 2), uneven(2, 3), "individual"),
]


def data(case: Case) -> list[tuple[Tensor, Tensor]]:
    """Each replica's batch."""
    return [batch(sum(rows), seed=replica + 1) for replica, rows in enumerate(case.rows)]


def reference(case: Case, steps: int = 1) -> tuple[float, dict[str, Tensor]]:
    """One process, over all replicas' micro-batches; gradients of tied weights are summed under all their names."""
    parts = data(case)
    sizes = [size for rows in case.rows for size in rows]
    x, y = (torch.cat([part[at] for part in parts]) for at in (0, 1))
    modules = [layer() for layer in layers(case)]
    for names in case.tied:
        first, *others = [(int(n[5]), n.split(".", 1)[1]) for n in names]
        shared = modules[first[0]].get_parameter(first[1])
        for block, path in others:
            home, leaf = path.split(".")
            setattr(modules[block].get_submodule(home), leaf, shared)
    for _ in range(steps):
        loss, _ = serial([lambda module=module: module for module in modules], x, y, sizes)
    found = {f"block{at}.{name}": p.grad for at, module in enumerate(modules) for name, p in module.named_parameters()}
    return loss.item(), {name: gradient for name, gradient in found.items() if gradient is not None}


def layers(case: Case) -> Any:
    return blocks(4 if case.schedule.positions < 4 else case.schedule.positions)


def run_case(case: Case) -> dict[str, Any]:
    """One step, two steps that are reduced once, and an evaluation on this rank."""
    mesh = Mesh.of(case.shape)
    assert mesh is not None
    options = RuntimeOptions(monitor=False, transport=case.transport, microbatch_sizes=case.rows[mesh.place.dp])
    pipeline = Pipeline(layers(case), case.schedule, loss=mse, mesh=mesh, tied=case.tied, options=options)
    x, y = data(case)[mesh.place.dp]
    loss = pipeline.step(x, y).item()
    first = {name: g.numpy() for name, g in gradients(pipeline).items()}
    evaluated = pipeline.evaluate(x, y).item()
    pipeline.zero_grad()
    with pipeline.no_sync():
        pipeline.step(x, y)
        alone = {name: g.numpy() for name, g in gradients(pipeline).items()}
    pipeline.step(x, y)
    second = {name: g.numpy() for name, g in gradients(pipeline).items()}
    pipeline.step(x, y)
    third = {name: g.numpy() for name, g in gradients(pipeline).items()}
    pipeline.close()
    return {"loss": loss, "evaluated": evaluated, "first": first, "alone": alone, "second": second, "third": third}


def all_cases(rank: int) -> list[dict[str, Any]]:
    return [run_case(case) for case in CASES]


def test_replicas_equal_one_process() -> None:
    everyone = run_ranks(all_cases, 4)
    for case, reports in zip(CASES, zip(*everyone, strict=True), strict=True):
        want_loss, want = reference(case)
        for report in reports:
            assert abs(report["loss"] / want_loss - 1) < BOUND, case.name
            assert abs(report["evaluated"] / want_loss - 1) < BOUND, case.name
            got = {key: torch.from_numpy(value) for key, value in report["first"].items()}
            assert worst(got, {key: want[key] for key in got}) < BOUND, case.name
            for key, times in (("second", 2), ("third", 3)):
                several = {name: torch.from_numpy(value) / times for name, value in report[key].items()}
                assert worst(several, {name: want[name] for name in several}) < 2 * BOUND, (case.name, key)
            alone = {key: torch.from_numpy(value) for key, value in report["alone"].items()}
            assert worst(alone, {key: want[key] for key in alone}) > 1e-2, case.name  # nothing was summed yet
        assert len({report["loss"] for report in reports}) == 1
        assert len({name for report in reports for name in report["first"]}) >= len(want) - len(case.tied)
