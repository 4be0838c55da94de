"""Memory of each rank: what stands for the whole run, and what micro-batches hold at the peak of its timeline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields

from pipeloom.plan.layout import GRAD_BYTES, PlannedLayout
from pipeloom.schedule import Schedule, Timeline
from pipeloom.schedule.actions import GRADS, PARAMS
from pipeloom.schedule.costs import DEVICE
from pipeloom.schedule.timeline import MESSAGES, TEMPORARIES
from pipeloom.shapes.ops import LayerOps, Runtime, parameters_of, placeholders
from pipeloom.shapes.stage_bytes import LayerBytes, copies_in_sums, stage_bytes


class OfRanks:
    """Figures of what has the memory of every rank."""

    ranks: tuple[RankMemory, ...]

    @property
    def worst(self) -> int:
        """The pipeline rank that needs the most memory."""
        return max(range(len(self.ranks)), key=lambda rank: self.ranks[rank].total)

    @property
    def peak(self) -> float:
        """Bytes that a device must have."""
        return self.ranks[self.worst].total


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one device. The first seven lines are `allocated`; reserve and overhead are outside of it.

    Attributes:
        parameters, gradients, optimizer: of the stages that the rank holds, as ZeRO divides them.
        gathered: whole copies of sharded weights, and of gradients before their reduction.
        buffers: placeholders of weight gradients and the libraries' workspace.
        activations: saved tensors at the rank's peak.
        temporaries: what the action at the peak needs besides.
        reserve: what the allocator holds over its peak (fragments, blocks of other sizes).
        overhead: the CUDA context, NCCL's buffers.
        peak_action: the action at which the peak is, in words.
    """

    parameters: float
    gradients: float
    optimizer: float
    gathered: float
    buffers: float
    activations: float
    temporaries: float
    reserve: float
    overhead: float
    peak_action: str

    @property
    def allocated(self) -> float:
        """Bytes that the allocator hands out at the peak."""
        named = [spec.name for spec in fields(self)]
        return float(sum(getattr(self, name) for name in named[: named.index("reserve")]))

    @property
    def standing(self) -> float:
        """Bytes that stand for the whole step, whatever the schedule."""
        return self.parameters + self.gradients + self.optimizer + self.gathered + self.buffers

    @property
    def total(self) -> float:
        """Bytes that the device must have."""
        return self.allocated + self.reserve + self.overhead


def ranks_of(timeline: Timeline, runtime: Runtime | None = None) -> list[RankMemory]:
    """Pipeline rank -> its memory at the peak of a timeline with all its bytes.

    Args:
        runtime: with what its libraries and allocator hold besides; None: nothing.
    """
    workspace, margin, overhead = (
        (runtime.workspace, runtime.margin, runtime.overhead) if runtime is not None else (0.0, 0.0, 0.0)
    )
    rows = []
    for peak, program in zip(timeline.bytes_at_peak[DEVICE], timeline.schedule.programs, strict=True):
        held = defaultdict[str, float](float, peak.bytes)
        parameters, gradients = (
            held[shards if shards in held else whole] for shards, whole in (("shards", PARAMS), ("grad_shards", GRADS))
        )
        optimizer, gathered, buffers = held["optimizer"], held["gathered"], held["buffers"] + held[MESSAGES]
        extra = held[TEMPORARIES]
        moving = peak.total - parameters - gradients - optimizer - gathered - buffers - extra
        at_end = peak.at == len(program)
        action = "the sum of gradients over ranks, behind the last action" if at_end else program[peak.at].words
        rows.append(
            RankMemory(
                *(parameters, gradients, optimizer, gathered, workspace + buffers, moving, extra),
                margin * (moving + extra),
                overhead,
                action.removesuffix("OVERLAP_F_B"),
            )
        )
    return rows


def planned_bytes(
    layers: Sequence[LayerOps],
    spans: Sequence[tuple[int, int]],
    layout: PlannedLayout,
    schedule: Schedule,
    runtime: Runtime,
) -> dict[str, tuple[float, ...]]:
    """Return `Costs.bytes` of a layout's stages, where what a rank holds for the whole step is at the first of its stages.

    Args:
        layers: [embedding, block, …, output layer], as `layers_of` returns them.
        spans: stage -> (its first layer, the layer behind its last).
    """
    sizes = {key: LayerBytes.of_ops(layer) for key, layer in {id(layer): layer for layer in layers}.items()}
    amounts = stage_bytes(schedule, [[sizes[id(layer)] for layer in layers[slice(*span)]] for span in spans])
    amounts["layer"] = tuple(max((each.saved for each in layers[slice(*span)]), default=0.0) for span in spans)
    if runtime.name == "pipeloom":
        spans_of = dict(zip(schedule.position_of, spans, strict=True))
        counts = [sum(parameters_of(layers[slice(*spans_of[at])], trained=True)) for at in range(schedule.positions)]
        tied = 0.0 if schedule.vocabulary else sum(layer.trained.tied for layer in layers)
        amounts["end_sums"] = tuple(4 * count for count in copies_in_sums(schedule, counts, tied))
    standing = {name: [0.0] * schedule.stages for name in (PARAMS, GRADS, "optimizer", "gathered", "buffers")}
    for stages in schedule.stages_of:
        held = [layers[at] for stage in stages for at in range(*spans[stage])]
        replicas = layout.dp * layout.cp, layout.expert_replicas
        groups = list(zip(parameters_of(held), parameters_of(held, trained=True), replicas, strict=True))
        largest = max((sum(layer.parameters) for layer in held), default=0.0)
        buffers = placeholders(held, runtime.element) if runtime.gradient_placeholders else 0.0
        state = *state_bytes(groups, largest, layout, runtime), buffers
        for values, amount in zip(standing.values(), state, strict=True):
            values[stages[0]] = amount
    return amounts | {name: tuple(values) for name, values in standing.items()}


def state_bytes(
    groups: Sequence[tuple[float, float, int]], largest: float, layout: PlannedLayout, runtime: Runtime
) -> tuple[float, float, float, float]:
    """Bytes of (weights, gradients, optimizer state, gathered copies).

    Mixed precision: bf16 weights, gradients in fp32 or wider, or in bf16, and for AdamW an fp32 copy of weights and two moments
    (2 + 4 + 12 bytes a parameter), each divided by the replicas from its ZeRO level on (arXiv 1910.02054). `fully_shard` keeps no
    bf16 copy but the gathered one: 4 + 4 + 8.

    Args:
        groups: (parameters, those of them that are trained, ranks that hold the same ones) of what every rank of an ep group
            holds, and of the experts.
        largest: parameters of the largest layer, which is gathered whole.
    """
    element = runtime.element
    whole = trained = shard = trained_shard = 0.0
    for count, learned, ranks in groups:
        whole, trained = whole + count, trained + learned
        shard, trained_shard = shard + count / ranks, trained_shard + learned / ranks
    if runtime.sharded:
        # Two layers gathered at once (one computes, one is on its way), and a layer's gradient before its reduction; a pipeline's
        # stages stay gathered, and accumulate whole gradients over their micro-batches.
        two = 2 * element * largest + (element + 4) * largest
        gathered = element * whole + 4 * whole if layout.pp > 1 else two
        return 4 * shard, 4 * trained_shard, 8 * trained_shard, gathered
    zero = layout.zero
    wide = GRAD_BYTES[layout.grads]
    gathered = (2 * element * largest if zero == 3 else 0.0) + (4 * largest if zero >= 2 else 0.0)
    return (
        element * (shard if zero == 3 else whole),
        max(wide, element) * (trained_shard if zero >= 2 else trained),
        runtime.optimizer * (trained_shard if zero >= 1 else trained),
        gathered,
    )
