"""Memory of each rank: what stands for the whole run, and the peak along the rank's own program."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, fields

from pipeloom.config.standing_bytes import copies_in_sums
from pipeloom.plan.layout import PlannedLayout
from pipeloom.plan.messages import MessageBytes
from pipeloom.schedule import Schedule, Timeline
from pipeloom.schedule.actions import (
    HIDDEN,
    INPUT_GRADIENT,
    PENDING,
    SAVED,
    SCORES,
    WEIGHT_GRADIENT,
    Cell,
    Kind,
    kind_of,
)
from pipeloom.schedule.costs import DEVICE
from pipeloom.schedule.model import made_by, parts
from pipeloom.shapes.ops import LayerOps, Runtime, parameters_of, placeholders

_FOR_BACKWARD = {SAVED, SCORES}  # what a forward leaves for its backward


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


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one micro-batch on one stage: held from F, still held between I and W, and above that at the peak of a B.

    Attributes:
        kept: held from F whether the stage is recomputed or not, besides `saved`.
        layer: of the layer that a block (R;B) recomputes, while it runs; `extra` is above this.
        extra_input: as `extra`, of an I.
        hidden, scores: of a share of the output layer, from the broadcast and from S to T.
        summed: of the gradients of all slices' keys and values; a slice's backward adds to those of the slices before it.
    """

    saved: float
    pending: float
    extra: float
    kept: float = 0.0
    layer: float = 0.0
    extra_input: float = 0.0
    summed: float = 0.0
    hidden: float = 0.0
    scores: float = 0.0


def stage_memory(layers: Sequence[LayerOps]) -> StageMemory:
    """Sum the layers of a stage; a backward runs from the last to the first and frees what it used."""
    if layers and layers[0].kind == "S":
        (share,) = layers
        tensors = share.tensors
        return StageMemory(0.0, 0.0, share.backward_peak, hidden=tensors[HIDDEN], scores=tensors[SCORES])
    freed = pending = extra = extra_input = 0.0
    for layer in reversed(layers):
        extra = max(extra, layer.backward_peak - freed)
        extra_input = max(extra_input, layer.input_peak - freed + pending)
        freed, pending = freed + layer.saved, pending + layer.pending
    return StageMemory(freed, pending, extra, extra_input=extra_input)


def _extra(stage: StageMemory, kind: Kind) -> float:
    """Bytes of a whole micro-batch that an action needs above what it starts with, the values that it makes included."""
    if not kind.is_backward or _FOR_BACKWARD.isdisjoint(kind.frees):
        return 0.0
    return stage.extra_input if PENDING in kind.makes else stage.extra


def peak(
    schedule: Schedule, rank: int, stages: Sequence[StageMemory], slices: Sequence[float] = ()
) -> tuple[float, float, str]:
    """(saved tensors, temporaries, action) at the rank's peak, which depends on the order of its program alone.

    Args:
        slices: each slice's share of a micro-batch; empty: sequences are whole.
    """
    held, best = 0.0, (0.0, 0.0, "-")
    alike = not (schedule.remade or schedule.parted)  # micro-batches do what the others do
    known: dict[object, tuple[float, float, float]] = {}
    for cell in schedule.programs[rank]:
        key = tuple((each.kind, each.stage, each.slice) for each in parts(cell)) if alike else cell
        if key not in known:
            known[key] = _effects(schedule, cell, stages, slices)
        claimed, change, extra = known[key]
        if held + claimed + extra > best[0] + best[1]:
            best = (held + claimed, extra, str(cell).removesuffix("OVERLAP_F_B"))
        held += change
    return best


def _effects(
    schedule: Schedule, cell: Cell, stages: Sequence[StageMemory], slices: Sequence[float]
) -> tuple[float, float, float]:
    """(what a cell makes, how much more there is behind it, what it needs besides), in bytes."""
    claimed = change = extra = 0.0
    for action in parts(cell):
        stage, kind, values = stages[action.stage], kind_of(action.kind), made_by(schedule, action)
        share = slices[action.slice or 0] if slices else 1.0
        sizes = {SAVED: stage.saved, HIDDEN: stage.hidden, SCORES: stage.scores}
        claimed += share * sum(sizes.get(name, 0.0) for name in values)
        for name, size in (*sizes.items(), (PENDING, stage.pending)):
            change += share * size * ((name in values) - (name in kind.frees))
        extra = max(extra, share * _extra(stage, kind))
    return claimed, change, extra


def at_peaks(
    timeline: Timeline,
    stages: Sequence[StageMemory],
    gradients: Sequence[float],
    messages: Sequence[MessageBytes],
    slices: Sequence[float] = (),
    *,
    from_first: bool = False,
    at_end: Sequence[float] = (),
) -> dict[str, tuple[float, ...]]:
    """Return what is there at each rank's peak: temporaries and messages, at its first stage, and each stage's gradients.

    Args:
        timeline: with bytes of everything but temporaries and messages.
        gradients: bytes of each stage's.
        messages: each rank's.
        slices: as for `peak`.
        from_first: a stage's gradients exist from its first weight gradient on, and not from the step's start.
        at_end: of each rank besides what is there for the whole step, when its last action has ended.
    """
    schedule, factors = timeline.schedule, timeline.costs.factors(timeline.schedule.microbatches)
    temporaries, moved, present = [0.0] * len(stages), [0.0] * len(stages), list(gradients)
    for rank, mine in enumerate(schedule.stages_of):
        curve, entries = timeline.bytes_curves[DEVICE][rank], messages[rank]
        times, levels = [time for time, _ in curve], [level for _, level in curve]
        absent = {number: gradients[number] * from_first for number in mine}
        summed = most = message = 0.0  # gradients of keys and values; all bytes at the peak, and those of messages
        missing = dict(absent)
        if at_end and at_end[rank]:
            message, missing = entries.buffers, dict.fromkeys(mine, 0.0)
            most = levels[-1] + at_end[rank] + message
        for position, cell in enumerate(schedule.programs[rank]):
            start, end = timeline.starts[rank][position], timeline.ends[rank][position]
            before, extra, added = bisect_right(times, start), 0.0, 0.0
            level = max(levels[max(before - 1, 0) : max(bisect_left(times, end), before)], default=0.0)
            there = dict(absent)
            for action in parts(cell):
                stage, kind, at = stages[action.stage], kind_of(action.kind), action.slice or 0
                factor = factors[action.microbatch]
                share = factor * slices[at] if slices else factor
                extra = max(extra, share * _extra(stage, kind))
                if WEIGHT_GRADIENT in kind.makes:
                    absent.pop(action.stage, None)
                if INPUT_GRADIENT in kind.makes and stage.summed:  # the last slice's adds as what is saved goes
                    is_last = at + 1 == len(slices)
                    added += factor * stage.summed * sum(slices[:at]) if is_last else -share * stage.summed
            sent = entries.buffers - entries.used[position] + entries.sent[position]
            total = level + extra + summed - sum(there.values()) + sent
            summed += added
            if total > most:
                most, message, missing = total, sent, there
        for number in missing:
            present[number] -= missing[number]
        moved[mine[0]], left = message, sum(present[number] for number in mine)
        rise = most - message - max(levels, default=0.0) + sum(missing.values())
        temporaries[mine[0]] = max(0.0, rise)
        for number in mine if rise < 0 and left else ():  # the most is saved at another action
            present[number] *= 1 + rise / left
    return {"temporaries": tuple(temporaries), "messages": tuple(moved), "grads": tuple(present)}


def rank_memory(
    layers: Sequence[LayerOps],
    spans: Sequence[tuple[int, int]],
    layout: PlannedLayout,
    schedule: Schedule,
    runtime: Runtime,
    slices: Sequence[float] = (),
) -> list[RankMemory]:
    """Pipeline rank -> its memory.

    Args:
        slices: as for `peak`.
        layers: [embedding, block, …, output layer], as `layers_of` returns them.
        spans: stage -> (its first layer, the layer behind its last).
    """
    of_stage = [stage_memory([layers[at] for at in range(*span)]) for span in spans]
    replicas = layout.dp * layout.cp
    of_position = {position: span for position, span in zip(schedule.position_of, spans, strict=True)}
    counts = [
        sum(map(sum, (layer.parameters for layer in layers[slice(*of_position[at])])))
        for at in range(schedule.positions)
    ]
    copies = copies_in_sums(schedule, counts, 0.0 if schedule.vocabulary else sum(layer.tied for layer in layers))
    result = []
    for rank, stages in enumerate(schedule.stages_of):
        held = [layers[at] for stage in stages for at in range(*spans[stage])]
        # (parameters, ranks that hold the same ones)
        groups = list(zip(parameters_of(held), (replicas, layout.expert_replicas), strict=True))
        saved, extra, action = peak(schedule, rank, of_stage, slices)
        if runtime.name == "pipeloom" and 4 * copies[rank] > saved + extra:
            saved, extra, action = 0.0, 4 * copies[rank], "the sum of gradients over ranks, behind the last action"
        largest = max((sum(layer.parameters) for layer in held), default=0.0)
        buffers = runtime.workspace + (placeholders(held, runtime.element) if runtime.gradient_placeholders else 0.0)
        moving = saved, extra, runtime.margin * (saved + extra)
        state = state_bytes(groups, largest, layout, runtime)
        result.append(RankMemory(*state, buffers, *moving, runtime.overhead, action))
    return result


def state_bytes(
    groups: Sequence[tuple[float, int]], largest: float, layout: PlannedLayout, runtime: Runtime
) -> tuple[float, float, float, float]:
    """Bytes of (weights, gradients, optimizer state, gathered copies).

    Mixed precision: bf16 weights, fp32 gradients, and for AdamW an fp32 copy of the weights and two moments (2 + 4 + 12 bytes a
    parameter), each divided by the replicas from its ZeRO level on (arXiv 1910.02054). `fully_shard` keeps no bf16 copy but the
    gathered one: 4 + 4 + 8.

    Args:
        groups: (parameters, ranks that hold the same ones) of what every rank of an ep group holds, and of the experts.
        largest: parameters of the largest layer, which is gathered whole.
    """
    element = runtime.element
    whole = sum(count for count, _ in groups)
    shard = sum(count / replicas for count, replicas in groups)
    if runtime.sharded:
        # Two layers gathered at once (one computes, one is on its way), and a layer's gradient before its reduction; a pipeline's
        # stages stay gathered, and accumulate whole gradients over their micro-batches.
        two = 2 * element * largest + (element + 4) * largest
        gathered = element * whole + 4 * whole if layout.pp > 1 else two
        return 4 * shard, 4 * shard, 8 * shard, gathered
    zero = layout.zero
    gathered = (2 * element * largest if zero == 3 else 0.0) + (4 * largest if zero >= 2 else 0.0)
    return (
        element * (shard if zero == 3 else whole),
        4 * (shard if zero >= 2 else whole),
        runtime.optimizer * (shard if zero >= 1 else whole),
        gathered,
    )
