"""Slices along the sequence: where to cut, a schedule cut in place, and one whose order is that of the slices.

A token of causal attention costs the more the later it stands, so slices that are even in tokens are uneven in time, and the
pipeline waits for the last one. `balanced_cuts` makes them even in time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from math import sqrt

from pipeloom.errors import ScheduleError, UsageError
from pipeloom.limits import require_schedule, require_whole
from pipeloom.schedule.actions import COPY_OUT, INPUT_GRADIENT
from pipeloom.schedule.check import check
from pipeloom.schedule.costs import TIME_TOLERANCE, Costs
from pipeloom.schedule.model import Schedule, of_schedule
from pipeloom.schedule.simulate import simulate

_LONGEST = 1.25
"""How much longer than micro-batches of its slices' size a schedule of slices may take: half as much again is a broken rhythm."""


@dataclass(frozen=True)
class SequenceCuts:
    """The cuts of sequences into slices.

    Attributes:
        positions: the first token of each slice, and the length of the sequence: count + 1 numbers.
        times: each slice's share of the time of a sequence.
        sizes: each slice's share of its tokens.
    """

    positions: tuple[int, ...]
    times: tuple[float, ...]
    sizes: tuple[float, ...]

    def costs(self, costs: Costs | None = None) -> Costs:
        """Return `costs` (default: `Costs()`) with these shares."""
        return replace(costs if costs is not None else Costs(), slice_times=self.times, slice_sizes=self.sizes)


def balanced_cuts(length: int, slices: int, attention: float = 0.0, multiple: int = 1) -> SequenceCuts:
    """Return the cuts that give every slice the same time, as nearly as multiples allow.

    Token t of s costs a + b t: what is the same for all tokens, and causal attention to those before it. With the share A of
    attention, the first x of a sequence take (1 - A) x + A x^2 of its time.

    Args:
        length: s, the tokens of a sequence.
        attention: A, the share of a sequence's time that attention takes, 0 to 1.
        multiple: every slice holds a multiple of so many tokens: 2 * cp * tp, so that context-parallel ranks take mirrored
            pieces of each slice, and tensor-parallel ranks equal parts of these.

    Raises UsageError for a length that is no multiple or has too few, and a share beyond 0 to 1.
    """
    _require_cuts(length, slices, attention, multiple)
    blocks = length // multiple
    ends = [_position(number / slices, attention) * blocks for number in range(slices + 1)]
    cuts = [round(end) for end in ends]
    for number in range(1, slices):  # at least one block each
        cuts[number] = min(max(cuts[number], cuts[number - 1] + 1), blocks - (slices - number))
    return _shares(tuple(multiple * cut for cut in cuts), attention)


def even_cuts(length: int, slices: int, attention: float = 0.0, multiple: int = 1) -> SequenceCuts:
    """Return cuts into slices of equally many tokens, as nearly as multiples allow; arguments and errors of `balanced_cuts`."""
    _require_cuts(length, slices, attention, multiple)
    blocks = length // multiple
    return _shares(tuple(multiple * (blocks * number // slices) for number in range(slices + 1)), attention)


def _require_cuts(length: int, slices: int, attention: float, multiple: int) -> None:
    if not 0 <= attention <= 1:
        raise UsageError(f"attention is {attention:g}; it is a share between 0 and 1")
    if slices < 1 or length % multiple or length < slices * multiple:
        nearest = max(slices, round(length / multiple)) * multiple
        raise UsageError(
            f"{length} tokens cannot be cut into {slices} slices of multiples of {multiple} tokens; nearest length: {nearest}"
        )


def _position(share: float, attention: float) -> float:
    """Return the part of a sequence that takes this share of its time."""
    rest = 1 - attention
    return 2 * share / (rest + sqrt(rest * rest + 4 * attention * share)) if share else 0.0


def _shares(positions: tuple[int, ...], attention: float) -> SequenceCuts:
    ends = [position / positions[-1] for position in positions]
    done = [(1 - attention) * end + attention * end * end for end in ends]
    times, sizes = (tuple(after - before for before, after in pairwise(values)) for values in (done, ends))
    return SequenceCuts(positions, times, sizes)


def longer_than_whole(schedule: Schedule, whole: Schedule, costs: Costs) -> str | None:
    """Return a warning where a schedule with slices takes longer than the `whole` one without, in one sentence; else None.

    Args:
        costs: of a stage and micro-batch, with the shares of the slices.
    """
    cut, plain = simulate(schedule, costs).makespan, simulate(whole, costs).makespan
    if cut <= plain + TIME_TOLERANCE:
        return None
    return (
        f"{schedule.slices} slices of unequal time take {cut:.3g} and whole sequences {plain:.3g}: the pipeline waits for the "
        "longest slice; cut where slices take the same time"
    )


@of_schedule
def cut_sequences(schedule: Schedule, slices: int) -> Schedule:
    """Return `schedule` with every action in place replaced by those of its micro-batch's slices.

    Forwards run in the order of the slices, backwards in the reverse order, pairs slice by slice. The order of the micro-batches
    stays, so every schedule can be cut; its ramps become shorter, to 1/slices of their time, and its peak is nearly the same
    number of micro-batches. `by_slices` gives an order of its own, which holds less.

    Raises UsageError for less than one slice, and for a schedule that is cut already.
    """
    require_whole("slices", slices)
    if schedule.slices > 1:
        raise UsageError(f"schedule {schedule.name} is cut into {schedule.slices} slices already")
    require_schedule(schedule.ranks, schedule.microbatches * slices, schedule.stages)
    cut = replace(schedule, slices=slices, codes=((),) * schedule.ranks)

    def cells(code: int) -> Iterator[int]:
        forward, other = divmod(code, schedule._pair_stride)
        kind = schedule.kinds[other // schedule._kind_stride]
        if kind.of_stage:
            yield other * slices
            return
        after_backward = any(need.value == INPUT_GRADIENT for need in kind.needs)
        ascending = kind.is_forward or kind.queue == COPY_OUT or (kind.vocabulary and not after_backward)
        for number in range(slices):
            second = other * slices + (number if ascending else slices - 1 - number)
            yield second if not forward else ((forward - 1) * slices + number + 1) * cut._pair_stride + second

    programs = [[cell for code in program for cell in cells(code)] for program in schedule.codes]
    return cut.with_programs(programs).with_slots({value: count * slices for value, count in schedule.slots})


@of_schedule
def by_slices(schedule: Schedule, slices: int) -> Schedule:
    """Return a schedule of m * slices micro-batches as one of m, each of whose slices takes the place of one of them.

    The slices of a micro-batch run backward in reverse, so each backward needs a later forward than before. All backwards wait
    for the fewest more forwards that this takes; where ranks have several stages, for one more if the step is then shorter. In
    the order of 1F1B the fewest are slices - 1, and rank r warms up with min(p - r - 2 + slices, m * slices) forwards, as in
    Seq1F1B (arXiv 2406.03488).

    Raises UsageError for a number of micro-batches that is no multiple of `slices`, for a micro-batch whose slices would take
    several routes, for a schedule that does not run each stage's micro-batches in order, and for one that would take much longer.
    """
    require_whole("slices", slices)
    count, rest = divmod(schedule.microbatches, slices)
    route_of = schedule.route_of[::slices]
    problem, in_place = "", f"; the transform slices={slices} cuts it in place"
    if schedule.slices > 1:
        problem = f"it is cut into {schedule.slices} already"
    elif rest:
        problem = f"its {schedule.microbatches} micro-batches are no multiple; nearest: {max(1, count) * slices}"
    elif any(route != route_of[unit // slices] for unit, route in enumerate(schedule.route_of)):
        problem = f"slices of one micro-batch would take different routes{in_place}"
    elif schedule.has_queues or schedule.stage_actions:
        problem = f"it has actions beside the computation{in_place}"
    if problem:
        raise UsageError(f"schedule {schedule.name} cannot run in the order of {slices} slices: {problem}")
    cut = replace(schedule, microbatches=count, slices=slices, route_of=route_of, codes=((),) * schedule.ranks)
    forwards = [
        [code for code in schedule._action_codes(rank) if code < schedule._kind_stride]
        for rank in range(schedule.ranks)
    ]

    def later(more: int) -> Schedule:
        """Return it with the backwards behind so many more forwards."""
        return replace(cut, codes=tuple(tuple(_behind(schedule, rank, slices, more, forwards[rank])) for rank in ranks))

    ranks = range(schedule.ranks)
    most = max(map(len, forwards))
    fewest, more = slices - 1, slices - 1
    while not _runs(later(more)):
        if more >= most:
            raise UsageError(f"schedule {schedule.name} cannot run in the order of {slices} slices{in_place}")
        fewest, more = more + 1, min(2 * more, most)
    while fewest < more:
        middle = (fewest + more) // 2
        if _runs(later(middle)):
            more = middle
        else:
            fewest = middle + 1
    # In a V the two stages of a rank alternate, and a shift by an odd number of forwards may break their rhythm.
    shifted = [later(more + 1)] if schedule.stages > schedule.ranks else []
    candidates = [later(more), *filter(_runs, shifted)]
    runs = [(simulate(each).makespan, each) for each in candidates]
    makespan, shortest = min(runs, key=lambda run: run[0])
    if makespan > _LONGEST * simulate(schedule).makespan / slices:
        raise UsageError(
            f"schedule {schedule.name} does not suit the order of slices, in which it would take longer than in place; "
            f"use the transform slices={slices}"
        )
    return shortest


def _behind(schedule: Schedule, rank: int, slices: int, more: int, forwards: list[int]) -> Iterator[int]:
    """Yield the rank's program with `more` forwards first, and each entry's forward replaced by the next one that is left."""
    upcoming = iter(forwards)
    for _ in range(more):
        yield from (code for code in [next(upcoming, None)] if code is not None)
    stride, limit = schedule._kind_stride, schedule._pair_stride
    for code in schedule.codes[rank]:
        paired = code >= limit
        forward = next(upcoming, None) if paired or code < stride else None
        backward = None
        if paired or code >= stride:
            unit = code % schedule.microbatches
            backward = code % limit - unit + unit // slices * slices + slices - 1 - unit % slices
        if forward is not None and backward is not None:
            yield (forward + 1) * limit + backward
        else:
            yield from (each for each in (forward, backward) if each is not None)


def _runs(schedule: Schedule) -> bool:
    try:
        check(schedule)
    except ScheduleError:
        return False
    return True
