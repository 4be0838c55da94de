"""Division of layers into stages: the layers of a stage, their construction, and the global names of their parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pipeloom.errors import ConfigError, UsageError, did_you_mean
from pipeloom.ops.layer import KEYWORD
from pipeloom.ops.layer import Layer as Layer
from pipeloom.ops.layer import LossTerm as LossTerm
from pipeloom.ops.random_state import seeded, stable_seed
from pipeloom.runtime.layer_names import LayerNames, ModelNames
from pipeloom.schedule.model import Schedule

LayerSource = Callable[[], nn.Module] | nn.Module


@dataclass(frozen=True)
class StageModules:
    """The layers of one stage, built.

    Attributes:
        modules: the layers, in order.
        names: global names of the layers.
        keywords: for each, the keyword arguments of a step that its forward takes (None: any).
        declared: for each, its named tensors and its losses.
        recomputed: names of the layers whose forward runs again in the backward.
    """

    modules: tuple[nn.Module, ...]
    names: tuple[str, ...]
    keywords: tuple[frozenset[str] | None, ...]
    declared: tuple[LayerNames, ...]
    recomputed: frozenset[str] = frozenset()

    def accepted(self, at: int, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the `arguments` that layer `at` takes; the micro-batch's context only if the layer names it."""
        known = self.keywords[at]
        if known is not None and not known:
            return {}
        return {key: value for key, value in arguments.items() if (key != KEYWORD if known is None else key in known)}

    def read(self, at: int, tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        """Return the `tensors` that layer `at` reads, by keyword of its forward."""
        return {keyword: tensors[name] for keyword, name in self.declared[at].reads.items()}


@dataclass(frozen=True)
class KnownKeywords:
    """The keyword arguments that the layers of a whole model take, on all ranks.

    Attributes:
        names: arguments that a forward names, except for the first, which is the layer's input.
        others: whether a layer takes any name (`**keywords`).
    """

    names: frozenset[str]
    others: bool

    @classmethod
    def of(cls, stages: Iterable[StageModules]) -> KnownKeywords:
        """Return the keywords of these stages' layers, without named tensors of other layers."""
        accepted = [keywords for stage in stages for keywords in stage.keywords]
        names = frozenset().union(*(each for each in accepted if each is not None))
        return cls(names, any(each is None for each in accepted))

    @classmethod
    def union(cls, parts: Iterable[KnownKeywords]) -> KnownKeywords:
        every = tuple(parts)
        return cls(frozenset().union(*(part.names for part in every)), any(part.others for part in every))

    def require(self, method: str, given: Iterable[str]) -> None:
        """Raise UsageError, with the nearest names, for a keyword argument of `method` that no layer takes."""
        for name in given:
            if name == KEYWORD:
                raise UsageError(
                    f"{method} takes no keyword argument {name!r}: each layer that names it gets its MicrobatchContext "
                    "from the pipeline"
                )
            if not self.others and name not in self.names:
                known = (self.names - {KEYWORD}) | {"inputs"} | (set() if method == "predict" else {"targets"})
                raise UsageError(
                    f"{method} got the keyword argument {name!r}, which no layer takes{did_you_mean(name, known)}"
                )


def require_arguments(layers: object, schedule: object, loss: object) -> None:
    """Raise UsageError for arguments of a pipeline that are not layers, a schedule and a loss."""
    if isinstance(schedule, str):
        raise UsageError(
            f"schedule is {schedule!r}, a name; make the schedule of it, such as "
            f"pipeloom.schedules.build({schedule!r}, ranks=4, microbatches=8)"
        )
    if not isinstance(schedule, Schedule):
        raise UsageError(f"schedule is of type {type(schedule).__name__}; give a pipeloom.Schedule")
    if isinstance(layers, str) or not isinstance(layers, (Sequence, nn.Sequential, nn.ModuleList)):
        raise UsageError(
            f"layers is of type {type(layers).__name__}; give a list of the model's layers in order: modules, or "
            "factories such as Layer(name, build)"
        )
    for index, layer in enumerate(layers):
        if not callable(layer):
            raise UsageError(
                f"layer {index} is of type {type(layer).__name__}; give a module, or a function that makes one"
            )
        if isinstance(layer, nn.Module):
            _refuse_lazy(layer_name(layer, index), layer)
    if not callable(loss):
        raise UsageError(f"loss is of type {type(loss).__name__}; give a function loss(output, targets)")


def split_layers(count: int, positions: int, stages: Sequence[int] | None) -> list[range]:
    """Return position -> its layers; `stages`: number of layers of each; None: as even as possible, larger ones first.

    Raises ConfigError if the numbers do not add up, or if a stage would be empty that `stages` does not make empty.
    """
    if stages is None:
        if count < positions:
            raise ConfigError(f"{count} layers cannot fill {positions} stages; use at most {count} stages")
        base, larger = divmod(count, positions)
        sizes = [base + (at < larger) for at in range(positions)]
    else:
        sizes = list(stages)
        if len(sizes) != positions:
            raise ConfigError(f"stages gives {len(sizes)} stages, and the schedule has {positions}")
        if min(sizes) < 0:
            raise ConfigError(f"stages {sizes} has the negative size {min(sizes)}; a stage holds 0 layers or more")
        if sum(sizes) != count:
            raise ConfigError(f"stages {sizes} hold {sum(sizes)} layers, and the model has {count}")
    starts = accumulate(sizes[:-1], initial=0)
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def model_names(layers: Sequence[LayerSource], positions: int, stages: Sequence[int] | None) -> ModelNames:
    """Return the layers' declarations by name, with stages divided as in `split_layers`. Raises ConfigError for declarations
    that do not fit.
    """
    declared = [LayerNames.of(layer, layer_name(layer, at)) for at, layer in enumerate(layers)]
    if all(each.silent for each in declared):
        return ModelNames((), ())
    ranges = split_layers(len(layers), positions, stages)
    return ModelNames.of(declared, [position for position, which in enumerate(ranges) for _ in which])


def build_stage(
    layers: Sequence[LayerSource],
    which: range,
    device: torch.device,
    built: dict[int, nn.Module],
    recompute: Literal["none", "full"] | frozenset[str],
    seed: int,
    learn: Callable[[str, nn.Module], None],
) -> StageModules:
    """Build the layers `which` on `device`, unless they are in `built`; materialize and reset modules on the meta device.

    Each is built with random state derived from `seed` and its name alone, so that no layout changes its first weights.

    Args:
        learn: called with each layer's name and module before its parameters are moved to `device`.
    """
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]  # so that its generators are seeded and restored too
    modules, names, keywords, declared = [], [], [], []
    for index in which:
        source = layers[index]
        name = layer_name(source, index)
        if index not in built:
            with seeded(stable_seed("first weights", seed, name)):
                meta = _is_meta(source)
                module = source if meta else _build(source, index)
                assert isinstance(module, nn.Module)
                learn(name, module)
                built[index] = _materialize(module, device) if meta else module.to(device)
            _refuse_lazy(name, built[index])
        modules.append(built[index])
        names.append(name)
        declared.append(LayerNames.of(source, name))
        accepted = keywords_of(modules[-1])
        declared[-1].require_keywords(accepted)
        keywords.append(None if accepted is None else accepted - declared[-1].reads.keys())
    recomputed = recompute if isinstance(recompute, frozenset) else names if recompute == "full" else ()
    return StageModules(tuple(modules), tuple(names), tuple(keywords), tuple(declared), frozenset(recomputed))


def layer_name(source: LayerSource, index: int) -> str:
    """Return the layer's global name: its own, or its index."""
    return str(getattr(source, "name", index))


def _build(source: LayerSource, index: int) -> nn.Module:
    module = source if isinstance(source, nn.Module) else source()
    if not isinstance(module, nn.Module):
        raise UsageError(f"layer {index} built {type(module).__name__}, not an nn.Module")
    return module


def _is_meta(source: LayerSource) -> bool:
    return isinstance(source, nn.Module) and any(p.is_meta for p in (*source.parameters(), *source.buffers()))


def _materialize(source: LayerSource, device: torch.device) -> nn.Module:
    assert isinstance(source, nn.Module)
    module = source.to_empty(device=device)
    for part in module.modules():
        reset = getattr(part, "reset_parameters", None)
        if callable(reset):
            reset()
        elif any(True for _ in part.parameters(recurse=False)):
            raise UsageError(
                f"{type(part).__name__} on the meta device has no reset_parameters(): give a factory instead"
            )
    return module


def _refuse_lazy(name: str, module: nn.Module) -> None:
    """Raise ConfigError for parameters or buffers without a shape."""
    for inner, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise ConfigError(
                f"layer {name!r} has a lazy module: {inner!r} has no shape yet; build it with its sizes, or call the layer "
                "once on an example first"
            )


def keywords_of(module: nn.Module) -> frozenset[str] | None:
    """Return the arguments that `forward` takes by name, without its first, the layer's input; None: it takes any."""
    while isinstance(inner := getattr(module, "_orig_mod", None), nn.Module):
        module = inner  # of torch.compile, whose forward takes any arguments
    parameters = list(inspect.signature(module.forward).parameters.values())
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    if parameters and parameters[0].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
        del parameters[0]
    return frozenset(p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD))
