"""The loss of a language model."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over all targets of -log p(target), in nats: 0-dim, fp32 (fp64 for fp64 logits).

    Args:
        logits: [batch, length, vocabulary].
        targets: [batch, length], int64.
    """
    wide = logits.flatten(0, -2)
    return F.cross_entropy(wide if wide.dtype.itemsize == 8 else wide.float(), targets.flatten())
