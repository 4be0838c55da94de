"""Every error that Pipeloom raises on purpose, each with the exit code that a command ends with."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class PipeloomError(Exception):
    """Base class: a bug of ours unless a subclass says otherwise."""

    exit_code = 1


class UsageError(PipeloomError):
    """Arguments, configuration or a file that cannot be read."""

    exit_code = 2


class ConfigError(UsageError):
    """One or more impossible settings, reported together.

    Attributes:
        problems: one sentence for each setting.
    """

    def __init__(self, problems: Sequence[str] | str) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class ScheduleError(PipeloomError):
    """A schedule that is incomplete, contradictory or would deadlock."""

    exit_code = 3


class CapacityError(PipeloomError):
    """No room in memory, or no layout that fits."""

    exit_code = 4


class CheckpointError(PipeloomError):
    """A checkpoint that is missing, incomplete or damaged."""

    exit_code = 5


class DistributedError(PipeloomError):
    """A rank failed, died, stalled, or disagrees with the others."""

    exit_code = 6


class Preempted(PipeloomError):
    """Somebody asked the run to stop (SIGTERM), and it did at the end of a step."""

    exit_code = 75


def did_you_mean(word: str, candidates: Iterable[str], count: int = 3) -> str:
    """`"; did you mean 'x' or 'y'?"` for the nearest candidates, or the list of all when none is near.

    Returns an empty string when there are no candidates.
    """
    names = sorted(candidates)
    near = difflib.get_close_matches(word, names, n=count, cutoff=0.55)
    if near:
        return f"; did you mean {' or '.join(repr(name) for name in near)}?"
    return f"; known: {', '.join(names)}" if names else ""
