"""Conditions between keys. A check names the keys that it reads, and is skipped when one of them is invalid."""

from __future__ import annotations

import glob
import importlib.util
import math
import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from pipeloom.config.expert_checks import router_problems, spread_problems
from pipeloom.config.sections import COMPUTED, Config
from pipeloom.errors import divisors, nearest
from pipeloom.limits import expanded

Check = Callable[[Config], Iterator[str]]
_CHECKS: list[tuple[tuple[str, ...], Check]] = []


def _reads(*keys: str) -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        _CHECKS.append((keys, check))
        return check

    return register


def cross_problems(config: Config, wrong: Collection[str] = ()) -> list[str]:
    """A sentence for each contradiction between keys; checks that read one of the `wrong` keys are skipped."""
    return [
        sentence
        for keys, check in _CHECKS
        if not any(key in wrong or key.partition(".")[0] in wrong for key in keys)
        for sentence in check(config)
    ]


@_reads("log.html")
def _page_has_a_folder(config: Config) -> Iterator[str]:
    path = expanded(config.log.html)
    try:
        is_folder = path.is_dir()
    except OSError as error:  # a name that is too long, or a loop of symbolic links
        yield f'log.html = "{config.log.html}": {error.strerror}; nearest: {Path.cwd() / "timeline.html"}'
        return
    if config.log.html and (is_folder or not path.parent.is_dir()):
        near = path / "timeline.html" if is_folder else Path.cwd() / path.name
        why = "that is a folder" if is_folder else f"there is no folder {path.parent}"
        yield f'log.html = "{config.log.html}": {why}; nearest: {near}'


@_reads("model.source", "model.hidden_size", "model.num_attention_heads", "model.head_dim")
def _heads_divide(config: Config) -> Iterator[str]:
    if config.model.source:
        return
    hidden, heads, width = config.model.hidden_size, config.model.num_attention_heads, config.model.head_dim
    if width is not None:
        if width % 2:
            near = f"{width - 1} or {width + 1}" if width > 1 else "2"
            yield f"model.head_dim = {width}: rotary position embeddings cannot use heads of odd width; nearest: {near}"
        return
    valid = [n for n in divisors(hidden) if hidden // n % 2 == 0]
    if heads not in valid:
        rest = (
            f"leaves a remainder of {hidden % heads}"
            if hidden % heads
            else "leaves heads of odd width, which rotary position embeddings cannot use"
        )
        yield (
            f"model.num_attention_heads = {heads}: model.hidden_size {hidden} divided by it {rest}; "
            f"{nearest(heads, valid) if valid else 'make the hidden size even'}"
        )


@_reads("model.source", "model.num_attention_heads", "model.num_key_value_heads")
def _groups_divide(config: Config) -> Iterator[str]:
    if config.model.source:
        return
    heads, key_value = config.model.num_attention_heads, config.model.num_key_value_heads
    if heads % key_value:
        yield (
            f"model.num_key_value_heads = {key_value}: it must divide model.num_attention_heads {heads}; "
            f"{nearest(key_value, divisors(heads))}"
        )


@_reads("model.vocab_size", "data.tokenizer")
def _vocabulary_holds_bytes(config: Config) -> Iterator[str]:
    byte_tokens_by_default = config.data.tokenizer == "auto" and not config.model.source
    if (byte_tokens_by_default or config.data.tokenizer == "bytes") and config.model.vocab_size < 256:
        yield f"model.vocab_size = {config.model.vocab_size}: the byte tokenizer has 256 tokens; nearest: 256"


@_reads("data.tokenizer")
def _tokenizer_exists(config: Config) -> Iterator[str]:
    name = config.data.tokenizer
    if name not in ("auto", "bytes") and not os.path.exists(os.path.expanduser(name)):
        yield f'data.tokenizer = "{name}": there is no such file or folder; "bytes" needs none'


@_reads("data.source", "data.weights")
def _weights_fit_sources(config: Config) -> Iterator[str]:
    weights, sources = config.data.weights, config.data.source
    if weights and len(weights) != len(sources):
        yield (
            f"data.weights = {list(weights)}: there {'is' if len(sources) == 1 else 'are'} {len(sources)} "
            f"source{'s' * (len(sources) > 1)} (data.source); give a number for each"
        )


@_reads("data.documents", "data.weights", "data.sampling")
def _sorted_documents_have_an_order(config: Config) -> Iterator[str]:
    data = config.data
    if data.documents != "sort":
        return
    if data.weights:
        yield (
            f"data.weights = {list(data.weights)}: batches sorted by length take each document of all sources once an "
            'epoch; leave the weights out, or set data.documents = "pack"'
        )
    if data.sampling not in ("auto", "shuffle-then-split"):
        yield (
            f'data.sampling = "{data.sampling}": data.documents = "sort" has batches, not rows, in a shuffled order; '
            'nearest: "shuffle-then-split"'
        )


@_reads("parallel")
def _one_axis_is_computed(config: Config) -> Iterator[str]:
    """Refuse axes that are still -1: at most one can be computed, and it has been, if the number of workers is known."""
    open_axes = [axis for axis in ("pp", "dp", "tp") if getattr(config.parallel, axis) == COMPUTED]
    if len(open_axes) > 1:
        both = " and ".join(f"parallel.{axis} = -1" for axis in open_axes)
        yield f"{both}: only one axis can be computed; give numbers for the others"
    elif open_axes:
        yield (
            f"parallel.{open_axes[0]} = -1: it is computed from the number of workers, which torchrun decides; without "
            f"torchrun give a number"
        )


@_reads("parallel.tp", "model")
def _tensor_parallel_divides(config: Config) -> Iterator[str]:
    if config.model.source:
        return
    tp, model = config.parallel.tp, config.model
    sparse = model.expert_blocks
    widths_inside = ["intermediate_size"] if not (all(sparse) and model.moe_intermediate_size) else []
    widths_inside += ["moe_intermediate_size"] if any(sparse) and model.moe_intermediate_size else []
    cut = ("num_attention_heads", "num_key_value_heads", *widths_inside)
    uneven = [f"model.{key} {getattr(model, key)}" for key in cut if tp > 1 and getattr(model, key) % tp]
    if uneven:
        widths = [getattr(model, key) for key in cut]
        valid = divisors(math.gcd(*widths))
        yield f"parallel.tp = {tp}: it must divide {' and '.join(uneven)}; {nearest(tp, valid)}"


@_reads("model.source", "parallel")
def _foreign_models_are_cut_by_layers_only(config: Config) -> Iterator[str]:
    parallel = config.parallel
    for axis, size in (("tp", parallel.tp), ("ep", parallel.ep)):
        if config.model.source and size > 1:
            yield (
                f"parallel.{axis} = {size}: it applies to Pipeloom's own decoder only, and model.source names another model; "
                "nearest: 1"
            )


@_reads("model.source", "model.weights")
def _weights_are_a_checkpoint(config: Config) -> Iterator[str]:
    weights = config.model.weights
    if weights and config.model.source:
        yield f'model.weights = "{weights}": model.source has its own weights; leave one of the two out'
    elif weights and not os.path.isdir(os.path.expanduser(weights)):
        yield f'model.weights = "{weights}": there is no such directory; give a checkpoint or a Hugging Face directory'


@_reads("lora", "model.source", "model.weights", "parallel.tp")
def _adapters_have_weights(config: Config) -> Iterator[str]:
    lora, tp = config.lora, config.parallel.tp
    if lora.r and not config.model.source and not config.model.weights:
        yield (
            f"lora.r = {lora.r}: there are no pretrained weights to adapt; set model.source to a Hugging "
            "Face directory, or model.weights to a checkpoint or such a directory"
        )
    if lora.r and lora.lora_dropout and tp > 1:
        yield (
            f"lora.lora_dropout = {lora.lora_dropout}: the ranks of parallel.tp {tp} would drop different inputs; nearest: 0"
        )


@_reads("parallel.sp", "parallel.tp", "train.seq_len")
def _sequence_parallel_fits(config: Config) -> Iterator[str]:
    tp, length = config.parallel.tp, config.train.seq_len
    if config.parallel.sp and tp == 1:
        yield "parallel.sp = true: it spreads tokens over the tensor-parallel ranks; set parallel.tp to 2 or more"
    elif config.parallel.sp and tp > 1 and length % tp:
        below = length // tp * tp
        nearest = f"{below} or {below + tp}" if below else str(tp)
        yield f"train.seq_len = {length}: parallel.tp {tp} must divide it under parallel.sp; nearest: {nearest}"


@_reads("parallel.ep", "parallel.dp")
def _experts_divide(config: Config) -> Iterator[str]:
    ep, dp = config.parallel.ep, config.parallel.dp
    if dp >= 1 and dp % ep:
        valid = divisors(dp)
        yield f"parallel.ep = {ep}: it must divide parallel.dp {dp}; {nearest(ep, valid)}"


@_reads("model")
def _router_can_choose(config: Config) -> Iterator[str]:
    if config.model.source:
        return
    yield from router_problems(config)


@_reads("model", "parallel")
def _experts_spread(config: Config) -> Iterator[str]:
    if config.model.source:
        return
    yield from spread_problems(config)


@_reads("train.recompute", "model.num_hidden_layers")
def _recomputed_blocks_exist(config: Config) -> Iterator[str]:
    recomputed, blocks = config.train.recompute, config.model.num_hidden_layers
    wrong = [number for number in recomputed if number >= blocks] if isinstance(recomputed, tuple) else []
    if wrong:
        yield f"train.recompute = {list(recomputed)}: there is no block {wrong[0]}; the model has {blocks} (0..{blocks - 1})"


@_reads("schedule.overlap_p2p", "schedule.transport")
def _shared_memory_posts_no_receives(config: Config) -> Iterator[str]:
    if config.schedule.overlap_p2p is False and config.schedule.transport == "shared":
        yield (
            "schedule.overlap_p2p = false: the shared-memory transport posts no receives; set "
            'schedule.transport = "individual"'
        )


@_reads("schedule.receive_depth", "schedule.transport")
def _only_the_individual_transport_has_a_depth(config: Config) -> Iterator[str]:
    depth, transport = config.schedule.receive_depth, config.schedule.transport
    if depth is not None and transport in ("batched", "shared"):
        yield (
            f"schedule.receive_depth = {depth}: the {transport} transport does not keep receives open for each channel; set "
            'schedule.transport = "individual", or leave the key out'
        )


@_reads("schedule.transforms", "schedule.name")
def _a_searched_schedule_is_not_transformed(config: Config) -> Iterator[str]:
    if config.schedule.transforms and config.schedule.name == "search":
        yield (
            f"schedule.transforms = {list(config.schedule.transforms)}: a searched schedule runs as the search found it; "
            "leave them out"
        )


@_reads("train.global_batch_size", "parallel.dp", "schedule.microbatches")
def _batch_is_large_enough(config: Config) -> Iterator[str]:
    batch, dp, m = config.train.global_batch_size, config.parallel.dp, config.schedule.microbatches
    if dp == COMPUTED:
        return
    if batch < dp * m:
        yield (
            f"train.global_batch_size = {batch}: {m} micro-batches on {dp} data-parallel replica{'s' * (dp > 1)} need "
            f"at least "
            f"{dp * m} sequences; set it to {dp * m}"
            + (f", or schedule.microbatches to {batch // dp}" if batch >= dp else "")
        )
    elif batch % dp:
        valid = [n * dp for n in (batch // dp, batch // dp + 1)]
        yield f"train.global_batch_size = {batch}: parallel.dp {dp} must divide it; {nearest(batch, valid)}"


@_reads("optimizer.lr", "optimizer.min_lr")
def _rates_fall(config: Config) -> Iterator[str]:
    lr, low = config.optimizer.lr, config.optimizer.min_lr
    if low > lr:
        yield f"optimizer.min_lr = {low}: it must not be above optimizer.lr {lr}; nearest: {lr}"


@_reads("optimizer.lr_schedule", "optimizer.decay_steps", "optimizer.warmup_steps", "train.steps")
def _the_rate_has_room_to_decay(config: Config) -> Iterator[str]:
    options, steps = config.optimizer, config.train.steps
    most = max(0, steps - options.warmup_steps)
    if options.lr_schedule == "wsd" and options.decay_steps > most:
        yield (
            f"optimizer.decay_steps = {options.decay_steps}: train.steps {steps} less optimizer.warmup_steps "
            f"{options.warmup_steps} leaves {most} steps; nearest: {most}"
        )


@_reads("optimizer.name", "optimizer.nesterov", "optimizer.momentum")
def _nesterov_has_momentum(config: Config) -> Iterator[str]:
    if config.optimizer.name == "sgd" and config.optimizer.nesterov and not config.optimizer.momentum:
        yield (
            "optimizer.momentum = 0: optimizer.nesterov = true needs momentum; set it above 0, or optimizer.nesterov = false"
        )


@_reads("optimizer.name", "optimizer.barrier")
def _muon_needs_the_barrier(config: Config) -> Iterator[str]:
    if config.optimizer.name == "muon" and not config.optimizer.barrier:
        yield (
            'optimizer.name = "muon": ranks gather whole matrices in each step, which is a barrier; set optimizer.barrier = true'
        )


@_reads("train.on_nan", "train.on_spike", "optimizer.barrier")
def _bad_steps_need_the_barrier(config: Config) -> Iterator[str]:
    for key, allowed in (("on_nan", ("stop", "skip")), ("on_spike", ("ignore",))):
        value = getattr(config.train, key)
        if value not in allowed and not config.optimizer.barrier:
            yield (
                f'train.{key} = "{value}": without a barrier a step is known to be bad only after the next has begun; set '
                f'optimizer.barrier = true, or train.{key} = "{allowed[0]}"'
            )


@_reads("data.source", "data.validation")
def _source_exists(config: Config) -> Iterator[str]:
    data = config.data
    named = [("source", name) for name in data.source] + [("validation", data.validation)] * bool(data.validation)
    for key, name in named:
        path = os.path.expanduser(name)
        if name == "stdlib" or os.path.lexists(path):
            continue
        if not glob.has_magic(path):
            yield f'data.{key} = "{name}": there is no such file or folder; "stdlib" is Python\'s own source'
        elif not glob.glob(path, recursive=True):
            yield f'data.{key} = "{name}": no file matches the pattern'


@_reads("checkpoint.dir")
def _checkpoints_are_folder(config: Config) -> Iterator[str]:
    path = os.path.expanduser(config.checkpoint.dir)
    if path and os.path.exists(path) and not os.path.isdir(path):
        yield f'checkpoint.dir = "{config.checkpoint.dir}": it is a file, not a folder'


@_reads("checkpoint.resume", "checkpoint.dir", "log.dir")
def _checkpoint_to_resume_exists(config: Config) -> Iterator[str]:
    resume = config.checkpoint.resume
    if isinstance(resume, str) and resume not in ("none", "auto") and not os.path.isdir(os.path.expanduser(resume)):
        yield (
            f'checkpoint.resume = "{resume}": there is no such directory; "auto" takes the newest checkpoint below '
            f"{config.checkpoint.dir or config.log.dir}"
        )


@_reads("log.tensorboard", "log.wandb")
def _writers_are_installed(config: Config) -> Iterator[str]:
    for key, value, package, install in (
        ("tensorboard", config.log.tensorboard, "tensorboard", 'pip install "pipeloom[tensorboard]"'),
        ("wandb", config.log.wandb, "wandb", "pip install wandb"),
    ):
        if value and importlib.util.find_spec(package) is None:
            setting = "true" if value is True else f'"{value}"'
            yield f"log.{key} = {setting}: the package {package} is not installed: {install}"


@_reads("train.profile_from", "train.steps")
def _profiled_step_runs(config: Config) -> Iterator[str]:
    first, steps = config.train.profile_from, config.train.steps
    if first > steps:
        yield f"train.profile_from = {first}: train.steps is {steps}, so no step would be recorded; nearest: {steps}"


@_reads("log.norms", "optimizer.barrier")
def _norms_need_the_barrier(config: Config) -> Iterator[str]:
    if config.log.norms != "none" and not config.optimizer.barrier:
        yield (
            f'log.norms = "{config.log.norms}": without a barrier a step is final only after the next one has begun; set '
            "optimizer.barrier = true"
        )


@_reads("log.dir")
def _log_is_folder(config: Config) -> Iterator[str]:
    path = os.path.expanduser(config.log.dir)
    if os.path.exists(path) and not os.path.isdir(path):
        yield f'log.dir = "{config.log.dir}": it is a file, not a folder'
