"""One optimizer step: the norms of its gradients, and the verdict on them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from pipeloom.parallel.grad_norm import exact_sum, global_norm
from pipeloom.runtime import Pipeline
from pipeloom.runtime.health.status import Names
from pipeloom.runtime.tied_weights import layer_of
from pipeloom.train.collect import from_every_rank, maxima
from pipeloom.train.optimizer import Optimizer


class NormRow:
    """Row of numbers that one rank sends per step: flags, then the squared norm of each gradient that it counts.

    The constructor is collective over the run: the ranks agree on one length of rows.
    """

    def __init__(self, pipeline: Pipeline, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._width = int(maxima(pipeline, [float(optimizer.counted)])[0])

    def make(self, *flags: float) -> list[float]:
        """Return the row of the step whose gradients are at hand, padded with zeros."""
        squares = self._optimizer.squares()
        return [*flags, *squares, *[0.0] * (self._width - len(squares))]


def norm_of(rows: Sequence[Sequence[float]], flags: int) -> float:
    """Return the global gradient norm from the rows of all ranks, each of which begins with `flags` flags."""
    return global_norm(square for row in rows for square in row[flags:])


@dataclass(frozen=True)
class LayerNorms:
    """Name -> norm: of gradients before clipping, and of parameters before the step. A tied weight is under its first name."""

    gradient: dict[str, float]
    parameter: dict[str, float]


def layer_norms(pipeline: Pipeline, optimizer: Optimizer, by: str) -> LayerNorms:
    """Return the norms of the present step; to be called before the optimizer's step. Collective over the run.

    Each element counts once, on whichever rank it is, so the norms do not depend on the layout, except for rounding.

    Args:
        by: the unit of a norm, "layer" or "parameter".
    """
    mine: list[dict[str, list[float]]] = []
    for gradients in (True, False):
        squares_of: dict[str, list[float]] = defaultdict(list)
        for name, square in optimizer.named_squares(gradients).items():
            stored = pipeline._stored_name(name)
            squares_of[stored if by == "parameter" else layer_of(name, pipeline.modules) or stored].append(square)
        mine.append(squares_of)
    everyone = from_every_rank(pipeline, mine, "the other ranks' norms")

    def joined(kind: int) -> dict[str, float]:
        squares_of: dict[str, list[float]] = defaultdict(list)
        for both in everyone:
            for name, squares in both[kind].items():
                squares_of[name] += squares
        return {name: math.sqrt(exact_sum(squares)) for name, squares in squares_of.items()}

    return LayerNorms(joined(0), joined(1))


# Long enough for a stable median, short enough to follow the norms down as training settles.
_WINDOW = 100
# A step counts as a spike only after this many good ones: norms fall steeply at the start.
_LEAST = 20
_SPIKE = 10.0  # times the median; norms of good steps differ by small factors


class BadSteps:
    """Judges each step by its global gradient norm; the same norms give the same verdicts on every rank.

    Args:
        on_nan: what to do about a norm that is not finite: "stop", "skip", "rollback".
        on_spike: the same for a norm above 10 times the median of the last ones; "ignore": such steps count as good.

        norms: the list that keeps the norms of up to 100 recent good steps, newest last; empty where spikes are ignored.

    Attributes:
        actions: kind of a bad step -> what to do about it.
    """

    def __init__(self, on_nan: str, on_spike: str, norms: list[float] | None = None) -> None:
        self.norms = [] if norms is None else norms
        self.actions = {"nan": on_nan, "spike": on_spike}

    def judge(self, norm: float) -> str:
        """Return `"nan"`, `"spike"`, or `""` for a good step. Its norm is added to `norms`, unless spikes are ignored."""
        if not math.isfinite(norm):
            return "nan"
        if self.actions["spike"] == "ignore":
            return ""
        if len(self.norms) >= _LEAST and norm > _SPIKE * median(self.norms):
            return "spike"
        self.norms.append(norm)
        del self.norms[:-_WINDOW]
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


@dataclass(frozen=True)
class Outcome:
    """A step that is final; the same on every rank.

    Attributes:
        loss: nats, the mean over the batch's targets, without `terms`.
        norm: the global gradient norm before clipping; if it is not finite, the step was skipped.
        rate: the learning rate.
        flags: requests received by any rank, as bits of `train.workers.context`.
        rolled_back: whether any rank rolled its step back.
        norms: those of each layer, where they are logged in this step.
        bad: "nan" for a norm that is not finite, "spike" for one far above the last ones; "": neither.
        cause: what is not finite in a step that ends the run.
        terms: key of each loss that layers add -> its mean over the batch's targets, without its weight.
    """

    loss: float
    norm: float
    rate: float
    flags: int = 0
    rolled_back: bool = False
    bad: str = ""
    norms: LayerNorms | None = None
    cause: NotFinite | None = None
    terms: Mapping[str, float] = field(default_factory=dict)

    def without_terms(self, coefficient: float) -> Outcome:
        """Return the outcome with the model's own loss: `loss` less the mean of the terms times `coefficient`."""
        terms = self.terms.values()
        return replace(self, loss=self.loss - coefficient * sum(terms) / len(terms)) if terms else self


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
    what = "the other ranks to look for what is not finite"
    everyone = from_every_rank(pipeline, firsts, what)
    if not any(everyone):
        return None
    kind, name = min((first[0] for first in everyone if first), key=lambda first: _KINDS.index(first[0]))
    state = from_every_rank(pipeline, finite[kind].get(name), what)
    names = Names(pipeline.mesh)
    bad, good = ([names.of(rank) for rank, value in enumerate(state) if value is wanted] for wanted in (False, True))
    where = {"weight": name, "loss": "the loss", "gradient": f"the gradient of {name}, summed over all replicas,"}[kind]
    others = f", and finite on {' and '.join(good[:3])}" if good else ", and no other rank has a finite one"
    words = f"{where} is not finite on {' and '.join(bad[:3])}{'' if kind == 'gradient' else others}"
    return NotFinite(words, _ADVICE[kind] if good else "")
