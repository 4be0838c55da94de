"""Computation: F, B, I, W, and the overlapped pairs of a forward and a backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from pipeloom.ops.parts import run_part
from pipeloom.ops.recompute import on_copies, recomputed
from pipeloom.runtime.actions.registry import Queue, executes
from pipeloom.runtime.flight import Flight, StageInputs
from pipeloom.runtime.overlap import Coroutine, run_to_end
from pipeloom.runtime.stage import InputGradients, NamedInForward, Stage, StageOutputs
from pipeloom.runtime.tensor_spec import BoundaryValues, as_values


@executes("F")
def forward(flight: Flight, stage: Stage, queue: Queue) -> None:
    """Run the forward of one micro-batch; on a route's last stage, with the loss."""
    _pass_on(flight, run_stage(flight, stage, _inputs_of(flight, stage), queue.hooks.before_layer))


def forward_in_segments(flight: Flight, stage: Stage) -> Coroutine[None]:
    """As `forward` in a training step, yielding where it would wait for a communication."""
    inputs = _inputs_of(flight, stage)
    if stage.segmented:
        outputs = yield from stage.forward_in_segments(flight, inputs)
    else:
        outputs = run_stage(flight, stage, inputs, None)
    _pass_on(flight, outputs)


def run_stage(
    flight: Flight, stage: Stage, given: StageInputs, before_layer: Callable[[str], None] | None
) -> StageOutputs:
    """Run the layers of a stage one after the other; return the outputs, attached to the graph, and for a route's last stage only
    the loss, detached.

    Args:
        before_layer: called with each layer's name before the layer; for a segmented stage, the executor calls it.
    """
    if stage.segmented:
        return run_to_end(stage.forward_in_segments(flight, given))
    layers, changeable, saving = stage.layers, stage.inputs, flight.saving
    keywords = stage.keywords(flight)
    inputs = stage.begin_forward(flight, given, saving.splits)
    stage.grad_context.queue = flight.weight_gradients
    by_position = inputs if not flight.read else inputs[: len(inputs) - flight.read]
    loss, by_name = flight.step.losses[flight.unit], inputs[len(by_position) :]
    names = None if stage.declares_nothing else NamedInForward(layers, flight.program, by_name, loss)
    result: Any = changeable.changeable(by_position)
    if not layers.modules and len(result) == 1:  # the loss gets what the layers before it returned
        (result,) = result
    with flight.saving_context():
        for at, name, module in stage.numbered:
            arguments = (result,) if isinstance(result, Tensor) else _arguments(stage, at, result)
            accepted = layers.accepted(at, keywords) if keywords else {}
            read = {} if names is None else names.read(at)
            if before_layer is not None:
                before_layer(name)
            if saving.blocks and name in layers.recomputed:
                on_change = changeable.on_change(name, arguments, names)
                run: Any = partial(_by_name, module, accepted, tuple(read))
                result = recomputed(run, (*read.values(), *arguments), module, on_change)
            elif saving.parts and (part := saving.part_of(at, len(layers.modules))) is not None:
                on_change = changeable.on_change(name, arguments, names)
                run = module if on_change is None else partial(on_copies, on_change, module)
                result = run_part(part, run, module, arguments, accepted | read)
            else:
                result = module(*arguments, **accepted, **read)
            del arguments, read  # a layer's output is freed as soon as autograd does not need it
            if names is not None:
                result = names.written(at, result)
    if changeable.watched:
        changeable.note_changes(by_position)
    return stage.finish_forward(flight, inputs, result, names)


@executes("B", "I", "RB", "RI")
def backward(flight: Flight, stage: Stage, queue: Queue) -> None:
    """Run B: input and weight gradients of one micro-batch; or I, whose weight gradients wait for W.

    A layer that is recomputed in a block with it runs forward again within.
    """
    gradients = _output_gradients(flight)
    _pass_back(flight, stage.backward(flight, gradients))


def backward_in_segments(flight: Flight, stage: Stage) -> Coroutine[None]:
    """As `backward`, yielding where it would wait for a communication."""
    gradients = _output_gradients(flight)
    _pass_back(flight, (yield from stage.backward_in_segments(flight, gradients)))


@executes("W")
def weight_grad(flight: Flight, stage: Stage, queue: Queue) -> None:
    """Compute the weight gradients that I has queued."""
    if flight.weight_gradients is not None:
        flight.weight_gradients.flush()
    flight.step.alive_changes.append(-1)


def _arguments(stage: Stage, at: int, result: Any) -> BoundaryValues:
    """Return the arguments of layer `at`, from the result of the layer before it or from the stage's inputs."""
    return as_values(result, f"layer {stage.layers.names[at - 1]!r}") if at else result


def _by_name(module: nn.Module, accepted: Any, keywords: Sequence[str], *values: Any) -> Any:
    """Call `module` on values of which the first are the keyword arguments `keywords`."""
    count = len(keywords)
    return module(*values[count:], **accepted, **dict(zip(keywords, values[:count], strict=True)))


def _inputs_of(flight: Flight, stage: Stage) -> StageInputs:
    """Return the inputs of a forward and their specs; record them for R, where it runs the forward again."""
    step, saving = flight.step, flight.saving
    if step.training and not (saving.whole or saving.blocks):
        step.alive_changes.append(1)
    inputs: StageInputs = step.inputs[flight.unit], None
    if flight.program.input_edge is not None:
        deliveries = [step.activations.pop((edge, flight.unit)) for edge in flight.program.inputs]
        inputs = sum([each.values for each in deliveries], ()), sum([each.boundary for each in deliveries], ())
    if saving.whole and step.training:
        flight.record = stage.record_of(inputs)
    return inputs


def _pass_on(flight: Flight, outputs: StageOutputs) -> None:
    """Pass a forward's outputs to the stages that need them, and add its losses to the sums."""
    step, program = flight.step, flight.program
    if not step.training:
        flight.return_buffers()
    if outputs.loss is not None:
        step.result.loss.add(outputs.loss)
        step.unreached = step.unreached is not False and outputs.unreached and not outputs.terms
    for key, share, weight in outputs.terms:
        step.result.loss.add_term(key, share, weight)
    if program.output_edge is not None:
        flight.give(program.output_edge, outputs.values)
    elif step.keeps_outputs:
        step.result.outputs[flight.unit] = outputs.result
    for name, edges in program.writes.items():
        for edge in edges:
            flight.give(edge, (outputs.tensors[name],))


def _output_gradients(flight: Flight) -> BoundaryValues:
    """Return the gradients from which a backward starts, besides losses: those of the outputs, then those of tensors that other
    stages read by name.
    """
    step, program, unit = flight.step, flight.program, flight.unit
    if flight.saving.blocks:  # from here on
        step.alive_changes.append(1)
    gradients = () if program.output_edge is None else step.gradients.pop((program.output_edge, unit))
    for edges in program.writes.values():
        # One gradient per reader, None where the reader has none; no entry for a tensor that carries no gradient.
        parts = [value for edge in edges for value in step.gradients.pop((edge, unit))]
        reached = [value for value in parts if value is not None]
        if parts:
            gradients = (*gradients, sum(reached[1:], start=reached[0]) if reached else None)
    return gradients


def _pass_back(flight: Flight, gradients: InputGradients) -> None:
    """Pass a backward's input gradients to the stages that gave the inputs."""
    step = flight.step
    if not flight.saving.splits:
        step.alive_changes.append(-1)
    flight.end_graph()
    for edge, values in zip(flight.program.inputs, gradients, strict=True):
        step.gradients[edge, flight.unit] = values
