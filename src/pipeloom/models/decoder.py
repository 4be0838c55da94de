"""A Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU; no biases."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeloom.config import ModelSection
from pipeloom.models import names
from pipeloom.models.rotary import rotate
from pipeloom.models.weights import Deviations, draw

NORM_EPSILON = 1e-6


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + ε) · weight over the last dimension, in fp32 at least (arXiv 1910.07467)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype.itemsize == 8 else x.float()
        return F.rms_norm(wide, (x.shape[-1],), eps=NORM_EPSILON).to(x.dtype) * self.weight


class Attention(nn.Module):
    """Causal self-attention; each key and value head serves a group of query heads (arXiv 2305.13245)."""

    def __init__(self, shape: ModelSection) -> None:
        super().__init__()
        width = shape.hidden_size
        self.heads, self.key_value_heads = shape.num_attention_heads, shape.num_key_value_heads
        self.head_width = width // self.heads
        self.theta = shape.rope_theta
        self.q_proj = nn.Linear(width, self.heads * self.head_width, bias=False)
        self.k_proj = nn.Linear(width, self.key_value_heads * self.head_width, bias=False)
        self.v_proj = nn.Linear(width, self.key_value_heads * self.head_width, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query = rotate(self._split(self.q_proj(x), self.heads), self.theta)
        key = rotate(self._split(self.k_proj(x), self.key_value_heads), self.theta)
        value = self._split(self.v_proj(x), self.key_value_heads)
        grouped = self.key_value_heads < self.heads
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out

    def _split(self, x: Tensor, heads: int) -> Tensor:
        """[batch, length, heads * width] -> [batch, heads, length, width]."""
        return x.view(*x.shape[:2], heads, self.head_width).transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate x) · up x) (arXiv 2002.05202)."""

    def __init__(self, shape: ModelSection) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """One transformer block: [batch, length, hidden] -> the same shape."""

    def __init__(self, shape: ModelSection) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size)
        self.mlp = FeedForward(shape)

    def forward(self, x: Tensor) -> Tensor:
        attended: Tensor = x + self.self_attn(self.input_layernorm(x))
        out: Tensor = attended + self.mlp(self.post_attention_layernorm(attended))
        return out


class Head(nn.Module):
    """Final norm and output layer: [batch, length, hidden] -> logits [batch, length, vocabulary]."""

    def __init__(self, shape: ModelSection) -> None:
        super().__init__()
        self.norm = RMSNorm(shape.hidden_size)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.norm(x))
        return logits


@dataclass(frozen=True)
class DecoderLayer:
    """A layer that is built when it is called, on the rank that holds it.

    Attributes:
        name: global name; its parameters are called `name.parameter`.
        build: makes the module.
    """

    name: str
    build: Callable[[], nn.Module]

    def __call__(self) -> nn.Module:
        return self.build()


def layers(
    shape: ModelSection, seed: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> list[DecoderLayer]:
    """The decoder as factories: [embedding, block, …, block, norm and output], num_hidden_layers + 2 of them.

    Tokens [batch, length] int64 go in, logits [batch, length, vocab_size] come out. A weight's first value depends on
    `seed` and its global name alone: normal with deviation sqrt(2 / (5 hidden_size)), 0.02 at a width of 1000 (arXiv
    1910.05895). Projections back into the residual stream start smaller by sqrt(2 L), which keeps its variance
    independent of the depth (GPT-2).
    """
    usual = math.sqrt(2 / (5 * shape.hidden_size))
    residual = usual / math.sqrt(2 * shape.num_hidden_layers)
    deviations = Deviations(usual, {"o_proj": residual, "down_proj": residual})
    same = {names.HEAD_WEIGHT: names.EMBEDDING_WEIGHT} if shape.tie_word_embeddings else {}

    def build(name: str, make: Callable[[], nn.Module]) -> nn.Module:
        with torch.device("meta"):
            module = make()
        module = module.to(dtype).to_empty(device=device)
        draw(module, name, seed, deviations, same)
        return module

    def layer(name: str, make: Callable[[], nn.Module]) -> DecoderLayer:
        return DecoderLayer(name, partial(build, name, make))

    return [
        layer(names.EMBEDDING, partial(_embedding, shape)),
        *(layer(names.block(index), partial(Block, shape)) for index in range(shape.num_hidden_layers)),
        layer(names.HEAD, partial(Head, shape)),
    ]


def _embedding(shape: ModelSection) -> nn.Embedding:
    # torch's own first values would be drawn on the meta device, which imports its compiler: seconds a process
    weight = torch.empty(shape.vocab_size, shape.hidden_size)
    embedding: nn.Embedding = nn.Embedding.from_pretrained(weight, freeze=False)  # type: ignore[no-untyped-call]
    return embedding


def tied(shape: ModelSection) -> tuple[tuple[str, ...], ...]:
    """Groups of parameter names that are one weight."""
    return ((names.EMBEDDING_WEIGHT, names.HEAD_WEIGHT),) if shape.tie_word_embeddings else ()
