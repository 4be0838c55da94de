"""Copies to host memory and back: O and L of what a backward needs, OKEPT and LKEPT of what a recomputation needs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pipeloom.ops.host_memory import HostCopy
from pipeloom.ops.slices import STATE
from pipeloom.runtime.actions.registry import Queue, executes
from pipeloom.runtime.flight import Flight
from pipeloom.runtime.stage import Stage, versions_of
from pipeloom.schedule.actions import fraction_of


@executes("O")
def copy_out(flight: Flight, stage: Stage, queue: Queue, part: str = "") -> None:
    """Copy what is saved to host memory, or one of equal parts of it."""
    assert flight.travels is not None
    number, count = fraction_of(f":{part}") or (1, 1)
    flight.travels.to_host(number, queue.stream)
    flight.step.alive_changes.append(-1 / count)


@executes("L")
def copy_in(flight: Flight, stage: Stage, queue: Queue, part: str = "") -> None:
    """Copy what is saved back from host memory, or one of equal parts of it."""
    assert flight.travels is not None
    number, count = fraction_of(f":{part}") or (1, 1)
    flight.step.alive_changes.append(1 / count)
    flight.travels.to_device(number, queue.stream)


@executes("OKEPT")
def copy_kept_out(flight: Flight, stage: Stage, queue: Queue) -> None:
    """Move the inputs that R needs, and what layers keep of a slice for later ones, to host memory.

    Inputs of the user stay where they are. Raises UsageError for an input that was changed in place.
    """
    record, buffers, stream = flight.record, stage.host_buffers, queue.stream
    assert record is not None
    stage.require_unchanged(record)
    wait: Callable[[], None] = (lambda: None) if stream is None else stream.synchronize
    place = flight.step.batch.keywords[flight.unit].get(STATE)
    with torch.no_grad(), torch.cuda.stream(stream):
        if record.done is not None:
            # The host has issued the forward; the device may not have run it.
            torch.cuda.current_stream().wait_event(record.done)
        if place is not None:
            for history in flight.step.histories[stage.index, flight.microbatch]:
                if (piece := history.pieces.get(place.index)) is not None:
                    piece.to_host(buffers, wait)
        values, specs = record.inputs
        if specs is not None:
            copies = tuple([None if value is None else HostCopy(value, buffers) for value in values])
            wait()
            flight.record = record._replace(inputs=((), specs), on_host=copies)
    flight.return_buffers()


@executes("LKEPT")
def copy_kept_in(flight: Flight, stage: Stage, queue: Queue) -> None:
    """Move the inputs back. What layers keep of a slice stays, and is read from the host where it is needed."""
    record = flight.record
    assert record is not None
    if record.on_host:
        with torch.cuda.stream(queue.stream):
            values = tuple([None if copy is None else copy.move_back(stage.computing) for copy in record.on_host])
        flight.record = record._replace(inputs=(values, record.inputs[1]), versions=versions_of(values), on_host=())
