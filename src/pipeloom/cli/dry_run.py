"""`pipeloom train --dry-run`: a report on a run without starting its workers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from pipeloom.config import Config, Layout
from pipeloom.config.layout import STAGE_WORDS, flop_costs, stage_words
from pipeloom.config.rates import learning_rate
from pipeloom.draw.figures import in_columns
from pipeloom.errors import UsageError
from pipeloom.plan import OFFERED, Device, PlanRequest
from pipeloom.plan.export import train_flags
from pipeloom.plan.report import memory_lines, step_words
from pipeloom.plan.run import RunPrediction, predicted, rank_parameters
from pipeloom.plan.search import closest, limits_of_source
from pipeloom.schedule import Timeline, simulate
from pipeloom.schedule.channels import size_words
from pipeloom.shapes.hub import content_of
from pipeloom.shapes.mesh import MeshShape

_ROWS, _COLUMNS = 16, 10  # largest size of the table of workers that fits on a screen


def report(layout: Layout, device: Device | None, memory: float | None, *, complete: bool) -> tuple[list[str], str]:
    """Return lines on the contents of each rank, predicted bytes and time, learning rates and output folders; and a sentence on
    the missing memory, "" where it is enough.

    Args:
        device: what the run is predicted for; None: a CPU, whose speed is not known.
        memory: bytes that a device may use.
        complete: whether the trainer's packages are installed, and the table of a step's observers can be printed.
    """
    config, timeline = layout.config, expected_timeline(layout)
    prediction: RunPrediction | None = None
    try:
        prediction = predicted(layout, device)
        bytes_lines = memory_lines(prediction.ranks, size_words, "peak", len(prediction.ranks))
    except UsageError as error:
        bytes_lines = [f"bytes at the peak: not predicted: {error}"]
    lines = [
        *rank_table(layout.mesh),
        *_rank_lines(layout, timeline),
        f"bubble rate, Σ idle / (p · makespan): {timeline.bubble_rate:.4f}, simulated with times proportional to each stage's "
        "FLOPs, and free messages",
        *_step_lines(layout, prediction, device),
        *bytes_lines,
        f"learning rate ({config.optimizer.lr_schedule}): "
        + ", ".join(f"step {step + 1} {rate:.3g}" for step, rate in _rates(config, config.train.steps, layout.mesh.dp)),
        *(
            _observer_lines(layout)
            if complete
            else ["files were not checked, and observers are not listed: no torch here"]
        ),
        f"checkpoints: {_checkpoints(config)}; log: a new folder in {config.log.dir}",
        f"dry run: {layout.world_size} worker{'s' * (layout.world_size > 1)} would start",
    ]
    limit = memory if memory is not None or device is None else device.memory
    if prediction is not None and limit is not None and prediction.peak > limit:
        return lines, _missing(layout, prediction, limit)
    return lines, ""


def _step_lines(layout: Layout, prediction: RunPrediction | None, device: Device | None) -> list[str]:
    if prediction is None or prediction.step is None or device is None:
        return []
    tokens = prediction.layout.sequences * prediction.layout.seq / prediction.step.total / layout.world_size
    return [step_words(prediction.step, tokens, device.name)]


def _missing(layout: Layout, prediction: RunPrediction, limit: float) -> str:
    """Return the missing bytes, and the flags of the closest layout that fits."""
    needed, more = size_words(prediction.peak), size_words(prediction.peak - limit)
    short = f"rank {prediction.worst} needs {needed}, {more} more than there are"
    planned, train, source = prediction.layout, layout.config.train, layout.config.model.source
    limits = limits_of_source(prediction.planner.shape, content_of(source, "model.source")) if source else {}
    request = PlanRequest(
        layout.world_size,
        limit,
        train.global_batch_size,
        train.seq_len,
        OFFERED["pipeloom"],
        zero=tuple(sorted({planned.zero, 1, 3})),
        capacity=planned.capacity,
        limits=limits,
        recompute=("none", "full"),
    )
    better = closest(prediction.planner, request, planned)
    if better is None:
        return f"{short}; no layout on {layout.world_size} devices fits"
    flags = " ".join(train_flags(better.layout, planned))
    return f"{short}; the closest layout that fits, with {size_words(better.peak)}: {flags}"


def expected_timeline(layout: Layout) -> Timeline:
    """Simulate the schedule with costs in proportion to each stage's FLOPs; F, I and W take the same time."""
    costs = flop_costs(layout.config, layout.schedule, layout.stage_layers)
    return simulate(layout.schedule, costs if layout.cuts is None else layout.cuts.costs(costs))


def rank_table(mesh: MeshShape) -> list[str]:
    """Return a table of the workers: one row per pipeline rank, one column per replica and tensor-parallel rank.

    At most 16 rows and 10 columns. Empty if all workers form one pipeline.
    """
    if mesh.world == mesh.pp:
        return []
    numbers = {}
    for worker in range(mesh.world):
        place = mesh.place(worker)
        numbers[place.pp, place.dp, place.cp, place.tp] = (worker, place.ep)
    columns = list(product(range(mesh.dp), range(mesh.cp), range(mesh.tp)))
    indices = {
        "dp": [dp for dp, _, _ in columns],
        "cp": [cp for _, cp, _ in columns],
        "ep": [numbers[0, *column][1] for column in columns],
        "tp": [tp for _, _, tp in columns],
    }
    rows = [["", *(f"{axis} {at}" for at in each)] for axis, each in indices.items() if getattr(mesh, axis) > 1]
    for pp in range(min(mesh.pp, _ROWS)):
        rows.append([f"pp {pp}", *(str(numbers[pp, *column][0]) for column in columns)])
    clipped = [row[: _COLUMNS + 1] + ["…"] * (len(row) > _COLUMNS + 1) for row in rows]
    title = f"workers in the order {mesh.order}, the fastest axis first:"
    return [title, *in_columns(clipped), *["…"] * (mesh.pp > _ROWS)]


def _rank_lines(layout: Layout, timeline: Timeline) -> list[str]:
    schedule, layers, peaks = layout.schedule, stage_words(layout), timeline.peak_activations
    rows = [["rank", "parameters", "in flight", "layers"]]
    for rank, count in enumerate(rank_parameters(layout)):
        words = " | ".join(layers[stage] for stage in schedule.stages_of[rank])
        rows.append([str(rank), f"{count:,}", str(peaks[rank]), words])
    lines = in_columns(rows, ragged=True)
    divided = [f"{axis} {size}" for axis, size in (("tp", layout.mesh.tp), ("ep", layout.mesh.ep)) if size > 1]
    if divided:
        lines.append(f"      totals of each pipeline rank, which {' and '.join(divided)} divide")
    return [*lines, STAGE_WORDS]


def _rates(config: Config, steps: int, replicas: int) -> Sequence[tuple[int, float]]:
    warm = min(config.optimizer.warmup_steps, steps - 1)
    steps_to_print = sorted({0, warm, (warm + steps - 1) // 2, steps - 1})
    return [(step, learning_rate(step, steps, config.optimizer, replicas)) for step in steps_to_print]


def _observer_lines(layout: Layout) -> list[str]:
    """Return lines with the rows that the training loop calls around its steps, in order."""
    from pipeloom.train.observers import observers

    measures = layout.search is not None and not layout.search.before_start
    rows = observers(layout.config, searches=measures)
    width = max(len(row.name) for row in rows)
    return ["around the steps, in this order:", *(f"  {row.name:<{width}}  {row.when()}" for row in rows)]


def _checkpoints(config: Config) -> str:
    section = config.checkpoint
    every = f"every {section.every} steps and at the end" if section.every else "at the end"
    where = section.dir or "the run's own folder"
    begin = "" if section.resume == "none" else f"; resume = {section.resume}"
    return f"{every}, in {where}{begin}"
