"""DualPipe (DeepSeek-V3, arXiv 2412.19437, section 3.2.1)."""

from __future__ import annotations

from pipeloom.errors import UsageError
from pipeloom.schedule.families.eight_phases import EightPhases, Phases
from pipeloom.schedule.families.layout import Coder, require_sizes
from pipeloom.schedule.model import Schedule


def dualpipe(ranks: int, microbatches: int) -> Schedule:
    """Micro-batches enter from both ends: two routes, two replicas of each stage, overlapped pairs, split backward.

    Rank r holds stage r of route 0 and stage 2p-1-r, the replica p-1-r, of route 1; the first half of the micro-batches goes
    down, the second up. Idle of the worst rank with uniform stages: (p/2-1)(F&B + B - 3w), exact at f = b. Peak activations:
    p+1 on every rank; parameters twice. Needs even p, and even m of at least 2p.

    Raises:
        UsageError: p or m is not valid, with the nearest valid one.
    """
    require_sizes(ranks=ranks, microbatches=microbatches)
    if ranks % 2:
        raise UsageError(
            f"dualpipe needs an even number of ranks, not {ranks}; nearest: {max(2, ranks - 1)} or {ranks + 1}"
        )
    if microbatches < 2 * ranks or microbatches % 2:
        nearest = 2 * ranks if microbatches < 2 * ranks else f"{microbatches - 1} or {microbatches + 1}"
        raise UsageError(
            f"dualpipe at {ranks} ranks needs an even number of at least {2 * ranks} micro-batches, not {microbatches}; "
            f"nearest: {nearest}"
        )
    half, stages = microbatches // 2, 2 * ranks
    code = Coder(stages, microbatches)
    down, up = list(range(half)), list(range(half, microbatches))
    programs = []
    for rank in range(ranks):
        from_end = min(rank, ranks - 1 - rank)
        outer, inner = ranks // 2 - from_end - 1, from_end + 1
        first_half = rank < ranks // 2
        held = (rank, stages - 1 - rank)
        one = EightPhases(code, held if first_half else held[::-1], (down, up) if first_half else (up, down))
        programs.append(one.run(Phases(outer, inner, half - ranks + inner, apart=outer == 0)))
    return Schedule.of_codes(
        programs,
        placement=[*range(ranks), *reversed(range(ranks))],
        microbatches=microbatches,
        name="dualpipe",
        routes=[range(ranks), range(ranks, stages)],
        route_of=[0] * half + [1] * half,
    )
