"""Role of a parameter for the optimizer: a matrix of a block, an embedding, or a vector; and the matrices fused in a weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pipeloom.config.sections import ModelSection

RoleName = Literal["matrix", "embedding", "vector"]
_QKV = ("c_attn", "qkv_proj", "Wqkv")  # queries, keys, values one after the other: GPT-2, Phi-3, MPT
_QKV_BY_HEAD = (
    "query_key_value",
)  # queries, keys and values of each key-value head side by side: GPT-NeoX, BLOOM, Falcon
_GATE_UP = ("gate_up_proj",)


def role_of(name: str, dimensions: int) -> RoleName:
    """Return the role of a parameter by its global name.

    - vector: norms and biases, which have one dimension or a name that ends in `bias`;
    - matrix: any other parameter of a numbered block (`model.layers.3.mlp.up_proj.weight`), a stack of experts included;
    - embedding: any other matrix, the output layer included.
    """
    words = name.split(".")
    if dimensions < 2 or words[-1] == "bias" or words[-1].endswith("_bias"):
        return "vector"
    return "matrix" if any(word.isdecimal() for word in words) else "embedding"


@dataclass(frozen=True)
class Fused:
    """Matrices that one weight fuses: the indices along `dim` of each."""

    dim: int
    indices: tuple[Tensor, ...]


def fused_in(name: str, shape: tuple[int, ...], model: ModelSection | None) -> Fused | None:
    """Return the projections fused in a foreign model's weight, from its name and the model's sizes; None: it is one matrix.

    The name of the weight and the sizes of the model decide. Pipeloom's own decoder (`model` is None) has one weight for each
    projection.
    """
    words = name.split(".")
    if model is None or len(shape) < 2:
        return None
    # a weight is [outputs, inputs], except GPT-2's and stacked experts that are stored transposed
    outputs = len(shape) - 2 if shape[-1] == model.hidden_size else len(shape) - 1
    if "c_attn" in words:
        outputs = len(shape) - 1
    count = shape[outputs]
    rows = torch.arange(count)
    if any(word in _GATE_UP for word in words) and count % 2 == 0:
        return Fused(outputs, (rows[: count // 2], rows[count // 2 :]))
    keys = model.num_key_value_heads
    heads = model.num_attention_heads + 2 * keys
    if count % heads:
        return None
    width = count // heads
    if any(word in _QKV for word in words):
        return Fused(outputs, torch.split(rows, [model.num_attention_heads * width, keys * width, keys * width]))
    if any(word in _QKV_BY_HEAD for word in words):
        by_head = rows.view(keys, heads // keys, width)
        return Fused(outputs, tuple(part.flatten() for part in (by_head[:, :-2], by_head[:, -2], by_head[:, -1])))
    return None
