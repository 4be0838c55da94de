"""The search over cuts: costs of stages from those of layers, and the cut that brute force finds."""

from __future__ import annotations

import pytest

import pipeloom as pl
from pipeloom.errors import CapacityError, UsageError
from pipeloom.schedule import Costs
from pipeloom.solver.cuts import cut_costs, search_cuts

HEAD = (1.0, 1.0, 1.0, 1.0, 1.5)  # four blocks and a head
LAYERS = Costs(HEAD, HEAD, HEAD, activation=(1, 1, 1, 1, 0.5))


def test_stages_have_the_sums_of_their_layers() -> None:
    layers = Costs((1, 2, 3), 1, 1, activation=(2, 4, 4), held=(0.5, 1, 0), kept=0.25, recompute=(1, 1, 2))
    costs = cut_costs(
        Costs(
            **{
                **vars(layers),
                "bytes": {"saved": (1, 2, 4), "layer": (1, 2, 3), "forward": (5, 4, 6)},
                "parts": {"norms": 0.5},
            }
        ),
        (2, 1),
    )
    assert (costs.forward, costs.input_grad, costs.recompute) == ((3, 3), (2, 1), (2, 2))
    assert (costs.activation, costs.held, costs.kept) == ((6, 4), (5 / 6, 0), (0.25, 0.25))
    assert dict(costs.bytes) == {"forward": (5, 6), "layer": (2, 3), "saved": (3, 4)}
    assert dict(costs.parts) == {"norms": (1, 0.5)}


def test_the_best_cut_is_that_of_brute_force() -> None:
    """Within four blocks in flight the cut with the least bound is not the best; two with larger bounds are not searched."""
    outcome = search_cuts(5, 2, 2, LAYERS, 4, iterations=30)
    values = {(a, 5 - a): pl.search(2, 2, cut_costs(LAYERS, (a, 5 - a)), 4, iterations=30).value for a in range(1, 5)}
    assert outcome.result.value == min(values.values()) == values[outcome.cut] < values[3, 2]
    assert outcome.lower_bound <= outcome.result.value
    assert (outcome.searched, outcome.cuts) == (2, 4)


@pytest.mark.parametrize(
    ("layers", "costs", "memory", "error", "words"),
    [
        (1, Costs(), None, UsageError, "layers is 1, fewer than the 2 stages; nearest: 2"),
        (4, LAYERS, None, UsageError, "forward has 5 values and the model 4 layers"),
        (5, Costs(pair=1), None, UsageError, "pair belongs to stages"),
        (5, LAYERS, 1.0, CapacityError, "no cut of 5 layers was found to fit it"),
    ],
)
def test_bad_input(layers: int, costs: Costs, memory: float | None, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        search_cuts(layers, 2, 2, costs, memory, iterations=0)
