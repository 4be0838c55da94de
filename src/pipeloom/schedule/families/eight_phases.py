"""DualPipe's eight phases: the program of a rank with one stage that micro-batches reach early and one that they reach late."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeloom.schedule.families.layout import Coder


@dataclass(frozen=True)
class Phases:
    """Number of times that a rank repeats each phase (DeepSeek-V3, arXiv 2412.19437, section 3.2.1, and its published schedule).

    Attributes:
        outer: phases 1 (twice as often), 3, 5 and 7: F0; I1 W1 F1; B1 F1|B0; W I0.
        inner: phases 2, 6 and 8: F0 F1; B1 B0; W.
        main: phase 4: F0|B1 F1|B0.
        apart: the first F0 and B1 of phase 4 are not paired (on the rank where B1 waits for that very F0).
    """

    outer: int
    inner: int
    main: int
    apart: bool


@dataclass
class EightPhases:
    """One rank's program. Stream 0 is the stage that its micro-batches reach first, stream 1 the other.

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

    def run(self, phases: Phases) -> list[int]:
        """Return the codes of the program."""
        for _ in range(2 * phases.outer):
            self._forward(0)
        for _ in range(phases.inner):
            self._forward(0)
            self._forward(1)
        for _ in range(phases.outer):
            self._input_grad(1)
            self._weight_grad()
            self._forward(1)
        for turn in range(phases.main):
            if turn == 0 and phases.apart:
                self._forward(0)
                self._backward(1)
            else:
                self._pair(0)
            self._pair(1)
        for _ in range(phases.outer):
            self._backward(1)
            self._pair(1)
        self._last_pairs_of_backwards(phases.inner)
        for _ in range(phases.outer):
            self._weight_grad()
            self._input_grad(0)
        while self.pending:
            self._weight_grad()
        if phases.inner == 1:
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
