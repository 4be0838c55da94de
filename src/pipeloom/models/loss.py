"""The loss of a language model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from pipeloom.decoder_shape import DecoderShape
from pipeloom.parallel import vocabulary
from pipeloom.parallel.tensor import TensorParallel, if_parallel


def cross_entropy(logits: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """The mean over all targets of -log p(target), in nats: 0-dim, fp32 (fp64 for fp64 logits).

    Args:
        logits: [batch, length, vocabulary].
        targets: [batch, length], int64.
        label_smoothing: the share of each target that is spread over the whole vocabulary.
    """
    wide = logits.flatten(0, -2)
    wide = wide if wide.dtype.itemsize == 8 else wide.float()
    return F.cross_entropy(wide, targets.flatten(), label_smoothing=label_smoothing)


def token_loss(
    shape: DecoderShape, label_smoothing: float = 0.0, tensor: TensorParallel | None = None
) -> Callable[[Tensor, Tensor], Tensor]:
    """`cross_entropy` of what the decoder's last layer puts out: under `tensor`, each rank's part of the logits."""
    cut = if_parallel(tensor)
    if cut is None:
        return partial(cross_entropy, label_smoothing=label_smoothing)
    return partial(vocabulary.cross_entropy, tensor=cut, vocabulary=shape.vocab_size, label_smoothing=label_smoothing)
