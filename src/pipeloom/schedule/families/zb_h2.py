"""ZB-H2 (Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2.3)."""

from __future__ import annotations

from pipeloom.schedule.families.layout import require_sizes
from pipeloom.schedule.families.zb_h1 import split_one_f_one_b
from pipeloom.schedule.model import Schedule


def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """Twice 1F1B's warm-up fills the time before the first backward; rank r runs each W 2 r micro-batches late, or
    fewer where m < 2p-1: r and the micro-batches beyond p, because a W that is put off for no forward only delays the end.

    Idle inside the largest span with uniform stages: (p-1)(f+b-2w) for m >= 2p-1, 2w <= f+b and w <= f: none at f = b = w,
    where a step that ends without a barrier has no bubble. Peak activations of every rank: min(m, 2p-1) at most. Any m >= 1.
    """
    require_sizes(ranks=ranks, microbatches=microbatches)

    def shape(rank: int) -> tuple[int, int]:
        return 2 * (ranks - rank - 1), rank + min(rank, max(0, microbatches - ranks))

    return split_one_f_one_b("zb-h2", ranks, microbatches, shape)
