"""A batch cut into micro-batches, and each one's share of the loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeloom.errors import UsageError
from pipeloom.ops.microbatch import KEYWORD, MicrobatchContext
from pipeloom.runtime.boundary import signature


@dataclass(frozen=True)
class Microbatches:
    """The inputs of one step, micro-batch by micro-batch.

    Attributes:
        inputs: each one's positional inputs of the first stage.
        targets: each one's targets (whatever the loss takes).
        keywords: each one's keyword arguments, for every layer that takes them; its MicrobatchContext among them.
        shares: each one's weight over the sum of all weights, so that the sum of `share * mean loss` is the mean over all
            targets of the step.
        signatures: equal where shapes and dtypes are.
    """

    inputs: tuple[tuple[Any, ...], ...]
    targets: tuple[Any, ...]
    keywords: tuple[Mapping[str, Any], ...]
    shares: tuple[float, ...]
    signatures: tuple[tuple[Any, ...], ...]

    @property
    def count(self) -> int:
        return len(self.inputs)


Weight = Callable[[Any], float | Tensor]


@dataclass(frozen=True)
class Weighing:
    """How micro-batches count, among those of all data-parallel replicas.

    Attributes:
        weight: of a micro-batch's targets; None: how many they are.
        total: the sum of this replica's weights -> the sum over all replicas.
        replica: this replica's number.
        step: the step's number, for layers that ask.
    """

    weight: Weight | None = None
    total: Callable[[float], float] = float
    replica: int = 0
    step: int = 0


def number_of_targets(targets: Any) -> float:
    """The default weight of a micro-batch: how many targets it has."""
    first = targets[0] if isinstance(targets, (tuple, list)) else targets
    return float(first.numel())


def split_sizes(rows: int, count: int) -> list[int]:
    """`rows` in `count` parts as even as possible, larger first."""
    base, larger = divmod(rows, count)
    return [base + (at < larger) for at in range(count)]


def split_batch(
    inputs: Any,
    targets: Any,
    keywords: Mapping[str, Any],
    sizes: Sequence[int],
    weighing: Weighing,
) -> Microbatches:
    """Cuts every tensor along its first dimension; other values, and tensors with another first dimension, go to all.

    Raises UsageError when a micro-batch would be empty.
    """
    positional = as_inputs(inputs)
    rows = batch_rows(positional)
    if sum(sizes) != rows:
        raise UsageError(f"the micro-batches hold {sum(sizes)} rows, and the batch {rows}")
    if min(sizes) < 1:
        raise UsageError(
            f"a batch of {rows} rows cannot be split into {len(sizes)} micro-batches; give at least {len(sizes)} rows"
        )
    parts = [_cut(value, sizes, rows) for value in positional]
    wanted = [_cut_tree(targets, sizes, rows), *(_cut(v, sizes, rows) for v in keywords.values())]
    each_targets, each_keywords = wanted[0], wanted[1:]
    each_inputs = tuple(zip(*parts, strict=True))
    keyword_parts = tuple(
        dict(zip(keywords, values, strict=True))
        for values in (zip(*each_keywords, strict=True) if keywords else [()] * len(sizes))
    )
    weigh = weighing.weight if weighing.weight is not None else number_of_targets
    weights = [
        float(weigh(part)) if part is not None else float(size) for part, size in zip(each_targets, sizes, strict=True)
    ]
    total = weighing.total(sum(weights))
    if not total > 0:
        raise UsageError(f"the weights of the micro-batches sum to {total}; at least one must be above 0")
    shares = tuple(w / total for w in weights)
    first = weighing.replica * len(shares)
    contexts = [{KEYWORD: MicrobatchContext(weighing.step, first + at, share)} for at, share in enumerate(shares)]
    return Microbatches(
        each_inputs,
        tuple(each_targets),
        tuple({**context, **own} for context, own in zip(contexts, keyword_parts, strict=True)),
        shares,
        tuple(signature((*i, *k.values())) for i, k in zip(each_inputs, keyword_parts, strict=True)),
    )


def as_inputs(inputs: Any) -> tuple[Any, ...]:
    """The positional inputs of the first stage, one or several."""
    return tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)


def chosen_sizes(inputs: Any, count: int, configured: Sequence[int] | None) -> tuple[int, ...]:
    """The rows of each of `count` micro-batches: as configured where that fits this batch, else as even as possible."""
    rows = batch_rows(as_inputs(inputs))
    if configured is not None and len(configured) == count and sum(configured) == rows:
        return tuple(configured)
    return tuple(split_sizes(rows, count))


def batch_rows(inputs: Sequence[Any]) -> int:
    """The first dimension of the first tensor."""
    for value in inputs:
        if isinstance(value, Tensor) and value.ndim:
            return value.shape[0]
    raise UsageError("the inputs hold no tensor with a batch dimension")


def _cut(value: Any, sizes: Sequence[int], rows: int) -> list[Any]:
    if isinstance(value, Tensor) and value.ndim and value.shape[0] == rows:
        return list(torch.split(value, list(sizes)))
    return [value] * len(sizes)


def _cut_tree(value: Any, sizes: Sequence[int], rows: int) -> list[Any]:
    if isinstance(value, (tuple, list)):
        return list(zip(*(_cut(item, sizes, rows) for item in value), strict=True))
    return _cut(value, sizes, rows)


def join(outputs: Sequence[Any]) -> Any:
    """Micro-batches' outputs as one: tensors concatenated along dimension 0, tuples element by element."""
    first = outputs[0]
    if isinstance(first, Tensor):
        return torch.cat(list(outputs)) if first.ndim else torch.stack(list(outputs))
    if isinstance(first, (tuple, list)):
        return tuple(join(items) for items in zip(*outputs, strict=True))
    return first
