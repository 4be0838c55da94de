"""One run of a rank's program: what each action does with its stage, and the values on their way between stages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pipeloom.runtime.batch import Microbatches
from pipeloom.runtime.boundary import Boundary, Values, boundary_of
from pipeloom.runtime.lowering import Step
from pipeloom.runtime.overlap import Walk, take_turns, walk_through
from pipeloom.runtime.stage import Stage
from pipeloom.runtime.transport import Outgoing, Transport
from pipeloom.schedule.actions import Action
from pipeloom.schedule.channels import Message

if TYPE_CHECKING:
    from pipeloom.runtime.rank import Rank

Made = tuple[Values, Boundary]


@dataclass
class StepResult:
    """What a rank's run of a step leaves.

    Attributes:
        loss: the sum of its last stages' shares of the loss; None where it holds no last stage.
        outputs: micro-batch -> output of the route's last stage, where asked for.
        starts, ends: seconds (time.perf_counter) of each program entry.
        turns: entry -> when a pair went from its forward to its backward; where the two took turns: when it would have,
            one after the other.
        peak_alive: the most micro-batches alive on its stages at once.
        exposed: seconds for which computation stood still for a communication inside a stage; None: not measured.
    """

    loss: Tensor | None = None
    outputs: dict[int, Any] = field(default_factory=dict)
    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    turns: dict[int, float] = field(default_factory=dict)
    peak_alive: int = 0
    exposed: float | None = None


class Work:
    """One run of a program: values on their way between stages of this rank, and the result so far."""

    def __init__(self, rank: Rank, batch: Microbatches, transport: Transport, keep_outputs: bool) -> None:
        self.rank = rank
        self.batch = batch
        self.transport = transport
        self.keep_outputs = keep_outputs
        self.result = StepResult()
        self._local: dict[tuple[str, int, int], tuple[Values, Boundary]] = {}
        self._alive = 0
        self._after, self._before = rank.after, rank.before

    def execute(self, step: Step, received: list[tuple[Values, Boundary] | None]) -> list[Outgoing]:
        """Runs the entry's actions; sends what a pair's first part made at once, and returns what is left to send."""
        outgoing: list[Outgoing] = []
        self.result.starts.append(time.perf_counter())
        walks = [self._walk(action, value) for action, value in zip(step.actions, received, strict=True)]
        if len(walks) > 1 and any(self.rank.stages[action.stage].segmented for action in step.actions):
            made: Iterator[Made] = iter(self._take_turns(step, walks))
        else:
            made = map(walk_through, walks)
        for at, (send, (values, boundary)) in enumerate(zip(step.sends, made, strict=True), 1):
            outgoing = self._send(send, values, boundary)
            if at < len(walks):
                self.result.turns.setdefault(step.at, time.perf_counter())
                if outgoing:
                    self.transport.exchange(outgoing, ())
                outgoing = []
        self.result.ends.append(time.perf_counter())
        return outgoing

    def _take_turns(self, step: Step, walks: Sequence[Walk[Made]]) -> list[Made]:
        """The overlapped pair. Its backward begins, unless that has no communication for the forward to hide."""
        begun = self.result.starts[-1]
        backward = step.actions[1]
        if self.rank.stages[backward.stage].stops(backward.microbatch):
            (after, before), (_, forward_seconds) = take_turns(walks[::-1])
        else:
            (before, after), (forward_seconds, _) = take_turns(walks)
        self.result.turns[step.at] = begun + forward_seconds
        return [before, after]

    def _walk(self, action: Action, received: tuple[Values, Boundary] | None) -> Walk[Made]:
        """The action, under way whenever it is resumed; its outputs and their specs."""
        walk: Walk[Made] = _RUN[action.kind](self, action, received)
        try:
            self.rank.status.enter(action)
            self.rank.faults.before(action)
            while True:
                self.rank.status.enter(action)
                try:
                    next(walk)
                except StopIteration as end:
                    return end.value  # type: ignore[no-any-return]
                yield
        except Exception as error:
            error.add_note(f"({self.rank.status.name}, {action.words})")
            raise

    def _send(self, message: Message | None, values: Values, boundary: Boundary) -> list[Outgoing]:
        if message is None or self.rank.faults.drops(1):
            return []
        return [Outgoing(message, values, boundary)]

    def forward(self, action: Action, received: tuple[Values, Boundary] | None) -> Walk[Made]:
        stage, mb = self.rank.stages[action.stage], action.microbatch
        carries: Boundary | None = None
        if received is not None:
            values, carries = received
            self.rank.book.learn(self._before[stage.index], mb, carries)
        elif stage.index in self._before:
            values, carries = self._local.pop(("activation", stage.index, mb))
        else:
            values = self.batch.inputs[self.rank.faults.input_of(mb)]
        if torch.is_grad_enabled():
            self._alive += 1
            self.result.peak_alive = max(self.result.peak_alive, self._alive)
        if stage.index not in self._after:
            yield from self._last(stage, mb, values, carries)
            outputs: Values = ()
        else:
            outputs = yield from stage.forward(mb, values, carries, self.batch.keywords[mb])
        if received is not None and not torch.is_grad_enabled():
            self.transport.recycle(values)
        boundary = boundary_of(outputs)
        following = self._after.get(stage.index)
        if following is not None:
            self.rank.book.learn(stage.index, mb, boundary)
            if following in self.rank.stages:
                detached = tuple(None if v is None else v.detach() for v in outputs)
                self._local["activation", following, mb] = detached, boundary
        return outputs, boundary

    def _last(self, stage: Stage, mb: int, values: Values, carries: Boundary | None) -> Walk[None]:
        """F of a route's last stage. The loss is scaled here and nowhere else."""
        keywords = self.batch.keywords[mb]
        if self.keep_outputs:
            self.result.outputs[mb] = stage.compute(values, keywords)
            return
        targets, share = self.batch.targets[mb], self.batch.shares[mb]
        part = yield from stage.forward_to_loss(
            mb, values, carries, keywords, lambda output: self.rank.loss(output, targets) * share
        )
        self.result.loss = part.float() if self.result.loss is None else self.result.loss + part

    def backward(self, action: Action, received: tuple[Values, Boundary] | None) -> Walk[Made]:
        """B or I."""
        stage, mb = self.rank.stages[action.stage], action.microbatch
        gradients = self._gradients(stage, mb, received)
        fused = action.kind == "B"
        inputs, buffers = yield from (stage.backward if fused else stage.input_gradient)(mb, gradients)
        self._alive -= fused
        return self._pass_back(stage, mb, inputs, buffers, gradients if received is not None else ())

    def weight_gradient(self, action: Action, received: None) -> Walk[Made]:
        self.rank.stages[action.stage].weight_gradient(action.microbatch)
        self._alive -= 1
        return (), ()
        yield  # a walk that never stops

    def _gradients(self, stage: Stage, mb: int, received: tuple[Values, Boundary] | None) -> Values:
        if received is not None:
            return received[0]
        return self._local.pop(("gradient", stage.index, mb))[0] if stage.index in self._after else ()

    def _pass_back(
        self, stage: Stage, mb: int, inputs: Values, buffers: Values, gradients: Values
    ) -> tuple[Values, Boundary]:
        """Hands the input gradients on, and the receive buffers back."""
        previous = self._before.get(stage.index)
        if previous in self.rank.stages:
            self._local["gradient", previous, mb] = inputs, ()
        elif previous is not None:
            self.transport.recycle(buffers)
        self.transport.recycle(gradients)
        return inputs, ()


_RUN: dict[str, Callable[[Work, Action, Any], Walk[Made]]] = {
    "F": Work.forward,
    "B": Work.backward,
    "I": Work.backward,
    "W": Work.weight_gradient,
}
