"""The executor: one rank runs its program of instructions once.

It waits for the messages that an instruction needs, runs the instruction's action (or the two of an overlapped pair), and
sends the results. The order is that of the program alone. `run` executes the whole program; LocalPipeline, which has all
ranks in one thread, calls `begin`, then `execute_next` for a rank whose messages have arrived (`missing`), and `finish`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from pipeloom.errors import DistributedError, UsageError, add_note
from pipeloom.ops.checksum import message_checksum
from pipeloom.ops.segments import report_standstills_to
from pipeloom.parallel.zero import StageShards
from pipeloom.runtime.batch import Microbatches
from pipeloom.runtime.health.fault_injection import Faults
from pipeloom.runtime.health.status import Status
from pipeloom.runtime.loss import Loss, LossSum, MicrobatchLoss
from pipeloom.runtime.overlap import CommStream, Coroutine, interleave
from pipeloom.runtime.p2p.base import Delivery, Outgoing, Transport
from pipeloom.runtime.program import Instruction, RankProgram
from pipeloom.runtime.signals import Signal, Signals
from pipeloom.runtime.spread_vocabulary import SpreadVocabulary
from pipeloom.runtime.stage import ForwardCall, Stage, StageOutputs
from pipeloom.runtime.tensor_spec import BoundaryValues, ShapeCache, TensorSpecs, boundary_of
from pipeloom.schedule.actions import COMPUTE, COPY_IN, OUTPUT, PENDING, Action, fraction_of, kind_of
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
        return list(map(self._seconds, marks))

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
    beside: Callable[[Action, Callable[[], None]], None] = lambda _, execute: execute()


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


Deliveries = Mapping[Edge, Delivery]
"""An action's inputs from other ranks, or its outputs, by what they cross (a gradient by what it is the gradient of)."""


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
        self._alive_lock = threading.Lock()  # copies in threads change what is held

    # -- a run, instruction by instruction -------------------------------------------------------------------------------

    def run(self, batch: Microbatches, keep_outputs: bool = False) -> StepResult:
        """Run the program on `batch`, waiting in the transport for the other ranks' messages.

        Args:
            keep_outputs: return the outputs of the last stages, and compute no loss.
        """
        self.begin(batch, keep_outputs)
        while self.unfinished:
            self.execute_next()
        return self.finish()

    @property
    def results(self) -> list[StepResult]:
        """The result of each rank that it runs: of this one."""
        return [self.result]

    def resume(self) -> None:
        """Count waits inside layers as those of this rank from now on; another rank of this thread may have run."""
        report_standstills_to(self.communications.standing_still)

    def begin(self, batch: Microbatches, keep_outputs: bool = False) -> None:
        """Start a run: discard what an earlier one left, and open the first receives."""
        self.batch = batch
        self.keep_outputs = keep_outputs
        self.training = torch.is_grad_enabled()
        self.result = StepResult()
        self._next = 0
        self.unfinished = bool(self.program.instructions)
        self._alive = 0
        self._has_loss, self._unreached = False, self.training  # whether no loss so far carries a gradient
        # Between stages of this rank: (kind of message, edge, micro-batch) -> values for the other stage.
        self._local: dict[tuple[str, Edge, int], Delivery] = {}
        # (stage, micro-batch) -> messages received by a forward; their buffers are returned to the transport after its backward.
        self._inputs: dict[tuple[int, int], Deliveries] = {}
        self._copied: deque[Deliveries] = deque()  # inputs that are in host memory, whose buffers are returned
        self.communications.exposed()  # left by an evaluation or a failed step
        self.specs.begin([(self.training, *each) for each in batch.signatures], self.program.slices)
        self.clock.begin()
        self.resume()
        # Of program entries: marks of the clock, and for an interleaved pair the forward's share of its time.
        self._starts: list[Any] = []
        self._ends: list[Any] = []
        self._turns: dict[int, Any] = {}
        self._forward_shares: dict[int, float] = {}
        # Of a program with several queues: the ends of its entries, and the times of those beside the computation.
        self._ended: list[Future[None]] = (
            [Future() for _ in self.program.instructions] if self.program.has_queues else []
        )
        self._issued: list[Future[None]] = []
        self._beside: dict[int, tuple[float, float]] = {}
        for number, stage in self.stages.items():
            stage.begin(self.program.stages[number].offloaded)
        self._issue(self.program.issued_first)
        if self.program.instructions:
            self.transport.exchange((), self.program.instructions[0].post_receives)

    def missing(self) -> Message | Signal | Instruction | None:
        """Return what the next instruction needs first that is not there; None: it can run without waiting."""
        instruction = self.program.instructions[self._next]
        for messages in instruction.receives:
            for message in messages:
                if not self.transport.arrived(message):
                    return message
        # Without signals nothing here waits for another rank, and the order of ranks in one process does not depend on copies.
        if self.program.has_signals and instruction.queue == COMPUTE:
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
        for ended in self._issued:
            if ended.done():
                ended.result()
        return [ended for ended in self._issued if not ended.done()]

    def execute_next(self) -> None:
        """Run the next instruction: receive, compute, send the results, and open the receives of the following instruction."""
        instruction = self.program.instructions[self._next]
        while self._copied:
            self._recycle(self._copied.popleft())
        is_beside = bool(self._ended) and self._runs_beside(instruction)
        received = [
            self._received(action, messages) if messages else {}
            for action, messages in zip(instruction.actions, instruction.receives, strict=True)
        ]
        if instruction.completes_stages:
            self._announce_last_backwards(instruction.completes_stages)
        for stage in instruction.opens if self.hooks.shards is not None else ():
            self.hooks.shards.open(stage)  # type: ignore[union-attr]
        self._starts.append(self.clock.now())
        if len(instruction.actions) > 1 and any(self.stages[action.stage].segmented for action in instruction.actions):
            outgoing = self._overlapped_pair(instruction, received)
        else:
            outgoing = []
            for at, action in enumerate(() if is_beside else instruction.actions):
                if at:
                    self._turn(outgoing)
                self.hooks.status.enter(action)
                if self.hooks.before_layer is not None and (action.kind != "F" or self.stages[action.stage].segmented):
                    self._await_weights(action)
                try:
                    self.hooks.faults.before(action)
                    execute = _EXECUTE.get(action.kind) or _execute_of(action.kind)
                    output = execute(self, action, received[at])
                except Exception as error:
                    add_note(error, f"({self.hooks.status.name}, {action.words})")
                    raise
                outgoing = self._outgoing(instruction.sends[at], output) if instruction.sends[at] else []
        self._ends.append(self.clock.now())
        for stage in instruction.takes if self.hooks.shards is not None else ():
            self.hooks.shards.take(stage)  # type: ignore[union-attr]
        if self._ended and not is_beside:
            self._end(self._next)
        self._next += 1
        self.unfinished = self._next < len(self.program.instructions)
        posts = self.program.instructions[self._next].post_receives if self.unfinished else ()
        self.transport.exchange(outgoing, posts)
        self.hooks.status.done += 1
        if self.hooks.stage_done is not None:
            for stage in instruction.completes_stages:
                self.hooks.stage_done(stage)

    def _runs_beside(self, instruction: Instruction) -> bool:
        """Return whether the instruction runs on another queue; else wait for what it needs from there, and issue entries."""
        if instruction.queue != COMPUTE:
            return True
        for at in instruction.waits:
            self._ended[at].result()
        for signal in instruction.awaits:
            self.hooks.status.wait_between(signal.words)
            self._signals.wait(signal)
        self._issue(instruction.issues)
        return False

    @property
    def _signals(self) -> Signals:
        assert self.signals is not None
        return self.signals

    def _end(self, at: int) -> None:
        """Note that an entry has ended, here and for the other ranks that wait for it."""
        for signal in self.program.instructions[at].signals:
            self._signals.send(signal)
        self._ended[at].set_result(None)

    def _issue(self, entries: Sequence[int]) -> None:
        """Start entries on other queues than that of computation. Each waits for the one before it on its queue."""
        for at in entries:
            self._issued.append(self._ended[at])
            threading.Thread(target=self._run_beside, args=(at,), daemon=True).start()

    def _run_beside(self, at: int) -> None:
        """Run an entry in a thread of its own, once what it waits for has ended."""
        instruction = self.program.instructions[at]
        try:
            for other in instruction.waits:
                self._ended[other].result()
            for signal in instruction.awaits:
                self._signals.wait(signal)
            start = time.perf_counter()
            for action in instruction.actions:
                execute = _BESIDE.get(action.kind.partition(":")[0], Executor._execute_kind)
                self.hooks.beside(action, partial(execute, self, action))
            self._beside[at] = start, time.perf_counter()
            self._end(at)
        except BaseException as error:
            self._ended[at].set_exception(error)
            for action in instruction.actions:
                if kind_of(action.kind).queue == COPY_IN:
                    self.stages[action.stage].fail_copy(self._unit(action), error)

    def finish(self) -> StepResult:
        """End the run once every send and the entries on other queues have completed, and return its result."""
        self.transport.finish()
        for ended in self._ended:
            ended.result()
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
            self._read_clock()
            self.hooks.status.leave()
        return self.result

    def _read_clock(self) -> None:
        """Set the times of the actions in the result, from their marks."""
        seconds, result = self.clock.seconds, self.result
        result.starts, result.ends = seconds(self._starts), seconds(self._ends)
        for at, (start, end) in self._beside.items():
            result.starts[at], result.ends[at] = start, end
        result.turns = dict(zip(self._turns, seconds(self._turns.values()), strict=True))
        for at, share in self._forward_shares.items():
            result.turns[at] = result.starts[at] + share * (result.ends[at] - result.starts[at])

    # -- the kinds of actions --------------------------------------------------------------------------------------------

    def _forward(self, action: Action, received: Deliveries) -> Deliveries:
        """Run F; on a route's last stage, with the loss."""
        outputs = self.stages[action.stage].forward(self._forward_call(action, received), self.hooks.before_layer)
        return self._forward_done(action, outputs, received)

    def _backward(self, action: Action, received: Deliveries) -> Deliveries:
        """Run B: input and weight gradients of one micro-batch; or I, after which it stays alive until its W.

        A layer that is recomputed in a block with it runs forward again within.
        """
        keeps_weights = self._begin_backward(action)
        gradients = self._output_gradients(action, received)
        mb = action.microbatch if action.slice is None else self._unit(action)
        inputs = self.stages[action.stage].backward(mb, gradients, keeps_weights)
        if not keeps_weights:
            self._hold(-1)
        return self._backward_done(action, inputs, received)

    def _begin_backward(self, action: Action) -> bool:
        """Return whether weight gradients are left to W."""
        if action.kind in ("B", "I"):
            return action.kind == "I"
        self._hold()
        return PENDING in kind_of(action.kind).makes

    def _recompute(self, action: Action, received: Deliveries) -> Deliveries:
        """Run R: the forward again, or a part of it, which saves what the backward needs."""
        if part := kind_of(action.kind).part:
            self.stages[action.stage].recompute_part(self._unit(action), part)
        else:
            self._hold()
            self.stages[action.stage].recompute(self._unit(action), self.hooks.before_layer)
        return {}

    def _hold(self, change: int = 1) -> None:
        """Count one more micro-batch whose activations are held, or one less (-1)."""
        with self._alive_lock:
            self._alive += change
            if self._alive > self.result.peak_alive:
                self.result.peak_alive = self._alive

    def _weight_grad(self, action: Action, received: Deliveries) -> Deliveries:
        """Run W: the weight gradients of one micro-batch."""
        self.stages[action.stage].weight_grad(self._unit(action))
        self._hold(-1)
        return {}

    def _registered_kind(self, action: Action, received: Deliveries) -> Deliveries:
        """Run an action of a registered kind."""
        if self.hooks.before_kind is not None and kind_of(action.kind).execute is not None:
            self.hooks.before_kind(action.stage)
        self._execute_kind(action)
        return {}

    def _execute_kind(self, action: Action) -> None:
        execute = kind_of(action.kind).execute
        if execute is not None:
            execute(self.stages[action.stage].modules, action.microbatch)

    def _gather(self, action: Action) -> None:
        """Run UNSHARD."""
        if self.hooks.shards is not None:
            self.hooks.shards.gather(action.stage)

    def _release(self, action: Action, received: Deliveries) -> Deliveries:
        """Run RESHARD."""
        if self.hooks.shards is not None:
            self.hooks.shards.release(action.stage)
        return {}

    def _reduce(self, action: Action) -> None:
        """Run REDUCE_GRAD."""
        if self.hooks.shards is not None:
            self.hooks.shards.reduce(action.stage)

    @property
    def _spread(self) -> SpreadVocabulary:
        assert self.vocabulary is not None
        return self.vocabulary

    def _broadcast(self, action: Action) -> None:
        """Run BROADCAST."""
        edge, mb = self.program.stages[action.stage].takes, self._unit(action)
        hidden = None if edge is None else self._local.pop(("activation", edge, mb)).values[0]
        self._spread.broadcast(mb, hidden, self.batch.targets[mb])

    def _scores(self, action: Action, received: Deliveries) -> Deliveries:
        """Run S."""
        mb = self._unit(action)
        self._spread.scores(mb, self.batch.targets[mb], self.training)
        return {}

    def _sum_scores(self, action: Action) -> None:
        """Run REDUCE_SUM; the rank of the last stage of layers adds the loss to its sum."""
        mb = self._unit(action)
        loss = self._spread.sum_scores(mb, self.batch.shares[mb], self.training)
        if self.program.stages[action.stage].takes is not None:
            self.result.loss.add(loss)

    def _reduce_scores(self, action: Action) -> None:
        """Run REDUCE."""
        self._sum_scores(action)
        if self.training:
            self._reduce_input(action)

    def _reduce_input(self, action: Action) -> None:
        """Run REDUCE_INPUT; the rank of the last stage of layers keeps the gradient for its backward."""
        mb, edge = self._unit(action), self.program.stages[action.stage].takes
        gradient = self._spread.sum_input_gradient(mb)
        if edge is not None:
            self._local["gradient", edge, mb] = Delivery((gradient,), ())

    def _share_gradients(self, action: Action, received: Deliveries) -> Deliveries:
        """Run T."""
        self._spread.gradients(self._unit(action))
        return {}

    def _copy_out(self, action: Action) -> None:
        """Run O."""
        part, count = _part(action)
        self.stages[action.stage].copy_to_host(self._unit(action), part, self._copy_stream(action))
        self._hold(-1 if part == count else 0)

    def _copy_in(self, action: Action) -> None:
        """Run L."""
        part, count = _part(action)
        self._hold(1 if part == count else 0)
        self.stages[action.stage].copy_to_device(self._unit(action), part, self._copy_stream(action))

    def _copy_kept_out(self, action: Action) -> None:
        """Run OKEPT. The buffers of received inputs are returned by the thread that computes."""
        unit = self._unit(action)
        self.stages[action.stage].kept_to_host(unit, self._copy_stream(action))
        if (received := self._inputs.pop((action.stage, unit), None)) is not None:
            self._copied.append(received)

    def _copy_kept_in(self, action: Action) -> None:
        """Run LKEPT."""
        self.stages[action.stage].kept_to_device(self._unit(action), self._copy_stream(action))

    def _copy_stream(self, action: Action) -> torch.cuda.Stream | None:
        """Return the stream of the action's queue; None on the CPU."""
        queue, device = kind_of(action.kind).queue, self.communications.device
        if device.type == "cuda" and queue not in self._copy_streams:
            self._copy_streams[queue] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._copy_streams.get(queue)

    def _overlapped_pair(self, instruction: Instruction, received: Sequence[Deliveries]) -> list[Outgoing]:
        """Run a forward and a backward interleaved. Send the forward's output at once; return the backward's.

        The backward begins, unless it has no communication that the forward could hide.
        """
        first, second = instruction.actions
        self._await_weights(first)
        self._await_weights(second)
        forward = self._watched(first, self._forward_in_segments(first, received[0]))
        backward = self._watched(second, self._backward_in_segments(second, received[1]))
        if self.stages[second.stage].communicates_in_backward(self._unit(second)):
            (gradients, outputs), (backward_seconds, forward_seconds) = interleave((backward, forward))
        else:
            (outputs, gradients), (forward_seconds, backward_seconds) = interleave((forward, backward))
        self._forward_shares[self._next] = forward_seconds / (forward_seconds + backward_seconds)
        self._turn(self._outgoing(instruction.sends[0], outputs))
        return self._outgoing(instruction.sends[1], gradients)

    def _await_weights(self, action: Action) -> None:
        """Wait for the weights of the action's whole stage; a plain forward waits layer by layer."""
        if self.hooks.before_layer is not None:
            for layer in self.stages[action.stage].layers.names:
                self.hooks.before_layer(layer)

    def _forward_in_segments(self, action: Action, received: Deliveries) -> Coroutine[Deliveries]:
        """As `_forward` in a training step, yielding where it would wait for a communication."""
        call = self._forward_call(action, received)
        outputs = yield from self.stages[action.stage].forward_in_segments(call)
        return self._forward_done(action, outputs, received)

    def _backward_in_segments(self, action: Action, received: Deliveries) -> Coroutine[Deliveries]:
        """As `_backward`, yielding where it would wait for a communication."""
        keeps_weights = self._begin_backward(action)
        gradients = self._output_gradients(action, received)
        inputs = yield from self.stages[action.stage].backward_in_segments(self._unit(action), gradients, keeps_weights)
        if not keeps_weights:
            self._hold(-1)
        return self._backward_done(action, inputs, received)

    def _watched(self, action: Action, coroutine: Coroutine[Deliveries]) -> Coroutine[Deliveries]:
        """Run `coroutine`; the status names its action whenever it is resumed, and an error in it is given that action."""
        try:
            self.hooks.faults.before(action)
            while True:
                self.hooks.status.enter(action)
                try:
                    next(coroutine)
                except StopIteration as end:
                    return end.value  # type: ignore[no-any-return]
                yield
        except Exception as error:
            add_note(error, f"({self.hooks.status.name}, {action.words})")
            raise

    # -- inputs and outputs of actions -----------------------------------------------------------------------------------

    def _forward_call(self, action: Action, received: Deliveries) -> ForwardCall:
        """Return the arguments of a forward."""
        stage, mb = action.stage, action.microbatch if action.slice is None else self._unit(action)
        program = self.program.stages[stage]
        if self.training and mb not in program.recomputed and mb not in program.in_blocks:
            self._hold()
        keywords, loss = self.batch.keywords[mb], self._loss_of(mb)
        if program.takes is None:
            return ForwardCall(mb, self.batch.inputs[self.hooks.faults.input_of(mb)], None, keywords, program, loss)
        if self.training and received:
            self._inputs[stage, mb] = received
        values: BoundaryValues = ()
        specs: TensorSpecs = ()
        for edge in program.inputs:
            if edge in received:
                delivery = received[edge]
                self.specs.remember(edge, mb, delivery.boundary)
            else:
                delivery = self._local.pop(("activation", edge, mb))
            values, specs = values + delivery.values, specs + delivery.boundary
        return ForwardCall(mb, values, specs, keywords, program, loss)

    def _unit(self, action: Action) -> int:
        """Return the number of the action's micro-batch, or of its slice where sequences are cut: both are called so here."""
        if action.slice is None:
            return action.microbatch
        return action.microbatch * self.program.slices + action.slice

    def _gradients_of(self, edge: Edge, microbatch: int, received: Deliveries) -> BoundaryValues:
        """Return the gradients of the values sent along an edge, from another rank or from another stage here."""
        delivery = received[edge] if edge in received else self._local.pop(("gradient", edge, microbatch))
        return delivery.values

    def _loss_of(self, microbatch: int) -> MicrobatchLoss | None:
        """Return the loss of a micro-batch, for the stages that compute one; None: outputs only."""
        if self.keep_outputs:
            return None
        return MicrobatchLoss(self.loss, self.batch.targets[microbatch], self.batch.shares[microbatch])

    def _forward_done(self, action: Action, outputs: StageOutputs, received: Deliveries) -> Deliveries:
        """Distribute a forward's outputs to other stages, and add its losses to the sums."""
        if not self.training:
            self._recycle(received)
        if outputs.loss is not None:
            self.result.loss.add(outputs.loss)
            self._unreached = self._unreached and outputs.unreached and not outputs.terms
            self._has_loss = True
        for key, share, weight in outputs.terms:
            self.result.loss.add_term(key, share, weight)
        program, mb = (
            self.program.stages[action.stage],
            action.microbatch if action.slice is None else self._unit(action),
        )
        deliveries: dict[Edge, Delivery] = {}
        if program.gives is None:
            if self.keep_outputs:
                self.result.outputs[mb] = outputs.result
        else:
            self._give(program.gives, mb, outputs.values, deliveries)
        for name, edges in program.writes.items():
            for edge in edges:
                self._give(edge, mb, (outputs.tensors[name],), deliveries)
        return deliveries

    def _give(self, edge: Edge, microbatch: int, values: BoundaryValues, deliveries: dict[Edge, Delivery]) -> None:
        """Pass a forward's `values` to the consumer of `edge`: to a stage here, or into `deliveries`."""
        specs = boundary_of(values)
        self.specs.remember(edge, microbatch, specs)
        if edge.consumer in self.stages:
            self._local["activation", edge, microbatch] = Delivery(_handed_over(edge, values), specs)
        else:
            deliveries[edge] = Delivery(values, specs)

    def _output_gradients(self, action: Action, received: Deliveries) -> BoundaryValues:
        """Return the gradients from which a backward starts, besides losses: those of the outputs, then those of tensors that
        other stages read by name.
        """
        program, mb = (
            self.program.stages[action.stage],
            action.microbatch if action.slice is None else self._unit(action),
        )
        gradients = () if program.gives is None else self._gradients_of(program.gives, mb, received)
        for edges in program.writes.values():
            # One gradient per reader, None where the reader has none; no entry for a tensor that carries no gradient.
            parts = [value for edge in edges for value in self._gradients_of(edge, mb, received)]
            reached = [value for value in parts if value is not None]
            if parts:
                gradients = (*gradients, sum(reached[1:], start=reached[0]) if reached else None)
        return gradients

    def _backward_done(self, action: Action, gradients: Sequence[BoundaryValues], received: Deliveries) -> Deliveries:
        """Distribute a backward's input gradients to the stages before; return receive buffers to the transport."""
        stage, mb = action.stage, action.microbatch if action.slice is None else self._unit(action)
        program = self.program.stages[stage]
        for arrived in (self._inputs.pop((stage, mb), None), received):
            if arrived:
                self._recycle(arrived)
        deliveries = {}
        for edge, values in zip(program.inputs, gradients[program.takes is None :], strict=True):
            if edge.producer in self.stages:
                self._local["gradient", edge, mb] = Delivery(values, ())
            else:
                deliveries[edge] = Delivery(values, ())
        return deliveries

    def _recycle(self, deliveries: Deliveries) -> None:
        for delivery in deliveries.values():
            self.transport.recycle(delivery.values)

    # -- messages --------------------------------------------------------------------------------------------------------

    def _received(self, action: Action, messages: Sequence[Message]) -> Deliveries:
        """Return the deliveries of the messages that an action needs, once all have arrived."""
        deliveries = {}
        for message in messages:
            self.hooks.status.wait_for(action, message)
            delivery = deliveries[message.edge] = self.transport.take(message)
            if self.checksums:
                self._verify(message, delivery)
        return deliveries

    def _outgoing(self, messages: Sequence[Message], outputs: Deliveries) -> list[Outgoing]:
        """Return `outputs` as outgoing messages."""
        outgoing = []
        for message in messages:
            delivery = outputs[message.edge]
            checksum = message_checksum(delivery.values) if self.checksums else None
            values = self.hooks.faults.sent(delivery.values)
            if values is not None:
                outgoing.append(Outgoing(message, values, delivery.boundary, checksum))
        return outgoing

    def _turn(self, outgoing: list[Outgoing]) -> None:
        """Between the two actions of a pair: send the results of the first one at once."""
        if self._next not in self._forward_shares:
            self._turns.setdefault(self._next, self.clock.now())
        if outgoing:
            self.transport.exchange(outgoing, ())

    def _announce_last_backwards(self, stages: Sequence[int]) -> None:
        if self.hooks.before_last_backward is not None:
            for stage in stages:
                if not self.stages[stage].segmented and not self.program.stages[stage].split:
                    self.hooks.before_last_backward(stage)

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


_EXECUTE: dict[str, Callable[[Executor, Action, Deliveries], Deliveries]] = {
    "F": Executor._forward,
    "B": Executor._backward,
    "I": Executor._backward,
    "W": Executor._weight_grad,
    "R": Executor._recompute,
    "RB": Executor._backward,
    "RI": Executor._backward,
    "RESHARD": Executor._release,
    "S": Executor._scores,
    "T": Executor._share_gradients,
}
_BESIDE: dict[str, Callable[[Executor, Action], None]] = {
    "O": Executor._copy_out,
    "L": Executor._copy_in,
    "OKEPT": Executor._copy_kept_out,
    "LKEPT": Executor._copy_kept_in,
    "UNSHARD": Executor._gather,
    "REDUCE_GRAD": Executor._reduce,
    "BROADCAST": Executor._broadcast,
    "REDUCE": Executor._reduce_scores,
    "REDUCE_SUM": Executor._sum_scores,
    "REDUCE_INPUT": Executor._reduce_input,
}


def _execute_of(kind: str) -> Callable[[Executor, Action, Deliveries], Deliveries]:
    """Return what executes a kind of a part, or a registered one."""
    return _EXECUTE.get(kind.partition(":")[0], Executor._registered_kind)


def _part(action: Action) -> tuple[int, int]:
    """Return the number of the part that a copy moves, and of how many; (1, 1) of the whole."""
    return fraction_of(action.kind) or (1, 1)
