"""Context parallelism of cut `transformers` models: their attention through transformers' AttentionInterface."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from pipeloom.decoder_shape import context_problem
from pipeloom.errors import ConfigError
from pipeloom.models.hf.library import transformers
from pipeloom.parallel.context import ContextParallel

_NAME = "pipeloom_context"
_active: ContextVar[tuple[ContextParallel, Tensor | None] | None] = ContextVar("_active", default=None)


def spread_attention(model: Any) -> None:
    """Have the attention of a model of `transformers` exchange keys and values inside `sharing`.

    Raises ConfigError, with the reason, for a family or an option whose attention is another than causal over all tokens.
    """
    if problem := context_problem(model.config.to_dict()):
        raise ConfigError(f"context parallelism: {problem}")
    transformers().AttentionInterface.register(_NAME, _attend)
    model.set_attn_implementation(_NAME)


@contextmanager
def sharing(context: ContextParallel | None, position_ids: Tensor | None) -> Iterator[None]:
    """Attention inside is over the tokens of all ranks of `context`; None: over those at hand.

    Args:
        position_ids: of whole sequences, [batch, cp · tokens]; None: each is one document.
    """
    token = _active.set(None if context is None else (context, position_ids))
    try:
        yield
    finally:
        _active.reset(token)


def local_positions(context: ContextParallel, position_ids: Tensor | None, like: Tensor) -> Tensor:
    """Return the positions of this rank's tokens, of `like` [batch, tokens, …], in their documents: [batch, tokens]."""
    if position_ids is None:
        length = like.shape[1] * context.axis.size
        position_ids = torch.arange(length, device=like.device).expand(like.shape[0], -1)
    return context.part(position_ids)


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: [batch, heads, tokens, width] -> [batch, tokens, heads, width]."""
    active = _active.get()
    if active is None:  # whole sequences of one document each, as text is generated
        out: Tensor = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=key.shape[1] < query.shape[1]
        )
        return out.transpose(1, 2), None
    context, position_ids = active
    return context.attend(query, key, value, position_ids).transpose(1, 2), None
