"""1F1B (PipeDream-Flush, Narayanan et al., arXiv 2006.09503): as it is, with overlapped pairs (arXiv 2412.19437), and by slices
of the sequences (arXiv 2406.03488)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pipeloom.schedule.families.construct.layout import (
    Coder,
    family,
    require_sizes,
    warmup_then_alternate,
)
from pipeloom.schedule.model import Schedule
from pipeloom.schedule.slices import by_slices


@family("1f1b", "pipedreamflush", "dapple", placement="linear", baseline=True, order=20)
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
    return Schedule.of(programs, placement=range(ranks), microbatches=microbatches, name="1f1b")


def seq1f1b(ranks: int, microbatches: int, slices: int = 4) -> Schedule:
    """Seq1F1B (Sun et al., arXiv 2406.03488): 1F1B whose units are slices of the sequences, backward in reverse.

    Warm-up of min(p-r-2+k, m k) slices on rank r for k slices. Makespan with uniform stages and slices of equal time:
    (f+B)(m + (p-1)/k). Peak activations of rank r: (p-r-1)/k + 1 micro-batches of equal slices; where attention grows along the
    sequence, the first slices are longer, and as many hold more.
    """
    require_sizes(microbatches=microbatches, slices=slices)
    return replace(by_slices(one_f_one_b(ranks, microbatches * slices), slices), name="seq1f1b")


@family("1f1b-overlap", placement="linear", order=120)
def one_f_one_b_overlap(ranks: int, microbatches: int) -> Schedule:
    """Warm-up of min(m, 2(p-r-1)+1) forwards on rank r, then pairs F|B, then the backwards that are left.

    The warm-up is doubled so that the two halves of a pair do not need each other.
    With 1F1B's own warm-up p-r-1 a pair would depend on itself through the next rank, and with p-r each pair waits for the
    next rank's previous pair: a bubble of (m+p-3)(f+B). Idle with uniform stages and pairs without gain: (p-1)(f+B); when pairs
    gain, on rank p-1 only. Peak activations of rank r: min(m, 2(p-r)). Any m >= 1.
    """
    return paired_one_f_one_b(ranks, microbatches, lambda rank: 2 * (ranks - rank - 1) + 1)


def paired_one_f_one_b(ranks: int, microbatches: int, warmup: Callable[[int], int]) -> Schedule:
    """1F1B with pairs after `warmup(rank)` forwards. Not checked: with a short warm-up it deadlocks."""
    require_sizes(ranks=ranks, microbatches=microbatches)
    code = Coder(ranks, microbatches)
    programs = [
        warmup_then_alternate(
            [code.f(r, mb) for mb in range(microbatches)],
            [code.b(r, mb) for mb in range(microbatches)],
            warmup(r),
            code.pair,
        )
        for r in range(ranks)
    ]
    return Schedule.of(programs, placement=range(ranks), microbatches=microbatches, name="1f1b-overlap")
