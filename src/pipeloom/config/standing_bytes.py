"""Bytes that a rank holds for the whole step: weights, gradients, and the optimizer's state, from the configuration alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate, pairwise

from pipeloom.config.layout import Layout, stage_sizes
from pipeloom.config.sections import Config
from pipeloom.schedule.model import Schedule, parts
from pipeloom.shapes.mesh import uneven_parts

# Bytes of fp32 state per element, besides its value: two moments, or one. For Muon an upper bound: its matrices have one.
_STATE_BYTES = {"adamw": 8, "sgd": 4, "muon": 8}


def spans(schedule: Schedule, stage_layers: Sequence[int]) -> list[tuple[int, int]]:
    """Return stage -> (index of its first layer, index after its last layer).

    A share of the vocabulary is one layer behind all others, which lists of the layers of stages do not have.
    """
    count = sum(stage_layers)
    ends = [*pairwise([0, *accumulate(stage_layers)]), *[(count, count + 1)] * len(schedule.vocabulary)]
    return [ends[position] for position in schedule.position_of]


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


def with_embedding(schedule: Schedule) -> list[int]:
    """Return the stages with the output layer on ranks that hold the embedding too."""
    routes = schedule.routes
    return [
        last
        for *_, last in routes
        if any(first in schedule.stages_of[schedule.placement[last]] for first, *_ in routes)
    ]


def summed_over_slices(layout: Layout, stage: int, state: float) -> float:
    """Return the bytes of the gradients of keys and values that later slices add to, while they are summed on the device.

    Args:
        state: bytes of the keys and values of one micro-batch's slices.
    """
    schedule, sizes = layout.schedule, element_bytes(layout.config)
    cells = (action for program in schedule.programs for cell in program for action in parts(cell))
    on_host = any(action.kind == "OKEPT" and action.stage == stage for action in cells)
    return 0.0 if on_host or schedule.slices == 1 else state * sizes["grads"] / sizes["params"]


def summed_over_ranks(layout: Layout) -> list[float]:
    """Return `copies_in_sums` in bytes, 0 with adapters, whose gradients are small."""
    schedule, model, mesh = layout.schedule, layout.config.model, layout.mesh
    tied = model.vocab_size * model.hidden_size / mesh.tp * (model.tie_word_embeddings and not schedule.vocabulary)
    layers = [
        (size.parameters - size.experts) / mesh.tp + size.experts / mesh.ep for size in stage_sizes(layout.config)
    ]
    counts = [sum(layers[start:end]) for start, end in pairwise([0, *accumulate(layout.stage_layers)])]
    size = element_bytes(layout.config)["grads"] * (not layout.config.lora.r)
    return [size * count for count in copies_in_sums(schedule, counts, tied)]


def copies_in_sums(schedule: Schedule, counts: Sequence[float], tied: float) -> list[float]:
    """Return rank -> gradients beside its own while those of weights that other pipeline ranks hold too are summed, a number.

    The step's last action has ended then. Each holder has a copy of its own, and those of the others (`tied_weights.sum_over`).

    Args:
        counts: position in a route -> the parameters of its layers.
        tied: parameters of the embedding that the output layer has, too.
    """
    places = list(zip(schedule.position_of, schedule.placement, strict=True))
    holders = [frozenset(rank for at, rank in places if at == position) for position in range(schedule.positions)]
    summed = defaultdict[frozenset[int], float](float, {holders[0] | holders[-1]: tied})  # holders -> parameters
    for position, count in enumerate(counts):
        summed[holders[position]] += count - tied * [0, schedule.positions - 1].count(position)
    copies = {ranks: len(ranks) * count for ranks, count in summed.items() if len(ranks) > 1}
    return [
        max((each for ranks, each in copies.items() if rank in ranks), default=0.0) for rank in range(schedule.ranks)
    ]


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
