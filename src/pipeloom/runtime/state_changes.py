"""State of layers that a forward or a backward changes, and that would then not be what it is in one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from pipeloom.errors import UsageError
from pipeloom.ops.attribute_reads import AttributeReads, WrittenAttributes, is_record
from pipeloom.ops.attribute_state import Attribute, AttributeState
from pipeloom.ops.buffer_state import BufferState
from pipeloom.ops.parameter_state import ParameterState
from pipeloom.runtime.stage_modules import StageModules


class StateChanges:
    """The state of a stage's layers before a forward.

    Where micro-batches do not come in order, buffers, attributes and parameters that a forward changes would depend on their
    order. Where they do, a parameter that is changed behind autograd's back matters, because backwards of earlier micro-batches
    still need its value, and so does an attribute that a backward reads.

    Args:
        where: the stage, in words.
        in_order: whether every micro-batch comes through the stage, in order.
        attributes: look at attributes, too.
        parameters: look at parameters, too.
        closely: compare the values of parameters, and note what the forward writes.
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
        named = list(zip(layers.names, layers.modules, strict=True))
        self._buffers, self._attributes = _held(
            named, buffers=closely or not in_order, attributes=closely or attributes
        )
        self._parameters = [
            (name, ParameterState(m, closely)) for name, m in named if parameters and (closely or not in_order)
        ]

    def refuse(self) -> None:
        """Raise UsageError for what a forward has changed since."""
        if not self._in_order:
            for layer, buffers in self._buffers:
                for buffer in buffers.changed():
                    refuse_out_of_order("forward", layer, f"its buffer {buffer.path!r}", self._where)
            for layer, attributes in self._attributes:
                for name in attributes.changed():
                    refuse_out_of_order("forward", layer, f"its attribute {name!r}", self._where)
        for layer, parameters in self._parameters:
            for name, known in parameters.changed():
                if not self._in_order:
                    refuse_out_of_order("forward", layer, f"its parameter {name!r}", self._where)
                if not known and parameters.trains(name):
                    raise UsageError(
                        f"the forward of layer {layer!r} changes its weight {name!r} through .data, which autograd does not see, "
                        "and the backwards of earlier micro-batches still need the value before: change the weight between steps"
                    )

    def written(self) -> WrittenAttributes:
        """Return what the forward has written, with its values now."""
        return WrittenAttributes(_written(self._buffers, self._attributes))


class BackwardChanges:
    """The state of a stage's layers before a backward.

    Args:
        where: the stage, in words.
        written: what the micro-batch's forward has written: the backward may read it while it is still there.
        in_order: whether every micro-batch comes through the stage, in order.
    """

    def __init__(self, layers: StageModules, where: str, written: WrittenAttributes, in_order: bool) -> None:
        self._where = where
        self._in_order = in_order
        named = list(zip(layers.names, layers.modules, strict=True))
        self._buffers, self._attributes = _held(named, buffers=True, attributes=True)
        self._parameters = [(name, ParameterState(module, by_value=True)) for name, module in named]
        self.reads = AttributeReads(written.stale(), recomputed=False)

    def refuse(self, others: bool) -> list[Attribute]:
        """Return what the backward has written, but records. Raise UsageError for what would have other values in one process.

        Args:
            others: whether other micro-batches wait for their backwards.
        """
        if self.reads.found is not None:
            raise UsageError(
                f"the backward of a layer of {self._where} reads {self.reads.found.path!r}, which the forward of another "
                "micro-batch has written meanwhile: what a hook or a function's backward needs must not be left in a module; "
                "keep it in the function's context, or in a hook that the forward registers"
            )
        for layer, parameters in self._parameters if others else ():
            for name, _ in parameters.changed():
                raise UsageError(
                    f"the backward of layer {layer!r} changes its weight {name!r} (an optimizer in a hook?), and other "
                    "micro-batches, whose backwards still come, have been computed with the value before: change it between steps"
                )
        written = [each for each in _written(self._buffers, self._attributes) if not is_record(each)]
        if not self._in_order:
            for layer, buffers in self._buffers:
                for buffer in buffers.changed():
                    refuse_out_of_order("backward", layer, f"its buffer {buffer.path!r}", self._where)
        return written


def require_unread(reads: AttributeReads, where: str) -> None:
    """Raise UsageError where a forward has read what backwards write, and those of earlier micro-batches still come."""
    if reads.found is not None:
        raise UsageError(
            f"the forward of a layer of {where} reads {reads.found.path!r}, which its backward writes: in one process the "
            "backwards of all earlier micro-batches have run by then, and here they have not; write it between steps"
        )


def refuse_out_of_order(what: str, layer: str, state: str, where: str) -> None:
    """Raise UsageError for state of a layer that depends on the order of the micro-batches."""
    raise UsageError(
        f"the {what} of layer {layer!r} changes {state}, and under this schedule {where} does not get every "
        "micro-batch in order, so it would differ from that of one process; choose a schedule with one route"
    )


Buffers = list[tuple[str, BufferState]]
Attributes = list[tuple[str, AttributeState]]


def _held(named: Sequence[tuple[str, nn.Module]], *, buffers: bool, attributes: bool) -> tuple[Buffers, Attributes]:
    return (
        [(name, BufferState(m)) for name, m in named if buffers and any(True for _ in m.buffers())],
        [(name, AttributeState(m)) for name, m in named if attributes],
    )


def _written(buffers: Buffers, attributes: Attributes) -> Iterator[Attribute]:
    for layer, found in buffers:
        yield from (each._replace(path=f"{layer}.{each.path}") for each in found.changed())
    for layer, state in attributes:
        yield from (each._replace(path=f"{layer}.{each.path}") for each in state.written())
