"""The period: the time from step to step when steps follow one another without a barrier."""

from __future__ import annotations

from pipeloom.schedule.costs import Costs
from pipeloom.schedule.model import Schedule
from pipeloom.schedule.simulate import run_once


def period(schedule: Schedule, costs: Costs | None = None, limit: int = 64, *, overlap_p2p: bool = True) -> float:
    """Limit of end(k+1) - end(k) when every rank starts step k+1 as soon as it has finished its own step k.

    The step is a max-plus linear map of the ranks' clocks, so its growth settles into a cycle (Baccelli et al.,
    Synchronization and Linearity, chapter 3); a few walks find it. After `limit` walks without a cycle: the mean growth of
    their second half.
    """
    cost_model = costs if costs is not None else Costs()
    history = [[0.0] * schedule.ranks]
    for _ in range(limit):
        run = run_once(schedule, cost_model, history[-1], overlap_p2p=overlap_p2p)
        history.append([ends[-1] if ends else clock for ends, clock in zip(run.ends, history[-1], strict=True)])
        for back in range(1, min(5, len(history))):
            growth = [now - then for now, then in zip(history[-1], history[-1 - back], strict=True)]
            if max(growth) - min(growth) <= 1e-9 * max(1.0, max(growth)):
                return round(max(growth) / back, 9)
    half = len(history) // 2
    return max(now - then for now, then in zip(history[-1], history[half], strict=True)) / (len(history) - 1 - half)
