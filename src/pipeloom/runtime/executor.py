"""The executor: one rank runs its program of instructions once.

It waits for the messages that an instruction needs, runs the instruction's action (or the two of an overlapped pair), and
sends the results (`execute`, also in the thread of an action beside the computation). The order is that of the program alone.
`run` executes the whole program; LocalPipeline, which has all ranks in one thread, calls `begin`, then `execute` for a rank
whose messages have arrived (`missing`), and `finish`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from pipeloom.errors import DistributedError, UsageError
from pipeloom.ops.checksum import message_checksum
from pipeloom.ops.segments import report_standstills_to
from pipeloom.parallel.zero import StageShards
from pipeloom.runtime.batch import Microbatches
from pipeloom.runtime.health.fault_injection import Faults
from pipeloom.runtime.health.report import lost_peer
from pipeloom.runtime.health.status import Status
from pipeloom.runtime.loss import Loss, LossSum, MicrobatchLoss
from pipeloom.runtime.overlap import CommStream, Coroutine, interleave
from pipeloom.runtime.p2p.base import Delivery, Outgoing, Transport
from pipeloom.runtime.program import Instruction, RankProgram, StageProgram, Task
from pipeloom.runtime.signals import Signal, Signals
from pipeloom.runtime.spread_vocabulary import SpreadVocabulary
from pipeloom.runtime.stage import ForwardCall, InputGradients, Stage, StageOutputs
from pipeloom.runtime.tensor_spec import BoundaryValues, ShapeCache, TensorSpecs, boundary_of
from pipeloom.schedule.actions import COMPUTE, COPY_IN, OUTPUT, Action, fraction_of, kind_of
from pipeloom.schedule.channels import Edge, Message


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
        torch.cuda.synchronize(self._device)
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


def clock_for(device: torch.device, traced: bool) -> HostClock | DeviceClock:
    """Return the clock for actions on `device`; `traced`: a step may wait for the device at its ends."""
    return DeviceClock(device) if traced and device.type == "cuda" else HostClock()


@dataclass(frozen=True)
class StepHooks:
    """Objects and callbacks that a step reports to while it runs.

    Attributes:
        status: the action that the rank is in and what it waits for, for the watchdog.
        faults: the faults to inject.
        before_last_backward: called with a stage before its last B, if that is a single call of autograd.
        stage_done: called with a stage once its gradients are complete and the messages of the completing action are sent.
        before_layer: called with a layer's name before its weights are read: they may still be in transit.
        shards: what gathers and frees parameters and reduces gradients; None: these actions do nothing.
        before_kind: called with a stage before an action of a registered kind, which may read the stage's gradients.
        beside: called with an action on another queue than that of computation and what executes it, in the action's thread.
    """

    status: Status
    faults: Faults
    before_last_backward: Callable[[int], None] | None = None
    stage_done: Callable[[int], None] | None = None
    before_layer: Callable[[str], None] | None = None
    before_kind: Callable[[int], None] | None = None
    shards: StageShards | None = None
    beside: Callable[[Action, Callable[[], object]], object] = lambda _, execute: execute()


@dataclass
class StepResult:
    """Result of one run of a rank's program.

    Attributes:
        loss: sums of this rank's shares of the loss and of layers' terms.
        outputs: micro-batch -> output of the route's last stage, if requested.
        starts, ends: seconds (time.perf_counter) of each program entry.
        turns: entry of a pair -> time at which its forward ended and its backward began; for an interleaved pair, the time at
            which that would have been had the two run one after the other.
        peak_alive: the most micro-batches alive on its stages at once.
        exposed: kind of communication -> seconds for which computation waited for it inside actions; None: not measured.
        after: kind of communication -> its seconds after the last action.
        end: time at which the gradients were complete (time.perf_counter); 0: the end of the last action.
    """

    loss: LossSum = field(default_factory=LossSum)
    outputs: dict[int, Any] = field(default_factory=dict)
    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    turns: dict[int, float] = field(default_factory=dict)
    peak_alive: int = 0
    exposed: Mapping[str, float] | None = None
    after: Mapping[str, float] = field(default_factory=dict)
    end: float = 0.0


Deliveries = Sequence[Delivery]
"""An action's inputs from other ranks, in their order."""


class Executor:
    """One rank's run of one program.

    Args:
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
        signals: sends and receives those of the program, if it has any.
    """

    def __init__(
        self,
        program: RankProgram,
        stages: Mapping[int, Stage],
        transport: Transport,
        hooks: StepHooks,
        *,
        loss: Loss,
        specs: ShapeCache,
        communications: CommStream,
        clock: HostClock | DeviceClock,
        checksums: bool = False,
        vocabulary: SpreadVocabulary | None = None,
        signals: Signals | None = None,
    ) -> None:
        self.program = program
        self.stages = stages
        self.transport = transport
        self.hooks = hooks
        self.loss = loss
        self.specs = specs
        self.communications = communications
        self.clock = clock
        self.checksums = checksums
        self.vocabulary = vocabulary
        self.signals = signals
        self._copy_streams: dict[str, torch.cuda.Stream] = {}

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

    def begin(self, batch: Microbatches, keep_outputs: bool = False) -> None:
        """Start a run: discard what an earlier one left, and open the first receives."""
        self.batch = batch
        self.keep_outputs = keep_outputs
        self.training = torch.is_grad_enabled()
        self.result = StepResult()
        self.results = [self.result]  # of each rank that it runs
        instructions = self.program.instructions
        self._computation = iter(self.program.computation)
        self.next = next(self._computation, None)
        # 1 for each micro-batch whose activations are held from then on, -1 where they are freed.
        self._held: list[int] = []
        self._has_loss, self._unreached = False, self.training  # whether no loss so far carries a gradient
        self._losses: Sequence[MicrobatchLoss | None] = (None,) * batch.count
        if not keep_outputs:
            self._losses = [MicrobatchLoss(self.loss, *each) for each in zip(batch.targets, batch.shares, strict=True)]
        self._given = self.hooks.faults.inputs(batch.inputs)
        # Between stages of this rank: (edge, micro-batch) -> the values for the other stage, and their gradients.
        self._activations: dict[tuple[Edge, int], Delivery] = {}
        self._gradients: dict[tuple[Edge, int], BoundaryValues] = {}
        # (stage, micro-batch) -> messages received by a forward; their buffers are returned to the transport after its backward.
        self._inputs: dict[tuple[int, int], Deliveries] = {}
        self._copied: deque[Deliveries] = deque()  # inputs that are in host memory, whose buffers are returned
        self.communications.exposed()  # left by an evaluation or a failed step
        self.specs.begin([(self.training, *each) for each in batch.signatures], self.program.slices)
        self.clock.begin()
        self.resume()
        # Of program entries: marks of the clock, and for an interleaved pair the forward's share of its time.
        self._starts: list[Any] = [0.0] * len(instructions)
        self._ends: list[Any] = [0.0] * len(instructions)
        self._forward_shares: dict[int, float] = {}
        # Of a program with several queues: the ends of its entries, and those of other queues that have been issued.
        self._ended: list[Future[None]] = [Future() for _ in instructions] if self.program.has_queues else []
        self._issued: list[int] = []
        self._copies = {n: stage.begin(self.program.stages[n].offloaded) for n, stage in self.stages.items()}
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
                if not self._signals.arrived(signal):
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
        task, second, computes = instruction.tasks[0], instruction.second, instruction.queue == COMPUTE
        action = task.action
        if self._ended:
            self._await_queues(instruction, status)
        received = self._received(task) if task.receives else ()
        for_second = () if second is None else self._received(second)
        if instruction.completes_stages and hooks.before_last_backward is not None:
            for stage in instruction.completes_stages:
                if not self.stages[stage].segmented and not self.program.stages[stage].split:
                    hooks.before_last_backward(stage)
        now = self.clock.now if computes else time.perf_counter
        outgoing: Sequence[Outgoing] | None = None
        status.enter(action)
        self._starts[at] = now()
        try:
            if second is not None:
                outgoing, self._forward_shares[at] = self._overlapped_pair(task, second, received, for_second)
            else:
                hooks.faults.before(action)
                if not computes:
                    hooks.beside(action, partial(_EXECUTE[action.kind], self, task, received))
                else:
                    if hooks.before_layer is not None and (action.kind != "F" or self.stages[action.stage].segmented):
                        self._await_weights(action)
                    outgoing = _EXECUTE[action.kind](self, task, received)
        except Exception as error:
            status.failed(error)
            raise
        self._ends[at] = now()
        if self._ended:
            self._end(at)
        if not computes:
            return
        self.next = following = next(self._computation, None)
        posts = () if following is None else self.program.instructions[following].post_receives
        self.transport.exchange(outgoing or (), posts)
        if instruction.completes_stages and hooks.stage_done is not None:
            for stage in instruction.completes_stages:
                hooks.stage_done(stage)

    def _await_queues(self, instruction: Instruction, status: Status) -> None:
        """Wait for what an instruction needs from other queues and ranks, and issue the entries that start with it. Make the
        buffers of gradients to which it is the first to add.
        """
        action = instruction.tasks[0].action
        while self._copied and instruction.queue == COMPUTE:
            self._recycle(self._copied.popleft())
        for at in instruction.waits:
            status.wait_for(action, self.program.instructions[at].words)
            self._ended[at].result()
        for signal in instruction.awaits:
            status.wait_for(action, signal.words)
            self._signals.wait(signal)
        self._issue(instruction.issues)
        if self.hooks.shards is not None:
            for stage in instruction.opens:
                self.hooks.shards.open(stage)

    @property
    def _signals(self) -> Signals:
        assert self.signals is not None
        return self.signals

    def _end(self, at: int) -> None:
        """Note that an entry has ended, here and for the other ranks that wait for it. Take over the gradients to which it was
        the last to add before they are reduced.
        """
        instruction = self.program.instructions[at]
        if self.hooks.shards is not None:
            for stage in instruction.takes:
                self.hooks.shards.take(stage)
        for signal in instruction.signals:
            self._signals.send(signal)
        self._ended[at].set_result(None)

    def _issue(self, entries: Sequence[int]) -> None:
        """Start entries on other queues than that of computation. Each waits for the one before it on its queue."""
        for at in entries:
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
            action, unit, *_ = self.program.instructions[at].tasks[0]
            if kind_of(action.kind).queue == COPY_IN and unit in self._copies[action.stage].saved:
                self._copies[action.stage].saved[unit].result().fail(error)  # a backward may wait for it

    def finish(self) -> StepResult:
        """End the run once every send and the entries on other queues have completed, and return its result."""
        self.transport.finish()
        for at in self._issued:
            self.hooks.status.wait_between(self.program.instructions[at].words)
            self._ended[at].result()
        self.hooks.status.leave()
        report_standstills_to(None)
        if self._has_loss and self._unreached:
            raise UsageError(
                "the loss carries no gradient for any micro-batch, but the outputs that it is computed from do: nothing would "
                "train; compute it from them without detach(), .item() or torch.no_grad()"
            )
        with self.hooks.status.during("device"):
            self.hooks.status.wait_between("its GPU")  # the host's clock needs no conversion
            self.result.exposed = self.communications.exposed()
            self.result.peak_alive = max(accumulate(self._held), default=0)
            starts, ends = map(self.clock.seconds, (self._starts, self._ends))
            self.hooks.status.leave()
        self.result.starts, self.result.ends = starts, ends
        self.result.turns = {at: starts[at] + s * (ends[at] - starts[at]) for at, s in self._forward_shares.items()}
        return self.result

    # -- the kinds of actions --------------------------------------------------------------------------------------------

    def _forward(self, task: Task, received: Deliveries) -> list[Outgoing]:
        """Run F; on a route's last stage, with the loss."""
        call = self._forward_call(task, received)
        outputs = self.stages[task.action.stage].forward(call, self.hooks.before_layer)
        return self._forward_done(task, call.program, outputs, received)

    def _backward(self, task: Task, received: Deliveries) -> list[Outgoing]:
        """Run B: input and weight gradients of one micro-batch; or I, after which it stays alive until its W.

        A layer that is recomputed in a block with it runs forward again within.
        """
        stage = task.action.stage
        program = self.program.stages[stage]
        gradients = self._output_gradients(task, program, received)
        inputs = self.stages[stage].backward(task.unit, gradients, task.defers)
        return self._backward_done(task, program, inputs, received)

    def _recompute(self, task: Task, received: Deliveries) -> None:
        """Run R: the forward again, or a part of it, which saves what the backward needs."""
        stage = self.stages[task.action.stage]
        if part := kind_of(task.action.kind).part:
            stage.recompute_part(task.unit, part)
        else:
            self._held.append(1)
            stage.recompute(task.unit, self.hooks.before_layer)

    def _weight_grad(self, task: Task, received: Deliveries) -> None:
        """Run W: the weight gradients of one micro-batch."""
        self.stages[task.action.stage].weight_grad(task.unit)
        self._held.append(-1)

    def _registered_kind(self, task: Task, received: Deliveries) -> None:
        """Run an action of a registered kind."""
        kind = kind_of(task.action.kind)
        if kind.execute is not None:
            if self.hooks.before_kind is not None and kind.queue == COMPUTE:
                self.hooks.before_kind(task.action.stage)
            kind.execute(self.stages[task.action.stage].modules, task.action.microbatch)

    def _gather(self, task: Task, received: Deliveries) -> None:
        """Run UNSHARD."""
        if self.hooks.shards is not None:
            self.hooks.shards.gather(task.action.stage)

    def _release(self, task: Task, received: Deliveries) -> None:
        """Run RESHARD."""
        if self.hooks.shards is not None:
            self.hooks.shards.release(task.action.stage)

    def _reduce(self, task: Task, received: Deliveries) -> None:
        """Run REDUCE_GRAD."""
        if self.hooks.shards is not None:
            self.hooks.shards.reduce(task.action.stage)

    @property
    def _spread(self) -> SpreadVocabulary:
        assert self.vocabulary is not None
        return self.vocabulary

    def _broadcast(self, task: Task, received: Deliveries) -> None:
        """Run BROADCAST."""
        edge, mb = self.program.stages[task.action.stage].takes, task.unit
        hidden = None if edge is None else self._activations.pop((edge, mb)).values[0]
        self._spread.broadcast(mb, hidden, self.batch.targets[mb])

    def _scores(self, task: Task, received: Deliveries) -> None:
        """Run S."""
        self._spread.scores(task.unit, self.batch.targets[task.unit], self.training)

    def _sum_scores(self, task: Task, received: Deliveries) -> None:
        """Run REDUCE_SUM; the rank of the last stage of layers adds the loss to its sum."""
        loss = self._spread.sum_scores(task.unit, self.batch.shares[task.unit], self.training)
        if self.program.stages[task.action.stage].takes is not None:
            self.result.loss.add(loss)

    def _reduce_scores(self, task: Task, received: Deliveries) -> None:
        """Run REDUCE."""
        self._sum_scores(task, received)
        if self.training:
            self._reduce_input(task, received)

    def _reduce_input(self, task: Task, received: Deliveries) -> None:
        """Run REDUCE_INPUT; the rank of the last stage of layers keeps the gradient for its backward."""
        gradient, edge = self._spread.sum_input_gradient(task.unit), self.program.stages[task.action.stage].takes
        if edge is not None:
            self._gradients[edge, task.unit] = (gradient,)

    def _share_gradients(self, task: Task, received: Deliveries) -> None:
        """Run T."""
        self._spread.gradients(task.unit)

    def _look_up(self, task: Task, received: Deliveries) -> None:
        """Run EMBED; the rank of the first stage keeps the rows as that stage's input."""
        (tokens,) = self._given[task.unit]
        rows = self._spread.look_up(task.unit, tokens, self.training)
        if (edge := self.program.stages[task.action.stage].gives) is not None:
            self._activations[edge, task.unit] = Delivery((rows,), boundary_of((rows,)))

    def _add_rows(self, task: Task, received: Deliveries) -> None:
        """Run EMBED_GRAD."""
        edge = self.program.stages[task.action.stage].gives
        gradients = () if edge is None else self._gradients.pop((edge, task.unit))
        self._spread.add_rows(task.unit, *gradients)

    def _copy_out(self, task: Task, received: Deliveries) -> None:
        """Run O."""
        part, count = fraction_of(task.action.kind) or (1, 1)
        self._copies[task.action.stage].saved[task.unit].result().to_host(part, self._copy_stream(task.action))
        self._held.append(-1 if part == count else 0)

    def _copy_in(self, task: Task, received: Deliveries) -> None:
        """Run L."""
        part, count = fraction_of(task.action.kind) or (1, 1)
        self._held.append(1 if part == count else 0)
        self._copies[task.action.stage].saved[task.unit].result().to_device(part, self._copy_stream(task.action))

    def _copy_kept_out(self, task: Task, received: Deliveries) -> None:
        """Run OKEPT. The buffers of received inputs are returned by the thread that computes."""
        stage = task.action.stage
        self.stages[stage].kept_to_host(self._copies[stage], task.unit, self._copy_stream(task.action))
        self._copied.append(self._inputs.pop((stage, task.unit), ()))

    def _copy_kept_in(self, task: Task, received: Deliveries) -> None:
        """Run LKEPT."""
        stage = task.action.stage
        self.stages[stage].kept_to_device(self._copies[stage], task.unit, self._copy_stream(task.action))

    def _copy_stream(self, action: Action) -> torch.cuda.Stream | None:
        """Return the stream of the action's queue; None on the CPU."""
        queue, device = kind_of(action.kind).queue, self.communications.device
        if device.type == "cuda" and queue not in self._copy_streams:
            self._copy_streams[queue] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._copy_streams.get(queue)

    def _overlapped_pair(
        self, first: Task, second: Task, for_first: Deliveries, for_second: Deliveries
    ) -> tuple[list[Outgoing], float]:
        """Run a forward and a backward interleaved. Send the forward's output at once; return the backward's, and the forward's
        share of the time.

        The backward begins, unless it has no communication that the forward could hide.
        """
        self._await_weights(first.action)
        self._await_weights(second.action)
        forward = self._watched(first.action, self._forward_in_segments(first, for_first))
        backward = self._watched(second.action, self._backward_in_segments(second, for_second))
        gradients: list[Outgoing]
        if self.stages[second.action.stage].communicates_in_backward(second.unit):
            (gradients, outputs), (backward_seconds, forward_seconds) = interleave((backward, forward))
        else:
            (outputs, gradients), (forward_seconds, backward_seconds) = interleave((forward, backward))
        if outputs:
            self.transport.exchange(outputs, ())
        return gradients, forward_seconds / (forward_seconds + backward_seconds)

    def _await_weights(self, action: Action) -> None:
        """Wait for the weights of the action's whole stage; a plain forward waits layer by layer."""
        if self.hooks.before_layer is not None:
            for layer in self.stages[action.stage].layers.names:
                self.hooks.before_layer(layer)

    def _forward_in_segments(self, task: Task, received: Deliveries) -> Coroutine[list[Outgoing]]:
        """As `_forward` in a training step, yielding where it would wait for a communication."""
        call = self._forward_call(task, received)
        outputs = yield from self.stages[task.action.stage].forward_in_segments(call)
        return self._forward_done(task, call.program, outputs, received)

    def _backward_in_segments(self, task: Task, received: Deliveries) -> Coroutine[list[Outgoing]]:
        """As `_backward`, yielding where it would wait for a communication."""
        stage = task.action.stage
        program = self.program.stages[stage]
        gradients = self._output_gradients(task, program, received)
        inputs = yield from self.stages[stage].backward_in_segments(task.unit, gradients, task.defers)
        return self._backward_done(task, program, inputs, received)

    def _watched(self, action: Action, coroutine: Coroutine[list[Outgoing]]) -> Coroutine[list[Outgoing]]:
        """Run `coroutine`; the status names its action whenever it is resumed."""
        self.hooks.faults.before(action)
        while True:
            self.hooks.status.enter(action)
            try:
                next(coroutine)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            yield

    # -- inputs and outputs of actions -----------------------------------------------------------------------------------

    def _forward_call(self, task: Task, received: Deliveries) -> ForwardCall:
        """Return the arguments of a forward."""
        stage, unit = task.action.stage, task.unit
        program = self.program.stages[stage]
        if self.training and unit not in program.unsaved:
            self._held.append(1)
        keywords, loss = self.batch.keywords[unit], self._losses[unit]
        if program.takes is None:
            return ForwardCall(unit, self._given[unit], None, keywords, program, loss)
        if self.training and received:
            self._inputs[stage, unit] = received
        arrived = iter(received)
        values: BoundaryValues = ()
        specs: TensorSpecs = ()
        for edge in program.inputs:
            here = edge.producer in self.stages
            delivery = self._activations.pop((edge, unit)) if here else next(arrived)
            values, specs = values + delivery.values, specs + delivery.boundary
        return ForwardCall(unit, values, specs, keywords, program, loss)

    def _forward_done(
        self, task: Task, program: StageProgram, outputs: StageOutputs, received: Deliveries
    ) -> list[Outgoing]:
        """Distribute a forward's outputs: to stages here, and as the returned messages; add its losses to the sums."""
        if not self.training:
            self._recycle(received)
        if outputs.loss is not None:
            self.result.loss.add(outputs.loss)
            self._unreached = self._unreached and outputs.unreached and not outputs.terms
            self._has_loss = True
        for key, share, weight in outputs.terms:
            self.result.loss.add_term(key, share, weight)
        outgoing: list[Outgoing] = []
        if program.gives is not None:
            self._give(task, program.gives, outputs.values, outgoing)
        elif self.keep_outputs:
            self.result.outputs[task.unit] = outputs.result
        for name, edges in program.writes.items():
            for edge in edges:
                self._give(task, edge, (outputs.tensors[name],), outgoing)
        return outgoing

    def _give(self, task: Task, edge: Edge, values: BoundaryValues, outgoing: list[Outgoing]) -> None:
        """Pass a forward's `values` to the consumer of `edge`: to a stage here, or in the next one of the task's messages."""
        specs = boundary_of(values)
        self.specs.remember(edge, task.unit, specs)
        if edge.consumer in self.stages:
            self._activations[edge, task.unit] = Delivery(_handed_over(edge, values), specs)
        else:
            outgoing.append(self._outgoing(task.sends[len(outgoing)], values, specs))

    def _output_gradients(self, task: Task, program: StageProgram, received: Deliveries) -> BoundaryValues:
        """Return the gradients from which a backward starts, besides losses: those of the outputs, then those of tensors that
        other stages read by name.
        """
        if task.unit in program.in_blocks:  # from here on
            self._held.append(1)
        arrived = iter(received)
        gradients = () if program.gives is None else self._gradients_of(program.gives, task.unit, arrived)
        for edges in program.writes.values():
            # One gradient per reader, None where the reader has none; no entry for a tensor that carries no gradient.
            parts = [value for edge in edges for value in self._gradients_of(edge, task.unit, arrived)]
            reached = [value for value in parts if value is not None]
            if parts:
                gradients = (*gradients, sum(reached[1:], start=reached[0]) if reached else None)
        return gradients

    def _gradients_of(self, edge: Edge, unit: int, arrived: Iterator[Delivery]) -> BoundaryValues:
        """Return the gradients of the values sent along an edge, from another stage here, or from the next message."""
        return self._gradients.pop((edge, unit)) if edge.consumer in self.stages else next(arrived).values

    def _backward_done(
        self, task: Task, program: StageProgram, gradients: InputGradients, received: Deliveries
    ) -> list[Outgoing]:
        """Distribute a backward's input gradients: to stages here, and as the returned messages. Return receive buffers to the
        transport.
        """
        if not task.defers:
            self._held.append(-1)
        self._recycle((*self._inputs.pop((task.action.stage, task.unit), ()), *received))
        outgoing: list[Outgoing] = []
        for edge, values in zip(program.inputs, gradients, strict=True):
            if edge.producer in self.stages:
                self._gradients[edge, task.unit] = values
            else:
                outgoing.append(self._outgoing(task.sends[len(outgoing)], values, ()))
        return outgoing

    def _recycle(self, deliveries: Deliveries) -> None:
        for delivery in deliveries:
            self.transport.recycle(delivery.values)

    # -- messages --------------------------------------------------------------------------------------------------------

    def _received(self, task: Task) -> Deliveries:
        """Return the deliveries of the messages that an action needs, once all have arrived."""
        deliveries = []
        for message in task.receives:
            self.hooks.status.wait_for(task.action, message)
            delivery = self.transport.take(message)
            if self.checksums:
                self._verify(message, delivery)
            deliveries.append(delivery)
        return deliveries

    def _outgoing(self, message: Message, values: BoundaryValues, specs: TensorSpecs) -> Outgoing:
        return Outgoing(message, values, specs, message_checksum(values) if self.checksums else None)

    def _verify(self, message: Message, delivery: Delivery) -> None:
        """Raise DistributedError if a message differs from what its sender computed."""
        if not any(value is not None for value in delivery.values):
            return
        checksum = message_checksum(delivery.values)
        if checksum != delivery.checksum:
            source, destination, kind = message.channel
            names = self.hooks.status.names
            raise DistributedError(
                f"{message.words} arrived damaged on the {kind} channel from {names.on_line(source)} to "
                f"{names.on_line(destination)}: its checksum is {checksum:x} here and was {delivery.checksum or 0:x} there"
            )


def _handed_over(edge: Edge, values: BoundaryValues) -> BoundaryValues:
    """Return `values` for a stage of the same rank.

    The next stage may change its input in place, and a tensor with a name may be that: its readers get a copy.
    """
    if edge.name == OUTPUT:
        # A tensor that requires a gradient becomes a leaf of the next stage's own graph.
        return tuple([value if value is None or value.requires_grad else value.detach() for value in values])
    return tuple([None if value is None else value.detach().clone() for value in values])


class _Executions(dict[str, Callable[[Executor, Task, Deliveries], list[Outgoing] | None]]):
    """The methods that run actions, by kind; those of a part and registered ones are added where they are first run."""

    def __missing__(self, kind: str) -> Callable[[Executor, Task, Deliveries], list[Outgoing] | None]:
        self[kind] = self.get(kind.partition(":")[0], Executor._registered_kind)
        return self[kind]


_EXECUTE = _Executions(
    F=Executor._forward,
    B=Executor._backward,
    I=Executor._backward,
    W=Executor._weight_grad,
    R=Executor._recompute,
    RB=Executor._backward,
    RI=Executor._backward,
    RESHARD=Executor._release,
    S=Executor._scores,
    T=Executor._share_gradients,
    O=Executor._copy_out,
    L=Executor._copy_in,
    OKEPT=Executor._copy_kept_out,
    LKEPT=Executor._copy_kept_in,
    UNSHARD=Executor._gather,
    REDUCE_GRAD=Executor._reduce,
    BROADCAST=Executor._broadcast,
    REDUCE=Executor._reduce_scores,
    REDUCE_SUM=Executor._sum_scores,
    REDUCE_INPUT=Executor._reduce_input,
    EMBED=Executor._look_up,
    EMBED_GRAD=Executor._add_rows,
)
