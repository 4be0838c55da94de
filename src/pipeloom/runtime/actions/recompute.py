"""Recomputation: R runs a forward again, or a part of it. Layers that are recomputed in a block with their backward run in it."""

from __future__ import annotations

from pipeloom.runtime.actions.compute import run_stage
from pipeloom.runtime.actions.registry import Queue, executes
from pipeloom.runtime.flight import Flight
from pipeloom.runtime.stage import Stage


@executes("R")
def recompute(flight: Flight, stage: Stage, queue: Queue, part: str = "") -> None:
    """Run the forward again from what F has kept, with the same random numbers, and save what the backward needs; or what the
    layers call by the name of a part.

    It leaves no trace in the layers: what counts or averages in a forward does so once.
    """
    if part:
        stage.grad_context.queue = flight.weight_gradients
        if flight.parts is not None:
            flight.parts.recompute(part)
        return
    flight.step.alive_changes.append(1)
    record, flight.record = flight.record, None
    assert record is not None
    stage.require_unchanged(record)
    with record.start.again():
        run_stage(flight, stage, record.inputs, queue.hooks.before_layer)
