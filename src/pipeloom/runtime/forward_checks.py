"""Checks of a stage's forwards: layers change only what they may, and gradients will reach the stage's parameters.

A stage's first forwards are checked in full, since a layer that breaks a rule does so from the start. Checks of later ones
cost next to nothing: they cover only what can happen at any time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from pipeloom.errors import UsageError
from pipeloom.ops.attribute_reads import AttributeReads
from pipeloom.ops.attribute_state import Attribute
from pipeloom.ops.segments import carries
from pipeloom.runtime.built_parameters import ReplicatedParameters, next_operation, require_of_rank, require_own_graph
from pipeloom.runtime.program import StageProgram
from pipeloom.runtime.shared_state import SharedChanges, SharedState, StateHolder
from pipeloom.runtime.stage_modules import StageModules
from pipeloom.runtime.state_changes import BackwardChanges, StateChanges, require_unread
from pipeloom.runtime.tensor_spec import BoundaryValues, TensorSpecs

_FIRST = 64  # forwards per stage; a layer that changes its input in place does so in one of them
_LOOKS = 2  # of these; a layer that changes its parameters does so in one of them


class ForwardChecks:
    """The checks of one stage's forwards that record a graph.

    Args:
        where: the stage, in words.
        segmented: whether the stage runs in segments.
        replicated: the holders of copies of these layers' parameters, in words; None: there are none.
        elsewhere: parameter in this process that a layer of another rank holds -> its name; complete at the first forward.
        shared: state that layers of several stages share.

    Attributes:
        written_in_backward: attributes that backwards write; no forward may read them before the backwards of all earlier
            micro-batches.
        changing: names of recomputed layers that have changed their input in place.
    """

    def __init__(
        self,
        layers: StageModules,
        where: str,
        *,
        segmented: bool,
        replicated: str | None,
        elsewhere: Mapping[nn.Parameter, str],
        shared: SharedState | None,
    ) -> None:
        self.layers = layers
        self.where = where
        self.segmented = segmented
        self.elsewhere = elsewhere
        self._shared = shared
        named = dict(zip(layers.names, layers.modules, strict=True))
        self.replicated = None if replicated is None else ReplicatedParameters(named, replicated)
        self._left: float = _FIRST
        self.written_in_backward: list[Attribute] = []
        self.changing: set[str] = set()

    def begin(
        self, inputs: BoundaryValues, specs: TensorSpecs | None, program: StageProgram, arriving: bool
    ) -> CheckedForward | None:
        """Return the checks of the next forward; None: it needs none.

        Args:
            inputs: inputs of the stage, as leaves.
            specs: specs of the inputs; None: they are the user's.
            arriving: whether the pipeline writes to weights during the forward.
        """
        aliases = [] if specs is None or len(specs) == 1 else _aliases(inputs, specs)
        if self._left < 0 and program.in_order and not aliases:
            return None
        self._left -= 1
        return CheckedForward(self, program.in_order, arriving, aliases)

    @cached_property
    def shared(self) -> list[tuple[str, StateHolder]]:
        """State that other stages hold too, each with its layer; available once all layers are built, at the first forward."""
        return [] if self._shared is None else self._shared.of(self.layers.names)

    @property
    def first(self) -> bool:
        """Return whether the present forward is one of the first ones."""
        return self._left >= 0

    @property
    def by_value(self) -> bool:
        """Return whether parameters are compared by value too in the present forward."""
        return _FIRST - _LOOKS <= self._left < _FIRST

    @contextmanager
    def watched_forward(self) -> Iterator[None]:
        """Raise UsageError if the forward inside reads what backwards write. Later forwards are not watched."""
        written, self.written_in_backward = self.written_in_backward, []
        reads = AttributeReads(written, recomputed=True)
        with reads:
            yield
        require_unread(reads, self.where)
        if self.first:
            self.written_in_backward = written

    def allow_changes(self) -> None:
        """Allow layers to change their inputs in place from now on, in every forward."""
        self._left = math.inf

    def on_change(self, name: str) -> Callable[[], None] | None:
        """Return what to call if the recomputed layer called `name` changes its input in place; None: it may not.

        It works on a copy for that, which ends after some forwards in which it has not changed one.
        """
        return partial(self.changing.add, name) if self.first or name in self.changing else None

    def explain(self, error: RuntimeError, inputs: Sequence[Any]) -> None:
        """Add a note to an error about a leaf that was changed in place, if the next forward allows that."""
        if not self.first and "leaf Variable that requires grad" in str(error) and any(map(carries, inputs)):
            self.allow_changes()
            error.add_note("(a layer changes its input in place, and did not before: the next step allows it)")


class CheckedForward:
    """The state before one forward, and the checks after it.

    Args:
        in_order: whether every micro-batch passes through the stage, in order.
        aliases: inputs that shared memory when they were computed, with their versions.

    Attributes:
        of_backward: constructor of the checks of the micro-batch's backward, after the forward; None: it needs none.
    """

    def __init__(
        self, checks: ForwardChecks, in_order: bool, arriving: bool, aliases: Sequence[tuple[Tensor, int]]
    ) -> None:
        self._checks = checks
        self._aliases = aliases
        first, by_value = checks.first, checks.by_value
        replicated = checks.replicated if first and not arriving else None
        self._versions = None if replicated is None else replicated.versions()
        self._began = next_operation() if by_value and not checks.segmented else None
        self._shared = SharedChanges(checks.shared, by_value) if first and checks.shared else None
        self._in_order = in_order
        self._by_value = by_value
        self.of_backward: Callable[[], BackwardChanges] | None = None
        self._state: StateChanges | None = None
        if by_value or not in_order:
            self._state = StateChanges(
                checks.layers,
                checks.where,
                in_order=in_order,
                attributes=first,
                parameters=first and not arriving,
                closely=by_value,
            )

    def changeable(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the inputs so that layers may change them in place, as in one process, where they are not leaves.

        That takes one more operation per input, so it ends after some forwards in which no layer changed one.
        """
        self._input_versions: tuple[int, ...] = ()
        if not self._checks.first:
            return inputs
        self._input_versions = tuple(value._version for value in inputs if carries(value))
        return tuple(_Given.apply(v) if carries(v) else v for v in inputs)  # type: ignore[no-untyped-call]

    def note_changes(self, inputs: tuple[Any, ...]) -> None:
        """Keep inputs changeable in all later forwards if a layer has changed one of these since `changeable`."""
        before = self._input_versions
        if before and before != tuple(value._version for value in inputs if carries(value)):
            self._checks.allow_changes()

    def require_unchanged(self) -> None:
        """Raise UsageError for state or inputs that layers have changed but may not change."""
        if self._shared is not None:
            self._shared.refuse()
        if self._state is not None:
            self._state.refuse()
            if self._by_value:
                checks, written = self._checks, self._state.written()
                self.of_backward = partial(BackwardChanges, checks.layers, checks.where, written, self._in_order)
        if any(version_of(value) != version for value, version in self._aliases):
            raise UsageError(
                f"a layer of {self._checks.where} changes its input in place, and the layer before returned it beside another "
                "tensor of the same memory, which in one process would change with it; return a clone of one of them, or work "
                "on a copy"
            )

    def require_own(self, roots: Sequence[GradientEdge], losses: Sequence[Tensor]) -> None:
        """Raise UsageError if the forward's graph reaches beyond the stage, or a replicated weight has changed."""
        checks = self._checks
        if checks.first and checks.replicated is not None:
            if self._versions is not None:
                checks.replicated.require_unchanged(self._versions)
            checks.replicated.require_known(roots, losses)
        elif checks.first and checks.elsewhere:
            require_of_rank(checks.elsewhere, roots, losses)
        if self._began is not None:
            require_own_graph(checks.where, self._began, roots, losses)


def version_of(value: Tensor) -> int:
    """Return the tensor's version counter; 0 for one made in inference mode, which has none."""
    return 0 if value.is_inference() else value._version


def _aliases(values: BoundaryValues, specs: TensorSpecs) -> list[tuple[Tensor, int]]:
    pairs = zip(values, specs, strict=True)
    return [(v, version_of(v)) for v, s in pairs if v is not None and s is not None and s.shares]


class _Given(torch.autograd.Function):
    """View of the same memory that is not a leaf, and shares the version counter of its input."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)  # if a layer's input gets no gradient, the stage before gets none either
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0]
