"""Layers: what they declare, their division into stages, and their construction under global names.

A layer may declare named tensors that it reads and writes past other layers, and losses of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pipeloom.errors import ConfigError, UsageError, did_you_mean
from pipeloom.limits import whole_numbers
from pipeloom.ops.layer import KEYWORD
from pipeloom.ops.layer import Layer as Layer
from pipeloom.ops.layer import LossTerm as LossTerm
from pipeloom.ops.parts import in_part as in_part
from pipeloom.ops.random_state import OfMicrobatch, seeded, set_sources, stable_seed
from pipeloom.ops.segments import is_segmented
from pipeloom.ops.slices import STATE
from pipeloom.schedule.model import NamedTensor, Schedule, require_is_schedule
from pipeloom.shapes.cut import balance, even_sizes

LayerSource = Callable[[], nn.Module] | nn.Module

_OF_RUNTIME = frozenset((KEYWORD, STATE))  # keyword arguments that no caller passes


@dataclass(frozen=True)
class LayerNames:
    """The declarations of one layer.

    Attributes:
        layer: name of the layer.
        reads: keyword argument of its forward -> name of the tensor.
        writes: key of the dict that it returns -> name of the tensor.
        losses: key of the dict -> the loss term that takes its value.
    """

    layer: str
    reads: Mapping[str, str] = field(default_factory=dict)
    writes: Mapping[str, str] = field(default_factory=dict)
    losses: Mapping[str, LossTerm] = field(default_factory=dict)

    @classmethod
    def of(cls, source: object, name: str) -> LayerNames:
        """Return the declarations of `source`, the layer called `name`; only a `Layer` has any. Raises ConfigError."""
        if not isinstance(source, Layer) or not (source.reads or source.writes or source.losses):
            return cls(name)
        reads, writes = (_by_key(name, which, getattr(source, which)) for which in ("reads", "writes"))
        _require_names(name, "losses", source.losses)
        return cls(name, reads, writes, dict(source.losses))

    @property
    def declares_nothing(self) -> bool:
        """Return whether it declares nothing."""
        return not (self.reads or self.writes or self.losses)

    def require_keywords(self, accepted: frozenset[str] | None) -> None:
        """Raise ConfigError if the layer reads into a keyword that its forward does not take (None: it takes any)."""
        for keyword in self.reads if accepted is not None else ():
            if keyword not in (accepted or ()):
                raise ConfigError(
                    f"layer {self.layer!r} reads tensor {self.reads[keyword]!r} as the keyword {keyword!r}, which its forward "
                    f"does not take{did_you_mean(keyword, accepted or ())}"
                )

    def taken_from(self, result: Any, tensors: dict[str, Tensor | None]) -> tuple[Any, dict[str, Any]]:
        """Put the tensors that the layer writes into `tensors`; return its positional outputs, and its losses' values by key.

        Raises UsageError if the layer did not return what it declares.
        """
        if not (self.writes or self.losses):
            return result, {}
        rest: Any = None
        written = result
        if isinstance(result, (tuple, list)) and result:
            *rest, written = result
        wanted = sorted({*self.writes, *self.losses})
        if not isinstance(written, Mapping) or sorted(written) != wanted:
            returned = sorted(map(str, written)) if isinstance(written, Mapping) else type(written).__name__
            raise UsageError(
                f"layer {self.layer!r} declares {wanted} in writes and losses, and returned {returned}; return them in a dict "
                f'after its output, as in "return x, {{{wanted[0]!r}: y}}"'
            )
        for key, name in self.writes.items():
            if written[key] is not None and not isinstance(written[key], Tensor):
                raise UsageError(
                    f"layer {self.layer!r} wrote {type(written[key]).__name__} as {key!r}; a name must stand for a tensor or None"
                )
            tensors[name] = written[key]
        handed = None if rest is None else rest[0] if len(rest) == 1 else tuple(rest)
        return handed, {key: written[key] for key in self.losses}


def names_in_model(
    layers: Sequence[LayerNames], position_of: Sequence[int]
) -> tuple[list[NamedTensor], tuple[str, ...]]:
    """Return the named tensors that are sent between stages, and the keys of the layers' losses in order.

    Args:
        position_of: layer -> the position of its stage.

    Raises ConfigError for a name that is read but not written before, and for two losses with one key.
    """
    writer: dict[str, int] = {}
    readers: dict[tuple[str, int], set[int]] = {}
    terms: dict[str, str] = {}
    for at, layer in enumerate(layers):
        for name in layer.reads.values():
            if name not in writer:
                raise ConfigError(_unwritten(layer.layer, name, layers[at:], writer))
            producer, here = position_of[writer[name]], position_of[at]
            if producer != here:
                readers.setdefault((name, producer), set()).add(here)
        writer |= dict.fromkeys(layer.writes.values(), at)
        for key in layer.losses:
            if key in terms:
                raise ConfigError(
                    f"layers {terms[key]!r} and {layer.layer!r} both have a loss {key!r}; name them apart"
                )
            terms[key] = layer.layer
    tensors = [NamedTensor(name, producer, tuple(sorted(at))) for (name, producer), at in readers.items()]
    return sorted(tensors), tuple(terms)


def carrying(schedule: Schedule, tensors: Sequence[NamedTensor]) -> Schedule:
    """Return `schedule` with messages for the named tensors of a model.

    Raises ConfigError if it has messages for other tensors.
    """
    if schedule.tensors and schedule.tensors != tuple(tensors):
        raise ConfigError(
            f"schedule {schedule.name} has messages for {_words(schedule.tensors)}, and the layers on these stages read "
            f"{_words(tensors)}; leave with_tensors out: a pipeline adds what its layers declare"
        )
    return schedule.with_tensors(tensors) if tensors else schedule


def _words(tensors: Sequence[NamedTensor]) -> str:
    return "; ".join(f"{t.name!r} from {t.producer} to {list(t.consumers)}" for t in tensors) or "none"


def _by_key(layer: str, which: str, declared: Sequence[str] | Mapping[str, str]) -> dict[str, str]:
    """Return {key: name}, given names or such a dict. Raises ConfigError for a name that is no identifier."""
    pairs = dict(declared) if isinstance(declared, Mapping) else {name: name for name in declared}
    _require_names(layer, which, [*pairs, *pairs.values()])
    return pairs


def _require_names(layer: str, which: str, names: Iterable[object]) -> None:
    for name in names:
        if not isinstance(name, str) or not name.isidentifier() or name in ("output", *_OF_RUNTIME):
            raise ConfigError(
                f"layer {layer!r}: {which} has the name {name!r:.100}; give a Python identifier other than 'output', "
                f"{' and '.join(map(repr, sorted(_OF_RUNTIME)))}"
            )


def _unwritten(layer: str, name: str, rest: Sequence[LayerNames], written: Mapping[str, int]) -> str:
    """Return the reason why `layer` cannot read `name`; `rest`: the layer and those after it."""
    later = next((other.layer for other in rest if name in other.writes.values()), None)
    if later is not None:
        return f"layer {layer!r} reads tensor {name!r}, which only {later!r} writes, and that is not before it"
    return f"layer {layer!r} reads tensor {name!r}, which no layer writes{did_you_mean(name, written)}"


@dataclass(frozen=True)
class StageModules:
    """The layers of one stage, built.

    Attributes:
        modules: the layers, in order.
        names: global names of the layers.
        keywords: for each, the keyword arguments of a step that its forward takes (None: any).
        declared: for each, its named tensors and its losses.
        recomputed: names of the layers that a block (R;B) recomputes.
    """

    modules: tuple[nn.Module, ...]
    names: tuple[str, ...]
    keywords: tuple[frozenset[str] | None, ...]
    declared: tuple[LayerNames, ...]
    recomputed: frozenset[str] = frozenset()

    @property
    def declares_nothing(self) -> bool:
        """Return whether no layer declares anything."""
        return all(each.declares_nothing for each in self.declared)

    @property
    def segmented(self) -> bool:
        """Return whether the stage runs in segments. They pass positional values only, so its layers must declare nothing."""
        return self.declares_nothing and any(map(is_segmented, self.modules))

    def accepted(self, at: int, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the `arguments` that layer `at` takes; those of the runtime only if the layer names them.

        Of the states of the layers for a slice it gets its own.
        """
        known = self.keywords[at]
        if known is not None and not known:
            return {}
        return {
            key: value[at] if key == STATE else value
            for key, value in arguments.items()
            if (key not in _OF_RUNTIME if known is None else key in known)
        }

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
    def of(cls, accepted: Collection[Iterable[str] | None]) -> KnownKeywords:
        """Return the keywords of layers that each take these (None: any), without named tensors of other layers."""
        names = frozenset[str]().union(*(each for each in accepted if each is not None))
        return cls(names, None in accepted)

    def require(self, method: str, given: Iterable[str]) -> None:
        """Raise UsageError, with the nearest names, for a keyword argument of `method` that no layer takes."""
        known = (self.names - _OF_RUNTIME) | {"inputs"} | (set() if method == "predict" else {"targets"})
        for name in given:
            if name in _OF_RUNTIME or not (self.others or name in known):
                raise UsageError(
                    f"{method} got the keyword argument {name!r}, which no layer takes{did_you_mean(name, known)}"
                )


def require_arguments(layers: object, schedule: object, loss: object) -> None:
    """Raise UsageError for arguments of a pipeline that are not layers, a schedule and a loss."""
    require_is_schedule(schedule)
    if isinstance(layers, str) or not isinstance(layers, (Sequence, nn.Sequential, nn.ModuleList)):
        raise UsageError(
            f"layers is of type {type(layers).__name__}; give a list of the model's layers in order: modules, or "
            "factories such as Layer(name, build)"
        )
    for index, layer in enumerate(layers):
        if not callable(layer):
            raise UsageError(f"layer {index} is of type {type(layer).__name__}; give a module or a factory of one")
    if not callable(loss):
        raise UsageError(f"loss is of type {type(loss).__name__}; give a function loss(output, targets)")


_COST_UNITS = 2**24  # whole numbers of which the costs of all layers are multiples, so that sums are exact


def split_layers(count: int, positions: int, stages: Sequence[int] | None, costs: Sequence[float] = ()) -> list[range]:
    """Return position -> its layers.

    Args:
        stages: number of layers of each; None: by `costs` where all layers have one, else even, larger ones first.

    Raises ConfigError if the numbers do not add up, or if a stage would be empty that `stages` does not make empty.
    """
    if stages is None:
        if count < positions:
            raise ConfigError(f"{count} layers cannot fill {positions} stages; use at most {count} stages")
        sizes = list(even_sizes(count, positions))
        if costs and min(costs) > 0:
            sizes = balance([max(1, round(cost * _COST_UNITS / sum(costs))) for cost in costs], positions)
    else:
        sizes = whole_numbers("stages", stages, 0)
        if len(sizes) != positions or sum(sizes) != count:
            raise ConfigError(
                f"stages {sizes} must have {positions} numbers of layers, one for each stage, that sum to the model's {count}"
            )
    starts = accumulate(sizes[:-1], initial=0)
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


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

    Each is built with random numbers of `seed` and its name alone, so that no layout changes its first weights, and so
    are the numbers that its parts draw with the micro-batch's context.

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
        modules.append(built[index])
        names.append(name)
        declared.append(LayerNames.of(source, name))
        accepted = keywords_of(modules[-1])
        declared[-1].require_keywords(accepted)
        if accepted is not None and KEYWORD in accepted:
            set_sources(built[index], seed, name)
        elif any(isinstance(part, OfMicrobatch) and part.has_losses for part in built[index].modules()):
            raise ConfigError(
                f"layer {name!r} has a gate's losses inside, so its forward must take the keyword {KEYWORD!r} and pass it on"
            )
        keywords.append(None if accepted is None else accepted - declared[-1].reads.keys())
    recomputed = recompute if isinstance(recompute, frozenset) else names
    return StageModules(tuple(modules), tuple(names), tuple(keywords), tuple(declared), frozenset(recomputed))


def layer_name(source: LayerSource, index: int) -> str:
    """Return the layer's global name: its own, or its index."""
    return str(getattr(source, "name", index))


LOOKED_UP = nn.Embedding, nn.EmbeddingBag
"""Modules that look up rows of their weight and compute nothing with the others."""


def layer_cost(source: LayerSource) -> float:
    """Return the layer's `cost`; of a module the number of its parameters that it computes with, and 1.

    Those are all but tables of embeddings, of which rows are looked up. 0: unknown before the layer runs.
    """
    if not isinstance(source, nn.Module):
        return source.cost if isinstance(source, Layer) else 0.0
    computing = [module for module in source.modules() if not isinstance(module, LOOKED_UP)]
    parameters = {parameter for module in computing for parameter in module.parameters(recurse=False)}
    return 0.0 if any(map(is_lazy, parameters)) else 1.0 + sum(parameter.numel() for parameter in parameters)


def _build(source: LayerSource, index: int) -> nn.Module:
    if isinstance(source, nn.Module):
        return source
    build = source.build if isinstance(source, Layer) else source
    try:
        module = build()
    except TypeError as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:  # raised inside the factory
            raise
        raise UsageError(
            f"layer {index} is built by a call without arguments, and this one takes some ({error}); give a module, or a factory "
            "of one"
        ) from None
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


def keywords_of(module: nn.Module) -> frozenset[str] | None:
    """Return the arguments that `forward` takes by name, without its first, the layer's input; None: it takes any."""
    # A module of torch.compile has a forward that takes any arguments; torch has no public name for the module inside.
    while isinstance(inner := getattr(module, "_orig_mod", None), nn.Module):
        module = inner
    parameters = list(inspect.signature(module.forward).parameters.values())
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    if parameters and parameters[0].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
        del parameters[0]
    return frozenset(p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD))
