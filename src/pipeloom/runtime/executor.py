"""The executor: one rank runs its program of instructions once.

It waits for the messages that an instruction needs, runs the instruction's action (or the two of an overlapped pair), and
sends the results (`execute`, also in the thread of an action beside the computation). The order is that of the program alone.
`run` executes the whole program; LocalPipeline, which has all ranks in one thread, calls `begin`, then `execute` for a rank
whose messages have arrived (`missing`), and `finish`.
"""

from __future__ import annotations

import importlib
import pkgutil
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from math import ceil
from typing import Any

import torch

from pipeloom.errors import DistributedError, UsageError
from pipeloom.ops.checksum import message_checksum
from pipeloom.ops.segments import report_standstills_to
from pipeloom.runtime import actions
from pipeloom.runtime.actions.compute import backward_in_segments, forward_in_segments
from pipeloom.runtime.actions.registry import EXECUTIONS, Queue, StepHooks
from pipeloom.runtime.actions.signals import Signal
from pipeloom.runtime.batch import Microbatches
from pipeloom.runtime.flight import Flight, RankStep, StepResult
from pipeloom.runtime.health.report import lost_peer
from pipeloom.runtime.health.status import Status
from pipeloom.runtime.loss import Loss, MicrobatchLoss
from pipeloom.runtime.overlap import CommStream, Coroutine, interleave
from pipeloom.runtime.p2p.base import Delivery, Outgoing, Transport
from pipeloom.runtime.program import Instruction, RankProgram, Task
from pipeloom.runtime.spread_vocabulary import SpreadVocabulary
from pipeloom.runtime.stage import Stage
from pipeloom.runtime.tensor_spec import ShapeCache
from pipeloom.schedule.actions import COMPUTE, COPY_IN, COPY_OUT, Action
from pipeloom.schedule.channels import Message

for _module in pkgutil.iter_modules(actions.__path__):  # each registers what executes its kinds
    importlib.import_module(f"{actions.__name__}.{_module.name}")


class HostClock:
    """Clock of the host: marks moments of a step, in seconds of `time.perf_counter`. For actions on a GPU those of launches."""

    now = staticmethod(time.perf_counter)

    def begin(self) -> None:
        """Start a step."""

    def seconds(self, marks: Iterable[float]) -> list[float]:
        """Return the times of marks of this step."""
        return list(marks)


class DeviceClock:
    """Clock of a CUDA device, as `HostClock`: a mark is reached on its current stream. Reading a time waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def begin(self) -> None:
        """Wait for the device, to align its time with the host's."""
        torch.cuda.synchronize(self._device)  # the device may still run the step before
        self._at = time.perf_counter()
        self._origin = self.now()

    def now(self) -> Any:
        mark = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        mark.record(torch.cuda.current_stream(self._device))
        return mark

    def seconds(self, marks: Iterable[Any]) -> list[float]:
        # Those of actions beside the computation are times of the host.
        return [mark if isinstance(mark, float) else self._seconds(mark) for mark in marks]

    def _seconds(self, mark: Any) -> float:
        mark.synchronize()
        milliseconds: float = self._origin.elapsed_time(mark)
        return self._at + milliseconds / 1e3


@dataclass(eq=False)
class Executor:
    """One rank's run of one program.

    Attributes:
        program: the program to run: of a training step if gradients are enabled, else forwards only.
        stages: stage number -> stage, of this rank.
        transport: carries this run's messages.
        hooks: called while the step runs.
        loss: `loss(output, targets)` for one micro-batch.
        specs: shapes of messages, remembered from earlier steps.
        communications: stream of the rank's communications inside stages.
        clock: times the actions.
        checksums: whether messages carry a checksum that the receiver verifies.
        vocabulary: this rank's share of a vocabulary that is spread over the pipeline.
        signals: `Signals` of the program, if it has any.
    """

    program: RankProgram
    stages: Mapping[int, Stage]
    transport: Transport
    hooks: StepHooks
    loss: Loss
    specs: ShapeCache
    communications: CommStream
    clock: HostClock | DeviceClock
    checksums: bool
    vocabulary: SpreadVocabulary | None
    signals: Any

    # -- a run, instruction by instruction -------------------------------------------------------------------------------

    def run(self, batch: Microbatches, keep_outputs: bool = False) -> StepResult:
        """Run the program on `batch`, waiting in the transport for the other ranks' messages.

        Args:
            keep_outputs: return the outputs of the last stages, and compute no loss.
        """
        self.begin(batch, keep_outputs)
        while self.next is not None:
            self.execute(self.next, self.hooks.status)
        return self.finish()

    def resume(self) -> None:
        """Count waits inside layers as those of this rank from now on; another rank of this thread may have run."""
        report_standstills_to(self.communications.standing_still)

    def begin(self, batch: Microbatches, keep_outputs: bool) -> None:
        """Start a run: discard what an earlier one left, and open the first receives."""
        weighed = zip(batch.targets, batch.shares, strict=True)
        losses = [None if keep_outputs else MicrobatchLoss(self.loss, *each) for each in weighed]
        inputs, training = self.hooks.faults.inputs(batch.inputs), torch.is_grad_enabled()
        self.step = RankStep(
            self.stages, batch, inputs, losses, training, keep_outputs, self.program.slices, self.specs
        )
        self.results = [self.step.result]  # of each rank that it runs
        self._flights: dict[tuple[int, int], Flight] = {}
        self._queues: dict[str, Queue] = {}
        instructions = self.program.instructions
        self._computation = iter(self.program.computation)
        self.next = next(self._computation, None)
        self.communications.exposed()  # left by an evaluation or a failed step
        self.specs.begin([(self.step.training, *each) for each in batch.signatures], self.program.slices)
        self.clock.begin()
        self.resume()
        # Of program entries: marks of the clock, and for an interleaved pair the forward's share of its time.
        self._starts: list[Any] = [None] * len(instructions)
        self._ends: list[Any] = [None] * len(instructions)
        self._forward_shares: dict[int, float] = {}
        # Of a program with several queues: the ends of its entries, and those of other queues that have been issued.
        self._ended: list[Future[None]] = [Future() for _ in instructions] if self.program.has_queues else []
        self._issued: list[int] = []
        for number, stage_program in self.program.stages.items():
            for unit, saving in stage_program.saving.items():
                if saving.travels is not None:  # copies of its parts may begin while its forward runs
                    self._flight(number, unit).travels = self.stages[number].travelling(saving.travels)
        self._issue(self.program.issued_first)
        if self.next is not None:
            self.transport.exchange((), instructions[self.next].post_receives)

    def missing(self) -> Message | Signal | Instruction | None:
        """Return what the next instruction needs first that is not there; None: it can run without waiting."""
        assert self.next is not None
        instruction = self.program.instructions[self.next]
        for task in instruction.tasks:
            for message in task.receives:
                if not self.transport.arrived(message):
                    return message
        # Without signals nothing here waits for another rank, and the order of ranks in one process does not depend on copies.
        if self.program.has_signals:
            for at in instruction.waits:
                if not self._ended[at].done():
                    return self.program.instructions[at]
            for signal in instruction.awaits:
                if not self.signals.arrived(signal):
                    return signal
        return None

    @property
    def underway(self) -> list[Future[None]]:
        """The ends of the entries that were issued on other queues and have not ended. Raises what one of them has raised."""
        ends = [self._ended[at] for at in self._issued]
        return [ended for ended in ends if not ended.done() or ended.result()]

    def execute(self, at: int, status: Status) -> None:
        """Run an instruction: wait for what it needs, run its action, or its pair of actions, and send the results.

        Either the next one of the computation, which also opens the receives of the one after it; or one of another queue, in a
        thread of its own.

        Args:
            status: of the thread.
        """
        instruction, hooks = self.program.instructions[at], self.hooks
        task, computes = instruction.tasks[0], instruction.queue == COMPUTE
        action = task.action
        self._await(instruction, status)
        key, stage = (action.stage, task.unit), self.stages[action.stage]
        flight = self._flights.get(key) or self._flight(*key)
        now = self.clock.now if computes else time.perf_counter
        status.enter(action)
        self._starts[at] = now()
        try:
            if instruction.second is not None:
                self._forward_shares[at] = self._overlapped_pair(task, instruction.second)
            else:
                hooks.faults.before(action)
                queue = self._queues.get(instruction.queue) or self._queue(instruction.queue)
                if not computes:
                    hooks.beside(action, partial(EXECUTIONS[action.kind], flight, stage, queue))
                else:
                    if action.kind != "F" or stage.segmented:
                        self._await_weights(action)
                    EXECUTIONS[action.kind](flight, stage, queue)
        except Exception as error:
            status.failed(error)
            raise
        self._ends[at] = now()
        if self._ended:
            self._end(at)
        if computes:
            self._send(instruction)

    def _await(self, instruction: Instruction, status: Status) -> None:
        """Wait for what an instruction needs, and let gradients be reduced inside a stage's last backward."""
        if self._ended:
            self._await_queues(instruction, status)
            if instruction.queue == COMPUTE:
                self._recycle()  # what copies have taken over
        for task in instruction.tasks:
            if task.receives:
                self._receive(task)
        for stage in instruction.completes_stages:
            if not self.stages[stage].segmented and not self.program.stages[stage].splits:
                self.hooks.before_last_backward(stage)

    def _send(self, instruction: Instruction) -> None:
        """Send an instruction's results, and open the receives of the next one."""
        self._recycle()
        self.next = following = next(self._computation, None)
        posts = () if following is None else self.program.instructions[following].post_receives
        sends = self._outgoing(instruction.tasks[0])
        if instruction.second is not None:
            sends += self._outgoing(instruction.second)
        self.transport.exchange(sends, posts)
        for stage in instruction.completes_stages:
            self.hooks.stage_done(stage)

    def _recycle(self) -> None:
        """Return the buffers of messages that no action reads any more."""
        while self.step.unused:
            self.transport.recycle(self.step.unused.popleft().values)

    def _await_queues(self, instruction: Instruction, status: Status) -> None:
        """Wait for what an instruction needs from other queues and ranks, and issue the entries that start with it. Make the
        buffers of gradients to which it is the first to add.
        """
        action = instruction.tasks[0].action
        for at in instruction.waits:
            status.wait_for(action, self.program.instructions[at].words)
            self._ended[at].result()
        for signal in instruction.awaits:
            status.wait_for(action, signal.words)
            self.signals.wait(signal)
        self._issue(instruction.issues)
        if self.hooks.shards is not None:
            for stage in instruction.opens:
                self.hooks.shards.open(stage)

    def _end(self, at: int) -> None:
        """Note that an entry has ended, here and for the other ranks that wait for it. Take over the gradients to which it was
        the last to add before they are reduced.
        """
        instruction = self.program.instructions[at]
        if self.hooks.shards is not None:
            for stage in instruction.takes:
                self.hooks.shards.take(stage)
        for signal in instruction.signals:
            self.signals.send(signal)
        self._ended[at].set_result(None)

    def _issue(self, entries: Sequence[int]) -> None:
        """Start entries on other queues than that of computation. Each waits for the one before it on its queue."""
        for at in entries:
            action = self.program.instructions[at].tasks[0].action
            if action.kind == "EMBED":  # it reads weights; here only one thread at a time waits for them
                self._await_weights(action)
            self._issued.append(at)
            threading.Thread(target=self._run_beside, args=(at,), daemon=True).start()

    def _run_beside(self, at: int) -> None:
        """Run an entry in a thread of its own. What waits for its end gets its error."""
        try:
            with self.hooks.status.beside() as status:
                self.execute(at, status)
        except BaseException as error:
            if not lost_peer(error):
                self.hooks.status.error = error
            self._ended[at].set_exception(error)
            instruction = self.program.instructions[at]
            action, unit, *_ = instruction.tasks[0]
            if instruction.queue == COPY_IN and (travels := self._flight(action.stage, unit).travels) is not None:
                travels.fail(error)  # a backward may wait for it

    def finish(self) -> StepResult:
        """End the run once every send and the entries on other queues have completed, and return its result."""
        self.transport.finish()
        for at in self._issued:
            self.hooks.status.wait_between(self.program.instructions[at].words)
            self._ended[at].result()
        self.hooks.status.leave()
        report_standstills_to(None)
        if self.step.training and self.step.unreached:
            raise UsageError(
                "the loss carries no gradient for any micro-batch, but the outputs that it is computed from do: nothing would "
                "train; compute it from them without detach(), .item() or torch.no_grad()"
            )
        with self.hooks.status.during("device"):
            self.hooks.status.wait_between("its GPU")  # the host's clock needs no conversion
            result = self.step.result
            result.exposed = self.communications.exposed()
            # A micro-batch of which a part is there counts whole.
            result.peak_alive = ceil(max(accumulate(self.step.alive_changes), default=0) - 1e-9)
            result.starts, result.ends = starts, ends = [*map(self.clock.seconds, (self._starts, self._ends))]
            self.hooks.status.leave()
        result.turns = {at: starts[at] + s * (ends[at] - starts[at]) for at, s in self._forward_shares.items()}
        return result

    # -- what actions get ------------------------------------------------------------------------------------------------

    def _flight(self, stage: int, unit: int) -> Flight:
        """Return the state of a micro-batch on a stage."""
        program = self.program.stages[stage]
        # An action in another thread may be the first one, too.
        return self._flights.setdefault((stage, unit), Flight(self.step, program, unit, program.saving[unit]))

    def _queue(self, name: str) -> Queue:
        """Return a queue as its actions see it; one of copies has a stream on a GPU."""
        device = self.communications.device
        on_stream = device.type == "cuda" and name in (COPY_OUT, COPY_IN)
        stream = torch.cuda.Stream(device) if on_stream else None  # type: ignore[no-untyped-call]
        return self._queues.setdefault(name, Queue(stream, self.hooks, self.vocabulary))

    def _overlapped_pair(self, first: Task, second: Task) -> float:
        """Run a forward and a backward interleaved; return the forward's share of the time.

        The backward begins, unless it has no communication that the forward could hide.
        """
        flights = [self._flight(task.action.stage, task.unit) for task in (first, second)]
        stages = [self.stages[task.action.stage] for task in (first, second)]
        self._await_weights(first.action)
        self._await_weights(second.action)
        forward = self._watched(first.action, forward_in_segments(flights[0], stages[0]))
        backward = self._watched(second.action, backward_in_segments(flights[1], stages[1]))
        communicates = any(group.after is not None and not group.after.quick for group in flights[1].groups)
        seconds = interleave((backward, forward) if communicates else (forward, backward))
        return seconds[communicates] / sum(seconds)

    def _await_weights(self, action: Action) -> None:
        """Wait for the weights of the action's whole stage; a plain forward waits layer by layer."""
        if self.hooks.before_layer is not None:
            for layer in self.stages[action.stage].layers.names:
                self.hooks.before_layer(layer)

    def _watched(self, action: Action, coroutine: Coroutine[None]) -> Coroutine[None]:
        """Run `coroutine`; the status names its action whenever it is resumed."""
        self.hooks.faults.before(action)
        while True:
            self.hooks.status.enter(action)
            try:
                next(coroutine)
            except StopIteration:
                return
            yield

    # -- messages --------------------------------------------------------------------------------------------------------

    def _receive(self, task: Task) -> None:
        """Wait for the messages that an action needs, and put their values where it looks for them."""
        flight = self._flights.get(key := (task.action.stage, task.unit)) or self._flight(*key)
        for message in task.receives:
            self.hooks.status.wait_for(task.action, message)
            delivery = self.transport.take(message)
            if self.checksums:
                self._verify(message, delivery)
            if message.channel.kind == "activation":
                self.step.activations[message.edge, task.unit] = delivery
            else:
                self.step.gradients[message.edge, task.unit] = delivery.values
            flight.received += (delivery,)

    def _outgoing(self, task: Task) -> list[Outgoing]:
        """Return the messages with an action's results."""
        outgoing = []
        for message in task.sends:
            key = message.edge, task.unit
            if message.channel.kind == "activation":
                values, specs, _ = self.step.activations.pop(key)
            else:
                values, specs = self.step.gradients.pop(key), ()
            outgoing.append(Outgoing(message, values, specs, message_checksum(values) if self.checksums else None))
        return outgoing

    def _verify(self, message: Message, delivery: Delivery) -> None:
        """Raise DistributedError if a message differs from what its sender computed."""
        checksum, sent = message_checksum(delivery.values), delivery.checksum or 0  # one without tensors carries none
        if checksum != sent:
            source, destination, kind = message.channel
            names = self.hooks.status.names
            raise DistributedError(
                f"{message.words} arrived damaged on the {kind} channel from {names.on_line(source)} to "
                f"{names.on_line(destination)}: its checksum is {checksum:x} here and was {sent:x} there"
            )
