"""Interleaved 1F1B (arXiv 2104.04473) with overlapped pairs (arXiv 2412.19437), as Megatron-Core hides all-to-all."""

from __future__ import annotations

from pipeloom.schedule.families.interleaved import Rounds, chunk_order, round_sizes
from pipeloom.schedule.families.layout import Coder, require_sizes, warmup_then_pairs
from pipeloom.schedule.model import Schedule
from pipeloom.schedule.placement import loop


def interleaved_overlap(
    ranks: int,
    microbatches: int,
    chunks: int = 2,
    rounds: Rounds = "balanced",
    group_size: int | None = None,
) -> Schedule:
    """`interleaved` with one more warm-up forward on every rank, its steady F and B run as pairs.

    Idle with uniform stages and pairs without gain: interleaved's. Peak activations: interleaved's + 1, at most m v.
    """
    require_sizes(ranks=ranks, microbatches=microbatches, chunks=chunks)
    sizes = round_sizes(ranks, microbatches, rounds, group_size)
    code = Coder(ranks * chunks, microbatches)
    order = chunk_order(sizes, chunks)
    programs = []
    for r in range(ranks):
        forwards = [code.f(c * ranks + r, mb) for mb, c in order]
        backwards = [code.b((chunks - 1 - c) * ranks + r, mb) for mb, c in order]
        warmup = 2 * (ranks - r - 1) + (chunks - 1) * max(sizes) + 1
        programs.append(warmup_then_pairs(code, forwards, backwards, warmup))
    options: dict[str, object] = {"chunks": chunks}
    options |= {"group_size": group_size} if group_size is not None else {"rounds": rounds}
    return Schedule.of_codes(
        programs,
        placement=loop(ranks, chunks),
        microbatches=microbatches,
        name="interleaved-overlap",
        options=options,
    )
