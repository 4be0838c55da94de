"""Comparison of tensors: checksums of their bits, computed on their device, the number of changes in place, and storages.

Equal tensors have equal checksums, and a flipped bit changes them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_ROW = 1024  # 8-byte words that are summed first: rows keep a core's vector units busy, and their number stays small

_SMALL_BYTES = 2**18  # smaller tensors are copied into one: calls would cost more than the copy


def version_of(tensor: Tensor) -> int:
    """Return how often the tensor's memory was changed in place; 0 for one made in inference mode, where it is not counted."""
    # torch has no public name for the counter with which autograd itself finds such changes.
    return 0 if tensor.is_inference() else tensor._version


def storage_key(tensor: Tensor) -> int:
    """Return a number that tensors of one storage share, as long as one of them lives."""
    # The address of the storage object: the public one, of its memory, is 0 on the meta device.
    return int(tensor.untyped_storage()._cdata)


def checksums(tensors: Sequence[Tensor]) -> list[int]:
    """Return the checksum of each tensor, all in one transfer to the host."""
    sums = [joint_checksum([tensor]).to(tensors[0].device) for tensor in tensors]
    values: list[int] = torch.stack(sums).tolist() if sums else []
    return values


@torch.no_grad()
def joint_checksum(tensors: Sequence[Tensor]) -> Tensor:
    """One checksum for all tensors of a device, in order, whatever their strides: int64, 0-dim, on the device.

    A sum modulo 2^64 of the memory's words, each row of 8 KB multiplied by an odd number of its own: any one flipped bit
    changes it, and so does the order of rows. Fast even for many small tensors.
    """
    plain = [tensor.detach().resolve_conj().resolve_neg() for tensor in tensors if tensor.nbytes <= _SMALL_BYTES]
    small = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in plain]
    parts = [tensor for tensor in tensors if tensor.nbytes > _SMALL_BYTES]
    if small:
        parts.append(torch.cat(small))
    sums = torch.cat([row for part in parts for row in _row_sums(part)])
    return (sums * torch.arange(1, 2 * sums.numel(), 2, device=sums.device)).sum()


def message_checksum(values: Sequence[Tensor | None]) -> int:
    """Return one checksum for several tensors in order; None is skipped."""
    tensors = [value for value in values if value is not None]
    return int(joint_checksum(tensors)) if tensors else 0


def _row_sums(tensor: Tensor) -> list[Tensor]:
    """Return the sums of a tensor's rows of 8 KB, of the words behind them, and of the bytes behind those, if any."""
    data = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    if data.storage_offset() % 8:
        data = data.clone()
    whole = data.numel() // 8 * 8
    words, rest = data[:whole].view(torch.int64), data[whole:]
    aligned = words.numel() // _ROW * _ROW
    sums = [words[:aligned].view(-1, _ROW).sum(1), words[aligned:].sum().view(1)]
    if rest.numel():
        sums.append((rest.long() << torch.arange(0, 8 * rest.numel(), 8, device=rest.device)).sum().view(1))
    return sums
