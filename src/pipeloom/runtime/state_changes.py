"""State of layers that a forward changes, and that would then not be what it is in one process."""

from __future__ import annotations

from pipeloom.errors import UsageError
from pipeloom.ops.attribute_state import AttributeState
from pipeloom.ops.buffer_state import BufferState
from pipeloom.ops.parameter_state import ParameterState
from pipeloom.runtime.stage_modules import StageModules


class StateChanges:
    """The state of a stage's layers before a forward.

    Where micro-batches do not come in order, buffers, attributes and parameters that a forward changes would depend on their
    order. Where they do, only a parameter that is changed behind autograd's back matters: backwards of earlier micro-batches
    still need its value.

    Args:
        where: the stage, in words.
        in_order: whether every micro-batch comes through the stage, in order.
        shared: whether the replicas of a layer are one module.
        attributes: look at attributes, too.
        parameters: look at parameters, too.
        by_value: compare their values.
    """

    def __init__(
        self,
        layers: StageModules,
        where: str,
        *,
        in_order: bool,
        shared: bool,
        attributes: bool,
        parameters: bool,
        by_value: bool,
    ) -> None:
        self._where = where
        self._in_order = in_order
        self._shared = shared
        named = list(zip(layers.names, layers.modules, strict=True))
        ordered = [] if in_order else named
        self._buffers = [(name, BufferState(m)) for name, m in ordered if any(True for _ in m.buffers())]
        self._attributes = [(name, AttributeState(m)) for name, m in ordered if attributes]
        self._parameters = [
            (name, ParameterState(m, by_value)) for name, m in named if parameters and (by_value or not in_order)
        ]

    def refuse(self) -> None:
        """Raise UsageError for what a forward has changed since.

        Integers count, which does not depend on the order, where all replicas of the layer are one module.
        """
        for layer, buffers in self._buffers:
            for name in buffers.changed(integers=not self._shared):
                self._refuse(layer, f"its buffer {name!r}")
        for layer, attributes in self._attributes:
            for name in attributes.changed():
                self._refuse(layer, f"its attribute {name!r}")
        for layer, parameters in self._parameters:
            for name, known in parameters.changed():
                if not self._in_order:
                    self._refuse(layer, f"its parameter {name!r}")
                if not known and parameters.trains(name):
                    raise UsageError(
                        f"the forward of layer {layer!r} changes its weight {name!r} through .data, which autograd does not see, "
                        "and the backwards of earlier micro-batches still need the value before: change the weight between steps"
                    )

    def _refuse(self, layer: str, what: str) -> None:
        raise UsageError(
            f"the forward of layer {layer!r} changes {what}, and under this schedule {self._where} does not get every "
            "micro-batch in order, so it would differ from that of one process; choose a schedule with one route"
        )
