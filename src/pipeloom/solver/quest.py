"""What every search keeps: the best schedule so far, the bounds, and who is told of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from pipeloom.errors import CapacityError
from pipeloom.schedule import Costs, Schedule
from pipeloom.solver.budget import Budget
from pipeloom.solver.problem import EPS, Problem


@dataclass(frozen=True)
class Progress:
    """Where a search stands: the best value, the lower bound, seconds since its start, moves made."""

    value: float
    lower_bound: float
    seconds: float
    iterations: int


class Quest(ABC):
    """One search.

    Attributes:
        best: (value, origin, schedule, costs of its stages).
        bound: a value that nothing on the placements searched can beat; `bounds` has each one's.
        interrupted: whether Ctrl-C ended it.
    """

    rounding = 1e-9  # relative, within which a value is its bound

    def __init__(
        self,
        problems: Sequence[Problem],
        budget: Budget,
        random: Random,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self.problems, self.budget, self.random, self.progress = problems, budget, random, progress
        self.objective = problems[0].objective
        self.bounds = {problem: self._bound_of(problem) for problem in problems}
        self.bound = min(self.bounds.values())
        self.best: tuple[float, str, Schedule, Costs] | None = None
        self.interrupted = False

    @abstractmethod
    def _bound_of(self, problem: Problem) -> float:
        """A value that nothing on the problem's placement can beat."""

    @abstractmethod
    def _search(self) -> None:
        """Takes what it finds, to the end of the budget or the bound."""

    def go(self) -> None:
        """Runs to the end of the budget, the bound, or an interrupt that comes after a first answer.

        Raises CapacityError if no start fits the memory.
        """
        try:
            self._search()
        except KeyboardInterrupt:
            if self.best is None:
                raise
            self.interrupted = True
        if self.best is None:
            raise CapacityError(
                f"memory is {self.problems[0].room:g}; no schedule was found that fits it: give more memory or fewer chunks"
            )

    @property
    def proved(self) -> bool:
        return self.best is not None and self.best[0] <= self.bound + max(EPS, self.rounding * self.best[0])

    def _take(self, value: float, origin: str, schedule: Schedule, problem: Problem) -> None:
        if self.best is None or value < self.best[0] - EPS:
            self.best = value, origin, schedule, problem.costs
            self._tell()

    def _tell(self) -> None:
        if self.progress is not None and self.best is not None:
            self.progress(Progress(self.best[0], self.bound, self.budget.seconds, self.budget.used))
