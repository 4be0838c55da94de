"""AdamW over one rank's parameters, and the gradient norm over all of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from pipeloom.config.sections import OptimizerSection


def make_optimizer(
    parameters: Iterable[tuple[str, nn.Parameter]], options: OptimizerSection
) -> torch.optim.AdamW | None:
    """AdamW (arXiv 1711.05101) that decays matrices and leaves vectors alone; None for a rank without parameters."""
    trained = [parameter for _, parameter in parameters if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim >= 2]
    vectors = [parameter for parameter in trained if parameter.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": options.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    filled = [group for group in groups if group["params"]]
    return torch.optim.AdamW(filled, lr=options.lr, betas=options.betas, eps=1e-8, fused=True) if filled else None


def set_rate(optimizer: torch.optim.Optimizer | None, rate: float) -> None:
    for group in optimizer.param_groups if optimizer is not None else ():
        group["lr"] = rate


def square_norm(gradients: Sequence[Tensor]) -> float:
    """The sum of the squares of all elements, summed over tensors in fp64."""
    if not gradients:
        return 0.0
    wide = max((gradient.dtype for gradient in gradients), key=lambda dtype: dtype.itemsize)
    norms = torch._foreach_norm(list(gradients), 2, dtype=wide if wide.itemsize > 4 else torch.float32)
    return float(torch.stack(norms).double().square().sum())


def global_norm(squares: Sequence[float]) -> float:
    """The norm over all ranks from each rank's `square_norm`, in rank order: added in that order, so that all get the same."""
    total = 0.0
    for square in squares:
        total += square
    return math.sqrt(total)


def clip(gradients: Sequence[Tensor], norm: float, most: float) -> None:
    """Scales the gradients by most / norm where the global `norm` is above `most`; `most` 0 never clips."""
    if most > 0 and norm > most:
        torch._foreach_mul_(list(gradients), most / norm)
