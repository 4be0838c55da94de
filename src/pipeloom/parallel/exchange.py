"""Exchange of structured values between processes, as JSON and tensors, never as pickles.

Loading a pickle executes code, so anyone who can write to a connection could run code here. Pipeloom sends JSON as bytes, and
tensors with their dtypes and shapes as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeloom.errors import DistributedError, UsageError
from pipeloom.parallel.collectives import Tag


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# The dtypes of what is sent between ranks, by name; their order is part of headers.
SENT_DTYPES = {
    _name_of(dtype): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


def all_gather_json(value: Any, group: Any) -> list[Any]:
    """Return the values of all processes of `group`, in the order of their ranks in it. Collective over the group.

    Args:
        value: a JSON-serializable value. Tuples arrive as lists, dict keys as strings; finite floats arrive exactly.
    """
    data = _to_bytes(value, group)
    sizes = [torch.zeros(1, dtype=torch.int64, device=data.device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([data.numel()], device=data.device), group=group)
    lengths = [int(size) for size in sizes]
    padded = data.new_zeros(max(lengths))
    padded[: data.numel()] = data
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded, group=group)
    return [_from_bytes(part[:length]) for part, length in zip(parts, lengths, strict=True)]


def broadcast_json(value: Any, group: Any, source: int) -> Any:
    """Return the value of global rank `source`; the values of other ranks are ignored. Collective over the group."""
    encoded = _to_bytes(value if dist.get_rank() == source else None, group)
    size = torch.tensor([encoded.numel()], device=encoded.device)
    dist.broadcast(size, source, group=group)
    data = encoded if dist.get_rank() == source else encoded.new_empty(int(size))
    dist.broadcast(data, source, group=group)
    return _from_bytes(data)


def all_gather_tree(value: Any, group: Any, device: torch.device) -> list[Any]:
    """Return the values of all processes of `group`, with their tensors on `device`. Collective over the group.

    Args:
        value: tensors, numbers, strings and None, alone or nested in tuples, lists, and dicts with string keys.
    Raises:
        UsageError: a value has another type, or a tensor an unsupported dtype.
    """
    return _exchange_trees(value, group, None, device)


def gather_tree(value: Any, group: Any, destination: int) -> list[Any] | None:
    """Return the values of all processes of `group` on global rank `destination`, their tensors on the CPU; None elsewhere.

    `value` is as for `all_gather_tree`. Collective over the group.
    """
    trees = _exchange_trees(value, group, destination, torch.device("cpu"))
    return trees if dist.get_rank() == destination else None


def _exchange_trees(value: Any, group: Any, destination: int | None, device: torch.device) -> list[Any]:
    """Return the values of all processes on rank `destination`, or on all ranks (None); an empty list on other ranks."""
    own_tensors: list[Tensor] = []
    described = _describe(value, own_tensors), [(_name_of(each.dtype), list(each.shape)) for each in own_tensors]
    me, trees = dist.get_rank(), []
    for index, (shape, specs) in enumerate(all_gather_json(described, group)):
        source = dist.get_global_rank(group, index)
        if me == source:
            tensors = [tensor.detach().to(_device(group)).contiguous() for tensor in own_tensors]
        elif destination in (None, me):
            tensors = [torch.empty(size, dtype=SENT_DTYPES[name], device=_device(group)) for name, size in specs]
        else:
            continue
        for tensor in tensors:
            data = tensor.view(-1).view(torch.uint8)  # as bytes, because gloo does not support every dtype
            if destination is None and data.numel():
                dist.broadcast(data, source, group=group)
            elif source != destination and data.numel():
                if me == source:
                    dist.send(data, destination, group=group, tag=Tag.ROWS)
                else:
                    dist.recv(data, source, group=group, tag=Tag.ROWS)
        if destination in (None, me):
            trees.append(_build(shape, iter([tensor.to(device) for tensor in tensors])))
    return trees


def _device(group: Any) -> torch.device:
    """Return the device that the group's backend sends from: the CPU if the group has gloo."""
    if "gloo" in str(dist.get_backend_config(group)):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _to_bytes(value: Any, group: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(_device(group))


def _from_bytes(data: Tensor) -> Any:
    try:
        return json.loads(bytes(data.tolist()))
    except ValueError as error:
        raise DistributedError(f"another rank sent {data.numel()} bytes that are not JSON: {error}") from None


def _describe(value: Any, tensors: list[Tensor]) -> Any:
    """Return `value` as JSON without its tensors, which are appended to `tensors`."""
    if isinstance(value, Tensor):
        if _name_of(value.dtype) not in SENT_DTYPES:
            raise UsageError(f"a tensor of dtype {value.dtype} cannot be sent; known: {', '.join(SENT_DTYPES)}")
        tensors.append(value)
        return {"tensor": None}
    if isinstance(value, (tuple, list)):
        return {"tuple" if isinstance(value, tuple) else "list": [_describe(item, tensors) for item in value]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _describe(item, tensors) for key, item in value.items()}}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"value": value}
    raise UsageError(
        f"a {type(value).__name__} cannot be sent to another rank; it takes tensors, numbers, texts and None, in tuples, "
        "lists, and dicts with texts as keys"
    )


def _build(shape: Any, tensors: Iterator[Tensor]) -> Any:
    """Return the value from its description and tensors; the inverse of `_describe`."""
    ((kind, inner),) = shape.items()
    if kind == "tensor":
        return next(tensors)
    if kind == "value":
        return inner
    if kind == "dict":
        return {key: _build(item, tensors) for key, item in inner.items()}
    items = [_build(item, tensors) for item in inner]
    return tuple(items) if kind == "tuple" else items
