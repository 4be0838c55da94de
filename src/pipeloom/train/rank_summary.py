"""Contents of each rank of a run, as a table printed at its start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from pipeloom.mesh_shape import Place
from pipeloom.parallel.exchange import all_gather_json
from pipeloom.runtime import Pipeline
from pipeloom.schedule import Costs, simulate
from pipeloom.train.optimizer import Optimizer

MOST_ROWS = 16


@dataclass(frozen=True)
class RankSummary:
    """Contents of one rank.

    Attributes:
        place: on the mesh.
        layers: of each of its stages, in order.
        parameters: elements of its part of them.
        optimizer_bytes: state and master weights.
        in_flight: the most stage-micro-batches alive at once.
    """

    place: Place
    layers: tuple[tuple[str, ...], ...]
    parameters: int
    optimizer_bytes: int
    in_flight: int


def what_ranks_hold(pipeline: Pipeline, optimizer: Optimizer) -> list[RankSummary] | None:
    """Every rank's, in order of their numbers, on the first rank; None on the others. Collective."""
    peaks = simulate(pipeline.schedule, Costs(1, 1, 1)).peak_activations
    mine = RankSummary(
        pipeline.mesh.place,
        pipeline.layer_names,
        sum(parameter.numel() for parameter in pipeline.parameters()),
        optimizer.state_bytes,
        int(peaks[pipeline.rank]),
    )
    everyone = pipeline.mesh.everyone
    if everyone.group is None:
        return [mine]
    with pipeline.waiting("what the other ranks hold"):
        summaries = all_gather_json(astuple(mine), everyone.group)
    return [_from_json(*each) for each in summaries] if everyone.index == 0 else None


def _from_json(
    place: Sequence[int], layers: Sequence[Sequence[str]], parameters: int, optimizer_bytes: int, in_flight: int
) -> RankSummary:
    return RankSummary(Place(*place), tuple(map(tuple, layers)), parameters, optimizer_bytes, in_flight)


def table(ranks: Sequence[RankSummary]) -> list[str]:
    """Lines of at most 80 characters, a rank each: place, layers, parameters, optimizer state, micro-batches in flight.

    Of many ranks, those of the first pipeline: the others hold as much.
    """
    axes = [axis for axis in ("pp", "dp", "tp", "ep") if len({getattr(held.place, axis) for held in ranks}) > 1]
    printed = [(number, held) for number, held in enumerate(ranks)]
    if len(ranks) > MOST_ROWS:
        printed = [(number, held) for number, held in printed if held.place.dp == held.place.tp == 0]
    place = "  ".join(axes) + ("  " if axes else "")
    head = f"rank  {place}{'parameters':>10}  {'optimizer':>9}  {'in flight':>9}  layers"
    lines = [head]
    width = 80 - len(head) + len("layers")
    for number, held in printed:
        at = "".join(f"{getattr(held.place, axis):>2}  " for axis in axes)
        figures = f"{_short(held.parameters):>10}  {_bytes(held.optimizer_bytes):>9}  {held.in_flight:>9}"
        lines.append(f"{number:>4}  {at}{figures}  {_clip(layer_words(held.layers), width)}")
    if len(printed) < len(ranks):
        others = " and ".join(axis for axis in axes if axis in ("dp", "tp"))
        lines.append(f"and {len(ranks) - len(printed)} more ranks, which differ in {others}")
    return lines


def layer_words(stages: Sequence[Sequence[str]]) -> str:
    """`"E 0-1 | 4-5 L"`: blocks by number, E embedding, L norm and output layer, one group a stage."""
    return " | ".join(_stage_words(names) for names in stages)


def _stage_words(names: Sequence[str]) -> str:
    numbers = [name.rpartition(".")[2] for name in names]
    blocks = [int(number) for number in numbers if number.isdigit()]
    words = [f"{blocks[0]}-{blocks[-1]}" if len(blocks) > 1 else str(blocks[0])] if blocks else []
    if names and not numbers[0].isdigit() and (blocks or len(names) > 1 or "embed" in names[0]):
        words.insert(0, "E")
    if names and not numbers[-1].isdigit() and "embed" not in names[-1]:
        words.append("L")
    return " ".join(words) or "-"


def _clip(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(width - 1, 0)] + "…"


def _short(count: int) -> str:
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g} {letter}"
    return str(count)


def _bytes(count: int) -> str:
    for size, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"
