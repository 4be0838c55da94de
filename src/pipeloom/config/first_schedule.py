"""What runs until a searched schedule is found, and what that is compared with: a family that fits, else list scheduling."""

from __future__ import annotations

from collections.abc import Sequence

from pipeloom.errors import ConfigError, UsageError
from pipeloom.schedule import Action, Costs, Schedule, simulate
from pipeloom.schedule.families import build
from pipeloom.schedule.families.greedy import NoWayOn, Rule, line_of, programs_of
from pipeloom.schedule.families.layout import loop_placement
from pipeloom.schedule.model import parts

FAMILIES = {"linear": ("1f1b",), "loop": ("interleaved", "interleaved-zb"), "vee": ("zbv", "v-half", "v-min")}


def kind_of(placement: Sequence[int], ranks: int) -> str:
    """Which families are made for this placement; "" for none."""
    if len(placement) == ranks and list(placement) == list(range(ranks)):
        return "linear"
    if list(placement) == loop_placement(ranks, len(placement) // ranks):
        return "loop"
    return "vee" if list(placement) == [*range(ranks), *reversed(range(ranks))] else ""


def usual_memory(kind: str, placement: Sequence[int], ranks: int, m: int) -> tuple[float, str]:
    """What the placement's first family holds on its fullest rank; without one, 1F1B's p micro-batches in every stage."""
    for schedule in _families(kind, placement, (ranks, m), None):
        return float(max(simulate(schedule).peak_activations)), schedule.name
    return float(ranks * max(placement.count(rank) for rank in range(ranks))), "1f1b"


def _families(kind: str, placement: Sequence[int], sizes: tuple[int, int], costs: Costs | None) -> list[Schedule]:
    made = []
    for name in FAMILIES.get(kind, ()):
        chunks = len(placement) // sizes[0] if kind == "loop" else None
        try:
            made.append(build(name, *sizes, chunks, {}, costs))
        except UsageError:  # sizes that this family refuses
            continue
    return made


def family_that_fits(
    kind: str, placement: Sequence[int], sizes: tuple[int, int], memory: float, costs: Costs | None
) -> Schedule:
    """The first family that fits the memory, else what list scheduling makes."""
    known = costs if costs is not None else Costs()
    for schedule in _families(kind, placement, sizes, costs):
        if max(simulate(schedule, known).peak_memory) <= memory + 1e-9:
            return schedule
    ranks, m = sizes
    for late in (True, False):
        # a stage's share of the places, so that growth cannot get stuck
        caps = [max(1.0, memory // placement.count(rank)) for rank in placement]
        line = line_of(placement, m, known, [memory] * ranks, caps)
        try:
            grown = programs_of(line, Rule(late=late))
        except NoWayOn:
            continue
        cells = [[f"{stage}{kind}{mb}" for kind, stage, mb in program] for program in grown]
        return Schedule.of(cells, placement=placement, microbatches=m, name="list scheduling")
    raise ConfigError(f"schedule.options.memory = {memory:g}: no schedule was found that fits it; give more")


def half_split(schedule: Schedule, parity: int = 0) -> Schedule:
    """`schedule` with the backwards of every second micro-batch, from `parity` on, as I and W, and the others as one B.

    W comes right behind its I where there was a B. Pairs are taken apart. No rank holds more than before.
    """
    even = parity % 2 if schedule.microbatches > 1 else 0

    def pieces(action: Action) -> tuple[str, ...]:
        stage, mb = action.stage, action.microbatch
        if action.kind == "F" or (action.kind in "IW" and mb % 2 == even):
            return (str(action),)
        if action.kind == "W":
            return ()
        return (f"{stage}I{mb}", f"{stage}W{mb}") if mb % 2 == even else (f"{stage}B{mb}",)

    return Schedule.of(
        [[text for cell in program for a in parts(cell) for text in pieces(a)] for program in schedule.programs],
        placement=schedule.placement,
        microbatches=schedule.microbatches,
        name=schedule.name,
        options=dict(schedule.options),
    )
