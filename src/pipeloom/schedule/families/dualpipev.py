"""DualPipeV: DualPipe (arXiv 2412.19437) cut in half (Sea AI Lab and DeepSeek, 2025)."""

from __future__ import annotations

from pipeloom.errors import UsageError
from pipeloom.schedule.families.eight_phases import EightPhases, Phases
from pipeloom.schedule.families.layout import Coder, require_sizes
from pipeloom.schedule.model import Schedule
from pipeloom.schedule.placement import vee


def dualpipev(ranks: int, microbatches: int) -> Schedule:
    """DualPipe's phases on a V placement: stages r and 2p-1-r on rank r, one route, no replicas.

    Idle of the worst rank with uniform stages: (p-1)(F&B + B - 3w) in stage units, exact at f = b. Peak activations: 2p+1 on
    every rank (p + 1/2 full-rank). Needs m >= 2p.

    Raises:
        UsageError: m < 2p, with the nearest valid one.
    """
    require_sizes(ranks=ranks, microbatches=microbatches)
    if microbatches < 2 * ranks:
        raise UsageError(
            f"dualpipev at {ranks} ranks needs at least {2 * ranks} micro-batches, not {microbatches}; nearest: {2 * ranks}"
        )
    code = Coder(2 * ranks, microbatches)
    jobs = list(range(microbatches))
    programs = []
    for rank in range(ranks):
        phases = Phases(ranks - rank - 1, rank + 1, microbatches - 2 * ranks + rank + 1, apart=rank == ranks - 1)
        programs.append(EightPhases(code, (rank, 2 * ranks - 1 - rank), (jobs, jobs)).run(phases))
    return Schedule.of_codes(
        programs,
        placement=vee(ranks),
        microbatches=microbatches,
        name="dualpipev",
    )
