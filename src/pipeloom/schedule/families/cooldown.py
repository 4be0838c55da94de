"""The cool-down of any schedule, with its input gradients first and its weight gradients in its gaps."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeloom.schedule.channels import neighbours
from pipeloom.schedule.costs import Costs, durations
from pipeloom.schedule.model import Program, Schedule
from pipeloom.schedule.simulate import simulate

COOLDOWNS = ("whole", "split")
_PATIENCE = (0.0, 0.5, 1.0)
_SLACK = 1e-9


def split_cooldown(schedule: Schedule, costs: Costs | None = None) -> Schedule:
    """`schedule` with every B after a rank's last forward that another rank waits for written as I and W.

    The order of the input gradients stays, and no rank's peak of activations grows, as nothing is allocated any more. The
    last micro-batch's gradient goes back through p-1 input gradients, not p-1 backwards (what the zero-bubble paper,
    arXiv 2401.10241, does everywhere, only where no forward is left): with uniform stages, m >= p and w <= f the idle time of
    `1f1b`, `gpipe`, `interleaved` and `looped-bfs` falls from (p-1)(f+B) to (p-1)(f+b).

    A W follows its I at once, or fills the first wait that it fits, wholly or half: what is shortest at `costs` (default
    1, 1, 1, 0). Where nothing is shorter than the schedule as it is, its actions stay as they are.
    """
    chosen = costs if costs is not None else Costs()
    before, _ = neighbours(schedule)
    places = schedule.placement
    awaited = [other is not None and places[other] != places[stage] for stage, other in enumerate(before)]
    cut = [_Cut.of(schedule, rank, awaited) for rank in range(schedule.ranks)]
    timeline = simulate(replace(schedule, codes=tuple(each.late for each in cut)), chosen)
    duration = durations(schedule, chosen)
    best, least = schedule, simulate(schedule, chosen).makespan
    for patience in _PATIENCE:
        needs = [patience * each for each in duration]
        codes = tuple(
            each.fill(needs, starts, ends)
            for each, starts, ends in zip(cut, timeline.starts, timeline.ends, strict=True)
        )
        tried = replace(schedule, codes=codes)
        makespan = simulate(tried, chosen).makespan
        if makespan < least - _SLACK:
            best, least = tried, makespan
    options = dict(schedule.options) | {"cooldown": "split"}
    return replace(best, options=tuple(sorted(options.items())))


@dataclass(frozen=True)
class _Cut:
    """One rank's program, cut behind its last forward.

    Attributes:
        head: up to there.
        chain: the B and I of the rest, in order; those B that another rank waits for as I.
        owed: I -> its W, for each W of the rest, in the order of the debts. The head's come first.
    """

    head: Program
    chain: Program
    owed: dict[int, int]

    @classmethod
    def of(cls, schedule: Schedule, rank: int, awaited: Sequence[bool]) -> _Cut:
        """`awaited`: stage -> whether another rank waits for its input gradients."""
        program, stride = schedule.codes[rank], schedule.kind_stride
        last = max((at for at, code in enumerate(program) if code < stride or code >= 4 * stride), default=-1)
        chain: list[int] = []
        owed: dict[int, int] = {}
        for code in program[last + 1 :]:
            kind, place = divmod(code, stride)
            if kind == 3:
                owed.setdefault(place + 2 * stride, code)
                continue
            if kind == 1 and awaited[place // schedule.microbatches]:
                code = place + 2 * stride
            if code >= 2 * stride:
                owed.setdefault(code, place + 3 * stride)
            chain.append(code)
        return cls(program[: last + 1], tuple(chain), owed)

    @property
    def late(self) -> Program:
        """The program with every W at the end."""
        return (*self.head, *self.chain, *self.owed.values())

    def fill(self, needs: Sequence[float], starts: Sequence[float], ends: Sequence[float]) -> Program:
        """The program with each W in the first wait of the chain that has as much time as W `needs`; the others at the end.

        Args:
            needs: code -> time; 0: a W never waits.
            starts, ends: of `late`.
        """
        filled, at = list(self.head), len(self.head)
        now = ends[at - 1] if at else 0.0
        left = dict(self.owed)
        made = set(self.chain)
        ready = deque(left.pop(code) for code in self.owed if code not in made)
        for code, start, end in zip(self.chain, starts[at:], ends[at:], strict=False):
            while ready and now + needs[ready[0]] <= max(start, now) + _SLACK:
                now += needs[ready[0]]
                filled.append(ready.popleft())
            filled.append(code)
            now = end
            if code in left:
                ready.append(left[code])
        return (*filled, *ready)
