"""Cutting a batch into micro-batches, and these into slices of their sequences, and the share of the loss of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pipeloom.errors import UsageError, echo
from pipeloom.ops.layer import KEYWORD, MicrobatchContext, SlicePlace
from pipeloom.ops.nested import like, mapped, tensors_in
from pipeloom.ops.slices import STATE
from pipeloom.parallel.context import ContextParallel
from pipeloom.parallel.mesh import Mesh
from pipeloom.runtime.health.report import FailureReporter
from pipeloom.runtime.tensor_spec import is_strided, layout_name, signature
from pipeloom.shapes.cut import even_sizes


@dataclass(frozen=True)
class Microbatches:
    """The inputs of one step, split into micro-batches; where sequences are cut, each slice of one is a micro-batch here.

    Attributes:
        inputs: positional inputs of the first stage, per micro-batch.
        targets: targets per micro-batch, as the loss takes them.
        keywords: keyword arguments per micro-batch, for every layer that takes them; its MicrobatchContext is one of them.
        shares: weight of each micro-batch over the sum of all weights, so that the sum of `share * mean loss` is the mean over
            all targets of the step; NaN if the targets are on the meta device.
        signatures: equal for micro-batches of equal shapes and dtypes.
    """

    inputs: tuple[tuple[Any, ...], ...]
    targets: tuple[Any, ...]
    keywords: tuple[Mapping[str, Any], ...]
    shares: tuple[float, ...]
    signatures: tuple[tuple[Any, ...], ...]

    @property
    def count(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True)
class GivenBatch:
    """The batch that a method of a pipeline was passed, to be cut into micro-batches, or its micro-batches.

    Attributes:
        method: the method.
        parts: (inputs, targets, keyword arguments) of the batch, or of each micro-batch.
        cut: whether it is one batch.
    """

    method: str
    parts: tuple[tuple[Any, Any, Mapping[str, Any]], ...]
    cut: bool

    @classmethod
    def of(
        cls, method: str, inputs: Any, targets: Any, keywords: Mapping[str, Any], microbatches: Iterable[Any] | None
    ) -> GivenBatch:
        """Return what was passed. Raises UsageError for both, for no micro-batch, and for one that is no such tuple."""
        if microbatches is None:
            return cls(method, ((inputs, targets, keywords),), True)
        several = isinstance(microbatches, Iterable) and not isinstance(microbatches, Tensor | str)
        listed = tuple(microbatches) if several else ()
        if inputs is not None or targets is not None or keywords or not listed:
            raise UsageError(
                f"{method}: give inputs and targets, or a list of one or more microbatches= and nothing else"
            )
        parts = []
        for at, each in enumerate(listed):
            part = tuple(each) if isinstance(each, (tuple, list)) else (each,)
            part += (None, {})[len(part) - 1 :]
            if len(part) != 3 or not isinstance(part[2], Mapping):
                raise UsageError(f"{method}: micro-batch {at} is not (inputs, targets) or (inputs, targets, keywords)")
            parts.append(part)
        return cls(method, tuple(parts), False)

    def with_inputs(self, change: Callable[[Any], Any]) -> GivenBatch:
        """Return it with the inputs that `change` makes of these."""
        return replace(self, parts=tuple((change(inputs), *others) for inputs, *others in self.parts))

    @property
    def arguments(self) -> dict[str, Any]:
        """Name -> value, for comparisons between ranks."""
        if not self.cut:
            return {f"micro-batch {at}": part for at, part in enumerate(self.parts)}
        inputs, targets, keywords = self.parts[0]
        return {"inputs": inputs, "targets": targets, **keywords}

    def require_count(self, microbatches: int) -> None:
        """Raise UsageError for another number of micro-batches than the schedule runs."""
        if not self.cut and len(self.parts) != microbatches:
            raise UsageError(
                f"{self.method} got {len(self.parts)} micro-batches, and the schedule runs {microbatches}; pass "
                f"schedule=, one of {len(self.parts)} on the same stages, as plan_step makes them"
            )

    def forwards(self, microbatches: int) -> int:
        """Return the number of micro-batches of a forward pass where the schedule has so many."""
        return evaluation_microbatches(microbatches, self.parts[0][0]) if self.cut else len(self.parts)


class BatchUnit(NamedTuple):
    """A micro-batch, or one slice of its sequences, before its weight is compared with the others'.

    Attributes:
        inputs, targets, keywords, signature: as of `Microbatches`.
        weight: of its loss.
        samples: rows of the micro-batch.
        place: the slice of its sequences; None: they are not cut.
    """

    inputs: tuple[Any, ...]
    targets: Any
    keywords: dict[str, Any]
    signature: tuple[Any, ...]
    weight: float
    samples: int
    place: SlicePlace | None


Weight = Callable[[Any], float | Tensor]
IGNORE_INDEX = -100


@dataclass(frozen=True)
class Weighing:
    """Rule for the weights of micro-batches over all data-parallel replicas.

    Attributes:
        weight: function of a micro-batch's targets; None: the number of targets that count.
        ignore_index: a target that does not count in the default weight; None: all targets count.
        total: sum of this replica's weights -> sum over all replicas.
        replica: this replica's number.
        step: number of the step, for layers that use it.
        shared_targets: whether every micro-batch may have all of a target tensor.
    """

    weight: Weight | None = None
    ignore_index: int | None = IGNORE_INDEX
    total: Callable[[float], float] = float
    replica: int = 0
    step: int = 0
    shared_targets: bool = False


def count_targets(targets: Any, ignore_index: int | None = IGNORE_INDEX) -> float:
    """Return the number of targets that count: the elements of their first tensor that are not `ignore_index`.

    NaN for integers on the meta device, whose values are unknown. Raises UsageError if the targets hold no tensor.
    """
    return _count(_counted_tensor(targets), ignore_index)


def _count(tensor: Tensor, ignore_index: int | None) -> float:
    if ignore_index is None or not _holds(tensor, ignore_index):
        return float(tensor.numel())
    return math.nan if tensor.is_meta else float(torch.ne(tensor, ignore_index).sum())


def _count_by_part(targets: Any, sizes: Sequence[int], rows: int, ignore_index: int | None) -> list[float]:
    """Return `count_targets` of every micro-batch, from a single pass over the tensor.

    The tensor is the first one with a row for each sample. If there is none, every micro-batch gets the same targets, and its
    rows are counted.
    """
    tensor = next((each for each in tensors_in(targets) if each.ndim and each.shape[0] == rows), None)
    if tensor is None:
        counted = _count(_counted_tensor(targets), ignore_index)
        return [counted if math.isnan(counted) else float(size if counted else 0) for size in sizes]
    if ignore_index is None or not _holds(tensor, ignore_index):
        return [float(tensor.numel() // rows * size) for size in sizes]
    if tensor.is_meta:
        return [math.nan] * len(sizes)
    by_row = torch.ne(tensor, ignore_index).reshape(rows, -1).sum(1).tolist()
    starts = [sum(sizes[:at]) for at in range(len(sizes))]
    return [float(sum(by_row[start : start + size])) for start, size in zip(starts, sizes, strict=True)]


def _holds(tensor: Tensor, index: int) -> bool:
    """Return whether elements of this tensor can equal `index`: in an unsigned or small type, `index` would wrap around."""
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        return False
    limits = torch.iinfo(tensor.dtype)
    return limits.min <= index <= limits.max


def _counted_tensor(targets: Any) -> Tensor:
    return _first_tensor(
        targets,
        0,
        f"the targets ({type(targets).__name__}) hold no tensor whose elements could be counted; pass weight= to the "
        f"pipeline, the weight of a micro-batch's targets",
    )


def _first_tensor(values: Any, dimensions: int, problem: str) -> Tensor:
    """Return the first tensor of at least so many dimensions, which may be inside tuples, lists and dicts."""
    for value in tensors_in(values):
        if value.ndim >= dimensions:
            return value
    raise UsageError(problem)


def split_batch(
    inputs: Any, targets: Any, keywords: Mapping[str, Any], sizes: Sequence[int], weighing: Weighing
) -> Microbatches:
    """Return a batch cut into micro-batches as `cut_batch` does, with their shares."""
    return weighed(cut_batch(inputs, targets, keywords, sizes, weighing), weighing)


def weighed(
    units: Sequence[BatchUnit], weighing: Weighing, contexts: bool = True, first: tuple[int, int] | None = None
) -> Microbatches:
    """Return the micro-batches of a step with their shares of its loss.

    Args:
        contexts: whether a layer takes the micro-batch's context.
        first: the numbers of the first micro-batch and the first sample over all replicas; None: each replica has as many.

    Raises UsageError if all weights are 0.
    """
    total = weighing.total(sum(unit.weight for unit in units))
    if total <= 0:
        rule = f"ignore_index is {weighing.ignore_index}" if weighing.weight is None else "every weight is 0"
        raise UsageError(f"none of the batch's targets counts ({rule}), so there is no mean loss")
    shares = tuple([math.nan if math.isnan(total) else unit.weight / total for unit in units])
    begins = [unit for unit in units if unit.place is None or unit.place.index == 0]
    index, sample = first or (weighing.replica * len(begins), weighing.replica * sum(unit.samples for unit in begins))
    for unit, share in zip(units, shares, strict=True):
        if contexts:
            known: Any = None if math.isnan(share) else share
            unit.keywords[KEYWORD] = MicrobatchContext(weighing.step, index, known, sample, unit.samples, unit.place)
        if unit.place is None or unit.place.end == unit.place.length:
            index, sample = index + 1, sample + unit.samples
    inputs, targets, keywords, signatures, *_ = zip(*units, strict=True)
    return Microbatches(inputs, targets, keywords, shares, signatures)


def cut_batch(
    inputs: Any,
    targets: Any,
    keywords: Mapping[str, Any],
    sizes: Sequence[int],
    weighing: Weighing,
    slices: SequenceSlices | None = None,
    context: ContextParallel | None = None,
    number: int = 0,
) -> list[BatchUnit]:
    """Cut every tensor along its first dimension, also in tuples, lists and dicts. Other values, and tensors with another
    first dimension, are passed to all micro-batches.

    Then cut each micro-batch along its sequences: every tensor whose first two dimensions are the rows and the length of the
    sequences (of the first input with two dimensions), along the second. All slices get other values whole.

    Args:
        slices: of the sequences; None: they are not cut.
        context: the ranks that share the tokens of the inputs and of the targets; keyword arguments stay those of all ranks.
        number: that of the first micro-batch, for messages.

    Raises UsageError if a micro-batch would be empty, for targets in a dict or, unless they are weighed or shared, with
    another number of rows, for targets without a dimension of the sequences that are cut, for a weight that is negative or not
    finite, and, in training, for a tensor that requires a gradient.
    """
    if isinstance(targets, Mapping):
        raise UsageError(
            "the targets are a dict; give a tensor, or a tuple of tensors, which is what the loss then gets for each "
            "micro-batch"
        )
    positional = as_inputs(inputs)
    arguments = {"the input": positional, "the targets": targets, **{f"keyword {k!r}": v for k, v in keywords.items()}}
    if torch.is_grad_enabled():
        _refuse_graphs(arguments)
    rows = batch_rows(positional)
    if weighing.weight is None and not weighing.shared_targets:
        _require_rows(targets, rows)
    if sum(sizes) != rows:
        raise UsageError(f"the micro-batches hold {sum(sizes)} rows, and the batch {rows}")
    if min(sizes) < 1:
        raise UsageError(
            f"a batch of {rows} rows cannot be split into {len(sizes)} micro-batches; give at least {len(sizes)} rows"
        )
    parts = _cut((positional, targets, keywords), sizes, rows)
    places: Sequence[SlicePlace | None] = (None,)
    if slices is not None:
        places = slices.places
        parts = [part for value, size in zip(parts, sizes, strict=True) for part in slices.cut(value, size)]
    units = [(at, place) for at in range(len(sizes)) for place in places]
    cut = slices is not None or context is not None
    if cut:
        length = _sequence_length(positional)
        spans = [(sizes[at], length if place is None else place.end - place.start) for at, place in units]
        _require_tokens(parts[0][1], spans[0], "ranks" if slices is None else f"{len(places)} slices", length)
        if context is not None:
            data = (_own_tokens(part[:2], span, context) for part, span in zip(parts, spans, strict=True))
            parts = [(*both, part[2]) for both, part in zip(data, parts, strict=True)]
    numbers = [number + at for at, _ in units]
    each_targets = [part[1] for part in parts]
    weights = _weights(targets, each_targets, [sizes[at] for at, _ in units], rows, weighing, cut, numbers)
    # The parts of the same number of rows, and of the same slice, have the same shapes.
    keys = [(sizes[at], place) for at, place in units]
    signatures = {key: signature((*i, *k.values())) for key, (i, _, k) in dict(zip(keys, parts, strict=True)).items()}
    return [
        BatchUnit(first, target, values | ({} if key[1] is None else {STATE: key[1]}), signatures[key], weight, *key)
        for key, (first, target, values), weight in zip(keys, parts, weights, strict=True)
    ]


@dataclass(frozen=True)
class SequenceSlices:
    """Slices into which the sequences of a batch are cut; `places`: of each."""

    places: tuple[SlicePlace, ...]

    @property
    def count(self) -> int:
        return len(self.places)

    @classmethod
    def of(
        cls, inputs: Any, count: int, tokens: Sequence[int] | None = None, multiple: int = 1, must_fit: bool = False
    ) -> SequenceSlices | None:
        """Return `count` slices of the sequences of `inputs`; None for 1.

        Args:
            tokens: those of each slice. None, or they do not add up to these sequences: as even as possible.
            multiple: of which even slices have a multiple of tokens.
            must_fit: whether `tokens` must add up to them.

        Raises UsageError for inputs without a dimension of sequences, and where they cannot be cut so.
        """
        if count == 1:
            return None
        length = _sequence_length(as_inputs(inputs))
        if count * multiple > length:
            near = length // multiple
            raise UsageError(f"sequences of {length} tokens cannot be cut into {count} slices; nearest: {near}")
        tokens = _fitting("slice_tokens", tokens, count, length, "tokens of a sequence", must_fit)
        if tokens is None:
            tokens = [size * multiple for size in even_sizes(length // multiple, count)]
        ends = list(accumulate(tokens))
        places = [SlicePlace(at, count, end - tokens[at], end, length) for at, end in enumerate(ends)]
        return cls(tuple(places))

    def cut(self, value: Any, rows: int) -> list[Any]:
        """Return each slice's part of a micro-batch: of a tensor [rows, length, …] the tokens; of tuples, lists and dicts by
        element.
        """
        if _is_of(value, (rows, self.places[0].length)):
            return [part.data for part in torch.split(value, [place.end - place.start for place in self.places], 1)]
        return _by_element(value, len(self.places), lambda item: self.cut(item, rows))


def _is_of(value: Any, shape: tuple[int, int]) -> bool:
    """Return whether a value is a tensor [rows, tokens, …] of this shape."""
    return isinstance(value, Tensor) and value.shape[:2] == shape


def _own_tokens(value: Any, shape: tuple[int, int], context: ContextParallel) -> Any:
    """Return a value with this rank's tokens of each tensor of this shape [rows, tokens]; of tuples, lists, dicts by element."""
    return mapped(value, Tensor, lambda each: context.own_tokens(each) if _is_of(each, shape) else each)


def _require_tokens(targets: Any, shape: tuple[int, int], where: str, length: int) -> None:
    """Raise UsageError for targets, of a first part of this shape, that are those of whole sequences."""
    for tensor in () if targets is None else tensors_in(targets):
        if not _is_of(tensor, shape):
            raise UsageError(
                f"the sequences of {length} tokens are cut into {where}, and the targets hold a tensor "
                f"[{', '.join(['rows', *map(str, tensor.shape[1:])])}]: give one for each token, [rows, {length}, …]"
            )


def _sequence_length(inputs: Sequence[Any]) -> int:
    """Return the second dimension of the first tensor that has two. Raises UsageError if none has."""
    problem = "the inputs hold no tensor with a dimension of a sequence, and the schedule cuts sequences into slices"
    return _first_tensor(inputs, 2, problem).size(1)


def _weights(
    targets: Any,
    parts: Sequence[Any],
    sizes: Sequence[int],
    rows: int,
    weighing: Weighing,
    cut: bool,
    numbers: Sequence[int],
) -> Sequence[float]:
    """Return the weight of each micro-batch, which have these numbers."""
    if targets is None:  # outputs only: there is no mean
        return [float(size) for size in sizes]
    if weighing.weight is not None:
        return [_given_weight(weighing.weight(part), at) for at, part in zip(numbers, parts, strict=True)]
    if cut:  # along the sequences
        return [count_targets(part, weighing.ignore_index) for part in parts]
    return _count_by_part(targets, sizes, rows, weighing.ignore_index)


def _given_weight(weight: float | Tensor, microbatch: int) -> float:
    """Return the value of the caller's `weight` as a number; NaN for a tensor on the meta device."""
    if isinstance(weight, Tensor) and weight.is_meta:
        return math.nan
    value: Any = weight
    try:
        value = number = float(weight)
    except (RuntimeError, TypeError, ValueError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise UsageError(
            f"weight(targets) is {echo(value)} for micro-batch {microbatch}; it must be a finite number of at least 0"
        )
    return number


def require_gradients() -> None:
    """Raise UsageError if a step is called with gradients turned off: it would have no backward."""
    if not torch.is_grad_enabled():
        raise UsageError(
            "a step is called where gradients are turned off (torch.no_grad or torch.inference_mode); evaluate(inputs, "
            "targets) computes the loss alone"
        )


def require_targets(method: str, targets: Any) -> None:
    """Raise UsageError if a method that computes a loss got no targets."""
    if targets is None:
        raise UsageError(
            f"{method} got no targets; predict(inputs) computes outputs only, and a loss that compares with the inputs "
            f"gets them as targets: {method}(inputs, inputs)"
        )


def _refuse_graphs(arguments: Mapping[str, Any]) -> None:
    for name, value in arguments.items():
        if any(each.requires_grad for each in tensors_in(value)):
            raise UsageError(
                f"{name} requires a gradient, and a step computes those of the pipeline's own parameters only: detach it, or "
                "make the module that computed it a layer of the pipeline"
            )


def _require_rows(targets: Any, rows: int) -> None:
    """Raise UsageError for a target tensor that a loss would broadcast over the samples."""
    for tensor in tensors_in(targets):
        if tensor.ndim and tensor.size(0) != rows:
            raise UsageError(
                f"the batch has {rows} rows, and the targets hold a tensor of shape {list(tensor.shape)}: give one row for "
                "each sample; if every micro-batch is meant to get all of it, pass RuntimeOptions(shared_targets=True), or "
                "weight= to the pipeline"
            )


def as_inputs(inputs: Any) -> tuple[Any, ...]:
    """Return the positional inputs of the first stage as a tuple. Raises UsageError for a dict."""
    if isinstance(inputs, Mapping):
        raise UsageError(
            "the inputs are a dict; give its tensors in the order of the first layer's arguments, as (a, b), and what "
            "layers take by name as keyword arguments"
        )
    return tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)


def chosen_sizes(inputs: Any, count: int, configured: Sequence[int] | None, must_fit: bool = False) -> tuple[int, ...]:
    """Return the rows of each of `count` micro-batches: the configured ones if they fit this batch, else as even as possible.

    Raises UsageError for others that `must_fit`.
    """
    rows = batch_rows(as_inputs(inputs))
    fitting = _fitting("microbatch_sizes", configured, count, rows, "rows", must_fit)
    return even_sizes(rows, count) if fitting is None else tuple(fitting)


def _fitting(
    option: str, sizes: Sequence[int] | None, count: int, total: int, things: str, must_fit: bool
) -> Sequence[int] | None:
    """Return the sizes that an option chooses if they are as many and as much as there is, else None."""
    if sizes is None or (len(sizes) == count and sum(sizes) == total):
        return sizes
    if must_fit:
        raise UsageError(
            f"{option} is {tuple(sizes)}, with the sum {sum(sizes)}; it must be {count} numbers with the sum {total}, the "
            f"batch's {things}, or None"
        )
    return None


def evaluation_microbatches(microbatches: int, inputs: Any) -> int:
    """Return the number of micro-batches of a forward pass: the schedule's, or fewer where the batch has fewer rows.

    Raises UsageError for a batch without rows.
    """
    rows = batch_rows(as_inputs(inputs))
    if not rows:
        raise UsageError("the batch has 0 rows: there is nothing to compute")
    return min(microbatches, rows)


def batch_rows(inputs: Sequence[Any]) -> int:
    """Return the first dimension of the first tensor that has one."""
    return _first_tensor(inputs, 1, "the inputs hold no tensor with a batch dimension").size(0)


def _cut(value: Any, sizes: Sequence[int], rows: int) -> list[Any]:
    """Return the parts of the micro-batches: rows of a tensor with one for each sample; tuples, lists and dicts by element."""
    if isinstance(value, Tensor) and value.ndim and value.size(0) == rows:
        if not is_strided(value):
            raise UsageError(
                f"a {layout_name(value)} tensor has a row for each sample; only dense ones are cut: give its parts"
            )
        # `data`: views of one tensor share a version counter, and a layer may change its own micro-batch in place
        return [part.data for part in torch.split(value, list(sizes))]
    return _by_element(value, len(sizes), lambda item: _cut(item, sizes, rows))


def _by_element(value: Any, count: int, cut: Callable[[Any], list[Any]]) -> list[Any]:
    """Return `count` parts of a tuple, list or dict, whose elements `cut` divides; of another value the value so many times."""
    if isinstance(value, Mapping):
        columns = {key: cut(item) for key, item in value.items()}
        return [{key: column[at] for key, column in columns.items()} for at in range(count)]
    if isinstance(value, (tuple, list)) and value:
        return [like(value, part) for part in zip(*map(cut, value), strict=True)]
    return [value] * count


def join(outputs: Sequence[Any]) -> Any:
    """Join the outputs of micro-batches: tensors are concatenated along dimension 0, tuples and dicts element by element.

    Outputs of other types are returned as a list if they differ from micro-batch to micro-batch.
    """
    first = outputs[0]
    if isinstance(first, Mapping):
        return {key: join([each[key] for each in outputs]) for key in first}
    if isinstance(first, Tensor):
        return torch.cat(list(outputs)) if first.ndim else torch.stack(list(outputs))
    if isinstance(first, (tuple, list)):
        return tuple(join(items) for items in zip(*outputs, strict=True))
    return first if all(each is first or each == first for each in outputs) else list(outputs)


def sum_over_replicas(weight: float, mesh: Mesh, device: torch.device, alarm: FailureReporter, order: int) -> float:
    """Return the sum of a number over the data-parallel replicas, the same on each; collective over them.

    Args:
        order: 20 bits for what this rank exchanges with other replicas in the step.

    Raises UsageError where `order` is not the same on all.
    """
    if mesh.dp.group is None:
        return weight
    has_gloo = "gloo" in str(dist.get_backend_config(mesh.dp.group))
    with alarm.waiting("the other replicas' numbers of targets"):
        numbers = torch.tensor([weight, order, order**2], dtype=torch.float64, device="cpu" if has_gloo else device)
        dist.all_reduce(numbers, group=mesh.dp.group)
        total, orders, squares = numbers.tolist()
    if mesh.dp.size * int(squares) != int(orders) ** 2:
        raise UsageError(
            "replicas exchange gradients, parameters or experts' tokens in each micro-batch, and theirs differ in number or "
            "order: give all of them as many micro-batches and one schedule"
        )
    return float(total)
