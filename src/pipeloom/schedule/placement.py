"""Placements: the rank of every stage, by name or given stage by stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pipeloom.errors import ArgumentError, UsageError, did_you_mean

FORMS = "or the rank of every stage, as in 0,1,1,0"


def loop(ranks: int, chunks: int) -> list[int]:
    """Stage c * p + r on rank r: the ranks in turn, again for every chunk."""
    return [stage % ranks for stage in range(ranks * chunks)]


def vee(ranks: int, chunks: int = 2) -> list[int]:
    """Down the ranks and up again, in turn: with two chunks, stages s and 2p - 1 - s on rank s."""
    down, up = list(range(ranks)), list(reversed(range(ranks)))
    return [rank for chunk in range(chunks) for rank in (up if chunk % 2 else down)]


def linear(ranks: int, chunks: int = 1) -> list[int]:
    """Runs of `chunks` consecutive stages on one rank: one chunk's placement, its stages cut finer."""
    return [stage // chunks for stage in range(ranks * chunks)]


NAMED: dict[str, Callable[[int, int], list[int]]] = {"loop": loop, "vee": vee, "linear": linear}


def named(name: str, ranks: int, chunks: int) -> tuple[int, ...]:
    """Return the placement called `name`, with `chunks` stages per rank. Raises UsageError for an unknown name."""
    if name not in NAMED:
        raise UsageError(f"placement is {name!r:.200}{did_you_mean(name, NAMED)} {FORMS}")
    return tuple(NAMED[name](ranks, chunks))


def name_of(placement: Sequence[int], ranks: int) -> str:
    """Return the name of a placement that families are made for; "" for any other.

    One chunk is `"linear"`. More than one stage per rank in a row has no families of its own.
    """
    if list(placement) == linear(ranks):
        return "linear"
    chunks = len(placement) // ranks
    return next((name for name in NAMED if name != "linear" and list(placement) == NAMED[name](ranks, chunks)), "")


def require_placement(placement: Sequence[int], ranks: int, chunks: int | None = None) -> tuple[int, ...]:
    """Return `placement` as a tuple.

    Raises:
        ArgumentError: a stage on a rank that does not exist, a rank without a stage, or other than `chunks` stages on the
            fullest rank.
    """
    given = tuple(placement)
    for rank in given:
        if not isinstance(rank, int) or not 0 <= rank < ranks:
            raise ArgumentError("placement", f" names rank {rank!r:.200}; there are {ranks} (0..{ranks - 1})")
    stages = [given.count(rank) for rank in range(ranks)]
    if min(stages) == 0:
        raise ArgumentError("placement", f" leaves rank {stages.index(0)} without a stage")
    if chunks is not None and max(stages) != chunks:
        raise ArgumentError(
            "chunks",
            f" is {chunks}, and the placement puts {max(stages)} stages on rank {stages.index(max(stages))}; "
            f"nearest: {max(stages)}",
        )
    return given
