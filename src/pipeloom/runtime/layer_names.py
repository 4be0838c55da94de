"""Declarations of layers: named tensors that they read and write past other layers, and their own losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pipeloom.errors import ConfigError, UsageError, did_you_mean
from pipeloom.ops.layer import KEYWORD, Layer, LossTerm
from pipeloom.schedule.model import NamedTensor, Schedule


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
        if not isinstance(source.losses, Mapping) or not all(isinstance(t, LossTerm) for t in source.losses.values()):
            raise ConfigError(f"layer {name!r}: losses is {source.losses!r:.100}; give {{key: LossTerm(loss, weight)}}")
        for key in source.losses:
            _require_identifier(name, "losses", key)
        if KEYWORD in reads:
            raise ConfigError(
                f"layer {name!r} reads into the keyword {KEYWORD!r}, which the pipeline itself passes; rename it"
            )
        return cls(name, reads, writes, dict(source.losses))

    @property
    def silent(self) -> bool:
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


@dataclass(frozen=True)
class ModelNames:
    """The declarations of all layers of a model, with the stage position of each.

    Attributes:
        tensors: the named tensors that are sent between stages.
        terms: the keys of the losses, in order of the layers.
    """

    tensors: tuple[NamedTensor, ...]
    terms: tuple[str, ...]

    @classmethod
    def of(cls, layers: Sequence[LayerNames], position_of: Sequence[int]) -> ModelNames:
        """Collect the declarations.

        Raises ConfigError for a name that is read but not written before, and for two losses with one key.

        Args:
            position_of: layer -> the position of its stage.
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
            for name in layer.writes.values():
                writer[name] = at
            for key in layer.losses:
                if key in terms:
                    raise ConfigError(
                        f"layers {terms[key]!r} and {layer.layer!r} both have a loss {key!r}; name them apart"
                    )
                terms[key] = layer.layer
        tensors = [NamedTensor(name, producer, tuple(sorted(at))) for (name, producer), at in readers.items()]
        return cls(tuple(sorted(tensors)), tuple(terms))


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
    """Return {key: name}, given names or such a dict. Raises ConfigError for anything else."""
    if isinstance(declared, str):
        raise ConfigError(
            f"layer {layer!r}: {which} is the string {declared!r}; give names in a tuple, as in ({declared!r},)"
        )
    pairs = dict(declared) if isinstance(declared, Mapping) else {name: name for name in declared}
    for key, name in pairs.items():
        _require_identifier(layer, which, key)
        _require_identifier(layer, which, name)
    if len(set(pairs.values())) < len(pairs):
        raise ConfigError(f"layer {layer!r}: {which} names a tensor twice in {pairs}")
    return pairs


def _require_identifier(layer: str, which: str, name: object) -> None:
    if not isinstance(name, str) or not name.isidentifier() or name == "output":
        raise ConfigError(
            f"layer {layer!r}: {which} has the name {name!r:.100}; give a Python identifier other than 'output'"
        )


def _unwritten(layer: str, name: str, rest: Sequence[LayerNames], written: Mapping[str, int]) -> str:
    """Return the reason why `layer` cannot read `name`; `rest`: the layer and those after it."""
    later = next((other.layer for other in rest if name in other.writes.values()), None)
    if later is not None:
        return f"layer {layer!r} reads tensor {name!r}, which only {later!r} writes, and that is not before it"
    return f"layer {layer!r} reads tensor {name!r}, which no layer writes{did_you_mean(name, written)}"
