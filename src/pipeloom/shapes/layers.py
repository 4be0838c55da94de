"""The layers of a model in numbers: parameters, and floating-point operations of the forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from pipeloom.shapes.decoder import DecoderShape
from pipeloom.shapes.ops import RUNTIMES, Adapters, LayerOps, Split, layers_of


@dataclass(frozen=True)
class LayerSize:
    """One layer of the model.

    Attributes:
        letter: E embedding, t block, m block that predicts tokens further ahead, L final norm and output layer.
        parameters: parameters of the layer, with all its experts (a tied output layer counts its copy).
        flops: floating-point operations of the forward and backward of one sequence, with only the experts that a token uses;
            an embedding adds in its backward.
        experts: the part of `parameters` that expert parallelism spreads.
        depth: of an m, from 1.
    """

    letter: str
    parameters: int
    flops: int
    experts: int = 0
    depth: int = 0


def whole_layers(shape: DecoderShape, tokens: int, adapters: Adapters | None = None) -> list[LayerOps]:
    """Return the layers of a model on one device, for one sequence of `tokens`."""
    return layers_of(shape, Split(replace(RUNTIMES["pipeloom"], adapters=adapters), tokens, tokens))


@lru_cache(maxsize=256)
def layer_sizes(shape: DecoderShape, seq_len: int) -> tuple[LayerSize, ...]:
    """[embedding, block, …, block, output layer]: 2 entries more than there are blocks."""
    sizes = []
    for at, layer in enumerate(whole_layers(shape, seq_len)):
        experts = layer.parameters[1]
        depth = at - shape.num_hidden_layers if layer.kind == "m" else 0
        sizes.append(LayerSize(layer.kind, round(sum(layer.parameters)), round(layer.flops), round(experts), depth))
    return tuple(sizes)


def parameter_count(shape: DecoderShape) -> int:
    """Parameters of the whole model; a tied weight counts once."""
    return sum(size.parameters for size in layer_sizes(shape, 1)) - round(whole_layers(shape, 1)[-1].tied)


def held_parameters(shape: DecoderShape, replicas: int, ep: int) -> int:
    """Parameters that all ranks together hold: `replicas` copies of every weight, but `replicas` / `ep` of the experts'."""
    experts = sum(size.experts for size in layer_sizes(shape, 1))
    return (parameter_count(shape) - experts) * replicas + experts * replicas // ep


def training_flops(shape: DecoderShape, seq_len: int, sequences: int) -> int:
    """Floating-point operations of the forward and backward of `sequences` sequences."""
    return sequences * sum(size.flops for size in layer_sizes(shape, seq_len))


def attention_share(layers: Sequence[LayerOps]) -> float:
    """Return the share of the blocks' operations that causal attention takes."""
    ops = [op for layer in layers if layer.kind in "tm" for op in layer.ops]
    return sum(op.flops for op in ops if op.attends) / sum(op.flops for op in ops)
