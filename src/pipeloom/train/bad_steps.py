"""Steps whose gradient is not to be used: not finite, or far larger than those before."""

from __future__ import annotations

import math
from statistics import median

# Long enough for a stable median, short enough to follow the norms down as training settles.
_WINDOW = 100
# Before so many steps nothing is called a spike: norms fall steeply at the start.
_LEAST = 20
_SPIKE = 10.0


class BadSteps:
    """Judges each step by its global gradient norm; the same norms give the same verdicts on every rank.

    Args:
        on_nan: what to do about a norm that is not finite: "stop", "skip", "rollback".
        on_spike: the same for a norm above 10 times the median of the last ones; "ignore": nothing.

    Attributes:
        norms: of the last steps that were good, newest last; part of a checkpoint.
    """

    def __init__(self, on_nan: str, on_spike: str) -> None:
        self.norms: list[float] = []
        self._actions = {"nan": on_nan, "spike": on_spike}

    def action(self, kind: str) -> str:
        """Return what is done about a step of this kind."""
        return self._actions[kind]

    def judge(self, norm: float) -> str:
        """`"nan"`, `"spike"`, or `""` for a good step, whose norm is remembered."""
        if not math.isfinite(norm):
            return "nan"
        if self._actions["spike"] == "ignore":
            return ""
        if len(self.norms) >= _LEAST and norm > _SPIKE * median(self.norms):
            return "spike"
        self.norms = [*self.norms, norm][-_WINDOW:]
        return ""
