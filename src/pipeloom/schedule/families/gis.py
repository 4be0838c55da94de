"""The generalised interleaved schedule of PipeOffload (Wan et al., arXiv 2503.01328), also with chunks copied to the host."""

from __future__ import annotations

from pipeloom.errors import UsageError
from pipeloom.limits import require_whole
from pipeloom.schedule.costs import Costs
from pipeloom.schedule.families.construct.layout import Coder, family, require_sizes
from pipeloom.schedule.model import Schedule
from pipeloom.schedule.offload import with_copies
from pipeloom.schedule.placement import loop


@family("gis", "pipeoffload", "generalizedinterleaved", placement="loop", order=35)
def gis(
    ranks: int,
    microbatches: int,
    chunks: int = 2,
    group_size: int | None = None,
    offload_chunks: int = 0,
    costs: Costs | None = None,
) -> Schedule:
    """Looped placement, by rounds of g micro-batches, as few as p/2, with I and W one after the other.

    Idle of every rank in stage units, with f = b = w and m a multiple of g: 2(p-1) + (v-1)(p-g). Peak activations of
    rank r: min(m v, (v-1) g + p-r), at v = 2 and the least g half of interleaved's for large p. Chunk c is held for
    2(v-1-c) g + p-r turns of an F, an I and a W, so the first chunks are those whose copies free most: with half of them
    copied (the paper's PO-H) about a quarter of interleaved's is left, with all (PO-F) three stages. Any m >= 1.

    Args:
        group_size: g, from p/2 (default) to p.
        offload_chunks: the first chunks of each rank whose activations are copied to the host; 0: none.
        costs: of a stage, for the places of the copies back; default: times of 1, copies included.
    """
    require_sizes(ranks=ranks, microbatches=microbatches, chunks=chunks)
    require_whole("offload_chunks", offload_chunks, 0)
    least = (ranks + 1) // 2
    size = least if group_size is None else group_size
    for name, value, low, high in (("group_size", size, least, ranks), ("offload_chunks", offload_chunks, 0, chunks)):
        if not low <= value <= high:
            raise UsageError(
                f"{name} is {value}; it must lie between {low} and {high}; nearest: {max(low, min(value, high))}"
            )
    code = Coder(ranks * chunks, microbatches)
    turns = [(c, mb, (mb // size * chunks + c) * size + mb % size) for c in range(chunks) for mb in range(microbatches)]
    programs = []
    for r in range(ranks):
        first = (chunks - 1) * size + ranks - 1 - r  # the turn of the first backward
        actions = []
        for c, mb, turn in turns:
            stage, mirrored = c * ranks + r, (chunks - 1 - c) * ranks + r
            actions += [
                (turn, code.f(stage, mb)),
                (first + turn, code.i(mirrored, mb)),
                (first + turn, code.w(mirrored, mb)),
            ]
        programs.append([action for _, action in sorted(actions)])
    options = {"chunks": chunks, "group_size": size, "offload_chunks": offload_chunks}
    schedule = Schedule.of(
        programs, placement=loop(ranks, chunks), microbatches=microbatches, name="gis", options=options
    )
    return with_copies(schedule, costs, range(offload_chunks * ranks)) if offload_chunks else schedule
