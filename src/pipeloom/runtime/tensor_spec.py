"""Values sent between two stages: tensors and None, their shapes, and the header that carries the shapes.

Only strided tensors are sent: not sparse and nested ones, nor subclasses that wrap other tensors.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor  # public by its name only

from pipeloom.errors import UsageError
from pipeloom.ops.nested import tensors_in
from pipeloom.parallel.exchange import SENT_DTYPES
from pipeloom.schedule.actions import OUTPUT
from pipeloom.schedule.channels import Edge, Message

HEADER_LENGTH = 256  # numbers: a receive is posted before the sender knows its shapes, so all headers have one length
_MOST_SIGNATURES = 4096  # remembered: steps of unequal micro-batches always bring new ones
_BOUNDARY_DTYPES = tuple(SENT_DTYPES.values())

BoundaryValues = tuple[Tensor | None, ...]


class TensorSpec(NamedTuple):
    """Spec of a tensor that is sent between stages.

    Attributes:
        carries: whether a gradient is sent back for it (it is floating or complex and requires one).
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    carries: bool

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)


TensorSpecs = tuple[TensorSpec | None, ...]


def as_values(result: Any, where: str) -> BoundaryValues:
    """Return a layer's result as a tuple of tensors and None. Raises UsageError that names `where` for anything else."""
    if isinstance(result, Tensor):
        return (result,)
    values = tuple(result) if isinstance(result, (tuple, list)) else (result,)
    for value in values:
        if value is not None and not isinstance(value, Tensor):
            raise UsageError(
                f"{where} returned {type(value).__name__}; between stages only tensors and None can be sent, alone or in a tuple"
            )
    return values


def require_plain(values: Iterable[Tensor | None], where: str) -> None:
    """Raise UsageError that names `where` for a tensor that cannot be rebuilt on another rank from its elements alone.

    Nested and sparse tensors are not one block of memory. A tensor of a subclass would arrive as a plain one, or not, depending
    on where the model is divided. torch's result of an unfinished collective is allowed: it becomes a plain tensor.
    """
    for value in values:
        if value is None:
            continue
        if not is_strided(value):
            raise UsageError(
                f"{where} returned a {layout_name(value)} tensor; between stages only dense tensors can be sent: return its parts"
            )
        if type(value) is not Tensor and not isinstance(value, (nn.Parameter, nn.Buffer, AsyncCollectiveTensor)):
            raise UsageError(
                f"{where} returned a {type(value).__name__}, a subclass of torch.Tensor; between stages only plain tensors can "
                "be sent: return value.as_subclass(torch.Tensor), and make the subclass again where it is read"
            )


def boundary_of(values: BoundaryValues) -> TensorSpecs:
    """Return the specs of these values."""
    specs = [  # a generator would double the cost
        None
        if v is None
        else TensorSpec(v.dtype, tuple(v.shape), v.requires_grad and (v.is_floating_point() or v.is_complex()))
        for v in values
    ]
    return tuple(specs)


def encode(boundary: TensorSpecs) -> Tensor:
    """Return the specs as HEADER_LENGTH int64 numbers. Raises UsageError if they do not fit, or for an unsupported dtype."""
    numbers = to_numbers(boundary)
    if len(numbers) > HEADER_LENGTH:
        raise UsageError(
            f"{len(boundary)} tensors with these shapes do not fit the header of a message; pass fewer between two stages"
        )
    return torch.tensor(numbers + [0] * (HEADER_LENGTH - len(numbers)), dtype=torch.int64)


def to_numbers(boundary: TensorSpecs) -> list[int]:
    """Return the specs as integers: the number of values, then -1 for None, or dtype, marks, dimensions and sizes."""
    numbers = [len(boundary)]
    for spec in boundary:
        if spec is None:
            numbers.append(-1)
        elif spec.dtype not in _BOUNDARY_DTYPES:
            raise UsageError(f"a tensor of dtype {spec.dtype} cannot be sent between stages")
        else:
            numbers += [_BOUNDARY_DTYPES.index(spec.dtype), int(spec.carries), len(spec.shape), *spec.shape]
    return numbers


def decode(header: Tensor) -> TensorSpecs:
    """The inverse of `encode`."""
    return from_numbers(header.tolist())


def from_numbers(flat: Iterable[int]) -> TensorSpecs:
    """The inverse of `to_numbers`; numbers after the last one needed are ignored."""
    numbers = iter(flat)
    specs: list[TensorSpec | None] = []
    for _ in range(next(numbers)):
        kind = next(numbers)
        if kind < 0:
            specs.append(None)
        else:
            carries, ndim = bool(next(numbers)), next(numbers)
            shape = tuple(next(numbers) for _ in range(ndim))
            specs.append(TensorSpec(_BOUNDARY_DTYPES[kind], shape, carries))
    return tuple(specs)


def describe(boundary: TensorSpecs) -> str:
    """Return the specs for error messages."""
    specs = [
        "None" if s is None else f"{str(s.dtype).removeprefix('torch.')}{list(s.shape)}{' with a gradient' * s.carries}"
        for s in boundary
    ]
    return f"({', '.join(specs)})"


def signature(values: Sequence[Any]) -> tuple[Any, ...]:
    """Return the shapes and dtypes of a micro-batch's inputs: equal ones give equal specs, unless those depend on the data."""
    return tuple([None if each is None else tuple([(t.dtype, t.shape) for t in tensors_in(each)]) for each in values])


class ShapeCache:
    """Specs by (edge, shape of the step's inputs), or by (edge, micro-batch) if shapes are sent with every message.

    Where sequences are cut, each slice of a micro-batch is one here.

    A gradient message has the shapes of the activations. The header of the first one tells which of them have no gradient: the
    next stage may have detached them, and then the layers before get no gradient, as in one process.
    """

    def __init__(self, policy: Literal["once", "each"]) -> None:
        self.policy = policy
        self._known: dict[tuple[Edge, int], TensorSpecs] = {}
        self._without: dict[tuple[Edge, int], tuple[int, ...]] = {}
        self._introduced: set[tuple[str, Edge, int]] = set()
        self._numbers: dict[Hashable, int] = {}  # numbers of input signatures, which are slow to hash
        self._signatures: Sequence[int] = ()
        self._slices = 1

    def begin(self, signatures: Sequence[Hashable], slices: int = 1) -> None:
        """Start a step whose micro-batches have these input signatures; `slices` of each in turn."""
        self._slices = slices
        if self.policy == "each" or len(self._numbers) > _MOST_SIGNATURES:  # on both ends of a channel in the same step
            for held in (self._known, self._without, self._introduced, self._numbers):
                held.clear()
        if self.policy == "once":
            self._signatures = [self._numbers.setdefault(each, len(self._numbers)) for each in signatures]

    def _key(self, edge: Edge, microbatch: int) -> tuple[Edge, int]:
        return edge, (microbatch if self.policy == "each" else self._signatures[microbatch])

    def unit(self, message: Message) -> int:
        """Return the number of the micro-batch of `message`, or of its slice."""
        return message.microbatch if message.slice is None else message.microbatch * self._slices + message.slice

    def needs_header(self, message: Message) -> bool:
        """Return whether `message` is the first of its key on its channel and so has a header. Call it once per message."""
        key = (message.channel.kind, *self._key(message.edge, self.unit(message)))
        first = key not in self._introduced
        self._introduced.add(key)
        return first

    def of(self, message: Message) -> TensorSpecs | None:
        """Return the specs of the tensors of `message`, or None if they are not known yet.

        One of gradients has those of each tensor that carries one.
        """
        boundary = self._known.get(self._key(message.edge, self.unit(message)))
        if boundary is None or message.channel.kind == "activation":
            return boundary
        return tuple(spec for spec in boundary if spec is not None and spec.carries)

    def missing_gradients(self, message: Message) -> tuple[int, ...] | None:
        """Return the positions in a gradient message without a gradient; None if its first header has not been read yet."""
        return self._without.get(self._key(message.edge, self.unit(message)))

    def set_missing_gradients(self, message: Message, without: tuple[int, ...]) -> None:
        """Remember that gradient messages like `message` have no gradient at these positions."""
        self._without[self._key(message.edge, self.unit(message))] = without

    def require_same_missing(self, message: Message, without: tuple[int, ...]) -> None:
        """Raise UsageError for a gradient where the first such message had none: its reader would drop it."""
        promised = self.missing_gradients(message)
        if promised and not set(promised) <= set(without):
            edge = message.edge
            what = "the input" if edge.name == OUTPUT else f"tensor {edge.name!r} as an input"
            raise UsageError(
                f"{what} of stage {edge.consumer} has a gradient for micro-batch {message.microbatch}; for inputs of the "
                f'same shape it had none before: it depends on the data, so set shapes = "each" in RuntimeOptions'
            )

    def remember(self, edge: Edge, microbatch: int, boundary: TensorSpecs) -> None:
        """Remember the specs of the values on `edge` for `microbatch`. Raises UsageError if they differ from earlier ones."""
        key = self._key(edge, microbatch)
        known = self._known.setdefault(key, boundary)
        if known != boundary:
            what = "the output" if edge.name == OUTPUT else f"tensor {edge.name!r}"
            raise UsageError(
                f"{what} of stage {edge.producer} for micro-batch {microbatch} is {describe(boundary)}; for inputs of the same "
                f'shape it was {describe(known)}: set shapes = "each" in RuntimeOptions if that depends on the data; build a new '
                "pipeline if layers were frozen or unfrozen, or autocast switched, between steps"
            )


def is_strided(value: Tensor) -> bool:
    """Return whether a tensor is a view of one block of memory."""
    return value.layout is torch.strided and not value.is_nested


def memory_of(value: Tensor) -> int | None:
    """Return the address of a tensor's storage; None for one that has none of its own, as wrappers such as quantized weights."""
    if not is_strided(value) or value.is_meta:
        return None
    try:
        return value.untyped_storage().data_ptr()
    except RuntimeError:
        return None


def layout_name(value: Tensor) -> str:
    """Return in a word what a tensor is: its layout, such as "strided", "nested" or "sparse_coo", or the class of a wrapper."""
    if is_strided(value) and not value.is_meta and memory_of(value) is None:
        return type(value).__name__
    return "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
