"""The overlapped pair: the same numbers as one action after the other, in every schedule, and what happens if it stalls."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import pipeloom as pl
from dying import run_until_dead
from models import gradients, mse
from pair_schedules import data, split
from pipeloom.parallel.mesh import PipelineMesh
from pipeloom.runtime import LocalPipeline, Pipeline, RuntimeOptions
from pipeloom.schedule.actions import Pair
from pipeloom.schedule.model import Schedule
from pipeloom.schedule.transforms import unpair
from pipeloom.shapes.cut import even_sizes
from processes import run_ranks, wait_for
from segmented import AllToAll, expert_layers

EXPERTS = 2
LAYERS = 5


def searched() -> Schedule:
    """Two chunks a rank, pairs of F and I, weight gradients wherever they fit."""
    costs = pl.Costs(all_to_all=0.4)
    return pl.search(ranks=2, microbatches=5, costs=costs, chunks=2, pairs=True, iterations=60, seed=1).schedule


def schedules() -> dict[str, Schedule]:
    build = pl.schedules.build
    return {
        "1f1b-overlap without a pipeline": build("1f1b-overlap", 1, 4),
        "interleaved-overlap without a pipeline": build("interleaved-overlap", 1, 3, 2),
        "1f1b-overlap": build("1f1b-overlap", 2, 5),
        "interleaved-overlap": build("interleaved-overlap", 2, 5, 2),
        "dualpipev": build("dualpipev", 2, 5),
        "dualpipe": build("dualpipe", 2, 6),
        "searched": searched(),
        "pairs of F and I": split(build("1f1b-overlap", 2, 5)),
    }


@dataclass
class Found:
    """What a process found in a step; arrays, which cross to the test's own process whole."""

    loss: float
    gradients: dict[str, np.ndarray]
    peaks: Any
    exposed: list[float]


def one_step(schedule: Schedule, group: Any, seed: int, rows: int) -> Found:
    pipeline = LocalPipeline(expert_layers(LAYERS, EXPERTS, group), schedule, loss=mse)
    loss = pipeline.step(*data(seed, rows))
    exposed = [sum(each.exposed.values()) for each in pipeline.stats if each.exposed is not None]
    return Found(loss.item(), arrays(pipeline), pipeline.peak_activations, exposed)


def arrays(pipeline: Any) -> dict[str, np.ndarray]:
    return {name: gradient.numpy() for name, gradient in gradients(pipeline).items()}


def same(found: Found, other: Found) -> bool:
    """Loss and every gradient bitwise equal."""
    return (
        found.loss == other.loss
        and found.gradients.keys() == other.gradients.keys()
        and all(np.array_equal(g, other.gradients[name]) for name, g in found.gradients.items())
    )


def _all_schedules(rank: int, rows: int) -> dict[str, tuple[Found, Found]]:
    group = dist.group.WORLD
    return {
        name: (one_step(schedule, group, rank, rows), one_step(unpair(schedule), group, rank, rows))
        for name, schedule in schedules().items()
    }


def serial(rows: int, count: int) -> tuple[list[float], dict[str, np.ndarray]]:
    """One process that holds every expert, over both ranks' data: the ranks' losses, and the sum of the gradients."""
    layers = expert_layers(LAYERS, EXPERTS, None)
    modules = [layer() for layer in layers]
    losses = []
    for seed in range(EXPERTS):
        total = torch.zeros(())
        x, y = data(seed, rows)
        sizes = even_sizes(rows, count)
        for part, target in zip(x.split(sizes), y.split(sizes), strict=True):
            for module in modules:
                part = module(part)
            loss = mse(part, target) * (target.numel() / y.numel())
            loss.backward()
            total += loss.detach()
        losses.append(total.item())
    found = {
        f"{layer.name}.{name}": parameter.grad.numpy()
        for layer, module in zip(layers, modules, strict=True)
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    return losses, found


def worst(found: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> float:
    assert found.keys() == want.keys()
    return max(float(abs(found[k] - want[k]).max() / abs(want[k]).max()) for k in want)


def joined(results: list[Found]) -> dict[str, np.ndarray]:
    """Sums of the ranks' gradients; an expert's is its own rank's, over both ranks' tokens."""
    names = {name for result in results for name in result.gradients}
    return {name: sum(r.gradients[name] for r in results if name in r.gradients) for name in names}  # type: ignore[misc]


@pytest.mark.parametrize("rows", [13])
def test_an_overlapped_pair_is_the_two_one_after_the_other_bitwise(rows: int) -> None:
    """Loss and every gradient of each schedule, over two processes with an expert each; and those of one process."""
    results = run_ranks(_all_schedules, EXPERTS, rows)
    for name, schedule in schedules().items():
        assert any(isinstance(cell, Pair) for program in schedule.programs for cell in program), name
        losses, want = serial(rows, schedule.microbatches)
        for rank, result in enumerate(results):
            found, one_by_one = result[name]
            assert same(found, one_by_one), name
            assert abs(found.loss - losses[rank]) <= 1e-6, name
            assert found.peaks == pl.simulate(schedule).peak_activations, name
            assert len(found.exposed) == schedule.ranks, name
            assert min(found.exposed) >= 0 < max(found.exposed), name
        assert worst(joined([result[name][0] for result in results]), want) <= 1e-5, name


def _one_sends_never(rank: int, folder: Path) -> None:
    """Rank 1 does not come to its third dispatch, and ends once rank 0 has said what it waits for."""
    calls = 0
    start = AllToAll.start

    def late(self: AllToAll, values: Any) -> Any:
        nonlocal calls
        calls += self.name == "dispatch"
        if rank and calls == 3:
            wait_for(lambda: "waits for the " in (folder / "0.err").read_text())
            os._exit(0)
        return start(self, values)

    AllToAll.start = late  # type: ignore[method-assign]
    layers = expert_layers(2, EXPERTS, dist.group.WORLD)
    mesh = PipelineMesh.of([rank])
    options = RuntimeOptions(timeout=120.0 if rank else 6.0)
    pipeline = Pipeline(layers, pl.schedules.build("1f1b-overlap", 1, 3), loss=mse, mesh=mesh, options=options)
    pipeline.step(*data(0, 6))


def test_a_dispatch_that_never_comes_is_reported(tmp_path: Path) -> None:
    ends = run_until_dead(_one_sends_never, 2, tmp_path, tmp_path)
    assert ends[0].code == 6
    assert "waits for the " in ends[0].words, ends[0].words
    assert "of its expert group" in ends[0].words
