"""One rank: its stages, its program, and the engine that runs the program.

The engine is a generator that yields where it would wait, so that all ranks of a schedule can run in one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import Tensor

from pipeloom.runtime.batch import Microbatches
from pipeloom.runtime.boundary import Boundary, Values
from pipeloom.runtime.deferral import HeadDeferral
from pipeloom.runtime.faults import Faults
from pipeloom.runtime.lowering import RankProgram, forward_only, lower, whole_backwards
from pipeloom.runtime.options import RuntimeOptions
from pipeloom.runtime.overlap import Lane
from pipeloom.runtime.specs import SpecBook
from pipeloom.runtime.stage import Stage
from pipeloom.runtime.status import Status
from pipeloom.runtime.transport import Outgoing, Transport
from pipeloom.runtime.work import StepResult, Work
from pipeloom.schedule.channels import Message, neighbours
from pipeloom.schedule.model import Schedule

Loss = Callable[[Any, Any], Tensor]


class Rank:
    """One place in the pipeline, on whatever transport it is given.

    Attributes:
        schedule: what it runs. A pair of stages that declare no segments, in which nothing overlaps, is a forward and then a
            backward there, each of which starts when its own input has come.
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
        options: RuntimeOptions,
        lane: Lane,
    ) -> None:
        self.rank = rank
        self.stages = stages
        self._options = options
        self.follow(schedule)
        self.loss = loss
        self.book = SpecBook(schedule, options.shapes)
        self.faults = Faults(options.fault, rank)
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
        batched = self._options.transport == "batched"  # its batches are proved with the pairs whole
        self.schedule = schedule if batched else schedule.unpaired(one_piece)
        self._programs: dict[int | None, RankProgram] = {}
        for stage, microbatches in whole_backwards(schedule, self.rank).items():
            self.stages[stage].whole = microbatches

    def program(self, forwards: int | None = None) -> RankProgram:
        """A training step's, or the forwards of so many micro-batches; lowered once each."""
        if forwards not in self._programs:
            chosen = self.schedule if forwards is None else forward_only(self.schedule, forwards)
            self._programs[forwards] = lower(chosen, self.rank, self._options)
        return self._programs[forwards]

    def run(
        self, program: RankProgram, batch: Microbatches, transport: Transport, *, keep_outputs: bool = False
    ) -> Generator[Message, None, StepResult]:
        """Runs the program once; yields the message that it waits for while the transport has not got it.

        With gradients enabled the program is a training step; otherwise its forwards only.
        """
        work = Work(self, batch, transport, keep_outputs)
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
