"""Assembly: building the stages of a process, with their parameters under global names and their tied weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pipeloom.errors import ConfigError, DistributedError, UsageError, did_you_mean
from pipeloom.limits import require_types
from pipeloom.ops import products
from pipeloom.ops.deferred import StageBackward, WeightGradContext
from pipeloom.ops.main_gradient import MainGradients
from pipeloom.parallel.buckets import BucketParameter
from pipeloom.parallel.data import AFTER_TIES
from pipeloom.parallel.sharding import ParameterSharding, shardings_of
from pipeloom.runtime.batch import Weight
from pipeloom.runtime.loss import Loss, require_weighing
from pipeloom.runtime.options import RuntimeOptions
from pipeloom.runtime.overlap import CommStream
from pipeloom.runtime.stage import Stage
from pipeloom.runtime.stage_modules import (
    KnownKeywords,
    LayerNames,
    LayerSource,
    StageModules,
    build_stage,
    carrying,
    layer_cost,
    layer_name,
    names_in_model,
    require_arguments,
    split_layers,
)
from pipeloom.runtime.tensor_spec import is_strided, layout_name, memory_of
from pipeloom.runtime.tied_weights import (
    SharedParameters,
    Tie,
    make_ties,
    merged,
    replica_ties,
    share,
    shared_groups,
    unknown_names,
    values_by_name,
)
from pipeloom.schedule.check import check
from pipeloom.schedule.model import Schedule
from pipeloom.schedule.transforms import recompute_stages

IN_MAIN_GRADIENTS = "micro-batches in main gradients"

GatherObjects = Callable[[Any], list[Any]]


@dataclass(frozen=True)
class Assembly:
    """The layers, parameters and tied weights of the ranks of one process.

    Attributes:
        stages: stage number -> stage.
        segmented: numbers of the pipeline's stages with segments, on all ranks.
        modules: layer name -> module, in order of the stages.
        parameters: global name -> parameter; one that is tied within the rank appears once.
        ties: tie with a holder on another rank -> the copy here.
        replicated_layers: layer that several ranks of the pipeline hold -> those ranks.
        copies: names of parameters here whose first holder is another rank.
        first_names: further name of a shared weight -> its first name.
        held: the parameters with their layout and stages, for the reduction of gradients.
        grad_context: where the linear layers here find the queue for their weight gradients.
        keywords: the keyword arguments that layers of any rank take.
    """

    stages: dict[int, Stage]
    segmented: frozenset[int]
    modules: dict[str, nn.Module]
    parameters: dict[str, nn.Parameter]
    ties: dict[Tie, nn.Parameter]
    replicated_layers: dict[str, tuple[int, ...]]
    copies: frozenset[str]
    first_names: Mapping[str, str]
    held: tuple[BucketParameter, ...]
    grad_context: WeightGradContext
    keywords: KnownKeywords

    @property
    def buffers(self) -> dict[str, Tensor]:
        """Return global name -> buffer at present: a forward may replace one."""
        return {f"{name}.{inner}": b for name, module in self.modules.items() for inner, b in module.named_buffers()}

    @property
    def transient_buffers(self) -> frozenset[str]:
        """Return the names of buffers that a module's own `state_dict` omits (`persistent=False`)."""
        # torch has no public name for this set, and `state_dict` would call hooks and copy.
        return frozenset(
            f"{name}.{path}.{inner}" if path else f"{name}.{inner}"
            for name, module in self.modules.items()
            for path, part in module.named_modules()
            for inner in part._non_persistent_buffers_set
        )


@dataclass
class PipelineSpec:
    """The arguments of a pipeline, checked as far as one process can. Errors as of `Pipeline`.

    Attributes:
        layers, loss, weight, ignore_index, stages, tied, options: as of `Pipeline`.
        schedule: with messages for the tensors that the layers pass by name; checked, unless `check_first` is False.
        names: of the layers.
        ranges: stage position -> its layers.
        terms: keys of the losses that layers declare.
    """

    layers: Sequence[LayerSource]
    schedule: Schedule
    loss: Loss
    weight: Weight | None
    ignore_index: int | None
    stages: Sequence[int] | None
    tied: Sequence[Sequence[str]]
    options: RuntimeOptions
    check_first: InitVar[bool] = True

    def __post_init__(self, check_first: bool) -> None:
        require_arguments(self.layers, self.schedule, self.loss)
        require_types(
            PipelineSpec, {name: getattr(self, name) for name in ("weight", "ignore_index", "tied", "options")}
        )
        require_weighing(self.loss, self.weight, self.ignore_index)
        self.names = [layer_name(layer, at) for at, layer in enumerate(self.layers)]
        _check_names(self.names, self.options.recompute)
        shares = len(self.schedule.vocabulary)  # of the last layers, one on each rank
        spread = sum(getattr(layer, "spread", False) for layer in self.layers)
        last = len(self.layers) - (max(spread, 1) if shares else 0)
        costs = [layer_cost(layer) for layer in self.layers[:last]]
        if wrong := [name for name, cost in zip(self.names, costs, strict=False) if not 0 <= cost < math.inf]:
            raise ConfigError(f"layer {wrong[0]!r}: its cost must be a finite number of at least 0")
        self.ranges = split_layers(last, self.schedule.positions, self.stages, costs)
        self.ranges += [range(last, len(self.layers))] * shares
        declared = [LayerNames.of(layer, name) for layer, name in zip(self.layers, self.names, strict=True)]
        positions = [position for position, which in enumerate(self.ranges) for _ in which]
        tensors, self.terms = names_in_model(declared, positions)
        heads = tuple(f"{self.names[layer]}." for layer in self.ranges[-1]) if shares else ()
        separate = [names for names in self.tied if not any(name.startswith(heads) for name in names)]
        if len(separate) < len(self.tied) and (len(heads) > 1 or not self.schedule._spreads_embedding):
            raise ConfigError(
                "an output layer over the pipeline is tied to the embedding: tokens are looked up in its share, so the model has "
                "one share with embeds=True, and the schedule has been through the transform embedding"
            )
        self.tied = separate
        self.schedule = self.recomputing(carrying(self.schedule, tensors))
        if check_first:
            check(self.schedule)

    def recomputing(self, schedule: Schedule) -> Schedule:
        """Return `schedule` with blocks for the stages that have layers to recompute."""
        which = self.options.recompute
        names = which if isinstance(which, frozenset) else self.names if which == "full" else ()
        positions = {at for at, each in enumerate(self.ranges) if any(self.names[layer] in names for layer in each)}
        return recompute_stages(
            schedule, [s for s, position in enumerate(schedule.position_of) if position in positions]
        )

    @property
    def seed(self) -> int:
        """The seed of the first weights: the option, else that of torch's generator here."""
        return torch.initial_seed() if self.options.seed is None else self.options.seed

    def holders(self) -> dict[str, tuple[int, ...]]:
        """Return layer name -> the ranks that hold it, ranks of the first route first; () where each rank has a share of it."""
        shares = self.ranges[-1] if self.schedule.vocabulary else ()
        owners: dict[str, tuple[int, ...]] = {self.names[layer]: () for layer in shares}
        for route in self.schedule.routes:
            for stage in route:
                place = self.schedule.placement[stage]
                for layer in self.ranges[self.schedule.position_of[stage]]:
                    known = owners.get(self.names[layer], ())
                    owners[self.names[layer]] = known if place in known else (*known, place)
        return owners


def assemble(
    spec: PipelineSpec,
    communications: Mapping[int, CommStream],
    *,
    device: torch.device,
    seed: int,
    exchange: GatherObjects,
    summed: str | None = None,
    separate_replicas: bool = False,
) -> Assembly:
    """Build the layers that the schedule places on the ranks of this process: one, or all of them.

    Args:
        communications: rank -> stream of the communications inside its stages, for each rank of this process.
        seed: of the first weights, the same on every rank.
        exchange: this process's value -> those of all processes of the pipeline, in rank order.
        summed: the processes over which every gradient is summed, in words ("data-parallel replicas"); None: it is not.
        separate_replicas: whether replicas of a layer in this process share its parameters only, and not its buffers.

    Raises:
        ConfigError: unknown names, layers that do not fit the stages, gradients that cannot be summed.
        DistributedError: another rank could not build its layers.
    """
    schedule, options = spec.schedule, spec.options
    owners, shared = spec.holders(), SharedParameters(spec.layers, spec.names)
    numbers = {number: rank for rank in communications for number in schedule.stages_of[rank]}
    built, failure = _build_layers(spec, numbers, shared, device, seed)
    modules = {name: module for each in built.values() for name, module in zip(each.names, each.modules, strict=True)}
    declared = make_ties(spec.tied, owners)
    facts = exchange(
        {
            "failure": None if failure is None else f"{type(failure).__name__}: {failure}",
            "problems": [*unknown_names(declared, modules), *_unusable(modules, declared, owners, summed)],
            "frozen": [name for name, each in values_by_name(modules).items() if not each.requires_grad],
            "shared": shared.keys(min(communications)),
            "segmented": [number for number, each in built.items() if each.segmented],
            "keywords": [None if k is None else sorted(k) for each in built.values() for k in each.keywords],
            "names": _nested_names(modules, owners),
        }
    )
    if failure is not None:
        raise failure
    _refuse(facts)
    if len(communications) > 1:  # all ranks are here
        shared.require_tied(spec.tied, owners)
    keys = [fact["shared"] for fact in facts]
    ties = make_ties(merged([*(tie.names for tie in declared), *shared_groups(keys)]), owners)
    replicated = {layer: holders for layer, holders in owners.items() if len(holders) > 1}
    weights = _share_tied((*ties, *replica_ties(modules, owners, ties)), modules, facts)
    across = {tie: weight for tie, weight in weights.items() if not communications.keys() >= {*tie.holders}}
    if separate_replicas:
        built = _with_separate_replicas(built)
    # The context and the main gradients of linear layers, whose weight gradients autograd does not compute.
    main = MainGradients() if summed is not None else None
    grad_context = WeightGradContext(StageBackward(), main=main, in_place=schedule.splits_backward)
    foreign = shared.elsewhere(keys, modules)
    stages = {
        number: Stage(
            number,
            layers,
            options.deallocate,
            grad_context,
            schedule.splits_backward or summed is not None or products.uses_onednn(),
            communications[numbers[number]],
            foreign,
        )
        for number, layers in built.items()
    }
    parameters = unique_parameters(modules)
    elsewhere = {weight for tie, weight in across.items() if tie.holders[0] not in communications}
    return Assembly(
        stages=stages,
        segmented=frozenset(s for fact in facts for s in fact["segmented"]),
        modules=modules,
        parameters=parameters,
        ties=across,
        replicated_layers=replicated,
        copies=frozenset(name for name, parameter in parameters.items() if parameter in elsewhere),
        first_names={name: tie.names[0] for tie in ties for name in tie.names[1:]},
        held=_held(parameters, modules, stages, {*across.values()}),
        grad_context=grad_context,
        keywords=KnownKeywords.of([names for fact in facts for names in fact["keywords"]]),
    )


def _build_layers(
    spec: PipelineSpec,
    numbers: Iterable[int],
    shared: SharedParameters,
    device: torch.device,
    seed: int,
) -> tuple[dict[int, StageModules], Exception | None]:
    """Return stage -> its layers, and the error of the first stage that failed: the other ranks must not wait for this one.

    Stages of this process that are replicas have the same modules.
    """
    built: dict[int, nn.Module] = {}
    stages: dict[int, StageModules] = {}
    try:
        for number in numbers:
            which = spec.ranges[spec.schedule.position_of[number]]
            stages[number] = build_stage(
                spec.layers, which, device, built, spec.options.recompute, seed, shared.add_layer
            )
    except Exception as error:
        return stages, error
    return stages, None


def _with_separate_replicas(stages: Mapping[int, StageModules]) -> dict[int, StageModules]:
    """Return the stages, each replica of a layer after the first a copy with the same parameters."""
    names: set[str] = set()
    separate = {}
    for number, layers in stages.items():
        modules = [
            copy.deepcopy(module, {id(parameter): parameter for parameter in module.parameters()})
            if name in names
            else module
            for name, module in zip(layers.names, layers.modules, strict=True)
        ]
        names.update(layers.names)
        separate[number] = replace(layers, modules=tuple(modules))
    return separate


def _check_names(names: Sequence[str], recompute: Literal["none", "full"] | frozenset[str]) -> None:
    """Raise ConfigError for layer names that appear twice, and for unknown names in `recompute`."""
    if len(set(names)) != len(names):
        raise ConfigError(f"two layers are called {next(n for n in names if names.count(n) > 1)!r}; names must differ")
    for name in sorted(recompute) if isinstance(recompute, frozenset) else ():
        if name not in names:
            raise ConfigError(f"recompute: no layer is called {name!r}{did_you_mean(name, names)}")


def _share_tied(
    ties: Sequence[Tie], modules: Mapping[str, nn.Module], facts: Sequence[Mapping[str, Any]]
) -> dict[Tie, nn.Parameter]:
    """Make each weight that is tied here one parameter; return all of them."""
    frozen = {name for fact in facts for name in fact["frozen"]}
    weights: dict[Tie, nn.Parameter] = {}
    for tie in ties:
        weight = share(tie, modules)
        if weight is None:
            continue
        if len(tie.names) > 1:
            weight.requires_grad_(tie.names[0] not in frozen)  # the first name decides, on every rank
        weights[tie] = weight
    return weights


def _refuse(facts: Sequence[Mapping[str, Any]]) -> None:
    """Raise, on every rank, the problems that any rank found while it built its layers."""
    for other, rank_facts in enumerate(facts):
        if rank_facts["failure"] is not None:
            raise DistributedError(f"rank {other} of the pipeline could not build its layers: {rank_facts['failure']}")
    problems = dict.fromkeys(problem for rank_facts in facts for problem in rank_facts["problems"])
    layers: dict[str, str] = {}
    for layer, name in [pair for rank_facts in facts for pair in rank_facts["names"]]:
        if (first := layers.setdefault(name, layer)) != layer:
            problems[f"{name} is in layer {first!r} and in layer {layer!r}: give one of them another name"] = None
    if problems:
        raise ConfigError(list(problems))


def _nested_names(modules: Mapping[str, nn.Module], owners: Collection[str]) -> list[tuple[str, str]]:
    """Return (layer, global name) of the parameters and buffers here of layers whose name begins that of another, or with one."""
    dots = [(name, name[:at]) for name in owners for at, letter in enumerate(name) if letter == "."]
    nested = {name for pair in dots if pair[1] in owners for name in pair}
    return [
        (layer, f"{layer}.{name}")
        for layer, module in modules.items()
        if layer in nested
        for name, _ in (*module.named_parameters(), *module.named_buffers())
    ]


def _unusable(
    modules: Mapping[str, nn.Module],
    ties: Sequence[Tie],
    owners: Mapping[str, tuple[int, ...]],
    summed: str | None,
) -> Iterator[str]:
    """Yield a sentence for each parameter or buffer here that a pipeline cannot train, sum or save."""
    for layer, module in modules.items():
        for name, value in (*module.named_parameters(), *module.named_buffers()):
            if is_lazy(value):
                yield (
                    f"layer {layer!r} has a lazy module: {name!r} has no shape yet; build it with its sizes, or call the layer "
                    "once on an example first"
                )
            elif isinstance(value, nn.Parameter) and not (
                # A frozen wrapper (a quantized weight) needs no memory of its own.
                is_strided(value) and (not value.requires_grad or memory_of(value) is not None)
            ):
                yield (
                    f"{layer}.{name} is a {layout_name(value)} parameter, and Pipeloom reduces and saves strided ones: make it "
                    "from a strided parameter in the forward, or register it as a buffer if it does not train"
                )
        for path, part in module.named_modules():
            if not isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
                continue
            name = f"{layer}.{path}.weight" if path else f"{layer}.weight"
            tied = any(name in tie.names and len(tie.holders) > 1 for tie in ties)
            copies = (
                "the ranks of tied weights" if tied else "replicas of two routes" if len(owners[layer]) > 1 else None
            )
            over = summed or copies
            if over and part.sparse and part.weight.requires_grad:
                yield f"{name!r} has sparse gradients, which are not summed over {over}: build the embedding with sparse=False"
            over = copies if summed == IN_MAIN_GRADIENTS else over
            if over and part.max_norm is not None:
                yield (
                    f"{name!r} has max_norm={part.max_norm:g}, which changes the rows that a forward uses, and the copies on "
                    f"{over} use other rows: build the embedding without max_norm"
                )


def _held(
    parameters: Mapping[str, nn.Parameter],
    modules: Mapping[str, nn.Module],
    stages: Mapping[int, Stage],
    shared: Collection[nn.Parameter],
) -> tuple[BucketParameter, ...]:
    """Return the properties of each parameter that its reduction needs. The gradient of one that is `shared` with other ranks of
    the pipeline is first summed over them.
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
    for parameter in shared:
        adders[parameter] = [AFTER_TIES]
    return tuple(
        BucketParameter(name, p, tuple(dict.fromkeys(adders[p])), layouts[p]) for name, p in parameters.items()
    )


class BuiltParameters:
    """The parameters that a pipeline was built with: what is summed over replicas, counted in norms and released."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._layers = modules
        self._known = unique_parameters(modules)
        self._built = [(each.dtype, each.requires_grad) for each in self._known.values()]

    def require_same(self, first: bool, summed: bool) -> None:
        """Raise UsageError for a parameter that was converted or unfrozen since, if gradients are `summed` over processes, and,
        before the first step, for one that was added, replaced or removed.
        """
        now = unique_parameters(self._layers) if first else self._known
        changed = [name for name in {**self._known, **now} if self._known.get(name) is not now.get(name)]
        for (name, each), (dtype, trained) in zip(self._known.items(), self._built, strict=True) if summed else ():
            if each.dtype != dtype or each.requires_grad > trained:
                changed.append(name)
        if changed:
            raise UsageError(
                f"parameter {changed[0]!r} was added, replaced, removed, converted or unfrozen since the pipeline was built: do "
                "that before, or build the pipeline again"
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

    Raises UsageError for a name that is missing, a value of another shape or layout, and a complex value for a real one.
    """
    for name, value in into.items():
        given = state.get(name)
        if given is None:
            if name in optional:
                continue
            raise UsageError(f"the state holds no {name!r}")
        if not isinstance(given, Tensor) or given.is_meta or given.layout != value.layout:
            raise UsageError(f"the state's {name!r} is no {value.layout} tensor with values, as the pipeline's is")
        if given.shape != value.shape or given.is_complex() > value.is_complex():
            kinds = [f"{str(each.dtype).removeprefix('torch.')}{list(each.shape)}" for each in (given, value)]
            raise UsageError(f"the state's {name!r} is {kinds[0]}, and the pipeline's {kinds[1]}")
    with torch.no_grad():
        for name, value in into.items():
            if name in state:
                value.copy_(state[name])
