"""Named tensors: one stage writes a tensor under a name, and later stages read it, past the stages in between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipeloom.errors import ScheduleError, echo


class NamedTensor(NamedTuple):
    """A tensor with a name, sent from the stage that writes it to each stage that reads it.

    A name may be written again by a later stage: that is another NamedTensor, and a stage reads the latest one before it.

    Attributes:
        name: a Python identifier.
        producer: the position in a route of the stage that writes it.
        consumers: the positions of the stages that read it, ascending, all after `producer`.
    """

    name: str
    producer: int
    consumers: tuple[int, ...]


def normalized(tensors: Sequence[NamedTensor]) -> tuple[NamedTensor, ...]:
    """Return the tensors sorted, each with its consumers as an ascending tuple."""
    return tuple(sorted(NamedTensor(t.name, t.producer, tuple(sorted(t.consumers))) for t in tensors))


def require_tensors(tensors: Sequence[NamedTensor], positions: int) -> None:
    """Raise ScheduleError for an invalid name or position, a tensor sent backwards or read by no stage, and one given twice."""
    reads: set[tuple[str, int]] = set()
    writes: set[tuple[str, int]] = set()
    for name, producer, consumers in tensors:
        if not isinstance(name, str) or not name.isidentifier() or name == "output":
            raise ScheduleError(f"a tensor is called {echo(name)}; give a Python identifier other than 'output'")
        for position in (producer, *consumers):
            if not isinstance(position, int) or not 0 <= position < positions:
                raise ScheduleError(
                    f"tensor {name!r:.200} names the stage position {echo(position)}; there are {positions} (0..{positions - 1})"
                )
        if not consumers:
            raise ScheduleError(f"tensor {name!r:.200} of position {producer} is read by no stage; give its consumers")
        for consumer in consumers:
            if consumer <= producer:
                raise ScheduleError(
                    f"tensor {name!r:.200} goes from position {producer} to position {consumer}, and a micro-batch passes "
                    f"through position {consumer} first, so that every order of actions deadlocks; "
                    f"nearest: a producer before {consumer}"
                )
            if (name, consumer) in reads:
                raise ScheduleError(
                    f"position {consumer} reads tensor {name!r:.200} from two positions; it can read one"
                )
            reads.add((name, consumer))
        if (name, producer) in writes:
            raise ScheduleError(
                f"tensor {name!r:.200} of position {producer} is given twice; give its consumers together"
            )
        writes.add((name, producer))
