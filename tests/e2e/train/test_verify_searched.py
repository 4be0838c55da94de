"""Eight searched schedules with random stage costs and memory limits: `verify`, and as CSV through torch's own runtime."""

from __future__ import annotations

import contextlib
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pipeloom as pl
from pipeloom.config import load_layout
from pipeloom.measure.build import build_pipeline
from pipeloom.schedule.files import load
from pipeloom.schedule.json_form import to_json
from pipeloom.train.report.verify import make_batch, run
from processes import run_ranks

CPU = torch.device("cpu")
LAYERS = 8
PLACEMENTS = {1: ["linear"], 2: ["loop", "vee", "linear"]}


def searched(seed: int) -> tuple[pl.Schedule, float]:
    """(schedule, the memory that it was searched for), p in 2 and 4."""
    random = Random(f"searched {seed}")
    ranks, chunks = random.choice([2, 4]), random.choice([1, 2])
    microbatches, stages = random.randint(2, 9), ranks * chunks
    costs = pl.Costs(*(tuple(random.uniform(1, 10) for _ in range(stages)) for _ in range(3)), p2p=random.uniform(0, 2))
    memory = random.uniform(chunks, 1.5 * stages)
    placement = random.choice(PLACEMENTS[chunks])
    found = pl.search(ranks, microbatches, costs, memory, placement=placement, chunks=chunks, iterations=200, seed=seed)
    return found.schedule, memory


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, float]]:
    """(JSON file, memory) of each."""
    folder = tmp_path_factory.mktemp("searched")
    files = []
    for seed in range(8):
        schedule, memory = searched(seed)
        path = folder / f"{seed}.json"
        path.write_text(to_json(schedule))
        files.append((path, memory))
    return files


def verified(rank: int, files: list[Path]) -> tuple[list[float], list[int]]:
    """(the worst error of each file's layout on rank 0, else []; the runtime's peak on this rank, 0 where it takes no part)."""
    layouts = [
        load_layout(
            "tiny", {"schedule.name": str(path), "model.num_hidden_layers": LAYERS, "train.global_batch_size": 11}
        )
        for path in files
    ]
    context: Any = SimpleNamespace(
        rank=rank,
        world_size=4,
        device=CPU,
        watchdog=None,
        waiting=lambda what, phase: contextlib.nullcontext(),
        close_to_strangers=lambda: None,
    )
    results = [result for result in run(layouts, context, 1e-5) if result is not None]
    assert all(result.passed for result in results), results
    peaks = []
    for layout in layouts:
        if layout.world_size < 4:
            peaks.append(0)
            continue
        pipeline = build_pipeline(layout, CPU)
        batch = make_batch(layout)
        pipeline.step(batch.tokens, batch.targets)
        peaks.append(pipeline.peak_activations)
        pipeline.close()
    return [max(result.loss_error, *result.errors.values()) for result in results], peaks


def test_verify_passes_and_peaks_stay_within_the_memory(eight: list[tuple[Path, float]]) -> None:
    everyone = run_ranks(verified, 4, [path for path, _ in eight])
    errors, _ = everyone[0]
    assert len(errors) == 8
    assert max(errors) <= 1e-5
    counted = 0
    for at, (path, memory) in enumerate(eight):
        schedule = load(path)
        simulated = pl.simulate(schedule).peak_activations
        assert max(simulated) <= memory
        if schedule.ranks == 4:
            counted += 1
            assert tuple(peaks[at] for _, peaks in everyone) == simulated
    assert counted >= 2
