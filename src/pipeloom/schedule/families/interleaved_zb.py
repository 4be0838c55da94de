"""Interleaved 1F1B with split backward: weight gradients leave the critical path and fill its waits."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

from pipeloom.schedule.actions import KindName
from pipeloom.schedule.costs import Costs
from pipeloom.schedule.families.greedy import NoWayOn, line_of, programs_along
from pipeloom.schedule.families.interleaved import Rounds, interleaved
from pipeloom.schedule.families.layout import Coder
from pipeloom.schedule.model import Program, Schedule
from pipeloom.schedule.simulate import simulate

PATIENCE = (0.0, 0.5, 1.0)
MANY = 40_000


def interleaved_zb(
    ranks: int,
    microbatches: int,
    chunks: int = 2,
    rounds: Rounds = "balanced",
    group_size: int | None = None,
    costs: Costs | None = None,
) -> Schedule:
    """`interleaved`'s order of forwards and backwards, each B cut into I, at its place, and W, later.

    A weight gradient waits for a gap that it fits, for the moment when its memory is needed, or for the end. Peak activations
    of a rank: interleaved's at most. Makespan at `costs` (default 1, 1, 1, 0): never above interleaved's, because W right
    after I is among the candidates. Any m >= 1, with interleaved's options.
    """
    base = interleaved(ranks, microbatches, chunks, rounds, group_size)
    chosen = costs if costs is not None else Costs()
    code = Coder(base.stages, microbatches)
    programs = [[_adjacent(program, code) for program in base.codes], *_late(base, chosen, code)]
    schedules = [
        Schedule.of_codes(
            codes,
            placement=base.placement,
            microbatches=microbatches,
            name="interleaved-zb",
            options=dict(base.options),
        )
        for codes in programs
    ]
    if len(schedules) == 1:
        return schedules[0]
    return min(schedules, key=lambda schedule: simulate(schedule, chosen).makespan)


def _late(base: Schedule, costs: Costs, code: Coder) -> list[list[list[int]]]:
    """Programs with the weight gradients put off; none where the schedule is too large to plan, or deadlocks."""
    tasks = base.stages * base.microbatches
    if tasks > MANY:
        return []
    m, stride = base.microbatches, code.stride
    kinds: tuple[KindName, KindName] = ("F", "I")
    words = [[(kinds[action // stride], action % stride // m) for action in program] for program in base.codes]
    room = [_peak(program, stride) for program in base.codes]
    line = line_of(base.placement, m, replace(costs, activation=1.0, held=1.0), room)
    made = []
    for patience in PATIENCE if tasks <= MANY // 8 else PATIENCE[-1:]:
        try:
            late = programs_along(line, words, patience)
        except NoWayOn:
            return []
        made.append([[code.of(*action) for action in program] for program in late])
    return made


def _peak(program: Program, stride: int) -> int:
    return max(accumulate(1 if action < stride else -1 for action in program))


def _adjacent(program: Program, code: Coder) -> list[int]:
    """Every B written as I W."""
    split: list[int] = []
    for action in program:
        split += [action] if action < code.stride else [action + code.stride, action + 2 * code.stride]
    return split
