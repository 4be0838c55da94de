"""`pipeloom train --dry-run`: a report on a run without starting its workers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise, product
from typing import TYPE_CHECKING

from pipeloom.cli.output import aligned
from pipeloom.config import Config, Layout
from pipeloom.config.layout import stage_costs
from pipeloom.config.stages import layer_sizes
from pipeloom.errors import ConfigError, UsageError
from pipeloom.mesh_shape import MeshShape
from pipeloom.schedule import Costs, Timeline, simulate
from pipeloom.schedule.channels import size_words

if TYPE_CHECKING:
    from pipeloom.train.report.layer_bytes import LayerBytes

_ROWS, _COLUMNS = 16, 10  # largest size of the table of workers that fits on a screen
# Bytes of fp32 state per element, besides its value: two moments, or one. For Muon an upper bound: its matrices have one.
_STATE_BYTES = {"adamw": 8, "sgd": 4, "muon": 8}


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
        _activation_line(layout),
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


def peak_bytes(layout: Layout, layers: Sequence[LayerBytes]) -> list[float]:
    """Return rank -> bytes of activations at the peak, including the largest layer that is recomputed."""
    spans = [layers[start:end] for start, end in _spans(layout)]
    sizes = layout.microbatch_sizes
    factors = tuple(size / max(sizes) for size in sizes) * len(layout.schedule.routes)
    costs = Costs(
        activation=tuple(sum(layer.held for layer in stage) for stage in spans),
        microbatch=factors[: layout.schedule.microbatches],
    )
    again = [max((layer.again for layer in stage), default=0.0) for stage in spans]
    peaks = simulate(layout.schedule, costs).peak_memory
    return [
        peak + max(again[stage] for stage in stages)
        for peak, stages in zip(peaks, layout.schedule.stages_of, strict=True)
    ]


def _spans(layout: Layout) -> list[tuple[int, int]]:
    """Return stage -> (index of its first layer, index after its last layer)."""
    spans = list(pairwise([0, *accumulate(layout.stage_layers)]))
    return [spans[position] for position in layout.schedule.position_of]


def _activation_line(layout: Layout) -> str:
    """Return the predicted activations of each rank, and what they count."""
    from pipeloom.train.report.layer_bytes import layer_bytes

    try:
        peaks = peak_bytes(layout, layer_bytes(layout))
    except ConfigError:
        raise  # training would end with it too
    except UsageError as error:
        return f"activations: not predicted: {error}"
    ranks = ", ".join(f"rank {rank} {size_words(size)}" for rank, size in enumerate(peaks))
    divided = "; tp and sp divide them" if layout.mesh.tp > 1 else ""
    return (
        f"activations at the peak: {ranks} (tensors that autograd keeps, of one whole layer of each kind{divided}; without "
        "temporary tensors and message buffers)"
    )


def rank_parameters(layout: Layout) -> list[int]:
    """Return rank -> parameters of all stages of that pipeline rank, before tensor or expert parallelism divides them."""
    sizes = [size.parameters for size in layer_sizes(layout.config.model, layout.config.train.seq_len)]
    of_stage = [sum(sizes[start:end]) for start, end in _spans(layout)]
    return [sum(of_stage[stage] for stage in stages) for stages in layout.schedule.stages_of]


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
    names = ["E", *map(str, range(layout.config.model.num_hidden_layers)), "L"]
    words = []
    for start, end in _spans(layout):
        blocks = [name for name in names[start:end] if name.isdecimal()]
        span = f"{blocks[0]}-{blocks[-1]}" if len(blocks) > 1 else "".join(blocks)
        ends = ["E" * (start == 0 < end), span, "L" * (start < end == len(names))]
        words.append(" ".join(filter(None, ends)) or "-")
    return words


def _state(config: Config, parameters: int) -> str:
    """Return the bytes of weights, gradients and optimizer state in words; ZeRO-1 divides the state by the replicas."""
    size = {"float64": 8, "bfloat16": 2}.get(config.train.dtype, 4)
    wide = max(size, 4)
    state: float = _STATE_BYTES[config.optimizer.name] * wide // 4 + (wide if size < 4 else 0)
    if config.optimizer.zero1:
        state /= config.parallel.dp * config.parallel.cp
    return size_words(parameters * (size + wide + state))


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
