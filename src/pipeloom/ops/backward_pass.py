"""A backward pass from the places in a graph where a stage's forward has ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge


def run_backward(
    roots: Sequence[GradientEdge | Tensor], gradients: Sequence[Tensor | None], trusted: bool = False
) -> None:
    """Do what `torch.autograd.backward(roots, gradients)` does.

    torch's argument checks take a quarter of the time of a pass through few layers. A stage whose gradients come from the next
    stage can skip them: each is the gradient of a leaf made from the output, so it has the output's shape and dtype.

    Args:
        roots: outputs as their places in the graph, and losses (0-dim).
        gradients: one for each root; None for a loss.
        trusted: whether the gradients are certain to have the shapes and dtypes of the outputs.
    """
    # The function that torch.autograd.backward calls after its checks: an internal name, which a new torch may remove.
    engine: Any = getattr(torch.autograd.graph, "_engine_run_backward", None)
    if not trusted or engine is None or any(isinstance(root, Tensor) and type(root) is not Tensor for root in roots):
        torch.autograd.backward(roots, gradients)  # type: ignore[arg-type]
        return
    given = tuple(
        [
            torch.ones_like(root) if gradient is None and isinstance(root, Tensor) else gradient
            for root, gradient in zip(roots, gradients, strict=True)
        ]
    )
    engine(tuple(roots), given, False, False, (), allow_unreachable=True, accumulate_grad=True)
