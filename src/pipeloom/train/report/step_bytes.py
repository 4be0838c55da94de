"""Predicted bytes of a step: those of `Costs.bytes`, and the peak of each rank by what it consists of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pipeloom.config import Layout
from pipeloom.config.standing_bytes import element_bytes, spans, stage_parameters, summed_over_slices
from pipeloom.ops.live_bytes import LiveBytes
from pipeloom.plan.memory import StageMemory
from pipeloom.plan.run import layout_messages, with_temporaries
from pipeloom.plan.run import predicted as planned
from pipeloom.runtime import Pipeline
from pipeloom.runtime.layer_bytes import LayerBytes, stage_bytes
from pipeloom.schedule import Costs, Timeline, simulate
from pipeloom.schedule.actions import PENDING, SAVED
from pipeloom.schedule.channels import size_words
from pipeloom.schedule.costs import DEVICE
from pipeloom.train.collect import gather
from pipeloom.train.observers import StepEnd, StepObserver
from pipeloom.train.optimizer import Optimizer
from pipeloom.train.report.layer_bytes import layer_bytes

if TYPE_CHECKING:
    from pipeloom.train.report.report import Report


@dataclass(frozen=True)
class RankBytes:
    """Predicted bytes of one rank at the peak of a step.

    Attributes:
        standing: weights, gradients and the optimizer's state.
        messages: buffers of receives and sends, besides inputs that a stage keeps.
        activations: what micro-batches hold at the peak, a forward that saves nothing included while it runs.
        temporary: the largest temporary of a layer.
    """

    standing: float
    messages: float
    activations: float
    temporary: float

    @property
    def total(self) -> float:
        return self.standing + self.messages + self.activations + self.temporary


def predicted_costs(layout: Layout, layers: Sequence[LayerBytes], device: str = "") -> Costs:
    """Return costs with the bytes of each stage, for the largest micro-batch; the times are equal.

    "messages" and "temporary" are those of the rank, at the first of its stages, and "forward" is what exceeds this temporary.
    Messages in memory that CPU ranks share are not torch's.

    Args:
        device: type of the stages' device; default: as configured.
    """
    schedule = layout.schedule
    amounts, states = _amounts(layout, layers)
    largest_slice = max(layout.cuts.sizes) if layout.cuts is not None else 1.0
    messages, temporary = [0.0] * schedule.stages, [0.0] * schedule.stages
    unsaved = list(amounts["forward"])
    for stages, sizes in zip(schedule.stages_of, layout_messages(layout, device), strict=True):
        messages[stages[0]] = sizes.most
        temporary[stages[0]] = max(
            amounts["temporary"][stage] * largest_slice + states[stage] * (1 - 1 / schedule.slices) for stage in stages
        )
        for stage in stages:
            unsaved[stage] = max(0.0, unsaved[stage] - temporary[stages[0]])
    costs = _lasting_costs(layout, layers, amounts)
    of_ranks = {"messages": tuple(messages), "temporary": tuple(temporary), "forward": tuple(unsaved)}
    return replace(costs, bytes=dict(costs.bytes) | of_ranks)


def _lasting_costs(layout: Layout, layers: Sequence[LayerBytes], amounts: Mapping[str, tuple[float, ...]]) -> Costs:
    """Return costs with the bytes of each stage, without messages and temporaries of backwards."""
    counts, largest = stage_parameters(layout), max(layout.microbatch_sizes)
    moving = {name: sizes for name, sizes in amounts.items() if not name.startswith("temporary")}
    standing = {name: tuple(size * count for count in counts) for name, size in element_bytes(layout.config).items()}
    if layout.config.lora.r:  # weights are frozen, and adapters come beside them
        trained = [
            sum(layer.trained for layer in layers[slice(*span)]) for span in spans(layout.schedule, layout.stage_layers)
        ]
        for name, size in element_bytes(layout.config).items():
            frozen = standing[name] if name == "params" else (0.0,) * len(trained)
            standing[name] = tuple(size * count + more for count, more in zip(trained, frozen, strict=True))
    costs = Costs(microbatch=tuple(size / largest for size in layout.microbatch_sizes), bytes=moving | standing)
    return costs if layout.cuts is None else layout.cuts.costs(costs)


def predicted_ranks(layout: Layout, timeline: Timeline) -> list[RankBytes]:
    """Return the bytes of each pipeline rank, before tensor or expert parallelism divides them."""
    peaks, sizes = timeline.peak_bytes[DEVICE], timeline.costs.bytes_in(DEVICE, layout.schedule.stages)
    rows = []
    for peak, stages in zip(peaks, layout.schedule.stages_of, strict=True):
        standing, messages, temporary = (
            sum(sizes[name][stage] for name in names for stage in stages)
            for names in (("params", "grads", "optimizer"), ("messages",), ("temporaries",))
        )
        rows.append(RankBytes(standing, messages, peak - standing - messages - temporary, temporary))
    return rows


def predicted_timeline(layout: Layout, layers: Sequence[LayerBytes]) -> Timeline:
    """Return the step with the bytes of whole layers, one of each kind given."""
    amounts, states = _amounts(layout, layers)
    timeline = simulate(layout.schedule, _lasting_costs(layout, layers, amounts))
    return with_temporaries(layout, timeline, _stage_memories(amounts, states))


def predicted(layout: Layout) -> tuple[Costs, list[RankBytes]]:
    """Return the costs and the bytes of each pipeline rank: of whole layers, from one layer of each kind; of layers that ranks
    divide, and of gathered ones, as a dry run.

    Raises as `layer_bytes`, and UsageError for divided layers that cannot be planned.
    """
    mesh = layout.mesh
    if mesh.tp * mesh.cp * mesh.ep > 1 or layout.schedule.vocabulary or layout.schedule.stage_actions:
        run = planned(layout)
        return run.timeline.costs, [
            RankBytes(row.standing - row.buffers, row.buffers, row.activations, row.temporaries) for row in run.ranks
        ]
    timeline = predicted_timeline(layout, layer_bytes(layout))
    return timeline.costs, predicted_ranks(layout, timeline)


def _amounts(layout: Layout, layers: Sequence[LayerBytes]) -> tuple[dict[str, tuple[float, ...]], list[float]]:
    """Return `stage_bytes`, and of each stage the bytes of the gradients of keys and values that slices sum."""
    groups = [layers[start:end] for start, end in spans(layout.schedule, layout.stage_layers)]
    states = [summed_over_slices(layout, at, sum(layer.state for layer in group)) for at, group in enumerate(groups)]
    return stage_bytes(layout.schedule, groups), states


def _stage_memories(amounts: Mapping[str, tuple[float, ...]], states: Sequence[float]) -> list[StageMemory]:
    whole, split = amounts["temporary of B"], amounts["temporary of I"]
    return [
        StageMemory(amounts[SAVED][at], amounts[PENDING][at], whole[at], extra_input=split[at], summed=state)
        for at, state in enumerate(states)
    ]


class BytesCheck:
    """Compares the predicted peak of each rank with that of the second step of a run, before which all buffers exist; of steps
    that are profiled it takes none, since the profile would show its own operations.

    On a CPU the tensors that the step makes are counted, which takes some microseconds for each operation of that one step.

    Attributes:
        measured, predicted: bytes of each rank, on rank 0 once they are known.
    """

    def __init__(self, layout: Layout, pipeline: Pipeline, optimizer: Optimizer, report: Report | None) -> None:
        # The device may be configured as "auto"; messages on a CPU are in memory that is not torch's.
        train = layout.config.train.model_copy(update={"device": pipeline.device.type})
        self._layout = replace(layout, config=layout.config.model_copy(update={"train": train}))
        self._pipeline, self._optimizer, self._report = pipeline, optimizer, report
        self._steps, self._due = 0, False
        self.measured: list[float] = []
        self.predicted: list[float] = []
        self._live: LiveBytes | None = None

    @property
    def slows(self) -> bool:
        """Return whether the last step took longer because its tensors were counted."""
        return self._due and self._live is not None

    @property
    def row(self) -> StepObserver:
        return StepObserver("bytes at the peak", self._before_step, self._after_step)

    def _before_step(self, step: int) -> None:
        train = self._layout.config.train
        profiled = 0 < train.profile_from <= step < train.profile_from + train.profile_steps
        self._steps += not profiled
        self._due = self._steps == 2 and not profiled
        if not self._due:
            return
        device = self._pipeline.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return
        sync, parameters = self._pipeline.sync, [parameter for _, parameter in self._pipeline.named_parameters()]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        held: list[Tensor] = [*parameters, *gradients, *self._optimizer.held]
        if sync is not None:
            held += sync.held
        self._live = LiveBytes(held=held, resized=() if sync is None else sync.gathered)
        self._live.__enter__()

    def _after_step(self, end: StepEnd) -> None:
        if not self._due:
            return
        if self._live is not None:
            self._live.__exit__(None, None, None)
            peak = self._live.peak + self._pipeline.stats.receive_bytes
        else:
            peak = torch.cuda.max_memory_allocated(self._pipeline.device)
        measured = [row[0] for row in gather(self._pipeline, [float(peak)])]
        if self._report is None:
            return
        mesh, ranks = self._layout.mesh, []
        try:
            with torch.random.fork_rng([]):
                ranks = predicted(self._layout)[1]
        except Exception as error:  # such as a user's class that needs more than shapes: it must not end a run
            self._report.say(f"bytes at the peak: not predicted: {error}")
        expected = [ranks[mesh.place(at).pp].total for at in range(mesh.world)] if ranks else []
        beside = [f" (predicted {size_words(each)})" for each in expected] or [""] * mesh.world
        rows = (f"rank {at} {size_words(each)}{beside[at]}" for at, each in enumerate(measured))
        self._report.say(f"bytes at the peak: {', '.join(rows)}")
        self._report.record("bytes", measured=measured, predicted=expected)
        self.measured, self.predicted = measured, expected
