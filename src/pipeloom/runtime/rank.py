"""One rank: its stages, its program, and the engine that runs the program.

The engine is a generator that yields where it would wait, so that all ranks of a schedule can run in one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pipeloom.runtime.batch import Microbatches
from pipeloom.runtime.boundary import Boundary, Values, boundary_of
from pipeloom.runtime.deferral import HeadDeferral
from pipeloom.runtime.faults import Faults
from pipeloom.runtime.lowering import RankProgram, Step, whole_backwards
from pipeloom.runtime.overlap import Lane, Walk, take_turns, walk_through
from pipeloom.runtime.specs import SpecBook
from pipeloom.runtime.stage import Stage
from pipeloom.runtime.status import Status
from pipeloom.runtime.transport import Outgoing, Transport
from pipeloom.schedule.actions import Action
from pipeloom.schedule.channels import Message, neighbours
from pipeloom.schedule.model import Schedule

Loss = Callable[[Any, Any], Tensor]
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


class Rank:
    """One place in the pipeline, on whatever transport it is given.

    Args:
        pairs_apart: a pair of stages that declare no segments, in which nothing overlaps, runs as a forward and then a
            backward, each when its own input is there.

    Attributes:
        schedule: what it runs.
        deferral: the output layer's weight gradients, where they may wait.
        finishing: told in a training step before a stage's last B, if that is one call of autograd's.
        finished: told of each stage whose gradients are complete, once what made them so has been sent.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        stages: dict[int, Stage],
        loss: Loss,
        book: SpecBook,
        faults: Faults,
        lane: Lane,
        pairs_apart: bool = True,
    ) -> None:
        self.rank = rank
        self.stages = stages
        self._pairs_apart = pairs_apart
        self.follow(schedule)
        self.loss = loss
        self.book = book
        self.faults = faults
        self.lane = lane
        self.deferral: HeadDeferral | None = None
        self.finishing: Callable[[int], None] | None = None
        self.finished: Callable[[int], None] | None = None
        self.status = Status(rank)
        before, after = neighbours(schedule)
        self.before = {stage: other for stage, other in enumerate(before) if other is not None}
        self.after = {stage: other for stage, other in enumerate(after) if other is not None}

    def follow(self, schedule: Schedule) -> None:
        """From the next step on: a schedule of the same stages and routes."""
        one_piece = [index for index, stage in self.stages.items() if not stage.segmented]
        self.schedule = schedule.unpaired(one_piece) if self._pairs_apart else schedule
        for stage, microbatches in whole_backwards(schedule, self.rank).items():
            self.stages[stage].whole = microbatches

    def run(
        self, program: RankProgram, batch: Microbatches, transport: Transport, *, keep_outputs: bool = False
    ) -> Generator[Message, None, StepResult]:
        """Runs the program once; yields the message that it waits for while the transport has not got it.

        With gradients enabled the program is a training step; otherwise its forwards only.
        """
        work = _Work(self, batch, transport, keep_outputs)
        self.lane.exposed()  # what an evaluation or a failed step left
        self.lane.status = self.status
        self.book.begin([(torch.is_grad_enabled(), *each) for each in batch.signatures])
        outgoing: list[Outgoing] = []
        closed: list[int] = []
        if self.deferral is not None:
            self.deferral.begin(self._deferring(program))
        for step in program.steps:
            transport.exchange(outgoing, step.posts)
            outgoing = []  # the transport alone decides how long what was sent stays alive
            closed = self._finish(closed)
            received: list[tuple[Values, Boundary] | None] = []
            for action, message in zip(step.actions, step.receives, strict=True):
                if message is None:
                    received.append(None)
                    continue
                if step.cools and self.deferral is not None:
                    self.deferral.pay_one()
                self.status.wait_for(action, message)
                while not transport.arrived(message):
                    yield message
                received.append(transport.take(message))
            if self.finishing is not None:
                for stage in step.closes:
                    if self.stages[stage].one_backward:
                        self.finishing(stage)
            outgoing = work.execute(step, received)
            closed += step.closes
            self.status.done += 1
        transport.exchange(outgoing, ())
        if self.deferral is not None:
            self.deferral.pay_all()
        self._finish(closed)
        transport.finish()
        self.status.leave()
        work.result.exposed = self.lane.exposed()
        return work.result

    def _finish(self, closed: list[int]) -> list[int]:
        """Tells of stages that are complete; returns those that still owe gradients of the output layer."""
        owes = self.deferral is not None and self.deferral.owes
        owing = [stage for stage in closed if owes and self.stages[stage].deferral is not None]
        if self.finished is not None and torch.is_grad_enabled():
            for stage in closed:
                if stage not in owing:
                    self.finished(stage)
        return owing

    def _deferring(self, program: RankProgram) -> int:
        """How many backwards of a training step go through the output layer here."""
        ends = [s for s, stage in self.stages.items() if stage.deferral is not None]
        return sum(a.kind in "BI" and a.stage in ends for step in program.steps for a in step.actions)


class _Work:
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


_RUN: dict[str, Callable[[_Work, Action, Any], Walk[Made]]] = {
    "F": _Work.forward,
    "B": _Work.backward,
    "I": _Work.backward,
    "W": _Work.weight_gradient,
}
