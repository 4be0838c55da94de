"""Replicas that start with different weights are made equal, refused, or left alone: before the first step and after a load."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipeloom as pl
from models import WIDTH, batch, mse
from pipeloom.config import load
from pipeloom.errors import DistributedError
from pipeloom.parallel.grad_norm import exact_sum
from pipeloom.parallel.mesh import Mesh
from pipeloom.parallel.sharding import ParameterSharding, Shard
from pipeloom.runtime import Layer, Pipeline, RuntimeOptions
from pipeloom.shapes.mesh import MeshShape
from pipeloom.train.optimizer import Optimizer
from processes import run_ranks

pytestmark = pytest.mark.core

S = pl.schedules


class Part(nn.Module):
    """A parameter that is cut along an axis (both parts drawn by that index alone), one that is not, and a buffer."""

    def __init__(self, seed: int, axis: Any, index: int) -> None:
        super().__init__()
        self.axis = axis
        generator = torch.Generator().manual_seed(seed)
        own = torch.Generator().manual_seed(1000 * seed + index)
        self.cut = nn.Parameter(torch.randn(1, WIDTH, generator=own))
        self.inner = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            self.inner.weight.copy_(torch.randn(WIDTH, WIDTH, generator=generator) * 0.3)
        self.register_buffer("count", torch.tensor(seed))
        self.norm = nn.LayerNorm(WIDTH)
        self.norm.register_buffer("seen", torch.full((3,), float(seed)))

    def sharding(self) -> Mapping[str, ParameterSharding]:
        return {"cut": ParameterSharding((Shard(self.axis, 0, (1, 1)),))}

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.inner(x)) + self.cut.sum() * 0


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def mesh_of(**axes: int) -> Mesh:
    mesh = Mesh.of(MeshShape(**axes))
    assert mesh is not None
    return mesh


def state(pipeline: Any) -> dict[str, list[float]]:
    return {name: value.detach().flatten().tolist() for name, value in pipeline.state_dict().items()}


def layers(rank: int, axis: str, index: int) -> list[Any]:
    """Replicated values differ on every rank, those that are cut on the other part's ranks only."""

    def build(number: int) -> nn.Module:
        part = Part(number, axis, index)
        with torch.no_grad():
            part.inner.bias.fill_(rank)
            part.norm.seen.fill_(rank)  # type: ignore[operator, union-attr]
        return part

    return [Layer(f"l{number}", lambda number=number: build(number)) for number in range(2)]


CASES: dict[str, tuple[dict[str, int], str, Any]] = {
    "dp": ({"dp": 4}, "tp", S.gpipe(1, 2)),
    "tp, dp": ({"tp": 2, "dp": 2}, "tp", S.gpipe(1, 2)),
    "ep": ({"dp": 4, "ep": 2}, "ep", S.gpipe(1, 2)),
    "pp, dp": ({"pp": 2, "dp": 2}, "tp", S.one_f_one_b(2, 2)),
    "two routes": ({"pp": 2, "dp": 2}, "tp", S.dualpipe(2, 4)),
}


def started(rank: int, init: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for case, (axes, axis, schedule) in CASES.items():
        mesh = mesh_of(**axes)
        index = getattr(mesh.place, axis)
        handler = Lines()
        logging.getLogger("pipeloom").addHandler(handler)
        options = RuntimeOptions(monitor=False, init=init)
        pipeline = Pipeline(layers(rank, axis, index), schedule, loss=mse, mesh=mesh, options=options)
        said = ""
        try:
            pipeline.evaluate(*batch(4))
        except DistributedError as error:
            said = str(error)
        found[case] = state(pipeline), index, handler.lines, said
        logging.getLogger("pipeloom").removeHandler(handler)
        pipeline.close()
    return found


def test_broadcast_is_the_default_and_said_once() -> None:
    assert RuntimeOptions().init == "broadcast"
    ranks = run_ranks(started, 4, "broadcast")
    for case in CASES:
        for rank, found in enumerate(ranks):
            values, index, lines, said = found[case]
            assert said == ""
            assert len(lines) == (rank == 0), (case, lines)
            for name, value in values.items():
                others = [
                    other[case][0][name]
                    for other in ranks
                    if name in other[case][0] and (not name.endswith("cut") or other[case][1] == index)
                ]
                assert all(other == value for other in others), (case, name)
                if name.endswith("bias") and "inner" in name:
                    holders = [r for r, other in enumerate(ranks) if name in other[case][0]]
                    firsts = (0, 2) if case == "two routes" else holders[:1]  # each layer has its own first there
                    assert value in [[float(first)] * WIDTH for first in firsts], (case, name)
                if name.endswith("cut") and case in ("tp, dp", "ep"):
                    assert value not in [other[case][0][name] for other in ranks if other[case][1] != index]
        (line,) = ranks[0][case][2]
        assert "'l0.inner.bias' and" in line, (case, line)
        assert "cut" not in line


def test_check_refuses_and_none_does_nothing() -> None:
    for found in run_ranks(started, 4, "check"):
        for case in CASES:
            assert "replicas do not start equal: 'l0.inner.bias' and" in found[case][3], (case, found[case][3])
            assert "differ between rank 0" in found[case][3]
    for rank, found in enumerate(run_ranks(started, 4, "none")):
        for values, _, lines, said in found.values():
            assert said == ""
            assert lines == []
            assert all(value == [rank] * 3 for name, value in values.items() if name.endswith("seen"))


def loaded(rank: int) -> list[Any]:
    """Equal at first, so nothing is said; different after a load; tied weights under two names with two values."""
    handler = Lines()
    logging.getLogger("pipeloom").addHandler(handler)
    mesh = mesh_of(pp=2, dp=2)
    plain = [Layer(name, lambda: nn.Linear(WIDTH, WIDTH)) for name in ("a", "b")]
    options = RuntimeOptions(monitor=False)
    tie = [("a.weight", "b.weight")]
    pipeline = Pipeline(plain, S.gpipe(2, 2), loss=mse, mesh=mesh, tied=tie, options=options)
    pipeline.step(*batch(4))
    before = len(handler.lines)
    values = {f"{layer}.{name}": float(rank) for layer in "ab" for name in ("weight", "bias")}
    pipeline.load_state_dict({n: torch.full_like(v, values[n]) for n, v in pipeline.state_dict().items()})
    pipeline.step(*batch(4))
    after = len(handler.lines)
    pipeline.step(*batch(4))
    pipeline.close()
    return [before, after, len(handler.lines), {n: v[0] for n, v in state(pipeline).items()}]


def test_after_a_load_they_are_compared_again() -> None:
    for rank, (before, after, end, values) in enumerate(run_ranks(loaded, 4)):
        assert (before, after, end) == (0, int(rank == 0), int(rank == 0))
        for name, value in values.items():
            # rank 0 is the first holder of the tied weight, and rank 2 (the second pipeline stage) of b.bias
            assert value == (0.0 if name != "b.bias" else 2.0), (rank, name)


def bf16(rank: int) -> list[float]:
    """An optimizer that has read the weights before they were made equal."""
    mesh = mesh_of(dp=2)

    def build() -> nn.Module:
        layer = nn.Linear(WIDTH, WIDTH).bfloat16()
        with torch.no_grad():
            layer.weight.fill_(1.0 + rank)
        return layer

    options = RuntimeOptions(monitor=False)
    pipeline = Pipeline([Layer("a", build)], S.gpipe(1, 2), loss=mse, mesh=mesh, options=options)
    optimizer = Optimizer(
        list(pipeline.named_parameters()), load("tiny").optimizer, pipeline.sync, pipeline.counts_in_norm
    )
    x, y = batch(4)
    pipeline.step(x.bfloat16(), y.bfloat16())
    optimizer.step(exact_sum(optimizer.squares()) ** 0.5, 1e-3)
    pipeline.close()
    return state(pipeline)["a.weight"]


def test_masters_take_the_broadcast_values() -> None:
    first, second = run_ranks(bf16, 2)
    assert first == second
    assert max(first) < 1.5
