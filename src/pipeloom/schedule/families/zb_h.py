"""ZB-H1 and ZB-H2 (Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, sections 2.2 and 2.3)."""

from __future__ import annotations

from collections.abc import Callable

from pipeloom.schedule.families.construct.layout import Coder, family, require_sizes
from pipeloom.schedule.model import Schedule


@family("zb-h1", placement="linear", order=50)
def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """1F1B with B split into I and W; rank r runs each W r micro-batches late, and the last r at the end.

    Idle inside the largest span with uniform stages: (p-1)(f+b-w) for m >= p and w <= min(f, b). Peak activations of every
    rank: min(m, p) at most. Any m >= 1.
    """
    require_sizes(ranks=ranks, microbatches=microbatches)
    return split_one_f_one_b("zb-h1", ranks, microbatches, lambda rank: (ranks - rank - 1, rank))


@family("zb-h2", placement="linear", order=60)
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
    return Schedule.of(programs, placement=range(ranks), microbatches=microbatches, name=name)
