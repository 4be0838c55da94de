"""Layers into stages: which layers a stage holds, building only those, and their parameters' global names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from pipeloom.errors import ConfigError, UsageError
from pipeloom.ops.microbatch import KEYWORD


@dataclass(frozen=True)
class Layer:
    """A layer that is built only on the rank that holds it.

    Attributes:
        name: global name; parameters are called `name.parameter`.
        build: makes the module.
    """

    name: str
    build: Callable[[], nn.Module]

    def __call__(self) -> nn.Module:
        return self.build()


LayerSource = Callable[[], nn.Module] | nn.Module


@dataclass(frozen=True)
class StageModules:
    """The layers of one stage, built.

    Attributes:
        modules: in order.
        names: their global names.
        keywords: for each, the keyword arguments that its forward takes (None: any).
        recomputed: the names of those whose forward runs again in the backward.
    """

    modules: tuple[nn.Module, ...]
    names: tuple[str, ...]
    keywords: tuple[frozenset[str] | None, ...]
    recomputed: frozenset[str] = frozenset()

    def accepted(self, at: int, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Those of `arguments` that layer `at` takes; the micro-batch's context only where the layer names it."""
        known = self.keywords[at]
        return {key: value for key, value in arguments.items() if (key != KEYWORD if known is None else key in known)}


def split_layers(count: int, positions: int, stages: Sequence[int] | None) -> list[range]:
    """position -> its layers; `stages` gives the number of layers of each, None spreads them evenly, larger first.

    Raises ConfigError when the numbers do not add up, or a stage would be empty without being asked to.
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
        if sum(sizes) != count or min(sizes) < 0:
            raise ConfigError(f"stages {sizes} hold {sum(sizes)} layers, and the model has {count}")
    starts = [sum(sizes[:at]) for at in range(positions)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def build_stage(
    layers: Sequence[LayerSource],
    which: range,
    device: torch.device,
    built: dict[int, nn.Module],
    recompute: Literal["none", "full"] | frozenset[str] = "none",
) -> StageModules:
    """Builds the layers `which` on `device`, unless they are in `built`; one on the meta device is materialized and reset."""
    modules, names, keywords = [], [], []
    for index in which:
        source = layers[index]
        if index not in built:
            meta = _is_meta(source)
            built[index] = _materialize(source, device) if meta else _build(source, index).to(device)
        modules.append(built[index])
        names.append(str(getattr(source, "name", index)))
        keywords.append(_keywords(modules[-1]))
    chosen = recompute if isinstance(recompute, frozenset) else names if recompute == "full" else ()
    return StageModules(tuple(modules), tuple(names), tuple(keywords), frozenset(chosen))


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


def _keywords(module: nn.Module) -> frozenset[str] | None:
    parameters = inspect.signature(module.forward).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD))
