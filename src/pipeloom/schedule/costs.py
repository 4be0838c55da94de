"""Costs: how long a stage's actions take, how long a hop takes, and what a micro-batch keeps in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

from pipeloom.errors import UsageError
from pipeloom.schedule.model import Schedule

PerStage = float | tuple[float, ...]
PerLink = float | tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Costs:
    """Times of one micro-batch, in any one unit; a number for every stage, or a tuple with one value a stage.

    Attributes:
        forward: F.
        input_grad: I, the gradient of a stage's input.
        weight_grad: W, the gradient of its weights; B costs I + W.
        p2p: latency of a hop between two ranks; a number, or `p2p[source][destination]`. A hop within a rank is free.
        message: size of a boundary's tensors, in the unit that `bandwidth` counts.
        bandwidth: of a link; a message takes p2p + message / bandwidth.
        activation: memory that one micro-batch's F allocates on the stage.
        held: the share of it that stays from I until W (B frees all of it).
        all_to_all: the share of F and of I that is communication (expert all-to-all); a pair overlaps it with computation.
        pair: time of a pair F|B, by the stage of its forward; None: as `PairTimes` has it from `all_to_all`.

    Raises:
        UsageError: a negative or not finite value.
    """

    forward: PerStage = 1.0
    input_grad: PerStage = 1.0
    weight_grad: PerStage = 1.0
    p2p: PerLink = 0.0
    message: float = 0.0
    bandwidth: float = math.inf
    activation: PerStage = 1.0
    held: PerStage = 1.0
    all_to_all: PerStage = 0.0
    pair: PerStage | None = None

    def __post_init__(self) -> None:
        for spec in fields(self):
            value = getattr(self, spec.name)
            if value is None:
                continue
            if isinstance(value, list):
                value = tuple(tuple(row) if isinstance(row, list) else row for row in value)
                object.__setattr__(self, spec.name, value)
            for number in _numbers(value):
                finite = math.isfinite(number) or (spec.name == "bandwidth" and number == math.inf)
                if not finite or number < 0:
                    option = spec.name.replace("_", "-")
                    raise UsageError(f"{option} is {number}; a cost is a finite number of at least 0")
        if self.bandwidth == 0:
            raise UsageError("bandwidth is 0; it must be above 0")
        for name in ("held", "all_to_all"):
            if any(share > 1 for share in _numbers(getattr(self, name))):
                option = name.replace("_", "-")
                raise UsageError(f"{option} is {getattr(self, name)}; it is a share between 0 and 1")

    def scaled(self, factor: float) -> Costs:
        """These costs with F, I, W, the pair and the activation multiplied by `factor` (numbers and tuples alike)."""

        def times(value: PerStage) -> PerStage:
            return tuple(v * factor for v in value) if isinstance(value, tuple) else value * factor

        return replace(
            self,
            forward=times(self.forward),
            input_grad=times(self.input_grad),
            weight_grad=times(self.weight_grad),
            activation=times(self.activation),
            pair=None if self.pair is None else times(self.pair),
        )

    def per_stage(self, name: str, stages: int) -> tuple[float, ...]:
        """The value called `name` as one number a stage; raises UsageError when there is not one for each."""
        value = getattr(self, name)
        if not isinstance(value, tuple):
            return (float(value),) * stages
        if len(value) != stages:
            option = name.replace("_", "-")
            raise UsageError(
                f"{option} has {len(value)} values and the schedule {stages} stages: give one number or {stages}"
            )
        return tuple(map(float, value))

    def hop(self, source: int, destination: int) -> float:
        """Time from the end of an action on rank `source` to the arrival of its message on rank `destination`."""
        if source == destination:
            return 0.0
        latency = self.p2p[source][destination] if isinstance(self.p2p, tuple) else self.p2p
        return latency + self.message / self.bandwidth

    def check_links(self, ranks: int) -> None:
        """Raises UsageError when `p2p` is a matrix of another size."""
        if isinstance(self.p2p, tuple) and (len(self.p2p) != ranks or any(len(row) != ranks for row in self.p2p)):
            raise UsageError(f"p2p is not a {ranks} x {ranks} matrix, and the schedule has {ranks} ranks")


@dataclass(frozen=True)
class StageCosts:
    """Costs spread over the stages of one schedule: what the simulator and the bounds read."""

    forward: tuple[float, ...]
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]
    backward: tuple[float, ...]

    @classmethod
    def of(cls, costs: Costs, stages: int) -> StageCosts:
        forward, input_grad, weight_grad = (
            costs.per_stage(name, stages) for name in ("forward", "input_grad", "weight_grad")
        )
        backward = tuple(i + w for i, w in zip(input_grad, weight_grad, strict=True))
        return cls(forward, input_grad, weight_grad, backward)


@dataclass(frozen=True)
class PairTimes:
    """How long an overlapped pair takes.

    Its computation adds and its communication adds, and it takes the longer of the two sums. With a forward of stage s and a
    backward of stage t, and x the stages' shares of all-to-all:

        max((1 - x_s) F_s + (1 - x_t) I_t + W_t, x_s F_s + x_t I_t)        F|I: the same without W_t

    With no all-to-all declared: F + B. A given `Costs.pair` replaces F|B, and for F|I loses W_t (at least F_s stays).
    """

    spread: StageCosts
    share: tuple[float, ...]
    given: tuple[float, ...] | None

    @classmethod
    def of(cls, costs: Costs, stages: int) -> PairTimes:
        given = costs.per_stage("pair", stages) if costs.pair is not None else None
        return cls(StageCosts.of(costs, stages), costs.per_stage("all_to_all", stages), given)

    def time(self, forward: int, backward: int, split: bool) -> float:
        """Of a pair with these stages; `split`: its backward is an I."""
        spread, x, y = self.spread, self.share[forward], self.share[backward]
        weight = spread.weight_grad[backward]
        if self.given is not None:
            least = spread.forward[forward]
            return max(least, self.given[forward] - weight) if split else self.given[forward]
        talk = x * spread.forward[forward] + y * spread.input_grad[backward]
        if talk == 0:
            return spread.forward[forward] + (spread.input_grad if split else spread.backward)[backward]
        compute = (1 - x) * spread.forward[forward] + (1 - y) * spread.input_grad[backward]
        return max(compute + (0.0 if split else weight), talk)


def durations(schedule: Schedule, costs: Costs) -> list[float]:
    """code -> time of that action (no pairs), length 4 S m."""
    spread = StageCosts.of(costs, schedule.stages)
    times: list[float] = []
    for values in (spread.forward, spread.backward, spread.input_grad, spread.weight_grad):
        for value in values:
            times.extend([value] * schedule.microbatches)
    return times


def _numbers(value: float | Sequence[float] | Sequence[Sequence[float]]) -> Iterator[float]:
    if isinstance(value, (int, float)):
        yield float(value)
    else:
        for item in value:
            yield from _numbers(item)
