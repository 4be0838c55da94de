"""Interleaved 1F1B (arXiv 2104.04473) with split backward (arXiv 2401.10241): weight gradients fill the waits."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace
from itertools import accumulate

from pipeloom.errors import CapacityError, ScheduleError, UsageError
from pipeloom.schedule.actions import KindName
from pipeloom.schedule.costs import Costs
from pipeloom.schedule.families.greedy import MemoryDeadlock, SchedulingProblem, programs_along, single_route
from pipeloom.schedule.families.interleaved import Rounds, chunk_order, interleaved, round_sizes
from pipeloom.schedule.families.layout import Coder, warmup_then_alternate
from pipeloom.schedule.model import Program, Schedule
from pipeloom.schedule.simulate import simulate

# Shares of a weight gradient's time that a wait must have before one is computed in it; each is tried.
GAP_SHARES = (0.0, 0.5, 1.0)
# Largest S m for which more than I W in the place of B is tried; above an eighth of it, only the last of GAP_SHARES.
MOST_TASKS_WITH_VARIANTS = 40_000


def interleaved_zb(
    ranks: int,
    microbatches: int,
    chunks: int = 2,
    rounds: Rounds = "balanced",
    group_size: int | None = None,
    costs: Costs | None = None,
    memory: float | None = None,
) -> Schedule:
    """Interleaved rounds, each B cut into I, at its place, and W, later.

    Two warm-ups are tried: interleaved's own, 2(p-r-1) + (v-1) g on rank r, and p-r-1 + (v-1) g, as in zb-h1, because an
    input gradient arrives sooner than a whole backward. A weight gradient waits for a gap that it fits, for the moment when
    its memory is needed, or for the end. No rank holds more than interleaved's fullest rank. The shortest at `costs`
    (default 1, 1, 1, 0) is returned, of equal ones the one with the lowest peak. It is never longer than interleaved, because W
    right after I in its order is among the candidates; so is zb-h1's order of W, r input gradients late on rank r. Any m >= 1,
    with interleaved's options.

    Args:
        memory: the most stage-micro-batches alive on a rank; None: as many as interleaved's fullest rank holds.

    Raises:
        CapacityError: no plan fits the memory.
    """
    if memory is not None and (isinstance(memory, bool) or not isinstance(memory, (int, float)) or not memory > 0):
        raise UsageError(f"memory is {memory!r:.200}; it must be a number above 0")
    base = interleaved(ranks, microbatches, chunks, rounds, group_size)
    cost_model = costs if costs is not None else Costs()
    code = Coder(base.stages, microbatches)
    programs = [[_adjacent(program, code) for program in base.codes]]
    order = chunk_order(round_sizes(ranks, microbatches, rounds, group_size), chunks)
    largest = max(round_sizes(ranks, microbatches, rounds, group_size))
    base_peaks = [_peak(program, code.stride) for program in base.codes]
    tasks = base.stages * microbatches
    if tasks <= MOST_TASKS_WITH_VARIANTS:
        low = min(max(base_peaks), (chunks - 1) * largest + ranks)
        for slope, memory_limit in (
            (2, base_peaks),
            (2, [max(base_peaks)] * ranks),
            (1, [low] * ranks),
            (1, [max(base_peaks)] * ranks),
        ):
            sequences = _sequences(
                base, order, [slope * (ranks - r - 1) + (chunks - 1) * largest for r in range(ranks)]
            )
            problem = single_route(
                base.placement, microbatches, replace(cost_model, activation=1.0, held=1.0), memory_limit
            )
            programs += _late(
                problem, sequences, GAP_SHARES if tasks <= MOST_TASKS_WITH_VARIANTS // 8 else GAP_SHARES[-1:], code
            )
        programs.append([_lagging(word, r, code) for r, word in enumerate(sequences)])  # of the shorter warm-up
    if memory is not None:
        peaks = [max(_alive(program, code.stride) for program in codes) for codes in programs]
        programs = [codes for codes, peak in zip(programs, peaks, strict=True) if peak <= memory]
        if not programs:
            raise CapacityError(
                f"memory is {memory:g}; interleaved-zb needs at least {min(peaks)} stage-micro-batches here"
            )
    options = dict(base.options) | ({} if memory is None else {"memory": memory})
    schedules = [
        Schedule.of_codes(
            codes,
            placement=base.placement,
            microbatches=microbatches,
            name="interleaved-zb",
            options=options,
        )
        for codes in programs
    ]
    return schedules[0] if len(schedules) == 1 else min(schedules, key=lambda schedule: _quality(schedule, cost_model))


def _quality(schedule: Schedule, costs: Costs) -> tuple[float, int, int]:
    """Return a key to sort by: the makespan, the highest peak, the sum of the peaks. A schedule that cannot run comes last."""
    try:
        timeline = simulate(schedule, costs)
    except ScheduleError:
        return math.inf, 0, 0
    return round(timeline.makespan, 9), max(timeline.peak_activations), sum(timeline.peak_activations)


def _sequences(base: Schedule, order: list[tuple[int, int]], warmups: list[int]) -> list[list[tuple[KindName, int]]]:
    """rank -> its (kind, stage) of F and I: the warm-up, then one of each in turn."""
    ranks, chunks = base.ranks, base.chunks
    sequences: list[list[tuple[KindName, int]]] = []
    for r, warmup in enumerate(warmups):
        forwards: list[tuple[KindName, int]] = [("F", c * ranks + r) for _, c in order]
        backwards: list[tuple[KindName, int]] = [("I", (chunks - 1 - c) * ranks + r) for _, c in order]
        sequences.append(list(warmup_then_alternate(forwards, backwards, warmup)))
    return sequences


def _late(
    problem: SchedulingProblem, sequences: list[list[tuple[KindName, int]]], patience: tuple[float, ...], code: Coder
) -> list[list[list[int]]]:
    """Programs with the weight gradients deferred; none where the order deadlocks."""
    variants = []
    for share in patience:
        try:
            late = programs_along(problem, sequences, share)
        except MemoryDeadlock:
            return []
        variants.append([[code.of(*action) for action in program] for program in late])
    return variants


def _lagging(word: list[tuple[KindName, int]], lag: int, code: Coder) -> list[int]:
    """The word's F and I, and after each I the W of the I that is `lag` earlier (as in zb-h1, with lag r on rank r)."""
    done: dict[tuple[KindName, int], int] = {}
    program: list[int] = []
    pending: deque[int] = deque()
    for kind, stage in word:
        mb = done[kind, stage] = done.get((kind, stage), -1) + 1
        program.append(code.of(kind, stage, mb))
        if kind == "I":
            pending.append(code.w(stage, mb))
            if len(pending) > lag:
                program.append(pending.popleft())
    return [*program, *pending]


def _peak(program: Program, stride: int) -> int:
    return max(accumulate(1 if action < stride else -1 for action in program))


def _alive(program: list[int], stride: int) -> int:
    """The most stage-micro-batches alive in a program of F, I and W."""
    return max(accumulate(1 if action < stride else -(action >= 3 * stride) for action in program))


def _adjacent(program: Program, code: Coder) -> list[int]:
    """Return the program with every B written as I W."""
    split: list[int] = []
    for action in program:
        split += [action] if action < code.stride else [action + code.stride, action + 2 * code.stride]
    return split
