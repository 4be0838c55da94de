"""Streams delayed at random: gradients stay the same bit for bit, and do not where a wait is taken away."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from gpu_setup import Row, Setup, gradients
from gpu_travel import Delays, blocks, mse
from torch import Tensor

import pipeloom as pl
from pipeloom.runtime import LocalPipeline, RuntimeOptions

SEEDS = 50
LONGEST = 4_000_000  # cycles of the device: about 2 ms, longer than the host takes to launch a layer's kernels
FAMILIES = ("1f1b-overlap", "dualpipev")


def run(setup: Setup, family: str, steps: int = 2) -> dict[str, Tensor]:
    """The gradients of the last of a few steps.

    From the second on, memory is used anew. Each step has other data, so that what is left there from the step before, or from
    the run before, is not by chance what a read that comes too early should have found.
    """
    width = 256 if setup.cuda else 8
    generator = torch.Generator().manual_seed(0)
    schedule = pl.schedules.build(family, 2, 4)
    built = blocks(4, width, torch.float32, setup.device)
    pipeline = LocalPipeline(built, schedule, loss=mse, options=RuntimeOptions(device=setup.device))
    for _ in range(steps):
        x, y = (torch.randn(4, 64, width, generator=generator).to(setup.device) for _ in range(2))
        pipeline.step(x, y)
    setup.wait()
    return gradients(pipeline)


@contextlib.contextmanager
def delayed(setup: Setup, seed: int) -> Iterator[None]:
    draw = random.Random(seed)

    def pause() -> None:
        cycles = draw.choice((0, 0, draw.randrange(LONGEST)))
        if setup.cuda and cycles:
            torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]  # on the current stream

    Delays.on = pause
    try:
        yield
    finally:
        Delays.on = None


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def stress(setup: Setup, seeds: int = SEEDS) -> list[Row]:
    """Each stream delayed in turn over many seeds, with deterministic algorithms."""
    torch.use_deterministic_algorithms(True)
    seeds = seeds if setup.cuda else 2
    rows = []
    for family in FAMILIES:
        want = run(setup, family)
        equal = 0
        for seed in range(seeds):
            with delayed(setup, seed):
                equal += same(run(setup, family), want)
        rows.append(Row(f"{family}, streams delayed", f"{equal} of {seeds} seeds bitwise equal", "all", equal == seeds))
    return rows


def blocking(setup: Setup) -> list[Row]:
    """The same with every launch blocking, which the runner sets for this part's process."""
    return stress(setup, seeds=3)


def without_waits(setup: Setup) -> list[Row]:
    """Each wait taken away must show: else the stress test shows nothing."""
    if not setup.cuda:
        return [Row("waits taken away", "streams of a CPU have none", "needs a GPU", None)]
    torch.use_deterministic_algorithms(True)
    want = run(setup, FAMILIES[0], steps=3)

    def nothing(*arguments: Any) -> None:
        pass

    def for_all_of(stream: Any, other: Any) -> None:
        """`wait_stream` as it is; torch's own calls `wait_event`."""
        other.record_event().wait(stream)

    rows = []
    removed: dict[str, list[tuple[Any, str, Callable[..., None]]]] = {
        "wait_event": [(torch.cuda.Stream, "wait_event", nothing), (torch.cuda.Stream, "wait_stream", for_all_of)],
        "wait_stream": [(torch.cuda.Stream, "wait_stream", nothing)],
        "record_stream": [(Tensor, "record_stream", nothing)],
    }
    for name, patches in removed.items():
        seen = 0
        for seed in range(10):
            with contextlib.ExitStack() as stack:
                stack.enter_context(delayed(setup, seed))
                for owner, method, other in patches:
                    stack.enter_context(patch.object(owner, method, other))
                seen += not same(run(setup, FAMILIES[0], steps=3), want)
        rows.append(Row(f"without {name}", f"{seen} of 10 seeds differ", "at least one", seen > 0))
    return rows
