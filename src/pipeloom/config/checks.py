"""Conditions between keys. A check names the keys that it reads, and is skipped when one of them is invalid."""

from __future__ import annotations

import glob
import importlib.util
import math
import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from pipeloom.config.hub import download, source_context_problem
from pipeloom.config.problems import sentence, shown
from pipeloom.config.sections import COMPUTED, PARTS_OF_BLOCKS, Config
from pipeloom.errors import divisors, nearest
from pipeloom.limits import expanded
from pipeloom.shapes.decoder import ROUTERS, sequence_block_problems, shape_problems, whole_sequence_problems

CLASS_KEYS = ("experts_class", "router_class")
_SLOTS = 2  # parallel.unshard_slots where nothing sets it

Problem = tuple[str, str] | str
"""A key and the words that follow its value, or a whole sentence."""
Check = Callable[[Config], Iterator[Problem]]
_CHECKS: list[tuple[tuple[str, ...], Check]] = []


def _reads(*keys: str) -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        _CHECKS.append((keys, check))
        return check

    return register


def cross_problems(config: Config, wrong: Collection[str] = ()) -> list[str]:
    """A sentence for each contradiction between keys; checks that read one of the `wrong` keys are skipped."""
    problems = [
        problem
        for keys, check in _CHECKS
        if not any(key in wrong or key.partition(".")[0] in wrong for key in keys)
        for problem in check(config)
    ]
    return [problem if isinstance(problem, str) else _sentence(config, *problem) for problem in problems]


def _sentence(config: Config, key: str, words: str) -> str:
    section, _, name = key.partition(".")
    return f"{key} = {shown(getattr(getattr(config, section), name))}: {words}"


@_reads("parallel.zero", "parallel.unshard_slots")
def _slots_are_of_gathers(config: Config) -> Iterator[Problem]:
    if config.parallel.unshard_slots != _SLOTS and config.parallel.zero != 3:
        yield (
            "parallel.unshard_slots",
            f"parallel.zero is {config.parallel.zero}, and only 3 gathers parameters; set parallel.zero = 3",
        )


@_reads("log.html")
def _page_has_a_folder(config: Config) -> Iterator[Problem]:
    path = expanded(config.log.html)
    try:
        is_folder = path.is_dir()
    except OSError as error:  # a name that is too long, or a loop of symbolic links
        yield "log.html", f"{error.strerror}; nearest: {Path.cwd() / 'timeline.html'}"
        return
    if config.log.html and (is_folder or not path.parent.is_dir()):
        near = path / "timeline.html" if is_folder else Path.cwd() / path.name
        why = "that is a folder" if is_folder else f"there is no folder {path.parent}"
        yield "log.html", f"{why}; nearest: {near}"


@_reads(
    *("model.source", "model.hidden_size", "model.num_attention_heads", "model.num_key_value_heads", "model.head_dim"),
    *("model.num_hidden_layers", "model.moe_layer_freq", "model.num_experts"),
)
def _decoder_is_possible(config: Config) -> Iterator[Problem]:
    """The library's own conditions; a model without experts ignores where they would be."""
    for error in () if config.model.source else shape_problems(config.model):
        if error.argument != "moe_layer_freq" or config.model.num_experts:
            yield sentence(error)


@_reads("model.vocab_size", "data.tokenizer")
def _vocabulary_holds_bytes(config: Config) -> Iterator[Problem]:
    byte_tokens_by_default = config.data.tokenizer == "auto" and not config.model.source
    if (byte_tokens_by_default or config.data.tokenizer == "bytes") and config.model.vocab_size < 256:
        yield "model.vocab_size", "the byte tokenizer has 256 tokens; nearest: 256"


@_reads("data.tokenizer")
def _tokenizer_exists(config: Config) -> Iterator[Problem]:
    if config.data.tokenizer not in ("auto", "bytes") and not os.path.exists(expanded(config.data.tokenizer)):
        yield "data.tokenizer", 'there is no such file or folder; "bytes" needs none'


@_reads("data.source", "data.weights")
def _weights_fit_sources(config: Config) -> Iterator[Problem]:
    weights, count = config.data.weights, len(config.data.source)
    if weights and len(weights) != count:
        are = "is 1 source" if count == 1 else f"are {count} sources"
        yield "data.weights", f"there {are} (data.source); give a number for each"


@_reads("data.documents", "data.weights", "data.sampling")
def _sorted_documents_have_an_order(config: Config) -> Iterator[Problem]:
    data = config.data
    if data.documents != "sort":
        return
    if data.weights:
        yield (
            "data.weights",
            "batches sorted by length take each document of all sources once an epoch; leave the weights out, or set "
            'data.documents = "pack"',
        )
    if data.sampling not in ("auto", "shuffle-then-split"):
        yield (
            "data.sampling",
            'data.documents = "sort" has batches, not rows, in a shuffled order; nearest: "shuffle-then-split"',
        )


@_reads("parallel")
def _one_axis_is_computed(config: Config) -> Iterator[Problem]:
    """Refuse axes that are still -1: at most one can be computed, and it has been, if the number of workers is known."""
    open_axes = [f"parallel.{axis}" for axis in ("pp", "dp", "tp") if getattr(config.parallel, axis) == COMPUTED]
    if len(open_axes) > 1:
        yield f"{' = -1 and '.join(open_axes)} = -1: only one axis can be computed; give numbers for the others"
    elif open_axes:
        yield (
            open_axes[0],
            "it is computed from the number of workers, which torchrun decides; without torchrun give a number",
        )


@_reads("parallel.tp", "model")
def _tensor_parallel_divides(config: Config) -> Iterator[Problem]:
    tp, model = config.parallel.tp, config.model
    if model.source or tp <= 1:
        return
    sparse = model.expert_blocks
    cut = ["num_attention_heads", "num_key_value_heads"]
    cut += ["intermediate_size"] * (not (all(sparse) and model.moe_intermediate_size))
    cut += ["moe_intermediate_size"] * bool(any(sparse) and model.moe_intermediate_size)
    sizes = {key: getattr(model, key) for key in cut}
    if uneven := [f"model.{key} {size}" for key, size in sizes.items() if size % tp]:
        near = nearest(tp, divisors(math.gcd(*sizes.values())))
        yield "parallel.tp", f"it must divide {' and '.join(uneven)}; {near}"


@_reads("model.source", "model.num_nextn_predict_layers", "parallel")
def _foreign_models_are_cut_by_layers_only(config: Config) -> Iterator[Problem]:
    for axis in ("tp", "ep"):
        if config.model.source and getattr(config.parallel, axis) > 1:
            yield f"parallel.{axis}", "it applies to Pipeloom's own decoder only, not to model.source; nearest: 1"
    if config.model.source and config.model.num_nextn_predict_layers:
        yield "model.num_nextn_predict_layers", "it is for Pipeloom's own decoder, not for model.source; nearest: 0"


@_reads("model.source", "model.weights")
def _weights_are_a_checkpoint(config: Config) -> Iterator[Problem]:
    weights = config.model.weights
    if weights and config.model.source:
        yield "model.weights", "model.source has its own weights; leave one of the two out"
    elif weights and not os.path.isdir(expanded(weights)):
        yield (
            "model.weights",
            download(weights) or "there is no such directory; give a checkpoint or a Hugging Face directory",
        )


@_reads("lora", "model.source", "model.weights", "parallel.tp")
def _adapters_have_weights(config: Config) -> Iterator[Problem]:
    lora, tp = config.lora, config.parallel.tp
    if lora.r and not config.model.source and not config.model.weights:
        yield (
            "lora.r",
            "there are no pretrained weights to adapt; set model.source to a Hugging Face directory, or model.weights to "
            "a checkpoint or such a directory",
        )
    if lora.r and lora.lora_dropout and tp > 1:
        yield "lora.lora_dropout", f"the ranks of parallel.tp {tp} would drop different inputs; nearest: 0"


@_reads("parallel.sp", "parallel.tp", "train.seq_len")
def _sequence_parallel_fits(config: Config) -> Iterator[Problem]:
    tp, length = config.parallel.tp, config.train.seq_len
    if config.parallel.sp and tp == 1:
        yield "parallel.sp", "it spreads tokens over the tensor-parallel ranks; set parallel.tp to 2 or more"
    elif config.parallel.sp and tp > 1 and length % tp:
        below = length // tp * tp
        near = f"{below} or {below + tp}" if below else str(tp)
        yield "train.seq_len", f"parallel.tp {tp} must divide it under parallel.sp; nearest: {near}"


@_reads("parallel", "train.seq_len", "model")
def _context_parallel_fits(config: Config) -> Iterator[Problem]:
    parallel, length, model = config.parallel, config.train.seq_len, config.model
    if parallel.cp == 1:
        return
    # each rank has two pieces of a sequence, of which the tensor-parallel ranks may have equal parts
    unit = parallel.cp * math.lcm(2, parallel.tp if parallel.sp else 1)
    if length % unit:
        below = length // unit * unit
        near = f"{below} or {below + unit}" if below else str(unit)
        yield "train.seq_len", f"parallel.cp {parallel.cp} needs a multiple of {unit}; nearest: {near}"
    if model.source and (problem := source_context_problem(model.source)):
        yield "parallel.cp", problem
    yield from _problems_of_cut_sequences(config)


def _problems_of_cut_sequences(config: Config) -> Iterator[str]:
    """Yield the library's own conditions on experts for tokens that slices or context parallelism cut."""
    parallel, model = config.parallel, config.model
    if model.num_experts and not model.source:
        yield from map(sentence, whole_sequence_problems(model.router, model.capacity_factor))
    if parallel.ep_blocks > 1:
        yield from map(sentence, sequence_block_problems(parallel.ep_blocks, 0, 1, cut=True))


@_reads("parallel.ep", "parallel.dp", "parallel.cp")
def _experts_divide(config: Config) -> Iterator[Problem]:
    ep, dp, cp = config.parallel.ep, config.parallel.dp, config.parallel.cp
    if dp >= 1 and dp * cp % ep:
        axes = f"parallel.dp {dp}" + (f" x parallel.cp {cp}" if cp > 1 else "")
        yield "parallel.ep", f"it must divide {axes}; {nearest(ep, divisors(dp * cp))}"


@_reads("model")
def _router_can_choose(config: Config) -> Iterator[Problem]:
    model = config.model
    experts, top_k = model.num_experts, model.num_experts_per_tok
    if model.source:
        return
    if experts == 0:
        without = {"num_shared_experts": 0, "moe_layer_freq": 1, **dict.fromkeys(CLASS_KEYS, "")}
        for key, value in without.items():
            if getattr(model, key) != value:
                yield f"model.{key}", "there are no experts; set model.num_experts"
        return
    wanted = ROUTERS[model.router] or top_k
    if top_k != wanted:
        yield "model.num_experts_per_tok", f'router "{model.router}" chooses {wanted}; use {wanted}'
    elif top_k > experts:
        yield "model.num_experts_per_tok", f"model.num_experts is {experts}; nearest: {experts}"


@_reads("model", "parallel")
def _experts_spread(config: Config) -> Iterator[Problem]:
    parallel, experts = config.parallel, config.model.num_experts
    if config.model.source:
        return
    if experts == 0:
        for key in ("ep", "ep_nodes", "ep_chunks", "ep_blocks"):
            if getattr(parallel, key) > 1:
                yield f"parallel.{key}", "the model has no experts; use 1, or set model.num_experts"
        return
    if experts % parallel.ep:
        near = nearest(parallel.ep, divisors(experts))
        yield "parallel.ep", f"it must divide model.num_experts {experts}; {near}"
    if parallel.ep % parallel.ep_nodes:
        near = nearest(parallel.ep_nodes, divisors(parallel.ep))
        yield "parallel.ep_nodes", f"it must divide parallel.ep {parallel.ep}; {near}"
    if parallel.ep_chunks > 1 and parallel.ep_blocks > 1:
        yield "parallel.ep_chunks", f"use either this or parallel.ep_blocks {parallel.ep_blocks}, not both"
    if parallel.ep_blocks > 1:
        if parallel.ep_blocks > (length := config.train.seq_len):
            yield "parallel.ep_blocks", f"a sequence has train.seq_len {length} tokens; nearest: {length}"
        capacity = config.model.capacity_factor
        yield from map(sentence, sequence_block_problems(parallel.ep_blocks, capacity, parallel.tp, cut=False))


@_reads("train.recompute", "model.num_hidden_layers")
def _recomputed_blocks_exist(config: Config) -> Iterator[Problem]:
    recomputed, blocks = config.train.recompute, config.model.num_hidden_layers
    wrong = [number for number in recomputed if number >= blocks] if isinstance(recomputed, tuple) else []
    if wrong:
        yield "train.recompute", f"there is no block {wrong[0]}; the model has {blocks} (0..{blocks - 1})"


@_reads("train.recompute", "train.compile", "model.source")
def _parts_are_named(config: Config) -> Iterator[Problem]:
    if config.train.recompute not in PARTS_OF_BLOCKS:
        return
    if config.model.source:
        yield "train.recompute", 'the layers of a model of transformers name no parts; nearest: "full"'
    if config.train.compile != "none":
        yield "train.recompute", 'compiled blocks have no parts; set train.compile = "none", or recompute "full"'


@_reads("train.compile", "parallel.tp", "model.num_experts", "model.source")
def _compiled_blocks_run_whole(config: Config) -> Iterator[Problem]:
    if config.train.compile == "none":
        return
    if config.parallel.tp > 1:
        yield (
            "train.compile",
            f"blocks that parallel.tp = {config.parallel.tp} divides exchange inside; set parallel.tp = 1",
        )
    if config.model.num_experts and not config.model.source:
        yield (
            "train.compile",
            'a block with experts runs in segments, which are not compiled; set train.compile = "none"',
        )


@_reads("schedule.overlap_p2p", "schedule.receive_depth", "schedule.transport")
def _transport_posts_receives(config: Config) -> Iterator[Problem]:
    schedule = config.schedule
    if schedule.overlap_p2p is False and schedule.transport == "shared":
        yield (
            "schedule.overlap_p2p",
            'the shared-memory transport posts no receives; set schedule.transport = "individual"',
        )
    if schedule.receive_depth is not None and schedule.transport in ("batched", "shared"):
        yield (
            "schedule.receive_depth",
            f"the {schedule.transport} transport does not keep receives open for each channel; set schedule.transport = "
            '"individual", or leave the key out',
        )


@_reads("schedule.transforms", "schedule.slices", "schedule.name")
def _a_searched_schedule_is_not_transformed(config: Config) -> Iterator[Problem]:
    if config.schedule.transforms and config.schedule.name == "search":
        yield "schedule.transforms", "a searched schedule runs as the search found it; leave them out"
    if (config.schedule.slices or 1) > 1 and config.schedule.name == "search":
        yield "schedule.slices", "schedules are searched for whole sequences; name a family, such as 1f1b"


@_reads("schedule", "parallel", "model", "train.reproducible")
def _the_vocabulary_can_be_spread(config: Config) -> Iterator[Problem]:
    parallel, model, schedule = config.parallel, config.model, config.schedule
    words = [word.partition("=")[0] for word in schedule.transforms]
    if parallel.vocabulary == "last":
        if "vocabulary" in words:
            yield "schedule.transforms", 'vocabulary: set parallel.vocabulary = "pp" to spread the output layer'
        return
    for holds, reason in (
        (parallel.pp == 1, 'there is one pipeline rank; set parallel.pp to 2 or more, or use "last"'),
        (model.num_nextn_predict_layers > 0, "it runs once a micro-batch; set model.num_nextn_predict_layers = 0"),
        (config.train.reproducible, "its sums depend on the number of ranks; set train.reproducible = false"),
        (schedule.name == "search", "a searched schedule runs as the search found it; name a family, such as 1f1b"),
    ):
        if holds:
            yield "parallel.vocabulary", reason


@_reads("train.global_batch_size", "parallel.dp", "schedule.microbatches")
def _batch_is_large_enough(config: Config) -> Iterator[Problem]:
    batch, dp, m = config.train.global_batch_size, config.parallel.dp, config.schedule.microbatches
    if dp == COMPUTED:
        return
    if batch < dp * m:
        yield (
            "train.global_batch_size",
            f"{m} micro-batches on {dp} data-parallel replica{'s' * (dp > 1)} need at least {dp * m} sequences; set it to "
            f"{dp * m}" + (f", or schedule.microbatches to {batch // dp}" if batch >= dp else ""),
        )
    elif batch % dp:
        near = nearest(batch, [n * dp for n in (batch // dp, batch // dp + 1)])
        yield "train.global_batch_size", f"parallel.dp {dp} must divide it; {near}"


@_reads("optimizer.lr", "optimizer.min_lr")
def _rates_fall(config: Config) -> Iterator[Problem]:
    lr = config.optimizer.lr
    if config.optimizer.min_lr > lr:
        yield "optimizer.min_lr", f"it must not be above optimizer.lr {lr}; nearest: {lr}"


@_reads("optimizer.lr_schedule", "optimizer.decay_steps", "optimizer.warmup_steps", "train.steps")
def _the_rate_has_room_to_decay(config: Config) -> Iterator[Problem]:
    options, steps = config.optimizer, config.train.steps
    most = max(0, steps - options.warmup_steps)
    if options.lr_schedule == "wsd" and options.decay_steps > most:
        yield (
            "optimizer.decay_steps",
            f"train.steps {steps} less optimizer.warmup_steps {options.warmup_steps} leaves {most} steps; nearest: {most}",
        )


@_reads("optimizer.name", "optimizer.nesterov", "optimizer.momentum")
def _nesterov_has_momentum(config: Config) -> Iterator[Problem]:
    if config.optimizer.name == "sgd" and config.optimizer.nesterov and not config.optimizer.momentum:
        yield (
            "optimizer.momentum",
            "optimizer.nesterov = true needs momentum; set it above 0, or optimizer.nesterov = false",
        )


# Key -> its values that a run without a barrier can have, and why it cannot have others.
_WITHOUT_BARRIER = {
    "optimizer.name": (("adamw", "sgd"), "ranks gather whole matrices in each step, which is a barrier"),
    "train.on_nan": (("stop", "skip"), "without a barrier a step is known to be bad only after the next has begun"),
    "train.on_spike": (("ignore",), "without a barrier a step is known to be bad only after the next has begun"),
    "log.norms": (("none",), "without a barrier a step is final only after the next one has begun"),
}


@_reads("optimizer.barrier", *_WITHOUT_BARRIER)
def _barrier_where_it_is_needed(config: Config) -> Iterator[Problem]:
    for key, (allowed, why) in _WITHOUT_BARRIER.items():
        section, _, name = key.partition(".")
        if not config.optimizer.barrier and getattr(getattr(config, section), name) not in allowed:
            yield key, f'{why}; set optimizer.barrier = true, or {key} = "{allowed[0]}"'


@_reads("data.source", "data.validation")
def _source_exists(config: Config) -> Iterator[Problem]:
    data = config.data
    for key, name in [("source", name) for name in data.source] + [("validation", data.validation)]:
        path = os.path.expanduser(name)
        if name in ("", "stdlib") or os.path.lexists(path):
            continue
        if not glob.has_magic(path):
            yield f'data.{key} = "{name}": there is no such file or folder; "stdlib" is Python\'s own source'
        elif not glob.glob(path, recursive=True):
            yield f'data.{key} = "{name}": no file matches the pattern'


@_reads("checkpoint.dir", "log.dir")
def _folders_are_no_files(config: Config) -> Iterator[Problem]:
    for key, name in (("checkpoint.dir", config.checkpoint.dir), ("log.dir", config.log.dir)):
        path = expanded(name)
        if os.path.exists(path) and not os.path.isdir(path):
            yield key, "it is a file, not a folder"


@_reads("checkpoint.resume", "checkpoint.dir", "log.dir")
def _checkpoint_to_resume_exists(config: Config) -> Iterator[Problem]:
    resume = config.checkpoint.resume
    if isinstance(resume, str) and resume not in ("none", "auto") and not os.path.isdir(expanded(resume)):
        where = config.checkpoint.dir or config.log.dir
        yield "checkpoint.resume", f'there is no such directory; "auto" takes the newest checkpoint below {where}'


@_reads("log.tensorboard", "log.wandb")
def _writers_are_installed(config: Config) -> Iterator[Problem]:
    for package, install in (("tensorboard", 'pip install -e ".[tensorboard]"'), ("wandb", "pip install wandb")):
        if getattr(config.log, package) and importlib.util.find_spec(package) is None:
            yield f"log.{package}", f"the package {package} is not installed: {install}"


@_reads("train.profile_from", "train.steps")
def _profiled_step_runs(config: Config) -> Iterator[Problem]:
    steps = config.train.steps
    if config.train.profile_from > steps:
        yield "train.profile_from", f"train.steps is {steps}, so no step would be recorded; nearest: {steps}"


def slice_problems(config: Config) -> Iterator[str]:
    """Yield a sentence for each setting that is about whole sequences, for a schedule that cuts them into slices."""
    if config.train.compile != "none":
        yield f'train.compile = "{config.train.compile}": compiled blocks keep no state of a slice; nearest: "none"'
    if config.model.source and (problem := source_context_problem(config.model.source)):
        yield f"schedule.slices: {problem}"
    yield from _problems_of_cut_sequences(config)
