"""Tensor, data and pipeline parallel together, with dropout, label smoothing and tied weights: serial gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import pipeloom as pl
from layouts import LENGTH, model, worst
from pipeloom.models import layers, tied, token_loss
from pipeloom.ops.layer import MicrobatchContext
from pipeloom.parallel.mesh import Mesh
from pipeloom.parallel.sharding import join
from pipeloom.parallel.tensor import TensorParallel
from pipeloom.runtime import Pipeline, RuntimeOptions
from pipeloom.shapes.mesh import MeshShape
from pipeloom.traces.measured import step_time, time_spent
from processes import run_ranks

SHAPE = model(num_hidden_layers=6, tie_word_embeddings=True, dropout=0.1)
SMOOTHING, ROWS, MICROBATCHES = 0.1, 12, 4


class Case(NamedTuple):
    mesh: MeshShape
    schedule: str
    sequence: bool
    recompute: Any = "none"


CASES = [
    Case(MeshShape(pp=2, tp=2), "zb-h1", True, "full"),
    Case(MeshShape(pp=2, tp=2), "zbv", False),
    Case(MeshShape(pp=2, tp=2), "zbv", True),
    Case(MeshShape(dp=2, tp=2), "1f1b", True),
    Case(MeshShape(tp=4), "1f1b", True, frozenset({"model.layers.1"})),
]


def data() -> Tensor:
    """Tokens and targets."""
    return torch.randint(0, SHAPE.vocab_size, (2, ROWS, LENGTH), generator=torch.Generator().manual_seed(4))


def work(rank: int) -> list[tuple[float, dict[str, tuple[Any, Any]], pl.Timeline]]:
    results = []
    for case in CASES:
        mesh = Mesh.of(case.mesh)
        assert mesh is not None
        tensor = TensorParallel(mesh.tp, case.sequence)
        pipeline = Pipeline(
            layers(SHAPE, 5, tensor=tensor),
            pl.schedules.build(case.schedule, case.mesh.pp, MICROBATCHES // case.mesh.dp),
            loss=token_loss(SHAPE, SMOOTHING, tensor),
            mesh=mesh,
            tied=tied(SHAPE),
            options=RuntimeOptions(recompute=case.recompute),
        )
        tokens, targets = data().chunk(case.mesh.dp, 1)[mesh.place.dp]
        loss = pipeline.step(tokens, targets)
        gradients = {name: (pipeline.layouts[name], p.grad.numpy().copy()) for name, p in pipeline.named_parameters()}
        results.append((loss.item(), gradients, pipeline.timeline()))
        pipeline.close()
    return results


def serial() -> tuple[float, dict[str, Tensor]]:
    built = {layer.name: layer() for layer in layers(SHAPE, 5)}
    built["head"].lm_head.weight = built["model.embed_tokens"].weight
    loss_of, total = token_loss(SHAPE, SMOOTHING), 0.0
    for at, (x, targets) in enumerate(data().chunk(MICROBATCHES, 1)):
        for name, module in built.items():
            x = (
                module(x, MicrobatchContext(0, at, 1.0, at * len(x), len(x)))
                if name.startswith("model.layers")
                else module(x)
            )
        loss = loss_of(x, targets) / MICROBATCHES
        loss.backward()
        total += loss.item()
    return total, {f"{name}.{inner}": p.grad for name, m in built.items() for inner, p in m.named_parameters()}


def test_every_axis_together_has_serial_gradients() -> None:
    results = run_ranks(work, 4)
    want_loss, want = serial()
    del want["head.lm_head.weight"]  # the embedding's
    for at, case in enumerate(CASES):
        losses = {rank[at][0] for rank in results}
        assert len(losses) == 1
        assert abs(losses.pop() - want_loss) <= 1e-6 * want_loss, case
        found: dict[str, Tensor] = {}
        for name in want:
            copies: dict[tuple[int, ...], list[Tensor]] = {}
            for rank, each in enumerate(results):
                if name in each[at][1]:
                    sharding, gradient = each[at][1][name]
                    place = (case.mesh.place(rank).tp,) if sharding.shards else ()
                    copies.setdefault(place, []).append(torch.from_numpy(gradient))
            assert all(torch.equal(other, same[0]) for same in copies.values() for other in same), (case, name)
            found[name] = join({place: same[0] for place, same in copies.items()}, sharding)
        assert worst(found, want) <= 1e-5, case
        for each in results:
            accounted(each[at][2], case)


def accounted(timeline: pl.Timeline, case: Case) -> None:
    """The communications of each kind that the layout has were measured, and each rank's row adds up to the step."""
    for row, exposed in zip(time_spent([timeline]), timeline.exposed, strict=True):
        assert sum(row.values()) == pytest.approx(step_time(timeline), abs=1e-7)
        assert min(row.values()) > -1e-7
        assert row["tp"] > 0 == row["all-to-all"]
        assert exposed.after.keys() == {"p2p", "dp"}
        assert row["dp"] > 0
        assert (row["computation"], row["tp"]) < (timeline.makespan, timeline.makespan)
