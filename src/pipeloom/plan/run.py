"""The run that a configuration describes, predicted: bytes of each rank under its own schedule, and seconds of a step."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pipeloom.config import Config, Layout
from pipeloom.config.layout import stage_sizes
from pipeloom.config.sections import PARTS_OF_BLOCKS
from pipeloom.errors import UsageError
from pipeloom.plan.export import recomputed_blocks
from pipeloom.plan.layout import PlannedLayout, problems
from pipeloom.plan.measured import MeasuredLayers
from pipeloom.plan.memory import OfRanks, RankMemory, has_sums, ranks_of, run_bytes, with_embedding
from pipeloom.plan.messages import MessageBytes, message_bytes
from pipeloom.plan.predict import Planner
from pipeloom.plan.time import AxisRates, Device, StepTime, busy_parts
from pipeloom.plan.time import device as load_device
from pipeloom.schedule import Timeline, simulate
from pipeloom.schedule.files import names_a_file
from pipeloom.shapes.cut import spans
from pipeloom.shapes.mesh import uneven_parts
from pipeloom.shapes.ops import RUNTIMES, Adapters, Runtime

# Bytes of fp32 state per element, besides its value: two moments, or one. For Muon an upper bound: its matrices have one.
_STATE_BYTES = {"adamw": 8, "sgd": 4, "muon": 8}


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


def adapters_of(config: Config) -> Adapters | None:
    """The configuration's adapters, by their sizes."""
    return Adapters(config.lora.r, config.lora.target_modules) if config.lora.r else None


def runtime_of(config: Config, device: Device | None) -> Runtime:
    """Pipeloom's runtime in the configuration's dtype, with its optimizer and its rows; without a device, on a CPU."""
    unsharded = config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"zero1": False})})
    sizes = element_bytes(unsharded)
    element, optimizer = int(sizes["params"]), sizes["optimizer"]
    runtime = replace(
        RUNTIMES["pipeloom"], element=element, optimizer=optimizer, adapters=adapters_of(config),
        packed=config.data.documents == "pack",
    )  # fmt: skip
    return runtime if device is not None else runtime.on_cpu()


def layout_of(layout: Layout) -> PlannedLayout:
    """The layout as the planner has it. Its schedule is named, and need not be a family.

    It may be a file whose order is planned: without transforms, a second route, slices and a spread output layer.
    """
    config, mesh, schedule = layout.config, layout.mesh, layout.schedule
    others = config.schedule.transforms or len(schedule.routes) > 1 or schedule.slices > 1 or schedule.vocabulary
    order = config.schedule.name if names_a_file(config.schedule.name) and not others else schedule.name
    recompute, stages = config.train.recompute, layout.stage_layers
    counts = range(1, max(stages) + 1) if isinstance(recompute, tuple) else ()
    ahead = config.model.num_nextn_predict_layers
    first = next((count for count in counts if recomputed_blocks(stages, count, ahead) == sorted(recompute)), 0)
    return PlannedLayout(
        mesh.dp, mesh.tp, mesh.cp, mesh.pp, mesh.ep,
        v=schedule.chunks,
        m=schedule.microbatches,
        micro_batch=max(layout.microbatch_sizes),
        seq=config.train.seq_len,
        zero=config.parallel.zero or int(config.optimizer.zero1),
        recompute=recompute if isinstance(recompute, str) else "full" if first else "none",
        recompute_layers=first,
        schedule=order,
        capacity=config.model.capacity_factor,
        slices=schedule.slices,
        vocabulary="pp" if schedule.vocabulary else "last",
        stages=stages,
        ep_chunks=config.parallel.ep_chunks,
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
    speed = device or replace(
        load_device("h100"), name="cpu", flops=1.0, memory=0.0, bandwidth=1e30, link=1e30, pair=1e30, network=1e30,
        per_node=layout.world_size, efficiency=1.0,
    )  # fmt: skip
    runtime = runtime_of(layout.config, device)
    runtime = replace(
        runtime,
        sequence=layout.config.parallel.sp,
        sums_inside=layout.schedule.splits_backward or has_sums(planned, runtime),
    )
    planner = Planner(shape, speed, runtime, measured_layers)
    layers = planner.layers(replace(planned, recompute="none"))
    links = AxisRates.of(planned, speed, shape, layout.config.parallel.ep_nodes)
    timed = planner.timed_layers(replace(planned, recompute="none"))
    of_stage = spans(layout.schedule, layout.stage_layers)
    groups = [layers[start:end] for start, end in of_stage]
    again = [*_recomputed(layout), False]
    if layout.config.train.recompute in ("none", *PARTS_OF_BLOCKS) or measured_layers is not None:
        times = [planner.stage_seconds(timed[start:end], planned, links) for start, end in of_stage]
    else:  # what blocks recompute is a part of their B or I
        full = planner.timed_layers(replace(planned, recompute="full", recompute_layers=0))
        mixed = [redone if mark else layer for layer, redone, mark in zip(timed, full, again, strict=False)]
        stages = [planner.stage_seconds(mixed[start:end], planned, links) for start, end in of_stage]
        times = [replace(each, recompute=0.0) for each in stages]
    run = planner.costs(times, planned, links, layout.schedule)
    if (part := planned.recompute) in PARTS_OF_BLOCKS and measured_layers is None:
        with_part = planner.timed_layers(planned)  # whose input gradients make it again
        plain, times = times, [planner.stage_seconds(with_part[start:end], planned, links) for start, end in of_stage]
        seconds = tuple(each.input_grad - without.input_grad for each, without in zip(times, plain, strict=True))
        run = replace(run, parts={part: seconds})
    run = replace(run, bytes=run_bytes(layout.schedule, of_stage, planned, layers, timed, again, planner.runtime))
    if layout.cuts is not None:  # which may be even in tokens instead
        run = layout.cuts.costs(run)
    rows = layout.microbatch_sizes
    if len(set(rows)) > 1:
        run = replace(run, microbatch=tuple(each / max(rows) for each in rows))
    if device is not None:
        run = replace(run, host_bandwidth=device.host_link)
    elif measured_layers is None:
        run = replace(run, p2p=0.0, broadcast=0.0, combine=0.0)
    timeline = with_messages(layout, simulate(layout.schedule, run))
    step = None
    if device is not None:
        state = planner.state_in_step(timeline, groups, planned, links)
        busy = sum(timeline.busy) / planned.pp
        spent = busy_parts(busy, times, sum(rows) / max(rows), planned.pp, layout.schedule.has_pairs)
        step = StepTime(*spent, max(0.0, timeline.makespan - busy), *state, device.host)
    return RunPrediction(planner, planned, tuple(ranks_of(timeline, planner.runtime)), timeline, step)


def with_messages(layout: Layout, timeline: Timeline) -> Timeline:
    """Return the timeline with the bytes of messages."""
    return replace(timeline, messages=tuple(each.beside for each in layout_messages(layout)))


def boundary_bytes(layout: Layout) -> tuple[int, ...]:
    """micro-batch -> bytes of the message that one worker sends for it from stage to stage."""
    config, mesh = layout.config, layout.mesh
    token = config.model.hidden_size * int(element_bytes(config)["params"])
    tokens = config.train.seq_len // (mesh.cp * (mesh.tp if config.parallel.sp else 1))
    return tuple(size * tokens * token for size in layout.microbatch_sizes)


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
        depth=2,  # as RuntimeOptions, where the schedule needs no more
        ahead=section.overlap_p2p is not False,
        shared=(device or layout.config.train.device) == "cpu" and section.transport in ("auto", "shared"),
    )


def _recomputed(layout: Layout) -> list[bool]:
    """Layer -> whether blocks (R;B) recompute it."""
    setting, count = layout.config.train.recompute, sum(layout.stage_layers)
    if setting == "none":  # then a transform asked for the blocks, of whole stages
        return [True] * count
    numbers = range(count - 2) if isinstance(setting, str) else setting
    return [at - 1 in numbers for at in range(count)]


def stage_parameters(layout: Layout) -> list[int]:
    """Return stage -> parameters of its layers, before tensor or expert parallelism divides them.

    A tied output layer has none on a rank that holds the embedding.
    """
    sizes = [size.parameters for size in stage_sizes(layout.config)]
    counts = [sum(sizes[start:end]) for start, end in spans(layout.schedule, layout.stage_layers)]
    model, shares = layout.config.model, layout.schedule.vocabulary
    if shares:
        width = model.hidden_size * (1 if model.tie_word_embeddings else 2)
        counts[shares.start :] = [rows * width for rows in uneven_parts(model.vocab_size, len(shares))]
    for stage in with_embedding(layout.schedule) if model.tie_word_embeddings and not shares else ():
        counts[stage] -= model.vocab_size * model.hidden_size
    return counts


def rank_parameters(layout: Layout) -> list[int]:
    """Return rank -> parameters of all stages of that pipeline rank, before tensor or expert parallelism divides them."""
    counts = stage_parameters(layout)
    return [sum(counts[stage] for stage in stages) for stages in layout.schedule.stages_of]


def element_bytes(config: Config) -> dict[str, float]:
    """Return the bytes of one parameter: "params", "grads" and "optimizer", whose state ZeRO-1 divides by the replicas.

    Gradients of bf16 parameters are accumulated in fp32.
    """
    size = {"float64": 8, "bfloat16": 2}.get(config.train.dtype, 4)
    wide = max(size, 4)
    state: float = _STATE_BYTES[config.optimizer.name] * wide // 4 + (wide if size < 4 else 0)
    replicas = config.parallel.dp * config.parallel.cp if config.optimizer.zero1 else 1
    return {"params": size, "grads": wide, "optimizer": state / replicas}
