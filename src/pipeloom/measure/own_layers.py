"""Times of layers of one's own on this device, as the engine runs them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from torch import nn

from pipeloom.draw.tables import Table
from pipeloom.limits import of_annotated_types, require_whole
from pipeloom.runtime import LocalPipeline, RuntimeOptions
from pipeloom.runtime.stage_modules import layer_name
from pipeloom.schedule import Action, Schedule

SPLIT_BACKWARD, WHOLE_BACKWARD = ("{0}I{1}", "{0}W{1}"), ("{0}B{1}",)
"""Cells of a backward in two parts, and of a whole one, for `one_by_one`."""

_COLUMNS = {"F": "forward", "I": "input_grad", "W": "weight_grad", "B": "backward"}


@of_annotated_types
def profile(
    layers: Sequence[Any] | nn.Sequential | nn.ModuleList,
    inputs: Any,
    targets: Any = None,
    *,
    loss: Any,
    device: torch.device | str = "cpu",
    repeats: int = 5,
) -> Table:
    """Seconds that each layer takes for one micro-batch on this device: medians, a row for each layer.

    >>> import pipeloom as pl, torch
    >>> layers = [torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)]
    >>> table = pl.profile(layers, torch.ones(4, 8), torch.ones(4, 2), loss=torch.nn.functional.mse_loss)
    >>> costs = pl.Costs(*([row[name] for row in table] for name in ("forward", "input_grad", "weight_grad")))
    >>> len(costs.forward)
    2

    A row has "forward" (F), "input_grad" (I), "weight_grad" (W) and "backward" (B, both at once). The last layer's include the
    loss. Sums over the layers of a stage are its `Costs`, and a layer's time is a `cost` of `Layer`. Layers are left without
    gradients.

    Args:
        layers, loss: as of `Pipeline`.
        inputs, targets: of one micro-batch.
        device: where the layers run; the inputs are moved there.
        repeats: steps that are measured, after one that warms up.

    Raises UsageError for fewer than one repeat, and what `Pipeline` raises.
    """
    require_whole("repeats", repeats)
    options = RuntimeOptions(device=device, trace=str(device).startswith("cuda"))
    schedule = one_by_one(len(layers), [SPLIT_BACKWARD, WHOLE_BACKWARD])
    pipeline = LocalPipeline([*layers], schedule, loss=loss, stages=(1,) * len(layers), options=options)
    seconds: dict[tuple[int, str], list[float]] = defaultdict(list)
    for step in range(repeats + 1):
        pipeline.step(microbatches=[(inputs, targets)] * 2)
        pipeline.zero_grad()
        (stats,) = pipeline.stats
        for cell, start, end in zip(schedule.programs[0], stats.starts, stats.ends, strict=True):
            if step and isinstance(cell, Action):
                seconds[cell.stage, cell.kind].append(end - start)
    names = [layer_name(layer, at) for at, layer in enumerate(layers)]
    times = [{column: median(seconds[at, kind]) for kind, column in _COLUMNS.items()} for at in range(len(names))]
    cells = [(name, *(f"{1e3 * each:.3f}" for each in row.values())) for name, row in zip(names, times, strict=True)]
    rows = tuple({"layer": name} | row for name, row in zip(names, times, strict=True))
    return Table(rows, (("layer", *(f"{kind} ms" for kind in _COLUMNS)), *cells))


def one_by_one(stages: int, backwards: Sequence[Sequence[str]]) -> Schedule:
    """Return a schedule of one rank with a micro-batch for each of `backwards`: every F, then for each stage, the last one first,
    its cells, such as `"{0}I{1}"` and `"{0}W{1}"` of stage and micro-batch.
    """
    cells: list[str] = []
    for microbatch, backward in enumerate(backwards):
        cells += (f"{stage}F{microbatch}" for stage in range(stages))
        cells += (cell.format(stage, microbatch) for stage in reversed(range(stages)) for cell in backward)
    return Schedule.of([cells], placement=(0,) * stages, microbatches=len(backwards), name="profile")
