"""Conditions between keys. A check names the keys that it reads, and is skipped when one of them is invalid."""

from __future__ import annotations

import glob
import importlib.util
import math
import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from pipeloom.config.problems import sentence, shown
from pipeloom.config.rules import EXCLUSIONS, EXCLUSIONS_OF_SCHEDULES, features_of, key_of, value_of
from pipeloom.config.sections import COMPUTED, Config
from pipeloom.errors import divisors, nearest
from pipeloom.limits import expanded
from pipeloom.schedule import Schedule
from pipeloom.schedule.model import parts
from pipeloom.shapes.decoder import ROUTERS, context_problem, shape_problems
from pipeloom.shapes.hub import content_of, download, is_directory
from pipeloom.shapes.rules import broken

CLASS_KEYS = ("experts_class", "router_class")

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
    problems += [(key_of(feature), reason) for feature, reason in broken(features_of(config, wrong), EXCLUSIONS)]
    return [problem if isinstance(problem, str) else _sentence(config, *problem) for problem in problems]


def _sentence(config: Config, key: str, words: str) -> str:
    return f"{key} = {shown(value_of(config, key))}: {words}"


def _at_most(key: str, value: float, most: float, reason: str) -> Iterator[Problem]:
    if value > most:
        yield key, f"{reason}; nearest: {most}"


def _divides(key: str, size: int, total: int, words: str) -> Iterator[Problem]:
    if total % size:
        yield key, f"it must divide {words}; {nearest(size, divisors(total))}"


def _is_multiple(key: str, value: int, unit: int, reason: str) -> Iterator[Problem]:
    if value % unit:
        below = value // unit * unit
        yield key, f"{reason}; {nearest(value, filter(None, (below, below + unit)))}"


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
    yield from () if config.model.source else map(sentence, shape_problems(config.model))


@_reads("model.vocab_size", "model.source", "model.weights", "data.tokenizer")
def _vocabulary_holds_bytes(config: Config) -> Iterator[Problem]:
    model = config.model
    byte_tokens_by_default = config.data.tokenizer == "auto" and not (
        model.source or (model.weights and is_directory(model.weights))
    )
    if (byte_tokens_by_default or config.data.tokenizer == "bytes") and model.vocab_size < 256:
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
    uneven = [f"model.{key} {size}" for key, size in sizes.items() if size % tp]
    yield from _divides("parallel.tp", tp, math.gcd(*sizes.values()), " and ".join(uneven))


@_reads("model.source", "model.weights")
def _weights_are_a_checkpoint(config: Config) -> Iterator[Problem]:
    weights = config.model.weights
    if weights and not config.model.source and not os.path.isdir(expanded(weights)):
        yield (
            "model.weights",
            download(weights) or "there is no such directory; give a checkpoint or a Hugging Face directory",
        )


@_reads("parallel.sp", "parallel.tp", "train.seq_len")
def _sequence_parallel_fits(config: Config) -> Iterator[Problem]:
    tp, length = config.parallel.tp, config.train.seq_len
    if config.parallel.sp and tp > 1:
        yield from _is_multiple("train.seq_len", length, tp, f"parallel.tp {tp} must divide it under parallel.sp")


@_reads("parallel", "train.seq_len", "model")
def _context_parallel_fits(config: Config) -> Iterator[Problem]:
    parallel, length, model = config.parallel, config.train.seq_len, config.model
    if parallel.cp == 1:
        return
    # each rank has two pieces of a sequence, of which the tensor-parallel ranks may have equal parts
    unit = parallel.cp * math.lcm(2, parallel.tp if parallel.sp else 1)
    yield from _is_multiple("train.seq_len", length, unit, f"parallel.cp {parallel.cp} needs a multiple of {unit}")
    if model.source and (problem := context_problem(content_of(model.source, "model.source"))):
        yield "parallel.cp", problem


@_reads("parallel.ep", "parallel.dp", "parallel.cp")
def _experts_divide(config: Config) -> Iterator[Problem]:
    ep, dp, cp = config.parallel.ep, config.parallel.dp, config.parallel.cp
    if dp >= 1:
        axes = f"parallel.dp {dp}" + (f" x parallel.cp {cp}" if cp > 1 else "")
        yield from _divides("parallel.ep", ep, dp * cp, axes)


@_reads("model")
def _router_can_choose(config: Config) -> Iterator[Problem]:
    model = config.model
    experts, top_k = model.num_experts, model.num_experts_per_tok
    if model.source or experts == 0:
        return
    wanted = ROUTERS[model.router] or top_k
    if top_k != wanted:
        yield "model.num_experts_per_tok", f'router "{model.router}" chooses {wanted}; use {wanted}'
    else:
        yield from _at_most("model.num_experts_per_tok", top_k, experts, f"model.num_experts is {experts}")


@_reads("model", "parallel")
def _experts_spread(config: Config) -> Iterator[Problem]:
    parallel, experts = config.parallel, config.model.num_experts
    if config.model.source or experts == 0:
        return
    length = config.train.seq_len
    yield from _divides("parallel.ep", parallel.ep, experts, f"model.num_experts {experts}")
    yield from _divides("parallel.ep_nodes", parallel.ep_nodes, parallel.ep, f"parallel.ep {parallel.ep}")
    reason = f"a sequence has train.seq_len {length} tokens"
    yield from _at_most("parallel.ep_blocks", parallel.ep_blocks, length, reason)


@_reads("train.recompute", "model.num_hidden_layers")
def _recomputed_blocks_exist(config: Config) -> Iterator[Problem]:
    recomputed, blocks = config.train.recompute, config.model.num_hidden_layers
    wrong = [number for number in recomputed if number >= blocks] if isinstance(recomputed, tuple) else []
    if wrong:
        yield "train.recompute", f"there is no block {wrong[0]}; the model has {blocks} (0..{blocks - 1})"


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
    else:
        yield from _is_multiple("train.global_batch_size", batch, dp, f"parallel.dp {dp} must divide it")


@_reads("optimizer.lr", "optimizer.min_lr")
def _rates_fall(config: Config) -> Iterator[Problem]:
    lr = config.optimizer.lr
    yield from _at_most("optimizer.min_lr", config.optimizer.min_lr, lr, f"it must not be above optimizer.lr {lr}")


@_reads("optimizer.lr_schedule", "optimizer.decay_steps", "optimizer.warmup_steps", "train.steps")
def _the_rate_has_room_to_decay(config: Config) -> Iterator[Problem]:
    options, steps = config.optimizer, config.train.steps
    most = max(0, steps - options.warmup_steps)
    if options.lr_schedule == "wsd":
        reason = f"train.steps {steps} less optimizer.warmup_steps {options.warmup_steps} leaves {most} steps"
        yield from _at_most("optimizer.decay_steps", options.decay_steps, most, reason)


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
    steps, reason = config.train.steps, f"train.steps is {config.train.steps}, so no step would be recorded"
    yield from _at_most("train.profile_from", config.train.profile_from, steps, reason)


def schedule_problems(config: Config, schedule: Schedule) -> Iterator[str]:
    """Yield a sentence for each setting that does not go with what its schedule has."""
    cells = [parts(cell) for program in schedule.programs for cell in program]
    kinds = {action.kind for cell in cells for action in cell}
    features = {
        "two routes": len(schedule.routes) > 1,
        "pairs": any(len(cell) > 1 for cell in cells),
        "slices": schedule.slices > 1,
        "other kinds": ", ".join(sorted(kinds - {"F", "B", "I", "W"})),
    }
    used = features_of(config) | {name: value for name, value in features.items() if value}
    yield from (_sentence(config, key_of(name), reason) for name, reason in broken(used, EXCLUSIONS_OF_SCHEDULES))


def slice_problems(config: Config) -> Iterator[str]:
    """Yield a sentence for each setting that is about whole sequences, for a schedule that cuts them into slices."""
    whole = features_of(config)
    known = list(broken(whole, EXCLUSIONS))  # which `cross_problems` reports
    more = [each for each in broken(whole | {"slices": 2, "cut": True}, EXCLUSIONS) if each not in known]
    yield from (_sentence(config, key_of(feature), reason) for feature, reason in more)
    if config.model.source and (problem := context_problem(content_of(config.model.source, "model.source"))):
        yield f"schedule.slices: {problem}"
