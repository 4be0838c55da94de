"""The run that a configuration describes, predicted: bytes of each rank under its own schedule, and seconds of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from pipeloom.config import Config, Layout
from pipeloom.config.standing_bytes import element_bytes, spans, summed_over_ranks, summed_over_slices, with_embedding
from pipeloom.config.volume import boundary_bytes
from pipeloom.errors import UsageError
from pipeloom.plan.layout import PlannedLayout, problems
from pipeloom.plan.measured import MeasuredLayers
from pipeloom.plan.memory import OfRanks, RankMemory, StageMemory, at_peaks, stage_memory, state_bytes
from pipeloom.plan.messages import MessageBytes, message_bytes
from pipeloom.plan.predict import Planner
from pipeloom.plan.time import AxisRates, Device, StepTime, busy_parts
from pipeloom.schedule import Timeline, simulate
from pipeloom.schedule.actions import HIDDEN, KEPT, PENDING, SAVED, SCORES, equal_part
from pipeloom.schedule.costs import DEVICE
from pipeloom.schedule.model import parts
from pipeloom.shapes.ops import LOGITS, RUNTIMES, LayerOps, Runtime, parameters_of

# Part of our blocks and output layer -> the tensors that its R makes.
_OF_PARTS = {
    "norms": (
        *("input_unit", "input_scale", "norm_1", "middle_unit", "middle_scale", "norm_2", "query_norm", "last_norm"),
        *("queries_unit", "queries_scale", "keys_unit", "keys_scale"),
    ),
    "attention": (
        *("query", "key", "value", "heads", "statistics", "probabilities", "mixed", "query_norm", "positions", "mask"),
        *(f"{name}{of}" for name in ("queries", "keys") for of in ("", "_wide", "_unit", "_scale")),
    ),
    "activation": ("silu", "gated", "expert_silu", "expert_gated", "shared_gated"),
    "mlp": (
        *("inner", "silu", "gated", "expert_inner", "expert_silu", "expert_gated", "expert_outputs"),
        *("shared_inner", "shared_gated"),
    ),
}
# Part -> the tensor of another part that is its argument, and held where both are recomputed.
_ARGUMENTS = {"attention": "norm_1", "mlp": "norm_2"}
_STANDING = ("params", "grads", "optimizer", "shards", "grad_shards", "messages", "temporaries")


@dataclass(frozen=True)
class RunPrediction(OfRanks):
    """Predicted costs of a run.

    Attributes:
        ranks: pipeline rank -> its memory on one device.
        timeline: the schedule, simulated; in seconds with a device.
        step: seconds; None without a device.
    """

    planner: Planner
    layout: PlannedLayout
    ranks: tuple[RankMemory, ...]
    timeline: Timeline
    step: StepTime | None


def runtime_of(config: Config, device: Device | None) -> Runtime:
    """Pipeloom's runtime in the configuration's dtype and with its optimizer; without a device, on a CPU."""
    unsharded = config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"zero1": False})})
    sizes = element_bytes(unsharded)
    runtime = replace(RUNTIMES["pipeloom"], element=int(sizes["params"]), optimizer=sizes["optimizer"])
    return runtime if device is not None else runtime.on_cpu()


def has_sums(layout: Layout) -> bool:
    """Return whether gradients have buffers: those that other ranks sum too, their shares, and fp32 sums of bf16 gradients."""
    config = layout.config
    return layout.mesh.world > layout.mesh.pp or config.optimizer.zero1 or element_bytes(config)["params"] < 4


def layout_of(layout: Layout) -> PlannedLayout:
    """The layout as the planner has it. Its schedule is named, and need not be a family."""
    config, mesh = layout.config, layout.mesh
    recompute = config.train.recompute
    return PlannedLayout(
        mesh.dp, mesh.tp, mesh.cp, mesh.pp, mesh.ep,
        v=layout.schedule.chunks,
        m=layout.schedule.microbatches,
        micro_batch=max(layout.microbatch_sizes),
        seq=config.train.seq_len,
        zero=config.parallel.zero or int(config.optimizer.zero1),
        recompute=recompute if isinstance(recompute, str) else "none",
        schedule=layout.schedule.name,
        capacity=config.model.capacity_factor,
        slices=layout.schedule.slices,
        vocabulary="pp" if layout.schedule.vocabulary else "last",
        stages=layout.stage_layers,
    )  # fmt: skip


def predicted(
    layout: Layout, device: Device | None = None, measured_layers: MeasuredLayers | None = None
) -> RunPrediction:
    """Predict the run, on `device`; None: on a CPU, whose speed is not known, so that times are proportional to FLOPs, unless
    the layers were measured.

    Raises UsageError for a model that cannot be planned, or that its axes do not divide.
    """
    planned, shape = layout_of(layout), layout.config.model.shape()
    if reasons := problems(shape, planned):
        raise UsageError("; ".join(reasons))
    speed = device or Device("cpu", 1.0, 0.0, 1e30, 1e30, 1e30, layout.world_size, 1.0)
    runtime = replace(
        runtime_of(layout.config, device),
        sequence=layout.config.parallel.sp,
        packed=layout.config.data.documents == "pack",
        sums_inside=layout.schedule.splits_backward or has_sums(layout),
    )
    planner = Planner(shape, speed, runtime, measured_layers)
    layers = planner.layers(replace(planned, recompute="none"))
    links = AxisRates.of(planned, speed, shape)
    timed = planner.timed_layers(replace(planned, recompute="none"))
    of_stage = spans(layout.schedule, layout.stage_layers)
    groups = [layers[start:end] for start, end in of_stage]
    times = [planner.stage_seconds(timed[start:end], planned, links) for start, end in of_stage]
    run = planner.costs(times, planned, links, layout.schedule)
    sizes, activations = _bytes(layout, planned, groups, planner.runtime)
    if layout.cuts is not None:  # a weight's gradient is as large beside a slice's tensors
        pieces = [timed[start:end] for start, end in of_stage]
        sliced = [_activations(layout, stage, layers) for stage, layers in enumerate(pieces)]
        activations = [
            replace(each, extra=planned.slices * piece.extra, extra_input=planned.slices * piece.extra_input)
            for each, piece in zip(activations, sliced, strict=True)
        ]
    run = replace(run, bytes=sizes)
    if layout.cuts is not None:  # which may be even in tokens instead
        run = layout.cuts.costs(run)
    rows = layout.microbatch_sizes
    if len(set(rows)) > 1:
        run = replace(run, microbatch=tuple(each / max(rows) for each in rows))
    if device is None and measured_layers is None:
        run = replace(run, p2p=0.0, broadcast=0.0, combine=0.0)
    timeline = with_temporaries(layout, simulate(layout.schedule, run), activations)
    step = None
    if device is not None:
        state = [
            planner.state_seconds(*parameters_of([layer for at in mine for layer in groups[at]]), planned, links)
            for mine in layout.schedule.stages_of
        ]
        busy = sum(timeline.busy) / planned.pp
        spent = busy_parts(busy, times, sum(rows) / max(rows), planned.pp, layout.schedule.has_pairs)
        step = StepTime(*spent, max(0.0, timeline.makespan - busy), *max(state))
    return RunPrediction(planner, planned, tuple(_ranks(layout, planner.runtime, timeline)), timeline, step)


def _bytes(
    layout: Layout, planned: PlannedLayout, groups: Sequence[Sequence[LayerOps]], runtime: Runtime
) -> tuple[dict[str, tuple[float, ...]], list[StageMemory]]:
    """`Costs.bytes` of the stages: of a micro-batch, and what stands for the whole step, at the first stage of its rank; and the
    same of a micro-batch with the temporaries, which are left out."""
    schedule = layout.schedule
    replicas = planned.dp * planned.cp
    activations = [_activations(layout, stage, layers) for stage, layers in enumerate(groups)]
    ties = with_embedding(schedule)
    values = []
    for stage, memory in enumerate(activations):
        counts = parameters_of(groups[stage], has_embedding=stage in ties)
        held = list(zip(counts, (replicas, planned.expert_replicas), strict=True))
        trained = [(_adapters(layout, groups[stage]), replicas)] if layout.config.lora.r else held
        frozen = [*held, *trained] if layout.config.lora.r else held
        weights, whole = (state_bytes(frozen, 0.0, each, runtime)[0] for each in (planned, replace(planned, zero=0)))
        _, gradients, optimizer, _ = state_bytes(trained, 0.0, planned, runtime)
        summed = state_bytes(trained, 0.0, replace(planned, zero=0), runtime)[1]
        shards = {"shards": weights} if planned.zero == 3 else {}
        shards |= {"grad_shards": gradients} if planned.zero >= 2 else {}
        state = {"params": whole, "grads": summed, "optimizer": optimizer} | shards
        moving = {KEPT: memory.kept, SAVED: memory.saved, PENDING: memory.pending, "layer": memory.layer}
        if schedule.vocabulary:
            moving |= {HIDDEN: memory.hidden, SCORES: memory.scores}
        values.append(moving | state)
    sizes = {name: [value[name] for value in values] for name in values[0]}
    for name in schedule.remade_parts:
        sizes[f"{SAVED}:{name}"] = [_freed(layers, name.split("+")) for layers in groups]
    return {name: tuple(each) for name, each in sizes.items()}, activations


def _freed(layers: Sequence[LayerOps], names: Sequence[str]) -> float:
    """Return the bytes that a stage saves and does not hold where these parts of its layers, named or equal, are recomputed."""
    again = [any(at in equal_part(name, len(layers)) for name in names) for at in range(len(layers))]
    freed, behind = 0.0, False  # a layer that is recomputed, and whose output is not held for the next one
    for layer, mark in zip(layers, again, strict=True):
        parts = [name for name in names if name in _OF_PARTS]
        outputs = {tensor for name in parts for tensor in _OF_PARTS[name]} - {_ARGUMENTS.get(name) for name in parts}
        outputs = {*layer.tensors} - {LOGITS, "input"} if mark else outputs
        outputs |= {"input"} if behind and not mark else set()
        freed += sum(layer.tensors.get(name, 0.0) for name in outputs)
        behind = mark
    return freed


def with_temporaries(layout: Layout, timeline: Timeline, stages: Sequence[StageMemory]) -> Timeline:
    """Return the timeline with what is there at each rank's peak besides its bytes: temporaries, messages, gradients."""
    sizes = timeline.costs.bytes_in(DEVICE, layout.schedule.stages)
    shares = layout.cuts.sizes if layout.cuts is not None else ()
    there = at_peaks(
        timeline,
        stages,
        sizes["grads"],
        layout_messages(layout),
        shares,
        from_first=not has_sums(layout),
        at_end=summed_over_ranks(layout),
    )
    return replace(timeline, costs=replace(timeline.costs, bytes=sizes | there))


def layout_messages(layout: Layout, device: str = "") -> list[MessageBytes]:
    """Return each rank's bytes of messages.

    Args:
        device: type of the stages' device; default: as configured.
    """
    section, sizes = layout.config.schedule, boundary_bytes(layout)
    shares = layout.cuts.sizes if layout.cuts is not None else (1.0,)
    return message_bytes(
        layout.schedule,
        lambda message: sizes[message.microbatch] * shares[message.slice or 0],
        depth=section.receive_depth or 2,
        ahead=section.overlap_p2p is not False,
        shared=(device or layout.config.train.device) == "cpu" and section.transport in ("auto", "shared"),
    )


def _activations(layout: Layout, stage: int, layers: Sequence[LayerOps]) -> StageMemory:
    """Bytes of a micro-batch on a stage, or on a rank's share of the vocabulary."""
    if stage in layout.schedule.vocabulary:
        return stage_memory(layers)
    return _stage_memory(layout, stage, layers)


def _stage_memory(layout: Layout, stage: int, layers: Sequence[LayerOps]) -> StageMemory:
    """Bytes of a micro-batch on a stage, of which blocks (R;B) may recompute the layers one by one in the backward."""
    schedule, start = layout.schedule, spans(layout.schedule, layout.stage_layers)[stage][0]
    if not layers:
        return StageMemory(0.0, 0.0, 0.0)
    cells = (action for program in schedule.programs for cell in program for action in parts(cell))
    kinds = {action.kind for action in cells if action.stage == stage}
    blocks = not kinds.isdisjoint(("RB", "RI"))
    marks = [blocks and mark for mark in _recomputed(layout)[start : start + len(layers)]]
    copies = [
        replace(layer, dropped=frozenset(layer.tensors) - {LOGITS}) if mark else layer
        for layer, mark in zip(layers, marks, strict=True)
    ]
    memory = stage_memory(copies)
    inputs = [layer.input * (mark or "input" in layer.tensors) for layer, mark in zip(layers, marks, strict=True)]
    first = stage in {route[0] for route in schedule.routes}  # its inputs are views of the batch
    first = first and not (schedule.spreads_embedding and "R" in kinds)
    held = memory.saved - inputs[0]
    plain = stage_memory(layers)
    rest = max(0.0, plain.saved - layers[0].input * ("input" in layers[0].tensors) - held)  # of those not in blocks
    # While a layer is recomputed, what those behind it held is gone.
    behind = [memory.saved - level for level in accumulate(copy.saved for copy in copies)]
    rises = (copy.rebuilt - rest for copy, rest, mark in zip(copies, behind, marks, strict=True) if mark)
    layer = max(0.0, 0.0, *rises)
    always = layers[0].input * (not first) + held * blocks
    if schedule.slices > 1:  # for later slices
        always += sum(
            _keys_and_values(layer) for layer, mark in zip(layers, marks, strict=True) if mark or "R" in kinds
        )
    mixed = not kinds.isdisjoint("BI")
    return StageMemory(
        rest if blocks else held,
        memory.pending,
        max(0.0, memory.extra - layer, plain.extra * mixed),
        always,
        layer,
        extra_input=max(0.0, memory.extra_input - layer, plain.extra_input * mixed),
        summed=summed_over_slices(layout, stage, sum(_keys_and_values(layer) for layer in layers)),
    )


def _adapters(layout: Layout, layers: Sequence[LayerOps]) -> float:
    """Return about as many parameters as adapters of every product in the blocks have, of which one side is the hidden state.

    What reads one input is one product here, such as q, k and v: an input's factor for each of them is left out.
    """
    rank, hidden = layout.config.lora.r, layout.config.model.hidden_size
    products = [op for layer in layers if layer.kind in "tm" for op in layer.ops if op.deferred]
    return sum(rank * (hidden + size / hidden) * count for op in products for size, count in op.weights)


def _keys_and_values(layer: LayerOps) -> float:
    return layer.tensors.get("key", 0.0) + layer.tensors.get("value", 0.0)


def _recomputed(layout: Layout) -> list[bool]:
    """Layer -> whether blocks (R;B) recompute it."""
    setting, count = layout.config.train.recompute, sum(layout.stage_layers)
    if setting == "none":  # then a transform asked for the blocks, of whole stages
        return [True] * count
    numbers = range(count - 2) if isinstance(setting, str) else setting
    return [at - 1 in numbers for at in range(count)]


def _ranks(layout: Layout, runtime: Runtime, timeline: Timeline) -> list[RankMemory]:
    sizes, schedule = timeline.costs.bytes_in(DEVICE, layout.schedule.stages), layout.schedule
    rows = []
    for most, mine in zip(timeline.peak_bytes[DEVICE], schedule.stages_of, strict=True):
        held = {name: sum(sizes[name][stage] for stage in mine) if name in sizes else 0.0 for name in _STANDING}
        gathered = "shards" in sizes
        parameters = held["shards"] if gathered else held["params"]
        gradients = held["grad_shards"] if "grad_shards" in sizes else held["grads"]
        standing = parameters + gradients + held["optimizer"] + held["messages"] + held["temporaries"]
        moving = most - standing
        rows.append(
            RankMemory(
                parameters=parameters,
                gradients=gradients,
                optimizer=held["optimizer"],
                gathered=0.0,
                buffers=runtime.workspace + held["messages"],
                activations=moving,
                temporaries=held["temporaries"],
                reserve=runtime.margin * (moving + held["temporaries"]),
                overhead=runtime.overhead,
                peak_action="",
            )
        )
    return rows
