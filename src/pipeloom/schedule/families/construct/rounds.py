"""Programs that grow round by round: the ranks' clocks, idle times, memory and weight gradients to come."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from pipeloom.schedule.actions import KindName
from pipeloom.schedule.costs import Costs, StageCosts
from pipeloom.schedule.families.construct.layout import Planned


class RoundConstruction:
    """Ranks that run one action after the other, each once its input has arrived, on a route through all stages in order.

    Attributes:
        ends: kind -> stage -> the ends of its actions.
        idle: rank -> the sum of its waits behind its first action.
        memory: rank -> in the units of `Costs.activation`.
        pending: rank -> the stages of its input gradients without their W, oldest first.
        programs: rank -> its (kind, stage, micro-batch).
    """

    def __init__(self, placement: Sequence[int], microbatches: int, costs: Costs, memory_limit: float) -> None:
        stages, ranks = len(placement), max(placement) + 1
        self.placement, self.microbatches, self.costs, self.memory_limit = placement, microbatches, costs, memory_limit
        self.time = StageCosts(costs, stages).by_letter("FIW")
        self.activation, self.held = (costs.per_stage(name, stages) for name in ("activation", "held"))
        sizes = [*zip(self.activation, self.held, strict=True)]
        self.change = {
            "F": self.activation,
            "I": [(late - 1.0) * size for size, late in sizes],
            "W": [-late * size for size, late in sizes],
        }
        self.ends: dict[KindName, list[list[float]]] = {kind: [[] for _ in placement] for kind in "FIW"}
        self.clock, self.idle, self.memory = [0.0] * ranks, [0.0] * ranks, [0.0] * ranks
        self.pending: list[deque[int]] = [deque() for _ in range(ranks)]
        self.programs: list[list[Planned]] = [[] for _ in range(ranks)]

    def done(self, kind: KindName, stage: int) -> int:
        """Return how many of this kind the stage has run."""
        return len(self.ends[kind][stage])

    def arrival(self, kind: KindName, stage: int) -> float | None:
        """Return when the input of the next F or I arrives from another rank; 0 if it needs none, None if not known yet."""
        origin, place = stage - 1 if kind == "F" else stage + 1, self.placement
        if not 0 <= origin < len(place) or place[origin] == place[stage]:
            return 0.0
        sent, index = self.ends[kind][origin], len(self.ends[kind][stage])
        return sent[index] + self.costs.hop(place[origin], place[stage]) if index < len(sent) else None

    def put(self, kind: KindName, stage: int) -> None:
        """Run the next `kind` of the stage."""
        rank, ends = self.placement[stage], self.ends[kind][stage]
        clock, program = self.clock[rank], self.programs[rank]
        start = clock if kind == "W" else max(clock, self.arrival(kind, stage) or 0.0)
        if program:
            self.idle[rank] += start - clock
        program.append((kind, stage, len(ends)))
        self.clock[rank] = end = start + self.time[kind][stage]
        ends.append(end)
        self.memory[rank] += self.change[kind][stage]
        if kind == "I":
            self.pending[rank].append(stage)

    def put_weight(self, rank: int) -> None:
        """Run the oldest pending weight gradient."""
        self.put("W", self.pending[rank].popleft())
