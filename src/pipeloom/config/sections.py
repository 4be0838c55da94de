"""The configuration's typed sections. Defaults are in default.toml, nowhere else."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from pipeloom.config.fault import parse_fault
from pipeloom.errors import UsageError

Count = Annotated[int, Field(ge=1)]
Whole = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
DtypeName = Literal["float32", "bfloat16", "float64"]
DeviceName = Literal["auto", "cpu", "cuda"]
RouterName = Literal["softmax", "noisy", "switch", "gshard", "sigmoid"]
TransportName = Literal["auto", "individual", "batched", "shared"]
RateRule = Literal["none", "linear", "sqrt"]
SamplingName = Literal["anywhere", "shuffle-then-split", "split-then-shuffle"]
COMPUTED = -1


def _is_fault(text: str) -> str:
    try:
        parse_fault(text)
    except UsageError as error:
        raise ValueError(str(error)) from None
    return text


def _is_degree(degree: int) -> int:
    if degree != COMPUTED and degree < 1:
        raise ValueError("it must be at least 1, or -1 to be computed from the number of workers; nearest: 1")
    return degree


def _is_recompute(value: Any) -> Any:
    if value in ("none", "full"):
        return value
    if not isinstance(value, list | tuple) or not all(type(n) is int and n >= 0 for n in value):
        raise ValueError("it must be 'none', 'full', or a list of blocks counted from 0, such as [0, 2]")
    return tuple(sorted(set(value)))


Degree = Annotated[int, AfterValidator(_is_degree)]
Recompute = Annotated[Literal["none", "full"] | tuple[int, ...], BeforeValidator(_is_recompute)]


class Section(BaseModel):
    """Base of the sections: frozen, no unknown keys, no conversions between types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, hide_input_in_errors=True)


class ModelSection(Section):
    """`[model]`: the shape of the decoder, in Hugging Face's names."""

    num_hidden_layers: Count = Field(description="transformer blocks")
    hidden_size: Count = Field(description="width of a token")
    num_attention_heads: Count = Field(description="query heads")
    num_key_value_heads: Count = Field(description="key and value heads; fewer than query heads is grouped attention")
    intermediate_size: Count = Field(description="width inside the feed-forward part")
    vocab_size: Count = Field(description="tokens known; 256 or more for the byte tokenizer")
    tie_word_embeddings: bool = Field(description="the output layer uses the embedding's weight")
    rope_theta: Positive = Field(description="base of the rotary position frequencies")
    dropout: Fraction = Field(description="share of each block's two outputs that training drops")
    num_experts: Whole = Field(description="experts of each block's feed-forward part; 0: one dense part")
    num_experts_per_tok: Count = Field(description="experts that a token goes to")
    moe_intermediate_size: Whole = Field(description="width inside an expert; 0: intermediate_size")
    num_shared_experts: Whole = Field(description="experts' worth of width that every token goes through, gated")
    router: RouterName = Field(
        description="softmax, noisy, switch (1 expert), gshard (2), sigmoid (balanced by a bias)"
    )
    capacity_factor: NotNegative = Field(
        description="rows an expert takes, over an even share; 0: all, nothing is dropped"
    )
    aux_loss_coef: NotNegative = Field(description="of the load-balance loss, which is 1 when experts are used evenly")
    z_loss_coef: NotNegative = Field(description="of the mean squared logsumexp of the router's logits")

    @property
    def expert_width(self) -> int:
        """Width inside an expert."""
        return self.moe_intermediate_size or self.intermediate_size


class ParallelSection(Section):
    """`[parallel]`: over how many ranks each axis spreads. The workers are pp x dp x tp; one of these may be -1."""

    pp: Degree = Field(description="pipeline ranks; -1: what the number of workers leaves")
    dp: Degree = Field(description="data-parallel replicas; or -1")
    tp: Degree = Field(description="tensor-parallel ranks; or -1")
    sp: bool = Field(description="norms and dropout on 1/tp of each sequence")
    ep: Count = Field(description="expert-parallel ranks, of the data-parallel ones")
    ep_nodes: Count = Field(description="machines that ep spans; above 1 a token crosses to each of them once")
    ep_chunks: Count = Field(description="parts of a micro-batch whose all-to-all and experts overlap each other")
    ep_blocks: Count = Field(description="parts of each sequence whose all-to-all overlaps the next part's attention")
    stages: str = Field(description='layers of each stage, as "Et*3|(tt|)*2tL"; empty: balanced from costs')


class ScheduleSection(Section):
    """`[schedule]`: a family, a CSV or JSON file, or module:function."""

    name: Annotated[str, Field(min_length=1)] = Field(description="a family, a CSV or JSON file, or module:function")
    microbatches: Count = Field(description="micro-batches of a step; any number")
    chunks: Count | None = Field(default=None, description="stages a rank holds; not given: the schedule's own default")
    options: dict[str, Any] = Field(description="the schedule's own options, such as rounds")
    overlap_p2p: bool = Field(description="post receives before the present action computes")
    transport: TransportName = Field(
        description="auto (shared memory where all ranks can), individual (a call a message), batched, shared"
    )
    head_deferral: Whole | None = Field(
        default=None,
        description="micro-batches whose output-layer weight gradient waits for the cool-down; 0: all; not given: none",
    )


class TrainSection(Section):
    """`[train]`: how long, on what, in which arithmetic."""

    steps: Count = Field(description="optimizer steps")
    seq_len: Count = Field(description="tokens of a sequence")
    global_batch_size: Count = Field(description="sequences of a step, over all data-parallel replicas")
    seed: Whole = Field(description="of the weights and of the order of the data")
    dtype: DtypeName = Field(
        description="of computation; bfloat16 keeps gradients, weights and averages in float32 too"
    )
    label_smoothing: Fraction = Field(description="share of the target that is spread over the vocabulary")
    recompute: Recompute = Field(
        description="none, full, or the blocks (from 0) whose forward runs again in the backward: [0, 3]"
    )
    device: DeviceName = Field(description="auto: CUDA if there is a device for each worker, else the CPU")
    deterministic: bool = Field(description="refuse operations that differ from run to run")
    timeout: Positive = Field(description="seconds that a rank may wait for a message or another rank")


class OptimizerSection(Section):
    """`[optimizer]`: AdamW with warm-up and cosine decay."""

    lr: Positive = Field(description="learning rate after warm-up")
    min_lr: NotNegative = Field(description="learning rate at the last step")
    weight_decay: NotNegative = Field(description="of matrices only")
    betas: tuple[Fraction, Fraction] = Field(strict=False, description="AdamW's two averages")
    warmup_steps: Whole = Field(description="steps of linear warm-up")
    clip_norm: NotNegative = Field(description="largest global gradient norm; 0: no clipping")
    lr_rule: RateRule = Field(
        description="lr and min_lr are for one replica's batch: times dp (linear, as for SGD) or its root (sqrt, AdamW)"
    )
    zero1: bool = Field(description="each data-parallel replica keeps its share of the optimizer's state only")
    barrier: bool = Field(
        description="wait for the global norm in each step; false: step first, take it back if need be"
    )


class DataSection(Section):
    """`[data]`: what is read."""

    source: Annotated[str, Field(min_length=1)] = Field(description="stdlib, or a text file or folder")
    tokenizer: Literal["bytes"] = Field(description="bytes: one token a byte")
    sampling: SamplingName = Field(
        description="windows from anywhere in the text, or each once an epoch: shuffle-then-split, split-then-shuffle"
    )
    remainder: Literal["pad", "drop"] = Field(description="the last batch of an epoch: pad repeats windows")


class LogSection(Section):
    """`[log]`: what is written."""

    dir: Annotated[str, Field(min_length=1)] = Field(description="folder in which each run makes its own")
    every: Count = Field(description="steps between log lines")


class DebugSection(Section):
    """`[debug]`: failures made on purpose."""

    fault: Annotated[str, AfterValidator(_is_fault)] = Field(
        description="swap-microbatches:A,B and others; empty: none"
    )


class Config(Section):
    """A whole configuration. `load` makes one from files and overrides."""

    model: ModelSection
    parallel: ParallelSection
    schedule: ScheduleSection
    train: TrainSection
    optimizer: OptimizerSection
    data: DataSection
    log: LogSection
    debug: DebugSection


SECTIONS: dict[str, type[Section]] = {
    name: field.annotation
    for name, field in Config.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
}
