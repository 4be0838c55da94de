"""Steps whose gradient must not be used: it is not finite, or far larger than those before."""

from __future__ import annotations

import math
from statistics import median

# Long enough for a stable median, short enough to follow the norms down as training settles.
_WINDOW = 100
# A step counts as a spike only after this many good ones: norms fall steeply at the start.
_LEAST = 20
_SPIKE = 10.0


class BadSteps:
    """Judges each step by its global gradient norm; the same norms give the same verdicts on every rank.

    Args:
        on_nan: what to do about a norm that is not finite: "stop", "skip", "rollback".
        on_spike: the same for a norm above 10 times the median of the last ones; "ignore": such steps count as good.

    Attributes:
        norms: norms of up to 100 recent good steps, newest last; empty where spikes are ignored. Part of a checkpoint.
    """

    def __init__(self, on_nan: str, on_spike: str) -> None:
        self.norms: list[float] = []
        self._actions = {"nan": on_nan, "spike": on_spike}

    def action(self, kind: str) -> str:
        """Return the configured action for a bad step of this kind ("nan" or "spike")."""
        return self._actions[kind]

    def judge(self, norm: float) -> str:
        """Return `"nan"`, `"spike"`, or `""` for a good step. Its norm is added to `norms`, unless spikes are ignored."""
        if not math.isfinite(norm):
            return "nan"
        if self._actions["spike"] == "ignore":
            return ""
        if len(self.norms) >= _LEAST and norm > _SPIKE * median(self.norms):
            return "spike"
        self.norms = [*self.norms, norm][-_WINDOW:]
        return ""
