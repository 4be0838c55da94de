"""ZB-V (Qi et al., arXiv 2401.10241, section 6, and 2405.15362): zero bubble on a V placement."""

from __future__ import annotations

from pipeloom.schedule.costs import Costs
from pipeloom.schedule.families.building_block import BuildingBlock
from pipeloom.schedule.families.v_shape import v_schedule
from pipeloom.schedule.model import Schedule
from pipeloom.schedule.timeline import Objective


def zbv(ranks: int, microbatches: int, costs: Costs | None = None, objective: Objective = "makespan") -> Schedule:
    """Stages r and 2p-1-r on rank r, B split: zero bubble inside every span at f = b = w for m >= 2p-1.

    Makespan bubble at unit costs: p-1 in stage units, (p-1)/2 in full-rank units. Peak activations: 2p of a stage at most, as
    much as 1F1B's p on rank 0. Any m >= 1.

    Args:
        costs: the costs that the schedule is planned for; default 1, 1, 1, 0.
        objective: "makespan", for a step that ends in a barrier, or "span", the largest span of a rank, for one that does not.

    Raises:
        UsageError: another objective.
    """
    blocks = [BuildingBlock((3, 3, 3, 3), (0, 0, 0)), BuildingBlock((3, 3, 3, 3), (1, 0, 0))]
    options = {} if objective == "makespan" else {"objective": objective}
    return v_schedule("zbv", (ranks, microbatches), costs, blocks, 2 * ranks, objective, rounds=True, options=options)
