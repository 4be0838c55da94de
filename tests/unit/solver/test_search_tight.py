"""Searches within little more than one activation against searched orders with every backward whole, in a block or copied."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import product

import pytest

import pipeloom as pl
from pipeloom.schedule import Costs, Schedule, check, simulate
from pipeloom.schedule.families import build
from pipeloom.schedule.offload import offload
from pipeloom.schedule.transforms import merge_backward, recompute

TIMES = ((1, 1, 1), (8, 8, 6), (2, 3, 1))  # F, I, W
LIMITS = ((1 / 8, 1.125), (1 / 8, 1.25), (1 / 8, 1.5), (1 / 4, 1.25), (1 / 4, 1.5))  # kept, memory


def cells() -> list[tuple[int, int, Costs, float]]:
    """Return (ranks, micro-batches, costs, memory); times, how long R takes and what W holds change from cell to cell."""
    sizes = product((3, 4, 5, 6), (6, 10, 16), LIMITS)
    return [
        (
            ranks,
            microbatches,
            Costs(
                *TIMES[at % 3], kept=kept, held=(1.0, 0.5)[at % 2], recompute=TIMES[at % 3][0] / (1, 4, 2, 1)[at % 4]
            ),
            memory,
        )
        for at, (ranks, microbatches, (kept, memory)) in enumerate(sizes)
    ]


CELLS = cells()


def orders(ranks: int, microbatches: int, costs: Costs, moves: int) -> list[Schedule]:
    """Return an order with whole backwards for each number of micro-batches alive."""
    plain = Costs(costs.forward, costs.input_grad, costs.weight_grad)
    searched = (pl.search(ranks, microbatches, plain, alive, iterations=moves) for alive in range(2, ranks + 1))
    return [merge_backward(each.schedule) for each in searched]


def least(schedules: Iterable[Schedule], costs: Costs, memory: float) -> float:
    """Return the least makespan of those that fit the memory."""
    timelines = (simulate(each, costs) for each in schedules)
    return min((each.makespan for each in timelines if max(each.peak_memory) <= memory + 1e-9), default=math.inf)


def searched(ranks: int, microbatches: int, costs: Costs, memory: float, moves: int) -> float:
    result = pl.search(ranks, microbatches, costs, memory, iterations=moves)
    check(result.schedule)
    assert least([result.schedule], costs, memory) == result.value
    return result.value


@pytest.mark.parametrize(
    ("at", "moves"),
    [(16, 300), (19, 300), (24, 300), *(pytest.param(at, 3000, marks=pytest.mark.full) for at in range(60))],
)
def test_never_longer_than_orders_recomputed_in_blocks(at: int, moves: int) -> None:
    ranks, microbatches, costs, memory = CELLS[at]
    blocks = map(recompute, orders(ranks, microbatches, costs, moves))
    assert searched(*CELLS[at], moves) <= least(blocks, costs, memory) < math.inf


def test_one_and_a_half_activations() -> None:
    """The best order in blocks, of three micro-batches alive, takes 240."""
    assert searched(4, 6, Costs(8, 8, 6, kept=1 / 4, recompute=2), 1.5, 3000) <= 196


@pytest.mark.parametrize(("ranks", "microbatches", "held"), [(3, 6, 0.5), (4, 6, 1.0)])
def test_never_longer_than_orders_with_copies(ranks: int, microbatches: int, held: float) -> None:
    """Of all that 1F1B has alive, the inputs alone leave too little for copies: a copy takes half of F."""
    costs = Costs(8, 8, 6, kept=1 / 4, held=held, host_bandwidth=3 / 16)
    copied = (offload(each, costs, 4, 4) for each in orders(ranks, microbatches, costs, 300))
    assert searched(ranks, microbatches, costs, 1.5, 300) <= least(copied, costs, 1.5) < math.inf
    assert least([offload(build("1f1b", ranks, microbatches), costs, 4, 4)], costs, 1.5) == math.inf
