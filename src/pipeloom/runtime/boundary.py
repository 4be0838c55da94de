"""What crosses a boundary between two stages: tensors and None, their shapes, and the header that carries the shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeloom.errors import UsageError

HEADER_LENGTH = 256
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)

Values = tuple[Tensor | None, ...]


class TensorSpec(NamedTuple):
    """A tensor at a boundary; `carries`: a gradient comes back for it (it is floating and requires one)."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    carries: bool

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)


Boundary = tuple[TensorSpec | None, ...]


def as_values(result: Any, where: str) -> Values:
    """A layer's result as a tuple of tensors and None; raises UsageError that names `where` for anything else."""
    values = tuple(result) if isinstance(result, (tuple, list)) else (result,)
    for value in values:
        if value is not None and not isinstance(value, Tensor):
            raise UsageError(
                f"{where} returned {type(value).__name__}; a boundary carries tensors and None, alone or in a tuple"
            )
    return values


def boundary_of(values: Values) -> Boundary:
    """The specs of these values."""
    return tuple(
        None
        if v is None
        else TensorSpec(v.dtype, tuple(v.shape), v.requires_grad and (v.is_floating_point() or v.is_complex()))
        for v in values
    )


def gradients_of(boundary: Boundary) -> Boundary:
    """The specs of the gradient message that answers a message of `boundary`: one for each tensor that carries one."""
    return tuple(spec for spec in boundary if spec is not None and spec.carries)


def encode(boundary: Boundary) -> Tensor:
    """The boundary as HEADER_LENGTH int64 numbers; raises UsageError when it does not fit."""
    numbers = [len(boundary)]
    for spec in boundary:
        if spec is None:
            numbers.append(-1)
        elif spec.dtype not in _DTYPES:
            raise UsageError(f"a tensor of dtype {spec.dtype} cannot cross a boundary")
        else:
            numbers += [_DTYPES.index(spec.dtype), int(spec.carries), len(spec.shape), *spec.shape]
    if len(numbers) > HEADER_LENGTH:
        raise UsageError(
            f"a boundary of {len(boundary)} tensors does not fit its header; pass fewer between two stages"
        )
    return torch.tensor(numbers + [0] * (HEADER_LENGTH - len(numbers)), dtype=torch.int64)


def decode(header: Tensor) -> Boundary:
    """The inverse of `encode`."""
    numbers = iter(header.tolist())
    specs: list[TensorSpec | None] = []
    for _ in range(next(numbers)):
        kind = next(numbers)
        if kind < 0:
            specs.append(None)
        else:
            carries, ndim = bool(next(numbers)), next(numbers)
            specs.append(TensorSpec(_DTYPES[kind], tuple(next(numbers) for _ in range(ndim)), carries))
    return tuple(specs)


def words(boundary: Boundary) -> str:
    """The boundary for a message to a person."""
    shown = ["None" if s is None else f"{str(s.dtype).removeprefix('torch.')}{list(s.shape)}" for s in boundary]
    return f"({', '.join(shown)})"


def signature(values: Sequence[Any]) -> tuple[Any, ...]:
    """Shapes and dtypes of a micro-batch's inputs: equal signatures make equal boundaries, unless the data decides."""
    return tuple((v.dtype, tuple(v.shape)) if isinstance(v, Tensor) else type(v) for v in values)
