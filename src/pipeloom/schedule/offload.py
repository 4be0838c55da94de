"""`offload`: the transform that copies what forwards save to host memory and back before their backwards (arXiv 2503.01328)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from pipeloom.errors import ScheduleError, UsageError
from pipeloom.schedule.actions import KEPT, SAVED, Cell, kind_of
from pipeloom.schedule.check import check
from pipeloom.schedule.costs import TIME_TOLERANCE, Costs, StageCosts
from pipeloom.schedule.model import Schedule, actions_of, of_schedule, parts
from pipeloom.schedule.simulate import simulate
from pipeloom.schedule.timeline import Timeline

_STEP = 1.01
"""How much longer than with unlimited memory the step may become by waiting for slots: fewer slots beyond it save little."""
_LETTERS = {SAVED: ("O", "L"), KEPT: ("OKEPT", "LKEPT")}
_UNIT = Costs(host_bandwidth=1.0)  # copies take as long as forwards


@of_schedule
def offload(schedule: Schedule, costs: Costs | None = None, first: int = 1, parts_of: int = 1) -> Schedule:
    """Return `schedule` with what forwards save copied to host memory, and back in time for their backwards.

    Copied is what is out of use for as long as both copies take at `costs`. Each copy back is placed behind the last computation
    that starts early enough for it. With the fewest slots that leave the step (nearly) as long, forwards, those of the warm-up
    above all, wait for earlier copies instead of filling the memory. Memory: with copies no longer than a forward, what two
    micro-batches save on each rank, whatever the number of ranks; with k parts, which are copied while their forward and
    backward still run, 1 + 1/k.

    Args:
        costs: of a stage; `Costs.host_bandwidth` gives the times of copies; default: times of 1, copies included.
        first: how many parts are copied, the first ones.
        parts_of: in how many equal parts what a forward saves is cut.

    Raises UsageError for more parts than there are.
    """
    if not 1 <= first <= parts_of:
        raise UsageError(
            f"offload: {first}/{parts_of} is no share; give 1/2 for the first of two equal parts, or 2/2 for both"
        )
    cost_model = costs if costs is not None else _UNIT
    copied = with_copies(schedule, cost_model, range(schedule.stages), first, parts_of)
    if copied == schedule:
        return schedule
    unlimited = simulate(copied, cost_model)
    least = 2 * parts_of if parts_of == 1 else parts_of + 1  # one in work, and one, or a part, that is copied
    for slots in range(least, parts_of * max(unlimited.peak_activations)):
        candidate = copied.with_slots({**dict(schedule.slots), SAVED: slots / parts_of})
        try:
            check(candidate)
        except ScheduleError:
            continue
        if simulate(candidate, cost_model).makespan <= _STEP * unlimited.makespan:
            return candidate
    return copied


def offload_kept(schedule: Schedule, costs: Costs | None = None) -> Schedule:
    """Return `schedule` with what recomputation needs copied to host memory (OKEPT), and back (LKEPT) in time for each R.

    These are the inputs of a stage, and of a slice its keys and values, which later slices then read from the host piece by
    piece. Memory: with slices of a given length and every one of them recomputed, the same for sequences of any length.

    Raises UsageError for a schedule in which nothing is recomputed in an action of its own.
    """
    if not any(action.kind == "R" for action in actions_of(schedule)):
        raise UsageError(
            "offload=kept copies what recomputation needs, and nothing is recomputed in an action of its own; put the transform "
            "recompute=whole before it"
        )
    plain = simulate(schedule, costs if costs is not None else _UNIT)
    return copies_beside(plain, range(schedule.stages), value=KEPT)


def with_copies(
    schedule: Schedule, costs: Costs | None, stages: Collection[int], first: int = 1, parts_of: int = 1
) -> Schedule:
    """Return `schedule` with the copies of `offload` for some stages, and no slots: no forward waits for a copy."""
    plain = simulate(schedule, costs if costs is not None else _UNIT)
    return copies_beside(plain, stages, first, parts_of)


def copies_beside(
    timeline: Timeline, stages: Collection[int], first: int = 1, parts_of: int = 1, value: str = SAVED
) -> Schedule:
    """Return the timeline's schedule with the copies of `offload` for some stages, where both ways fit between its times.

    On a link that several ranks share, a copy is given the time that it takes while all of them copy.

    Args:
        value: SAVED, or KEPT: that is copied.
    """
    schedule, costs = timeline.schedule, timeline.costs
    times = {
        place: time for place, time in _copy_times(schedule, costs, _LETTERS[value][1]).items() if place[0] in stages
    }
    links = costs.host_links or range(schedule.ranks)
    slowed = [costs.slowed(sum(other == link for other in links)) for link in links]
    return schedule.with_programs(
        [
            _with_copies(timeline, rank, {place: slow * time for place, time in times.items()}, first, parts_of, value)
            for rank, slow in enumerate(slowed)
        ]
    )


def offload_share(schedule: Schedule, share: str | None = None, costs: Costs | None = None) -> Schedule:
    """Return `offload` of a share written `3/4`: the first three of four equal parts; None: of the whole; or `offload_kept`."""
    if share == KEPT:
        return offload_kept(schedule, costs)
    first, _, count = (share or "1/1").partition("/")
    if not all(number.isascii() and number.isdecimal() and len(number) < 10 for number in (first, count)):
        raise UsageError(
            f"offload: {share!r:.200} is no share; give 1/2 for the first of two equal parts, 2/2 for both, or kept for what "
            "recomputation needs"
        )
    return offload(schedule, costs, int(first), int(count))


def _copy_times(schedule: Schedule, costs: Costs, letter: str) -> Mapping[tuple[int, int], float]:
    """(stage, unit) -> the time of a whole copy back."""
    times = StageCosts(costs, schedule.stages).time_of(str(kind_of(letter).time))
    return {
        (stage, unit): time * factor
        for stage, time in enumerate(times)
        for unit, factor in enumerate(costs.size_factors(schedule))
    }


def _with_copies(
    plain: Timeline, rank: int, copy_time: Mapping[tuple[int, int], float], first: int, count: int, value: str
) -> list[Cell]:
    """The rank's program with copies out behind each forward, and each copy back where it ends just before it is needed."""
    schedule, starts, ends = plain.schedule, plain.starts[rank], plain.ends[rank]
    program = schedule.programs[rank]
    makes, uses = _ends_of_use(schedule, program, value)
    letter_out, letter_in = _LETTERS[value]
    actions = [action for cell in program for action in parts(cell)]
    forward_of = {(a.stage, schedule.unit_of(a)): a for a in actions if kind_of(a.kind).is_forward}
    # Copies out follow each other, part by part; `arrived`: when each part is on the host.
    out, arrived = 0.0, dict[tuple[int, int], list[float]]()
    for place in sorted(makes.keys() & uses.keys() & copy_time.keys(), key=makes.__getitem__):
        start, end, piece = starts[makes[place]], ends[makes[place]], copy_time[place] / count
        idle = uses[place] > makes[place] + 1 and end + 2 * piece <= starts[uses[place]] + TIME_TOLERANCE
        if not idle:
            continue
        moments = []
        for part in range(1, first + 1):
            out = max(out, start + part / count * (end - start)) + piece
            moments.append(out)
        arrived[place] = moments
    # Copies back, the last part first, end where the backward needs them, or where the next one starts.
    latest: dict[tuple[int, int], list[float]] = {}
    deadline = max(ends, default=0.0)
    for place in sorted(arrived, key=uses.__getitem__, reverse=True):
        start, end, piece = starts[uses[place]], ends[uses[place]], copy_time[place] / count
        moments, until = [], deadline
        for part in range(1, first + 1):
            until = min(until, start + (1 - part / count) * (end - start)) - piece
            moments.append(until)
        if all(back + TIME_TOLERANCE >= there for back, there in zip(moments, arrived[place], strict=True)):
            latest[place], deadline = moments, until
    issues: dict[int, list[Cell]] = defaultdict(list)
    for place in sorted(latest, key=uses.__getitem__):
        for part in range(first, 0, -1):
            moment = latest[place][part - 1] + TIME_TOLERANCE
            issued = next(at for at in range(uses[place] - 1, -1, -1) if starts[at] <= moment or at == makes[place])
            issues[issued].append(forward_of[place]._replace(kind=_letter(letter_in, part, count)))
    out_of = {makes[place]: place for place in latest}
    cells: list[Cell] = []
    for at, cell in enumerate(program):
        cells.append(cell)
        if at in out_of:
            forward = forward_of[out_of[at]]
            cells += [forward._replace(kind=_letter(letter_out, part, count)) for part in range(1, first + 1)]
        cells += issues[at]
    return cells


def _ends_of_use(
    schedule: Schedule, program: Sequence[Cell], value: str
) -> tuple[dict[tuple[int, int], int], dict[tuple[int, int], int]]:
    """(stage, unit) -> the entry with the forward that makes the value; the entry that needs it."""
    makes: dict[tuple[int, int], int] = {}
    uses: dict[tuple[int, int], int] = {}
    for at, cell in enumerate(program):
        for action in parts(cell):
            place = action.stage, schedule.unit_of(action)
            if kind_of(action.kind).is_forward and value in schedule._values_of(action).makes:
                makes[place] = at
            elif any(need.value == value and not need.step for need in kind_of(action.kind).needs):
                uses[place] = at
    return makes, uses


def _letter(kind: str, part: int, count: int) -> str:
    return kind if count == 1 else f"{kind}:{part}/{count}"
