"""Recomputation: a layer's forward keeps its inputs only, and runs again when its backward comes (arXiv 1604.06174)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def recomputed(run: Callable[..., Any], values: tuple[Any, ...], module: nn.Module) -> Any:
    """`run(*values)`, whose results know their gradient without what was computed on the way being kept.

    The second run draws the same random numbers as the first, and leaves the buffers of `module` as they were before it:
    what counts or averages in a forward counts once.
    """
    if not torch.is_grad_enabled():
        return run(*values)
    contexts = partial(_contexts, list(module.buffers()))
    return checkpoint(run, *values, use_reentrant=False, context_fn=contexts)


def _contexts(buffers: list[Tensor]) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), (_unchanged(buffers) if buffers else nullcontext())


@contextmanager
def _unchanged(buffers: list[Tensor]) -> Iterator[None]:
    before = [(buffer, buffer.detach().clone(), buffer._version) for buffer in buffers]
    try:
        yield
    finally:  # the second run is stopped by an exception once it has all that is needed
        with torch.no_grad():
            for buffer, value, version in before:
                if buffer._version != version:
                    buffer.copy_(value)
