"""ZB-V (Qi et al., arXiv 2401.10241, section 6, and 2405.15362): zero bubble on a V placement."""

from __future__ import annotations

from pipeloom.schedule.costs import Costs
from pipeloom.schedule.families.building_block import Block
from pipeloom.schedule.families.v_shape import v_schedule
from pipeloom.schedule.model import Schedule


def zbv(ranks: int, microbatches: int, costs: Costs | None = None) -> Schedule:
    """Stages r and 2p-1-r on rank r, B split: zero bubble inside every span at f = b = w for m >= 2p-1.

    Makespan bubble at unit costs: p-1 in stage units, (p-1)/2 in full-rank units. Peak activations: 2p of a stage at most, as
    much as 1F1B's p on rank 0. Any m >= 1. `costs` place the weight gradients; default 1, 1, 1, 0.
    """
    blocks = [Block((3, 3, 3, 3), (0, 0, 0)), Block((3, 3, 3, 3), (1, 0, 0))]
    return v_schedule("zbv", (ranks, microbatches), costs, blocks, 2 * ranks)
