"""A Llama-style decoder: RMSNorm, rotary positions, grouped-query attention with or without biases, SwiGLU."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeloom.ops.block_attention import document_begins
from pipeloom.ops.layer import MicrobatchContext, SharesTokens
from pipeloom.ops.parts import in_part
from pipeloom.ops.random_state import Dropout, TokenPart
from pipeloom.ops.slices import SliceState
from pipeloom.parallel.context import attend_in_blocks
from pipeloom.parallel.sharding import ParameterSharding
from pipeloom.parallel.tensor import TensorParallel, column_linear, gather_tokens, own_tokens, project, row_linear
from pipeloom.parallel.vocabulary import VocabularyHead
from pipeloom.shapes.decoder import DecoderShape


def rotary_table(
    length: int, width: int, theta: float, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of position t times theta^(-2 i / width): each [length, width / 2]; computed in fp32."""
    # the beginning of a table of the next power of two: batches of many lengths share few tables
    cos, sin = _table(1 << max(length - 1, 0).bit_length(), width, theta, dtype, device)
    return cos[:length], sin[:length]


@lru_cache(maxsize=16)
def _table(length: int, width: int, theta: float, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):
        return rotary_rows(torch.arange(length, device=device), width, theta, dtype)


@lru_cache(maxsize=2)  # for the layers of a stage: a table of whole sequences would grow with them
def _slice_table(
    start: int, end: int, width: int, theta: float, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):
        return rotary_rows(torch.arange(start, end, device=device), width, theta, dtype)


def rotary_rows(position_ids: Tensor, width: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As `rotary_table`, for the given positions [...]: each [..., width / 2]."""
    frequencies = theta ** (-torch.arange(0, width, 2, dtype=torch.float32, device=position_ids.device) / width)
    angles = position_ids.unsqueeze(-1).to(torch.float32) * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """`x` [..., length, width] with the pair (i, i + width / 2) turned by the angles whose cosines and sines are given."""
    cos, sin = table
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


# Mean tokens per document in a batch from which attention runs document by document on a CPU: one call per document then costs
# less than the masked scores of tokens of different documents. Shorter documents share a call and a mask.
OWN_CALL_TOKENS = 64


def document_numbers(position_ids: Tensor) -> Tensor:
    """Return the number of each token's document in its row, from 0: [batch, length] int64.

    Args:
        position_ids: [batch, length], each token's position in its document.
    """
    return document_begins(position_ids).cumsum(1) - 1


def visible(position_ids: Tensor, start: int = 0, end: int | None = None) -> Tensor:
    """Return whether a query may attend to a key: one of its own document, and not after it: bool [batch, 1, queries, keys].

    Args:
        start, end: range of the queries' positions; the keys are those before `end`. Default: all.
    """
    documents = document_numbers(position_ids)
    end = documents.shape[1] if end is None else end
    same = documents[:, start:end, None] == documents[:, None, :end]
    return same.tril_(start)[:, None]


def attend(query: Tensor, key: Tensor, value: Tensor, position_ids: Tensor) -> Tensor:
    """Return causal attention inside each document: [batch, heads, length, width], with as many key heads or fewer.

    On a GPU it is always one call with a mask, since reading the documents' lengths would wait for the device.
    """
    grouped = key.shape[1] < query.shape[1]
    if query.device.type == "cpu":
        sizes = [torch.bincount(row).tolist() for row in document_numbers(position_ids)]
        if OWN_CALL_TOKENS * sum(map(len, sizes)) <= position_ids.numel():
            rows = zip(sizes, *(torch.split(each, 1) for each in (query, key, value)), strict=True)
            return torch.cat([_one_by_one(lengths, q, k, v, grouped) for lengths, q, k, v in rows])
    mask = visible(position_ids)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=grouped)


def _one_by_one(sizes: list[int], query: Tensor, key: Tensor, value: Tensor, grouped: bool) -> Tensor:
    documents = zip(*(torch.split(tensor, sizes, 2) for tensor in (query, key, value)), strict=True)
    attended = [F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped) for q, k, v in documents]
    return torch.cat(attended, 2)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + ε) · weight over the last dimension, in fp32 at least (arXiv 1910.07467).

    With `part_of_tokens` its input, and so its weight's gradient, covers only this rank's tokens (or heads).
    """

    def __init__(self, width: int, part_of_tokens: bool = False, epsilon: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.part_of_tokens = part_of_tokens
        self.epsilon = epsilon

    def sharding(self) -> Mapping[str, ParameterSharding]:
        return {"weight": ParameterSharding(partial=self.part_of_tokens)}

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype.itemsize == 8 else x.float()
        return F.rms_norm(wide, (x.shape[-1],), eps=self.epsilon).to(x.dtype) * self.weight


class KeyValueCache:
    """Keys and values of the tokens so far of each micro-batch; micro-batches are told apart by the order of their calls."""

    def __init__(self) -> None:
        self._microbatches: list[tuple[Tensor, Tensor, Tensor]] = []
        self._calls = 0

    def begin(self, tokens: int | None) -> None:
        """Prepare for the next tokens of all micro-batches; 0 earlier `tokens`, or None: for the first ones of new sequences."""
        self._calls = 0
        if not tokens:
            self._microbatches.clear()

    def extend(self, key: Tensor, value: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the keys and values of all tokens of a micro-batch, these included, and their positions [batch, tokens]."""
        parts = key, value, position_ids
        if self._calls == len(self._microbatches):
            self._microbatches.append(parts)
        else:
            before = self._microbatches[self._calls]
            dims = (2, 2, 1)
            parts = tuple(torch.cat(pair, dim) for *pair, dim in zip(before, parts, dims, strict=True))  # type: ignore[assignment]
            self._microbatches[self._calls] = parts
        self._calls += 1
        return parts


class Attention(SharesTokens, nn.Module):
    """Causal self-attention; each key and value head serves a group of query heads (arXiv 2305.13245).

    Under tensor parallelism each rank computes a part of the heads, under context parallelism a part of the tokens.

    Attributes:
        cache: keys and values of earlier tokens, while text is generated; None: a row is computed whole.
    """

    def __init__(self, shape: DecoderShape, tensor: TensorParallel | None = None) -> None:
        super().__init__()
        self.cache: KeyValueCache | None = None
        hidden, width = shape.hidden_size, shape.head_width
        heads, key_value_heads = shape.num_attention_heads, shape.num_key_value_heads
        if tensor is not None:
            heads = tensor.split(heads, "attention heads")[0]
            key_value_heads = tensor.split(key_value_heads, "key and value heads")[0]
        self.heads, self.key_value_heads = heads, key_value_heads
        self.head_width = width
        self.theta = shape.rope_theta
        queries, keys = shape.num_attention_heads * width, shape.num_key_value_heads * width
        bias = shape.qkv_bias or shape.attention_bias
        self.q_proj = column_linear(hidden, queries, tensor, bias=bias)
        self.k_proj = column_linear(hidden, keys, tensor, bias=bias)
        self.v_proj = column_linear(hidden, keys, tensor, bias=bias)
        self.o_proj = row_linear(queries, hidden, tensor, bias=shape.attention_bias)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if shape.qk_norm:
            # Weights of one head's width; under tensor parallelism each rank's gradient covers its own heads.
            self.q_norm = RMSNorm(width, tensor is not None, shape.rms_norm_eps)
            self.k_norm = RMSNorm(width, tensor is not None, shape.rms_norm_eps)

    def forward(self, x: Tensor, position_ids: Tensor | None = None, slice_state: SliceState | None = None) -> Tensor:
        """With `position_ids` [batch, length], which restart with each document of a row, attention stays inside documents.

        Under context parallelism they are those of whole rows, or of whole slices, of whose tokens x holds a part.
        """
        query, key, value = self.split_heads(x, position_ids, slice_state)
        grouped = self.key_value_heads < self.heads
        if self.context is not None or slice_state is not None:
            mixed = attend_in_blocks(query, key, value, position_ids, context=self.context, state=slice_state)
            return self.merge_heads(mixed)
        if self.cache is not None and position_ids is not None:
            key, value, positions = self.cache.extend(key, value, position_ids)
            mask = positions[:, None, None] <= position_ids[:, None, :, None]
            mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=grouped)
            return self.merge_heads(mixed)
        if position_ids is not None:
            return self.merge_heads(attend(query, key, value, position_ids))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        return self.merge_heads(mixed)

    def split_heads(
        self, x: Tensor, position_ids: Tensor | None = None, slice_state: SliceState | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x [batch, length, hidden] -> rotated queries and keys, and values: [batch, heads, length, width]."""
        queries, keys, values = project(x, self.q_proj, self.k_proj, self.v_proj)
        query, key = self._split(queries, self.heads), self._split(keys, self.key_value_heads)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = in_part("norms", self.q_norm, query), in_part("norms", self.k_norm, key)
        context, tokens = self.context, query.shape[-2]
        if position_ids is None:
            start = 0 if slice_state is None else slice_state.place.start
            end = start + (tokens if context is None else tokens * context.axis.size)
            like = self.head_width, self.theta, query.dtype, query.device
            table = rotary_table(end, *like) if slice_state is None else _slice_table(start, end, *like)
            if context is not None:
                table = context.own_tokens(table[0], 0), context.own_tokens(table[1], 0)
        else:
            positions = position_ids if context is None else context.own_tokens(position_ids)
            table = rotary_rows(positions.unsqueeze(1), self.head_width, self.theta, query.dtype)
        return rotate(query, table), rotate(key, table), self._split(values, self.key_value_heads)

    def merge_heads(self, mixed: Tensor) -> Tensor:
        """[batch, heads, length, width] -> [batch, length, hidden]."""
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out

    def _split(self, x: Tensor, heads: int) -> Tensor:
        """[batch, length, heads * width] -> [batch, heads, length, width]."""
        return x.view(*x.shape[:2], heads, self.head_width).transpose(1, 2)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) · up."""
    return F.silu(gate) * up


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate x) · up x) (arXiv 2002.05202)."""

    def __init__(self, shape: DecoderShape, tensor: TensorParallel | None = None) -> None:
        super().__init__()
        hidden, inner, name = shape.hidden_size, shape.intermediate_size, "columns inside the feed-forward part"
        self.gate_proj = column_linear(hidden, inner, tensor, name)
        self.up_proj = column_linear(hidden, inner, tensor, name)
        self.down_proj = row_linear(inner, hidden, tensor, name)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = project(x, self.gate_proj, self.up_proj)
        out: Tensor = self.down_proj(in_part("activation", gated, gate, up))
        return out


class Block(nn.Module):
    """One transformer block: [batch, length, hidden] -> the same shape; under sequence parallelism length / tp tokens.

    Its parts for recomputation are `norms`, `attention`, `mlp`, and inside `mlp` `activation`.

    Args:
        mlp: its feed-forward part; None: `FeedForward`.
    """

    mlp: nn.Module

    def __init__(
        self,
        shape: DecoderShape,
        tensor: TensorParallel | None = None,
        mlp: nn.Module | None = None,
    ) -> None:
        super().__init__()
        sequence = tensor is not None and tensor.sequence
        part = TokenPart(tensor.index, tensor.size) if tensor is not None and sequence else TokenPart()
        self.input_layernorm = RMSNorm(shape.hidden_size, sequence, shape.rms_norm_eps)
        self.self_attn = Attention(shape, tensor)
        self.attention_dropout = Dropout(shape.dropout, part)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, sequence, shape.rms_norm_eps)
        self.mlp = FeedForward(shape, tensor) if mlp is None else mlp
        self.mlp_dropout = Dropout(shape.dropout, part)

    def forward(
        self,
        x: Tensor,
        microbatch: MicrobatchContext | None = None,
        position_ids: Tensor | None = None,
        slice_state: SliceState | None = None,
    ) -> Tensor:
        """`microbatch` is needed only for dropout in training, `position_ids` only for rows with several documents."""
        normed = in_part("norms", self.input_layernorm, x)
        mixed = in_part("attention", self.self_attn, normed, position_ids, slice_state)
        attended: Tensor = x + self.attention_dropout(mixed, microbatch)
        inner = in_part("mlp", self.mlp, in_part("norms", self.post_attention_layernorm, attended))
        out: Tensor = attended + self.mlp_dropout(inner, microbatch)
        return out


class OwnTokens(nn.Module):
    """First layer of a decoder whose embedding is spread over the pipeline: the tokens' rows [batch, length, hidden] -> the same.

    Under sequence parallelism length / tp tokens come out, those of this rank.
    """

    def __init__(self, tensor: TensorParallel | None = None) -> None:
        super().__init__()
        self.tensor = tensor if tensor is not None and tensor.sequence else None

    def forward(self, x: Tensor) -> Tensor:
        return x if self.tensor is None else own_tokens(x, self.tensor)


class FinalNorm(nn.Module):
    """Final norm of a decoder whose output layer is spread over the pipeline: [batch, length, hidden] -> the same shape.

    Under sequence parallelism length / tp tokens go in, and all of them come out on every rank.
    """

    def __init__(self, shape: DecoderShape, tensor: TensorParallel | None = None) -> None:
        super().__init__()
        self.tensor = tensor if tensor is not None and tensor.sequence else None
        self.norm = RMSNorm(shape.hidden_size, self.tensor is not None, shape.rms_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = in_part("norms", self.norm, x)
        return normed if self.tensor is None else gather_tokens(normed, self.tensor)


class Head(nn.Module):
    """Final norm and output layer: [batch, length, hidden] -> logits [batch, length, vocabulary].

    Under tensor parallelism it returns the logits of this rank's part of the vocabulary (see `token_loss`).
    """

    def __init__(self, shape: DecoderShape, tensor: TensorParallel | None = None) -> None:
        super().__init__()
        self.norm = RMSNorm(shape.hidden_size, tensor is not None and tensor.sequence, shape.rms_norm_eps)
        self.lm_head: nn.Module
        if tensor is None:
            self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        else:
            self.lm_head = VocabularyHead(shape.hidden_size, shape.vocab_size, tensor)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(in_part("norms", self.norm, x))
        return logits
