"""The sizes of the layers of a `[model]`."""

from __future__ import annotations

from dataclasses import dataclass

from pipeloom.config.sections import ModelSection


@dataclass(frozen=True)
class LayerSize:
    """One layer of the model.

    Attributes:
        letter: E embedding, t block, m block that predicts tokens further ahead, L final norm and output layer.
        parameters: parameters of the layer, with all its experts (a tied output layer counts its copy).
        flops: floating-point operations of the forward and backward of one sequence, with only the experts that a token uses.
        experts: the part of `parameters` that expert parallelism spreads.
        depth: of an m, from 1.
    """

    letter: str
    parameters: int
    flops: int
    experts: int = 0
    depth: int = 0


def layer_sizes(model: ModelSection, seq_len: int) -> list[LayerSize]:
    """[embedding, block, …, block, output layer]: 2 entries more than there are blocks.

    A matrix of n weights takes 2n operations per token forward and 4n backward (a product for each of two gradients).
    Causal attention with queries of width q (all heads) takes 2 s q forward per token of a sequence of s: two products of 2 s q,
    of which the mask leaves half. Biases count as parameters, but not as operations.
    The embedding is a look-up in the forward, and one addition per weight of the row in the backward. A block that predicts
    tokens further ahead is one like the last, behind a matrix of [2 h, h]; the output layer runs once for each of them too.
    """
    h, vocab = model.hidden_size, model.vocab_size
    queries, key_value = (model.head_width * n for n in (model.num_attention_heads, model.num_key_value_heads))
    attention = 2 * h * queries + 2 * h * key_value
    biases = (queries + 2 * key_value) * (model.qkv_bias or model.attention_bias) + h * model.attention_bias
    norms = 2 * h + 2 * model.head_width * model.qk_norm

    def block(experts: bool) -> LayerSize:
        spread, common, used = _feed_forward(model, experts)
        flops = 3 * seq_len * (2 * (attention + used) + 2 * seq_len * queries)
        return LayerSize("t", attention + biases + common + spread + norms, flops, spread)

    dense, sparse = block(False), block(True)
    depths = model.num_nextn_predict_layers
    embedding = LayerSize("E", vocab * h, (1 + depths) * seq_len * h)
    output = LayerSize("L", vocab * h + (1 + depths) * h, (1 + depths) * 3 * seq_len * 2 * vocab * h)
    blocks = [sparse if experts else dense for experts in model.expert_blocks]
    joint = LayerSize("m", 2 * h * h + 2 * h, 3 * seq_len * 2 * 2 * h * h)
    last = blocks[-1]
    predictions = [
        LayerSize("m", last.parameters + joint.parameters, last.flops + joint.flops, last.experts, depth)
        for depth in range(1, depths + 1)
    ]
    return [embedding, *blocks, *predictions, output]


def _feed_forward(model: ModelSection, experts: bool) -> tuple[int, int, int]:
    """Weights of a block's feed-forward part: (of experts, the others, those that one token uses)."""
    h = model.hidden_size
    if not experts:
        return 0, 3 * h * model.intermediate_size, 3 * h * model.intermediate_size
    expert = 3 * h * model.expert_width
    common = model.num_experts * h * (2 if model.router == "noisy" else 1)
    if model.num_shared_experts:
        common += model.num_shared_experts * expert + h
    return model.num_experts * expert, common, common + model.num_experts_per_tok * expert


def parameter_count(model: ModelSection) -> int:
    """Parameters of the whole model; a tied weight counts once."""
    total = sum(size.parameters for size in layer_sizes(model, 1))
    return total - model.vocab_size * model.hidden_size if model.tie_word_embeddings else total


def held_parameters(model: ModelSection, replicas: int, ep: int) -> int:
    """Parameters that all ranks together hold: `replicas` copies of every weight, but `replicas` / `ep` of the experts'."""
    experts = sum(size.experts for size in layer_sizes(model, 1))
    return (parameter_count(model) - experts) * replicas + experts * replicas // ep


def training_flops(model: ModelSection, seq_len: int, sequences: int) -> int:
    """Floating-point operations of the forward and backward of `sequences` sequences."""
    return sequences * sum(size.flops for size in layer_sizes(model, seq_len))


def attention_share(model: ModelSection, seq_len: int) -> float:
    """Return the share of the blocks' operations that causal attention takes in sequences of this length; of `layer_sizes`."""
    once, twice = (
        sum(size.flops for size in layer_sizes(model, length) if size.letter == "t")
        for length in (seq_len, 2 * seq_len)
    )
    return (twice / 2 - once) / once  # all but attention is twice as much in a sequence of twice the length
