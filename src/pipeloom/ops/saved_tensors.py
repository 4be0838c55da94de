"""Tensors that autograd saves, held by hooks: with the version check that torch leaves out where there are hooks."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeloom.errors import UsageError
from pipeloom.ops.checksum import version_of


class SavedTensor:
    """Stand-in of a graph for a tensor that it saves.

    Args:
        tensor: None: it is not there yet.
        bring: called where it is needed and not there: sets `held`, or raises. None: an action of the schedule sets `held`.

    Attributes:
        held: the tensor without its graph, and the version in which it is needed.
    """

    __slots__ = ("__weakref__", "bring", "held")

    def __init__(self, tensor: Tensor | None, bring: Callable[[], Any] | None = None) -> None:
        # An output of the node that saves it would hold the node: a cycle that outlives every graph without a backward.
        self.held: tuple[Tensor, int] | None
        self.held = None if tensor is None else (tensor if tensor.is_leaf else tensor.detach(), version_of(tensor))
        self.bring = bring

    def value(self) -> Tensor:
        """Return the tensor. Raises RuntimeError, as torch does without hooks, if it was changed in place."""
        held = self.held  # once: a copy to host memory in another thread may let go of it
        if held is None:
            if self.bring is None:
                raise UsageError(
                    "a layer computes gradients in its forward, and what it needs for them is recomputed by an action of its own "
                    "(R), whose forward saves nothing: recompute it in blocks (R;B)"
                )
            self.bring()
            held = self.held
            assert held is not None
        tensor, version = held
        require_version(tensor, version)
        return tensor


def require_version(tensor: Tensor, version: int, note: str = "") -> None:
    """Raise torch's own RuntimeError if `tensor`, needed in this version, was changed in place."""
    if version_of(tensor) != version:
        error = RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.type()} {[*tensor.shape]}] is at version {version_of(tensor)}; expected version {version} instead."
        )
        if note:
            error.add_note(note)
        raise error


def saving(pack: Callable[[Tensor], SavedTensor]) -> torch.autograd.graph.saved_tensors_hooks:
    """Return the context of computations whose saved tensors the graph holds as `pack` returns them."""
    return torch.autograd.graph.saved_tensors_hooks(pack, SavedTensor.value)


class SavedView(NamedTuple):
    """Place in its storage of a saved tensor that is to come back with another storage."""

    saved: weakref.ref[SavedTensor]
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, saved: SavedTensor, tensor: Tensor) -> SavedView:
        """Return the place of `tensor`, which `saved` stands for."""
        return cls(weakref.ref(saved), tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride())

    def fill(self, storage: torch.UntypedStorage) -> None:
        """Let the saved tensor be one of `storage`, if it is missing and the graph that holds it is alive."""
        saved = self.saved()
        if saved is not None and saved.held is None:
            tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
            saved.held = tensor.set_(storage, self.offset, self.size, self.stride), version_of(tensor)


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is all that its storage and its place there say."""
    return type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()
