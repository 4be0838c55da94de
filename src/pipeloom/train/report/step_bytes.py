"""Predicted bytes of a step: those of `Costs.bytes`, and the peak of each rank by what it consists of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeloom.config import Layout
from pipeloom.config.standing_bytes import element_bytes, spans, stage_parameters
from pipeloom.config.volume import boundary_bytes
from pipeloom.runtime.layer_bytes import LayerBytes, most_message_bytes, stage_bytes
from pipeloom.runtime.options import RuntimeOptions
from pipeloom.runtime.program import lower
from pipeloom.schedule import Costs, simulate
from pipeloom.schedule.costs import DEVICE
from pipeloom.train.report.layer_bytes import layer_bytes


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
    messages, temporary = [0.0] * schedule.stages, [0.0] * schedule.stages
    for rank, stages in enumerate(schedule.stages_of):
        if not shares:
            program = lower(schedule, rank, options)
            messages[stages[0]] = most_message_bytes(program, lambda message: float(sizes[message.microbatch]))
        temporary[stages[0]] = max(amounts["temporary"][stage] for stage in stages)
    per_element = element_bytes(layout.config).items()
    counts = stage_parameters(layout)
    standing = {name: tuple(size * count for count in counts) for name, size in per_element}
    largest = max(layout.microbatch_sizes)
    return Costs(
        microbatch=tuple(size / largest for size in layout.microbatch_sizes),
        bytes=amounts | standing | {"messages": tuple(messages), "temporary": tuple(temporary)},
    )


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
