"""Table of the layers, parameters and optimizer state on each rank, printed at the start of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from pipeloom.runtime import Pipeline
from pipeloom.schedule import Costs, simulate
from pipeloom.schedule.channels import count_words, size_words
from pipeloom.shapes.mesh import Place
from pipeloom.train.collect import from_every_rank
from pipeloom.train.optimizer import Optimizer

MOST_ROWS = 16


@dataclass(frozen=True)
class RankSummary:
    """Layers and memory of one rank.

    Attributes:
        place: the rank's place on the mesh.
        layers: the layer names of each of its stages, in order.
        parameters: number of parameter elements on this rank.
        optimizer_bytes: bytes of optimizer state and master weights.
        in_flight: peak activations: most stage-micro-batches alive at once.
    """

    place: Place
    layers: Sequence[Sequence[str]]
    parameters: int
    optimizer_bytes: int
    in_flight: int


def what_ranks_hold(pipeline: Pipeline, optimizer: Optimizer) -> list[RankSummary] | None:
    """Return the summaries of all ranks, in rank order, on the first rank; None on the others. Collective."""
    peaks = simulate(pipeline.schedule, Costs(1, 1, 1)).peak_activations
    mine = RankSummary(
        pipeline.mesh.place,
        pipeline.layer_names,
        sum(parameter.numel() for _, parameter in pipeline.named_parameters()),
        optimizer.state_bytes,
        int(peaks[pipeline.rank]),
    )
    summaries = from_every_rank(pipeline, astuple(mine), "what the other ranks hold")
    return (
        [RankSummary(Place(*place), *rest) for place, *rest in summaries] if not pipeline.mesh.everyone.index else None
    )


def table(ranks: Sequence[RankSummary]) -> list[str]:
    """Return lines of at most 80 characters, one per rank: place, parameters, optimizer state, micro-batches in flight, layers.

    With more than MOST_ROWS ranks, only the ranks of the first pipeline have a line.
    """
    axes = [axis for axis in ("pp", "dp", "cp", "tp", "ep") if len({getattr(held.place, axis) for held in ranks}) > 1]
    printed = [(number, held) for number, held in enumerate(ranks)]
    if len(ranks) > MOST_ROWS:
        printed = [(number, held) for number, held in printed if held.place.dp == held.place.cp == held.place.tp == 0]
    place = "  ".join(axes) + ("  " if axes else "")
    head = f"rank  {place}{'parameters':>10}  {'optimizer':>9}  {'in flight':>9}  layers"
    lines = [head]
    width = 80 - len(head) + len("layers")
    for number, held in printed:
        at = "".join(f"{getattr(held.place, axis):>2}  " for axis in axes)
        figures = f"{count_words(held.parameters):>10}  {size_words(held.optimizer_bytes):>9}  {held.in_flight:>9}"
        lines.append(f"{number:>4}  {at}{figures}  {_clip(layer_words(held.layers), width)}")
    if len(printed) < len(ranks):
        others = " and ".join(axis for axis in axes if axis in ("dp", "tp"))
        lines.append(f"and {len(ranks) - len(printed)} more ranks, which differ in {others}")
    return lines


def layer_words(stages: Sequence[Sequence[str]]) -> str:
    """Return `"E 0-1 | 4-5 L"`: blocks by number, E embedding, L norm and output layer, one group per stage."""
    return " | ".join(_stage_words(names) for names in stages)


def _stage_words(names: Sequence[str]) -> str:
    numbers = [name.rpartition(".")[2] for name in names]
    blocks = [int(number) for number in numbers if number.isdecimal()]
    words = [f"{blocks[0]}-{blocks[-1]}" if len(blocks) > 1 else str(blocks[0])] if blocks else []
    if names and not numbers[0].isdecimal() and (blocks or len(names) > 1 or "embed" in names[0]):
        words.insert(0, "E")
    if names and not numbers[-1].isdecimal() and "embed" not in names[-1]:
        words.append("L")
    return " ".join(words) or "-"


def _clip(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(width - 1, 0)] + "…"
