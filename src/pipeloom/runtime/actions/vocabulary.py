"""Actions of a vocabulary that is spread over the pipeline: S and T of a rank's share, and those that all ranks run together."""

from __future__ import annotations

from pipeloom.runtime.actions.registry import Queue, executes
from pipeloom.runtime.flight import Flight
from pipeloom.runtime.p2p.base import Delivery
from pipeloom.runtime.stage import Stage
from pipeloom.runtime.tensor_spec import boundary_of


@executes("BROADCAST")
def broadcast(flight: Flight, stage: Stage, queue: Queue) -> None:
    """Copy the output of the last stage of layers to every rank."""
    edge, unit = flight.program.input_edge, flight.unit
    hidden = None if edge is None else flight.step.activations.pop((edge, unit)).values[0]
    queue.vocabulary.broadcast(unit, hidden, flight.step.batch.targets[unit])


@executes("S")
def scores(flight: Flight, stage: Stage, queue: Queue) -> None:
    """Compute the scores of this rank's share."""
    queue.vocabulary.scores(flight.unit, flight.step.batch.targets[flight.unit], flight.step.training)


@executes("REDUCE_SUM")
def sum_scores(flight: Flight, stage: Stage, queue: Queue) -> None:
    """Sum the scores; the rank of the last stage of layers adds the loss to its sum."""
    step = flight.step
    loss = queue.vocabulary.sum_scores(flight.unit, step.batch.shares[flight.unit], step.training)
    if flight.program.input_edge is not None:
        step.result.loss.add(loss)


@executes("REDUCE")
def reduce_scores(flight: Flight, stage: Stage, queue: Queue) -> None:
    """Sum the scores and, in training, the input gradient."""
    sum_scores(flight, stage, queue)
    if flight.step.training:
        reduce_input(flight, stage, queue)


@executes("REDUCE_INPUT")
def reduce_input(flight: Flight, stage: Stage, queue: Queue) -> None:
    """Sum the input gradient; the rank of the last stage of layers keeps it for its backward."""
    gradient, edge = queue.vocabulary.sum_input_gradient(flight.unit), flight.program.input_edge
    if edge is not None:
        flight.step.gradients[edge, flight.unit] = (gradient,)


@executes("T")
def share_gradients(flight: Flight, stage: Stage, queue: Queue) -> None:
    """Compute the gradients of this rank's share."""
    queue.vocabulary.gradients(flight.unit)


@executes("EMBED")
def look_up(flight: Flight, stage: Stage, queue: Queue) -> None:
    """Look the tokens up; the rank of the first stage keeps the rows as that stage's input."""
    (tokens,) = flight.step.inputs[flight.unit]
    rows = queue.vocabulary.look_up(flight.unit, tokens, flight.step.training)
    if (edge := flight.program.output_edge) is not None:
        flight.step.activations[edge, flight.unit] = Delivery((rows,), boundary_of((rows,)))


@executes("EMBED_GRAD")
def add_rows(flight: Flight, stage: Stage, queue: Queue) -> None:
    """Add the gradients of the tokens' rows."""
    edge = flight.program.output_edge
    gradients = () if edge is None else flight.step.gradients.pop((edge, flight.unit))
    queue.vocabulary.add_rows(flight.unit, *gradients)
