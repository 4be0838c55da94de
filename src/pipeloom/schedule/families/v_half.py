"""V-Half (Qi et al., Pipeline Parallelism with Controllable Memory, arXiv 2405.15362)."""

from __future__ import annotations

from pipeloom.schedule.costs import Costs
from pipeloom.schedule.families.building_block import BuildingBlock
from pipeloom.schedule.families.v_shape import v_schedule
from pipeloom.schedule.model import Schedule


def v_half(ranks: int, microbatches: int, costs: Costs | None = None) -> Schedule:
    """Half of 1F1B's activations on a V placement, for a larger bubble.

    Makespan bubble at unit costs, even p >= 4 and m = 3p: (3p-7)/2 in full-rank units (a fit). Peak activations: p+2 of a
    stage at most for even p, (p+2)/2 full-rank, and p+1 for odd p. Any m >= 1. `costs` place the weight gradients; default
    1, 1, 1, 0.
    """
    blocks = [BuildingBlock((2, 1, 2, 1), turns) for turns in ((0, 3, 1), (1, 3, 0), (0, 1, 0), (0, 0, 1))]
    return v_schedule("v-half", (ranks, microbatches), costs, blocks, 2 * (ranks // 2) + 2)
