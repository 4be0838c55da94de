"""Actions on parameters and gradients of which each replica holds a share: UNSHARD, RESHARD, REDUCE_GRAD."""

from __future__ import annotations

from pipeloom.runtime.actions.registry import Queue, executes
from pipeloom.runtime.flight import Flight
from pipeloom.runtime.stage import Stage


@executes("UNSHARD")
def gather(flight: Flight, stage: Stage, queue: Queue) -> None:
    """Gather a stage's parameters."""
    if queue.hooks.shards is not None:
        queue.hooks.shards.gather(stage.index)


@executes("RESHARD")
def release(flight: Flight, stage: Stage, queue: Queue) -> None:
    """Free a stage's parameters."""
    if queue.hooks.shards is not None:
        queue.hooks.shards.release(stage.index)


@executes("REDUCE_GRAD")
def reduce(flight: Flight, stage: Stage, queue: Queue) -> None:
    """Sum a stage's gradients over the replicas."""
    if queue.hooks.shards is not None:
        queue.hooks.shards.reduce(stage.index)
