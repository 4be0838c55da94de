"""Times of a model's layers on this device: a few layers of each kind, run by the engine in this process."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeloom.config import Layout
from pipeloom.measure.build import PARAMETER_DTYPES, compiled, model_layers, moe_classes, ties, training_loss
from pipeloom.measure.own_layers import SPLIT_BACKWARD, WHOLE_BACKWARD, one_by_one
from pipeloom.models import ahead
from pipeloom.ops.deferred import WeightGradContext, WeightGradQueue, defer_weight_gradients, run_backward
from pipeloom.ops.layer import Layer, MicrobatchContext
from pipeloom.ops.random_state import stable_seed
from pipeloom.ops.segments import Compute, carries, is_segmented
from pipeloom.runtime import LocalPipeline, RuntimeOptions
from pipeloom.runtime.tied_weights import layer_of
from pipeloom.schedule.actions import Action
from pipeloom.shapes.layers import layer_sizes

IN_TURN = 4
"""Layers of a kind that run in turn, as those of a stage do: a layer that ran alone would find its weights in the cache, and take
5 to 8 % less. Fewer where these hold `BEYOND_CACHES` bytes."""

BEYOND_CACHES = 2**28


class Sample(NamedTuple):
    """Repeated measurements in seconds: their median, and the median of their distances from it."""

    median: float
    spread: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Sample:
        middle = median(seconds)
        return cls(middle, median(abs(each - middle) for each in seconds))


@dataclass(frozen=True)
class LayerTimes:
    """Times of the layers of one kind, for the largest micro-batch and for one sequence.

    Attributes:
        name: the first of them.
        layers: the numbers of all of them in the model; the embedding is 0.
        seconds: kind of action (F, I, W, B, R, R:norms and other parts, and RB, the block (R;B)) -> its time. That of the last
            layer includes the loss. F is that of a micro-batch that is not recomputed.
        one: the same for a micro-batch of one sequence; equal to `seconds` where the largest has one.
    """

    name: str
    layers: tuple[int, ...]
    seconds: Mapping[str, Sample]
    one: Mapping[str, Sample]


def kinds_of_layers(layout: Layout) -> list[tuple[int, ...]]:
    """Return the numbers of the layers of each kind, which have equal sizes, in the order of their first ones."""
    numbers: dict[Any, list[int]] = defaultdict(list)
    for at, size in enumerate(layer_sizes(layout.config.model.shape(), layout.config.train.seq_len)):
        numbers[size].append(at)
    return [tuple(each) for each in numbers.values()]


def layers_in_turn(layout: Layout, kinds: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the numbers of those layers of each of the `kinds` that are measured."""
    config = layout.config
    sizes = layer_sizes(config.model.shape(), config.train.seq_len)
    measured = []
    for numbers in kinds:
        weights = sizes[numbers[0]].parameters * PARAMETER_DTYPES[config.train.dtype].itemsize
        measured.append(numbers[: min(IN_TURN, 1 + BEYOND_CACHES // weights)])
    return measured


def layer_times(
    layout: Layout, device: torch.device, repeats: int, parts: Sequence[str] = ()
) -> tuple[LayerTimes, ...]:
    """Run layers of each kind as stages of their own, `repeats` steps after one that warms up, and return the times.

    A step has these micro-batches, one after the other: F, I, W; F, R, I, W; F, B; F, (R;B); and for each of `parts`, which are
    names of parts of the layers, F, R of the part, B. Steps of the largest micro-batches and of single sequences take turns, so
    that a change of the machine's speed meets both.
    """
    kinds, model = kinds_of_layers(layout), _model(layout, device)
    in_turn = layers_in_turn(layout, kinds)
    kind_of_stage = [kind for kind, numbers in enumerate(in_turn) for _ in numbers]
    layers = compiled([model[number] for numbers in in_turn for number in numbers], layout.config)
    names = {layer.name: layer for layer in layers}
    again = [("{0}R{1}:" + part, *WHOLE_BACKWARD) for part in parts]
    schedule = one_by_one(len(layers), [*_BACKWARDS, *again])
    pipeline = LocalPipeline(
        layers,
        schedule,
        loss=training_loss(layout.config),
        stages=(1,) * len(layers),
        tied=[group for group in ties(layout.config) if all(layer_of(name, names) for name in group)],
        options=RuntimeOptions(
            device=device,
            main_gradients=PARAMETER_DTYPES[layout.config.train.dtype].itemsize < 4,
            trace=device.type == "cuda",
        ),
    )
    depth = layout.config.model.num_nextn_predict_layers
    batches = {
        sequences: _tokens(layout, sequences * schedule.microbatches, device)
        for sequences in sorted({1, max(layout.microbatch_sizes)})
    }
    seconds: dict[tuple[int, int], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for step, (sequences, (tokens, targets)) in product(range(repeats + 1), batches.items()):
        pipeline.step(tokens, targets, **(ahead(tokens, targets, depth) if depth else {}))
        (stats,) = pipeline.stats
        for cell, start, end in zip(schedule.programs[0], stats.starts, stats.ends, strict=True):
            assert isinstance(cell, Action)
            if step and not (cell.kind == "F" and cell.microbatch not in _PLAIN):
                seconds[sequences, kind_of_stage[cell.stage]][cell.kind].append(end - start)
    samples = {key: {kind: Sample.of(each) for kind, each in times.items()} for key, times in seconds.items()}
    return tuple(
        LayerTimes(model[numbers[0]].name, numbers, samples[max(batches), kind], samples[1, kind])
        for kind, numbers in enumerate(kinds)
    )


_BACKWARDS = SPLIT_BACKWARD, ("{0}R{1}", *SPLIT_BACKWARD), WHOLE_BACKWARD, ("({0}R{1};{0}B{1})",)
_PLAIN = 0, 2  # micro-batches of which nothing is recomputed


def _model(layout: Layout, device: torch.device) -> list[Layer]:
    config = layout.config
    return model_layers(config, PARAMETER_DTYPES[config.train.dtype], device, classes=moe_classes(layout))


def _tokens(layout: Layout, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return random tokens and targets [rows, seq_len]."""
    config = layout.config
    generator = torch.Generator().manual_seed(stable_seed("profile", config.train.seed))
    shape = (2, rows, config.train.seq_len)
    tokens, targets = torch.randint(0, config.model.vocab_size, shape, generator=generator).to(device)
    return tokens, targets


# -- a block's segments ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SegmentTimes:
    """Times of the computations of a block with experts; the router, the shared expert and the mixture count as attention.

    Attributes:
        layers: the number of such blocks.
        attention, experts: (F, I, W).
        rows: bytes that its dispatch and its combine move, those that stay on the rank included.
    """

    layers: int
    attention: tuple[Sample, Sample, Sample]
    experts: tuple[Sample, Sample, Sample]
    rows: float


def segment_times(layout: Layout, device: torch.device, repeats: int) -> SegmentTimes | None:
    """Measure the computations of the first block that declares segments with experts; None: there is no such block."""
    config = layout.config
    blocks = [at for at, sparse in enumerate(config.model.expert_blocks, 1) if sparse]
    if not blocks or config.model.source:
        return None
    module = _model(layout, device)[blocks[0]]().to(device)
    assert is_segmented(module)
    context = WeightGradContext()
    defer_weight_gradients(module, context)
    dtype = PARAMETER_DTYPES[config.train.dtype]
    samples, tokens = max(layout.microbatch_sizes), config.train.seq_len
    x = torch.randn(samples, tokens, config.model.hidden_size, device=device).to(dtype)
    sums: dict[str, list[list[float]]] = {"attention": [], "experts": []}
    for repeat in range(repeats + 1):
        times = {name: [0.0, 0.0, 0.0] for name in sums}
        segments = module.segments(microbatch=MicrobatchContext(samples=samples))  # type: ignore[operator]
        for name, *three in segments_one_by_one(segments, x, context, device):
            each = times["experts" if name == "experts" else "attention"]
            each[:] = [total + seconds for total, seconds in zip(each, three, strict=True)]
        if repeat:
            for name, three in times.items():
                sums[name].append(three)
    middles = {name: tuple(Sample.of(column) for column in zip(*rows, strict=True)) for name, rows in sums.items()}
    rows = samples * tokens * config.model.num_experts_per_tok * config.model.hidden_size * dtype.itemsize
    return SegmentTimes(len(blocks), middles["attention"], middles["experts"], rows)  # type: ignore[arg-type]


def segments_one_by_one(
    segments: Sequence[Any], x: Tensor, context: WeightGradContext, device: torch.device
) -> Iterator[tuple[str, float, float, float]]:
    """Run the segments forward and backward, each with a graph of its own; yield (name, F, I, W), the last one first."""
    values: tuple[Any, ...] = (x.requires_grad_(),)
    passed = []
    for segment in segments:
        assert isinstance(segment, Compute)  # without a group there is nothing to communicate
        inputs = tuple(value.detach().requires_grad_() if carries(value) else value for value in values)
        context.queue = queue = WeightGradQueue()
        began = now(device)
        values = segment.run(inputs)
        passed.append((segment.name, inputs, values, queue, now(device) - began))
    gradients: list[Tensor | None] = [torch.randn_like(v) if carries(v) else None for v in values]
    for name, inputs, outputs, queue, forward in reversed(passed):
        roots = [(v, g) for v, g in zip(outputs, gradients, strict=True) if carries(v) and g is not None]
        began = now(device)
        run_backward([root for root, _ in roots], [gradient for _, gradient in roots])
        middle = now(device)
        queue.flush()
        yield name, forward, middle - began, now(device) - middle
        gradients = [value.grad if carries(value) else None for value in inputs]


def now(device: torch.device) -> float:
    """Return the time in seconds, once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
