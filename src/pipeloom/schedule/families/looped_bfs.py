"""Breadth-first looped pipeline (Lamy-Poirier, arXiv 2211.05953)."""

from __future__ import annotations

from pipeloom.schedule.families.construct.layout import Coder, family, require_sizes
from pipeloom.schedule.model import Schedule
from pipeloom.schedule.placement import loop


@family("looped-bfs", "bfs", "breadthfirst", placement="loop", order=40)
def looped_bfs(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Looped placement; all forwards chunk by chunk, then all backwards, last chunk first.

    Idle of every rank with uniform stages: (p-1)(f+B) in stage units for m >= p, and (v-1)(p-m)(f+B) more for m < p.
    Peak activations: v m on every rank. Any m >= 1.
    """
    require_sizes(ranks=ranks, microbatches=microbatches, chunks=chunks)
    code = Coder(ranks * chunks, microbatches)
    programs = [
        [
            *(code.f(c * ranks + r, mb) for c in range(chunks) for mb in range(microbatches)),
            *(code.b(c * ranks + r, mb) for c in reversed(range(chunks)) for mb in range(microbatches)),
        ]
        for r in range(ranks)
    ]
    return Schedule.of(
        programs,
        placement=loop(ranks, chunks),
        microbatches=microbatches,
        name="looped-bfs",
        options={"chunks": chunks},
    )
