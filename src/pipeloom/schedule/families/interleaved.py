"""Interleaved 1F1B (Narayanan et al., arXiv 2104.04473) for any number of micro-batches, as it is and with overlapped pairs."""

from __future__ import annotations

from typing import Literal

from pipeloom.errors import UsageError
from pipeloom.schedule.actions import KindName
from pipeloom.schedule.families.construct.layout import (
    Coder,
    family,
    require_sizes,
    warmup_then_alternate,
)
from pipeloom.schedule.model import Schedule
from pipeloom.schedule.placement import loop

Rounds = Literal["balanced", "tail", "head", "paper"]


@family("interleaved", "interleaved1f1b", "vpp", "virtualpipeline", placement="loop", baseline=True, order=30)
def interleaved(
    ranks: int, microbatches: int, chunks: int = 2, rounds: Rounds = "balanced", group_size: int | None = None
) -> Schedule:
    """Looped placement (stage c p + r on rank r), one forward and one backward in turn, chunk after chunk by rounds.

    A **round** is a run of micro-batches that goes through one chunk before the next. With g the largest round, rank r warms
    up with min(m v, 2(p-r-1) + (v-1) g) forwards. Idle of every rank with uniform stages: (p-1)(f+B) in stage units for
    m >= p (all but `paper`), and (v-1)(p-m)(f+B) more for m < p. Peak activations of rank r: min(m v, that warm-up + 1).

    Args:
        rounds: how m that p does not divide is cut, see `round_sizes`.
        group_size: rounds of this size (p <= N <= m), from depth-first (p) to one round of m, as in Llama 3's tunable
            schedule (arXiv 2407.21783, section 3.3.2).
    """
    return _by_rounds("interleaved", (ranks, microbatches, chunks), rounds, group_size, paired=False)


@family("interleaved-overlap", placement="loop", order=130)
def interleaved_overlap(
    ranks: int, microbatches: int, chunks: int = 2, rounds: Rounds = "balanced", group_size: int | None = None
) -> Schedule:
    """`interleaved` with one more warm-up forward on every rank, its steady F and B run as pairs (arXiv 2412.19437).

    Megatron-Core hides all-to-all in this way. Idle with uniform stages and pairs without gain: interleaved's. Peak activations:
    interleaved's + 1, at most m v.
    """
    return _by_rounds("interleaved-overlap", (ranks, microbatches, chunks), rounds, group_size, paired=True)


def _by_rounds(
    name: str, sizes: tuple[int, int, int], rounds: Rounds, group_size: int | None, *, paired: bool
) -> Schedule:
    """Return the schedule of sizes (p, m, v), with one more warm-up forward and with pairs if `paired`."""
    ranks, microbatches, chunks = sizes
    require_sizes(ranks=ranks, microbatches=microbatches, chunks=chunks)
    size_of_rounds = round_sizes(ranks, microbatches, rounds, group_size)
    code = Coder(ranks * chunks, microbatches)
    pair = code.pair if paired else None
    order = chunk_order(size_of_rounds, chunks)
    programs = []
    for r in range(ranks):
        forwards = [code.f(c * ranks + r, mb) for mb, c in order]
        backwards = [code.b((chunks - 1 - c) * ranks + r, mb) for mb, c in order]
        warmup = 2 * (ranks - r - 1) + (chunks - 1) * max(size_of_rounds)
        programs.append(warmup_then_alternate(forwards, backwards, warmup + paired, pair))
    options: dict[str, object] = {"chunks": chunks}
    options |= {"group_size": group_size} if group_size is not None else {"rounds": rounds}
    return Schedule.of(programs, placement=loop(ranks, chunks), microbatches=microbatches, name=name, options=options)


def round_sizes(ranks: int, microbatches: int, rounds: str = "balanced", group_size: int | None = None) -> list[int]:
    """Return how many micro-batches each round holds; sums to m. For m < p: one round of m.

    * balanced: max(1, m // p) rounds as equal as possible, larger first.
    * tail, head: rounds of p; the remainder joins the last, or the first.
    * paper: rounds of p and a short one of m % p. It adds idle time, and deadlocks for many sizes (smallest: p=4 v=3 m=5).
      Its source counts one idle slot less (11 for 12 at p=4 v=2 m=9), because it warms up with one forward more.
    * group_size N: rounds of N; a remainder of at least p is a further round, a smaller one joins the last.
    """
    if group_size is not None:
        return _grouped(ranks, microbatches, group_size)
    full, rest = divmod(microbatches, ranks)
    if full == 0:
        return [microbatches]
    if rounds == "balanced":
        base, larger = divmod(microbatches, full)
        return [base + 1] * larger + [base] * (full - larger)
    sizes = [ranks] * full
    if rounds == "paper":
        return [*sizes, rest] if rest else sizes
    sizes[0 if rounds == "head" else -1] += rest
    return sizes


def _grouped(ranks: int, microbatches: int, group_size: int) -> list[int]:
    require_sizes(group_size=group_size)
    if microbatches < ranks:
        raise UsageError(
            f"group_size needs at least as many micro-batches as ranks ({ranks}); there are {microbatches}"
        )
    if not ranks <= group_size <= microbatches:
        nearest = min(max(group_size, ranks), microbatches)
        raise UsageError(
            f"group_size is {group_size}; it must lie between p = {ranks} and m = {microbatches}; nearest: {nearest}"
        )
    full, rest = divmod(microbatches, group_size)
    sizes = [group_size] * full
    if rest >= ranks:
        sizes.append(rest)
    else:
        sizes[-1] += rest
    return sizes


def chunk_order(sizes: list[int], chunks: int) -> list[tuple[int, int]]:
    """(micro-batch, chunk) of every forward, in order: each round goes through all chunks before the next round starts."""
    order: list[tuple[int, int]] = []
    first = 0
    for size in sizes:
        order += [(mb, c) for c in range(chunks) for mb in range(first, first + size)]
        first += size
    return order


def round_sequences(ranks: int, chunks: int, sizes: list[int], slope: int) -> list[list[tuple[KindName, int]]]:
    """rank -> its (kind, stage) of F and I in rounds of `sizes`: the warm-up, then one of each in turn.

    Rank r warms up with slope (p-r-1) + (v-1) g forwards, g the largest round: `interleaved` has a slope of 2.
    """
    order = chunk_order(sizes, chunks)
    sequences: list[list[tuple[KindName, int]]] = []
    for r in range(ranks):
        forwards: list[tuple[KindName, int]] = [("F", c * ranks + r) for _, c in order]
        backwards: list[tuple[KindName, int]] = [("I", (chunks - 1 - c) * ranks + r) for _, c in order]
        warmup = slope * (ranks - r - 1) + (chunks - 1) * max(sizes)
        sequences.append(list(warmup_then_alternate(forwards, backwards, warmup)))
    return sequences
