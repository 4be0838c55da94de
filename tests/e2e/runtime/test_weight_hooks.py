"""Weights that someone else looks at, complex weights, and compiled layers: as in one process, in every kind of backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipeloom as pl
from models import WIDTH, Block, batch, blocks, gradients, mse, serial, worst
from pipeloom.config import MeshShape
from pipeloom.parallel.mesh import Mesh
from pipeloom.runtime import Layer, LocalPipeline, Pipeline, RuntimeOptions
from pipeloom.runtime.batch import split_sizes
from pipeloom.schedule.model import Schedule
from processes import run_ranks

SPLIT = {"cooldown": "split"}
SCHEDULES = [
    pl.schedules.build("1f1b", 2, 4),
    pl.schedules.build("1f1b", 2, 4, None, SPLIT),
    pl.schedules.build("zb-h1", 2, 4),
    pl.schedules.build("zbv", 2, 4),
]


class Hooked(Block):
    """Logs what its hooks see: of the gradient on its way, and of the one that is accumulated; they change both."""

    def __init__(self, seed: int, log: list[tuple[str, float]], which: str = "both") -> None:
        super().__init__(seed)
        for name, parameter in self.named_parameters():
            self._hook(f"{seed}.{name}", parameter, log, which)

    def _hook(self, name: str, parameter: Tensor, log: list[tuple[str, float]], which: str) -> None:
        def before(gradient: Tensor) -> Tensor:
            log.append((f"{name} before", gradient.square().sum().item()))
            return 2 * gradient

        def after(parameter: Tensor) -> None:
            assert parameter.grad is not None
            log.append((f"{name} after", parameter.grad.square().sum().item()))
            parameter.grad.mul_(0.75)

        if which != "after":
            parameter.register_hook(before)
        if which != "before":
            parameter.register_post_accumulate_grad_hook(after)


def by_name(log: list[tuple[str, float]]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for name, value in log:
        found.setdefault(name, []).append(value)
    return found


def hooked_layers(count: int, log: list[tuple[str, float]], which: str = "both") -> list[Layer]:
    return [Layer(f"block{at}", lambda at=at: Hooked(at, log, which)) for at in range(count)]


@pytest.mark.parametrize("options", [{}, {"recompute": "full"}])
@pytest.mark.parametrize("which", ["before", "after", "both"])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_hooks_see_what_they_see_in_one_process(schedule: Schedule, which: str, options: dict[str, Any]) -> None:
    x, y = batch(9)
    log: list[tuple[str, float]] = []
    pipeline = LocalPipeline(
        hooked_layers(schedule.positions, log, which), schedule, loss=mse, options=RuntimeOptions(**options)
    )
    pipeline.step(x, y)
    serial_log: list[tuple[str, float]] = []
    _, want = serial(hooked_layers(schedule.positions, serial_log, which), x, y, split_sizes(9, 4))
    got, expected = by_name(log), by_name(serial_log)
    assert {name: len(values) for name, values in got.items()} == dict.fromkeys(expected, 4)
    for name, values in got.items():
        assert values == pytest.approx(expected[name], rel=1e-4), name
    assert worst(gradients(pipeline), want) <= 1e-5


def _hooked(rank: int) -> list[tuple[dict[str, list[float]], dict[str, Any]]]:
    results = []
    for shape, name in ((MeshShape(pp=2), "zb-h1"), (MeshShape(dp=2), "1f1b"), (MeshShape(dp=2), "zb-h1")):
        mesh = Mesh.of(shape)
        assert mesh is not None
        log: list[tuple[str, float]] = []
        pipeline = Pipeline(
            hooked_layers(2, log),
            pl.schedules.build(name, shape.pp, 4 // shape.dp),
            loss=mse,
            mesh=mesh,
            options=RuntimeOptions(main_gradients=True),
        )
        x, y = (part.chunk(shape.dp)[mesh.place.dp] for part in batch(8))
        pipeline.step(x, y)
        results.append((by_name(log), {key: value.tolist() for key, value in gradients(pipeline).items()}))
        pipeline.close()
    return results


def test_hooks_see_their_replicas_sum_before_it_is_reduced() -> None:
    """And what they make of it is what is summed over the replicas."""
    ranks = run_ranks(_hooked, 2)
    x, y = batch(8)
    log: list[tuple[str, float]] = []
    _, want = serial(hooked_layers(2, log), x, y, [2] * 4)
    for at in range(3):
        found: dict[str, list[float]] = {}
        for results in ranks:
            found |= results[at][1]
        if at == 0:
            seen = {name: values for results in ranks for name, values in results[at][0].items()}
            assert seen.keys() == by_name(log).keys()
            for name, values in by_name(log).items():
                assert seen[name] == pytest.approx(values, rel=1e-4), name
            total = want
        else:
            parts = [serial(hooked_layers(2, []), x[half], y[half], [2, 2])[1] for half in (slice(0, 4), slice(4, 8))]
            total = {name: (parts[0][name] + parts[1][name]) / 2 for name in want}
        assert worst({name: torch.tensor(value) for name, value in found.items()}, total) <= 1e-5


class Complex(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.inside = nn.Linear(WIDTH, WIDTH, dtype=torch.complex64)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.complex64) * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inside(x if x.is_complex() else torch.complex(x, x.cos())))


def distance(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).abs().square().mean()


def complex_layers(count: int) -> list[Layer]:
    return [Layer(f"complex{at}", lambda at=at: Complex(at)) for at in range(count)]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_complex_weights(schedule: Schedule) -> None:
    x, y = batch(9)
    layers = complex_layers(schedule.positions)
    pipeline = LocalPipeline(layers, schedule, loss=distance)
    loss = pipeline.step(x, y)
    want_loss, want = serial(layers, x, y, split_sizes(9, 4), distance)
    assert abs(loss - want_loss) <= 1e-5
    assert worst(gradients(pipeline), want) <= 1e-5


def _complex(rank: int) -> list[dict[str, Any]]:
    results = []
    for shape, name in ((MeshShape(pp=2), "zb-h1"), (MeshShape(dp=2), "zb-h1")):
        mesh = Mesh.of(shape)
        assert mesh is not None
        schedule = pl.schedules.build(name, shape.pp, 4 // shape.dp)
        options = RuntimeOptions(main_gradients=True)
        pipeline = Pipeline(complex_layers(2), schedule, loss=distance, mesh=mesh, options=options)
        x, y = (part.chunk(shape.dp)[mesh.place.dp] for part in batch(8))
        pipeline.step(x, y)
        results.append({key: torch.view_as_real(value).tolist() for key, value in gradients(pipeline).items()})
        pipeline.close()
    return results


def test_complex_weights_of_replicas_and_main_gradients() -> None:
    ranks = run_ranks(_complex, 2)
    x, y = batch(8)
    _, want = serial(complex_layers(2), x, y, [2] * 4, distance)
    for at in range(2):
        got = {name: torch.view_as_complex(torch.tensor(v)) for results in ranks for name, v in results[at].items()}
        assert worst(got, want) <= 1e-5


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_compiled_layers(schedule: Schedule, recompute: Any) -> None:
    def compiled(at: int) -> nn.Module:
        module: Any = torch.compile(Block(at), backend="aot_eager")
        return module  # type: ignore[no-any-return]

    layers = [Layer(f"block{at}", lambda at=at: compiled(at)) for at in range(schedule.positions)]
    x, y = batch(8)
    pipeline = LocalPipeline(layers, schedule, loss=mse, options=RuntimeOptions(recompute=recompute))
    for _ in range(2):
        pipeline.zero_grad()
        pipeline.step(x, y)
    _, want = serial(blocks(schedule.positions), x, y, [2] * 4)
    got = {name.replace("_orig_mod.", ""): gradient for name, gradient in gradients(pipeline).items()}
    assert worst(got, want) <= 1e-5
