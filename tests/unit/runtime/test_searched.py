"""Searched schedules in the one runtime: serial gradients, and no more alive than the memory they were searched for."""

from __future__ import annotations

from random import Random

import pytest

import pipeloom as pl
from models import batch, blocks, gradients, mse, serial, worst
from pipeloom.runtime import LocalPipeline
from pipeloom.runtime.batch import split_sizes


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_gradients_and_peaks(seed: int) -> None:
    random = Random(seed)
    ranks, chunks, microbatches = random.randint(2, 4), random.randint(1, 2), random.randint(2, 9)
    stages = ranks * chunks
    costs = pl.Costs(*(tuple(random.uniform(1, 10) for _ in range(stages)) for _ in range(3)), p2p=random.uniform(0, 2))
    memory = random.uniform(chunks, 1.5 * stages)
    found = pl.search(ranks, microbatches, costs, memory, chunks=chunks, iterations=100, seed=seed)
    x, y = batch(2 * microbatches + 1)
    pipeline = LocalPipeline(blocks(9), found.schedule, loss=mse)
    loss = pipeline.step(x, y)
    want_loss, want = serial(blocks(9), x, y, split_sizes(len(x), microbatches))
    assert abs(loss - want_loss) <= 1e-6
    assert worst(gradients(pipeline), want) <= 1e-6
    assert pipeline.peak_activations == found.timeline.peak_activations
    assert max(pipeline.peak_activations) <= memory
