"""Assembly: building the stages of one rank, with their parameters under global names and their tied weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pipeloom.errors import ConfigError, DistributedError, UsageError, did_you_mean
from pipeloom.ops import products
from pipeloom.ops.deferred import StageBackward, WeightGradContext
from pipeloom.ops.main_gradient import MainGradients
from pipeloom.parallel.buckets import BucketParameter
from pipeloom.parallel.data import AFTER_TIES
from pipeloom.parallel.sharding import ParameterSharding, shardings_of
from pipeloom.runtime.built_parameters import ForeignLeaves
from pipeloom.runtime.health.status import Status
from pipeloom.runtime.options import RuntimeOptions
from pipeloom.runtime.overlap import CommStream
from pipeloom.runtime.stage import Stage
from pipeloom.runtime.stage_modules import LayerSource, build_stage, layer_name, split_layers
from pipeloom.runtime.tensor_spec import is_strided, layout_name, memory_of
from pipeloom.runtime.tied_weights import (
    SharedParameters,
    Tie,
    frozen_names,
    layer_of,
    make_ties,
    merged,
    replica_ties,
    share,
    shared_groups,
    unknown_names,
)
from pipeloom.schedule.model import Schedule

GatherObjects = Callable[[Any], list[Any]]


@dataclass(frozen=True)
class Assembly:
    """The layers, parameters and tied weights of one rank.

    Attributes:
        rank: the pipeline rank.
        stages: stage number -> stage.
        communications: the communications inside its stages.
        segmented: numbers of the pipeline's stages with segments, of the ranks that took part in the exchange.
        modules: layer name -> module, in order of the stages.
        parameters: global name -> parameter; one that is tied within the rank appears once.
        ties: tie with a holder on another rank -> the copy here.
        replicated_layers: layer that several ranks of the pipeline hold -> those ranks.
        copies: names of parameters here whose first holder is another rank.
        first_names: further name of a shared weight -> its first name.
        held: the parameters with their layout and stages, for the reduction of gradients.
        grad_context: where the linear layers here find the queue for their weight gradients.
    """

    rank: int
    stages: dict[int, Stage]
    communications: CommStream
    segmented: frozenset[int]
    modules: dict[str, nn.Module]
    parameters: dict[str, nn.Parameter]
    ties: dict[Tie, nn.Parameter]
    replicated_layers: dict[str, tuple[int, ...]]
    copies: frozenset[str]
    first_names: Mapping[str, str]
    held: tuple[BucketParameter, ...]
    grad_context: WeightGradContext

    @property
    def buffers(self) -> dict[str, Tensor]:
        """Return global name -> buffer at present: a forward may replace one."""
        return {f"{name}.{inner}": b for name, module in self.modules.items() for inner, b in module.named_buffers()}

    @property
    def transient_buffers(self) -> frozenset[str]:
        """Return the names of buffers that a module's own `state_dict` omits (`persistent=False`)."""
        return frozenset(
            f"{name}.{path}.{inner}" if path else f"{name}.{inner}"
            for name, module in self.modules.items()
            for path, part in module.named_modules()
            for inner in part._non_persistent_buffers_set
        )


class SharedBuild:
    """State that the ranks of one process share while their layers are built: modules, and the context of weight gradients.

    Attributes:
        shared: which layers share a parameter.
        built: position of a layer -> its module, the same for replicas of the layer on several ranks, unless they are `separate`.
        grad_context: where linear layers find the queue for their weight gradients.
    """

    def __init__(
        self, shared: SharedParameters, schedule: Schedule, summed: str | None = None, separate: bool = False
    ) -> None:
        self.shared = shared
        self.separate = separate
        self.built: dict[int, nn.Module] = {}
        main = MainGradients() if summed is not None else None
        self.grad_context = WeightGradContext(StageBackward(), main=main, in_place=schedule.splits_backward)

    def on_rank(self, which: range) -> dict[int, nn.Module]:
        """Return the modules that a rank's stage of the layers `which` begins with.

        A separate replica shares the parameters of the first one, and has buffers and attributes of its own.
        """
        if not self.separate:
            return self.built
        replicas = {}
        for index in which:
            if index in self.built:
                module = self.built[index]
                shared = (self.grad_context, *module.parameters())
                replicas[index] = copy.deepcopy(module, {id(each): each for each in shared})
        return replicas


def assemble(
    layers: Sequence[LayerSource],
    schedule: Schedule,
    rank: int,
    sizes: Sequence[int] | None,
    tied: Sequence[Sequence[str]],
    options: RuntimeOptions,
    device: torch.device,
    status: Status,
    seed: int,
    exchange: GatherObjects,
    summed: str | None,
    shared_build: SharedBuild | None = None,
) -> Assembly:
    """Build the layers that `schedule` places on `rank`. Ranks that share a process pass the same `shared_build`.

    Args:
        status: status of this rank.
        seed: of the first weights, the same on every rank.
        exchange: this rank's value -> those of all ranks of the pipeline, in rank order.
        summed: the processes over which every gradient is summed, in words ("data-parallel replicas"); None: it is not.

    Raises:
        ConfigError: unknown names, layers that do not fit the stages, gradients that cannot be summed.
        DistributedError: another rank could not build its layers.
    """
    names = [layer_name(layer, at) for at, layer in enumerate(layers)]
    _check_names(names, options.recompute)
    ranges = split_layers(len(layers), schedule.positions, sizes)
    build = shared_build or SharedBuild(SharedParameters(layers, names), schedule, summed)
    communications = CommStream(device, options.trace, status)
    copies_on = None if shared_build is not None else _replicated_over(schedule, tied, summed)
    of_other_ranks: dict[Tensor, str] = {}  # known once this rank has built its layers

    def stage(number: int) -> Stage:
        which = ranges[schedule.position_of[number]]
        built = build.on_rank(which)
        modules = build_stage(layers, which, device, built, options.recompute, seed, build.shared.add_layer)
        build.built.update(built)
        return Stage(
            number,
            modules,
            options.deallocate,
            build.grad_context,
            schedule.splits_backward or summed is not None or products.uses_onednn(),
            communications,
            ForeignLeaves(of_other_ranks, copies_on),
        )

    stages, failure = _build_stages(stage, schedule.stages_of[rank], copies_on)
    modules = {n: m for s in stages.values() for n, m in zip(s.layers.names, s.modules, strict=True)}
    owners = holders_of(names, ranges, schedule)
    declared = make_ties(tied, owners)
    facts = exchange(_facts(stages, modules, declared, build, failure))
    if failure is not None:
        raise failure
    _refuse(facts)
    shared = [fact["shared"] for fact in facts]
    if shared_build is None:
        of_other_ranks.update(build.shared.elsewhere(shared, modules))
    ties = make_ties(merged([*(tie.names for tie in declared), *shared_groups(shared)]), owners)
    replicated = {layer: holders for layer, holders in owners.items() if len(holders) > 1}
    _check_sparse([name for fact in facts for name in fact["sparse"]], ties, replicated, summed)
    across = _share_tied((*ties, *replica_ties(modules, owners, ties)), modules, facts)
    parameters = unique_parameters(modules)
    elsewhere = {weight for tie, weight in across.items() if tie.holders[0] != rank}
    return Assembly(
        rank=rank,
        stages=stages,
        communications=communications,
        segmented=frozenset(s for fact in facts for s in fact["segmented"]),
        modules=modules,
        parameters=parameters,
        ties=across,
        replicated_layers=replicated,
        copies=frozenset(name for name, parameter in parameters.items() if parameter in elsewhere),
        first_names={name: tie.names[0] for tie in ties for name in tie.names[1:]},
        held=_held(parameters, modules, stages, across),
        grad_context=build.grad_context,
    )


def _build_stages(
    build: Callable[[int], Stage], numbers: Sequence[int], copies_on: str | None
) -> tuple[dict[int, Stage], Exception | None]:
    """Return the stages built, and the error of the first one that failed: the other ranks must not wait for this one."""
    stages: dict[int, Stage] = {}
    try:
        for number in numbers:
            stages[number] = build(number)
            _refuse_renorming(stages[number].layers.names, stages[number].modules, copies_on)
    except Exception as error:
        return stages, error
    return stages, None


def _replicated_over(schedule: Schedule, tied: Sequence[Sequence[str]], summed: str | None) -> str | None:
    """Return in words which processes hold copies of parameters that must stay equal."""
    over = "replicas of two routes" if len(schedule.routes) > 1 else "ranks of tied weights" if tied else None
    return summed if summed is not None and "main gradients" not in summed else over


def _refuse_renorming(names: Sequence[str], modules: Sequence[nn.Module], replicated: str | None) -> None:
    """Raise ConfigError for embeddings that rescale the rows they use (`max_norm`) if copies of them use other rows."""
    for layer, module in zip(names, modules, strict=True) if replicated else ():
        for path, part in module.named_modules():
            if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.max_norm is not None:
                name = f"{layer}.{path}.weight" if path else f"{layer}.weight"
                raise ConfigError(
                    f"{name!r} has max_norm={part.max_norm:g}, which changes the rows that a forward uses, and the copies on the "
                    f"{replicated} use other rows: build the embedding without max_norm"
                )


def _check_names(names: Sequence[str], recompute: Literal["none", "full"] | frozenset[str]) -> None:
    """Raise ConfigError for layer names that cannot be printed or appear twice, and for unknown names in `recompute`."""
    for name in names:
        if not name.isprintable():
            raise ConfigError(
                f"a layer cannot be called {name[:200]!a}: names are printed, and this one is not printable"
            )
    if len(set(names)) != len(names):
        raise ConfigError(f"two layers are called {next(n for n in names if names.count(n) > 1)!r}; names must differ")
    _check_recompute(recompute, names)


def holders_of(names: Sequence[str], ranges: Sequence[range], schedule: Schedule) -> dict[str, tuple[int, ...]]:
    """Return layer name -> the ranks that hold it, ranks of the first route first."""
    owners: dict[str, tuple[int, ...]] = {}
    for route in schedule.routes:
        for stage in route:
            place = schedule.placement[stage]
            for layer in ranges[schedule.position_of[stage]]:
                known = owners.get(names[layer], ())
                owners[names[layer]] = known if place in known else (*known, place)
    return owners


def _facts(
    stages: Mapping[int, Stage],
    modules: Mapping[str, nn.Module],
    ties: Sequence[Tie],
    build: SharedBuild,
    failure: Exception | None,
) -> dict[str, Any]:
    """Return the facts about this rank's layers that are sent to the others, as JSON values."""
    return {
        "failure": None if failure is None else f"{type(failure).__name__}: {failure}",
        "problems": [*unknown_names(ties, modules), *_not_strided(modules)],
        "sparse": _sparse(modules),
        "layers": list(modules),
        "frozen": frozen_names(modules),
        "shared": build.shared.facts(),
        "segmented": [s for s, stage in stages.items() if stage.segmented],
    }


def _share_tied(
    ties: Sequence[Tie], modules: Mapping[str, nn.Module], facts: Sequence[Mapping[str, Any]]
) -> dict[Tie, nn.Parameter]:
    """Make each tied weight of this rank one parameter; return those that are also held on another rank."""
    frozen = {name for fact in facts for name in fact["frozen"]}
    reported = dict.fromkeys(
        layer for fact in facts for layer in fact["layers"]
    )  # only some of them, if ranks share a process
    across: dict[Tie, nn.Parameter] = {}
    for tie in ties:
        weight = share(tie, modules)
        if weight is not None and len(tie.names) > 1 and layer_of(tie.names[0], reported) is not None:
            weight.requires_grad_(
                tie.names[0] not in frozen
            )  # one weight: the value under its first name applies on every rank
        if weight is not None and len(tie.holders) > 1:
            across[tie] = weight
    return across


def _check_recompute(recompute: Literal["none", "full"] | frozenset[str], names: Sequence[str]) -> None:
    for name in sorted(recompute) if isinstance(recompute, frozenset) else ():
        if name not in names:
            raise ConfigError(f"recompute: no layer is called {name!r}{did_you_mean(name, names)}")


def _refuse(facts: Sequence[Mapping[str, Any]]) -> None:
    """Raise, on every rank, the problems that any rank found while it built its layers."""
    for other, rank_facts in enumerate(facts):
        if rank_facts["failure"] is not None:
            raise DistributedError(f"rank {other} of the pipeline could not build its layers: {rank_facts['failure']}")
    problems = dict.fromkeys(problem for rank_facts in facts for problem in rank_facts["problems"])
    if problems:
        raise ConfigError(list(problems))


def _not_strided(modules: Mapping[str, nn.Module]) -> list[str]:
    """Return a sentence for each parameter here that is sparse or nested, or a wrapper of other tensors that trains."""
    return [
        f"{layer}.{name} is a {layout_name(parameter)} parameter, and Pipeloom reduces and saves strided ones: make it from "
        "a strided parameter in the forward, or register it as a buffer if it does not train"
        for layer, module in modules.items()
        for name, parameter in module.named_parameters()
        if not is_strided(parameter) or (parameter.requires_grad and memory_of(parameter) is None)
    ]


def _sparse(modules: Mapping[str, nn.Module]) -> list[str]:
    """Return the names of the weights here with sparse gradients."""
    return [
        f"{layer}.{path}.weight" if path else f"{layer}.weight"
        for layer, module in modules.items()
        for path, part in module.named_modules()
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse and part.weight.requires_grad
    ]


def _check_sparse(
    sparse: Sequence[str], ties: Sequence[Tie], replicated: Mapping[str, Any], summed: str | None
) -> None:
    """Raise ConfigError for sparse gradients that would have to be summed over processes."""
    for name in sparse:
        tied = any(name in tie.names and len(tie.holders) > 1 for tie in ties)
        over = summed or ("the ranks of tied weights" if tied else "")
        over = over or ("the replicas of two routes" if layer_of(name, replicated) else "")
        if over:
            raise ConfigError(
                f"{name!r} has sparse gradients, which are not summed over {over}: build the embedding with sparse=False"
            )


def _held(
    parameters: Mapping[str, nn.Parameter],
    modules: Mapping[str, nn.Module],
    stages: Mapping[int, Stage],
    across: Mapping[Tie, nn.Parameter],
) -> tuple[BucketParameter, ...]:
    """Return the properties of each parameter that its reduction needs. The gradient of one that other pipeline ranks hold
    too is first summed over them.
    """
    layouts: dict[nn.Parameter, ParameterSharding] = {}
    for module in modules.values():
        inner = shardings_of(module)
        for name, parameter in module.named_parameters():
            layouts.setdefault(parameter, inner[name])
    adders: dict[nn.Parameter, list[int]] = {}
    for index, stage in sorted(stages.items()):
        for module in stage.modules:
            for parameter in module.parameters():
                adders.setdefault(parameter, []).append(index)
    for parameter in across.values():
        adders[parameter] = [AFTER_TIES]
    return tuple(
        BucketParameter(name, p, tuple(dict.fromkeys(adders[p])), layouts[p]) for name, p in parameters.items()
    )


def unique_parameters(modules: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
    """Return global name -> parameter; a shared one appears once, under its first name."""
    seen: set[int] = set()
    parameters: dict[str, nn.Parameter] = {}
    for name, module in modules.items():
        for inner, parameter in module.named_parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                parameters[f"{name}.{inner}"] = parameter
    return parameters


def copy_state(into: Mapping[str, Tensor], state: Mapping[str, Tensor], optional: Container[str] = ()) -> None:
    """Copy values by global name into parameters and buffers: all of them, or none if it raises.

    Args:
        optional: names that may be missing in the state.

    Raises UsageError for a name that is missing, a value of another shape, and a complex value for a real one.
    """
    for name, value in into.items():
        if name not in state:
            if name in optional:
                continue
            raise UsageError(f"the state holds no {name!r}")
        given = state[name]
        if not isinstance(given, Tensor):
            raise UsageError(f"the state holds a {type(given).__name__} for {name!r}, which is a tensor")
        if given.shape != value.shape:
            raise UsageError(
                f"the state's {name!r} has shape {list(given.shape)}, and the pipeline's {list(value.shape)}"
            )
        if given.is_complex() and not value.is_complex():
            raise UsageError(f"the state's {name!r} is complex, and the pipeline's is not")
    with torch.no_grad():
        for name, value in into.items():
            if name in state:
                value.copy_(state[name])
