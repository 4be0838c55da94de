"""GPipe (Huang et al., arXiv 1811.06965), also called AFAB or F-then-B."""

from __future__ import annotations

from pipeloom.schedule.families.construct.layout import Coder, family, require_sizes
from pipeloom.schedule.model import Schedule


@family("gpipe", "afab", "allforwardallbackward", "fthenb", placement="linear", order=10)
def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards.

    Idle of every rank with uniform stages: (p-1)(f+B). Peak activations: m on every rank. Any m >= 1.
    """
    require_sizes(ranks=ranks, microbatches=microbatches)
    code = Coder(ranks, microbatches)
    order = range(microbatches)
    programs = [[*(code.f(r, mb) for mb in order), *(code.b(r, mb) for mb in order)] for r in range(ranks)]
    return Schedule.of(programs, placement=range(ranks), microbatches=microbatches, name="gpipe")
