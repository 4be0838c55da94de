"""`verify --hf-families`: tiny models of Hugging Face families in pipelines; loss and all gradients compared with one process."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from pipeloom import schedules
from pipeloom.errors import UsageError, did_you_mean
from pipeloom.models import cross_entropy, hf
from pipeloom.models.hf.library import transformers
from pipeloom.models.init import stable_seed
from pipeloom.parallel.exchange import gather_tree
from pipeloom.runtime import Pipeline, RuntimeOptions
from pipeloom.runtime.batch import IGNORE_INDEX
from pipeloom.schedule.model import Schedule

if TYPE_CHECKING:
    from pipeloom.train.workers.context import WorkerContext

RANKS, MICROBATCHES, SEQUENCE_LENGTH = 2, 4, 12
SCHEDULES: dict[str, Callable[[], Schedule]] = {
    "1f1b": lambda: schedules.one_f_one_b(RANKS, MICROBATCHES),
    "interleaved": lambda: schedules.interleaved(RANKS, MICROBATCHES, 2),
    "zbv": lambda: schedules.zbv(RANKS, MICROBATCHES),
}


class Variant(NamedTuple):
    """A schedule with which a family is verified, whether all layers are recomputed, and whether rows hold several documents."""

    schedule: str
    recompute: bool = False
    packed: bool = False

    def __str__(self) -> str:
        return self.schedule + ", recompute" * self.recompute + ", packed" * self.packed


VARIANTS = (
    *map(Variant, SCHEDULES),
    Variant("zbv", recompute=True),
    Variant("1f1b", recompute=True, packed=True),  # of the families that keep documents apart
)

VOCABULARY_SIZE = 61
_LLAMA = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GPT = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WIDE_HEADS = {**_LLAMA, "head_dim": 8}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "output_router_logits": False}


_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LINEAR_ATTENTION = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 4}
_DEEPSEEK = {
    **_LLAMA,
    **_ROUTED,
    "num_key_value_heads": 4,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}


@dataclass(frozen=True)
class ModelFamily:
    """A tiny model of a family.

    Attributes:
        config: name of its configuration class in `transformers`.
        values: arguments of that class.
        padded: whether it is verified with an attention mask that leaves out tokens.
    """

    config: str
    values: Mapping[str, Any] = field(default_factory=dict)
    padded: bool = False

    def build(self) -> Any:
        """Return the configuration, with eager attention and without dropout."""
        kind = getattr(transformers(), self.config)
        config = kind(**self.values, attn_implementation="eager")
        for name, value in vars(config).items():
            if "drop" in name and isinstance(value, float):
                setattr(config, name, 0.0)
        return config


MODEL_FAMILIES: dict[str, ModelFamily] = {
    "llama": ModelFamily("LlamaConfig", _LLAMA, padded=True),
    "llama-tied": ModelFamily("LlamaConfig", {**_LLAMA, "tie_word_embeddings": True}),
    "mistral": ModelFamily("MistralConfig", {**_LLAMA, "sliding_window": 5}),
    "mixtral": ModelFamily("MixtralConfig", {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ModelFamily("Qwen2Config", {**_LLAMA, "tie_word_embeddings": True}),
    "qwen2-moe": ModelFamily(
        "Qwen2MoeConfig", {**_LLAMA, **_MOE, "shared_expert_intermediate_size": 16, "decoder_sparse_step": 2}
    ),
    "qwen3": ModelFamily("Qwen3Config", _WIDE_HEADS),
    "qwen3-moe": ModelFamily("Qwen3MoeConfig", {**_WIDE_HEADS, **_MOE}),
    "gemma": ModelFamily("GemmaConfig", _WIDE_HEADS),
    "gemma2": ModelFamily("Gemma2Config", {**_WIDE_HEADS, "sliding_window": 5}),
    "gemma3": ModelFamily("Gemma3TextConfig", {**_WIDE_HEADS, "sliding_window": 5}),
    "gpt2": ModelFamily("GPT2Config", _GPT, padded=True),
    "gpt-neo": ModelFamily("GPTNeoConfig", {**_GPT, "attention_types": [[["global", "local"], 2]], "window_size": 5}),
    "gpt-neox": ModelFamily("GPTNeoXConfig", {**_GPT, "intermediate_size": 48}),
    "gptj": ModelFamily("GPTJConfig", {**_GPT, "rotary_dim": 4}),
    "bloom": ModelFamily("BloomConfig", {**_GPT, "n_layer": 4}),
    "opt": ModelFamily("OPTConfig", {**_GPT, "ffn_dim": 48, "word_embed_proj_dim": 16}),
    "phi": ModelFamily("PhiConfig", {**_LLAMA, "num_key_value_heads": 4}),
    "phi3": ModelFamily("Phi3Config", _LLAMA),
    "falcon": ModelFamily("FalconConfig", {**_GPT, "alibi": False}),
    "mpt": ModelFamily(
        "MptConfig", {"d_model": 32, "n_heads": 4, "n_layers": 4, "vocab_size": VOCABULARY_SIZE, "max_seq_len": 64}
    ),
    "stablelm": ModelFamily("StableLmConfig", _LLAMA),
    "starcoder2": ModelFamily("Starcoder2Config", _LLAMA),
    "olmo": ModelFamily("OlmoConfig", _LLAMA),
    "olmo2": ModelFamily("Olmo2Config", _LLAMA),
    "olmoe": ModelFamily("OlmoeConfig", {**_LLAMA, "num_experts": 4, "num_experts_per_tok": 2}),
    "cohere": ModelFamily("CohereConfig", _LLAMA),
    "cohere2": ModelFamily("Cohere2Config", {**_LLAMA, "sliding_window": 5}),
    "granite": ModelFamily("GraniteConfig", {**_LLAMA, "embedding_multiplier": 2.0, "logits_scaling": 3.0}),
    "granite-moe": ModelFamily("GraniteMoeConfig", {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "glm4": ModelFamily("Glm4Config", _WIDE_HEADS),
    "smollm3": ModelFamily("SmolLM3Config", _LLAMA),
    "deepseek-v2": ModelFamily("DeepseekV2Config", _DEEPSEEK),
    "deepseek-v3": ModelFamily("DeepseekV3Config", _DEEPSEEK),
    "gpt-oss": ModelFamily(
        "GptOssConfig", {**_WIDE_HEADS, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5}
    ),
    "mamba": ModelFamily(
        "MambaConfig", {"vocab_size": VOCABULARY_SIZE, "hidden_size": 32, "num_hidden_layers": 4, "state_size": 4}
    ),
    "codegen": ModelFamily("CodeGenConfig", {**_GPT, "rotary_dim": 4}),
    "xglm": ModelFamily(
        "XGLMConfig",
        {"vocab_size": VOCABULARY_SIZE, "d_model": 32, "num_layers": 4, "attention_heads": 4, "ffn_dim": 48},
    ),
    "biogpt": ModelFamily("BioGptConfig", {**_GPT, "intermediate_size": 48}),
    "nemotron": ModelFamily("NemotronConfig", _WIDE_HEADS),
    "jamba": ModelFamily(
        "JambaConfig",
        {
            **_LLAMA,
            "num_experts": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 4,
            "use_mamba_kernels": False,
        },
    ),
    "openai-gpt": ModelFamily(
        "OpenAIGPTConfig", {"vocab_size": VOCABULARY_SIZE, "n_embd": 32, "n_layer": 4, "n_head": 4}
    ),
    "apertus": ModelFamily("ApertusConfig", _LLAMA),
    "persimmon": ModelFamily("PersimmonConfig", {**_LLAMA, "num_key_value_heads": 4}),
    "dots1": ModelFamily(
        "Dots1Config",
        {**_WIDE_HEADS, **_ROUTED, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    ),
    "ernie4.5": ModelFamily("Ernie4_5Config", _WIDE_HEADS),
    "ernie4.5-moe": ModelFamily(
        "Ernie4_5_MoeConfig", {**_LLAMA, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16}
    ),
    "exaone4": ModelFamily("Exaone4Config", {**_WIDE_HEADS, "sliding_window": 5}),
    "falcon-h1": ModelFamily("FalconH1Config", {**_WIDE_HEADS, **_MAMBA, "mamba_d_ssm": 64, "mamba_n_groups": 1}),
    "flex-olmo": ModelFamily("FlexOlmoConfig", {**_LLAMA, "num_experts": 4, "num_experts_per_tok": 2}),
    "glm": ModelFamily("GlmConfig", _WIDE_HEADS),
    "glm4-moe": ModelFamily("Glm4MoeConfig", {**_WIDE_HEADS, **_ROUTED, "first_k_dense_replace": 1}),
    "gpt-bigcode": ModelFamily("GPTBigCodeConfig", _GPT),
    "granite-hybrid": ModelFamily(
        "GraniteMoeHybridConfig",
        {
            **_LLAMA,
            **_MAMBA,
            "layer_types": ["mamba", "attention"] * 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 16,
        },
    ),
    "hunyuan": ModelFamily("HunYuanDenseV1Config", _WIDE_HEADS),
    "hunyuan-moe": ModelFamily("HunYuanMoEV1Config", {**_WIDE_HEADS, "num_experts": 4, "moe_topk": 2}),
    "lfm2": ModelFamily("Lfm2Config", {**_LLAMA, "layer_types": ["conv", "full_attention"] * 2}),
    "llama4": ModelFamily(
        "Llama4TextConfig",
        {
            **_WIDE_HEADS,
            "intermediate_size_mlp": 48,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 8,
        },
    ),
    "mamba2": ModelFamily(
        "Mamba2Config",
        {
            "vocab_size": VOCABULARY_SIZE,
            "hidden_size": 32,
            "num_hidden_layers": 4,
            "state_size": 4,
            "num_heads": 8,
            "head_dim": 8,
            "n_groups": 2,
        },
    ),
    "minimax-m2": ModelFamily("MiniMaxM2Config", {**_WIDE_HEADS, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "ministral": ModelFamily("MinistralConfig", {**_WIDE_HEADS, "sliding_window": 5}),
    "nemotron-h": ModelFamily(
        "NemotronHConfig",
        {
            **_WIDE_HEADS,
            "layers_block_type": ["mamba", "attention", "mlp", "mamba"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 4,
            "n_groups": 2,
        },
    ),
    "olmo3": ModelFamily("Olmo3Config", {**_LLAMA, "sliding_window": 5}),
    # In training Phi-MoE chooses experts at random unless both noises are off, so no two runs would be equal.
    "phi-moe": ModelFamily(
        "PhimoeConfig",
        {
            **_LLAMA,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "router_jitter_noise": 0.0,
            "input_jitter_noise": 0.0,
        },
    ),
    "qwen3-next": ModelFamily(
        "Qwen3NextConfig", {**_WIDE_HEADS, **_MOE, **_LINEAR_ATTENTION, "shared_expert_intermediate_size": 16}
    ),
    "qwen3.5": ModelFamily("Qwen3_5TextConfig", {**_WIDE_HEADS, **_LINEAR_ATTENTION}),
    "qwen3.5-moe": ModelFamily(
        "Qwen3_5MoeTextConfig", {**_WIDE_HEADS, **_MOE, **_LINEAR_ATTENTION, "shared_expert_intermediate_size": 16}
    ),
    "recurrent-gemma": ModelFamily(
        "RecurrentGemmaConfig", {**_WIDE_HEADS, "lru_width": 32, "attention_window_size": 8}
    ),
    "seed-oss": ModelFamily("SeedOssConfig", _WIDE_HEADS),
}


class FamilyBatch(NamedTuple):
    """Token numbers and targets, int64 [rows, length], and the other tensors that the layers take by name."""

    tokens: Tensor
    targets: Tensor
    keywords: dict[str, Tensor]


class ParameterValues(NamedTuple):
    """A parameter on one rank after a step: its value and its gradient (None: it has none)."""

    value: Tensor
    gradient: Tensor | None


@dataclass(frozen=True)
class Verdict:
    """Deviation of a family's step in a pipeline from the same step in one process.

    Attributes:
        schedule: its schedule, and whether layers were recomputed and rows packed, in words.
        loss_error: |a - b| / |b|, where b is the loss of one process.
        worst_error: the largest of ||a - b|| / max(||b||, a thousandth of the median parameter's ||b||) over all gradients.
        worst_parameter: the parameter with that gradient; empty where all gradients are equal.
        separate: share of the parameters whose gradient can be deferred to W.
        passed: whether both errors are within the tolerance.
    """

    family: str
    schedule: str
    loss_error: float
    worst_error: float
    worst_parameter: str
    separate: float
    passed: bool


def chosen(names: Sequence[str]) -> tuple[str, ...]:
    """Return `names`, or all families if it is empty. Raises UsageError, with the nearest name, for an unknown one."""
    for name in names:
        if name not in MODEL_FAMILIES:
            raise UsageError(f"there is no family {name!r} to verify{did_you_mean(name, MODEL_FAMILIES)}")
    return tuple(names) or tuple(MODEL_FAMILIES)


def make_batch(family: str, packed: bool = False) -> FamilyBatch:
    """Return a batch of random tokens, different in every micro-batch; for a padded family, rows of different lengths.

    Args:
        packed: rows of two documents instead, whose lengths differ from row to row.
    """
    generator = torch.Generator().manual_seed(stable_seed("families", family))
    rows = MICROBATCHES + 1  # one micro-batch is larger than the others
    tokens, targets = torch.randint(3, VOCABULARY_SIZE, (2, rows, SEQUENCE_LENGTH), generator=generator)
    if packed:
        places, first = torch.arange(SEQUENCE_LENGTH), 3 + torch.arange(rows)[:, None]
        return FamilyBatch(tokens, targets, {"position_ids": torch.where(places < first, places, places - first)})
    if not MODEL_FAMILIES[family].padded:
        return FamilyBatch(tokens, targets, {})
    mask = (torch.arange(SEQUENCE_LENGTH) < SEQUENCE_LENGTH - torch.arange(rows)[:, None]).long()
    return FamilyBatch(tokens * mask, targets.masked_fill(mask == 0, IGNORE_INDEX), {"attention_mask": mask})


def run(families: Sequence[str], context: WorkerContext, tolerance: float) -> Iterator[Verdict | None]:
    """Verify each family in each variant; collective, so every worker must iterate to the end.

    Yields:
        the verdict of each on rank 0, None on the other ranks.
    """
    for family in families:
        model = hf.layers(MODEL_FAMILIES[family].build())
        for variant in VARIANTS:
            if variant.packed and not model.cut.keeps_documents_apart():
                continue
            options = RuntimeOptions(
                device=context.device,
                watchdog=context.watchdog,
                seed=0,
                recompute="full" if variant.recompute else "none",
            )
            schedule = SCHEDULES[variant.schedule]()
            pipeline = Pipeline(model, schedule, loss=cross_entropy, tied=model.tied, options=options)
            context.close_to_strangers()
            batch = make_batch(family, variant.packed)
            loss = pipeline.step(batch.tokens, batch.targets, **batch.keywords).item()
            mine = {name: (p.detach(), p.grad) for name, p in pipeline.named_parameters()}
            group = pipeline.mesh.everyone.group
            with pipeline.waiting("the other ranks' gradients"):
                ranks = [mine] if group is None else gather_tree(mine, group, 0)
            pipeline.close()
            if ranks is None:
                yield None
                continue
            held = [{key: ParameterValues(*value) for key, value in each.items()} for each in ranks]
            yield compare(family, variant, model, held, loss, tolerance)


def compare(
    family: str,
    variant: Variant,
    model: hf.ModelLayers,
    ranks: Iterable[Mapping[str, ParameterValues]],
    loss: float,
    tolerance: float,
) -> Verdict:
    """Compare a step's loss and the gradients of all ranks with a step of one process with the same weights."""
    errors: dict[str, float] = {}
    holdings = [(name, held) for each in ranks for name, held in each.items()]
    reference = _whole_model(model, {hf.hub_name(name): held.value for name, held in holdings})
    want_loss = _serial_step(reference, make_batch(family, variant.packed))
    parameters = dict(reference.named_parameters(remove_duplicate=False))
    norms = [float(p.grad.norm()) for p in reference.parameters() if p.grad is not None]
    floor = 1e-3 * statistics.median(norms)
    for name, held in holdings:
        want = parameters[hf.hub_name(name)]
        if not torch.equal(held.value, want) or (held.gradient is None) != (want.grad is None):
            error = float("inf")  # copies of a weight differ, or only one of the two has a gradient
        elif held.gradient is None or want.grad is None:
            continue
        else:
            error = float((held.gradient - want.grad).norm()) / max(float(want.grad.norm()), floor)
        errors[name] = error if error == error else float("inf")
    unseen = {id(p) for p in reference.parameters()} - {id(parameters[hf.hub_name(name)]) for name, _ in holdings}
    errors.update((name, float("inf")) for name, p in parameters.items() if id(p) in unseen)
    worst = max(errors, key=lambda name: errors[name])
    loss_error = abs(loss - want_loss) / abs(want_loss)
    passed = loss_error <= tolerance and errors[worst] <= tolerance
    return Verdict(
        family, str(variant), loss_error, errors[worst], worst if errors[worst] else "", model.separate_share, passed
    )


def _whole_model(model: hf.ModelLayers, values: Mapping[str, Tensor]) -> Any:
    """Build the model with `transformers`, with the weights `values` (name in `transformers` -> value), in training mode."""
    whole = transformers().AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in whole.named_parameters(remove_duplicate=False):
            if name in values:
                parameter.copy_(values[name])
    return whole.train()


def _serial_step(model: Any, batch: FamilyBatch) -> float:
    """Return the mean loss over the batch, computed part by part; the gradients are accumulated in `model`."""
    total, loss = int((batch.targets != IGNORE_INDEX).sum()), 0.0
    for tokens, targets, keywords in _parts(batch):
        logits = model(tokens, use_cache=False, **keywords).logits
        value = cross_entropy(logits, targets) * (int((targets != IGNORE_INDEX).sum()) / total)
        value.backward()  # type: ignore[no-untyped-call]
        loss += value.item()
    return loss


def _parts(batch: FamilyBatch) -> Iterator[FamilyBatch]:
    """Yield a pipeline's micro-batches; of packed rows, each document alone."""
    rows, positions = len(batch.tokens), batch.keywords.get("position_ids")
    if positions is None:
        sizes = [rows // MICROBATCHES + (at < rows % MICROBATCHES) for at in range(MICROBATCHES)]
        split = [torch.split(value, sizes) for value in (batch.tokens, batch.targets, *batch.keywords.values())]
        for tokens, targets, *values in zip(*split, strict=True):
            yield FamilyBatch(tokens, targets, dict(zip(batch.keywords, values, strict=True)))
        return
    for row in range(rows):
        first = [int(place) for place in (positions[row] == 0).nonzero()]
        for start, end in pairwise([*first, SEQUENCE_LENGTH]):
            part = slice(row, row + 1), slice(start, end)
            yield FamilyBatch(batch.tokens[part], batch.targets[part], {})
