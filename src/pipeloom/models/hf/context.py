"""Attention of `transformers` models to tokens of other ranks and of earlier slices, through their AttentionInterface."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeloom.errors import ConfigError
from pipeloom.models.hf.library import transformers
from pipeloom.ops.slices import SliceState
from pipeloom.parallel.context import ContextParallel, attend_in_blocks
from pipeloom.shapes.decoder import context_problem

_NAME = "pipeloom_context"


class SharedTokens(NamedTuple):
    """The tokens that attention is over, besides those at hand.

    Attributes:
        context: the ranks that share them; None: this one alone.
        position_ids: of whole sequences or slices, [batch, cp · tokens]; None: each sequence is one document.
        state: of the layer, with the tokens of earlier slices; None: sequences are not cut.
    """

    context: ContextParallel | None
    position_ids: Tensor | None
    state: SliceState | None


_active: ContextVar[SharedTokens | None] = ContextVar("_active", default=None)


def spread_attention(model: Any, words: str) -> None:
    """Have the attention of a model of `transformers` see the tokens of `sharing` inside it, for what `words` say.

    Raises ConfigError, with the reason, for a family or an option whose attention is another than causal over all tokens.
    """
    if problem := context_problem(model.config.to_dict()):
        raise ConfigError(f"{words}: {problem}")
    transformers().AttentionInterface.register(_NAME, _attend)
    model.set_attn_implementation(_NAME)


@contextmanager
def sharing(tokens: SharedTokens | None) -> Iterator[None]:
    """Attention inside is over these tokens; None: over those at hand, one document each."""
    token = _active.set(tokens)
    try:
        yield
    finally:
        _active.reset(token)


def local_positions(tokens: SharedTokens, like: Tensor) -> Tensor:
    """Return the positions of the tokens at hand, of `like` [batch, tokens, …], in their documents: [batch, tokens]."""
    context, position_ids, state = tokens
    if position_ids is None:
        length = like.shape[1] * (1 if context is None else context.axis.size)
        start = 0 if state is None else state.place.start
        position_ids = torch.arange(start, start + length, device=like.device).expand(like.shape[0], -1)
    return position_ids if context is None else context.own_tokens(position_ids)


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: [batch, heads, tokens, width] -> [batch, tokens, heads, width]."""
    active = _active.get()
    if active is None:  # as text is generated
        out: Tensor = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=key.shape[1] < query.shape[1]
        )
        return out.transpose(1, 2), None
    context, position_ids, state = active
    mixed = attend_in_blocks(query, key, value, position_ids, context=context, state=state)
    return mixed.transpose(1, 2), None
