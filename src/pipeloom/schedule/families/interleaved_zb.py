"""Interleaved 1F1B (arXiv 2104.04473) with split backward (arXiv 2401.10241): weight gradients fill the waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from pipeloom.errors import CapacityError
from pipeloom.limits import require_positive
from pipeloom.schedule.actions import KindName
from pipeloom.schedule.costs import Costs
from pipeloom.schedule.families.construct.layout import Coder, family, require_sizes
from pipeloom.schedule.families.construct.list_scheduling import (
    MemoryDeadlock,
    SchedulingProblem,
    programs_along,
    single_route,
)
from pipeloom.schedule.families.construct.steady import shortest
from pipeloom.schedule.families.interleaved import Rounds, interleaved, round_sequences, round_sizes
from pipeloom.schedule.model import Program, Schedule
from pipeloom.schedule.timeline import Timeline

# Shares of a weight gradient's time that a wait must have before one is computed in it; each is tried.
GAP_SHARES = (0.0, 0.5, 1.0)
# Largest S m, of the micro-batches planned, for which all warm-ups, limits on memory and shares are tried.
MOST_TASKS_WITH_VARIANTS = 5_000
# S m from which on only so many of the rounds of the usual size are planned; the steady state is repeated for the others.
MOST_TASKS_PLANNED = 40_000
ROUNDS_PLANNED = 4


@family("interleaved-zb", "interleavedzerobubble", "zbvpp", placement="loop", baseline=True, order=80)
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
    if memory is not None:
        require_positive("memory", memory)
    require_sizes(ranks=ranks, microbatches=microbatches, chunks=chunks)
    cost_model = costs if costs is not None else Costs()
    sizes = round_sizes(ranks, microbatches, rounds, group_size)
    round_size = max(sizes, key=sizes.count)
    planned = microbatches
    if ranks * chunks * microbatches > MOST_TASKS_PLANNED and not cost_model.uneven:
        planned -= max(0, sizes.count(round_size) - ROUNDS_PLANNED) * round_size
    best = None
    for size in sorted({planned, microbatches}):
        base = interleaved(ranks, size, chunks, rounds, group_size)
        schedules = [
            Schedule.of(
                programs,
                placement=base.placement,
                microbatches=size,
                name="interleaved-zb",
                options=dict(base.options) | ({} if memory is None else {"memory": memory}),
            )
            for programs in _within(
                _programs(base, round_sizes(ranks, size, rounds, group_size), cost_model), base, memory
            )
        ]
        factors = cost_model.microbatch if size == microbatches else ()
        best = shortest(schedules, microbatches, replace(cost_model, microbatch=factors), _quality, (round_size,))
        if best is not None:
            break
    return best if best is not None else schedules[0]


def _within(candidates: list[list[list[int]]], base: Schedule, memory: float | None) -> list[list[list[int]]]:
    """Return the candidates that fit `memory`. Raises CapacityError where none does."""
    if memory is None:
        return candidates
    peaks = [max(_peak(program, base._kind_stride) for program in programs) for programs in candidates]
    if min(peaks) > memory:
        raise CapacityError(
            f"memory is {memory:g}; interleaved-zb needs at least {min(peaks)} stage-micro-batches here"
        )
    return [programs for programs, peak in zip(candidates, peaks, strict=True) if peak <= memory]


def _programs(base: Schedule, sizes: list[int], costs: Costs) -> list[list[list[int]]]:
    """Return the candidates, rank -> codes, with the order of interleaved's forwards in rounds of `sizes`."""
    ranks, chunks, largest = base.ranks, base.chunks, max(sizes)
    code = Coder(base.stages, base.microbatches)
    base_peaks = [_peak(program, code.stride) for program in base.codes]
    highest = max(base_peaks)
    low = min(highest, (chunks - 1) * largest + ranks)
    # The warm-up's slope over the ranks, the limit on memory, and the share that gains most at nearly all costs.
    variants: list[tuple[int, list[int], float]] = [
        (2, base_peaks, 0.0),
        (2, [highest] * ranks, 0.0),
        (1, [low] * ranks, 1.0),
        (1, [highest] * ranks, 1.0),
    ]
    few = base.stages * base.microbatches > MOST_TASKS_WITH_VARIANTS
    candidates = [[_adjacent(program, code) for program in base.codes]]
    for slope, memory_limit, share in variants[1:3] if few else variants:
        sequences = round_sequences(ranks, chunks, sizes, slope)
        problem = single_route(
            base.placement, base.microbatches, replace(costs, activation=1.0, held=1.0), memory_limit
        )
        candidates += _late(problem, sequences, (share,) if few else GAP_SHARES, code)
    candidates.append([_lagging(word, r, code) for r, word in enumerate(sequences)])  # of the shorter warm-up
    return candidates


def _quality(timeline: Timeline, added: float) -> tuple[float, int, int]:
    """Return a key to sort by: the makespan, the highest peak, the sum of the peaks."""
    peaks = timeline.peak_activations
    return round(timeline.makespan + added, 9), max(peaks), sum(peaks)


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


def _peak(program: Sequence[int], stride: int) -> int:
    """The most stage-micro-batches alive in a program: F allocates, B and W free."""
    changes = (1, -1, 0, -1)
    return max(accumulate(changes[action // stride] for action in program))


def _adjacent(program: Program, code: Coder) -> list[int]:
    """Return the program with every B written as I W."""
    split: list[int] = []
    for action in program:
        split += [action] if action < code.stride else [action + code.stride, action + 2 * code.stride]
    return split
