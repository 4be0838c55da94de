"""Full garbage collections come at fixed steps, and leave alone what was there after the first step."""

from __future__ import annotations

import contextlib
import gc
import weakref
from types import SimpleNamespace
from typing import Any

import torch

from pipeloom.config import load_layout
from pipeloom.measure.build import build_pipeline
from pipeloom.train.loop import Trainer
from pipeloom.train.observers import StepObserver, observers
from pipeloom.train.tuning import EVERY_STEPS, GarbageCollection

CPU = torch.device("cpu")


class Cycle:
    """Refers to itself: reference counts never free it."""

    def __init__(self) -> None:
        self.self = self


def old_cycle() -> weakref.ref[Cycle]:
    """Return a weak reference to garbage that only a full collection frees."""
    cycle = Cycle()
    gc.collect()
    return weakref.ref(cycle)


def test_full_collections_come_every_so_many_steps() -> None:
    (row,) = (row for row in observers(load_layout("tiny").config, first=7) if row.name == "garbage collection")
    assert [step for step in range(7, 3 * EVERY_STEPS) if row.due(step)] == [7, EVERY_STEPS, 2 * EVERY_STEPS]


def test_what_the_first_one_leaves_is_collected_by_the_second() -> None:
    with GarbageCollection() as garbage:
        garbage.collect()
        found = old_cycle()
        assert found() is not None
        garbage.collect()
        assert found() is None


def test_the_heap_is_trimmed_with_each_but_the_first() -> None:
    trimmed: list[int] = []
    with GarbageCollection(lambda: trimmed.append(1)) as garbage:
        for _ in range(3):
            garbage.collect()
    assert len(trimmed) == 2


def test_what_is_there_after_the_first_step_is_set_aside_until_the_end() -> None:
    gc.unfreeze()
    before, frozen = old_cycle(), gc.get_freeze_count()
    with contextlib.suppress(ValueError), GarbageCollection() as garbage:
        garbage.collect()
        assert gc.get_freeze_count() > frozen
        assert before() is None  # garbage is not set aside
        raise ValueError
    assert gc.get_freeze_count() == 0


def test_a_trainer_does_so() -> None:
    layout = load_layout("tiny", {"parallel.pp": 1, "parallel.dp": 1, "train.steps": 2})
    context: Any = SimpleNamespace(rank=0, device=CPU, flags=0, waiting=None)
    gc.unfreeze()
    frozen: list[int] = []
    row = StepObserver("count", lambda step: frozen.append(gc.get_freeze_count()))
    trainer = Trainer(layout.config, build_pipeline(layout, CPU), context, None, observers=[row])
    trainer.train(torch.randint(0, 256, (20_000,)))
    assert frozen[0] < frozen[1]
    assert gc.get_freeze_count() == 0


def test_what_another_froze_stays_frozen() -> None:
    """A fork must not collect what it inherited: its end may wait for a thread that the fork does not have."""
    gc.freeze()
    try:
        with GarbageCollection() as garbage:
            garbage.collect()
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
