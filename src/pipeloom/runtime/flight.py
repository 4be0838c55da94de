"""One micro-batch on a stage between its forward and the end of its backward, and the run that it is part of."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from pipeloom.ops.deferred import WeightGradQueue
from pipeloom.ops.host_memory import HostCopy
from pipeloom.ops.parts import RecomputedParts
from pipeloom.ops.recompute import StartState
from pipeloom.ops.saved_tensors import SavedTensor, saving
from pipeloom.ops.segments import Communication
from pipeloom.ops.slices import PieceRoot, SequenceHistory, SliceState
from pipeloom.runtime.batch import Microbatches
from pipeloom.runtime.loss import LossSum, MicrobatchLoss
from pipeloom.runtime.offload import SavedTensors
from pipeloom.runtime.p2p.base import Delivery, handed_over
from pipeloom.runtime.program import Saving, StageProgram
from pipeloom.runtime.tensor_spec import BoundaryValues, ShapeCache, TensorSpecs, boundary_of
from pipeloom.schedule.actions import OUTPUT
from pipeloom.schedule.channels import Edge


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


StageInputs = tuple[BoundaryValues, TensorSpecs | None]
"""A stage's inputs, those named by `StageProgram.reads` last: tensors to which no other code writes. Their specs tell those that
carry a gradient; None: inputs of the user, without gradients.
"""


class ForwardRecord(NamedTuple):
    """Record of a forward, kept from F until R.

    Attributes:
        inputs: the stage's inputs; no values while they are in host memory.
        versions: of the tensors among its inputs.
        start: the state of the layers and of all generators before it.
        done: its end on a GPU, where its inputs travel.
        on_host: its inputs while they are in host memory.
    """

    inputs: StageInputs
    versions: tuple[int, ...]
    start: StartState
    done: torch.cuda.Event | None = None
    on_host: tuple[HostCopy | None, ...] = ()


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


@dataclass(slots=True)
class RankStep:
    """One run of a rank's program, as its actions share it.

    Attributes:
        stages: the stages of this rank.
        batch: the micro-batches.
        inputs: their inputs, as the first stages of routes get them.
        losses: their losses, for routes' last stages and for layers with losses of their own; None: none is computed, and a
            route's last stage returns its outputs as they are.
        training: whether backwards follow.
        keeps_outputs: whether the result has the outputs of the last stages.
        slices: into how many the sequences of each micro-batch are cut.
        specs: shapes of the values of edges.
        result: what the run has yielded so far.
        activations, gradients: (edge, micro-batch) -> what a stage here or a message has brought for one that needs it, or is to
            be sent.
        alive_changes: 1 for each micro-batch whose activations are held from then on, -1 where they are freed; of one of n parts
            that travel, 1/n of it.
        unused: messages that no action reads any more; the thread that computes returns their buffers.
        histories: (stage, micro-batch) -> the history of each layer, where sequences are cut.
        unreached: whether no loss so far carries a gradient; None: there was none.
    """

    stages: Collection[int]
    batch: Microbatches
    inputs: Sequence[tuple[Any, ...]]
    losses: Sequence[MicrobatchLoss | None]
    training: bool
    keeps_outputs: bool
    slices: int
    specs: ShapeCache
    result: StepResult = field(default_factory=StepResult)
    activations: dict[tuple[Edge, int], Delivery] = field(default_factory=dict)
    gradients: dict[tuple[Edge, int], BoundaryValues] = field(default_factory=dict)
    alive_changes: list[float] = field(default_factory=list)
    unused: deque[Delivery] = field(default_factory=deque)
    histories: dict[tuple[int, int], list[SequenceHistory]] = field(default_factory=dict)
    unreached: bool | None = None


@dataclass(slots=True)
class Flight:
    """State of one micro-batch, or of a slice of one, on a stage between F and the end of its backward.

    Attributes:
        step: the run.
        program: the stage's part of the schedule.
        unit: its number.
        saving: what its forward saves.
        received: the messages whose values it uses.
        weight_gradients: those that wait for W, or for a communication that they hide; None: autograd computes them.
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

    step: RankStep
    program: StageProgram
    unit: int
    saving: Saving
    received: tuple[Delivery, ...] = ()
    weight_gradients: WeightGradQueue | None = None
    groups: list[SavedGroup] = field(default_factory=list)
    outputs: BoundaryValues = ()
    specs: TensorSpecs | None = None
    read: int = 0
    record: ForwardRecord | None = None
    travels: SavedTensors | None = None
    parts: RecomputedParts | None = None
    states: Sequence[SliceState] = ()

    @property
    def microbatch(self) -> int:
        """The number of the micro-batch that it is, or is a slice of."""
        return self.unit // self.step.slices

    def saving_context(self) -> AbstractContextManager[Any]:
        """Return the context of its computations."""
        if self.record is not None:
            return saving(lambda _: SavedTensor(None))  # R saves it again
        if self.parts is not None:
            return self.parts.saving()
        return _SAVING if self.travels is None else saving(self.travels.pack)

    def pieces(self) -> tuple[PieceRoot, ...]:
        """Return the roots of what layers have kept of this slice since the last call."""
        return tuple([root for state in self.states for root in state.take_roots()])

    def give(self, edge: Edge, values: BoundaryValues) -> None:
        """Pass values of its forward to the consumer of `edge`."""
        specs = boundary_of(values)
        self.step.specs.remember(edge, self.unit, specs)
        if edge.consumer in self.step.stages:
            values = handed_over(values, edge.name != OUTPUT)
        self.step.activations[edge, self.unit] = Delivery(values, specs)

    def end_graph(self) -> None:
        """Drop all but the weight gradients that wait for W, and copies in host memory, which a backward need not use."""
        self.return_buffers()
        self.outputs, self.specs, self.parts, self.states = (), None, None, ()

    def return_buffers(self) -> None:
        """Let the transport use the buffers of its messages again."""
        self.step.unused += self.received
        self.received = ()
