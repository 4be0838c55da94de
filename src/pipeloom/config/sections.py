"""The configuration's typed sections. Defaults and descriptions are in default.toml, nowhere else."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from pipeloom.config.fault import parse_fault
from pipeloom.errors import UsageError
from pipeloom.limits import (
    LEAST_TIMEOUT,
    MOST_CELLS,
    MOST_CHUNKS,
    MOST_LAYERS,
    MOST_RANKS,
    MOST_SECONDS,
    MOST_SEED,
    MOST_STEPS,
    MOST_THREADS,
    MOST_WIDTH,
    MOST_WORKERS,
)
from pipeloom.schedule.check import TransportName
from pipeloom.schedule.families import canonical_name
from pipeloom.schedule.transforms import parsed_transform
from pipeloom.shapes.decoder import DecoderShape, DecoderSizes
from pipeloom.shapes.hub import foreign_shape

Count = Annotated[int, Field(ge=1, le=MOST_WIDTH)]
Whole = Annotated[int, Field(ge=0, le=MOST_WIDTH)]
Blocks = Annotated[int, Field(ge=1, le=MOST_LAYERS)]
Workers = Annotated[int, Field(ge=1, le=MOST_WORKERS)]
Chunks = Annotated[int, Field(ge=1, le=MOST_CHUNKS)]
Steps = Annotated[int, Field(ge=1, le=MOST_STEPS)]
StepsOrNone = Annotated[int, Field(ge=0, le=MOST_STEPS)]
# A step of a large model has some 100,000 operators, and torch keeps all of them until the last step is over.
ProfiledSteps = Annotated[int, Field(ge=1, le=20)]
Seed = Annotated[int, Field(ge=0, le=MOST_SEED)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
RouterName = Literal["softmax", "noisy", "switch", "gshard", "sigmoid"]
COMPUTED = -1
# Key that is derived now -> its former default, and what holds in its place; other values are accepted with a note.
DERIVED: dict[str, tuple[Any, str]] = {
    "parallel.order": ("tp-ep-dp-pp", "workers are numbered along tp first, then ep, dp and pp"),
    "schedule.slice_cuts": ("balanced", "slices take the same time"),
    "schedule.receive_depth": (None, "a channel keeps two receives open, and more where the schedule needs more"),
    "train.tune_cpu": (True, "workers on CPUs keep freed memory, and multiply with oneDNN where that is faster"),
}
NO_DATA = ("",)  # data.source of a plan: a dry run accepts it, and `train` does not start


def _listed(value: Any, holds: Callable[[Any], bool], words: str) -> tuple[Any, ...]:
    """Return a list as a tuple. Raises ValueError with the words for any other value, and for an item that does not hold."""
    if not isinstance(value, list | tuple) or not all(map(holds, value)):
        raise ValueError(words)
    return tuple(value)


def _is_int(value: Any) -> bool:
    return type(value) is int


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


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
    if value in ("none", "full", *PARTS_OF_BLOCKS):
        return value
    words = f"it must be 'none', 'full', a part of the blocks ({', '.join(map(repr, PARTS_OF_BLOCKS))}), or a list of blocks "
    blocks = _listed(value, lambda n: _is_int(n) and n >= 0, f"{words}counted from 0, such as [0, 2]")
    return tuple(sorted(set(blocks)))


def _is_dtype(value: Any) -> Any:
    if value in ("float16", "fp16", "half"):
        raise ValueError(
            "fp16 needs loss scaling, which Pipeloom does not do; nearest: bfloat16, which is as fast and has the "
            "range of float32"
        )
    return value


def _is_frequency(value: Any) -> Any:
    if type(value) is int and value >= 1:
        return value
    words = "it must be a number n (blocks 0, n, 2n, … have experts) or a list of 1 (experts) and 0; nearest: 1"
    return _listed(value, _is_int, words)


def _is_class(value: str) -> str:
    module, _, name = value.rpartition(":")
    plain = module.endswith(".py") or all(part.isidentifier() for part in module.split("."))
    if value and not (plain and name.isidentifier()):
        raise ValueError(
            "it must be module:class or file.py:class, such as my_experts:Experts; nearest: empty, the built-in class"
        )
    return value


def _are_transforms(value: Any) -> Any:
    given = [word.strip() for word in value.split(",")] if isinstance(value, str) else value
    words = _listed(given, _is_text, 'it must be a list of transforms, such as ["unpair", "split-cooldown"]')
    try:
        for word in words:
            parsed_transform(word)
    except UsageError as error:
        raise ValueError(str(error)) from None
    return words


def _auto_or(kind: type[float], what: str, least: float, most: float) -> BeforeValidator:
    """Return the check of a number from `least` to `most`, or "auto"."""

    def check(value: Any) -> Any:
        number = value if isinstance(value, int | kind) and not isinstance(value, bool) else math.nan
        if value != "auto" and not least <= number <= most:
            raise ValueError(f"it must be {what} from {least:g} to {most:,.0f}, or 'auto'; nearest: auto")
        return value if value == "auto" else kind(value)

    return BeforeValidator(check)


def _is_resume(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
        raise ValueError("it must be 'none', 'auto', the directory of a checkpoint, or a step; nearest: 'auto'")
    if isinstance(value, int) and not 0 <= value <= MOST_STEPS:
        raise ValueError(f"a step must be from 0 to {MOST_STEPS}; nearest: {0 if value < 0 else MOST_STEPS}")
    return value


def _is_sources(value: Any) -> Any:
    names = [value] if isinstance(value, str) else value
    if value == "" or (isinstance(names, list | tuple) and tuple(names) == NO_DATA):
        return NO_DATA
    words = 'it must be a file, a folder, or a list of them, such as ["a.jsonl", "b.jsonl"]'
    return _listed(names or None, lambda name: _is_text(name) and bool(name), words)


def _is_weights(value: Any) -> Any:
    words = "it must be a list of numbers above 0, one for each source, such as [3, 1]"
    return tuple(map(float, _listed(value, lambda n: type(n) in (int, float) and 0 < n < 1e30, words)))


Sources = Annotated[tuple[str, ...], BeforeValidator(_is_sources)]
Weights = Annotated[tuple[float, ...], BeforeValidator(_is_weights)]


def _are_targets(value: Any) -> Any:
    if not isinstance(value, str):
        words = 'it must be "all-linear", a list of names such as ["q_proj", "v_proj"], or a regular expression'
        return _listed(value or None, _is_text, words)
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"it is not a regular expression: {error}") from None
    return value


ScheduleName = Annotated[str, Field(min_length=1), AfterValidator(canonical_name)]
ClassName = Annotated[str, AfterValidator(_is_class)]
Degree = Annotated[int, Field(le=MOST_WORKERS), AfterValidator(_is_degree)]
Threads = Annotated[
    Annotated[int, Field(le=MOST_THREADS)] | Literal["auto"], _auto_or(int, "a whole number", 1, MOST_THREADS)
]
Timeout = Annotated[float | Literal["auto"], _auto_or(float, "a number of seconds", LEAST_TIMEOUT, MOST_SECONDS)]
Dtype = Annotated[Literal["float32", "bfloat16", "float64"], BeforeValidator(_is_dtype)]
Transforms = Annotated[tuple[str, ...], BeforeValidator(_are_transforms)]
Resume = Annotated[Annotated[int, Field(le=MOST_STEPS)] | str, BeforeValidator(_is_resume)]
Targets = Annotated[str | tuple[str, ...], BeforeValidator(_are_targets)]
MoeFrequency = Annotated[Count | tuple[Annotated[int, Field(le=MOST_STEPS)], ...], BeforeValidator(_is_frequency)]
PartOfBlocks = Literal["norms", "activation", "attention", "mlp"]
PARTS_OF_BLOCKS: tuple[PartOfBlocks, ...] = get_args(PartOfBlocks)
Recompute = Annotated[Literal["none", "full"] | PartOfBlocks | tuple[int, ...], BeforeValidator(_is_recompute)]


class Section(BaseModel):
    """Base of the sections: frozen, no unknown keys, no conversions between types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, hide_input_in_errors=True)


class ModelSection(Section, DecoderSizes):
    """`[model]`: the shape of the decoder, in Hugging Face's names."""

    source: str
    preset: str
    weights: str
    num_hidden_layers: Blocks
    hidden_size: Count
    num_attention_heads: Count
    num_key_value_heads: Count
    head_dim: Count | None = None
    attention_bias: bool
    qkv_bias: bool
    qk_norm: bool
    intermediate_size: Count
    vocab_size: Count
    tie_word_embeddings: bool
    rope_theta: Positive
    rms_norm_eps: Positive
    dropout: Fraction
    num_experts: Whole
    num_experts_per_tok: Count
    moe_layer_freq: MoeFrequency
    norm_topk_prob: bool
    moe_intermediate_size: Whole
    num_shared_experts: Whole
    router: RouterName
    experts_class: ClassName
    router_class: ClassName
    capacity_factor: NotNegative
    pad_to_capacity: bool
    aux_loss_coef: NotNegative
    z_loss_coef: NotNegative
    num_nextn_predict_layers: Whole
    mtp_loss_coef: NotNegative

    def shape(self) -> DecoderShape:
        """Return these values, or those of the file of a foreign model, as the library's type.

        Raises:
            ArgumentError: sizes contradict each other.
            ConfigError: the file cannot be read.
        """
        if self.source:
            return foreign_shape(self.source, f'model.source = "{self.source}"')
        return DecoderShape(**self.model_dump(exclude={"source", "preset", "weights", "experts_class", "router_class"}))


class LoraSection(Section):
    """`[lora]`: low-rank adapters of linear layers, in peft's names; all other weights are frozen."""

    r: Whole
    lora_alpha: Positive
    lora_dropout: Fraction
    target_modules: Targets
    adapter: str


class ParallelSection(Section):
    """`[parallel]`: the size of each axis of parallelism. There are pp x dp x cp x tp workers; one of pp, dp, tp may be -1."""

    pp: Annotated[int, Field(le=MOST_RANKS), AfterValidator(_is_degree)]
    dp: Degree
    tp: Degree
    cp: Workers
    cp_exchange: Literal["gather", "ring"]
    zero: Annotated[int, Field(ge=0, le=3)]
    unshard_slots: Count
    sp: bool
    ep: Workers
    ep_nodes: Workers
    ep_chunks: Count
    ep_blocks: Count
    stages: str
    vocabulary: Literal["last", "pp"]


class ScheduleSection(Section):
    """`[schedule]`: a family, a CSV or JSON file, or module:function."""

    name: ScheduleName
    microbatches: Annotated[int, Field(ge=1, le=MOST_CELLS)]
    chunks: Chunks | None = None
    slices: Annotated[int, Field(ge=1, le=MOST_CELLS)] | None = None
    options: dict[str, Any]
    overlap_p2p: bool | None = None
    transport: TransportName
    shapes: Literal["once", "each"]
    transforms: Transforms
    replan: StepsOrNone
    replan_threshold: Positive


class TrainSection(Section):
    """`[train]`: steps and batches, device and arithmetic, and what happens when a step fails."""

    steps: Steps
    seq_len: Count
    global_batch_size: Count
    seed: Seed
    dtype: Dtype
    label_smoothing: Fraction
    recompute: Recompute
    compile: Literal["none", "blocks"]
    compile_backend: Literal["inductor", "aot_eager"]
    device: Literal["auto", "cpu", "cuda"]
    devices: tuple[Whole, ...] = Field(strict=False)
    threads: Threads
    deterministic: bool
    reproducible: bool
    on_nan: Literal["stop", "skip", "rollback"]
    on_spike: Literal["ignore", "stop", "skip", "rollback"]
    rollbacks: Whole
    restarts: Whole
    eval_every: StepsOrNone
    eval_batches: Count
    check_every: StepsOrNone
    profile_from: StepsOrNone
    profile_steps: ProfiledSteps
    memory_snapshot: bool
    timeout: Timeout

    @property
    def seconds(self) -> float | None:
        """The timeout in seconds; None: auto."""
        return None if self.timeout == "auto" else self.timeout


class OptimizerSection(Section):
    """`[optimizer]`: the optimizer, its learning rate and its weight decay."""

    name: Literal["adamw", "sgd", "muon"]
    lr: Positive
    lr_schedule: Literal["cosine", "linear", "wsd", "constant"]
    min_lr: NotNegative
    warmup_steps: StepsOrNone
    decay_steps: StepsOrNone
    weight_decay: NotNegative
    embedding_decay: NotNegative | None = None
    vector_decay: NotNegative
    betas: tuple[Fraction, Fraction] = Field(strict=False)
    momentum: Fraction
    nesterov: bool
    adjust_lr_fn: Literal["match_rms_adamw", "original"]
    clip_norm: NotNegative
    lr_rule: Literal["none", "linear", "sqrt"]
    zero1: bool
    barrier: bool


class DataSection(Section):
    """`[data]`: sources, tokenizer and sampling."""

    source: Sources
    format: Literal["auto", "text", "jsonl", "parquet", "tokens", "dataset"]
    field: str
    weights: Weights
    validation: str
    held_out: Annotated[float, Field(gt=0, le=0.5)]
    tokenizer: Annotated[str, Field(min_length=1)]
    bos: Annotated[str, Field(min_length=1)]
    eos: Annotated[str, Field(min_length=1)]
    token_type: Literal["auto", "uint16", "uint32"]
    documents: Literal["auto", "concatenate", "pack", "sort"]
    batching: Literal["equal", "planned"]
    template: Literal["auto", "tokenizer", "simple"]
    loss_on: Literal["answers", "all"]
    on_error: Literal["stop", "skip"]
    cache: str
    sampling: Literal["auto", "anywhere", "shuffle-then-split", "split-then-shuffle"]
    remainder: Literal["pad", "drop"]


class CheckpointSection(Section):
    """`[checkpoint]`: saving and resuming."""

    dir: str
    every: StepsOrNone
    keep: Whole
    keep_every: StepsOrNone
    asynchronous: bool
    resume: Resume


class SampleSection(Section):
    """`[sample]`: the text that a run generates at its end."""

    prompt: str
    tokens: Whole


class LogSection(Section):
    """`[log]`: log lines, metrics and the HTML page."""

    dir: Annotated[str, Field(min_length=1)]
    every: Steps
    html: str
    norms: Literal["none", "layer", "parameter"]
    tensorboard: bool
    wandb: str


class DebugSection(Section):
    """`[debug]`: injected faults, and checks that detect faults."""

    fault: Annotated[str, AfterValidator(_is_fault)]
    checksum: bool


class Config(Section):
    """A whole configuration. `load` creates it from files and overrides."""

    model: ModelSection
    lora: LoraSection
    parallel: ParallelSection
    schedule: ScheduleSection
    train: TrainSection
    optimizer: OptimizerSection
    data: DataSection
    checkpoint: CheckpointSection
    sample: SampleSection
    log: LogSection
    debug: DebugSection


SECTIONS: dict[str, type[Section]] = {
    name: field.annotation
    for name, field in Config.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
}
