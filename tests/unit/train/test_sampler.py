"""The sampler: which items each step sees, for any number of replicas, from any step on."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.config import load_layout
from pipeloom.errors import ConfigError
from pipeloom.train.data.batches import Batches, Sampler

ORDERS = ["shuffle-then-split", "split-then-shuffle"]


@st.composite
def samplers(draw: Any) -> tuple[int, int, int, int, str, str]:
    """(items, rows, replicas, seed, order, remainder), all of them possible."""
    replicas = draw(st.sampled_from([1, 2, 3, 4]))
    rows = replicas * draw(st.integers(1, 5))
    order = draw(st.sampled_from(ORDERS))
    remainder = draw(st.sampled_from(["pad", "drop"]))
    least = max(rows if remainder == "drop" else 1, replicas if order == "split-then-shuffle" else 1)
    return draw(st.integers(least, 40)), rows, replicas, draw(st.integers(0, 3)), order, remainder


@given(samplers())
@settings(deadline=None)
def test_an_epoch_has_every_item_as_often_as_the_sizes_allow(sizes: Any) -> None:
    items, rows, replicas, _, order, remainder = sizes
    sampler = Sampler(*sizes)
    steps = sampler.steps_per_epoch
    assert steps == (items // rows if remainder == "drop" else -(-items // rows))
    for epoch in (0, 2):
        parts = {
            replica: torch.cat([sampler.part(epoch * steps + at, replica) for at in range(steps)]).tolist()
            for replica in range(replicas)
        }
        assert {len(part) for part in parts.values()} == {steps * rows // replicas}
        counts = Counter(item for part in parts.values() for item in part)
        assert set(counts) <= set(range(items))
        if remainder == "drop":
            assert max(counts.values()) == 1
        elif order == "shuffle-then-split":
            assert len(counts) == items
            assert max(counts.values()) - min(counts.values()) <= 1
        else:
            assert len(counts) == items
        if order == "split-then-shuffle":
            assert all(item % replicas == replica for replica, part in parts.items() for item in part)


@given(samplers(), st.integers(0, 30))
@settings(deadline=None)
def test_a_step_is_the_same_whichever_steps_came_before(sizes: Any, step: int) -> None:
    fresh, used = Sampler(*sizes), Sampler(*sizes)
    for earlier in range(step):
        used.batch(earlier)
    assert torch.equal(fresh.batch(step), used.batch(step))
    joined = torch.cat([fresh.part(step, replica) for replica in range(sizes[2])])
    assert torch.equal(joined, fresh.batch(step))


@given(samplers(), st.integers(0, 12))
@settings(deadline=None)
def test_a_resumed_run_of_other_replicas_sees_the_same_batches(sizes: Any, step: int) -> None:
    items, rows, _, seed, _, remainder = sizes
    batches = [
        Sampler(items, rows, replicas, seed, "shuffle-then-split", remainder).batch(step)
        for replicas in range(1, rows + 1)
        if rows % replicas == 0
    ]
    assert all(torch.equal(batch, batches[0]) for batch in batches)


def test_membership_changes_by_epoch_or_stays() -> None:
    def seen(order: Any, epoch: int) -> set[int]:
        sampler = Sampler(32, 8, 2, 0, order, "drop")
        steps = range(epoch * sampler.steps_per_epoch, (epoch + 1) * sampler.steps_per_epoch)
        return {item for step in steps for item in sampler.part(step, 0).tolist()}

    assert seen("split-then-shuffle", 0) == seen("split-then-shuffle", 1) == set(range(0, 32, 2))
    assert seen("shuffle-then-split", 0) != seen("shuffle-then-split", 1)
    first, second = (Sampler(32, 8, 2, 0, "split-then-shuffle", "drop").part(step, 0) for step in (0, 4))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("remainder", ["pad", "drop"])
def test_a_data_set_smaller_than_the_world(remainder: Any) -> None:
    sampler = Sampler(3, 8, 8, 0, "shuffle-then-split", remainder)
    parts = [sampler.part(0, replica).tolist() for replica in range(8)]
    assert [len(part) for part in parts] == [1] * 8
    assert Counter(item for part in parts for item in part) in (Counter(a * 3 + b * 3 + c * 2) for a, b, c in _orders())
    with pytest.raises(ConfigError, match="no text is left to train on"):
        Sampler(0, 8, 8, 0, "shuffle-then-split", "drop")
    with pytest.raises(ConfigError, match="3 windows cannot be split over 8 replicas"):
        Sampler(3, 8, 8, 0, "split-then-shuffle", "pad")


def _orders() -> list[tuple[list[int], list[int], list[int]]]:
    return [([0], [1], [2]), ([0], [2], [1]), ([1], [2], [0])]


def test_windows_of_an_epoch_cover_the_text_once() -> None:
    text = torch.arange(161, dtype=torch.uint8)
    overrides = {"train.seq_len": 8, "train.global_batch_size": 4, "data.sampling": "shuffle-then-split"}
    config = load_layout("tiny", {**overrides, "schedule.microbatches": 2}).config
    batches = Batches(text, config, 2)
    starts = [row[0].item() for step in range(5) for row in batches.of_step(step).tokens]
    assert sorted(starts) == list(range(0, 160, 8))
    assert starts != sorted(starts)
    batch = batches.of_step(7)
    assert torch.equal(batch.targets, batch.tokens + 1)
    assert torch.equal(batch.part(1, 2).tokens, batch.tokens[2:])
