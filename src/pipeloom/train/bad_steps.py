"""Steps whose gradient must not be used: it is not finite, or far larger than those before."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from pipeloom.parallel.exchange import all_gather_json
from pipeloom.runtime.health.status import Names

if TYPE_CHECKING:
    from pipeloom.runtime import Pipeline
    from pipeloom.train.optimizer import Optimizer

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


@dataclass(frozen=True)
class NotFinite:
    """The first thing in a step that is not finite: a weight, else a share of the loss, else a summed gradient.

    Attributes:
        words: what it is, and which ranks have it, for a message.
        advice: what to do about it, if the same weight, or the loss of another replica, is finite; "" otherwise.
    """

    words: str
    advice: str


_KINDS = ("weight", "loss", "gradient")  # a weight that is not finite makes the loss so, and that all gradients
_ADVICE = {
    "weight": "replicas should hold the same bits, so memory, a message or a kernel is at fault: start again from the newest "
    "checkpoint",
    "loss": "the data of that replica, or a fault of its memory or of a kernel, is the likely cause: look at its batch, or set "
    'train.on_nan = "skip" or "rollback"',
    "gradient": "",
}


def first_not_finite(pipeline: Pipeline, optimizer: Optimizer) -> NotFinite | None:
    """Return what is not finite after a pipeline's step, while its gradients are at hand; collective over the run.

    None: nothing is.
    """
    weights = {name: bool(parameter.isfinite().all()) for name, parameter in pipeline.named_parameters()}
    share = pipeline.loss_share
    gradients = {name: math.isfinite(square) for name, square in optimizer.named_squares(gradients=True).items()}
    finite = {"weight": weights, "loss": {} if share is None else {"": bool(share.isfinite())}, "gradient": gradients}
    firsts = [[kind, name] for kind in _KINDS for name, good in finite[kind].items() if not good][:1]
    everyone = _exchange(pipeline, firsts)
    if not any(everyone):
        return None
    kind, name = min((first[0] for first in everyone if first), key=lambda first: _KINDS.index(first[0]))
    state = _exchange(pipeline, finite[kind].get(name))
    names = Names(pipeline.mesh)
    bad, good = ([names.of(rank) for rank, value in enumerate(state) if value is wanted] for wanted in (False, True))
    what = {"weight": name, "loss": "the loss", "gradient": f"the gradient of {name}, summed over all replicas,"}[kind]
    others = f", and finite on {' and '.join(good[:3])}" if good else ", and no other rank has a finite one"
    words = f"{what} is not finite on {' and '.join(bad[:3])}{'' if kind == 'gradient' else others}"
    return NotFinite(words, _ADVICE[kind] if good else "")


def _exchange(pipeline: Pipeline, value: object) -> list[Any]:
    if pipeline.mesh.everyone.size == 1:
        return [value]
    with pipeline.waiting("the other ranks to look for what is not finite"):
        return all_gather_json(value, pipeline.run_control)
