"""What a layer may know of the micro-batch that it works on: which one it is, and how much it counts."""

from __future__ import annotations

from dataclasses import dataclass

KEYWORD = "microbatch"


@dataclass(frozen=True)
class MicrobatchContext:
    """Given by the runtime to every layer whose forward names the keyword argument `microbatch`.

    A function of the step and the micro-batch alone: schedule, rank and recomputation do not change it. So what a layer
    draws or adds to the loss under it is the same in every schedule, and two micro-batches in flight never mix.

    Attributes:
        step: the step's number.
        index: the micro-batch's number, counted over all data-parallel replicas.
        share: its weight in the step's loss; the shares of a step sum to 1 over all replicas.
    """

    step: int = 0
    index: int = 0
    share: float = 1.0
