"""Segments: a layer's declaration of where its computation may be split, so that communications overlap other computation.

A `Segmented` layer is a sequence of segments. A `Compute` runs under autograd between two communications. A `Communication`
(dispatch, combine) is started first and waited for later, as is its backward; autograd does not record it. The executor
interleaves the segments of one micro-batch's forward with those of another's backward (overlapped pair); `in_order` runs
them one after the other as one differentiable function, so that a layer's plain forward is the same code.

Segments pass values to the next one: tensors, None, and any other objects (splits, a permutation). They must include all
that later segments need, the residual stream too. A floating tensor that requires a gradient *carries* one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pipeloom.schedule.timeline import CommunicationKind

Values = tuple[Any, ...]


Watch = Callable[[str, CommunicationKind], AbstractContextManager[None]]
"""Counts the time inside as a standstill for the communication of this name and kind."""


# Counts waits inside a compute segment; None while no executor runs. Per process, not per thread: on a GPU, autograd runs a
# layer's backward in other threads.
_watch: Watch | None = None


def report_standstills_to(watch: Watch | None) -> None:
    """Make `standstill` enter `watch(name, kind)` from now on; set by the executor of the running rank. None: it does nothing."""
    global _watch
    _watch = watch


def standstill(name: str, kind: CommunicationKind = "all-to-all") -> AbstractContextManager[None]:
    """Count the time inside as time for which computation waits for the communication called `name`.

    For code of a layer that waits inside a compute segment, where the executor cannot see it. If calls are nested, the outer
    one counts.
    """
    return nullcontext() if _watch is None else _watch(name, kind)


class Pending(Protocol):
    """A communication in progress. It keeps the tensors alive that the communication reads and writes."""

    def wait(self) -> Values:
        """Return the results; call it once. On a GPU only the current stream waits, on a CPU the caller."""


@dataclass(frozen=True)
class Done:
    """A communication that is complete from the start."""

    values: Values

    def wait(self) -> Values:
        return self.values


@dataclass(frozen=True)
class Compute:
    """A compute segment.

    Attributes:
        name: its name in messages ("attention", "experts").
        run: values -> values; its inputs from other segments are leaves of a separate graph.
    """

    name: str
    run: Callable[[Values], Values]


@runtime_checkable
class Communication(Protocol):
    """A communication segment: it returns as many values as it takes, and each carries a gradient if the one before did.

    All ranks of its group call `start` and `start_backward` in the same order, those without tokens too: a gradient that does
    not exist arrives as zeros.
    """

    @property
    def name(self) -> str:
        """Return its name in messages ("dispatch", "combine")."""

    @property
    def quick(self) -> bool:
        """Return whether it is so fast (within a machine) that an overlapped pair does not switch actions for it."""

    def start(self, values: Values) -> Pending:
        """Start it; return at once. The tensors have no graph. Values that are not transferred are passed on unchanged."""

    def start_backward(self, gradients: Values, saved: Values) -> Pending:
        """Start its backward, from gradients of its results to those of its inputs (for an all-to-all: with swapped splits).

        Args:
            gradients: one per value; None for those that carry none.
            saved: the values given to `start`, with None in place of tensors that carry.
        """


Segment = Compute | Communication


@runtime_checkable
class Segmented(Protocol):
    """A layer that declares segments. Its forward is `in_order(self.segments(**keywords), inputs)`."""

    def segments(self, **keywords: Any) -> Sequence[Segment]:
        """Return the segments in order, for one micro-batch; it takes the keyword arguments of the layer's forward.

        The first gets the layer's positional inputs as its values, and the values of the last are the layer's outputs.
        """


@dataclass(frozen=True)
class Apart:
    """A communication that one segment starts and a later one waits for.

    Attributes:
        moved: positions of the values that it replaces. Segments in between get empty tensors there and pass them on, like all
            values that the communication's backward needs in `saved`.
        pending: holds the communication while it is in progress.
    """

    communication: Communication
    moved: tuple[int, ...]
    pending: list[Pending] = field(default_factory=list)


@dataclass(frozen=True)
class Ends:
    """Starts of communications, then waits for others, as one segment; in the backward the waits are starts, and last first.

    Attributes:
        turns: whether an overlapped pair switches actions here: behind the starts, and in the backward before the waits.
    """

    starts: tuple[Apart, ...]
    waits: tuple[Apart, ...] = ()
    turns: bool = False

    @property
    def name(self) -> str:
        return (*self.waits, *self.starts)[0].communication.name

    @property
    def quick(self) -> bool:
        return not self.turns

    def start(self, values: Values) -> Pending:
        return self._meet(self.starts, self.waits, values, lambda each, given: each.communication.start(given))

    def start_backward(self, gradients: Values, saved: Values) -> Pending:
        def start(each: Apart, given: Values) -> Pending:
            return each.communication.start_backward(given, saved)

        return self._meet(self.waits[::-1], self.starts[::-1], gradients, start)

    def _meet(
        self,
        starts: Sequence[Apart],
        waits: Sequence[Apart],
        values: Values,
        start: Callable[[Apart, Values], Pending],
    ) -> Pending:
        for each in starts:
            each.pending.append(start(each, values))
            # Empty tensors of the same dtype connect the graph.
            moved = [v.new_empty(0) if at in each.moved and isinstance(v, Tensor) else v for at, v in enumerate(values)]
            values = tuple(moved)
        return _Meeting([(each.pending.pop(), each.moved) for each in waits], values)


@dataclass(frozen=True)
class _Meeting:
    """Communications that are waited for, with values that have changed since their starts."""

    pending: Sequence[tuple[Pending, tuple[int, ...]]]
    values: Values

    def wait(self) -> Values:
        values = self.values
        for pending, moved in self.pending:
            arrived = pending.wait()
            values = tuple(arrived[at] if at in moved else value for at, value in enumerate(values))
        return values


def beside(communication: Communication, moved: Sequence[int], compute: Compute) -> list[Segment]:
    """Return three segments: start the communication, compute during it, wait for it; the backward mirrors that."""
    apart = Apart(communication, tuple(moved))
    return [Ends((apart,), turns=not communication.quick), compute, Ends((), (apart,))]


def in_turns(
    parts: Sequence[Sequence[Segment]], moved: Callable[[Communication], Sequence[int]], first: Compute
) -> list[Segment]:
    """Return the segments of several parts, such as runs of tokens, each beside the communications of the others.

    A part's communications and computations alternate, and begin and end with a communication. All first communications start
    at once, before `first`; computation p of part i runs in step i + p, and its communication starts behind it. An overlapped
    pair switches actions behind the first and the last starts.

    Args:
        moved: the positions of the values that a communication replaces.
    """
    aparts = [
        [Apart(each, tuple(moved(each))) for each in part[::2] if not isinstance(each, Compute)] for part in parts
    ]
    segments: list[Segment] = [Ends(tuple(part[0] for part in aparts), turns=True), first]
    begun: tuple[Apart, ...] = ()
    steps = len(aparts[0]) - 1
    for step in range(len(parts) + steps - 1):
        for phase in range(steps):
            if 0 <= (at := step - phase) < len(parts):
                compute = parts[at][2 * phase + 1]
                segments += [Ends(begun, (aparts[at][phase],)), compute]
                begun = (aparts[at][phase + 1],)
    return [*segments, Ends(begun, turns=True), Ends((), tuple(part[-1] for part in aparts))]


def is_segmented(layer: object) -> bool:
    """Return whether the layer's class declares segments (an attribute of that name on the instance does not count)."""
    return callable(getattr(type(layer), "segments", None))


def carries(value: Any) -> bool:
    """Return whether a gradient is sent back for this value."""
    return isinstance(value, Tensor) and value.requires_grad and (value.is_floating_point() or value.is_complex())


def saved_of(values: Values) -> Values:
    """Return the inputs that a communication's backward gets: all but the tensors that carry."""
    return tuple(None if carries(value) else value for value in values)


def in_order(segments: Sequence[Segment], values: Values) -> Values:
    """Return the values after all segments, run one after the other, differentiable as a whole."""
    for segment in segments:
        values = segment.run(values) if isinstance(segment, Compute) else begin(segment, values)()
    return values


def begin(communication: Communication, values: Values) -> Callable[[], Values]:
    """Start it; return a function that waits for it and returns its results, differentiable. Call that once.

    Autograd sees two nodes. In the backward the end's node starts the communication of the gradients, and the start's node waits
    for it. Nodes that are ready run in reverse order of their making, so what was computed between start and end in the forward
    is mirrored between start and end of the backward, without code for that overlap.
    """
    moving = [at for at, value in enumerate(values) if carries(value)] if torch.is_grad_enabled() else []
    if not moving:
        return partial(_arrive, communication.name, communication.start(values))
    call = _CommunicationCall(communication, values, moving)
    marks = _BeginNode.apply(call, *(values[at] for at in moving))  # type: ignore[no-untyped-call]

    def finish() -> Values:
        carried = _EndNode.apply(call, *marks)  # type: ignore[no-untyped-call]
        results = list(call.results)
        for at, value in zip(moving, carried, strict=True):
            results[at] = value
        return tuple(results)

    return finish


def _arrive(name: str, pending: Pending) -> Values:
    with standstill(name):
        return pending.wait()


class _CommunicationCall:
    """State shared by the two autograd nodes of one communication, for its values and their gradients."""

    def __init__(self, communication: Communication, values: Values, moving: Sequence[int]) -> None:
        self.communication = communication
        self.moving = moving
        self.saved = saved_of(values)
        self.results: Values = ()
        self.pending: Pending | None = None

    def placed(self, tensors: Sequence[Any], among: Values) -> Values:
        """Return `among` with these tensors at the positions that carry."""
        filled = list(among)
        for at, tensor in zip(self.moving, tensors, strict=True):
            filled[at] = tensor
        return tuple(filled)

    def arrived(self) -> Values:
        pending, self.pending = self.pending, None
        assert pending is not None, "a communication was waited for before its start"
        with standstill(self.communication.name):
            return pending.wait()


class _BeginNode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _CommunicationCall, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        call.pending = call.communication.start(call.placed([t.detach() for t in tensors], call.saved))
        # no data has arrived yet: these only connect the two nodes
        return tuple(tensor.new_empty(0) for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *marks: Tensor) -> Any:
        gradients = ctx.call.arrived()
        return None, *(gradients[at] for at in ctx.call.moving)


class _EndNode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _CommunicationCall, *marks: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        results = call.arrived()
        call.results = tuple(None if at in call.moving else value for at, value in enumerate(results))
        return tuple(results[at] for at in call.moving)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        call: _CommunicationCall = ctx.call
        given = call.placed(gradients, (None,) * len(call.saved))
        call.pending = call.communication.start_backward(given, call.saved)
        return None, *(gradient.new_zeros(0) for gradient in gradients)
