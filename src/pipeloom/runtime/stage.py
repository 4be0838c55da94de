"""A stage: its layers, the forward and backward of one micro-batch through them, and the state kept in between.

A stage whose layers declare no segments runs them one after the other, and its backward is a single call of autograd. A
segmented stage is cut at its communications (runtime/overlap.py); its forward and backward are coroutines, which
`forward` and `backward` run to their end and an overlapped pair interleaves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipeloom.errors import ConfigError, UsageError
from pipeloom.ops.checksum import version_of
from pipeloom.ops.deferred import WeightGradContext, WeightGradQueue, defer_weight_gradients, run_backward
from pipeloom.ops.host_memory import HostBuffers, HostCopy
from pipeloom.ops.parts import RecomputedParts, run_part
from pipeloom.ops.recompute import StartState, on_copies, recomputed
from pipeloom.ops.saved_tensors import SavedTensor, require_version, saving
from pipeloom.ops.segments import Communication, carries, saved_of
from pipeloom.ops.slices import STATE, PieceRoot, SequenceHistory, SliceState
from pipeloom.ops.stage_state import batch_statistics
from pipeloom.runtime.loss import MicrobatchLoss
from pipeloom.runtime.offload import SavedTensors
from pipeloom.runtime.overlap import CommStream, ComputeGroup, Coroutine, run_to_end, split_at_communications
from pipeloom.runtime.program import StageProgram
from pipeloom.runtime.stage_modules import StageModules
from pipeloom.runtime.tensor_spec import BoundaryValues, TensorSpecs, as_values, require_plain, tensors_in

_FIRST = 64  # forwards per stage; a layer that changes its input in place does so in one of them


class StageOutputs(NamedTuple):
    """Results of a forward.

    Attributes:
        values: outputs for the next stage, attached to the graph; empty for a route's last stage.
        tensors: the tensors that later stages read by name, attached too.
        result: what the last layer of a route returned, if no loss is computed.
        loss: the share of the step's loss, detached; only for a route's last stage.
        terms: (key, share of its mean, weight) of each of the layers' losses, detached.
        unreached: whether the loss carries no gradient although all of the output from which it is computed does.
    """

    values: BoundaryValues
    tensors: Mapping[str, Tensor | None]
    result: Any = None
    loss: Tensor | None = None
    terms: tuple[tuple[str, Tensor, float], ...] = ()
    unreached: bool = False


InputGradients = tuple[BoundaryValues, ...]
"""The gradients of a stage's inputs that carry one: of those by position, then of each tensor that it reads by name (one or
none). None where nothing used the input. Empty for inputs of the user.
"""


@dataclass(slots=True)
class SavedGroup:
    """State that the forward of one group of computations saves for its backward.

    Attributes:
        inputs: inputs of the group; those that carry a gradient are leaves.
        roots: gradient edges of its outputs, at which its backward starts (their storage may be freed).
        losses: the layers' losses and the mean loss, at which it starts too, with their gradients.
        after: the communication that follows the group.
        saved: the saved state of that communication, for its backward.
        pieces: what its layers keep of a slice for later ones, at which its backward starts too.
    """

    inputs: tuple[Any, ...]
    roots: tuple[GradientEdge, ...] = ()
    losses: tuple[tuple[Tensor, float], ...] = ()
    after: Communication | None = None
    saved: tuple[Any, ...] = ()
    pieces: tuple[PieceRoot, ...] = ()


_SAVING = nullcontext()


class ForwardCall(NamedTuple):
    """Arguments of one forward.

    Attributes:
        microbatch: its number.
        values: the inputs, those named by `program.reads` last; tensors to which no other code writes.
        specs: specs of the inputs, which tell those that carry a gradient; None: inputs of the user, without gradients.
        keywords: the micro-batch's keyword arguments; each layer gets those that its forward takes.
        program: the stage's part of the schedule.
        loss: the micro-batch's loss, for a route's last stage and for layers with losses of their own; None: neither is
            computed, and a route's last stage returns its outputs as they are.
    """

    microbatch: int
    values: BoundaryValues
    specs: TensorSpecs | None
    keywords: Mapping[str, Any]
    program: StageProgram
    loss: MicrobatchLoss | None


class ForwardRecord(NamedTuple):
    """Record of a forward, kept from F until R.

    Attributes:
        call: the arguments of the forward.
        versions: of the tensors among its inputs.
        start: the state of the layers and of all generators before it.
        done: its end on a GPU, where its inputs travel.
        on_host: its inputs while they are in host memory; the call has none then.
    """

    call: ForwardCall
    versions: tuple[int, ...]
    start: StartState
    done: torch.cuda.Event | None = None
    on_host: tuple[HostCopy | None, ...] = ()


class StepCopies(NamedTuple):
    """Tensors of one step that travel to host memory and back, by micro-batch.

    Attributes:
        saved: what backwards need, from the start of the forward that saves it.
        records: what R needs.
    """

    saved: dict[int, Future[SavedTensors]]
    records: dict[int, ForwardRecord]


@dataclass(slots=True)
class InFlight:
    """State of one micro-batch on a stage between F and the end of its backward.

    Attributes:
        queue: weight gradients that wait for W, or for a communication that they hide; None: autograd computes them.
        groups: the groups whose backward has not run, in order; a single one if the stage is not segmented.
        outputs: the outputs, if the options keep them.
        specs: specs of the stage's inputs, which tell the inputs whose gradient is sent back (a layer may call
            `requires_grad_` on others); None: inputs of the user, without gradients.
        read: number of inputs, the last ones, that the stage reads by name.
        record: what R needs; its forward saves nothing for a backward. None: it saves everything.
        travels: what it saves, if that travels to host memory and back.
        parts: the parts that R runs again, whose forward saves nothing for a backward; None: there are none.
        states: of the layers, where it is a slice of a micro-batch.
    """

    queue: WeightGradQueue | None
    groups: list[SavedGroup] = field(default_factory=list)
    outputs: BoundaryValues = ()
    specs: TensorSpecs | None = None
    read: int = 0
    record: ForwardRecord | None = None
    travels: SavedTensors | None = None
    parts: RecomputedParts | None = None
    states: Sequence[SliceState] = ()

    def saving(self) -> AbstractContextManager[Any]:
        """Return the context of its computations."""
        if self.record is not None:
            return saving(lambda _: SavedTensor(None))  # R saves it again
        if self.parts is not None:
            return self.parts.saving()
        return _SAVING if self.travels is None else self.travels.saving()

    def pieces(self) -> tuple[PieceRoot, ...]:
        """Return the roots of what layers have kept of this slice since the last call."""
        return tuple([root for state in self.states for root in state.take_roots()])


class Stage:
    """One stage on its rank: its layers, and the state of the micro-batches that are alive on it.

    Args:
        layers: the modules of the stage.
        deallocate: free an output's storage once it is sent; its graph is kept.
        grad_context: context in which linear layers find the weight-gradient queue; shared by the stages of a thread.
        writes_weight_gradients: whether linear layers write their weight gradients without autograd: because a backward is
            split, a main gradient receives them, or torch does not compute their products.
        communications: the rank's communication stream.
        foreign: parameter in this process that only layers of other ranks hold -> its name; the graph of the first forward must
            not reach them.
    """

    def __init__(
        self,
        index: int,
        layers: StageModules,
        deallocate: bool,
        grad_context: WeightGradContext,
        writes_weight_gradients: bool,
        communications: CommStream,
        foreign: Mapping[Tensor, str] | None = None,
    ) -> None:
        self.index = index
        self.words = f"stage {index}"
        self.layers = layers
        self.declares_nothing = layers.declares_nothing
        self._numbered = tuple((at, *each) for at, each in enumerate(zip(layers.names, layers.modules, strict=True)))
        self.segmented = layers.segmented
        self.parts: set[str] = set()  # the names by which its layers have called parts, where any is recomputed
        self.writes_weight_gradients = writes_weight_gradients
        self._deallocate = deallocate
        self._grad_context = grad_context
        self._communications = communications
        self._alive: dict[int, InFlight] = {}
        self._awaiting_w: dict[int, WeightGradQueue] = {}
        self._copies = StepCopies({}, {})
        self._histories: dict[int, list[SequenceHistory]] = {}  # micro-batch -> of each layer, where sequences are cut
        self._host_buffers = HostBuffers(communications.device)
        self._computing: torch.cuda.Stream | None = None  # of the latest forward whose inputs travel
        self._saved_bytes = 0  # in the latest forward
        self._inputs = ChangeableInputs()
        self._foreign = foreign  # None once a graph has been checked
        if writes_weight_gradients or self.segmented:  # otherwise plain layers are left unchanged
            for module in layers.modules:
                defer_weight_gradients(module, grad_context)

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return self.layers.modules

    # -- forward ---------------------------------------------------------------------------------------------------------

    def forward(
        self, call: ForwardCall, before_layer: Callable[[str], None] | None = None, *, again: bool = False
    ) -> StageOutputs:
        """F: return the outputs, attached to the graph; for a route's last stage only the loss, detached.

        Args:
            before_layer: called with each layer's name before the layer; for a segmented stage, the caller calls it.
            again: whether it is run for R, and saves what the backward needs.
        """
        if self.segmented:
            return run_to_end(self.forward_in_segments(call, again=again))
        microbatch, _, _, keywords, program, loss = call
        layers = self.layers
        record = None if again or microbatch not in program.recomputed else self._record_of(call)
        states: Sequence[SliceState] = ()
        if STATE in keywords:
            states = self._slice_states(call)
            keywords = {**keywords, STATE: states}
        flight, inputs = self._begin_forward(call, microbatch in program.split, record, states)
        self._grad_context.queue = flight.queue
        by_position = inputs if not flight.read else inputs[: len(inputs) - flight.read]
        names = None if self.declares_nothing else NamedInForward(layers, program, inputs[len(by_position) :], loss)
        result: Any = self._inputs.changeable(by_position)
        if not layers.modules and len(result) == 1:  # the loss gets what the layers before it returned
            (result,) = result
        in_blocks, has_parts = microbatch in program.in_blocks, microbatch in program.parts
        with flight.saving():
            for at, name, module in self._numbered:
                arguments = (result,) if isinstance(result, Tensor) else self._arguments(at, result)
                accepted = layers.accepted(at, keywords) if keywords else {}
                read = {} if names is None else names.read(at)
                if before_layer is not None:
                    before_layer(name)
                if in_blocks and name in layers.recomputed:
                    on_change = self._inputs.on_change(name, arguments, names)
                    by_name = partial(_by_name, module, accepted, tuple(read))
                    result = recomputed(by_name, (*read.values(), *arguments), module, on_change)
                elif has_parts and (part := program.part_of(microbatch, at, len(layers.modules))) is not None:
                    on_change = self._inputs.on_change(name, arguments, names)
                    run: Any = module if on_change is None else partial(on_copies, on_change, module)
                    result = run_part(part, run, module, arguments, accepted | read)
                else:
                    result = module(*arguments, **accepted, **read)
                del arguments, read  # a layer's output is freed as soon as autograd does not need it
                if names is not None:
                    result = names.written(at, result)
        if self._inputs.watched:
            self._inputs.note_changes(by_position)
        return self._finish_forward(call, flight, inputs, result, names)

    def recompute(self, microbatch: int, before_layer: Callable[[str], None] | None = None) -> None:
        """R: run the forward again from what F has kept, with the same random numbers, and save what the backward needs.

        It leaves no trace in the layers: what counts or averages in a forward does so once.
        """
        record = self._copies.records.pop(microbatch)
        self._require_unchanged(record)
        with record.start.again():
            self.forward(record.call, before_layer, again=True)

    def _require_unchanged(self, record: ForwardRecord) -> None:
        tensors = [value for value in record.call.values if isinstance(value, Tensor)]
        for tensor, version in zip(tensors, record.versions, strict=True):
            require_version(
                tensor,
                version,
                f"({self.words} is recomputed, and a layer changes the stage's input in place: work on a copy there "
                "(inplace=False), or use a schedule without R of this stage)",
            )

    def recompute_part(self, microbatch: int, part: str) -> None:
        """R of a part: run what the layers call by this name again, and save what the backward needs of it."""
        flight = self._alive[microbatch]
        self._grad_context.queue = flight.queue
        if flight.parts is not None:
            flight.parts.recompute(part)

    def _record_of(self, call: ForwardCall) -> ForwardRecord | None:
        """Return the record that the micro-batch's R needs; None: it has no R."""
        if call.microbatch not in call.program.recomputed or not torch.is_grad_enabled():
            return None
        return ForwardRecord(call, _versions(call.values), StartState(self.modules, self._communications.device))

    def _arguments(self, at: int, result: Any) -> BoundaryValues:
        """Return the arguments of layer `at`, from the result of the layer before it or from the stage's inputs."""
        return as_values(result, f"layer {self.layers.names[at - 1]!r}") if at else result

    def forward_in_segments(self, call: ForwardCall, *, again: bool = False) -> Coroutine[StageOutputs]:
        """As `forward`, yielding where it would wait for a communication."""
        if not self.segmented:
            return self.forward(call, again=again)
        program, record = call.program, None if again else self._record_of(call)
        part_of = partial(program.part_of, call.microbatch, layers=len(self.modules))
        states = self._slice_states(call)
        keywords = {**call.keywords, STATE: states} if states else call.keywords
        groups = split_at_communications(self.layers, keywords, call.microbatch in program.in_blocks, part_of)
        # A backward with communications computes weight gradients during them, also in a B.
        queues = len(groups) > 1 or call.microbatch in program.split
        flight, inputs = self._begin_forward(call, queues, record, states)
        for group in groups[:-1]:
            inputs = yield from self._compute_and_communicate(group, inputs, flight)
        result = self._compute(groups[-1], inputs, flight)
        return self._finish_forward(call, flight, inputs, result, None)

    def _begin_forward(
        self, call: ForwardCall, queues: bool, record: ForwardRecord | None, states: Sequence[SliceState] = ()
    ) -> tuple[InFlight, tuple[Any, ...]]:
        """Return the micro-batch's state, and its inputs as leaves.

        Args:
            queues: whether weight gradients wait, for W or (of a stage in segments) for the next communication.
        """
        microbatch, values, specs, _, program, _ = call
        read = len(program.reads)
        if not torch.is_grad_enabled():
            return InFlight(None, read=read), values
        leaves = values if specs is None else _leaves(values, specs)
        travels, parts = None, None
        if microbatch in program.offloaded and record is None:
            tensors = (each for module in self.modules for each in (*module.parameters(), *module.buffers()))
            pieces = (piece for state in states for piece in state.held if piece is not None)
            earlier = (leaf for piece in pieces for leaf in piece.on_device)
            travels = SavedTensors(
                (*tensors, *values, *earlier),
                self._communications.device,
                self._host_buffers,
                program.offloaded[microbatch],
                self._saved_bytes,
            )
            self._copies.saved[microbatch].set_result(travels)
        if microbatch in program.parts:
            others = SavedTensor if travels is None else travels.pack
            parts = RecomputedParts(program.parts[microbatch], self._communications.device, others, self.parts)
        queue = WeightGradQueue() if queues else None
        return InFlight(queue, [], (), specs, read, record, travels, parts, states), leaves

    def _slice_states(self, call: ForwardCall) -> Sequence[SliceState]:
        """Return the state of each layer for a slice of a micro-batch; () for a whole one."""
        place = call.keywords.get(STATE)
        if place is None:
            return ()
        microbatch = call.microbatch // place.count
        histories = self._histories.setdefault(microbatch, [SequenceHistory() for _ in self.modules])
        if not torch.is_grad_enabled() and place.index + 1 == place.count:
            del self._histories[microbatch]
        return [SliceState(history, place) for history in histories]

    def _compute_and_communicate(
        self, group: ComputeGroup, inputs: tuple[Any, ...], flight: InFlight
    ) -> Coroutine[tuple[Any, ...]]:
        """Run a group and the communication after it; return the next group's inputs."""
        assert group.after is not None
        training = torch.is_grad_enabled()
        outputs = self._compute(group, inputs, flight)
        which = [training and carries(value) for value in outputs]
        if training and flight.record is None:
            saved = saved_of(outputs)
            flight.groups.append(SavedGroup(inputs, _roots(outputs), (), group.after, saved, flight.pieces()))
            del saved
        given = tuple(value.detach() if isinstance(value, Tensor) else value for value in outputs)
        pending = self._communications.start(partial(group.after.start, given), given)
        del inputs, outputs, given  # while it is in progress, only the graph and the communication itself hold tensors
        if not group.after.quick:
            yield
        results = self._communications.wait(pending, group.after.name)
        return tuple(v.detach().requires_grad_() if leaf else v for v, leaf in zip(results, which, strict=True))

    def _compute(self, group: ComputeGroup, inputs: tuple[Any, ...], flight: InFlight) -> Any:
        """Run the group's computations. Another micro-batch may have run since the last group, so the queue is set again."""
        self._grad_context.queue = flight.queue
        with flight.saving():
            result = group.compute(self._inputs.changeable(inputs))
        self._inputs.note_changes(inputs)
        return result

    def _finish_forward(
        self, call: ForwardCall, flight: InFlight, inputs: tuple[Any, ...], result: Any, names: NamedInForward | None
    ) -> StageOutputs:
        """Return the forward's outputs, and save what the backward needs, or R."""
        microbatch, _, _, _, program, loss = call
        outputs: BoundaryValues = ()
        tensors: dict[str, Tensor | None] = {}
        terms: Sequence[tuple[str, Tensor, float]] = ()
        mean: Tensor | None = None
        if program.gives is not None:
            outputs = as_values(result, self.words)
            require_plain(outputs, self.words)
        elif loss is not None:
            with flight.saving():
                mean = loss.mean(result)
        if names is not None:
            tensors, terms = names.sent(), names.terms
            for name, value in tensors.items():
                require_plain([value], f"{self.words}, as tensor {name!r},")
        if torch.is_grad_enabled():
            losses = [(weight * each, 1.0) for _, each, weight in terms if each.requires_grad] if terms else []
            if mean is not None and loss is not None and mean.requires_grad:
                # The backward starts with the share as the mean's gradient, so the graph needs no product of them.
                losses.append((mean, loss.share))
            results = (*outputs, *tensors.values()) if tensors else outputs
            roots = _roots(results)
            if self._foreign:
                _require_unreached(self._foreign, [*(r.node for r in roots), *(value.grad_fn for value, _ in losses)])
                self._foreign = None
            if flight.record is not None:
                flight.record.start.forget_unchanged()
                done = None
                if microbatch in program.kept_on_host and self._communications.device.type == "cuda":
                    self._computing = torch.cuda.current_stream(self._communications.device)
                    done = self._computing.record_event()
                self._copies.records[microbatch] = flight.record._replace(done=done)
                outputs, tensors = _off_graph(outputs), {name: _off_graph((v,))[0] for name, v in tensors.items()}
            else:
                pieces = flight.pieces() if flight.states else ()
                flight.groups.append(SavedGroup(inputs, roots, tuple(losses), pieces=pieces))
                if not self._deallocate:
                    flight.outputs = results
                if flight.travels is not None:
                    flight.travels.complete()
                    self._saved_bytes = flight.travels.total
                self._alive[microbatch] = flight
        detached = tuple([(key, each.detach(), weight) for key, each, weight in terms]) if terms else ()
        if mean is None or loss is None:
            return StageOutputs(outputs, tensors, result if program.gives is None else None, None, detached)
        unreached = not mean.requires_grad and _all_carry(result)
        return StageOutputs((), tensors, None, mean.detach() * loss.share, detached, unreached)

    # -- copies to host memory -------------------------------------------------------------------------------------------

    def begin(self, microbatches: Iterable[int]) -> StepCopies:
        """Begin a step in which what the backwards of these micro-batches need travels; return what its copies work on: those of
        an earlier step, which failed, may still be under way.
        """
        self._histories.clear()
        self._copies = StepCopies({microbatch: Future() for microbatch in microbatches}, {})
        return self._copies

    def kept_to_host(self, step: StepCopies, microbatch: int, stream: torch.cuda.Stream | None) -> None:
        """OKEPT: move the inputs that R needs, and what layers keep of a slice for later ones, to host memory.

        Inputs of the user stay where they are. Raises UsageError for an input that was changed in place.
        """
        record, buffers = step.records[microbatch], self._host_buffers
        self._require_unchanged(record)
        wait: Callable[[], None] = (lambda: None) if stream is None else stream.synchronize
        call, place = record.call, record.call.keywords.get(STATE)
        with torch.no_grad(), torch.cuda.stream(stream):
            if stream is not None and record.done is not None:
                stream.wait_event(record.done)
            if place is not None:
                pieces = (each.pieces.get(place.index) for each in self._histories[microbatch // place.count])
                for piece in [piece for piece in pieces if piece is not None]:
                    piece.to_host(buffers, wait)
            if call.specs is not None:
                copies = tuple([None if value is None else HostCopy(value, buffers) for value in call.values])
                wait()
                step.records[microbatch] = record._replace(call=call._replace(values=()), on_host=copies)

    def kept_to_device(self, step: StepCopies, microbatch: int, stream: torch.cuda.Stream | None) -> None:
        """LKEPT: move the inputs back. What layers keep of a slice stays, and is read from the host where it is needed."""
        record = step.records[microbatch]
        if record.call.specs is None:
            return
        with torch.cuda.stream(stream):
            values = tuple([None if copy is None else copy.read() for copy in record.on_host])
            for copy, value in zip(record.on_host, values, strict=True):
                if copy is not None and value is not None:
                    copy.free()  # waits for the copy
                    if stream is not None and self._computing is not None:
                        value.record_stream(self._computing)
        call = record.call._replace(values=values)
        step.records[microbatch] = record._replace(call=call, versions=_versions(values), on_host=())

    # -- buffers that a forward changes ----------------------------------------------------------------------------------

    def statistics(self) -> Iterator[tuple[str, str]]:
        """Yield (layer, class) of each layer that gathers running statistics."""
        for layer, module in zip(self.layers.names, self.layers.modules, strict=True):
            if (norm := batch_statistics(module)) is not None:
                yield layer, norm

    def require_order(self, schedule_name: str, program: StageProgram) -> None:
        """Raise ConfigError if a layer's statistics depend on the order of micro-batches, and not all pass the stage in order."""
        for layer, norm in () if program.in_order else self.statistics():
            raise ConfigError(
                f"layer {layer!r} has running statistics ({norm}), and under schedule {schedule_name!r} stage "
                f"{self.index} does not get every micro-batch in order, so they would differ from those of one "
                "process; choose a schedule with one route that runs the micro-batches in order, put the layer in eval "
                "mode, or build it with track_running_stats=False"
            )

    # -- backward --------------------------------------------------------------------------------------------------------

    def backward(self, microbatch: int, gradients: BoundaryValues, keeps_weights: bool = False) -> InputGradients:
        """B: return the input gradients; the weight gradients are accumulated too.

        Args:
            gradients: one for each output that carries one, None if the next stage has none; empty for the last stage, whose
                root is the loss.
            keeps_weights: I instead of B: the queued weight gradients wait for W. All other state of the micro-batch is freed.
        """
        if self.segmented:
            return run_to_end(self.backward_in_segments(microbatch, gradients, keeps_weights))
        return self._backward(self._begin_backward(microbatch, keeps_weights), gradients)

    def weight_grad(self, microbatch: int) -> None:
        """W: compute the weight gradients that I has queued."""
        queue = self._awaiting_w.pop(microbatch, None)
        if queue is not None:
            queue.flush()

    def communicates_in_backward(self, microbatch: int) -> bool:
        """Return whether the backward of this micro-batch has communications inside at which another action may compute."""
        return any(group.after is not None and not group.after.quick for group in self._alive[microbatch].groups)

    def backward_in_segments(
        self, microbatch: int, gradients: BoundaryValues, keeps_weights: bool
    ) -> Coroutine[InputGradients]:
        """As `backward`, yielding where it would wait for a communication.

        The groups run from the last to the first. In a B, a group's weight gradients are computed once the communication
        that depends on the group has started.
        """
        flight = self._begin_backward(microbatch, keeps_weights)
        seeds: list[Tensor | None] = list(gradients)
        while len(flight.groups) > 1:
            group, before = flight.groups.pop(), flight.groups[-1].after
            assert before is not None
            self._run_autograd(flight, group, seeds)
            # A communication moves whole tensors, so zeros replace a gradient that does not exist.
            results = tuple(_gradient(value) if carries(value) else None for value in group.inputs)
            which = [at for at, value in enumerate(group.inputs) if carries(value)]
            saved, pending, seeds = flight.groups[-1].saved, None, []
            if which:
                pending = self._communications.start(partial(before.start_backward, results, saved), (*results, *saved))
            del group, results, saved
            if flight.queue is not None and not keeps_weights:
                flight.queue.flush()
            if not before.quick:
                yield
            if pending is not None:
                arrived = self._communications.wait(pending, f"{before.name}'s backward")
                seeds = [arrived[at] for at in which]
        input_gradients = self._backward(flight, seeds)
        if flight.queue is not None and not keeps_weights:
            flight.queue.flush()
        return input_gradients

    def _begin_backward(self, microbatch: int, keeps_weights: bool) -> InFlight:
        """Return the state of a micro-batch whose backward begins, and keep the queue of its weight gradients for W."""
        flight = self._alive.pop(microbatch)
        if flight.states and not flight.states[0].place.index:  # the first slice is the last one here
            del self._histories[microbatch // flight.states[0].place.count]
        if keeps_weights and flight.queue is not None:
            self._awaiting_w[microbatch] = flight.queue
        return flight

    def _backward(self, flight: InFlight, gradients: Sequence[Tensor | None]) -> InputGradients:
        """Run the backward of the first group, which is the only one of an unsegmented stage."""
        group = flight.groups.pop()
        self._run_autograd(flight, group, gradients)
        for state in flight.states:
            state.release()
        if flight.specs is None:
            return ()
        if not flight.read:
            return (_leaf_gradients(group.inputs, flight.specs),)
        cut = len(group.inputs) - flight.read
        by_position = _leaf_gradients(group.inputs[:cut], flight.specs[:cut])
        by_name = zip(group.inputs[cut:], flight.specs[cut:], strict=True)
        return by_position, *[_leaf_gradients((leaf,), (spec,)) for leaf, spec in by_name]

    def _run_autograd(self, flight: InFlight, group: SavedGroup, seeds: Sequence[Tensor | None]) -> None:
        """Run autograd's backward of a group, from its outputs and losses. A root with the gradient None is left out."""
        self._grad_context.queue = flight.queue  # for the layers that are recomputed in this backward
        roots: list[GradientEdge | Tensor] = []
        given: list[Tensor | None] = []
        for root, seed in zip(group.roots, seeds, strict=True):
            if seed is not None:
                roots.append(root)
                given.append(seed)
        for piece in group.pieces:
            if (total := piece.piece.gradient(piece.at)) is not None:
                roots.append(piece.edge)
                given.append(total)
        for loss, gradient in group.losses:
            roots.append(loss)
            given.append(loss.new_full((), gradient))
        if not roots:
            return
        context = self._grad_context
        trusted = not self.segmented  # in a segmented stage, communications compute some of the gradients
        try:
            if context.stage_backward is not None and context.writes:
                context.stage_backward.run(roots, given, trusted)
            else:
                run_backward(roots, given, trusted)
        except RuntimeError as error:
            if "modified by an inplace operation" in str(error):
                error.add_note(
                    "(forwards of other micro-batches run between the forward and the backward of one: a layer may not change "
                    "in place what its backward needs, such as a weight or a buffer; let it work on a clone)"
                )
            raise


class ChangeableInputs:
    """Inputs that a stage's layers may change in place, as in one process, although they are leaves of its graph.

    That takes one more operation per input, so it ends after the first forwards unless a layer has changed an input in one of
    them. A recomputed layer works on a copy of its input meanwhile, and goes on with it if it has changed one.

    Attributes:
        watched: versions of the inputs of the forward under way, if a change of one of them is to be noted.
    """

    def __init__(self) -> None:
        self._left: float = _FIRST
        self._changing: set[str] = set()  # names of recomputed layers
        self.watched: tuple[int, ...] = ()

    def changeable(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the inputs, those that carry a gradient as views that are no leaves."""
        if self._left <= 0 or not torch.is_grad_enabled():
            return inputs
        self._left -= 1
        self.watched = tuple(version_of(value) for value in inputs if carries(value))
        return tuple(_Given.apply(v) if carries(v) else v for v in inputs)  # type: ignore[no-untyped-call]

    def note_changes(self, inputs: tuple[Any, ...]) -> None:
        """Keep inputs changeable in all later forwards if a layer has changed one of these since `changeable`."""
        versions, self.watched = self.watched, ()
        if versions and versions != tuple(version_of(value) for value in inputs if carries(value)):
            self._left = math.inf

    def on_change(
        self, layer: str, arguments: BoundaryValues, names: NamedInForward | None
    ) -> Callable[[], None] | None:
        """Return what a recomputed layer calls if it changes its input in place; None: it may not."""
        # Another tensor may be of the memory of one among several, and would change with it in one process.
        alone = names is None and len(arguments) == 1 and (self._left > 0 or layer in self._changing)
        return partial(self._changing.add, layer) if alone else None


class _Given(torch.autograd.Function):
    """View of the same memory that is not a leaf, and shares the version counter of its input."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)  # if a layer's input gets no gradient, the stage before gets none either
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0]


class NamedInForward:
    """Named tensors that pass through the layers of one stage, and the losses of its layers.

    Args:
        received: the tensors that the stage reads, in the order of `program.reads`.
        loss: the micro-batch's loss, of which the layers' losses are terms; None: they are not computed.

    Attributes:
        terms: (key, share, weight) of each loss so far, attached to the graph.
    """

    def __init__(
        self, layers: StageModules, program: StageProgram, received: BoundaryValues, loss: MicrobatchLoss | None
    ) -> None:
        self._layers = layers
        self._program = program
        self._tensors = {edge.name: value for edge, value in zip(program.reads, received, strict=True)}
        self._loss = loss
        self.terms: list[tuple[str, Tensor, float]] = []

    def read(self, at: int) -> dict[str, Tensor | None]:
        """Return the tensors that layer `at` reads, by keyword."""
        return self._layers.read(at, self._tensors)

    def written(self, at: int, result: Any) -> Any:
        """Return the positional outputs in the result of layer `at`; keep the tensors that it writes, and compute its losses."""
        declared = self._layers.declared[at]
        if declared.declares_nothing:
            return result
        handed, values = declared.taken_from(result, self._tensors)
        if self._loss is not None:
            for key, value in values.items():
                term = declared.losses[key]
                self.terms.append((key, self._loss.share_of_term(term, value), term.weight))
        return handed

    def sent(self) -> dict[str, Tensor | None]:
        """Return the tensors that later stages read, in the order in which they are sent."""
        return {name: self._tensors[name] for name in self._program.writes}


def _versions(values: BoundaryValues) -> tuple[int, ...]:
    return tuple(version_of(value) for value in values if isinstance(value, Tensor))


def _off_graph(values: BoundaryValues) -> BoundaryValues:
    """Return the values without the graph that they are from, and with the same claims to a gradient."""
    return tuple([v if v is None or not v.requires_grad else v.detach().requires_grad_() for v in values])


def _by_name(module: nn.Module, accepted: Mapping[str, Any], keywords: Sequence[str], *values: Any) -> Any:
    """Call `module` on values of which the first are the keyword arguments `keywords`."""
    count = len(keywords)
    return module(*values[count:], **accepted, **dict(zip(keywords, values[:count], strict=True)))


def _all_carry(output: Any) -> bool:
    """Return whether an output has tensors that can carry a gradient, and all of them do."""
    able = [value for value in tensors_in(output) if value.is_floating_point() or value.is_complex()]
    return bool(able) and all(value.requires_grad for value in able)


def _roots(outputs: tuple[Any, ...]) -> tuple[GradientEdge, ...]:
    return tuple([get_gradient_edge(value) for value in outputs if carries(value)])


def _leaves(values: BoundaryValues, specs: TensorSpecs) -> BoundaryValues:
    """Return the inputs, those that carry a gradient as leaves of the stage's own graph."""
    pairs = zip(values, specs, strict=True)
    return tuple(
        [v.detach().requires_grad_() if v is not None and s is not None and s.carries else v for v, s in pairs]
    )


def _leaf_gradients(leaves: tuple[Any, ...], specs: TensorSpecs) -> BoundaryValues:
    """Return the gradients of those leaves that carry one."""
    pairs = zip(leaves, specs, strict=True)
    return tuple([leaf.grad for leaf, spec in pairs if spec is not None and spec.carries])


def _gradient(leaf: Tensor) -> Tensor:
    """Take the leaf's gradient from it; zeros if the leaf was not used."""
    gradient, leaf.grad = leaf.grad, None
    return torch.zeros_like(leaf) if gradient is None else gradient


def _require_unreached(foreign: Mapping[Tensor, str], nodes: Sequence[Any]) -> None:
    """Raise UsageError if the graph behind these nodes reaches a parameter of another rank's layer: that rank would not get its
    gradient.
    """
    for leaf in _leaves_of_graph(nodes):
        if leaf in foreign:
            raise UsageError(
                f"the loss or a layer uses {foreign[leaf]!r}, a parameter of a layer of another rank, and that rank would not "
                "get its gradient: make it a parameter of the layer that uses it too (self.weight = other.weight), or, if the "
                "loss does, of the last layer; it is then tied"
            )


def _leaves_of_graph(nodes: Sequence[Any]) -> Iterator[Tensor]:
    """Return the tensors in which a backward pass from these nodes accumulates gradients."""
    waiting, seen = [node for node in nodes if node is not None], set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad":
            yield node.variable
        waiting += [after for after, _ in node.next_functions if after is not None]
