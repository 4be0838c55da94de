"""1F1B (PipeDream-Flush, Narayanan et al., arXiv 2006.09503)."""

from __future__ import annotations

from pipeloom.schedule.families.layout import Coder, require_sizes, warmup_then_alternate
from pipeloom.schedule.model import Schedule


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """Warm-up of min(m, p-r-1) forwards on rank r, then one forward and one backward in turn.

    Idle of every rank with uniform stages: (p-1)(f+B). Peak activations of rank r: min(m, p-r). Any m >= 1.
    """
    require_sizes(ranks=ranks, microbatches=microbatches)
    code = Coder(ranks, microbatches)
    programs = [
        warmup_then_alternate(
            [code.f(r, mb) for mb in range(microbatches)],
            [code.b(r, mb) for mb in range(microbatches)],
            ranks - r - 1,
        )
        for r in range(ranks)
    ]
    return Schedule.of_codes(programs, placement=range(ranks), microbatches=microbatches, name="1f1b")
