"""A better schedule in place of one that runs: `python -m pipeloom.solver.replan` reads the request, a line of JSON, from stdin.

A process of its own at the lowest priority, so that the search takes no time from the step that is under way. It ends where its
stdin is closed, which is where the process that asks has ended, however it did.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any

from pipeloom.errors import CapacityError
from pipeloom.schedule import Costs, Schedule, check, simulate
from pipeloom.schedule.costs import TIME_TOLERANCE
from pipeloom.schedule.json_form import from_json, to_dict
from pipeloom.schedule.timeline import Objective
from pipeloom.solver.merge_backward import merge_backwards
from pipeloom.solver.search import search


def better(schedule: Schedule, costs: Costs, limits: Sequence[float], objective: Objective, seconds: float) -> Schedule:
    """Return the best schedule for `costs` on the same stages, or `schedule` itself. Backwards are split where that gains.

    Args:
        schedule: of one route, of F, B, I and W.
        limits: rank -> largest peak memory, in units of `costs.activation`.
        seconds: longest search.

    Raises UsageError for costs or limits of other sizes than the schedule's.
    """
    ranks, microbatches = schedule.ranks, schedule.microbatches
    more: dict[str, Any] = {"placement": schedule.placement, "start": schedule, "time_limit": seconds}
    try:
        result = search(ranks, microbatches, costs, limits, objective=objective, **more).schedule
    except CapacityError:
        return schedule
    other = merge_backwards(result, costs, objective)
    check(other)
    now, then = simulate(schedule, costs), simulate(other, costs)
    fits = all(peak <= limit + TIME_TOLERANCE for peak, limit in zip(then.peak_memory, limits, strict=True))
    return other if fits and then.value(objective) < now.value(objective) else schedule


def request(
    schedule: Schedule, costs: dict[str, Any], limits: Sequence[float], objective: Objective, seconds: float
) -> str:
    """Return the arguments of `better` as this module reads them; `costs` are fields of `Costs` that differ from the default."""
    values = {"costs": costs, "limits": list(limits), "objective": objective, "seconds": seconds}
    return json.dumps({"schedule": to_dict(schedule), **values})


def answer(text: str) -> dict[str, Any]:
    """Return the schedule, as JSON holds it, that answers a `request`."""
    given = json.loads(text)
    schedule = from_json(json.dumps(given["schedule"]))
    costs = Costs(**given["costs"])
    return to_dict(better(schedule, costs, given["limits"], given["objective"], given["seconds"]))


def _end_with_stdin() -> None:
    while os.read(0, 4096):  # not sys.stdin, whose lock a thread must not hold when the interpreter ends
        pass
    os._exit(1)


if __name__ == "__main__":
    os.nice(19)
    line = sys.stdin.readline()
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    print(json.dumps(answer(line)))
