"""Interleaved 1F1B (arXiv 2104.04473) with split backward (arXiv 2401.10241): weight gradients fill the waits."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate

from pipeloom.errors import ScheduleError
from pipeloom.schedule.actions import KindName
from pipeloom.schedule.costs import Costs
from pipeloom.schedule.families.greedy import Line, NoWayOn, line_of, programs_along
from pipeloom.schedule.families.interleaved import Rounds, chunk_order, interleaved, round_sizes
from pipeloom.schedule.families.layout import Coder, warmup_then_alternate
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
    """Interleaved rounds, each B cut into I, at its place, and W, later.

    Two warm-ups are planned for: interleaved's own, 2(p-r-1) + (v-1) g on rank r, and zb-h1's way of p-r-1 + (v-1) g, as an
    input gradient comes back sooner than a whole backward. A weight gradient waits for a gap that it fits, for the moment when
    its memory is needed, or for the end. No rank holds more than interleaved's fullest rank. The shortest at `costs`
    (default 1, 1, 1, 0) is taken, of equal ones the smallest: never longer than interleaved, because W right after I in
    its order is among the candidates. Any m >= 1, with interleaved's options.
    """
    base = interleaved(ranks, microbatches, chunks, rounds, group_size)
    chosen = costs if costs is not None else Costs()
    code = Coder(base.stages, microbatches)
    programs = [[_adjacent(program, code) for program in base.codes]]
    order = chunk_order(round_sizes(ranks, microbatches, rounds, group_size), chunks)
    largest = max(round_sizes(ranks, microbatches, rounds, group_size))
    own = [_peak(program, code.stride) for program in base.codes]
    tasks = base.stages * microbatches
    if tasks <= MANY:
        low = min(max(own), (chunks - 1) * largest + ranks)
        for slope, room in ((2, own), (2, [max(own)] * ranks), (1, [low] * ranks), (1, [max(own)] * ranks)):
            words = _words(base, order, [slope * (ranks - r - 1) + (chunks - 1) * largest for r in range(ranks)])
            line = line_of(base.placement, microbatches, replace(chosen, activation=1.0, held=1.0), room)
            programs += _late(line, words, PATIENCE if tasks <= MANY // 8 else PATIENCE[-1:], code)
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
    return schedules[0] if len(schedules) == 1 else min(schedules, key=lambda schedule: _quality(schedule, chosen))


def _quality(schedule: Schedule, costs: Costs) -> tuple[float, int, int]:
    """Shorter is better; then a lower highest peak, then lower peaks. What cannot run comes last, for `check` to refuse."""
    try:
        timeline = simulate(schedule, costs)
    except ScheduleError:
        return math.inf, 0, 0
    return round(timeline.makespan, 9), max(timeline.peak_activations), sum(timeline.peak_activations)


def _words(base: Schedule, order: list[tuple[int, int]], warmups: list[int]) -> list[list[tuple[KindName, int]]]:
    """rank -> its (kind, stage) of F and I: the warm-up, then one of each in turn."""
    ranks, chunks = base.ranks, base.chunks
    words: list[list[tuple[KindName, int]]] = []
    for r, warmup in enumerate(warmups):
        forwards: list[tuple[KindName, int]] = [("F", c * ranks + r) for _, c in order]
        backwards: list[tuple[KindName, int]] = [("I", (chunks - 1 - c) * ranks + r) for _, c in order]
        words.append(list(warmup_then_alternate(forwards, backwards, warmup)))
    return words


def _late(
    line: Line, words: list[list[tuple[KindName, int]]], patience: tuple[float, ...], code: Coder
) -> list[list[list[int]]]:
    """Programs with the weight gradients put off; none where the order deadlocks."""
    made = []
    for share in patience:
        try:
            late = programs_along(line, words, share)
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
