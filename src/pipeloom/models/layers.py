"""The decoder as a list of layers: factories that build a layer on the rank that holds it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from pipeloom.decoder_shape import DecoderShape
from pipeloom.models import names
from pipeloom.models.decoder import Block, Head
from pipeloom.models.gate import TopKGate
from pipeloom.models.init import Deviations, InitSpec, draw
from pipeloom.models.moe import MoeClasses, SparseBlock
from pipeloom.models.moe_overlap import OverlappedSparseBlock
from pipeloom.ops.layer import Layer
from pipeloom.ops.random_state import set_sources
from pipeloom.parallel.dispatch import ExpertParallel
from pipeloom.parallel.tensor import TensorParallel, if_parallel
from pipeloom.parallel.vocabulary import VocabularyEmbedding


def layers(
    shape: DecoderShape,
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    tensor: TensorParallel | None = None,
    expert: ExpertParallel | None = None,
    classes: MoeClasses = MoeClasses(),
) -> list[Layer]:
    """The decoder as factories: [embedding, block, …, block, norm and output], num_hidden_layers + 2 of them.

    Tokens [batch, length] int64 go in, logits [batch, length, vocab_size] come out. A weight's first value depends on
    `seed` and its global name alone: normal with deviation sqrt(2 / (5 hidden_size)), 0.02 at a width of 1000 (arXiv
    1910.05895). Projections back into the residual stream start smaller by sqrt(2 L), which keeps its variance
    independent of the depth (GPT-2).

    Args:
        tensor: spreads every layer over these ranks: the same parameter names, parts of the same first weights. Between
            layers then go whole activations, or with sequence parallelism [batch, length / tp, hidden]; each rank puts out
            the logits of its part of the vocabulary.
        expert: spreads the experts of a model that has some over these ranks, each of which has tokens of its own.
        classes: your own classes of experts and routers, for a model that has experts.

    Building a block raises ArgumentError for numbers of heads or experts, or an inner width, that the ranks do not divide.
    """
    deviation = math.sqrt(2 / (5 * shape.hidden_size))
    residual = deviation / math.sqrt(2 * shape.num_hidden_layers)
    deviations = Deviations(deviation, {"o_proj": residual, "down_proj": residual})
    same = {names.HEAD_WEIGHT: names.EMBEDDING_WEIGHT} if shape.tie_word_embeddings else {}
    cut = if_parallel(tensor)
    index = {"tp": cut.index if cut is not None else 0, "ep": expert.axis.index if expert is not None else 0}
    drawing = InitSpec(seed, deviations, same, index)
    overlaps = expert is not None and expert.size > 1 and max(expert.chunks, expert.blocks) > 1
    sparse = OverlappedSparseBlock if overlaps else SparseBlock
    blocks = [
        partial(sparse, shape, cut, expert, classes) if each else partial(Block, shape, cut)
        for each in shape.expert_blocks
    ]

    def build(name: str, make: Callable[[], nn.Module]) -> nn.Module:
        with torch.device("meta"):
            module = make()
        module = module.to(dtype).to_empty(device=device)
        draw(module, name, drawing)
        set_sources(module, seed, name)
        for part in module.modules():
            if isinstance(part, TopKGate):
                part.reset_bias()
        return module

    def layer(name: str, make: Callable[[], nn.Module]) -> Layer:
        return Layer(name, partial(build, name, make))

    return [
        layer(names.EMBEDDING, partial(_embedding, shape, cut)),
        *(layer(names.block(index), block) for index, block in enumerate(blocks)),
        layer(names.HEAD, partial(Head, shape, cut)),
    ]


def _embedding(shape: DecoderShape, tensor: TensorParallel | None) -> nn.Module:
    if tensor is not None:
        return VocabularyEmbedding(shape.vocab_size, shape.hidden_size, tensor)
    # torch's own first values would be drawn on the meta device, which imports its compiler: seconds a process
    weight = torch.empty(shape.vocab_size, shape.hidden_size)
    embedding: nn.Embedding = nn.Embedding.from_pretrained(weight, freeze=False)  # type: ignore[no-untyped-call]
    return embedding


def tied(shape: DecoderShape) -> tuple[tuple[str, ...], ...]:
    """Groups of parameter names that are one weight."""
    return ((names.EMBEDDING_WEIGHT, names.HEAD_WEIGHT),) if shape.tie_word_embeddings else ()
