"""Changes of layers' state by a forward or a backward that would have another result than in one process."""

from __future__ import annotations

from collections.abc import Iterator

from pipeloom.errors import UsageError
from pipeloom.ops.attribute_reads import AttributeReads, WrittenAttributes, is_record
from pipeloom.ops.attribute_state import Attribute, AttributeState
from pipeloom.ops.buffer_state import BufferState
from pipeloom.ops.parameter_state import ParameterState
from pipeloom.runtime.stage_modules import StageModules


class LayerStates:
    """The buffers, attributes and parameters of a stage's layers at one moment, as (name of the layer, state).

    Args:
        by_value: compare the values of parameters too.
    """

    def __init__(
        self, layers: StageModules, *, buffers: bool, attributes: bool, parameters: bool, by_value: bool
    ) -> None:
        named = list(zip(layers.names, layers.modules, strict=True))
        self.buffers = [(name, BufferState(m)) for name, m in named if buffers and any(True for _ in m.buffers())]
        self.attributes = [(name, AttributeState(m)) for name, m in named if attributes]
        self.parameters = [(name, ParameterState(m, by_value)) for name, m in named if parameters]

    def changed(self) -> Iterator[tuple[str, str, Attribute]]:
        """Yield (layer, kind of state, attribute) of all state whose value has changed."""
        kinds = ("buffer", self.buffers), ("attribute", self.attributes), ("parameter", self.parameters)
        for kind, states in kinds:
            for layer, state in states:
                yield from ((layer, kind, change) for change in state.changed())

    def written(self) -> Iterator[Attribute]:
        """Yield the buffers and attributes that have been written to, with paths that begin with the layer."""
        for layer, buffers in self.buffers:
            yield from (each._replace(path=f"{layer}.{each.path}") for each in buffers.changed())
        for layer, attributes in self.attributes:
            yield from (each._replace(path=f"{layer}.{each.path}") for each in attributes.written())


class StateChanges:
    """The state of a stage's layers before a forward.

    If micro-batches do not arrive in order, buffers, attributes and parameters that a forward changes depend on the order. If
    they do, two changes still matter: of a parameter without autograd's knowledge, because backwards of earlier micro-batches
    need its old value, and of an attribute that a backward reads.

    Args:
        where: the stage, in words.
        in_order: whether every micro-batch comes through the stage, in order.
        attributes: check attributes too.
        parameters: check parameters too.
        closely: compare the values of parameters, and record the attributes that the forward writes.
    """

    def __init__(
        self,
        layers: StageModules,
        where: str,
        *,
        in_order: bool,
        attributes: bool,
        parameters: bool,
        closely: bool,
    ) -> None:
        self._where = where
        self._in_order = in_order
        parameters = parameters and (closely or not in_order)
        self._states = LayerStates(
            layers,
            buffers=closely or not in_order,
            attributes=closely or attributes,
            parameters=parameters,
            by_value=closely,
        )

    def refuse(self) -> None:
        """Raise UsageError for state that a forward has changed since."""
        if not self._in_order:
            for layer, kind, change in self._states.changed():
                refuse_out_of_order("forward", layer, f"its {kind} {change.path!r}", self._where)
            return
        for layer, parameters in self._states.parameters:
            for weight in parameters.changed_unseen():
                raise UsageError(
                    f"the forward of layer {layer!r} changes its weight {weight.path!r} through .data, which autograd does not "
                    "see, and the backwards of earlier micro-batches still need the value before: change the weight between steps"
                )

    def written(self) -> WrittenAttributes:
        """Return the state that the forward has written, with its present values."""
        return WrittenAttributes(self._states.written())


class BackwardChanges:
    """The state of a stage's layers before a backward.

    Args:
        where: the stage, in words.
        written: state that the micro-batch's forward has written: the backward may read it while it is unchanged.
        in_order: whether every micro-batch comes through the stage, in order.
    """

    def __init__(self, layers: StageModules, where: str, written: WrittenAttributes, in_order: bool) -> None:
        self._where = where
        self._in_order = in_order
        self._states = LayerStates(layers, buffers=True, attributes=True, parameters=True, by_value=True)
        self.reads = AttributeReads(written.stale(), recomputed=False)

    def refuse(self, others: bool) -> list[Attribute]:
        """Return the state that the backward has written, without records.

        Raises UsageError for state that would have other values in one process.

        Args:
            others: whether backwards of other micro-batches have not run.
        """
        if self.reads.found is not None:
            raise UsageError(
                f"the backward of a layer of {self._where} reads {self.reads.found.path!r}, which the forward of another "
                "micro-batch has written meanwhile: what a hook or a function's backward needs must not be left in a module; "
                "keep it in the function's context, or in a hook that the forward registers"
            )
        for layer, parameters in self._states.parameters if others else ():
            for weight in parameters.changed():
                raise UsageError(
                    f"the backward of layer {layer!r} changes its weight {weight.path!r} (an optimizer in a hook?), and other "
                    "micro-batches, whose backwards still come, have been computed with the value before: change it between steps"
                )
        written = [each for each in self._states.written() if not is_record(each)]
        if not self._in_order:
            for layer, buffers in self._states.buffers:
                for buffer in buffers.changed():
                    refuse_out_of_order("backward", layer, f"its buffer {buffer.path!r}", self._where)
        return written


def require_unread(reads: AttributeReads, where: str) -> None:
    """Raise UsageError if a forward has read state that backwards write, and those of earlier micro-batches have not run."""
    if reads.found is not None:
        raise UsageError(
            f"the forward of a layer of {where} reads {reads.found.path!r}, which its backward writes: in one process the "
            "backwards of all earlier micro-batches have run by then, and here they have not; write it between steps"
        )


def refuse_out_of_order(what: str, layer: str, state: str, where: str) -> None:
    """Raise UsageError for state of a layer that depends on the order of the micro-batches."""
    raise UsageError(
        f"the {what} of layer {layer!r} changes {state}, and under this schedule {where} does not get every "
        "micro-batch in order, so it would differ from that of one process; choose a schedule with one route that runs "
        "the micro-batches in order"
    )
