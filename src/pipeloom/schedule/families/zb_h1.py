"""ZB-H1 (Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2.2)."""

from __future__ import annotations

from collections.abc import Callable

from pipeloom.schedule.families.layout import Coder, require_sizes
from pipeloom.schedule.model import Schedule


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """1F1B with B split into I and W; rank r runs each W r micro-batches late, and the last r at the end.

    Idle inside the largest span with uniform stages: (p-1)(f+b-w) for m >= p and w <= min(f, b). Peak activations of every
    rank: min(m, p) at most. Any m >= 1.
    """
    require_sizes(ranks=ranks, microbatches=microbatches)
    return split_one_f_one_b("zb-h1", ranks, microbatches, lambda rank: (ranks - rank - 1, rank))


def split_one_f_one_b(name: str, ranks: int, microbatches: int, shape: Callable[[int], tuple[int, int]]) -> Schedule:
    """Warm-up forwards, then F I W in turn. `shape(rank)`: (warm-up, by how many micro-batches each W is late)."""
    code = Coder(ranks, microbatches)
    programs = []
    for r in range(ranks):
        warmup, late = shape(r)
        warmup = min(warmup, microbatches)
        program = [code.f(r, mb) for mb in range(warmup)]
        for mb in range(microbatches):
            if warmup + mb < microbatches:
                program.append(code.f(r, warmup + mb))
            program.append(code.i(r, mb))
            if mb >= late:
                program.append(code.w(r, mb - late))
        program += [code.w(r, mb) for mb in range(max(0, microbatches - late), microbatches)]
        programs.append(program)
    return Schedule.of_codes(programs, placement=range(ranks), microbatches=microbatches, name=name)
