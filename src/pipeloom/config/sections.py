"""The configuration's typed sections. Defaults are in default.toml, nowhere else."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from pipeloom.config.fault import parse_fault
from pipeloom.decoder_shape import DecoderShape, expert_blocks
from pipeloom.errors import ArgumentError, UsageError, echo
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
# A step of a large model has some 100,000 operators, and torch keeps all of them until the last step is over.
ProfiledSteps = Annotated[int, Field(ge=1, le=20)]
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
            "fp16 needs loss scaling, which Pipeloom does not do; nearest: bfloat16, which is as fast and has the "
            "range of float32"
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
    if isinstance(value, bool) or not isinstance(value, int | float) or not LEAST_TIMEOUT <= value < float("inf"):
        raise ValueError(f"it must be a number of seconds of at least {LEAST_TIMEOUT:g}, or 'auto'; nearest: auto")
    if value > MOST_SECONDS:
        raise ValueError(f"it must be at most {MOST_SECONDS:,.0f} seconds, or 'auto'; nearest: {MOST_SECONDS:.0f}")
    return float(value)


def _is_threads(value: Any) -> Any:
    if value != "auto" and (type(value) is not int or not 1 <= value <= MOST_THREADS):
        raise ValueError(f"it must be a whole number from 1 to {MOST_THREADS:,}, or 'auto'; nearest: auto")
    return value


def _is_resume(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
        raise ValueError("it must be 'none', 'auto', the directory of a checkpoint, or a step; nearest: 'auto'")
    if isinstance(value, int) and not 0 <= value <= MOST_STEPS:
        raise ValueError(f"a step must be from 0 to {MOST_STEPS}; nearest: {0 if value < 0 else MOST_STEPS}")
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
            raise ValueError(f"it is not a regular expression: {error}") from None
        return value
    return tuple(value)


ScheduleName = Annotated[str, Field(min_length=1), AfterValidator(canonical_name)]
ClassName = Annotated[str, AfterValidator(_is_class)]
Degree = Annotated[int, Field(le=MOST_WORKERS), AfterValidator(_is_degree)]
Threads = Annotated[Annotated[int, Field(le=MOST_THREADS)] | Literal["auto"], BeforeValidator(_is_threads)]
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
        description="a Hugging Face directory, whose model is trained and sets the other keys of this section; empty: "
        "Pipeloom's own decoder"
    )
    weights: str = Field(
        description="a checkpoint or a Hugging Face directory (Llama, Mistral, Mixtral, Qwen2, Qwen3, Qwen-MoE) whose weights "
        "Pipeloom's own decoder starts from; empty: random weights from train.seed"
    )
    num_hidden_layers: Blocks = Field(description="transformer blocks")
    hidden_size: Count = Field(description="width of a token's vector (hidden dimension)")
    num_attention_heads: Count = Field(description="query heads")
    num_key_value_heads: Count = Field(description="key and value heads; fewer than query heads is grouped attention")
    head_dim: Count | None = Field(
        default=None, description="width of a head, an even number; if not given, hidden_size / num_attention_heads"
    )
    attention_bias: bool = Field(
        description="biases in the query, key, value and output projections of attention (Llama's option)"
    )
    qkv_bias: bool = Field(description="biases in the query, key and value projections (as in Qwen2)")
    qk_norm: bool = Field(description="normalise queries and keys, head by head (as in Qwen3)")
    intermediate_size: Count = Field(description="inner width of the feed-forward part")
    vocab_size: Count = Field(description="vocabulary size; if not given, that of data.tokenizer")
    tie_word_embeddings: bool = Field(description="share the embedding's weight with the output layer")
    rope_theta: Positive = Field(description="base of the frequencies of rotary position embeddings")
    rms_norm_eps: Positive = Field(description="epsilon added to the mean square in every norm")
    dropout: Fraction = Field(description="dropout probability at each block's two outputs")
    num_experts: Whole = Field(description="experts per block; 0: every block is dense")
    num_experts_per_tok: Count = Field(description="experts that each token is sent to")
    moe_layer_freq: MoeFrequency = Field(
        default=1,
        description="n: blocks 0, n, 2n, … have experts and the others are dense; or a list with 1 (experts) or 0 "
        "(dense) per block",
    )
    norm_topk_prob: bool = Field(
        description="divide the weights of a token's experts by their sum (router switch never does)"
    )
    moe_intermediate_size: Whole = Field(description="inner width of an expert; 0: intermediate_size")
    num_shared_experts: Whole = Field(description="width, in experts, of a gated expert that every token uses")
    router: RouterName = Field(
        description="softmax, noisy, switch (1 expert), gshard (2), sigmoid (balanced by a bias)"
    )
    experts_class: ClassName = Field(description="your own class of experts, as module:class; empty: SwiGLU")
    router_class: ClassName = Field(
        description="your own subclass of TopKGate, as module:class; empty: the built-in gate"
    )
    capacity_factor: NotNegative = Field(
        description="most tokens per expert, as a multiple of an even share; the others are dropped; 0: no limit"
    )
    aux_loss_coef: NotNegative = Field(
        description="coefficient of the load-balance loss, which is 1 when experts are used evenly"
    )
    z_loss_coef: NotNegative = Field(
        description="coefficient of the router's z-loss, the mean squared logsumexp of its logits"
    )

    def shape(self) -> DecoderShape:
        """Return these values as the library's type. Raises ArgumentError for sizes that contradict each other."""
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

    r: Whole = Field(description="rank of the adapters; 0: no adapters, all weights are trained")
    lora_alpha: Positive = Field(description="scale of the adapters: their output is multiplied by lora_alpha / r")
    lora_dropout: Fraction = Field(description="dropout probability at the adapters' input")
    target_modules: Targets = Field(
        description='layers with adapters: all-linear (all but the output layer), a list of names such as ["q_proj"], '
        "or a regular expression"
    )
    adapter: str = Field(description="a directory in peft's format with the initial adapters; empty: new adapters")


class ParallelSection(Section):
    """`[parallel]`: the size of each axis of parallelism. There are pp x dp x tp workers; one of these sizes may be -1."""

    pp: Annotated[int, Field(le=MOST_RANKS), AfterValidator(_is_degree)] = Field(
        description="pipeline-parallel size; -1 infers it from the number of workers"
    )
    dp: Degree = Field(description="data-parallel replicas, or -1")
    tp: Degree = Field(description="tensor-parallel ranks, or -1")
    sp: bool = Field(
        description="sequence parallelism: each tensor-parallel rank computes norms and dropout on 1/tp of each sequence"
    )
    ep: Workers = Field(
        description="expert-parallel ranks; experts are spread over groups of ep data-parallel replicas"
    )
    ep_nodes: Workers = Field(
        description="machines that each expert-parallel group spans; above 1, a token is sent to each machine once"
    )
    ep_chunks: Count = Field(
        description="parts of a micro-batch, the all-to-all of one overlapping the experts of another"
    )
    ep_blocks: Count = Field(
        description="parts of each sequence, the all-to-all of one overlapping the attention of the next"
    )
    order: Annotated[str, AfterValidator(_is_order)] = Field(
        description="axes in the order in which workers are numbered, fastest first; dp counts the replicas outside ep; tp "
        "first keeps each layer on one host"
    )
    stages: str = Field(
        description='layers of each stage, such as "Et*3|(tt|)*2tL" (E embedding, t block, L output layer); empty: '
        "balanced by cost"
    )


class ScheduleSection(Section):
    """`[schedule]`: a family, a CSV or JSON file, or module:function."""

    name: ScheduleName = Field(description="a family, a CSV or JSON file, or module:function")
    microbatches: Annotated[int, Field(ge=1, le=MOST_CELLS)] = Field(
        description="micro-batches per step and replica; most schedules accept any number"
    )
    chunks: Chunks | None = Field(default=None, description="stages per rank; if not given, the schedule's default")
    options: dict[str, Any] = Field(description="options of the schedule, such as rounds")
    overlap_p2p: bool | None = Field(
        default=None,
        description="post the receives of the next actions before computing the current one; if not given, true "
        "(shared memory posts no "
        "receives)",
    )
    transport: TransportName = Field(
        description="auto (shared memory where all ranks can use it, else individual), individual (one call per "
        "message), batched, shared"
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
        description='transforms applied to the schedule in order, such as ["unpair", "defer-last-stage-weights=2"]'
    )


class TrainSection(Section):
    """`[train]`: steps and batches, device and arithmetic, and what happens when a step fails."""

    steps: Steps = Field(description="optimizer steps")
    seq_len: Count = Field(description="tokens per sequence")
    global_batch_size: Count = Field(description="sequences per step, over all data-parallel replicas")
    seed: Seed = Field(description="seed of the initial weights and of the order of the data")
    dtype: Dtype = Field(
        description="dtype of computation; with bfloat16, gradients, master weights and the optimizer's state are in float32"
    )
    label_smoothing: Fraction = Field(description="share of the target probability that is spread over the vocabulary")
    recompute: Recompute = Field(
        description="blocks whose forward is recomputed in the backward: none, full, or a list counted from 0, such as [0, 3]"
    )
    device: DeviceName = Field(
        description="auto (CUDA if there is a device for each worker, else the CPU), cpu, cuda (workers share devices "
        "if there are too few)"
    )
    tune_cpu: bool = Field(
        description="on CPUs: keep freed memory in the process, and multiply matrices with oneDNN where that is faster"
    )
    threads: Threads = Field(
        description="threads with which each worker computes; auto: the cores of this machine, divided among its workers; "
        "OMP_NUM_THREADS replaces it"
    )
    deterministic: bool = Field(description="refuse operations whose results differ from run to run")
    on_nan: OnNan = Field(
        description="what to do when a gradient is not finite: stop, skip the step, or rollback (load the last "
        "checkpoint and skip the batch)"
    )
    on_spike: OnSpike = Field(
        description="what to do when the gradient norm exceeds 10 times its running median: ignore, stop, skip or rollback"
    )
    rollbacks: Whole = Field(description="most rollbacks of a run; the next one stops it")
    restarts: Whole = Field(description="times that a failed run is restarted from its newest checkpoint")
    eval_every: StepsOrNone = Field(
        description="steps between evaluations on the held-out text; 0: only before and after training"
    )
    eval_batches: Count = Field(description="most batches per evaluation, spread evenly over the held-out text")
    check_every: StepsOrNone = Field(
        description="steps between comparisons of the state that several ranks replicate, which is compared at each checkpoint "
        "too, and of the batch among the ranks of one replica; 0: never, at a checkpoint neither"
    )
    profile_from: StepsOrNone = Field(
        description="first step whose operators torch.profiler records, into profile.json in the run's folder; 0: none"
    )
    profile_steps: ProfiledSteps = Field(description="steps that it records, at most 20")
    timeout: Timeout = Field(
        description="seconds without progress after which a rank counts as stuck, at least 1; auto: 20 times the slowest step, "
        "at least 30 and at most 300"
    )

    @property
    def seconds(self) -> float | None:
        """The timeout in seconds; None: auto."""
        return None if self.timeout == "auto" else self.timeout


class OptimizerSection(Section):
    """`[optimizer]`: the optimizer, its learning rate and its weight decay."""

    name: OptimizerName = Field(
        description="adamw, sgd, or muon (orthogonalised momentum for the matrices of blocks, AdamW for the rest)"
    )
    lr: Positive = Field(description="learning rate after warm-up")
    lr_schedule: RateSchedule = Field(
        description="after warm-up: cosine or linear (down to min_lr), wsd (constant, then linear over decay_steps), or constant"
    )
    min_lr: NotNegative = Field(description="learning rate at the last step")
    warmup_steps: StepsOrNone = Field(description="steps of linear warm-up of the learning rate")
    decay_steps: StepsOrNone = Field(description="last steps, in which wsd decays; 0: a tenth of all steps")
    weight_decay: NotNegative = Field(description="weight decay of matrices")
    embedding_decay: NotNegative | None = Field(
        default=None, description="weight decay of embeddings and the output layer; if not given, weight_decay"
    )
    vector_decay: NotNegative = Field(description="weight decay of norms and biases")
    betas: tuple[Fraction, Fraction] = Field(strict=False, description="decay rates of AdamW's two averages")
    momentum: Fraction = Field(description="momentum of SGD and Muon")
    nesterov: bool = Field(description="use Nesterov momentum, for SGD and Muon")
    adjust_lr_fn: MuonScale = Field(
        description="scale of Muon's steps: match_rms_adamw (as large as AdamW's, so that one lr suits both) or original"
    )
    clip_norm: NotNegative = Field(description="largest global gradient norm; 0: no clipping")
    lr_rule: RateRule = Field(
        description="multiply lr and min_lr by dp (linear, for SGD) or its square root (sqrt, for AdamW); none: use "
        "them as they are"
    )
    zero1: bool = Field(
        description="ZeRO stage 1: each data-parallel replica holds only its share of the optimizer's state"
    )
    barrier: bool = Field(
        description="wait for the global gradient norm in each step; false: step before it is known, and roll the "
        "step back if needed"
    )


class DataSection(Section):
    """`[data]`: sources, tokenizer and sampling."""

    source: Sources = Field(
        description="a file, a folder, a pattern such as texts/*.txt, a directory saved by datasets, stdlib (Python's "
        "own source), or a list of these"
    )
    format: Literal["auto", "text", "jsonl", "parquet", "tokens", "dataset"] = Field(
        description="text, jsonl, parquet, tokens, or dataset (read by datasets); auto: by the names of the files"
    )
    field: str = Field(description='field of a record to train on; empty: "messages" or "text", whichever exists')
    weights: Weights = Field(
        description="weight of each source in the training data, such as [3, 1]; empty: in proportion to their sizes"
    )
    validation: str = Field(description="source for the held-out loss; empty: a part of data.source")
    held_out: Annotated[float, Field(gt=0, le=0.5)] = Field(
        description="held-out share of the documents of data.source, or of the tokens where there are few documents"
    )
    tokenizer: Annotated[str, Field(min_length=1)] = Field(
        description="bytes, a tokenizer's JSON file, or a directory; auto: the tokenizer of model.source if it has "
        "one, else bytes"
    )
    bos: Annotated[str, Field(min_length=1)] = Field(
        description="token before each document: auto (the tokenizer's default), none, or its text"
    )
    eos: Annotated[str, Field(min_length=1)] = Field(
        description="token after each document: auto (the tokenizer's), none, or its text"
    )
    token_type: Literal["auto", "uint16", "uint32"] = Field(
        description="integer type of .bin files; auto: the smallest that can hold model.vocab_size"
    )
    documents: Literal["auto", "concatenate", "pack", "sort"] = Field(
        description="concatenate (windows cut anywhere), pack (rows of whole documents that do not attend to each "
        "other) or sort (batches of documents of about one length, padded); auto: pack for chats, else concatenate"
    )
    template: Literal["auto", "tokenizer", "simple"] = Field(
        description="template for chats; auto: the tokenizer's if it has one, else simple"
    )
    loss_on: Literal["answers", "all"] = Field(description="messages of a chat that count in the loss: answers or all")
    on_error: Literal["stop", "skip"] = Field(
        description="a document that cannot be read: stop with its file and line, or skip it"
    )
    cache: str = Field(description="folder of tokenized data; empty: pipeloom in the user's cache folder")
    sampling: SamplingName = Field(
        description="anywhere (random windows), shuffle-then-split or split-then-shuffle (each window once per "
        "epoch); auto: anywhere, or "
        "shuffle-then-split for packed or sorted documents or several sources"
    )
    remainder: Literal["pad", "drop"] = Field(description="last batch of an epoch: pad (repeat windows) or drop")


class CheckpointSection(Section):
    """`[checkpoint]`: saving and resuming."""

    dir: str = Field(description="folder of the checkpoints, shared by all hosts; empty: the run's folder")
    every: StepsOrNone = Field(
        description="steps between checkpoints; 0: only at the end, and when the run is told to stop"
    )
    keep: Whole = Field(description="newest checkpoints that are kept; 0: all")
    keep_every: StepsOrNone = Field(description="also keep the checkpoint of every n-th step; 0: none")
    asynchronous: bool = Field(description="continue training while a copy of the state is written")
    resume: Resume = Field(
        description="where to start: none (from scratch), auto (the newest checkpoint in the folder), a checkpoint's "
        "directory, or a step"
    )


class LogSection(Section):
    """`[log]`: log lines, metrics and the HTML page."""

    dir: Annotated[str, Field(min_length=1)] = Field(description="folder in which each run creates its own folder")
    every: Steps = Field(description="steps between log lines")
    html: str = Field(description="file of the HTML page; empty: timeline.html in the run's folder")
    norms: NormsName = Field(
        description="norms of gradients and parameters with each log line: by layer, by parameter, or none (the "
        "global gradient norm only)"
    )
    tensorboard: bool = Field(description="also write the metrics for TensorBoard, in the run's folder")
    wandb: str = Field(description="Weights & Biases project to send the metrics to; empty: none")


class DebugSection(Section):
    """`[debug]`: injected faults, and checks that detect faults."""

    fault: Annotated[str, AfterValidator(_is_fault)] = Field(
        description="fault to inject, such as kill:RANK:STEP (docs/failures.md lists them); empty: none"
    )
    checksum: bool = Field(description="send a checksum with each message between pipeline ranks, and verify it")


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
    log: LogSection
    debug: DebugSection


SECTIONS: dict[str, type[Section]] = {
    name: field.annotation
    for name, field in Config.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
}
