"""A stage: its layers, the forward and backward of one micro-batch through them, and the state kept in between.

A stage whose layers declare no segments runs them one after the other, and its backward is a single call of autograd. A
segmented stage is cut at its communications (runtime/overlap.py); its forward and backward are coroutines, which
`forward` and `backward` run to their end and an overlapped pair interleaves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipeloom.errors import ConfigError, UsageError
from pipeloom.ops.checksum import version_of
from pipeloom.ops.deferred import WeightGradContext, WeightGradQueue, defer_weight_gradients, run_backward
from pipeloom.ops.host_memory import HostBuffers
from pipeloom.ops.nested import tensors_in
from pipeloom.ops.parts import RecomputedParts
from pipeloom.ops.recompute import StartState
from pipeloom.ops.saved_tensors import SavedTensor, require_version
from pipeloom.ops.segments import carries, saved_of
from pipeloom.ops.slices import STATE, SequenceHistory, SliceState
from pipeloom.ops.stage_state import batch_statistics
from pipeloom.runtime.flight import Flight, ForwardRecord, SavedGroup, StageInputs
from pipeloom.runtime.loss import MicrobatchLoss
from pipeloom.runtime.offload import Parts, SavedTensors
from pipeloom.runtime.overlap import CommStream, ComputeGroup, Coroutine, run_to_end, split_at_communications
from pipeloom.runtime.program import StageProgram
from pipeloom.runtime.stage_modules import StageModules
from pipeloom.runtime.tensor_spec import BoundaryValues, TensorSpecs, as_values, require_plain

_FIRST = 64  # forwards per stage; a layer that changes its input in place does so in one of them, and a look costs time


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
        self.modules = layers.modules
        self.declares_nothing = layers.declares_nothing
        self.numbered = tuple((at, *each) for at, each in enumerate(zip(layers.names, layers.modules, strict=True)))
        self.segmented = layers.segmented
        self.parts: set[str] = set()  # the names by which its layers have called parts, where any is recomputed
        self._deallocate = deallocate
        self.grad_context = grad_context
        self._communications = communications
        self.host_buffers = HostBuffers(communications.device)
        self.computing: torch.cuda.Stream | None = None  # of the latest forward whose inputs travel
        self._saved_bytes = 0  # in the latest forward
        self.inputs = ChangeableInputs()
        self._foreign = foreign  # None once a graph has been checked
        if writes_weight_gradients or self.segmented:  # otherwise plain layers are left unchanged
            for module in layers.modules:
                defer_weight_gradients(module, grad_context)

    # -- forward ---------------------------------------------------------------------------------------------------------

    def require_unchanged(self, record: ForwardRecord) -> None:
        """Raise UsageError if an input that R needs was changed in place."""
        tensors = [value for value in record.inputs[0] if isinstance(value, Tensor)]
        for tensor, version in zip(tensors, record.versions, strict=True):
            require_version(
                tensor,
                version,
                f"({self.words} is recomputed, and a layer changes the stage's input in place: work on a copy there "
                "(inplace=False), or use a schedule without R of this stage)",
            )

    def record_of(self, inputs: StageInputs) -> ForwardRecord:
        """Return the record that the R of a forward needs."""
        return ForwardRecord(inputs, versions_of(inputs[0]), StartState(self.modules, self._communications.device))

    def forward_in_segments(self, flight: Flight, given: StageInputs) -> Coroutine[StageOutputs]:
        """Run a segmented stage, yielding where it would wait for a communication."""
        groups = split_at_communications(self.layers, self.keywords(flight), flight.saving)
        # A backward with communications computes weight gradients during them, also in a B.
        inputs = self.begin_forward(flight, given, len(groups) > 1 or flight.saving.splits)
        for group in groups[:-1]:
            inputs = yield from self._compute_and_communicate(group, inputs, flight)
        result = self._compute(groups[-1], inputs, flight)
        return self.finish_forward(flight, inputs, result, None)

    def begin_forward(self, flight: Flight, given: StageInputs, queues: bool) -> tuple[Any, ...]:
        """Return the inputs as leaves, and prepare the flight for what the forward saves.

        Args:
            queues: whether weight gradients wait, for W or (of a stage in segments) for the next communication.
        """
        values, specs = given
        flight.read = len(flight.program.reads)
        if not flight.step.training:
            return values
        flight.specs = specs
        flight.weight_gradients = WeightGradQueue() if queues else None
        travels = flight.travels if flight.record is None else None
        if travels is not None:
            tensors = (each for module in self.modules for each in (*module.parameters(), *module.buffers()))
            pieces = (piece for state in flight.states for piece in state.held if piece is not None)
            earlier = (leaf for piece in pieces for leaf in piece.on_device)
            travels.begin((*tensors, *values, *earlier), self._saved_bytes)
        if parts := flight.saving.parts:
            others = SavedTensor if travels is None else travels.pack
            flight.parts = RecomputedParts(parts, self._communications.device, others, self.parts)
        return values if specs is None else _leaves(values, specs)

    def travelling(self, parts: Parts) -> SavedTensors:
        """Return what takes the tensors that a forward will save, of which these parts travel to host memory and back."""
        return SavedTensors(self._communications.device, self.host_buffers, parts)

    def keywords(self, flight: Flight) -> Mapping[str, Any]:
        """Return a micro-batch's keyword arguments, of a slice of one with the state of each layer."""
        keywords = flight.step.batch.keywords[flight.unit]
        place = keywords.get(STATE)
        if place is None:
            return keywords
        histories, key = flight.step.histories, (self.index, flight.microbatch)
        layers = histories.setdefault(key, [SequenceHistory() for _ in self.modules])
        if not flight.step.training and place.index + 1 == place.count:
            del histories[key]
        flight.states = [SliceState(history, place) for history in layers]
        return {**keywords, STATE: flight.states}

    def _compute_and_communicate(
        self, group: ComputeGroup, inputs: tuple[Any, ...], flight: Flight
    ) -> Coroutine[tuple[Any, ...]]:
        """Run a group and the communication after it; return the next group's inputs."""
        assert group.after is not None
        training = flight.step.training
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

    def _compute(self, group: ComputeGroup, inputs: tuple[Any, ...], flight: Flight) -> Any:
        """Run the group's computations. Another micro-batch may have run since the last group, so the queue is set again."""
        self.grad_context.queue = flight.weight_gradients
        with flight.saving_context():
            result = group.compute(self.inputs.changeable(inputs))
        self.inputs.note_changes(inputs)
        return result

    def finish_forward(
        self, flight: Flight, inputs: tuple[Any, ...], result: Any, names: NamedInForward | None
    ) -> StageOutputs:
        """Return the forward's outputs, and save what the backward needs, or R."""
        program, loss = flight.program, flight.step.losses[flight.unit]
        outputs: BoundaryValues = ()
        tensors: dict[str, Tensor | None] = {}
        terms: Sequence[tuple[str, Tensor, float]] = ()
        mean: Tensor | None = None
        if program.output_edge is not None:
            outputs = as_values(result, self.words)
            require_plain(outputs, self.words)
        elif loss is not None:
            with flight.saving_context():
                mean = loss.mean(result)
        if names is not None:
            tensors, terms = names.sent(), names.terms
            for name, value in tensors.items():
                require_plain([value], f"{self.words}, as tensor {name!r},")
        if flight.step.training:
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
                flight.states = ()  # R makes them again, and these hold the graph
                if flight.saving.kept_travels and self._communications.device.type == "cuda":
                    self.computing = torch.cuda.current_stream(self._communications.device)
                    flight.record = flight.record._replace(done=self.computing.record_event())
                outputs, tensors = _off_graph(outputs), {name: _off_graph((v,))[0] for name, v in tensors.items()}
            else:
                flight.groups.append(
                    SavedGroup(inputs, roots, tuple(losses), pieces=flight.pieces() if flight.states else ())
                )
                if not self._deallocate:
                    flight.outputs = results
                if flight.travels is not None:
                    flight.travels.complete()
                    self._saved_bytes = flight.travels.total
        detached = tuple([(key, each.detach(), weight) for key, each, weight in terms]) if terms else ()
        if mean is None or loss is None:
            return StageOutputs(outputs, tensors, result if program.output_edge is None else None, None, detached)
        unreached = not mean.requires_grad and _all_carry(result)
        return StageOutputs((), tensors, None, mean.detach() * loss.share, detached, unreached)

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

    def backward(self, flight: Flight, gradients: BoundaryValues) -> InputGradients:
        """Return the input gradients; the weight gradients are accumulated too, or wait in the flight for W.

        Args:
            gradients: one for each output that carries one, None if the next stage has none; empty for the last stage, whose
                root is the loss.
        """
        if self.segmented:
            return run_to_end(self.backward_in_segments(flight, gradients))
        return self._backward(flight, gradients)

    def backward_in_segments(self, flight: Flight, gradients: BoundaryValues) -> Coroutine[InputGradients]:
        """As `backward`, yielding where it would wait for a communication.

        The groups run from the last to the first. In a B, a group's weight gradients are computed once the communication
        that depends on the group has started.
        """
        weight_gradients = None if flight.saving.splits else flight.weight_gradients
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
            if weight_gradients is not None:
                weight_gradients.flush()
            if not before.quick:
                yield
            if pending is not None:
                arrived = self._communications.wait(pending, f"{before.name}'s backward")
                seeds = [arrived[at] for at in which]
        input_gradients = self._backward(flight, seeds)
        if weight_gradients is not None:
            weight_gradients.flush()
        return input_gradients

    def _backward(self, flight: Flight, gradients: Sequence[Tensor | None]) -> InputGradients:
        """Run the backward of the first group, which is the only one of an unsegmented stage."""
        group = flight.groups.pop()
        if flight.states and not flight.states[0].place.index:  # the first slice is the last one here
            del flight.step.histories[self.index, flight.microbatch]
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

    def _run_autograd(self, flight: Flight, group: SavedGroup, seeds: Sequence[Tensor | None]) -> None:
        """Run autograd's backward of a group, from its outputs and losses. A root with the gradient None is left out."""
        self.grad_context.queue = flight.weight_gradients  # for the layers that are recomputed in this backward
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
        context = self.grad_context
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
                self.terms.append((key, self._loss.mean(value, term.loss) * self._loss.share, term.weight))
        return handed

    def sent(self) -> dict[str, Tensor | None]:
        """Return the tensors that later stages read, in the order in which they are sent."""
        return {name: self._tensors[name] for name in self._program.writes}


def versions_of(values: BoundaryValues) -> tuple[int, ...]:
    return tuple(version_of(value) for value in values if isinstance(value, Tensor))


def _off_graph(values: BoundaryValues) -> BoundaryValues:
    """Return the values without the graph that they are from, and with the same claims to a gradient."""
    return tuple([v if v is None or not v.requires_grad else v.detach().requires_grad_() for v in values])


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
