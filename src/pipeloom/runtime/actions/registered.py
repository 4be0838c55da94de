"""Actions of the kinds that `register_kind` has added."""

from __future__ import annotations

from pipeloom.runtime.actions.registry import Queue, executes
from pipeloom.runtime.flight import Flight
from pipeloom.runtime.stage import Stage
from pipeloom.schedule.actions import COMPUTE, Kind


@executes("")
def registered_kind(kind: Kind, flight: Flight, stage: Stage, queue: Queue) -> None:
    """Run an action of a registered kind."""
    if kind.execute is not None:
        if kind.queue == COMPUTE:
            queue.hooks.before_kind(stage.index)
        kind.execute(stage.modules, flight.microbatch)
