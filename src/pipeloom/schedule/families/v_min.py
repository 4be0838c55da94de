"""V-Min (Qi et al., Pipeline Parallelism with Controllable Memory, arXiv 2405.15362)."""

from __future__ import annotations

from pipeloom.schedule.costs import Costs
from pipeloom.schedule.families.building_block import BuildingBlock
from pipeloom.schedule.families.v_shape import v_schedule
from pipeloom.schedule.model import Schedule


def v_min(ranks: int, microbatches: int, costs: Costs | None = None) -> Schedule:
    """A third of 1F1B's activations on a V placement, for a bubble that can exceed 1F1B's.

    Makespan bubble at unit costs, even p and m = 3p, in full-rank units: at most 2p-2.5 (2p-3.5 when 6 divides p;
    a fit, tested for p up to 16). Peak activations: 2 floor((p+4)/3) of a stage at most. Any m >= 1. `costs` place the
    weight gradients; default 1, 1, 1, 0.
    """
    blocks = [BuildingBlock((1, 1, 1, 1), turns) for turns in ((0, 0, 0), (0, 2, 0), (0, 4, 0))]
    return v_schedule("v-min", (ranks, microbatches), costs, blocks, 2 * ((ranks + 4) // 3))
