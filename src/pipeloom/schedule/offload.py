"""`offload`: the transform that copies what forwards save to host memory and back before their backwards (arXiv 2503.01328)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from itertools import count

from pipeloom.errors import ScheduleError
from pipeloom.schedule.actions import SAVED, Action, Cell, kind_of
from pipeloom.schedule.check import check
from pipeloom.schedule.costs import TIME_TOLERANCE, Costs, durations
from pipeloom.schedule.model import Schedule, made_by, of_schedule, parts
from pipeloom.schedule.simulate import simulate
from pipeloom.schedule.timeline import Timeline

_STEP = 1.01
"""How much longer than with unlimited memory the step may become by waiting for slots: fewer slots beyond it save little."""


@of_schedule
def offload(schedule: Schedule, costs: Costs | None = None) -> Schedule:
    """Return `schedule` with what forwards save copied to host memory, and back in time for their backwards.

    Copied is what is out of use for as long as both copies take at `costs`. Each copy back is placed behind the last computation
    that starts early enough for it. With the fewest slots that leave the step (nearly) as long, forwards, those of the warm-up
    above all, wait for earlier copies instead of filling the memory. Memory: with copies no longer than a forward, what two
    micro-batches save on each rank, whatever the number of ranks.

    Args:
        costs: of a stage; `Costs.host_bandwidth` gives the times of copies.
    """
    cost_model = costs if costs is not None else Costs()
    plain = simulate(schedule, cost_model)
    copy_time = _copy_times(schedule, cost_model)
    programs = [_with_copies(plain, rank, copy_time) for rank in range(schedule.ranks)]
    copied = schedule.with_programs(programs)
    if copied == schedule:
        return schedule
    unlimited = simulate(copied, cost_model)
    for slots in range(1, max(unlimited.peak_activations)):
        candidate = copied.with_slots({**dict(schedule.slots), SAVED: slots})
        try:
            check(candidate)
        except ScheduleError:
            continue
        if simulate(candidate, cost_model).makespan <= _STEP * unlimited.makespan:
            return candidate
    return copied


def _copy_times(schedule: Schedule, costs: Costs) -> Mapping[tuple[int, int], float]:
    """(stage, micro-batch) -> the time of one copy."""
    probe = schedule.with_programs([["0L0"], *([] for _ in range(schedule.ranks - 1))])  # has the tables of all kinds
    times, first = durations(probe, costs), probe.codes[0][0]
    return {
        (stage, mb): times[first + stage * schedule.microbatches + mb]
        for stage in range(schedule.stages)
        for mb in range(schedule.microbatches)
    }


def _with_copies(plain: Timeline, rank: int, copy_time: Mapping[tuple[int, int], float]) -> list[Cell]:
    """The rank's program with a copy out behind each forward, and each copy back where it ends just before it is needed."""
    schedule, starts, ends = plain.schedule, plain.starts[rank], plain.ends[rank]
    program = schedule.programs[rank]
    makes: dict[tuple[int, int], int] = {}
    uses: dict[tuple[int, int], int] = {}
    for at, cell in enumerate(program):
        for action in parts(cell):
            place = action.stage, action.microbatch
            if kind_of(action.kind).is_forward and SAVED in made_by(schedule, action):
                makes[place] = at
            elif any(need.value == SAVED and not need.step for need in kind_of(action.kind).needs):
                uses[place] = at
    # Copies back end when their backward starts, or the next one starts its copy; those out follow each other.
    latest: dict[tuple[int, int], float] = {}
    deadline = max(ends, default=0.0)
    out = 0.0
    arrived: dict[tuple[int, int], float] = {}
    for place in sorted(makes.keys() & uses.keys(), key=makes.__getitem__):
        if ends[makes[place]] + 2 * copy_time[place] <= starts[uses[place]] + TIME_TOLERANCE:
            arrived[place] = out = max(out, ends[makes[place]]) + copy_time[place]
    for place in sorted(arrived, key=uses.__getitem__, reverse=True):
        start = min(deadline, starts[uses[place]]) - copy_time[place]
        if start + TIME_TOLERANCE >= arrived[place]:
            latest[place] = deadline = start
    issues: dict[int, list[Cell]] = defaultdict(list)
    for place in sorted(latest, key=uses.__getitem__):
        issued = next(at for at in count(uses[place] - 1, -1) if starts[at] <= latest[place] + TIME_TOLERANCE)
        issues[max(issued, makes[place])].append(Action("L", *place))
    out_of = {makes[place]: Action("O", *place) for place in latest}
    cells: list[Cell] = []
    for at, cell in enumerate(program):
        cells.append(cell)
        if at in out_of:
            cells.append(out_of[at])
        cells += issues[at]
    return cells
