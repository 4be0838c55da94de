"""Placements by name, and which ones a search looks at."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pipeloom.errors import UsageError, did_you_mean
from pipeloom.schedule.families.layout import loop_placement, require_sizes


def linear(ranks: int, chunks: int) -> list[int]:
    """Runs of `chunks` consecutive stages on one rank: one chunk's families, cut finer."""
    return [stage // chunks for stage in range(ranks * chunks)]


def vee(ranks: int, chunks: int) -> list[int]:
    """Down the ranks and up again, in turn."""
    down, up = list(range(ranks)), list(reversed(range(ranks)))
    return [rank for chunk in range(chunks) for rank in (up if chunk % 2 else down)]


NAMED: dict[str, Callable[[int, int], list[int]]] = {"loop": loop_placement, "vee": vee, "linear": linear}


def placements_of(ranks: int, chunks: int | None, placement: str | Sequence[int] | None) -> list[tuple[int, ...]]:
    """The placements (stage -> rank) to search, without repetition.

    Raises UsageError for an unknown name, and for ranks that do not hold `chunks` stages each.
    """
    if chunks is not None:
        require_sizes(chunks=chunks)
    if placement is None:
        found = [tuple(make(ranks, chunks or 1)) for make in NAMED.values()]
        return list(dict.fromkeys(found))
    if isinstance(placement, str):
        if placement not in NAMED:
            raise UsageError(
                f"placement is {placement!r}{did_you_mean(placement, NAMED)} or the rank of every stage, as in 0,1,1,0"
            )
        default = 1 if placement == "linear" else 2
        return [tuple(NAMED[placement](ranks, chunks or default))]
    given = tuple(placement)
    for rank in given:
        if not isinstance(rank, int) or not 0 <= rank < ranks:
            raise UsageError(f"placement names rank {rank!r}; there are {ranks} (0..{ranks - 1})")
    held = [given.count(rank) for rank in range(ranks)]
    if min(held) == 0:
        raise UsageError(f"placement leaves rank {held.index(0)} without a stage")
    if chunks is not None and max(held) != chunks:
        raise UsageError(
            f"chunks is {chunks}, and the placement holds {max(held)} stages on rank {held.index(max(held))}"
        )
    return [given]
