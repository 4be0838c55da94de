"""The configuration's typed sections. Defaults are in default.toml, nowhere else."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from pipeloom.config.fault import parse_fault
from pipeloom.decoder_shape import DecoderShape, expert_blocks
from pipeloom.errors import ArgumentError, UsageError, echo
from pipeloom.limits import (
    MOST_CELLS,
    MOST_CHUNKS,
    MOST_LAYERS,
    MOST_RANKS,
    MOST_SECONDS,
    MOST_SEED,
    MOST_STEPS,
    MOST_WIDTH,
    MOST_WORKERS,
)
from pipeloom.mesh_shape import parse_order
from pipeloom.schedule.check import TransportName
from pipeloom.schedule.families import canonical_name
from pipeloom.schedule.transforms import parsed_transform

Count = Annotated[int, Field(ge=1, le=MOST_WIDTH)]
Whole = Annotated[int, Field(ge=0, le=MOST_WIDTH)]
Blocks = Annotated[int, Field(ge=1, le=MOST_LAYERS)]
Workers = Annotated[int, Field(ge=1, le=MOST_WORKERS)]
Chunks = Annotated[int, Field(ge=1, le=MOST_CHUNKS)]
Steps = Annotated[int, Field(ge=1, le=MOST_STEPS)]
StepsOrNone = Annotated[int, Field(ge=0, le=MOST_STEPS)]
Seed = Annotated[int, Field(ge=0, le=MOST_SEED)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
DtypeName = Literal["float32", "bfloat16", "float64"]
NormsName = Literal["none", "layer", "parameter"]
DeviceName = Literal["auto", "cpu", "cuda"]
RouterName = Literal["softmax", "noisy", "switch", "gshard", "sigmoid"]
ShapesName = Literal["once", "each"]
RateSchedule = Literal["cosine", "linear", "wsd", "constant"]
OptimizerName = Literal["adamw", "sgd", "muon"]
MuonScale = Literal["match_rms_adamw", "original"]
RateRule = Literal["none", "linear", "sqrt"]
SamplingName = Literal["auto", "anywhere", "shuffle-then-split", "split-then-shuffle"]
OnNan = Literal["stop", "skip", "rollback"]
OnSpike = Literal["ignore", "stop", "skip", "rollback"]
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


def _is_order(text: str) -> str:
    try:
        return parse_order(text)
    except ArgumentError as error:
        raise ValueError(f"it {error.words.removeprefix(f'={echo(text)} ')}") from None


def _is_recompute(value: Any) -> Any:
    if value in ("none", "full"):
        return value
    if not isinstance(value, list | tuple) or not all(type(n) is int and n >= 0 for n in value):
        raise ValueError("it must be 'none', 'full', or a list of blocks counted from 0, such as [0, 2]")
    return tuple(sorted(set(value)))


def _is_dtype(value: Any) -> Any:
    if value in ("float16", "fp16", "half"):
        raise ValueError(
            "fp16 needs its loss scaled against gradients too small for it, which Pipeloom does not do; nearest: bfloat16, as "
            "fast and with the range of float32"
        )
    return value


def _is_frequency(value: Any) -> Any:
    if type(value) is int and value >= 1:
        return value
    if not isinstance(value, list | tuple) or not all(type(entry) is int for entry in value):
        raise ValueError(
            "it must be a number n (blocks 0, n, 2n, … have experts) or a list of 1 (experts) and 0; nearest: 1"
        )
    return tuple(value)


def _is_class(value: str) -> str:
    module, colon, name = value.partition(":")
    if value and not (colon and name.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        raise ValueError("it must be module:class, such as my_experts:Experts; nearest: empty, the built-in class")
    return value


def _are_transforms(value: Any) -> Any:
    words = [word.strip() for word in value.split(",")] if isinstance(value, str) else value
    if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
        raise ValueError('it must be a list of transforms, such as ["unpair", "split-cooldown"]')
    try:
        for word in words:
            parsed_transform(word)
    except UsageError as error:
        raise ValueError(str(error)) from None
    return tuple(words)


def _is_timeout(value: Any) -> Any:
    if value == "auto":
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ValueError("it must be a number of seconds above 0, or 'auto'; nearest: auto")
    if value > MOST_SECONDS:
        raise ValueError(f"it must be at most {MOST_SECONDS:,.0f} seconds, or 'auto'; nearest: {MOST_SECONDS:.0f}")
    return float(value)


def _is_resume(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
        raise ValueError("it must be 'none', 'auto', the directory of a checkpoint, or a step; nearest: 'auto'")
    if isinstance(value, int) and not 0 <= value <= MOST_STEPS:
        raise ValueError(f"a step is from 0 to {MOST_STEPS}; nearest: {0 if value < 0 else MOST_STEPS}")
    return value


def _is_sources(value: Any) -> Any:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError('it must be a file, a folder, or a list of them, such as ["a.jsonl", "b.jsonl"]')
    return tuple(names)


def _is_weights(value: Any) -> Any:
    numbers = list(value) if isinstance(value, list | tuple) else None
    if numbers is None or any(
        isinstance(n, bool) or not isinstance(n, int | float) or not 0 < n < 1e30 for n in numbers
    ):
        raise ValueError("it must be a list of numbers above 0, one for each source, such as [3, 1]")
    return tuple(float(number) for number in numbers)


Sources = Annotated[tuple[str, ...], BeforeValidator(_is_sources)]
Weights = Annotated[tuple[float, ...], BeforeValidator(_is_weights)]


def _are_targets(value: Any) -> Any:
    if not isinstance(value, str) and not (
        isinstance(value, list | tuple) and value and all(isinstance(name, str) for name in value)
    ):
        raise ValueError(
            'it must be "all-linear", a list of names such as ["q_proj", "v_proj"], or a regular expression'
        )
    if isinstance(value, str):
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"it is no regular expression: {error}") from None
        return value
    return tuple(value)


ScheduleName = Annotated[str, Field(min_length=1), AfterValidator(canonical_name)]
ClassName = Annotated[str, AfterValidator(_is_class)]
Degree = Annotated[int, Field(le=MOST_WORKERS), AfterValidator(_is_degree)]
Timeout = Annotated[float | Literal["auto"], BeforeValidator(_is_timeout)]
Dtype = Annotated[DtypeName, BeforeValidator(_is_dtype)]
Transforms = Annotated[tuple[str, ...], BeforeValidator(_are_transforms)]
Resume = Annotated[Annotated[int, Field(le=MOST_STEPS)] | str, BeforeValidator(_is_resume)]
Targets = Annotated[str | tuple[str, ...], BeforeValidator(_are_targets)]
MoeFrequency = Annotated[Count | tuple[Annotated[int, Field(le=MOST_STEPS)], ...], BeforeValidator(_is_frequency)]
Recompute = Annotated[Literal["none", "full"] | tuple[int, ...], BeforeValidator(_is_recompute)]


class Section(BaseModel):
    """Base of the sections: frozen, no unknown keys, no conversions between types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, hide_input_in_errors=True)


class ModelSection(Section):
    """`[model]`: the shape of the decoder, in Hugging Face's names."""

    source: str = Field(
        description="a Hugging Face directory: its model is trained, and the other keys are its sizes; empty: our own decoder"
    )
    weights: str = Field(
        description="a checkpoint or a Hugging Face directory (Llama, Mistral, Mixtral, Qwen2, Qwen3, Qwen-MoE) whose weights "
        "our own decoder begins with; empty: drawn from train.seed"
    )
    num_hidden_layers: Blocks = Field(description="transformer blocks")
    hidden_size: Count = Field(description="width of a token")
    num_attention_heads: Count = Field(description="query heads")
    num_key_value_heads: Count = Field(description="key and value heads; fewer than query heads is grouped attention")
    head_dim: Count | None = Field(
        default=None, description="width of a head, an even number; not given: hidden_size / num_attention_heads"
    )
    attention_bias: bool = Field(
        description="queries, keys, values and attention's output have a bias (Llama's option)"
    )
    qkv_bias: bool = Field(description="queries, keys and values have a bias (Qwen2)")
    qk_norm: bool = Field(description="queries and keys are normed, head by head (Qwen3)")
    intermediate_size: Count = Field(description="width inside the feed-forward part")
    vocab_size: Count = Field(description="tokens known; not given: as many as data.tokenizer has")
    tie_word_embeddings: bool = Field(description="the output layer uses the embedding's weight")
    rope_theta: Positive = Field(description="base of the rotary position frequencies")
    rms_norm_eps: Positive = Field(description="added to the mean square in every norm")
    dropout: Fraction = Field(description="share of each block's two outputs that training drops")
    num_experts: Whole = Field(description="experts of a block's feed-forward part; 0: every block is dense")
    num_experts_per_tok: Count = Field(description="experts that a token goes to")
    moe_layer_freq: MoeFrequency = Field(
        default=1, description="n: blocks 0, n, 2n, … have experts, the others are dense; or a list, 1 or 0 per block"
    )
    norm_topk_prob: bool = Field(
        description="the weights of a token's experts are divided by their sum (switch: never, it keeps its probability)"
    )
    moe_intermediate_size: Whole = Field(description="width inside an expert; 0: intermediate_size")
    num_shared_experts: Whole = Field(description="experts' worth of width that every token goes through, gated")
    router: RouterName = Field(
        description="softmax, noisy, switch (1 expert), gshard (2), sigmoid (balanced by a bias)"
    )
    experts_class: ClassName = Field(description="your own class of experts, as module:class; empty: SwiGLU")
    router_class: ClassName = Field(description="your own subclass of TopKGate, as module:class; empty: router alone")
    capacity_factor: NotNegative = Field(
        description="rows an expert takes, over an even share; 0: all, nothing is dropped"
    )
    aux_loss_coef: NotNegative = Field(description="of the load-balance loss, which is 1 when experts are used evenly")
    z_loss_coef: NotNegative = Field(description="of the mean squared logsumexp of the router's logits")

    def shape(self) -> DecoderShape:
        """These values as the library takes them. Raises ArgumentError for sizes that contradict each other."""
        return DecoderShape(**self.model_dump(exclude={"source", "weights", "experts_class", "router_class"}))

    @property
    def head_width(self) -> int:
        """Width of an attention head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def expert_width(self) -> int:
        """Width inside an expert."""
        return self.moe_intermediate_size or self.intermediate_size

    @property
    def expert_blocks(self) -> tuple[bool, ...]:
        """block -> whether its feed-forward part is a mixture of experts."""
        return expert_blocks(self.num_experts, self.num_hidden_layers, self.moe_layer_freq)


class LoraSection(Section):
    """`[lora]`: low-rank adapters of linear layers, in peft's names; all other weights are frozen."""

    r: Whole = Field(description="the adapters' rank; 0: no adapters, every weight trains")
    lora_alpha: Positive = Field(description="what they add is multiplied by lora_alpha / r")
    lora_dropout: Fraction = Field(description="share of their input that training drops")
    target_modules: Targets = Field(
        description='all-linear (but the output layer), a list of names such as ["q_proj"], or a regular expression'
    )
    adapter: str = Field(description="a directory in peft's format that the adapters begin with; empty: new ones")


class ParallelSection(Section):
    """`[parallel]`: over how many ranks each axis spreads. The workers are pp x dp x tp; one of these may be -1."""

    pp: Annotated[int, Field(le=MOST_RANKS), AfterValidator(_is_degree)] = Field(
        description="pipeline-parallel size; -1 infers it from the number of workers"
    )
    dp: Degree = Field(description="data-parallel replicas; or -1")
    tp: Degree = Field(description="tensor-parallel ranks; or -1")
    sp: bool = Field(description="norms and dropout on 1/tp of each sequence")
    ep: Workers = Field(description="expert-parallel ranks, of the data-parallel ones")
    ep_nodes: Workers = Field(description="machines that ep spans; above 1 a token crosses to each of them once")
    ep_chunks: Count = Field(description="parts of a micro-batch whose all-to-all and experts overlap each other")
    ep_blocks: Count = Field(description="parts of each sequence whose all-to-all overlaps the next part's attention")
    order: Annotated[str, AfterValidator(_is_order)] = Field(
        description="axes in the numbering of the workers, the fastest first; dp without ep; tp fastest keeps layers on a host"
    )
    stages: str = Field(description='layers of each stage, as "Et*3|(tt|)*2tL"; empty: balanced from costs')


class ScheduleSection(Section):
    """`[schedule]`: a family, a CSV or JSON file, or module:function."""

    name: ScheduleName = Field(description="a family, a CSV or JSON file, or module:function")
    microbatches: Annotated[int, Field(ge=1, le=MOST_CELLS)] = Field(description="micro-batches of a step; any number")
    chunks: Chunks | None = Field(
        default=None, description="stages a rank holds; not given: the schedule's own default"
    )
    options: dict[str, Any] = Field(description="the schedule's own options, such as rounds")
    overlap_p2p: bool | None = Field(
        default=None,
        description="post receives before the present action computes; not given: yes, except over shared memory, which "
        "has none to post",
    )
    transport: TransportName = Field(
        description="auto (shared memory where all ranks can), individual (a call a message), batched, shared"
    )
    receive_depth: Annotated[int, Field(ge=1, le=MOST_CELLS)] | None = Field(
        default=None,
        description="receives that each channel of the individual transport keeps open, more where the schedule needs more; "
        "not given: 2",
    )
    shapes: ShapesName = Field(
        description="once: a boundary's shapes are sent with its first message; each: with every one, for outputs whose shape "
        "depends on the data"
    )
    transforms: Transforms = Field(
        description='applied to the schedule in order, as in ["unpair", "defer-last-stage-weights=2"]'
    )


class TrainSection(Section):
    """`[train]`: how long, on what, in which arithmetic."""

    steps: Steps = Field(description="optimizer steps")
    seq_len: Count = Field(description="tokens of a sequence")
    global_batch_size: Count = Field(description="sequences of a step, over all data-parallel replicas")
    seed: Seed = Field(description="of the weights and of the order of the data")
    dtype: Dtype = Field(description="of computation; bfloat16 keeps gradients, weights and averages in float32 too")
    label_smoothing: Fraction = Field(description="share of the target that is spread over the vocabulary")
    recompute: Recompute = Field(
        description="none, full, or the blocks (from 0) whose forward runs again in the backward: [0, 3]"
    )
    device: DeviceName = Field(description="auto: CUDA if there is a device for each worker, else the CPU")
    tune_cpu: bool = Field(
        description="on CPUs: workers keep freed memory, and multiply through oneDNN where that is faster"
    )
    deterministic: bool = Field(description="refuse operations that differ from run to run")
    on_nan: OnNan = Field(
        description="a step whose gradient is not finite: stop, skip it, or rollback (to the last checkpoint, past its batch)"
    )
    on_spike: OnSpike = Field(description="the same for a norm above 10 times the running median; ignore: nothing")
    rollbacks: Whole = Field(description="the most rollbacks of a run; then it stops")
    restarts: Whole = Field(description="times that a run that failed is started again from its newest checkpoint")
    eval_every: StepsOrNone = Field(
        description="steps between losses on the held-out text; 0: before and after training only"
    )
    eval_batches: Count = Field(description="most batches of such a loss, spread evenly over the held-out text")
    check_every: StepsOrNone = Field(description="steps between comparisons of what several ranks hold alike; 0: none")
    timeout: Timeout = Field(
        description="seconds that a rank may make no progress; auto: 20 times the slowest step, at least 30, at most 300"
    )

    @property
    def seconds(self) -> float | None:
        """The timeout where it is given; None: auto."""
        return None if self.timeout == "auto" else self.timeout


class OptimizerSection(Section):
    """`[optimizer]`: the optimizer, its rate and its decay."""

    name: OptimizerName = Field(
        description="adamw, sgd, or muon: the matrices of blocks, each orthogonalised whole; AdamW for the rest"
    )
    lr: Positive = Field(description="learning rate after warm-up")
    lr_schedule: RateSchedule = Field(
        description="after warm-up: cosine or linear, down to min_lr; wsd: constant, then linear over decay_steps; constant"
    )
    min_lr: NotNegative = Field(description="learning rate at the last step")
    warmup_steps: StepsOrNone = Field(description="steps of linear warm-up")
    decay_steps: StepsOrNone = Field(description="last steps, in which wsd decays; 0: a tenth of all")
    weight_decay: NotNegative = Field(description="weight decay of matrices")
    embedding_decay: NotNegative | None = Field(
        default=None, description="that of embeddings and the output layer; not given: weight_decay"
    )
    vector_decay: NotNegative = Field(description="that of norms and biases")
    betas: tuple[Fraction, Fraction] = Field(strict=False, description="AdamW's two averages")
    momentum: Fraction = Field(description="of SGD and Muon")
    nesterov: bool = Field(description="Nesterov's momentum, for SGD and Muon")
    adjust_lr_fn: MuonScale = Field(
        description="Muon's rate: match_rms_adamw (steps as large as AdamW's, so that one lr serves both) or original"
    )
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

    source: Sources = Field(
        description="stdlib, a file, a folder, a pattern such as texts/*.txt, or a directory of datasets; or a list of them"
    )
    format: Literal["auto", "text", "jsonl", "parquet", "tokens", "dataset"] = Field(
        description="what the files hold; auto: by their names"
    )
    field: str = Field(description='of records, what to train on; empty: "messages" or "text", whichever there is')
    weights: Weights = Field(description="share of each source in the rows, as in [3, 1]; empty: by their sizes")
    validation: str = Field(description="a source to measure on; empty: a part of data.source")
    held_out: Annotated[float, Field(gt=0, le=0.5)] = Field(
        description="that part: of the documents, or of few ones of their tokens"
    )
    tokenizer: Annotated[str, Field(min_length=1)] = Field(
        description="bytes, a tokenizer's JSON file, a directory; auto: that of model.source where it has one, else bytes"
    )
    bos: Annotated[str, Field(min_length=1)] = Field(
        description="token before each document: auto (as the tokenizer does), none, or its text"
    )
    eos: Annotated[str, Field(min_length=1)] = Field(
        description="token behind each document: auto (the tokenizer's own), none, or its text"
    )
    token_type: Literal["auto", "uint16", "uint32"] = Field(
        description="of .bin files; auto: the smallest that holds model.vocab_size"
    )
    documents: Literal["auto", "concatenate", "pack"] = Field(
        description="windows cut anywhere, or rows of whole documents that do not see each other; auto: pack for chats"
    )
    template: Literal["auto", "tokenizer", "simple"] = Field(
        description="how chats are written; auto: the tokenizer's template where it has one"
    )
    loss_on: Literal["answers", "all"] = Field(description="of chats, what is learned")
    on_error: Literal["stop", "skip"] = Field(description="a document that cannot be read, by file and line")
    cache: str = Field(description="folder of tokenized data; empty: pipeloom in the user's own cache")
    sampling: SamplingName = Field(
        description="windows from anywhere in the text, or each once an epoch: shuffle-then-split, split-then-shuffle; auto: "
        "anywhere, and for packed rows or several sources shuffle-then-split"
    )
    remainder: Literal["pad", "drop"] = Field(description="the last batch of an epoch: pad repeats windows")


class CheckpointSection(Section):
    """`[checkpoint]`: what is saved, and what a run begins with."""

    dir: str = Field(description="folder of the checkpoints, shared by all hosts; empty: the run's own")
    every: StepsOrNone = Field(description="steps between checkpoints; 0: only at the end, and when asked to stop")
    keep: Whole = Field(description="newest checkpoints that stay; 0: all")
    keep_every: StepsOrNone = Field(description="checkpoints of every n-th step stay too; 0: none for that reason")
    asynchronous: bool = Field(description="training goes on while a copy of the state is written")
    resume: Resume = Field(
        description="none, auto (the newest checkpoint, in the same folder), a checkpoint's directory, or a step"
    )


class LogSection(Section):
    """`[log]`: what is written."""

    dir: Annotated[str, Field(min_length=1)] = Field(description="folder in which each run makes its own")
    every: Steps = Field(description="steps between log lines")
    html: str = Field(description="file of the page; empty: timeline.html in the run's folder")
    norms: NormsName = Field(
        description="of gradients and parameters, by layer or by parameter, with each log line; none: the global norm only"
    )
    tensorboard: bool = Field(description="figures for TensorBoard in the run's folder, too")
    wandb: str = Field(description="project of Weights & Biases that gets the figures, too; empty: none")


class DebugSection(Section):
    """`[debug]`: failures made on purpose."""

    fault: Annotated[str, AfterValidator(_is_fault)] = Field(
        description="swap-microbatches:A,B and others; empty: none"
    )
    checksum: bool = Field(description="messages between pipeline ranks carry a checksum, and each is verified")


class Config(Section):
    """A whole configuration. `load` makes one from files and overrides."""

    model: ModelSection
    lora: LoraSection
    parallel: ParallelSection
    schedule: ScheduleSection
    train: TrainSection
    optimizer: OptimizerSection
    data: DataSection
    checkpoint: CheckpointSection
    log: LogSection
    debug: DebugSection


SECTIONS: dict[str, type[Section]] = {
    name: field.annotation
    for name, field in Config.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
}
