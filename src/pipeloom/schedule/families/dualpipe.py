"""DualPipe (DeepSeek-V3, arXiv 2412.19437, section 3.2.1), and DualPipeV, its half (Sea AI Lab and DeepSeek, 2025)."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeloom.errors import UsageError
from pipeloom.schedule.families.construct.layout import Coder, family, require_even, require_sizes
from pipeloom.schedule.model import Schedule
from pipeloom.schedule.placement import vee


@family("dualpipe", order=140)
def dualpipe(ranks: int, microbatches: int) -> Schedule:
    """Micro-batches enter from both ends: two routes, two replicas of each stage, overlapped pairs, split backward.

    Rank r holds stage r of route 0 and stage 2p-1-r, the replica p-1-r, of route 1; the first half of the micro-batches goes
    down, the second up. Idle of the worst rank with uniform stages: (p/2-1)(F&B + B - 3w), exact at f = b. Peak activations:
    p+1 on every rank; parameters twice. Needs even p, and even m of at least 2p.

    Raises:
        UsageError: p or m is not valid, with the nearest valid one.
    """
    require_sizes(ranks=ranks, microbatches=microbatches)
    require_even("dualpipe", ranks)
    if microbatches < 2 * ranks or microbatches % 2:
        nearest = f"{2 * ranks}" if microbatches < 2 * ranks else f"{microbatches - 1} or {microbatches + 1}"
        raise UsageError(
            f"dualpipe at {ranks} ranks needs an even number of at least {2 * ranks} micro-batches, not {microbatches}; "
            f"nearest: {nearest}"
        )
    half, stages = microbatches // 2, 2 * ranks
    code = Coder(stages, microbatches)
    down, up = list(range(half)), list(range(half, microbatches))
    programs = []
    for rank in range(ranks):
        from_end = min(rank, ranks - 1 - rank)
        outer, inner = ranks // 2 - from_end - 1, from_end + 1
        first_half = rank < ranks // 2
        held = (rank, stages - 1 - rank)
        one = EightPhases(code, held if first_half else held[::-1], (down, up) if first_half else (up, down))
        programs.append(one.run(outer, inner, half - ranks + inner, apart=outer == 0))
    return Schedule.of(
        programs,
        placement=[*range(ranks), *reversed(range(ranks))],
        microbatches=microbatches,
        name="dualpipe",
        routes=[range(ranks), range(ranks, stages)],
        route_of=[0] * half + [1] * half,
    )


@family("dualpipev", placement="vee", order=150)
def dualpipev(ranks: int, microbatches: int) -> Schedule:
    """DualPipe's phases on a V placement: stages r and 2p-1-r on rank r, one route, no replicas.

    Idle of the worst rank with uniform stages: (p-1)(F&B + B - 3w) in stage units, exact at f = b. Peak activations: 2p+1 on
    every rank (p + 1/2 full-rank). Needs m >= 2p.

    Raises:
        UsageError: m < 2p, with the nearest valid one.
    """
    require_sizes(ranks=ranks, microbatches=microbatches)
    if microbatches < 2 * ranks:
        raise UsageError(
            f"dualpipev at {ranks} ranks needs at least {2 * ranks} micro-batches, not {microbatches}; nearest: {2 * ranks}"
        )
    code = Coder(2 * ranks, microbatches)
    jobs = list(range(microbatches))
    programs = []
    for rank in range(ranks):
        outer, inner = ranks - rank - 1, rank + 1
        one = EightPhases(code, (rank, 2 * ranks - 1 - rank), (jobs, jobs))
        programs.append(one.run(outer, inner, microbatches - 2 * ranks + inner, apart=outer == 0))
    return Schedule.of(programs, placement=vee(ranks), microbatches=microbatches, name="dualpipev")


@dataclass
class EightPhases:
    """DualPipe's eight phases on one rank (DeepSeek-V3, section 3.2.1, and its published schedule).

    Stream 0 is the stage that its micro-batches reach first, stream 1 the other.

    Attributes:
        code: the encoder of actions as integers.
        stages: stream -> stage.
        jobs: stream -> its micro-batches, in order.
    """

    code: Coder
    stages: tuple[int, int]
    jobs: tuple[list[int], list[int]]
    program: list[int] = field(default_factory=list)
    forwards: list[int] = field(default_factory=lambda: [0, 0])
    backwards: list[int] = field(default_factory=lambda: [0, 0])
    pending: list[int] = field(default_factory=list)

    def run(self, outer: int, inner: int, main: int, apart: bool) -> list[int]:
        """Return the codes of the program, from how often a rank repeats each phase.

        Args:
            outer: phases 1 (twice as often), 3, 5 and 7: F0; I1 W1 F1; B1 F1|B0; W I0.
            inner: phases 2, 6 and 8: F0 F1; B1 B0; W.
            main: phase 4: F0|B1 F1|B0.
            apart: the first F0 and B1 of phase 4 are not paired (on the rank where B1 waits for that very F0).
        """
        for _ in range(2 * outer):
            self._forward(0)
        for _ in range(inner):
            self._forward(0)
            self._forward(1)
        for _ in range(outer):
            self._input_grad(1)
            self._weight_grad()
            self._forward(1)
        for turn in range(main):
            if turn == 0 and apart:
                self._forward(0)
                self._backward(1)
            else:
                self._pair(0)
            self._pair(1)
        for _ in range(outer):
            self._backward(1)
            self._pair(1)
        self._last_pairs_of_backwards(inner)
        for _ in range(outer):
            self._weight_grad()
            self._input_grad(0)
        while self.pending:
            self._weight_grad()
        if inner == 1:
            self._join_where_none_waits()
        return self.program

    def _join_where_none_waits(self) -> None:
        """Join I and a W right after it into B on a route's first stage: no rank waits for that I, and autograd runs B faster."""
        microbatches, stage = self.jobs[0], self.stages[0]
        wholes = {(self.code.i(stage, mb), self.code.w(stage, mb)): self.code.b(stage, mb) for mb in microbatches}
        joined: list[int] = []
        for code in self.program:
            whole = wholes.get((joined[-1], code)) if joined else None
            if whole is None:
                joined.append(code)
            else:
                joined[-1] = whole
        self.program = joined

    def _last_pairs_of_backwards(self, count: int) -> None:
        """Phase 6: B1 B0 in turn; from the middle on only the input gradients, the weight gradients wait for the end."""
        for turn in range(2 * count):
            stream = 1 - turn % 2
            (self._input_grad if turn >= count else self._backward)(stream)

    def _next(self, counter: list[int], stream: int) -> tuple[int, int]:
        microbatch = self.jobs[stream][counter[stream]]
        counter[stream] += 1
        return self.stages[stream], microbatch

    def _forward(self, stream: int) -> None:
        self.program.append(self.code.f(*self._next(self.forwards, stream)))

    def _backward(self, stream: int) -> None:
        self.program.append(self.code.b(*self._next(self.backwards, stream)))

    def _pair(self, stream: int) -> None:
        """The forward of `stream` with the backward of the other."""
        forward = self.code.f(*self._next(self.forwards, stream))
        self.program.append(self.code.pair(forward, self.code.b(*self._next(self.backwards, 1 - stream))))

    def _input_grad(self, stream: int) -> None:
        place = self._next(self.backwards, stream)
        self.program.append(self.code.i(*place))
        self.pending.append(self.code.w(*place))

    def _weight_grad(self) -> None:
        self.program.append(self.pending.pop(0))
