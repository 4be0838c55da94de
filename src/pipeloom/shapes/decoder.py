"""The sizes of a decoder, from which its layers are built. Needs no torch and no configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
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
    def foreign(self) -> list[str]:
        """The parts of the model that our own decoder lacks: none of a `[model]` section."""
        return []

    @property
    def expert_blocks(self: Any) -> tuple[bool, ...]:
        """block -> whether its feed-forward part is a mixture of experts."""
        return expert_blocks(self.num_experts, self.num_hidden_layers, self.moe_layer_freq)


@dataclass(frozen=True)
class CountedModel:
    """Parameters of a foreign model as `transformers` builds it.

    Attributes:
        first, last: of the part before the blocks, and of the one behind them, which counts its copy of tied weights.
        blocks: block -> parameters without its experts, and those of its experts.
        tied: parameters that the first and the last part share.
        spreadable: whether pipeline ranks may have shares of the embedding and the output layer.
    """

    first: int
    blocks: tuple[tuple[int, int], ...]
    last: int
    tied: int = 0
    spreadable: bool = True


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
        pad_to_capacity: whether each expert computes as many rows in training, however many tokens chose it.
        aux_loss_coef, z_loss_coef: factors of the load-balance loss and of the mean squared logsumexp of the router's logits.
        num_nextn_predict_layers: blocks behind the last one that predict tokens further ahead, in training alone.
        mtp_loss_coef: factor of the mean of their losses.
        gated: the feed-forward part has a gate (three matrices instead of two); like the sizes below, of foreign models.
        mlp_bias: the matrices of the feed-forward part have a bias.
        n_positions: rows of a learned table of positions; 0: rotary.
        shared_expert_intermediate_size: width of what every token of a block with experts passes; 0: num_shared_experts.
        shared_expert_gate: a weight per token multiplies what the shared expert returns.
        kv_lora_rank: width of the compressed keys and values of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434);
            0: none. q_lora_rank: that of the compressed query; 0: it is not compressed.
        qk_nope_head_dim, qk_rope_head_dim, v_head_dim: widths of such a head's part without positions, its part with, its value.
        n_group, topk_group: groups of experts, and those that a token may choose from (DeepSeek-V3, arXiv 2412.19437, 2.1.2).
        reach: block -> tokens that attention sees: 0: all before; n: the last n; -n: those before in a chunk of n; empty: all.
        counted: parameters, where they do not follow from the sizes.
        model_type: family of a `config.json`; "": our own decoder, whose sizes must fit each other.
        name: of the model, for messages.

    Raises ArgumentError for a size below 1, heads of odd width, key and value heads that do not divide the query heads, or, with
    experts, a moe_layer_freq below 1, of another length than the blocks, with entries other than 1 and 0, or without a 1.
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
    pad_to_capacity: bool = False
    aux_loss_coef: float = 0.01
    z_loss_coef: float = 0.001
    num_nextn_predict_layers: int = 0
    mtp_loss_coef: float = 0.1
    gated: bool = True
    mlp_bias: bool = False
    n_positions: int = 0
    shared_expert_intermediate_size: int = 0
    shared_expert_gate: bool = True
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    n_group: int = 1
    topk_group: int = 1
    reach: tuple[int, ...] = ()
    counted: CountedModel | None = None
    model_type: str = field(default="", compare=False)
    name: str = field(default="the model", compare=False)

    def __post_init__(self) -> None:
        sizes = ("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
        for name in ("num_hidden_layers", *sizes):
            if getattr(self, name) < 1:
                raise ArgumentError(name, f"={getattr(self, name)} is below 1; nearest: 1")
        for problem in () if self.model_type else shape_problems(self):
            raise problem

    @property
    def shared_width(self) -> int:
        """Inner width of what every token of a block with experts passes."""
        return self.shared_expert_intermediate_size or self.num_shared_experts * self.expert_width

    @property
    def reaches(self) -> tuple[int, ...]:
        """block -> `reach`."""
        return self.reach or (0,) * self.num_hidden_layers

    @property
    def counted_blocks(self) -> tuple[tuple[int, int] | None, ...]:
        """block -> its counted parameters."""
        return self.counted.blocks if self.counted is not None else (None,) * self.num_hidden_layers

    @property
    def foreign(self) -> list[str]:
        """The parts of the model that our own decoder lacks."""
        parts = {
            f"blocks of {self.model_type}": self.counted is not None,
            "windows of attention": any(self.reach),
            "multi-head latent attention": self.kv_lora_rank,
            "feed-forward parts without a gate": not self.gated,
            "biases of the feed-forward part": self.mlp_bias,
            "shared experts of another width, or without a gate": self.shared_expert_intermediate_size
            or (self.num_shared_experts and not self.shared_expert_gate),
        }
        return [part for part, present in parts.items() if present]

    def with_layers(self, layers: int) -> DecoderShape:
        """The model cut to its first `layers` blocks."""
        sparse = self.expert_blocks[:layers]
        return replace(
            self,
            num_hidden_layers=layers,
            num_experts=self.num_experts * any(sparse),
            moe_layer_freq=1 if all(sparse) or not any(sparse) else tuple(map(int, sparse)),
            reach=self.reach[:layers],
            counted=self.counted and replace(self.counted, blocks=self.counted.blocks[:layers]),
        )


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
    if shape.num_experts and (problem := frequency_problem(shape.moe_layer_freq, shape.num_hidden_layers)):
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
