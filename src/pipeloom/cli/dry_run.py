"""`pipeloom train --dry-run`: a report on a run without starting its workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, fields
from itertools import product

from pipeloom.cli.output import aligned
from pipeloom.config import Config, Layout
from pipeloom.config.layout import stage_costs
from pipeloom.config.standing_bytes import element_bytes, rank_parameters, spans
from pipeloom.errors import ConfigError, UsageError
from pipeloom.mesh_shape import MeshShape
from pipeloom.schedule import Costs, Timeline, simulate
from pipeloom.schedule.channels import size_words

_ROWS, _COLUMNS = 16, 10  # largest size of the table of workers that fits on a screen


def report_lines(layout: Layout) -> list[str]:
    """Return lines on the contents of each rank, the simulated schedule, learning rates and output folders."""
    config = layout.config
    timeline = expected_timeline(layout)
    steps = config.train.steps
    return [
        *rank_table(layout.mesh),
        *_rank_lines(layout, timeline),
        f"bubble rate, Σ idle / (p · makespan): {timeline.bubble_rate:.4f}, simulated with times proportional to each "
        "stage's FLOPs, and free messages",
        *_bytes_lines(layout),
        f"learning rate ({config.optimizer.lr_schedule}): "
        + ", ".join(f"step {step + 1} {rate:.3g}" for step, rate in _rates(config, steps, layout.mesh.dp)),
        *_observer_lines(layout),
        f"checkpoints: {_checkpoints(config)}; log: a new folder in {config.log.dir}",
        f"dry run: {layout.world_size} worker{'s' * (layout.world_size > 1)} would start",
    ]


def expected_timeline(layout: Layout) -> Timeline:
    """Simulate the schedule with costs in proportion to each stage's FLOPs; F, I and W take the same time."""
    forward = [flops / 3 for flops in stage_costs(layout.config, layout.stage_layers)]
    costs = tuple(forward[position] for position in layout.schedule.position_of)
    return simulate(layout.schedule, Costs(forward=costs, input_grad=costs, weight_grad=costs))


def _bytes_lines(layout: Layout) -> list[str]:
    """Return lines with the predicted bytes of each rank at the peak, and what they consist of."""
    from pipeloom.train.report.step_bytes import predicted

    try:
        ranks = predicted(layout)[1]
    except ConfigError:
        raise  # training would end with it too
    except UsageError as error:
        return [f"bytes at the peak: not predicted: {error}"]
    rows = [["rank", *(field.name for field in fields(ranks[0])), "bytes at the peak"]]
    for rank, each in enumerate(ranks):
        rows.append([str(rank), *(size_words(size) for size in (*astuple(each), each.total))])
    return [*aligned(rows), *["tp, sp and cp divide them"] * (layout.mesh.tp * layout.mesh.cp > 1)]


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
    return [title, *aligned(clipped), *["…"] * (mesh.pp > _ROWS)]


def _rank_lines(layout: Layout, timeline: Timeline) -> list[str]:
    config, schedule = layout.config, layout.schedule
    layers = _layers(layout)
    peaks = timeline.peak_activations
    lines = ["rank  parameters   weights, gradients, optimizer   peak stage-micro-batches alive   layers"]
    for rank, count in enumerate(rank_parameters(layout)):
        words = " | ".join(layers[stage] for stage in schedule.stages_of[rank])
        lines.append(f"{rank:>4}  {count:>10,}   {_state(config, count):>29}   {peaks[rank]:>30}   {words}")
    divided = [f"{axis} {size}" for axis, size in (("tp", layout.mesh.tp), ("ep", layout.mesh.ep)) if size > 1]
    if divided:
        lines.append(f"      totals of each pipeline rank, which {' and '.join(divided)} divide")
    return lines


def _layers(layout: Layout) -> list[str]:
    """Return stage -> its layers in words, such as `E 0-1` or `2-3 L`."""
    names = ["E", *map(str, range(layout.config.model.blocks)), "L"]
    words = []
    for start, end in spans(layout):
        blocks = [name for name in names[start:end] if name.isdecimal()]
        span = f"{blocks[0]}-{blocks[-1]}" if len(blocks) > 1 else "".join(blocks)
        ends = ["E" * (start == 0 < end), span, "L" * (start < end == len(names))]
        words.append(" ".join(filter(None, ends)) or "-")
    return words


def _state(config: Config, parameters: int) -> str:
    """Return the bytes of weights, gradients and optimizer state in words; ZeRO-1 divides the state by the replicas."""
    return size_words(parameters * sum(element_bytes(config).values()))


def _rates(config: Config, steps: int, replicas: int) -> Sequence[tuple[int, float]]:
    from pipeloom.train.step import learning_rate

    warm = min(config.optimizer.warmup_steps, steps - 1)
    steps_to_print = sorted({0, warm, (warm + steps - 1) // 2, steps - 1})
    return [(step, learning_rate(step, steps, config.optimizer, replicas)) for step in steps_to_print]


def _observer_lines(layout: Layout) -> list[str]:
    """Return lines with the rows that the training loop calls around its steps, in order."""
    from pipeloom.train.observers import observers

    measures = layout.search is not None and layout.search.costs is None
    rows = observers(layout.config, searches=measures)
    width = max(len(row.name) for row in rows)
    return ["around the steps, in this order:", *(f"  {row.name:<{width}}  {row.when()}" for row in rows)]


def _checkpoints(config: Config) -> str:
    section = config.checkpoint
    every = f"every {section.every} steps and at the end" if section.every else "at the end"
    where = section.dir or "the run's own folder"
    begin = "" if section.resume == "none" else f"; resume = {section.resume}"
    return f"{every}, in {where}{begin}"
