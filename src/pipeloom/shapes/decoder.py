"""The sizes of a decoder, from which its layers are built. Needs no torch and no configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pipeloom.errors import ArgumentError, divisors, echo, nearest

ROUTERS: dict[str, int | None] = {"softmax": None, "noisy": None, "switch": 1, "gshard": 2, "sigmoid": None}
"""Router -> the number of experts per token that it requires; None: any number. `parallel/router.py` describes them."""
CONTEXT_FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
"""Families of `transformers` whose layers see other tokens in their attention alone, and call it with the plain arguments."""
RANDOM_ROUTERS = ("noisy", "switch", "gshard")
"""Routers that use random numbers in training."""


class DecoderSizes:
    """Sizes that follow from the attributes of a `DecoderShape`, which the trainer's `[model]` section has too."""

    @property
    def head_width(self: Any) -> int:
        """Width of an attention head."""
        width: int = self.head_dim or self.hidden_size // self.num_attention_heads
        return width

    @property
    def expert_width(self: Any) -> int:
        """Width inside an expert."""
        width: int = self.moe_intermediate_size or self.intermediate_size
        return width

    @property
    def blocks(self: Any) -> int:
        """The number of blocks, those that predict tokens further ahead included."""
        count: int = self.num_hidden_layers + self.num_nextn_predict_layers
        return count

    @property
    def expert_blocks(self: Any) -> tuple[bool, ...]:
        """block -> whether its feed-forward part is a mixture of experts."""
        return expert_blocks(self.num_experts, self.num_hidden_layers, self.moe_layer_freq)


@dataclass(frozen=True)
class DecoderShape(DecoderSizes):
    """The sizes and options of a decoder, in Hugging Face's names; a trainer's `[model]` section has the same attributes.

    Attributes:
        num_hidden_layers: transformer blocks.
        hidden_size: width of a token.
        num_attention_heads: query heads.
        num_key_value_heads: key and value heads, a divisor of the query heads.
        intermediate_size: width inside the feed-forward part.
        vocab_size: tokens in the vocabulary.
        head_dim: width of a head, even; None: hidden_size / num_attention_heads.
        attention_bias: queries, keys, values and attention's output have a bias.
        qkv_bias: queries, keys and values have a bias.
        qk_norm: queries and keys are normed, head by head (Qwen3).
        tie_word_embeddings: the output layer uses the embedding's weight.
        rope_theta: base of the rotary position frequencies.
        rms_norm_eps: added to the mean square in every norm.
        dropout: share of each block's two outputs that training drops, in [0, 1).
        num_experts: experts of the feed-forward part of a block that has experts; 0: every block is dense.
        num_experts_per_tok: experts that each token is sent to.
        moe_layer_freq: n: blocks 0, n, 2n, … have experts, the others are dense; or a 1 (experts) or 0 (dense) per block.
        norm_topk_prob: whether the weights of a token's experts are divided by their sum.
        moe_intermediate_size: width inside an expert; 0: intermediate_size.
        num_shared_experts: width, in experts, of the gated expert that every token uses.
        router: one of ROUTERS.
        capacity_factor: rows per expert over an even share; 0: unlimited.
        aux_loss_coef, z_loss_coef: factors of the load-balance loss and of the mean squared logsumexp of the router's logits.
        num_nextn_predict_layers: blocks behind the last one that predict tokens further ahead, in training alone.
        mtp_loss_coef: factor of the mean of their losses.

    Raises ArgumentError for a size below 1, heads of odd width, key and value heads that do not divide the query heads, or a
    moe_layer_freq below 1, of another length than the blocks, with entries other than 1 and 0, or without a 1.
    """

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    vocab_size: int
    head_dim: int | None = None
    attention_bias: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    dropout: float = 0.0
    num_experts: int = 0
    num_experts_per_tok: int = 2
    moe_layer_freq: int | tuple[int, ...] = 1
    norm_topk_prob: bool = True
    moe_intermediate_size: int = 0
    num_shared_experts: int = 0
    router: str = "softmax"
    capacity_factor: float = 0.0
    aux_loss_coef: float = 0.01
    z_loss_coef: float = 0.001
    num_nextn_predict_layers: int = 0
    mtp_loss_coef: float = 0.1

    def __post_init__(self) -> None:
        sizes = ("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
        for name in ("num_hidden_layers", *sizes):
            if getattr(self, name) < 1:
                raise ArgumentError(name, f"={getattr(self, name)} is below 1; nearest: 1")
        for problem in shape_problems(self):
            raise problem


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): ranks of the two compressions and widths of a head.

    Attributes:
        query_rank: width of the compressed query; 0: the query is not compressed.
        key_value_rank: width of the compressed keys and values.
        nope, rope, value: widths of a head's part without positions, its part with, and its value.
    """

    query_rank: int
    key_value_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder.

    Attributes:
        layers: blocks, without the embedding and the output layer.
        feed_forward: inner width of a dense block.
        gated: the feed-forward part has a gate (three matrices instead of two).
        biases: linear layers have biases.
        positions: rows of a learned table of positions; 0: rotary.
        experts, experts_per_token, expert_width, shared_width: of a block with experts; `shared_width` is the inner width of
            what every token passes.
        sparse: block -> whether it has experts; empty: none has.
        latent: multi-head latent attention, or None.
        ahead: blocks behind the last one that predict tokens further ahead (DeepSeek-V3, arXiv 2412.19437, section 2.2).
        routed_share: of the groups of experts, those that a token may choose from (the same, section 2.1.2).
    """

    name: str
    layers: int
    hidden: int
    heads: int
    key_value_heads: int
    head_width: int
    feed_forward: int
    vocabulary: int
    tied: bool = False
    gated: bool = True
    biases: bool = False
    positions: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_width: int = 0
    shared_width: int = 0
    sparse: tuple[bool, ...] = ()
    latent: Latent | None = None
    ahead: int = 0
    routed_share: float = 1.0

    def block_is_sparse(self, block: int) -> bool:
        """Return whether block number `block` has experts."""
        return bool(self.sparse) and self.sparse[block]

    def with_layers(self, layers: int) -> ModelShape:
        """The model cut to its first `layers` blocks."""
        return replace(self, layers=layers, sparse=self.sparse[:layers])


def expert_blocks(experts: int, blocks: int, frequency: int | tuple[int, ...]) -> tuple[bool, ...]:
    """Return, for each of `blocks` blocks, whether it has experts; `experts` and `frequency` are as in `DecoderShape`."""
    if experts == 0:
        return (False,) * blocks
    if isinstance(frequency, int):
        return tuple(block % frequency == 0 for block in range(blocks))
    return tuple(block < len(frequency) and frequency[block] == 1 for block in range(blocks))


def frequency_problem(frequency: int | tuple[int, ...], blocks: int) -> str:
    """Return the problem of a `moe_layer_freq` for this number of blocks, as words that follow its name; "" if there is none."""
    if isinstance(frequency, int):
        return f"={frequency} is below 1; nearest: 1" if frequency < 1 else ""
    text = echo(list(frequency))
    if len(frequency) != blocks:
        return f"={text} has {len(frequency)} entries; the model has {blocks} blocks, and each needs one"
    if not set(frequency) <= {0, 1}:
        wrong = next(entry for entry in frequency if entry not in (0, 1))
        return f"={text} holds {wrong}; an entry is 1 (experts) or 0 (dense)"
    return "" if any(frequency) else f"={text} gives no block experts; give one a 1, or set num_experts to 0"


def shape_problems(shape: Any) -> Iterator[ArgumentError]:
    """Yield an error for each contradiction between the sizes of `shape`, which has the attributes of a `DecoderShape`."""
    hidden, heads = shape.hidden_size, shape.num_attention_heads
    groups, width = shape.num_key_value_heads, shape.head_dim
    if width is None:
        valid = [count for count in divisors(hidden) if hidden // count % 2 == 0]
        if heads not in valid:
            near = nearest(heads, valid) if valid else "make hidden_size even"
            yield ArgumentError(
                "num_attention_heads",
                f"={heads} does not cut hidden_size {hidden} into heads of one even width; {near}",
            )
    elif width < 1 or width % 2:
        near = nearest(width, {max(2, width - 1), max(2, width + 1)})
        yield ArgumentError("head_dim", f"={width} is not an even width, which rotary position embeddings need; {near}")
    if heads % groups:
        near = nearest(groups, divisors(heads))
        yield ArgumentError("num_key_value_heads", f"={groups} does not divide {heads} attention heads; {near}")
    if problem := frequency_problem(shape.moe_layer_freq, shape.num_hidden_layers):
        yield ArgumentError("moe_layer_freq", problem)


def context_problem(values: Mapping[str, Any]) -> str:
    """Return why the values of a `config.json` allow no context parallelism: attention other than causal over all tokens; ""."""
    family, kinds = str(values.get("model_type")), values.get("layer_types")
    if family not in CONTEXT_FAMILIES:
        return f"it is for the families {', '.join(CONTEXT_FAMILIES)}, not {family!r:.60}; nearest: 1"
    slides = values.get("use_sliding_window", True) if kinds is None else set(kinds) != {"full_attention"}
    if values.get("sliding_window") and slides:
        return "its attention has no sliding window; set sliding_window to null in config.json"
    if values.get("attention_dropout"):
        return "its attention has no dropout of probabilities; set attention_dropout to 0 in config.json"
    return ""
