"""Costs: times of a stage's actions and of hops, and the memory that a micro-batch keeps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from numbers import Real
from operator import add, mul
from typing import TYPE_CHECKING, Any, Literal, get_args

from pipeloom.errors import ArgumentError, CapacityError, UsageError, did_you_mean
from pipeloom.foreign import LARGEST_NUMBER
from pipeloom.limits import number as digits
from pipeloom.schedule.actions import COMPUTE, GRADS, KEPT, OUTPUT, PARAMS, PENDING, SAVED, kind_of, together, whole_of
from pipeloom.schedule.model import Schedule

LARGEST_COST = LARGEST_NUMBER  # with larger ones every schedule would seem to deadlock
LARGEST_SIZE = 1e18  # of memory and messages, an exabyte: rounding in sums of larger ones would show in the peaks
_LEAST_RATE = 1e-30  # the largest size takes less than the largest cost at it
TIME_TOLERANCE = 1e-9
"""Times and amounts of memory that differ by less count as equal: rounding makes sums depend on their order."""

DEVICE, HOST_MEMORY = "device", "host"
"""The pools of a rank's device and of its host's memory; pools are where bytes are."""

Sends = Literal["free", "rendezvous", "coupled"]
SENDS: tuple[Sends, ...] = get_args(Sends)

PerStage = float | tuple[float, ...]
PerLink = float | tuple[tuple[float, ...], ...]
PerPair = PerStage | tuple[tuple[float, ...], ...]

STAGE_TIME, STAGE_SIZE, STAGE_SHARE = "time of a stage", "size of a stage", "share of a stage"
"""Contents of those fields of `Costs` that belong to stages of layers."""

_TIME, _RATE = "time", "rate"

_PER_STAGE = (0, 1), "a number, or a tuple with one number for each stage"
_PER_PAIR = (0, 1, 2), f"{_PER_STAGE[1]}, or a matrix {{}}[stage of forward][stage of backward]"
_NUMBER = (0,), "a number"


def _cost(default: Any, holds: str = "", form: tuple[tuple[Any, ...], str] = _PER_STAGE, named: bool = False) -> Any:
    """A field of `Costs`; `form`: the depths of its values, and these in words; `named`: of {name: value}."""
    return field(default=default, metadata={"holds": holds, "form": form, "named": named})


def _tuple_of(each: str) -> tuple[tuple[int, ...], str]:
    return (1,), f"a tuple with one number for each {each}"


@dataclass(frozen=True)
class Costs:
    """Times of one micro-batch, in any one unit; a number for every stage, or a tuple with one value per stage.

    Attributes:
        forward: F.
        input_grad: I, the gradient of a stage's input.
        weight_grad: W, the gradient of its weights; B costs I + W.
        p2p: latency of a hop (a message between two ranks): a number, or `p2p[source][destination]`. A hop within a rank is free.
        message: size of the tensors sent between two stages, in the unit of `bandwidth`; drawings show it as bytes.
        bandwidth: of a link; a message takes p2p + message / bandwidth.
        activation: memory that one micro-batch's F allocates on the stage. A pair whose halves run in turns frees memory segment
            by segment while it allocates, and needs no more than before or after it (`PairTimes.overlaps`).
        held: what is kept from I until W, as a share of `activation` (B frees all of it); above 1 where the gradients that W
            needs are larger than what I frees.
        kept: the share of `activation` that is held from F until R where a stage is recomputed: its input.
        all_to_all: the share of F and of I that is communication (expert all-to-all); a pair overlaps it with computation.
        pair: time of a pair F|B: a number, one per stage of the forward, or `pair[stage of forward][stage of backward]`; None:
            computed from `all_to_all` (`PairTimes`).
        pair_split: the same for a pair F|I; None: the time of F|B minus W.
        backward: time of a B alone, for instance of one in which W hides I's all-to-all; None: I + W.
        recompute: time of R; None: F. The block (R;B) takes R + B.
        gather: time of UNSHARD; None: bytes["params"] / collective_bandwidth.
        reduce: time of REDUCE_GRAD; None: bytes["grads"] / collective_bandwidth.
        scores: time of S on a stage with a share of the vocabulary.
        scores_grad: time of T there.
        broadcast: time of BROADCAST.
        combine: time of each of REDUCE, REDUCE_SUM and REDUCE_INPUT.
        parts: {part: time of R of this part (`2R0:norms`), as a number or one per stage}; default for each: that of R, or a k-th
            of it for one of k equal parts (`2R0:1/4`).
        microbatch: factors by micro-batch (sequences of different lengths) on F, I, W, B, the activation and the message;
            empty: 1 for all. A given pair's gain is multiplied by the smaller of its two factors.
        slice_times: in a schedule with slices, each slice's share of a micro-batch's times; empty: equal shares.
        slice_sizes: each slice's share of a micro-batch's tokens: of the activation, the bytes and the message; empty: equal.
        tensors: sizes of named tensors, {name: size}, in the unit of `message`; default for each: `message`.
        bytes: {name: bytes, as a number or one per stage}. Of a stage and micro-batch: `"saved"`, `"kept"`, `"pending"` and the
            values that registered kinds make; `"layer"`: the most that one layer saves, which a block (R;B) holds;
            `"forward"`: the most that a forward that saves nothing holds while it runs; `"backward"` and `"input_grad"`: what a B
            and an I hold besides while they run; `"slice_grads"`: gradients of the keys and values of all slices, which later
            slices add to. A part is `"saved:norms"`; one without a
            size has the share that its name says (`1/4`), or 0. Parts that are recomputed together are `"saved:mlp+norms"`
            (default: their sum): what one makes may be another's argument, which is held. Any other name, such as `"params"`,
            `"grads"` or `"optimizer"`, is there for the whole step; but `"params"` of a stage only while they are gathered if it
            gathers them, `"grads"` until they are reduced if a REDUCE_GRAD of it says when, `"new_grads"` from the end of its
            first B or W on, and `"end_sums"` once its rank's last action has ended.
        pools: {name: pool} of the bytes that are not in the pool "device".
        host_bandwidth: of the copies O and L to host memory and back, each way: a copy takes bytes["saved"] / host_bandwidth, or
            without bytes the part of `activation` beyond `kept` / host_bandwidth; OKEPT and LKEPT the same of what is kept.
        collective_bandwidth: of gathers and sums over the replicas, in bytes of the whole parameters or gradients of a stage.
        host_links: rank -> the number of its link to the host, such as (0, 0, 1, 1) for two switches; empty: each has its own.
            Copies on one link at the same time, in the same direction, slow each other down.
        beside: how many times as long a copy takes beside another one on its link: each further one adds beside - 1. 2: they
            divide the link's bandwidth; 1: they do not notice each other.
        sends: `"free"`: a sender goes on at once. `"rendezvous"`: it goes on once the receiver has posted the receive, which is
            before the computation that needs the message, and the message travels from then on. `"coupled"`: the messages that a
            rank sends from one computation and receives for the next are one call, which holds both ends of each of them from
            when the later one reaches its call until the message has travelled (docs/other_systems.md).

    Raises:
        UsageError: a value that is negative, not finite, or of a shape that its field does not accept.
    """

    forward: PerStage = _cost(1.0, STAGE_TIME)
    input_grad: PerStage = _cost(1.0, STAGE_TIME)
    weight_grad: PerStage = _cost(1.0, STAGE_TIME)
    p2p: PerLink = _cost(0.0, _TIME, ((0, 2), "a number, or a matrix p2p[source][destination]"))
    message: float = _cost(0.0, form=_NUMBER)
    bandwidth: float = _cost(math.inf, _RATE, _NUMBER)
    activation: PerStage = _cost(1.0, STAGE_SIZE)
    held: PerStage = _cost(1.0, STAGE_SHARE)
    kept: PerStage = _cost(0.0, STAGE_SHARE)
    all_to_all: PerStage = _cost(0.0, STAGE_SHARE)
    pair: PerPair | None = _cost(None, STAGE_TIME, _PER_PAIR)
    pair_split: PerPair | None = _cost(None, STAGE_TIME, _PER_PAIR)
    backward: PerStage | None = _cost(None, STAGE_TIME)
    recompute: PerStage | None = _cost(None, STAGE_TIME)
    gather: PerStage | None = _cost(None, STAGE_TIME)
    reduce: PerStage | None = _cost(None, STAGE_TIME)
    scores: PerStage = _cost(0.5, _TIME)
    scores_grad: PerStage = _cost(0.5, _TIME)
    broadcast: PerStage = _cost(0.0, _TIME)
    combine: PerStage = _cost(0.0, _TIME)
    parts: Mapping[str, PerStage] | tuple[tuple[str, PerStage], ...] = _cost((), STAGE_TIME, named=True)
    microbatch: tuple[float, ...] = _cost((), form=_tuple_of("micro-batch"))
    slice_times: tuple[float, ...] = _cost((), form=_tuple_of("slice"))
    slice_sizes: tuple[float, ...] = _cost((), form=_tuple_of("slice"))
    tensors: Mapping[str, float] | tuple[tuple[str, float], ...] = _cost((), form=_NUMBER, named=True)
    bytes: Mapping[str, PerStage] | tuple[tuple[str, PerStage], ...] = _cost((), STAGE_SIZE, named=True)
    pools: Mapping[str, str] | tuple[tuple[str, str], ...] = _cost((), form=((None,), "the name of a pool"), named=True)
    host_bandwidth: float = _cost(math.inf, _RATE, _NUMBER)
    collective_bandwidth: float = _cost(math.inf, _RATE, _NUMBER)
    host_links: tuple[float, ...] = _cost((), form=_tuple_of("rank"))
    beside: float = _cost(2.0, form=_NUMBER)
    sends: Sends = _cost("free", form=((None,), f"one of {', '.join(SENDS)}"))

    def __post_init__(self) -> None:
        for spec in fields(self):
            value, (holds, (depths, words), named) = getattr(self, spec.name), spec.metadata.values()
            if value is None and spec.default is None:
                continue
            value = _pairs(spec.name, value) if named else _plain_tuples(value)
            object.__setattr__(self, spec.name, value)
            for key, each in value if named else (("", value),):
                name = _item(spec.name, key) if named else spec.name
                if _depth(each) not in depths or (None in depths and not _is_name(each)):
                    raise ArgumentError(name, f" is {each!r:.200}; it must be {words.format(name)}")
                most = LARGEST_COST if holds in (_TIME, STAGE_TIME, _RATE) else LARGEST_SIZE
                for number in _numbers(each):
                    if not number >= 0 or (number == math.inf and holds != _RATE):
                        raise ArgumentError(name, f" is {number}; a cost is a finite number of at least 0")
                    if most < number < math.inf:
                        raise ArgumentError(name, f" is {digits(number)}; the largest cost is {most:g}")
            if holds == _RATE and value < _LEAST_RATE:  # type: ignore[operator]  # a number
                raise ArgumentError(spec.name, f" is {value:g}; it must be above {0 if value == 0 else _LEAST_RATE:g}")
        if self.beside < 1:
            raise ArgumentError("beside", f" is {self.beside:g}; a copy beside another takes at least 1 times as long")
        if self.sends not in SENDS:
            raise ArgumentError("sends", f" is {self.sends!r:.200}{did_you_mean(self.sends, SENDS)}")
        self._require_shares()

    def _require_shares(self) -> None:
        for name in ("slice_times", "slice_sizes"):
            shares = getattr(self, name)
            if shares and abs(sum(shares) - 1) > 1e-6:
                raise ArgumentError(name, f" is {shares!r:.200}; shares add up to 1")
        for name in ("kept", "all_to_all"):
            if any(share > 1 for share in _numbers(getattr(self, name))):
                raise ArgumentError(name, f" is {getattr(self, name)!r:.200}; it is a share between 0 and 1")

    def scaled(self, factor: float) -> Costs:
        """Return these costs with every time multiplied by `factor`, as in another unit or at another speed; sizes stay."""
        slower = {spec.name: getattr(self, spec.name) / factor for spec in self._fields(_RATE)}
        return replace(self.changed(_times(factor), STAGE_TIME, _TIME), **slower)

    def resized(self, factor: float) -> Costs:
        """Return the costs of stages `factor` times as large: their times, activations and bytes; not S, T, hops and messages."""
        return self.changed(_times(factor), STAGE_TIME, STAGE_SIZE)

    def even(self, factor: float) -> Costs:
        """Return the costs of micro-batches or slices that are all alike, `factor` times as large, messages too."""
        alike = replace(self, message=self.message * factor, microbatch=(), slice_times=(), slice_sizes=())
        return alike.resized(factor)

    def changed(self, change: Callable[[str, Any], Any], *contents: str) -> Costs:
        """Return these costs with `change(name, value)` for each value given in the fields with these contents.

        Args:
            change: of a value by name, `name` is that of the field and its own: `parts['norms']`.
            contents: STAGE_TIME, STAGE_SIZE and STAGE_SHARE; all that belongs to stages of layers if there are none.
        """
        values: dict[str, Any] = {}
        for spec in self._fields(*(contents or (STAGE_TIME, STAGE_SIZE, STAGE_SHARE))):
            value = getattr(self, spec.name)
            if spec.metadata["named"]:
                values[spec.name] = {key: change(_item(spec.name, key), each) for key, each in value}
            elif value is not None:
                values[spec.name] = change(spec.name, value)
        return replace(self, **values)

    @classmethod
    def _fields(cls, *contents: str) -> list[Field[Any]]:
        return [spec for spec in fields(cls) if spec.metadata["holds"] in contents]

    def stage_times(self, *more: str) -> list[str]:
        """Return the names of the times of a stage of layers, or with `more` contents, that are given; not of pairs and parts."""
        plain = [spec for spec in self._fields(STAGE_TIME, *more) if not spec.metadata["named"]]
        alone = (spec.name for spec in plain if spec.metadata["form"] == _PER_STAGE)
        return [name for name in alone if getattr(self, name) is not None]

    def per_stage(self, name: str, stages: int) -> tuple[float, ...]:
        """The value called `name` as one number per stage; raises UsageError when there is not one for each."""
        return self._spread(name, getattr(self, name), stages)

    def collective(self, name: str, stages: int) -> tuple[float, ...]:
        """Return the time by stage in which the bytes called `name` are gathered or summed over the replicas; without bytes 0."""
        amounts = self._bytes_of(name, stages) or (0.0,) * stages
        return tuple(amount / self.collective_bandwidth for amount in amounts)

    def bytes_in(self, pool: str, stages: int) -> dict[str, tuple[float, ...]]:
        """name -> bytes by stage of what is in `pool`; raises as `per_stage`."""
        places, named = dict(self.pools), ((name, self._bytes_of(name, stages)) for name in dict(self.bytes))
        return {name: sizes for name, sizes in named if sizes and places.get(whole_of(name), DEVICE) == pool}

    def _bytes_of(self, name: str, stages: int) -> tuple[float, ...] | None:
        """stage -> the bytes called `name`; None where they are not given."""
        amounts = dict(self.bytes)
        return self._spread(f"bytes[{name!r}]", amounts[name], stages) if name in amounts else None

    def share_of(self, value: str, stages: int) -> tuple[float, ...]:
        """stage -> the share of the whole that a part has, or parts together (`saved:mlp+norms`); raises as `per_stage`."""
        whole, _, part = value.partition(":")
        sizes, totals = (self._bytes_of(name, stages) for name in (value, whole))
        if sizes and totals:
            return tuple(min(1.0, size / total) if total else 0.0 for size, total in zip(sizes, totals, strict=True))
        if "+" not in part:
            return (_equal_share(part, 0.0),) * stages
        shares = (self.share_of(f"{whole}:{each}", stages) for each in part.split("+"))
        return tuple(min(1.0, sum(each)) for each in zip(*shares, strict=True))

    def saved(self, stages: int) -> tuple[float, ...]:
        """Return the bytes that one micro-batch saves on each stage; without bytes, the part of `activation` beyond `kept`."""
        shares, activation = self.per_stage("kept", stages), self.per_stage("activation", stages)
        return self._bytes_of(SAVED, stages) or tuple(
            (1 - share) * a for share, a in zip(shares, activation, strict=True)
        )

    def kept_bytes(self, stages: int) -> tuple[float, ...]:
        """Return the bytes that R of one micro-batch needs on each stage; without bytes, the share `kept` of `activation`."""
        shares, activation = self.per_stage("kept", stages), self.per_stage("activation", stages)
        return self._bytes_of(KEPT, stages) or tuple(map(mul, shares, activation))

    def while_running(self, value: str, stages: int) -> tuple[float, ...] | None:
        """stage -> the size of one of `WHILE_RUNNING`, in the unit of `activation`; None without such bytes."""
        held, saved, inputs = (self._bytes_of(name, stages) for name in (value, SAVED, KEPT))
        if held is None or saved is None:
            return None
        wholes = map(add, saved, inputs or (0.0,) * stages)
        shares = (min(1.0, one / (whole or 1.0)) for one, whole in zip(held, wholes, strict=True))
        return tuple(map(mul, shares, self.per_stage("activation", stages)))

    def _spread(self, name: str, value: Any, stages: int) -> tuple[float, ...]:
        if not isinstance(value, tuple):
            return (float(value),) * stages
        return _of_each(name, value, stages, "stages", "one number or ")

    def per_pair(self, name: str, stages: int) -> tuple[tuple[float, ...], ...] | None:
        """`pair` or `pair_split` as `[forward's stage][backward's stage]`, or None; raises UsageError for another size."""
        value = getattr(self, name)
        if value is None:
            return None
        if isinstance(value, tuple) and value and isinstance(value[0], tuple):
            if len(value) != stages or any(len(row) != stages for row in value):
                raise ArgumentError(name, f" is not a {stages} x {stages} matrix, and the schedule has {stages} stages")
            return value
        return tuple((one,) * stages for one in self.per_stage(name, stages))

    def factors(self, microbatches: int) -> tuple[float, ...]:
        """`microbatch` with one number per micro-batch; raises UsageError when there is not one for each."""
        given = self.microbatch or (1.0,) * microbatches
        return _of_each("microbatch", given, microbatches, "micro-batches")

    def time_factors(self, schedule: Schedule) -> tuple[float, ...]:
        """unit -> the factor on its times: that of its micro-batch times its slice's share; raises UsageError for other sizes."""
        return self._unit_factors(schedule, "slice_times")

    def size_factors(self, schedule: Schedule) -> tuple[float, ...]:
        """unit -> the factor on its activation, bytes and messages; raises as `time_factors`."""
        return self._unit_factors(schedule, "slice_sizes")

    def _unit_factors(self, schedule: Schedule, name: str) -> tuple[float, ...]:
        factors, count = self.factors(schedule.microbatches), schedule.slices
        if count == 1:
            return factors
        shares = _of_each(name, getattr(self, name) or (1 / count,) * count, count, "slices")
        return tuple(factor * share for factor in factors for share in shares)

    def least_split(self, stages: int) -> Costs:
        """Costs without `backward` under which no schedule without pairs takes longer than under these.

        Where a B is cheaper than I + W, they are reduced to I' = min(I, B) and W' = min(W, B - I'). Any schedule with a B
        written as I' and W' ends no later and holds no more, so a bound for these costs holds for the given ones; where no B
        is cheaper, the costs do not change.
        """
        if self.backward is None:
            return self
        whole, first, second = (self.per_stage(name, stages) for name in ("backward", "input_grad", "weight_grad"))
        least = tuple(map(min, whole, first))
        rest = tuple(min(w, b - i) for b, i, w in zip(whole, least, second, strict=True))
        return replace(self, backward=None, input_grad=least, weight_grad=rest)

    @property
    def uneven(self) -> bool:
        """Return whether micro-batches differ."""
        return len(set(self.microbatch)) > 1

    def hop(self, source: int, destination: int, factor: float = 1.0, name: str = OUTPUT) -> float:
        """Time from the end of an action on rank `source` to the arrival of its message on rank `destination`.

        Args:
            factor: of the micro-batch; it makes the message larger, not the latency.
            name: of the tensor that it carries, or whose gradient.
        """
        if source == destination:
            return 0.0
        latency = self.p2p[source][destination] if isinstance(self.p2p, tuple) else self.p2p
        return latency + factor * self.size_of(name) / self.bandwidth

    def size_of(self, name: str = OUTPUT) -> float:
        """Return the size of a message of a micro-batch of factor 1 that carries this tensor, or its gradient."""
        return self.message if name == OUTPUT or not self.tensors else dict(self.tensors).get(name, self.message)

    def slowed(self, copies: int) -> float:
        """Return how many times as long a copy takes while so many run on its link, itself included."""
        return 1 + (self.beside - 1) * max(copies - 1, 0)

    def check_links(self, ranks: int) -> None:
        """Raise UsageError where `p2p` is a matrix of another size, or `host_links` has another number of ranks."""
        _of_each("host_links", self.host_links or (0.0,) * ranks, ranks, "ranks")
        if isinstance(self.p2p, tuple) and (len(self.p2p) != ranks or any(len(row) != ranks for row in self.p2p)):
            raise ArgumentError("p2p", f" is not a {ranks} x {ranks} matrix, and the schedule has {ranks} ranks")


class StageCosts:
    """Costs spread over the stages of one schedule, for the simulator and the bounds.

    An attribute for each time that a `Kind` names: stage -> the time; `parts`: part -> stage -> the time of R of this part.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> tuple[float, ...]: ...

    def __init__(self, costs: Costs, stages: int) -> None:
        def total(first: str, second: str) -> tuple[float, ...]:
            return tuple(map(add, times[first], times[second]))

        times = {name: costs.per_stage(name, stages) for name in costs.stage_times(_TIME)}
        times.setdefault("backward", total("input_grad", "weight_grad"))
        times.setdefault("recompute", times["forward"])
        for name, amounts in ("gather", PARAMS), ("reduce", GRADS):
            if name not in times:
                times[name] = costs.collective(amounts, stages)
        for name, sizes in ("copy", costs.saved(stages)), ("copy_kept", costs.kept_bytes(stages)):
            times[name] = tuple(size / costs.host_bandwidth for size in sizes)
        times |= {f"recompute_{name}": total("recompute", name) for name in ("backward", "input_grad")}
        vars(self).update(times)
        self.parts = {part: costs._spread(f"parts[{part!r}]", time, stages) for part, time in dict(costs.parts).items()}

    def time_of(self, name: str) -> tuple[float, ...]:
        """stage -> the time called `name` in `Kind.time`: a field, or of a part, such as `recompute:norms`."""
        whole, _, part = name.partition(":")
        times: tuple[float, ...] = getattr(self, whole)
        return self.parts.get(part, tuple(time * _equal_share(part, 1.0) for time in times)) if part else times

    def by_letter(self, letters: str) -> dict[str, tuple[float, ...]]:
        """letter of a kind -> stage -> its time."""
        return {letter: self.time_of(str(kind_of(letter).time)) for letter in letters}


@dataclass(frozen=True)
class PairTimes:
    """Durations of overlapped pairs.

    The computation of the two halves adds up, as does their communication; the pair takes the longer of the sums.
    With a forward of stage s and a backward of stage t, and x the stages' shares of all-to-all:

        max((1 - x_s) F_s + (1 - x_t) I_t + W_t, x_s F_s + x_t I_t)        F|I: the same without W_t

    A block (R;B) or (R;I) adds R_t to the computation. With no all-to-all declared: F + B. A given `Costs.pair` is the time of
    F|B; F|I then takes that less W_t, but at least F_s, unless `Costs.pair_split` is given, too.
    """

    spread: StageCosts
    share: tuple[float, ...]
    given: tuple[tuple[float, ...], ...] | None
    given_split: tuple[tuple[float, ...], ...] | None = None

    @classmethod
    def of(cls, costs: Costs, stages: int) -> PairTimes:
        given, given_split = costs.per_pair("pair", stages), costs.per_pair("pair_split", stages)
        return cls(StageCosts(costs, stages), costs.per_stage("all_to_all", stages), given, given_split)

    def time(
        self,
        forward: int,
        backward: int,
        split: bool,
        factors: tuple[float, float] = (1.0, 1.0),
        recomputed: bool = False,
    ) -> float:
        """Return the time of a pair with these stages.

        Args:
            split: its backward is an I.
            factors: of the two micro-batches.
            recomputed: the layers of its backward are recomputed.
        """
        spread, (a, b), weight = self.spread, factors, self.spread.weight_grad[backward]
        first, again = spread.forward[forward], spread.recompute[backward] if recomputed else 0.0
        alone = (spread.input_grad if split else spread.backward)[backward] + again
        if split and self.given_split is not None:
            pair = self.given_split[forward][backward] + again
        elif self.given is not None:
            whole = self.given[forward][backward] + again
            pair = max(first, whole - weight) if split else whole
        else:
            x, y, second = self.share[forward], self.share[backward], spread.input_grad[backward]
            talk = a * x * first + b * y * second
            if talk == 0:
                return a * first + b * alone
            compute = a * (1 - x) * first + b * (1 - y) * second + b * again
            return max(compute + (0.0 if split else b * weight), talk)
        return a * pair if a == b else a * first + b * alone - min(a, b) * (first + alone - pair)

    def overlaps(self, forward: int, backward: int, split: bool) -> bool:
        """Return whether the two halves run in turns, segment by segment, so that the pair frees memory while it allocates.

        They do where both stages communicate, or where the pair is given a time that is less than its halves'. Any other pair
        is its forward and then its backward: it holds the whole of both.
        """
        if self.share[forward] > 0 and self.share[backward] > 0:
            return True
        if self.given is None and (self.given_split is None or not split):
            return False
        alone = (self.spread.input_grad if split else self.spread.backward)[backward]
        return self.time(forward, backward, split) < self.spread.forward[forward] + alone

    def least(self, forward: int, backward: int) -> float:
        """Return the time of a pair with these stages and of the backward's W, in the pair or after it, whichever is shorter."""
        apart = self.time(forward, backward, True) + self.spread.weight_grad[backward]
        return min(self.time(forward, backward, False), apart)


def _equal_share(part: str, otherwise: float) -> float:
    """1 / k for the part j/k, `otherwise` for a part with a name."""
    return 1 / int(part.partition("/")[2]) if "/" in part else otherwise


def durations(schedule: Schedule, costs: Costs) -> list[float]:
    """code -> time of that action (no pairs), one entry for each action that a code can stand for."""
    spread = StageCosts(costs, schedule.stages)
    by_time, by_size = costs.time_factors(schedule), costs.size_factors(schedule)
    alike = schedule.slices == 1 and not costs.microbatch
    times: list[float] = []
    for kind in schedule.kinds:
        time = kind.time
        values = spread.time_of(time) if isinstance(time, str) else (time,) * schedule.stages
        factors = by_time if kind.queue == COMPUTE and not kind.vocabulary else by_size
        even = kind.of_stage or alike
        for value in values:
            times.extend([value] * len(factors) if even else [value * factor for factor in factors])
    for code, share in copied_shares(schedule, costs).items():
        times[code] *= share
    return times


def copied_shares(schedule: Schedule, costs: Costs) -> dict[int, float]:
    """code of a copy of what a forward saves -> the share that travels, where a computation makes a part of it again."""
    copies = [number for number, kind in enumerate(schedule.kinds) if kind.queue != COMPUTE and kind.divides == SAVED]
    shares = {}
    for (stage, unit), again in remade_shares(schedule, costs).items() if copies else ():
        for number in copies if again else ():
            shares[number * schedule._kind_stride + stage * schedule.units + unit] = 1 - again
    return shares


def remade_shares(schedule: Schedule, costs: Costs) -> dict[tuple[int, int], float]:
    """(stage, unit) -> the share of what its forward saves that recomputed parts make again together."""
    named = {place: {v for v in values if v.startswith(f"{SAVED}:")} for place, values in schedule._remade.items()}
    names = {place: together(values) for place, values in named.items() if values}
    by_name = {name: costs.share_of(name, schedule.stages) for name in {*names.values()}}
    return {(stage, unit): by_name[name][stage] for (stage, unit), name in names.items()}


def _of_each(name: str, values: tuple[float, ...], count: int, words: str, more: str = "") -> tuple[float, ...]:
    """Return `values` as floats. Raises ArgumentError unless there are `count`, of those of a schedule that `words` names."""
    if len(values) != count:
        raise ArgumentError(name, f" has {len(values)} values and the schedule {count} {words}: give {more}{count}")
    return tuple(map(float, values))


def _times(factor: float) -> Callable[[str, Any], Any]:
    """Return a change of `Costs.changed` that multiplies each number."""

    def times(name: str, value: Any) -> Any:
        return tuple(times(name, each) for each in value) if isinstance(value, tuple) else value * factor

    return times


def _pairs(field: str, sizes: Any) -> tuple[tuple[str, Any], ...]:
    """The values by name of a field as sorted pairs. Raises ArgumentError for anything else."""
    try:
        pairs: dict[Any, Any] = dict(sizes)
    except (TypeError, ValueError):
        pairs = {None: sizes}
    if not all(map(_is_name, pairs)):
        raise ArgumentError(field, f" is {sizes!r:.200}; it must give each name its value, as in {{'skip': 2.0}}")
    return tuple(sorted((name, _plain_tuples(size)) for name, size in pairs.items()))


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value.isprintable()


def _item(field: str, name: str) -> str:
    return f"{field}[{name!r:.100}]"


def _plain_tuples(value: Any) -> Any:
    """`value` with tuples for its lists."""
    return tuple(map(_plain_tuples, value)) if isinstance(value, (list, tuple)) else value


def _depth(value: Any) -> int | None:
    """0 for a number, 1 for a tuple of numbers, 2 for a tuple of such tuples; None for anything else."""
    if isinstance(value, tuple):
        depths = {_depth(item) for item in value}
        inner = depths.pop() if len(depths) == 1 else 0
        return None if depths or inner is None else inner + 1
    return 0 if isinstance(value, Real) and not isinstance(value, bool) else None


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, Real):
        yield value  # type: ignore[misc]  # a whole number may be too large for a float
    elif isinstance(value, tuple):
        for item in value:
            yield from _numbers(item)


WHILE_RUNNING = "layer", "forward", "backward", "input_grad"
"""Names of bytes that an action holds only while it runs: a block (R;B), a forward that saves nothing, a B or T, and an I."""

LATE = "new_grads", "slice_grads", "end_sums"
"""Names of bytes that come as an action ends: gradients that are not there before the step, those of the keys and values of
earlier slices, and copies in the sum of gradients over pipeline ranks."""

# Names of bytes that come and go with micro-batches, and of what actions and the end of the step hold besides.
_MOVING = (SAVED, KEPT, PENDING, *WHILE_RUNNING, *LATE[1:])


def activation_limit(costs: Costs, memory: float, placement: Sequence[int]) -> tuple[Costs, tuple[float, ...]]:
    """Return (costs whose activations are bytes, rank -> the most of them) for a limit of `memory` bytes on each device.

    Beside them is the most that a backward of the rank's stages needs. A forward that saves nothing has this room, too.

    Raises UsageError for costs without the bytes of what is saved, CapacityError where what stands for the whole step exceeds it.
    """
    if SAVED not in dict(costs.bytes):
        raise UsageError("a limit in bytes needs costs with bytes of what a stage saves: costs.bytes has no 'saved'")
    count, nothing = len(placement), (0.0,) * len(placement)
    sizes = costs.bytes_in(DEVICE, count)
    largest, later = max(costs.slice_sizes, default=1.0), 1 - (costs.slice_sizes or (1.0,))[-1]
    unit = largest * max(costs.microbatch, default=1.0)
    backward, split, summed, last = (sizes.get(name, nothing) for name in (*WHILE_RUNNING[2:], *LATE[1:]))
    standing, beside, at_end = ([0.0] * (max(placement) + 1) for _ in range(3))
    for stage, rank in enumerate(placement):
        standing[rank] += sum(size[stage] for name, size in sizes.items() if whole_of(name) not in _MOVING)
        beside[rank] = max(beside[rank], unit * max(backward[stage], split[stage]) + later * summed[stage])
        at_end[rank] += last[stage]
    least = [level + max(more) for level, *more in zip(standing, beside, at_end, strict=True)]
    if max(least) >= memory:
        raise CapacityError(
            f"weights, gradients and all else that stands for the whole step take {max(least) / 2**30:.3g} GiB on the "
            f"fullest rank, and there are {memory / 2**30:.3g} GiB"
        )
    limits = tuple(memory - level - more for level, more in zip(standing, beside, strict=True))
    if forward := sizes.get("forward"):
        rest = (max(0.0, size - beside[rank]) for size, rank in zip(forward, placement, strict=True))
        costs = replace(costs, bytes=dict(costs.bytes) | {"forward": tuple(rest)})
    saved = tuple(map(sum, zip(sizes[SAVED], sizes.get(KEPT, nothing), strict=True)))
    pending = sizes.get(PENDING, saved)
    held = tuple(late / whole if whole else 0.0 for late, whole in zip(pending, saved, strict=True))
    shares = tuple(k / whole if whole else 0.0 for k, whole in zip(sizes.get(KEPT, nothing), saved, strict=True))
    if len(set(saved)) == len(set(held)) == 1:
        return replace(costs, activation=saved[0], held=held[0], kept=shares), limits
    return replace(costs, activation=saved, held=held, kept=shares), limits
