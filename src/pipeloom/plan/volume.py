"""Bytes that a step sends between workers, by kind, from the configuration's shapes alone.

A ring all-reduce of V bytes over N ranks sends 2 (N - 1) / N V from each of them, an all-gather or a reduce-scatter of V
bytes in all (N - 1) / N V (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", 2009). Statistics of the loss, gradient
norms and the router's counts are left out: they are a few numbers per token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

from pipeloom.config.layout import Layout
from pipeloom.config.sections import Config
from pipeloom.plan.run import adapters_of, boundary_bytes, element_bytes
from pipeloom.schedule.channels import message_counts, size_words
from pipeloom.shapes.layers import whole_layers
from pipeloom.shapes.ops import parameters_of


@dataclass(frozen=True)
class Volume:
    """One kind of message.

    Attributes:
        kind: pipeline, tensor, context, data or experts.
        count: messages, or collective operations of a group, in a step.
        bytes: bytes that all workers together send in a step.
    """

    kind: str
    count: int
    bytes: float


def volumes(layout: Layout) -> tuple[Volume, ...]:
    """Return the volume per kind of message in a step, without kinds that send nothing."""
    kinds = (_pipeline(layout), _tensor(layout), _context(layout), _data(layout), _experts(layout))
    return tuple(volume for volume in kinds if volume.bytes)


def _pipeline(layout: Layout) -> Volume:
    schedule, mesh = layout.schedule, layout.mesh
    workers = mesh.replicas * mesh.tp
    count = sum(message_counts(schedule).values())
    sizes = boundary_bytes(layout)
    moved = 0.0
    for size, index in zip(sizes, schedule.route_of, strict=True):
        places = [schedule.placement[stage] for stage in schedule.routes[index]]
        moved += 2 * size * sum(here != there for here, there in zip(places, places[1:], strict=False))
    return Volume("pipeline", count * workers, moved * workers)


def _tensor(layout: Layout) -> Volume:
    """Return the volume of the decoder's layers (arXiv 1909.08053 section 3, 2205.05198 section 4.2).

    Without sequence parallelism: an all-reduce after the forward of the embedding and of each row layer, and after the backward
    of each column layer, including the output layer. With it: a reduce-scatter and an all-gather in place of each all-reduce, and
    one more all-gather for the weight gradient of each column layer. A recomputed block repeats the collectives of its forward
    except the last.
    """
    config, mesh = layout.config, layout.mesh
    blocks, m = config.model.blocks, layout.schedule.microbatches
    ends = 1 + config.model.num_nextn_predict_layers  # products of the output layer, and look-ups
    recomputed, part = _recomputed(config), config.train.recompute
    # A part ends with its row layer's sum; a mixture of experts is summed behind its part.
    sums = {"attention": blocks, "mlp": blocks - sum(config.model.expert_blocks)}
    again = sums.get(part, 0) if isinstance(part, str) else 0
    if config.parallel.sp:
        # a block: 2 gathers and 2 scatters forward, the same backward, 2 gathers for the weights; embedding: a scatter and its
        # backward's gather; output layer: a gather, its backward's scatter and a gather for the weights
        operations = 10 * blocks + 2 + 3 + 3 * len(recomputed) + 2 * again
        units = operations + 5 * (ends - 1)
        share = 1.0
    else:
        operations = 4 * blocks + 2 + len(recomputed) + again
        units = operations + 2 * (ends - 1)
        share = 2.0
    whole: float = sum(size * config.train.seq_len for size in layout.microbatch_sizes)
    whole *= config.model.hidden_size * element_bytes(config)["params"]
    moved = units * share * (mesh.tp - 1) * whole * mesh.dp
    return Volume("tensor", operations * m * mesh.replicas, moved)


def _context(layout: Layout) -> Volume:
    """Return the volume of keys and values, which a block exchanges in its forward and again in its backward, and of their
    gradients, in fp32 or wider."""
    config, mesh = layout.config, layout.mesh
    model, item = config.model, element_bytes(config)["params"]
    again = model.blocks if config.train.recompute == "attention" else len(_recomputed(config))
    width = 2 * model.num_key_value_heads * model.shape().head_width
    tokens = sum(layout.microbatch_sizes) * config.train.seq_len * mesh.dp
    moved = (
        ((2 * model.blocks + again) * item + model.blocks * element_bytes(config)["grads"])
        * (mesh.cp - 1)
        * tokens
        * width
    )
    return Volume("context", (3 * model.blocks + again) * layout.schedule.microbatches * mesh.dp * mesh.tp, moved)


def _data(layout: Layout) -> Volume:
    """Return the volume of gradients, in fp32 or wider, that are all-reduced over the replicas of their parameters; with zero1
    they are reduce-scattered, and the parameters all-gathered."""
    config, mesh, schedule = layout.config, layout.mesh, layout.schedule
    copies = len(schedule.routes)
    item = element_bytes(config)["grads"]
    gathered = element_bytes(config)["params"] if config.optimizer.zero1 else item
    moved, count = 0.0, 0
    for plain, expert in _held(layout):
        for parameters, ranks, groups in ((plain, mesh.replicas, 1), (expert / mesh.ep, mesh.edp, mesh.ep)):
            if parameters and ranks * copies > 1:
                moved += (item + gathered) * (ranks * copies - 1) * parameters * groups
                count += groups
    return Volume("data", count, moved)


def _held(layout: Layout) -> Iterator[tuple[float, float]]:
    """(trained parameters that all replicas hold, of experts) of each stage's layers; tensor-parallel parts together."""
    layers = whole_layers(layout.config.model.shape(), 1, adapters_of(layout.config))
    for span in pairwise(accumulate(layout.stage_layers, initial=0)):
        yield parameters_of(layers[slice(*span)], trained=True)


def _experts(layout: Layout) -> Volume:
    """Return the volume of experts under even routing: a row per choice of a token, to its expert and back, in each direction."""
    config, mesh = layout.config, layout.mesh
    sparse, m = config.model.expert_blocks, layout.schedule.microbatches
    sparse += sparse[-1:] * config.model.num_nextn_predict_layers
    rows = sum(layout.microbatch_sizes) * config.train.seq_len * config.model.num_experts_per_tok
    row = config.model.hidden_size * element_bytes(config)["params"]
    passes = 4 * sum(sparse) + 2 * sum(sparse[block] for block in _recomputed(config))
    moved = passes * rows * row * (mesh.ep - 1) / mesh.ep * mesh.dp
    return Volume("experts", passes * m * mesh.edp, moved)


def _recomputed(config: Config) -> tuple[int, ...]:
    """Return the blocks whose forward is recomputed."""
    setting = config.train.recompute
    return setting if isinstance(setting, tuple) else tuple(range(config.model.blocks * (setting == "full")))


def words(layout: Layout) -> str:
    """One line with the bytes and the number of messages of each kind in a step; empty if there are none."""
    parts = [f"{volume.kind} {size_words(volume.bytes)} in {volume.count:,}" for volume in volumes(layout)]
    return f"messages of a step, all workers: {'; '.join(parts)}" if parts else ""
