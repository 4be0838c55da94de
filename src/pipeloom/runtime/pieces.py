"""Pieces: a stage's layers as computations between two communications."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from pipeloom.ops.recompute import recomputed
from pipeloom.ops.segments import Communication, Compute, Values, is_segmented
from pipeloom.runtime.boundary import as_values
from pipeloom.runtime.layers import StageModules


class Run(NamedTuple):
    """One computation of a piece; `layer`: the name of the layer that it ends, None inside a layer."""

    call: Callable[[Values], Any]
    layer: str | None


@dataclass(frozen=True)
class Piece:
    """Computations without a communication in between, across layers too, and the communication that follows."""

    runs: tuple[Run, ...]
    after: Communication | None

    def compute(self, values: Values) -> Any:
        """The values after the last computation; what a layer returns stays as it is if the piece ends with it."""
        result: Any = values
        for at, run in enumerate(self.runs):
            before = self.runs[at - 1].layer if at else None
            result = run.call(result if before is None else as_values(result, f"layer {before!r}"))
        return result


def pieces_of(layers: StageModules, keywords: Mapping[str, Any]) -> list[Piece]:
    """The stage for one micro-batch: at least one piece, the last one without a communication behind it."""
    pieces: list[Piece] = []
    runs: list[Run] = []
    for at, (module, name) in enumerate(zip(layers.modules, layers.names, strict=True)):
        accepted = layers.accepted(at, keywords)
        again = name in layers.recomputed
        if not is_segmented(module):
            forward = partial(_forward, module, accepted)
            runs.append(Run(partial(_recomputed, forward, module) if again else forward, name))
            continue
        for segment in module.segments(**accepted):  # type: ignore[operator]
            if isinstance(segment, Compute):
                runs.append(Run(partial(_recomputed, segment.run, module) if again else segment.run, None))
            else:
                pieces.append(Piece(tuple(runs), segment))
                runs = []
        runs.append(Run(_unwrap, name))
    return [*pieces, Piece(tuple(runs), None)]


def _forward(module: Any, keywords: Mapping[str, Any], values: Values) -> Any:
    return module(*values, **keywords)


def _recomputed(run: Callable[[Values], Any], module: Any, values: Values) -> Any:
    return recomputed(lambda *given: run(given), values, module)


def _unwrap(values: Values) -> Any:
    """What a layer of these outputs returns: one value as it is, several as a tuple."""
    return values[0] if len(values) == 1 else values
