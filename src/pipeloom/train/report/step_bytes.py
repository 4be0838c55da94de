"""Predicted bytes of a step: those of `Costs.bytes`, and the peak of each rank by what it consists of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pipeloom.config import Layout
from pipeloom.config.standing_bytes import element_bytes, spans, stage_parameters, summed_over_slices
from pipeloom.config.volume import boundary_bytes
from pipeloom.ops.live_bytes import LiveBytes
from pipeloom.runtime import Pipeline
from pipeloom.runtime.layer_bytes import LayerBytes, most_message_bytes, stage_bytes
from pipeloom.runtime.options import RuntimeOptions
from pipeloom.runtime.program import lower
from pipeloom.schedule import Costs, simulate
from pipeloom.schedule.channels import size_words
from pipeloom.schedule.costs import DEVICE
from pipeloom.train.collect import gather
from pipeloom.train.observers import StepEnd, StepObserver
from pipeloom.train.optimizer import Optimizer
from pipeloom.train.report.layer_bytes import layer_bytes
from pipeloom.train.report.tables import MOST_ROWS

if TYPE_CHECKING:
    from pipeloom.train.report.report import Report


@dataclass(frozen=True)
class RankBytes:
    """Predicted bytes of one rank at the peak of a step.

    Attributes:
        standing: weights, gradients and the optimizer's state.
        messages: buffers of receives and sends, besides inputs that a stage keeps.
        activations: what micro-batches hold at the peak.
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

    "messages" and "temporary" are those of the rank, at the first of its stages. Messages in memory that CPU ranks share are not
    torch's.

    Args:
        device: type of the stages' device; default: as configured.
    """
    schedule, sizes = layout.schedule, boundary_bytes(layout)
    amounts = stage_bytes(schedule, [layers[start:end] for start, end in spans(layout)])
    section = layout.config.schedule
    options = RuntimeOptions(
        transport="batched" if section.transport == "batched" else "individual",
        overlap_p2p=section.overlap_p2p,
        receive_depth=section.receive_depth or RuntimeOptions.receive_depth,
    )
    shares = (device or layout.config.train.device) == "cpu" and section.transport in ("auto", "shared")
    shares_of_slices = layout.cuts.sizes if layout.cuts is not None else (1.0,)
    states = [sum(layer.state for layer in layers[start:end]) for start, end in spans(layout)]
    messages, temporary = [0.0] * schedule.stages, [0.0] * schedule.stages
    for rank, stages in enumerate(schedule.stages_of):
        if not shares:
            program = lower(schedule, rank, options)
            messages[stages[0]] = most_message_bytes(
                program, lambda message: sizes[message.microbatch] * shares_of_slices[message.slice or 0]
            )
        temporary[stages[0]] = max(
            amounts["temporary"][stage] * max(shares_of_slices) + summed_over_slices(layout, stage, states[stage])
            for stage in stages
        )
    per_element = element_bytes(layout.config).items()
    counts = stage_parameters(layout)
    standing = {name: tuple(size * count for count in counts) for name, size in per_element}
    largest = max(layout.microbatch_sizes)
    costs = Costs(
        microbatch=tuple(size / largest for size in layout.microbatch_sizes),
        bytes=amounts | standing | {"messages": tuple(messages), "temporary": tuple(temporary)},
    )
    return costs if layout.cuts is None else layout.cuts.costs(costs)


def predicted_ranks(layout: Layout, costs: Costs) -> list[RankBytes]:
    """Return the bytes of each pipeline rank, before tensor or expert parallelism divides them."""
    peaks = simulate(layout.schedule, costs).peak_bytes[DEVICE]
    sizes = costs.bytes_in(DEVICE, layout.schedule.stages)
    rows = []
    for peak, stages in zip(peaks, layout.schedule.stages_of, strict=True):
        standing, messages, temporary = (
            sum(sizes[name][stage] for name in names for stage in stages)
            for names in (("params", "grads", "optimizer"), ("messages",), ("temporary",))
        )
        rows.append(RankBytes(standing, messages, peak - standing - messages - temporary, temporary))
    return rows


def predicted(layout: Layout, device: str = "") -> tuple[Costs, list[RankBytes]]:
    """Return `predicted_costs` and `predicted_ranks` from one layer of each kind. Raises as `layer_bytes`."""
    costs = predicted_costs(layout, layer_bytes(layout), device)
    return costs, predicted_ranks(layout, costs)


class BytesCheck:
    """Compares the predicted peak of each rank with that of the second step of a run, before which all buffers exist; of steps
    that are profiled it takes none, since the profile would show its own operations.

    On a CPU the tensors that the step makes are counted, which takes some microseconds for each operation of that one step.

    Attributes:
        measured, predicted: bytes of each rank, on rank 0 once they are known.
    """

    def __init__(self, layout: Layout, pipeline: Pipeline, optimizer: Optimizer, report: Report | None) -> None:
        self._layout, self._pipeline, self._optimizer, self._report = layout, pipeline, optimizer, report
        self._steps, self._due = 0, False
        self.measured: list[float] = []
        self.predicted: list[float] = []
        self._live: LiveBytes | None = None

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
        parameters = [parameter for _, parameter in self._pipeline.named_parameters()]
        summed = self._pipeline.sync is not None  # into buffers that stay
        gradients = sum(
            p.numel() * max(4, p.itemsize) if summed else 0 if p.grad is None else p.grad.nbytes for p in parameters
        )
        buffers = self._pipeline.stats.receive_buffers * max(boundary_bytes(self._layout))
        self._standing = sum(p.nbytes for p in parameters) + gradients + self._optimizer.state_bytes + buffers
        self._live = LiveBytes()
        self._live.__enter__()

    def _after_step(self, end: StepEnd) -> None:
        if not self._due:
            return
        if self._live is not None:
            self._live.__exit__(None, None, None)
            peak = self._standing + self._live.peak
        else:
            peak = torch.cuda.max_memory_allocated(self._pipeline.device)
        measured = [row[0] for row in gather(self._pipeline, [float(peak)])]
        if self._report is None:
            return
        mesh, ranks = self._layout.mesh, []
        if mesh.tp * mesh.cp * mesh.ep == 1:  # the prediction is of undivided layers
            try:
                with torch.random.fork_rng([]):
                    ranks = predicted(self._layout, self._pipeline.device.type)[1]
            except Exception as error:  # such as a user's class that needs more than shapes: it must not end a run
                self._report.say(f"bytes at the peak: not predicted: {error}")
        expected = [ranks[mesh.place(at).pp].total for at in range(mesh.world)] if ranks else []
        rows = [
            f"rank {at} {size_words(size)}" + (f" (predicted {size_words(expected[at])})" if expected else "")
            for at, size in enumerate(measured[:MOST_ROWS])
        ]
        self._report.say("bytes at the peak: " + ", ".join(rows))
        self._report.record("bytes", measured=measured, predicted=expected)
        self.measured, self.predicted = measured, expected
