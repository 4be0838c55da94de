"""Building blocks: a V schedule from the slots that one micro-batch takes, repeated and squeezed.

Pipeline Parallelism with Controllable Memory (Qi et al., arXiv 2405.15362): with F = I = W = 1 slot per stage, a micro-batch
takes 6 slots per rank on a V placement. Its F and I have fixed offsets; the next micro-batch follows 6 slots later. The distance
from a stage's F to its I determines how long it holds memory, so the offsets determine the peak. Then actions move to earlier
free slots as far as data and the peak allow: all of them (`sequences_of_block`), or those of the warm-up and the cool-down
(`repeated_programs`), as in the paper.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate

from pipeloom.schedule.actions import KindName

INTERVAL = 6
BlockSlot = tuple[KindName, int, int]
Fixed = tuple[tuple[float, int], tuple[float, int]]  # the first and the last (slot, rank) that stay


@dataclass(frozen=True)
class BuildingBlock:
    """Slots of one micro-batch's F and I.

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
    """The slots of all ranks, and the slot of each action."""

    placement: list[int]
    microbatches: int
    taken: list[dict[int, BlockSlot]] = field(default_factory=list)
    slot_of: dict[KindName, list[list[int]]] = field(default_factory=dict)  # F, I by stage; W by rank, oldest first
    gradients: list[list[int]] = field(default_factory=list)  # rank -> the slots of its I, in order

    def ordered(self) -> list[tuple[int, int, BlockSlot]]:
        """(slot, rank, action) of all actions, in order of time."""
        return sorted((slot, rank, what) for rank, row in enumerate(self.taken) for slot, what in row.items())

    def earliest(self, what: BlockSlot) -> int:
        """The first slot that data and order allow. A W is ("W", rank, index) and follows the I of the same index."""
        kind, stage, mb = what
        after = self.slot_of[kind][stage][mb - 1] if mb else -1
        if kind == "F" and stage:
            after = max(after, self.slot_of["F"][stage - 1][mb])
        elif kind == "I":
            last = stage == len(self.placement) - 1
            after = max(after, self.slot_of["F"][stage][mb] if last else self.slot_of["I"][stage + 1][mb])
        elif kind == "W":
            after = max(after, self.gradients[stage][mb])
        return after + 1

    def move(self, rank: int, old: int, new: int) -> None:
        kind, stage, mb = self.taken[rank].pop(old)
        self.taken[rank][new] = kind, stage, mb
        self.slot_of[kind][stage][mb] = new
        if kind == "I":
            slots = self.gradients[rank]
            del slots[bisect_left(slots, old)]
            insort(slots, new)


def sequences_of_block(
    block: BuildingBlock, placement: list[int], microbatches: int, memory_limit: int
) -> list[list[tuple[KindName, int]]] | None:
    """rank -> the order of its (kind, stage) of F and I; None if the block does not fit this p or `memory_limit`."""
    offsets = block.offsets(max(placement) + 1)
    if offsets is None:
        return None
    grid = _unfold(offsets, placement, microbatches)
    _place_weights(grid)
    if _peak(grid) > memory_limit:
        return None
    _squeeze(grid, memory_limit)
    _hasten_end(grid)
    return [[what[:2] for _, what in sorted(row.items())] for row in grid.taken]


def _unfold(offsets: dict[tuple[KindName, int], int], placement: list[int], microbatches: int) -> _Grid:
    grid = _Grid(placement, microbatches, [{} for _ in range(max(placement) + 1)])
    for kind in ("F", "I"):
        grid.slot_of[kind] = [[0] * microbatches for _ in placement]
    for (kind, stage), offset in offsets.items():
        for mb in range(microbatches):
            grid.slot_of[kind][stage][mb] = offset + INTERVAL * mb
            grid.taken[placement[stage]][offset + INTERVAL * mb] = kind, stage, mb
    grid.gradients = [sorted(slot for slot, what in row.items() if what[0] == "I") for row in grid.taken]
    return grid


def _place_weights(grid: _Grid) -> None:
    """Place every W in the first free slot after its I."""
    grid.slot_of["W"] = []
    for rank, row in enumerate(grid.taken):
        slots: list[int] = []
        count, pending, slot = sum(1 for what in row.values() if what[0] == "I"), 0, 0
        while len(slots) < count:
            what = row.get(slot)
            if what is not None:
                pending += what[0] == "I"
            elif pending:
                row[slot] = "W", rank, len(slots)
                slots.append(slot)
                pending -= 1
            slot += 1
        grid.slot_of["W"].append(slots)


def _remove_weights(grid: _Grid) -> None:
    for row in grid.taken:
        for slot in [slot for slot, what in row.items() if what[0] == "W"]:
            del row[slot]


def _peak(grid: _Grid) -> int:
    """The most stage-micro-batches alive on a rank."""
    changes = ([(what[0] == "F") - (what[0] == "W") for _, what in sorted(row.items())] for row in grid.taken)
    return max(max(accumulate(row)) for row in changes)


def _squeeze(grid: _Grid, memory_limit: int, fixed: Fixed | None = None) -> None:
    """Move actions, in order of time, to the first free slot that data, order and memory allow; those in `fixed` stay."""
    levels: list[list[int]] = [[] for _ in grid.taken]  # rank -> slot -> alive after it, up to the last slot settled
    for slot, rank, what in grid.ordered():
        new, level = slot, levels[rank]
        if fixed is None or not fixed[0] <= (slot, rank) <= fixed[1]:
            first = grid.earliest(what)
            if what[0] == "F":
                first = _within(level, first, slot, memory_limit)
            row = grid.taken[rank]
            new = next((free for free in range(first, slot) if free not in row), slot)
        if new != slot:
            grid.move(rank, slot, new)
        _settle(level, new, (what[0] == "F") - (what[0] == "W"))


def _within(level: list[int], first: int, last: int, memory_limit: int) -> int:
    """Return the first slot from which on, until `last`, one more than `level` stays within `memory_limit`."""
    if level and len(level) < last and level[-1] >= memory_limit:
        return last
    if max(level[first:], default=0) < memory_limit:
        return first
    return next(slot + 1 for slot in reversed(range(len(level))) if level[slot] >= memory_limit)


def _settle(level: list[int], slot: int, change: int) -> None:
    """Add an action at `slot` to the level of a rank."""
    if slot >= len(level):
        level += [level[-1] if level else 0] * (slot + 1 - len(level))
    if change:
        level[slot:] = [value + change for value in level[slot:]]


def _hasten_end(grid: _Grid) -> None:
    """Move F and I after the entry of the last micro-batch into the W's slots: in the cool-down nothing else delays them."""
    entered = grid.slot_of["F"][0][-1]
    _remove_weights(grid)
    for slot, rank, what in grid.ordered():
        if slot > entered:
            new = next((s for s in range(grid.earliest(what), slot) if s not in grid.taken[rank]), slot)
            if new != slot:
                grid.move(rank, slot, new)


def _hasten_end_within(grid: _Grid) -> None:
    """As `_hasten_end`, but no rank exceeds the peak of the fullest one, with every W in the first free slot."""
    _remove_weights(grid)
    rows = [_Filled(row) for row in grid.taken]
    memory_limit = max(row.peak for row in rows)
    steady = _steady(grid)
    for slot, rank, what in grid.ordered():
        if (slot, rank) <= steady[1]:
            continue
        for new in range(grid.earliest(what), slot):
            if new not in grid.taken[rank] and rows[rank].move(slot, new, memory_limit):
                grid.move(rank, slot, new)
                break


class _Filled:
    """Memory of a rank from slot to slot while its free slots take the pending W.

    Attributes:
        kinds: slot -> "F", "I" or "" for a free slot.
        states: slot -> (stage-micro-batches alive, W pending) before it.
        peak: the most alive at once.
    """

    def __init__(self, row: dict[int, BlockSlot]) -> None:
        self.kinds = [""] * (max(row) + 1)
        for slot, what in row.items():
            self.kinds[slot] = what[0]
        self.states = [(0, 0), *self._states_after(0, (0, 0))]
        self.peak = max(alive for alive, _ in self.states)

    def _states_after(self, first: int, state: tuple[int, int]) -> Iterator[tuple[int, int]]:
        """The states after slot `first` and each that follows, from the one before it."""
        alive, pending = state
        for kind in self.kinds[first:]:
            if kind == "F":
                alive += 1
            elif kind:
                pending += 1
            elif pending:
                alive, pending = alive - 1, pending - 1
            yield alive, pending

    def move(self, old: int, new: int, memory_limit: int) -> bool:
        """Move the action at `old` to `new` if memory stays within `memory_limit`; return whether it does."""
        kinds, states = self.kinds, self.states
        kinds[new], kinds[old] = kinds[old], ""
        changed: list[tuple[int, int]] = []
        for slot, state in enumerate(self._states_after(new, states[new]), new + 1):
            if state[0] > memory_limit:
                kinds[old], kinds[new] = kinds[new], ""
                return False
            if slot > old + 1 and state == states[slot]:
                break
            changed.append(state)
        states[new + 1 : new + 1 + len(changed)] = changed
        return True


def _close_gaps(grid: _Grid) -> None:
    """Move every action as early as data allow; each rank keeps its order."""
    ends = [0] * len(grid.taken)
    rows: list[dict[int, BlockSlot]] = [{} for _ in grid.taken]
    gradients = [0] * len(grid.taken)
    for _, rank, what in grid.ordered():
        kind, stage, mb = what
        new = max(grid.earliest(what), ends[rank])
        rows[rank][new], grid.slot_of[kind][stage][mb], ends[rank] = what, new, new + 1
        if kind == "I":
            grid.gradients[rank][gradients[rank]] = new
            gradients[rank] += 1
    grid.taken = rows


def repeated_programs(
    block: BuildingBlock, placement: list[int], microbatches: int, memory_limit: int
) -> list[list[list[BlockSlot]]]:
    """Programs, rank -> its (kind, stage, micro-batch), with the block's own steady state; none if it does not fit p or
    `memory_limit`.

    Only actions before and after the steady state move to earlier slots (the paper's "squeezing"); a W takes the first free
    slot after its I. The second programs have the cool-down hastened beyond that.
    """
    offsets = block.offsets(max(placement) + 1)
    if offsets is None:
        return []
    grid = _unfold(offsets, placement, microbatches)
    _place_weights(grid)
    peak = _peak(grid)
    if peak > memory_limit:
        return []
    _squeeze(grid, peak, _steady(grid))
    _close_gaps(grid)
    squeezed = [_with_weights(row) for row in grid.taken]
    _hasten_end_within(grid)
    _place_weights(grid)
    _close_gaps(grid)
    _remove_weights(grid)
    _place_weights(grid)
    return [squeezed, [_with_weights(row) for row in grid.taken]]


def _steady(grid: _Grid) -> Fixed:
    """Return the bounds of the steady state: the first I of stage 0, and the last micro-batch's next F on its way down the V."""
    first = grid.slot_of["I"][0][0], 0
    entries = [(grid.slot_of["F"][rank][-1], rank) for rank in range(len(grid.taken))]
    return first, min((entry for entry in entries if entry > first), default=(math.inf, 0))


def _with_weights(row: dict[int, BlockSlot]) -> list[BlockSlot]:
    """A rank's actions in the order of their slots, each W that of the oldest I without one."""
    program: list[BlockSlot] = []
    pending: deque[BlockSlot] = deque()
    for _, what in sorted(row.items()):
        if what[0] == "I":
            pending.append(("W", *what[1:]))
        program.append(what if what[0] != "W" else pending.popleft())
    return program
