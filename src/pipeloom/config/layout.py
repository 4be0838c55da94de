"""The layout of a configuration: its schedule, the layers of each stage, the sizes of the micro-batches."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import Any

from pipeloom.config.checks import CLASS_KEYS, cross_problems, schedule_problems, slice_problems
from pipeloom.config.fault import Fault, fault_problem, parse_fault
from pipeloom.config.problems import naming_keys, shown
from pipeloom.config.search import NAME as SEARCH
from pipeloom.config.search import SearchRequest, search_request
from pipeloom.config.sections import COMPUTED, PARTS_OF_BLOCKS, Config
from pipeloom.errors import ConfigError, ScheduleError, UsageError, did_you_mean
from pipeloom.schedule import Costs, Schedule, check, simulate
from pipeloom.schedule.actions import equal_part
from pipeloom.schedule.families import build
from pipeloom.schedule.files import load, names_a_file
from pipeloom.schedule.functions import importable_from, is_function, source_file, user_object
from pipeloom.schedule.model import actions_of
from pipeloom.schedule.slices import SequenceCuts, balanced_cuts
from pipeloom.schedule.transforms import of_zero, recompute_stages, transformed
from pipeloom.schedule.vocabulary import embedding, with_shares
from pipeloom.shapes.cut import balance, even_sizes, parse_stages, spans
from pipeloom.shapes.decoder import shape_problems
from pipeloom.shapes.layers import LayerSize, attention_share, layer_sizes, whole_layers
from pipeloom.shapes.mesh import MeshShape

_GATE = "pipeloom.models.gate.TopKGate"


@dataclass(frozen=True)
class Layout:
    """The resolved run, the same value on every worker.

    Attributes:
        config: the configuration that it is resolved from.
        schedule: the checked schedule; with a search, the one that runs until the search is done.
        stage_layers: position in a route -> number of layers, of [embedding, blocks …, norm and output].
        microbatch_sizes: sequences of each micro-batch of one data-parallel replica, larger ones first.
        mesh: the axes' sizes.
        notes: sentences to print: about uneven stages and micro-batches, and the search.
        fault: a failure to inject, or None.
        search: the request of `schedule.name = "search"`, else None.
        code: the source file of a schedule given as `module:function`, else None.
        classes: key of `[model]` -> the user's class that it names as `module:class`.
        origins: "section.key" -> the origin of its value: default, a file, a flag, or the environment.
        cuts: where the sequences are cut into slices; None: they are not.
    """

    config: Config
    schedule: Schedule
    stage_layers: tuple[int, ...]
    microbatch_sizes: tuple[int, ...]
    mesh: MeshShape
    notes: tuple[str, ...]
    fault: Fault | None = None
    search: SearchRequest | None = None
    code: str | None = None
    classes: Mapping[str, Any] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)
    cuts: SequenceCuts | None = None

    @property
    def slice_tokens(self) -> tuple[int, ...] | None:
        """The tokens of each slice of a sequence; None where sequences are not cut."""
        return None if self.cuts is None else tuple(end - start for start, end in pairwise(self.cuts.positions))

    @property
    def world_size(self) -> int:
        """The number of workers."""
        return self.mesh.world


def examine(
    config: Config, wrong: Collection[str] = (), folders: Mapping[str, Path] | None = None
) -> tuple[Layout | None, list[str]]:
    """(the layout or None, a sentence for each problem). Checks that depend on a `wrong` key are skipped.

    Code that a key names as `module:function` is imported from its folder in `folders`, "section.key" -> folder, else from
    the working directory.

    Raises ScheduleError when the schedule cannot run and there is no other problem.
    """
    folders, config = folders or {}, _sharded(config)
    problems = cross_problems(config, wrong)
    known = not any(key.startswith("model") for key in wrong)
    classes, unusable = user_classes(config, folders) if known else ({}, [])
    sized = known and (bool(config.model.source) or not any(shape_problems(config.model)))
    problems += unusable
    computed = COMPUTED in (config.parallel.pp, config.parallel.dp, config.parallel.tp)
    if computed or (wrong and any(key.partition(".")[0] in ("schedule", "parallel") for key in wrong)):
        return None, problems
    # before the schedule, which takes minutes for thousands of ranks
    if too_deep := _more_ranks_than_layers(config, wrong):
        return None, [*problems, too_deep]
    broken: ScheduleError | None = None
    schedule: Schedule | None = None
    request: SearchRequest | None = None
    try:
        if config.schedule.name == SEARCH:
            request = search_request(config)
        schedule = request.first if request is not None else make_schedule(config, folders.get("schedule.name"))
        check(schedule, training=True)
    except ConfigError as error:
        problems += error.problems
    except UsageError as error:
        problems.append(f'schedule.name = "{config.schedule.name}": {error}')
    except ScheduleError as error:
        broken = error
    stage_layers: tuple[int, ...] = ()
    cuts, cut_problems = _cuts(config, schedule if sized else None)
    problems += cut_problems
    if schedule is not None:
        problems += [*_problems_of_order(config, schedule), *schedule_problems(config, schedule)]
        stage_problems, stage_layers = _stage_layers(config, schedule) if sized else ([], ())
        problems += [*stage_problems, *_problems_of_parts(config, schedule, stage_layers)]
    if schedule is not None and broken is None and "debug.fault" not in wrong:
        fault = parse_fault(config.debug.fault)
        if fault is not None and (problem := fault_problem(fault, schedule, config.train.steps)):
            problems.append(f"debug.fault = {shown(config.debug.fault)}: {problem}")
    if broken is not None and not problems:
        raise broken
    if schedule is None or problems or wrong:
        return None, problems
    sizes = even_sizes(config.train.global_batch_size // config.parallel.dp, schedule.microbatches)
    with naming_keys():
        mesh = MeshShape(**config.parallel.model_dump(include={"pp", "dp", "cp", "tp", "ep", "ep_nodes"}))
    return Layout(
        config=config,
        schedule=_with_blocks(config, schedule, stage_layers),
        stage_layers=stage_layers,
        microbatch_sizes=sizes,
        mesh=mesh,
        notes=(
            *_notes(config, schedule, stage_layers, sizes),
            *([request.note] if request is not None else []),
        ),
        fault=parse_fault(config.debug.fault),
        search=request,
        code=source_file(config.schedule.name) if is_function(config.schedule.name) else None,
        classes=classes,
        cuts=cuts,
    ), []


def _cuts(config: Config, schedule: Schedule | None) -> tuple[SequenceCuts | None, list[str]]:
    """Return the cuts of `train.seq_len` into the schedule's slices, if it has any, and a sentence where there can be none."""
    if schedule is None or schedule.slices == 1:
        return None, []
    if problems := list(slice_problems(config)):
        return None, problems
    axes, length = config.parallel, config.train.seq_len
    multiple = 2 * axes.cp * axes.tp if axes.cp * axes.tp > 1 else 1
    try:
        share = attention_share(whole_layers(config.model.shape(), length))
        return balanced_cuts(length, schedule.slices, share, multiple), []
    except UsageError as error:
        return None, [f"train.seq_len = {length}: {error}"]


def _with_blocks(config: Config, schedule: Schedule, stage_layers: tuple[int, ...]) -> Schedule:
    """Return `schedule` with a block (R;B) for each backward of the stages with blocks of `train.recompute`, or with an R of the
    part that it names."""
    setting = config.train.recompute
    part = setting if setting in PARTS_OF_BLOCKS else ""
    numbers = setting if isinstance(setting, tuple) else range(0 if setting == "none" else config.model.blocks)
    ends = list(accumulate(stage_layers, initial=0))
    held = {at for at, span in enumerate(pairwise(ends)) if any(number + 1 in range(*span) for number in numbers)}
    return recompute_stages(schedule, [s for s, position in enumerate(schedule.position_of) if position in held], part)


def _sharded(config: Config) -> Config:
    """Return `config` with what its ZeRO level stands for: a sharded optimizer, and a transform where none says more."""
    level, transforms = config.parallel.zero, config.schedule.transforms
    if level == 0:
        return config
    shards = any(name.startswith(("shard", "reduce-gradients")) for name in transforms)
    more = () if shards else of_zero(level, config.parallel.unshard_slots, config.parallel.vocabulary == "pp")
    optimizer = config.optimizer.model_copy(update={"zero1": True})
    schedule = config.schedule.model_copy(update={"transforms": (*transforms, *more)})
    return config.model_copy(update={"optimizer": optimizer, "schedule": schedule})


def stage_sizes(config: Config) -> list[LayerSize]:
    """As `layer_sizes`, of the layers that stages hold: of a vocabulary that is spread over the ranks, only the norm."""
    sizes = list(layer_sizes(config.model.shape(), config.train.seq_len))
    if config.parallel.vocabulary == "pp":
        sizes[0] = replace(sizes[0], parameters=0)
        sizes[-1] = replace(sizes[-1], parameters=config.model.hidden_size, flops=0)
    return sizes


def flop_costs(config: Config, schedule: Schedule, stage_layers: tuple[int, ...]) -> Costs:
    """Return costs in proportion to each stage's FLOPs, the mean of those of layers 1; F, I and W take the same time.

    Of an output layer that is spread, each share has an equal part: S is its F, and with one reduction its I, T the rest.
    """
    flops = stage_costs(config, stage_layers)
    unit = sum(flops) / len(flops)
    part = layer_sizes(config.model.shape(), config.train.seq_len)[-1].flops / schedule.ranks / unit / 3
    layers = tuple(flops[position] / unit / 3 if position < len(flops) else 0.0 for position in schedule.position_of)
    two = any(word.replace(" ", "") == "vocabulary=two" for word in config.schedule.transforms)
    scores, gradients = (part, 2 * part) if two else (2 * part, part)
    return Costs(layers, layers, layers, scores=scores, scores_grad=gradients)


STAGE_WORDS = "in flight: most micro-batches of stages at once; E: embedding, L: output layer"


def stage_words(layout: Layout) -> list[str]:
    """Return stage -> its layers in words, such as `E 0-1` or `2-3 L`; E/4 and L/4 are one of 4 shares of the two."""
    shares = layout.schedule.vocabulary
    names = ["" if shares else "E", *map(str, range(layout.config.model.blocks)), "norm" if shares else "L"]
    words = []
    for stage, (start, end) in enumerate(spans(layout.schedule, layout.stage_layers)):
        if stage in shares:
            words.append(f"E/{len(shares)} L/{len(shares)}")
            continue
        blocks = [name for name in names[start:end] if name.isdecimal()]
        span = f"{blocks[0]}-{blocks[-1]}" if len(blocks) > 1 else "".join(blocks)
        ends = [names[0] if start == 0 < end else "", span, names[-1] if start < end == len(names) else ""]
        words.append(" ".join(filter(None, ends)) or "-")
    return words


def stage_costs(config: Config, stage_layers: tuple[int, ...]) -> list[int]:
    """Forward and backward FLOPs of one sequence at each position."""
    sizes = stage_sizes(config)
    return [sum(size.flops for size in sizes[slice(*span)]) for span in pairwise(accumulate(stage_layers, initial=0))]


def _more_ranks_than_layers(config: Config, wrong: Collection[str]) -> str:
    """Return the problem if the pipeline has more ranks than the model has blocks to balance over them; "" if not."""
    ranks, blocks = config.parallel.pp, config.model.num_hidden_layers
    if config.parallel.stages or ranks <= blocks or any(key.startswith("model") for key in wrong):
        return ""
    return (
        f"parallel.pp = {ranks}: the model has {blocks} decoder layers, and each pipeline rank needs at least one; nearest: "
        f"--parallel.pp {blocks}{'' if config.model.source else f', or model.num_hidden_layers = {ranks}'}"
    )


def _stage_layers(config: Config, schedule: Schedule) -> tuple[list[str], tuple[int, ...]]:
    blocks, stages = config.model.num_hidden_layers, schedule.positions
    if config.parallel.stages:
        try:
            return [], tuple(
                parse_stages(config.parallel.stages, blocks, stages, config.model.num_nextn_predict_layers)
            )
        except UsageError as error:
            return [f"parallel.stages = {shown(config.parallel.stages)}: {error}"], ()
    if stages > blocks:
        fewer, chunks = blocks * schedule.ranks // stages, blocks // schedule.ranks
        sizes = {"--parallel.pp": (fewer, config.schedule.chunks), "--schedule.chunks": (schedule.ranks, chunks)}
        nearest = [
            f"{flag} {fewer if flag == '--parallel.pp' else chunks}"
            for flag, (ranks, count) in sizes.items()
            if ranks and count != 0 and stages_of(config, ranks, count) <= blocks
        ]
        nearest += [f"{stages} layers"] * (not config.model.source)
        return [
            f"model.num_hidden_layers = {blocks}: the schedule has {stages} stages, more than there are decoder layers "
            f"({schedule.ranks} ranks of {schedule.chunks}); nearest: {' or '.join(nearest) or 'another schedule.name'}"
        ], ()
    return [], tuple(balance([size.flops for size in stage_sizes(config)], stages))


def names_code(name: str) -> bool:
    """Return whether a schedule's name is that of a file or a function, or a search: not one of a family."""
    return names_a_file(name) or is_function(name) or name == SEARCH


def stages_of(config: Config, ranks: int, chunks: int | None) -> float:
    """Return the number of stages that the family has on so many ranks, with `chunks` on each; infinite where it refuses them."""
    if names_code(config.schedule.name):
        return math.inf
    try:
        return build(
            config.schedule.name, ranks, config.schedule.microbatches, chunks, config.schedule.options
        ).positions
    except (UsageError, TypeError):
        return math.inf


def _problems_of_order(config: Config, schedule: Schedule) -> list[str]:
    """Return the reason why sums of gradients would depend on the schedule, where they must not, if there is one."""
    if not config.train.reproducible:
        return []
    key, rows = "train.reproducible = true", config.train.global_batch_size // config.parallel.dp
    if (config.schedule.name == SEARCH or config.schedule.replan) and rows % schedule.microbatches:
        return [
            f"{key}: a search may reorder micro-batches of several sizes; {schedule.microbatches} do not divide {rows} rows"
        ]
    backwards: dict[int, list[int]] = {}
    for action in actions_of(schedule):
        if action.kind in ("B", "W"):
            backwards.setdefault(action.stage, []).append(action.microbatch)
    ends = schedule.placement[schedule.routes[0][0]], schedule.placement[schedule.routes[0][-1]]
    if config.model.tie_word_embeddings and len(set(ends)) == 1:
        return [
            f"{key}: model.tie_word_embeddings = true, and rank {ends[0]} has both the first stage and the last, whose gradients "
            "of the embedding it sums in turns; use two ranks or more, and a schedule that starts and ends on different ones"
        ]
    if len(schedule.routes) == 1 and all(order == sorted(order) for order in backwards.values()):
        return []
    return [
        f'{key}: schedule.name = "{config.schedule.name}" does not sum the gradients of each layer in the order of the '
        "micro-batches on one rank; use a schedule with one route that keeps the order"
    ]


def _problems_of_parts(config: Config, schedule: Schedule, stage_layers: tuple[int, ...]) -> list[str]:
    """Return a sentence for each part that the schedule recomputes and that no layer names, or that no stage has a layer of."""
    named = () if config.model.source or config.train.compile != "none" else PARTS_OF_BLOCKS
    problems = []
    for part in sorted(part for part in schedule._remade_parts.difference(named) if "+" not in part):
        count = part.partition("/")[2]
        equal = [f"{number}/{count}" for number in range(1, int(count or 0) + 1)]
        there = [each for each in equal if any(equal_part(each, layers) for layers in stage_layers)]
        if part in there or (count and not stage_layers):
            continue
        reason = f"no layer names a part so{did_you_mean(part, named)}"
        if count:
            rule = f"layer i of n is in part floor(i * {count} / n) + 1"
            reason = f"no stage has a layer in it ({rule}); there are {', '.join(there)}"
        key = "transforms" if f"recompute={part}" in config.schedule.transforms else "name"
        value = shown(getattr(config.schedule, key))
        problems.append(f"schedule.{key} = {value}: it recomputes part {part!r}, and {reason}")
    return problems


def _notes(config: Config, schedule: Schedule, stage_layers: tuple[int, ...], sizes: tuple[int, ...]) -> list[str]:
    notes = []
    if schedule.units < schedule.ranks:
        idle, count = simulate(schedule, Costs()).bubble_rate, schedule.microbatches
        notes.append(
            f"{count} micro-batch{'es' * (count > 1)} on {schedule.ranks} ranks: about {idle:.0%} of each step is idle time; "
            f"schedule.microbatches = {2 * schedule.ranks} or more fills the pipeline"
        )
    blocks = list(stage_layers)
    blocks[0] -= 1
    blocks[-1] -= 1
    if len(set(blocks)) > 1:
        costs = stage_costs(config, stage_layers)
        worst = max(costs) * len(costs) / sum(costs)
        what = " ".join(map(str, blocks))
        notes.append(
            f"uneven stages: {what} blocks; the largest costs {worst:.2f} times the mean (embedding and output counted)"
        )
    if 0 in stage_layers:
        empty = [str(at) for at, count in enumerate(stage_layers) if count == 0]
        notes.append(f"stages without layers, as parallel.stages specifies: {', '.join(empty)}")
    if len(set(sizes)) > 1 and config.data.batching == "equal":
        runs = " and ".join(f"{len(list(group))} of {size}" for size, group in groupby(sizes))
        notes.append(f"uneven micro-batches: {sum(sizes)} sequences in {len(sizes)}: {runs}; each counts by its tokens")
    if config.data.batching == "planned":
        notes.append(
            f"each step packs {config.train.global_batch_size} documents into micro-batches of at most "
            f"{max(sizes) * config.train.seq_len:,} tokens, as many as their lengths need, in an order and with a "
            f"schedule {config.schedule.name} for these lengths; what is predicted is for {len(sizes)} full ones"
        )
    if config.train.compile != "none" and schedule.splits_backward:
        notes.append("compiled blocks compute their weight gradients in I, so their W takes no time")
    if config.optimizer.warmup_steps > config.train.steps:
        notes.append(f"warm-up takes {config.optimizer.warmup_steps} steps, training stops after {config.train.steps}")
    return notes


def read_schedule(name: str) -> Schedule:
    """The schedule in the CSV or JSON file `name`. Raises ConfigError if there is none, ScheduleError for its content."""
    if not Path(name).is_file():
        raise ConfigError(f'schedule.name = "{name}": there is no such file')
    return load(Path(name))


def make_schedule(config: Config, folder: Path | None = None) -> Schedule:
    """The schedule that `config` names, with its transforms applied; not yet checked.

    A user's function is imported from `folder` (None: the working directory).

    Raises UsageError when the schedule refuses its sizes or options, when a file's sizes differ from the configuration's,
    when a user's function fails, or when a transform refuses the schedule.
    """
    schedule = _untransformed(config, folder)
    words = config.schedule.transforms
    if schedule.vocabulary and config.parallel.vocabulary == "last":
        raise ConfigError(
            f'schedule.name = "{config.schedule.name}": it spreads the output layer over the ranks; set '
            'parallel.vocabulary = "pp"'
        )
    spread = not schedule.vocabulary and not any(word.startswith("vocabulary") for word in words)
    beside = next((at for at, word in enumerate(words) if word.startswith(_BESIDE)), len(words))
    try:
        schedule = _transformed(schedule, words[:beside], config)
        if config.parallel.vocabulary == "pp" and spread:
            schedule = _spread(schedule, _costs_of_spread(config, schedule))
        elif schedule.vocabulary and not schedule._spreads_embedding:
            schedule = embedding(schedule, _costs_of_spread(config, schedule))
        return _transformed(schedule, words[beside:], config)
    except ConfigError:
        raise
    except UsageError as error:
        raise ConfigError(f"schedule.transforms = {list(words)}: {error}") from error


# Transforms that add entries beside the computation, which come last.
_BESIDE = ("offload", "shard", "reduce-gradients")


def _transformed(schedule: Schedule, words: Sequence[str], config: Config) -> Schedule:
    for word in words:  # which may change the number of stages
        schedule = transformed(schedule, [word], _costs_of_spread(config, schedule))
    return schedule


def _costs_of_spread(config: Config, schedule: Schedule) -> Costs | None:
    """Return the costs at which transforms order a schedule with a spread vocabulary; None for others, and where the layers do
    not fit its stages.
    """
    if config.parallel.vocabulary == "last":
        return None
    problems, stage_layers = _stage_layers(config, schedule)
    if problems:
        return None
    costs, cuts = flop_costs(config, schedule, stage_layers), _cuts(config, schedule)[0]
    return costs if cuts is None else cuts.costs(costs)


def _spread(schedule: Schedule, costs: Costs | None) -> Schedule:
    try:
        return with_shares(schedule, costs)
    except UsageError as error:
        words = str(error).removeprefix("vocabulary: ")
        raise ConfigError(f'parallel.vocabulary = "pp": {words}') from error


def _untransformed(config: Config, folder: Path | None) -> Schedule:
    wanted = config.schedule
    if names_a_file(wanted.name):
        return _sized(read_schedule(wanted.name), config)
    sizes = config.parallel.pp, wanted.microbatches, wanted.chunks
    try:
        options = wanted.options if wanted.slices is None else {"slices": wanted.slices} | wanted.options
        complete = build(wanted.name, *sizes, options, folder=folder)
    except TypeError as error:  # an option of the wrong type
        raise ConfigError(f'schedule.name = "{wanted.name}": it failed with {type(error).__name__}: {error}') from error
    return _sized(complete, config)


def _sized(schedule: Schedule, config: Config) -> Schedule:
    sizes = {
        "parallel.pp": (config.parallel.pp, schedule.ranks),
        "schedule.microbatches": (config.schedule.microbatches, schedule.microbatches),
        "schedule.chunks": (config.schedule.chunks, schedule.chunks),
        "schedule.slices": (config.schedule.slices, schedule.slices),
    }
    problems = [
        f'{key} = {given}, but schedule "{config.schedule.name}" has {actual}; set {key} = {actual}'
        for key, (given, actual) in sizes.items()
        if given is not None and given != actual
    ]
    if problems:
        raise ConfigError(problems)
    return schedule


def user_classes(config: Config, folders: Mapping[str, Path]) -> tuple[dict[str, Any], list[str]]:
    """(key of `[model]` -> the user's class that it names, a sentence for each that cannot be used).

    Args:
        folders: "section.key" -> the folder from which the module that the key names is imported; default: the working directory.
    """
    classes: dict[str, Any] = {}
    problems: list[str] = []
    for key in CLASS_KEYS:
        name = getattr(config.model, key)
        if not name or not config.model.num_experts:
            continue
        folder = folders.get(f"model.{key}", Path())
        try:
            with importable_from(folder):
                classes[key] = user_object(name, folder, "class")
        except UsageError as error:
            problems.append(f'model.{key} = "{name}": {error}')
            continue
        mro = getattr(classes[key], "__mro__", ())
        bases = [f"{base.__module__}.{base.__qualname__}" for base in mro]
        if not bases:
            problems.append(f'model.{key} = "{name}": it is a {type(classes[key]).__name__}, not a class')
        elif key == "router_class" and _GATE not in bases:
            problems.append(f'model.{key} = "{name}": it is not a subclass of {_GATE}')
    return classes, problems
