"""Building blocks: a V schedule from the slots that one micro-batch takes, repeated and squeezed.

Pipeline Parallelism with Controllable Memory (Qi et al., arXiv 2405.15362): with F = I = W = 1 slot a stage, a micro-batch takes
6 slots a rank on a V placement. Its F and I sit at fixed offsets; the next micro-batch follows 6 slots later. How far a stage's F
lies from its I is how long it holds memory, so that the offsets set the peak. Then everything moves to earlier free slots as
far as data and the peak allow.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeloom.schedule.actions import KindName

INTERVAL = 6
Slot = tuple[KindName, int, int]


@dataclass(frozen=True)
class Block:
    """Where one micro-batch's F and I sit.

    Attributes:
        steps: slots from one rank to the next, for F down, F up, I down and I up the V.
        turns: slots that are left free at the three turns: F at the last rank, from F to I at the first, I at the last.
    """

    steps: tuple[int, int, int, int]
    turns: tuple[int, int, int]

    def offsets(self, ranks: int) -> dict[tuple[KindName, int], int] | None:
        """(kind, stage) -> slot of micro-batch 0; None if two of a rank's would share a slot of the repeated block."""
        down, up, back_down, back_up = self.steps
        turn_forward = (down + up) * (ranks - 1) + 1 + self.turns[0]
        first_grad = turn_forward + 1 + self.turns[1]
        last_grad = first_grad + (back_down + back_up) * (ranks - 1) + 1 + self.turns[2]
        slots: dict[tuple[KindName, int], int] = {}
        for rank in range(ranks):
            low, high = rank, 2 * ranks - 1 - rank
            here = (down * rank, turn_forward - up * rank, first_grad + back_down * rank, last_grad - back_up * rank)
            if len({slot % INTERVAL for slot in here}) < 4:
                return None
            slots["F", low], slots["F", high], slots["I", high], slots["I", low] = here
        return slots


@dataclass
class _Grid:
    """The slots of all ranks, and when everything sits."""

    placement: list[int]
    microbatches: int
    taken: list[dict[int, Slot]] = field(default_factory=list)
    slot_of: dict[KindName, list[list[int]]] = field(default_factory=dict)

    def ordered(self) -> list[tuple[int, int, Slot]]:
        """(slot, rank, what) of everything, in time."""
        return sorted((slot, rank, what) for rank, row in enumerate(self.taken) for slot, what in row.items())

    def earliest(self, what: Slot) -> int:
        """The first slot that data and order leave to it."""
        kind, stage, mb = what
        after = self.slot_of[kind][stage][mb - 1] if mb else -1
        if kind == "F" and stage:
            after = max(after, self.slot_of["F"][stage - 1][mb])
        elif kind == "I":
            last = stage == len(self.placement) - 1
            after = max(after, self.slot_of["F"][stage][mb] if last else self.slot_of["I"][stage + 1][mb])
        elif kind == "W":
            after = max(after, self.slot_of["I"][stage][mb])
        return after + 1

    def move(self, rank: int, old: int, new: int) -> None:
        kind, stage, mb = self.taken[rank].pop(old)
        self.taken[rank][new] = kind, stage, mb
        self.slot_of[kind][stage][mb] = new


def words_of(
    block: Block, placement: list[int], microbatches: int, room: int
) -> list[list[tuple[KindName, int]]] | None:
    """rank -> the order of its (kind, stage) of F and I; None if the block does not fit this p or `room` stage-micro-batches."""
    offsets = block.offsets(max(placement) + 1)
    if offsets is None:
        return None
    grid = _unfold(offsets, placement, microbatches)
    _place_weights(grid)
    levels = [_levels(row) for row in grid.taken]
    if max(map(max, levels)) > room:
        return None
    _squeeze(grid, levels, room)
    _hasten_end(grid)
    return [[what[:2] for _, what in sorted(row.items())] for row in grid.taken]


def _unfold(offsets: dict[tuple[KindName, int], int], placement: list[int], microbatches: int) -> _Grid:
    grid = _Grid(placement, microbatches, [{} for _ in range(max(placement) + 1)])
    for kind in ("F", "I", "W"):
        grid.slot_of[kind] = [[0] * microbatches for _ in placement]
    for (kind, stage), offset in offsets.items():
        for mb in range(microbatches):
            grid.slot_of[kind][stage][mb] = offset + INTERVAL * mb
            grid.taken[placement[stage]][offset + INTERVAL * mb] = kind, stage, mb
    return grid


def _place_weights(grid: _Grid) -> None:
    """Every W in the first free slot after its I, oldest first."""
    for row in grid.taken:
        pending: list[Slot] = []
        left, slot, oldest = sum(1 for what in row.values() if what[0] == "I"), 0, 0
        while oldest < left:
            what = row.get(slot)
            if what is not None and what[0] == "I":
                pending.append(("W", what[1], what[2]))
            elif what is None and oldest < len(pending):
                row[slot] = pending[oldest]
                _, stage, mb = pending[oldest]
                grid.slot_of["W"][stage][mb] = slot
                oldest += 1
            slot += 1


def _levels(row: dict[int, Slot]) -> list[int]:
    """slot -> stage-micro-batches alive after it."""
    levels, level = [], 0
    for slot in range(max(row) + 1):
        kind = row[slot][0] if slot in row else ""
        level += (kind == "F") - (kind == "W")
        levels.append(level)
    return levels


def _squeeze(grid: _Grid, levels: list[list[int]], room: int) -> None:
    """Everything, in time, to the first free slot that data, order and memory allow."""
    for slot, rank, what in grid.ordered():
        row, level = grid.taken[rank], levels[rank]
        for new in range(grid.earliest(what), slot):
            if new in row or (what[0] == "F" and max(level[new:slot]) >= room):
                continue
            grid.move(rank, slot, new)
            change = (what[0] == "F") - (what[0] == "W")
            if change:
                level[new:slot] = [value + change for value in level[new:slot]]
            break


def _hasten_end(grid: _Grid) -> None:
    """After the last micro-batch has entered, F and I take the W's slots: in the cool-down nothing else holds them up."""
    entered = grid.slot_of["F"][0][-1]
    for row in grid.taken:
        for slot in [slot for slot, what in row.items() if what[0] == "W"]:
            del row[slot]
    for slot, rank, what in grid.ordered():
        if slot > entered:
            new = next((s for s in range(grid.earliest(what), slot) if s not in grid.taken[rank]), slot)
            if new != slot:
                grid.move(rank, slot, new)
