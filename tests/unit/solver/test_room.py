"""Any memory that holds one micro-batch in each of a rank's stages is enough for a first answer."""

from __future__ import annotations

from random import Random

import pytest

import pipeloom as pl


@pytest.mark.parametrize("seed", range(30))
def test_an_answer_for_any_memory(seed: int) -> None:
    random = Random(f"room {seed}")
    ranks, chunks, microbatches = random.choice([2, 3, 4]), random.choice([2, 3]), random.randint(3, 9)
    stages = ranks * chunks
    costs = pl.Costs(*(tuple(random.uniform(1, 10) for _ in range(stages)) for _ in range(3)), p2p=random.uniform(0, 2))
    memory = random.uniform(chunks, stages)
    placement = random.choice(["loop", "vee", "linear"])
    found = pl.search(ranks, microbatches, costs, memory, placement=placement, chunks=chunks, iterations=0)
    pl.check(found.schedule)
    assert max(found.timeline.peak_activations) <= memory
