"""Norms of gradients and parameters, by layer or by parameter, over all ranks."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from pipeloom.parallel.exchange import all_gather_json
from pipeloom.parallel.grad_norm import exact_sum
from pipeloom.runtime import Pipeline
from pipeloom.runtime.tied_weights import layer_of
from pipeloom.train.optimizer import Optimizer


@dataclass(frozen=True)
class LayerNorms:
    """Name -> norm: of gradients before clipping, and of parameters before the step. A tied weight is under its first name."""

    gradient: dict[str, float]
    parameter: dict[str, float]


def layer_norms(pipeline: Pipeline, optimizer: Optimizer, by: str) -> LayerNorms:
    """Return the norms of the present step; to be called before the optimizer's step. Collective over the run.

    Each element counts once, on whichever rank it is, so the norms do not depend on the layout, except for rounding.

    Args:
        by: the unit of a norm, "layer" or "parameter".
    """
    norms = [_named(pipeline, optimizer.named_squares(gradients), by) for gradients in (True, False)]
    everyone = [norms]
    if pipeline.mesh.everyone.size > 1:
        with pipeline.waiting("the other ranks' norms"):
            everyone = all_gather_json(norms, pipeline.run_control)
    gradient, parameter = (_joined([each[at] for each in everyone]) for at in range(2))
    return LayerNorms(gradient, parameter)


def _named(pipeline: Pipeline, squares: dict[str, float], by: str) -> dict[str, list[float]]:
    named: dict[str, list[float]] = defaultdict(list)
    for name, square in squares.items():
        stored = pipeline.stored_name(name)
        named[stored if by == "parameter" else layer_of(name, pipeline.modules) or stored].append(square)
    return dict(named)


def _joined(parts: list[dict[str, list[float]]]) -> dict[str, float]:
    joined: dict[str, list[float]] = defaultdict(list)
    for part in parts:
        for name, squares in part.items():
            joined[name] += squares
    return {name: math.sqrt(exact_sum(squares)) for name, squares in joined.items()}
