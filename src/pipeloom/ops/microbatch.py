"""Context of a micro-batch for its layers: its number, and its share of the loss."""

from __future__ import annotations

from dataclasses import dataclass

from pipeloom.errors import UsageError

KEYWORD = "microbatch"


@dataclass(frozen=True)
class MicrobatchContext:
    """The context that the runtime passes to every layer whose forward has a keyword argument `microbatch`.

    It depends only on the step and the micro-batch, not on schedule, rank or recomputation. So the random numbers that a layer
    draws and the losses that it adds are the same in every schedule, and two micro-batches in flight never mix.

    Attributes:
        step: the step's number.
        index: the micro-batch's number, counted over all data-parallel replicas.
        share: its weight in the step's loss; the shares of a step sum to 1 over all replicas. 0 where none of its targets
            counts.
        first: the number of its first sample in the step's batch, over all data-parallel replicas.
        samples: its number of samples.
    """

    step: int = 0
    index: int = 0
    share: float = 1.0
    first: int = 0
    samples: int = 1


class ContextWithoutShare(MicrobatchContext):
    """The context on a rank whose targets are on the meta device, so that nothing says how many of them count."""

    def __init__(self, step: int, index: int, first: int = 0, samples: int = 1) -> None:
        for name, value in (("step", step), ("index", index), ("first", first), ("samples", samples)):
            object.__setattr__(self, name, value)

    @property
    def share(self) -> float:
        raise UsageError(
            "a layer needs the micro-batch's share of the loss, and this rank's targets are on the meta device: pass the "
            "real targets on every rank, or ignore_index=None where all of them count"
        )

    def __repr__(self) -> str:
        return f"ContextWithoutShare(step={self.step}, index={self.index})"
