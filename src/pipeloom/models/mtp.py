"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): blocks behind the last one predict tokens further ahead.

At depth k = 1, 2, … the hidden states of depth k - 1 (at 0 those of the model) are joined with the embeddings of the tokens k
places ahead and pass through one more block; the model's output layer turns the result into logits of the tokens k + 1 places
ahead. The blocks are for training alone: evaluation and generation skip them.

A shift along the sequence crosses the borders of whatever a sequence is cut into, so it is done to whole rows of token numbers,
before anything is cut (`ahead`), and never to activations.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.models.decoder import Block, Head, RMSNorm
from pipeloom.ops.layer import LossTerm, MicrobatchContext, SharesTokens
from pipeloom.ops.slices import SliceState
from pipeloom.parallel.expert import PartialSumLinear
from pipeloom.parallel.tensor import TensorParallel
from pipeloom.parallel.vocabulary import IGNORED, VocabularyEmbedding
from pipeloom.shapes.decoder import DecoderShape


def ahead(tokens: Tensor, targets: Tensor, depth: int, position_ids: Tensor | None = None) -> dict[str, Tensor]:
    """Return the keyword arguments that a step of a model with `depth` prediction blocks takes, of whole rows.

    `mtp_tokens` [batch, length, depth] int64: the tokens 1, …, `depth` places ahead, 0 behind the end of a row. `mtp_targets` of
    that shape: their targets, or -100 behind the end of a row or document, and where the target there or that of the place itself
    is -100.

    Args:
        tokens, targets: [batch, length], int64.
        position_ids: [batch, length], each token's position in its document; None: each row is one document.
    """
    shifted_tokens, shifted_targets = [], []
    for distance in range(1, depth + 1):
        inside, wanted = tokens.new_zeros(tokens.shape), torch.full_like(targets, IGNORED)
        if distance < tokens.shape[1]:
            inside[:, :-distance] = tokens[:, distance:]
            counts = targets[:, :-distance] != IGNORED
            if position_ids is not None:
                counts &= position_ids[:, distance:] == position_ids[:, :-distance] + distance
            wanted[:, :-distance] = targets[:, distance:].masked_fill(~counts, IGNORED)
        shifted_tokens.append(inside)
        shifted_targets.append(wanted)
    return {"mtp_tokens": torch.stack(shifted_tokens, -1), "mtp_targets": torch.stack(shifted_targets, -1)}


def embedding_name(depth: int) -> str:
    """Return the name of the tensor with the embeddings of the tokens `depth` places ahead."""
    return f"mtp_embedding_{depth}"


def hidden_name(depth: int) -> str:
    """Return the name of the tensor with the hidden states of prediction block `depth`, from 1."""
    return f"mtp_hidden_{depth}"


def term_name(depth: int) -> str:
    """Return the key of the loss of prediction block `depth`, from 1."""
    return f"mtp_{depth}"


Embeddings = tuple[Tensor, dict[str, Tensor | None]]
"""Embeddings [batch, length, width], and by name those of the tokens ahead, None where there are none."""


def _own(layer: SharesTokens, ahead: Tensor | None) -> Tensor | None:
    """Return what a keyword argument says of the tokens at hand."""
    return ahead if ahead is None or layer.context is None else layer.context.own_tokens(ahead)


class _LooksAhead(SharesTokens):
    """Embedding of tokens [batch, length] and of those ahead of them, `mtp_tokens` [batch, length, depth]."""

    depth: int

    def forward(self, tokens: Tensor, mtp_tokens: Tensor | None = None) -> Embeddings:
        look_up: Callable[[Tensor], Tensor] = super().forward  # type: ignore[misc]
        names = [embedding_name(distance) for distance in range(1, self.depth + 1)]
        if (mtp_tokens := _own(self, mtp_tokens)) is None:
            return look_up(tokens), dict.fromkeys(names)
        whole = look_up(torch.cat((tokens, *mtp_tokens.unbind(-1))))  # one look-up, and so one sum over tp ranks
        here, *others = whole.chunk(1 + self.depth)
        return here, dict(zip(names, others, strict=True))


class EmbeddingAhead(_LooksAhead, nn.Embedding):  # type: ignore[misc]
    """The same of a whole weight."""


class VocabularyEmbeddingAhead(_LooksAhead, VocabularyEmbedding):  # type: ignore[misc]
    """The same with this rank's rows of the weight."""


class PredictionBlock(nn.Module):
    """One depth of multi-token prediction; it passes the model's hidden states on unchanged.

    Parameters are called as in DeepSeek's checkpoints (`enorm`, `hnorm`, `eh_proj`), those of the block `block.*`.
    """

    def __init__(self, shape: DecoderShape, block: Block, tensor: TensorParallel | None = None) -> None:
        super().__init__()
        part_of_tokens = tensor is not None and tensor.sequence
        self.enorm = RMSNorm(shape.hidden_size, part_of_tokens, shape.rms_norm_eps)
        self.hnorm = RMSNorm(shape.hidden_size, part_of_tokens, shape.rms_norm_eps)
        ranks = tensor if part_of_tokens else None
        self.eh_proj = PartialSumLinear(2 * shape.hidden_size, shape.hidden_size, None, ranks)
        self.block = block

    def forward(
        self,
        x: Tensor,
        embedding: Tensor | None = None,
        hidden: Tensor | None = None,
        microbatch: MicrobatchContext | None = None,
        position_ids: Tensor | None = None,
        slice_state: SliceState | None = None,
    ) -> tuple[Tensor, dict[str, Tensor | None]]:
        """x, and under `hidden` the hidden states of this depth; all [batch, length, width].

        Args:
            embedding: that of the tokens ahead; None: nothing is predicted.
            hidden: the hidden states of the depth before; None: they are x.
        """
        if embedding is None:
            return x, {"hidden": None}
        joined = torch.cat((self.enorm(embedding), self.hnorm(x if hidden is None else hidden)), -1)
        return x, {"hidden": self.block(self.eh_proj(joined), microbatch, position_ids, slice_state)}


class PredictionHead(SharesTokens, Head):
    """Output layer of a model with prediction blocks: logits, and for each of them its logits and targets."""

    def __init__(self, shape: DecoderShape, tensor: TensorParallel | None = None) -> None:
        super().__init__(shape, tensor)
        part_of_tokens = tensor is not None and tensor.sequence
        self.mtp_norms = nn.ModuleList(
            RMSNorm(shape.hidden_size, part_of_tokens, shape.rms_norm_eps)
            for _ in range(shape.num_nextn_predict_layers)
        )

    def forward(  # type: ignore[override]
        self, x: Tensor, mtp_targets: Tensor | None = None, **hidden: Tensor | None
    ) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor] | None]]:
        """x [batch, length, width], mtp_targets [batch, length, depth], `hidden` by the names of `hidden_name`."""
        mtp_targets = _own(self, mtp_targets)
        terms = [term_name(depth) for depth in range(1, len(self.mtp_norms) + 1)]
        states = [hidden[hidden_name(depth)] for depth in range(1, len(self.mtp_norms) + 1)]
        if mtp_targets is None or any(state is None for state in states):
            return super().forward(x), dict.fromkeys(terms)
        normed = [norm(state) for norm, state in zip(self.mtp_norms, states, strict=True)]
        here, *others = self.lm_head(torch.cat((self.norm(x), *normed))).chunk(1 + len(normed))
        return here, dict(zip(terms, zip(others, mtp_targets.unbind(-1), strict=True), strict=True))


def prediction_terms(shape: DecoderShape, loss: Callable[..., Tensor]) -> dict[str, LossTerm]:
    """Return the losses that the output layer declares: each depth's mean over all targets, weighed `mtp_loss_coef` / depths.

    Args:
        loss: the cross entropy, `loss(logits, targets, count=…)`: a sum over the targets divided by `count`.
    """
    depths = shape.num_nextn_predict_layers
    term = LossTerm(partial(_ahead_loss, loss), shape.mtp_loss_coef / max(depths, 1))
    return {term_name(depth): term for depth in range(1, depths + 1)}


def _ahead_loss(loss: Callable[..., Tensor], value: Any, targets: Tensor) -> Tensor:
    """Return the loss of one depth, divided by the number of the model's own targets (the paper's T); 0 without a prediction."""
    if value is None:
        return torch.zeros((), device=targets.device)
    logits, wanted = value
    return loss(logits, wanted, count=(targets != IGNORED).sum())
