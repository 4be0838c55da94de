"""Memory of each rank: what stands for the whole run, and what micro-batches hold at the peak of its timeline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

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
        buffers: messages, placeholders of weight gradients and the libraries' workspace.
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
        whole = held[PARAMS] * ("shards" in held) + held[GRADS] * ("grad_shards" in held)
        optimizer, gathered, buffers = held["optimizer"], held["gathered"] + whole, held["buffers"] + held[MESSAGES]
        extra = held[TEMPORARIES]
        moving = peak.total - parameters - gradients - optimizer - gathered - buffers - extra
        at_end = peak.at == len(program)
        action = "the sum of gradients over ranks, behind the last action" if at_end else program[peak.at].words
        rows.append(
            RankMemory(
                *(parameters, gradients, optimizer, gathered, workspace + buffers, moving, extra),
                margin * (moving + extra + whole),
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
        amounts["end_sums"] = end_sums(schedule, [layers[slice(*span)] for span in spans], runtime)
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


def run_bytes(
    schedule: Schedule,
    of_stage: Sequence[tuple[int, int]],
    layout: PlannedLayout,
    layers: Sequence[LayerOps],
    timed: Sequence[LayerOps],
    again: Sequence[bool],
    runtime: Runtime,
    parts: bool = True,
) -> dict[str, tuple[float, ...]]:
    """Return `Costs.bytes` of the stages of our trainer: of a micro-batch, and what stands for the whole step.

    Args:
        schedule: with the blocks (R;B) and the actions of whole stages that the trainer adds.
        of_stage: as `spans` of `planned_bytes`.
        layers, timed: of a micro-batch, and of a mean slice, none of them recomputed.
        again: layer -> whether blocks recompute it.
        parts: with the bytes of each part that R may make.
    """
    slices, pairs = layout.slices, list(zip(layers, again, strict=False))
    distinct = {(id(layer), mark): (layer, mark) for layer, mark in pairs}
    sizes = {
        key: LayerBytes.of_ops(layer, again=mark, parts=parts, slices=slices) for key, (layer, mark) in distinct.items()
    }
    each = [sizes[id(layer), mark] for layer, mark in pairs]
    if slices > 1:  # a weight's gradient is as large beside a slice's tensors
        each = [
            replace(whole, backward=slices * piece.backward_peak, split=slices * piece.input_peak)
            for whole, piece in zip(each, timed, strict=True)
        ]
    groups = [layers[slice(*span)] for span in of_stage]
    return bytes_with([each[slice(*span)] for span in of_stage], schedule, layout, groups, runtime)


def bytes_with(
    sizes: Sequence[Sequence[LayerBytes]],
    schedule: Schedule,
    layout: PlannedLayout,
    groups: Sequence[Sequence[LayerOps]],
    runtime: Runtime,
    adapters: Sequence[float] = (),
) -> dict[str, tuple[float, ...]]:
    """Return `Costs.bytes` of the stages of our trainer.

    Args:
        sizes: stage -> the bytes of its layers, of their operations or measured.
        groups, adapters: as of `standing_bytes`; sums of adapters' gradients are small, and left out.
    """
    widening = max(GRAD_BYTES[layout.grads], runtime.element) / runtime.element  # of summed gradients
    amounts = standing_bytes(schedule, layout, groups, runtime, adapters) | stage_bytes(schedule, sizes, widening)
    return amounts if adapters else amounts | {"end_sums": end_sums(schedule, groups, runtime)}


def end_sums(schedule: Schedule, groups: Sequence[Sequence[LayerOps]], runtime: Runtime) -> tuple[float, ...]:
    """Return `copies_in_sums` of stages with these layers, in bytes."""
    of_position = dict(zip(schedule.position_of, groups, strict=True))
    route = [of_position[at] for at in range(schedule.positions)]
    counts = [sum(parameters_of(group, trained=True)) for group in route]
    tied = 0.0 if schedule.vocabulary else sum(layer.trained.tied for group in route for layer in group)
    return tuple(max(4, runtime.element) * count for count in copies_in_sums(schedule, counts, tied))


def has_sums(layout: PlannedLayout, runtime: Runtime) -> bool:
    """Return whether gradients have buffers: those that other ranks sum too, their shares, and fp32 sums of bf16 gradients."""
    return layout.world > layout.pp or layout.zero > 0 or runtime.element < 4


def standing_bytes(
    schedule: Schedule,
    layout: PlannedLayout,
    groups: Sequence[Sequence[LayerOps]],
    runtime: Runtime,
    adapters: Sequence[float] = (),
) -> dict[str, tuple[float, ...]]:
    """Return `Costs.bytes` of what stands for the whole step, and of whole copies of what ranks divide.

    Args:
        groups: stage -> its layers.
        adapters: stage -> parameters of its adapters, where the layers are without; empty: the layers have theirs.
    """
    replicas, ties, values = layout.dp * layout.cp, with_embedding(schedule), []
    for stage, group in enumerate(groups):
        counts, trained = (parameters_of(group, has_embedding=stage in ties, trained=each) for each in (False, True))
        if adapters:
            counts, trained = (counts[0] + adapters[stage], counts[1]), (adapters[stage], 0.0)
        held = list(zip(counts, trained, (replicas, layout.expert_replicas), strict=True))
        weights, gradients, optimizer, _ = state_bytes(held, 0.0, layout, runtime)
        whole, summed, *_ = state_bytes(held, 0.0, replace(layout, zero=0), runtime)
        shards = {"shards": weights} if layout.zero == 3 else {}
        shards |= {"grad_shards": gradients} if layout.zero >= 2 else {}
        # Gradients without buffers do not exist before the step.
        name = GRADS if has_sums(layout, runtime) else "new_grads"
        values.append({PARAMS: whole, name: summed, "optimizer": optimizer} | shards)
    return {name: tuple(value[name] for value in values) for name in values[0]}


def with_embedding(schedule: Schedule) -> list[int]:
    """Return the stages with the output layer on ranks that hold the embedding too."""
    routes = schedule.routes
    return [
        last
        for *_, last in routes
        if any(first in schedule.stages_of[schedule.placement[last]] for first, *_ in routes)
    ]


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
        largest: parameters of the largest layer, which is gathered whole; our trainer gathers stages, two at a time.
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
    weights, summed = 2 * largest, largest
    if runtime.name == "pipeloom":
        # Gradients stay whole until the stage's next sum over the replicas: with ZeRO-3 that behind its last micro-batch.
        weights, summed = whole * min(1.0, 2 / layout.v), trained / layout.v
        summed = trained if zero == 3 and layout.m >= 3 * layout.pp else summed
    gathered = (element * weights if zero == 3 else 0.0) + (4 * summed if zero >= 2 else 0.0)
    return (
        element * (shard if zero == 3 else whole),
        max(wide, element) * (trained_shard if zero >= 2 else trained),
        runtime.optimizer * (trained_shard if zero >= 1 else trained),
        gathered,
    )
