"""`[schedule] name = "search"`: its options, and the schedule that runs until the search is done.

    memory        the most stage-micro-batches per rank; not given: as many as the family of the placement needs. Or bytes of a
                  device, such as "20GiB": before the first step, for the bytes and times (unless these are given) of one layer of
                  each kind, the search then decides too what is recomputed and what is copied to host memory
    placement     "loop" (default), "linear", "vee", or the rank of every stage; costs but no placement given: any of these three
    costs         forward, input_grad, weight_grad, backward, p2p, held; if given, the search runs before the first step
    measure       without costs: how many steps run a family first, and are measured
    trial         after such a search: how many steps the searched schedule and the family each run, in turn; the faster stays
    objective     "makespan" or "span"; not given: makespan with a barrier between the steps, span without
    time_limit, iterations, seed: of the search
    reuse         run the schedule that an earlier run of the same configuration saved in log.dir

The trainer runs the search: this package does not import the solver.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from pipeloom.config.problems import option_sentences
from pipeloom.config.sections import Config, Positive
from pipeloom.errors import ArgumentError, ConfigError
from pipeloom.limits import MOST_SEARCHED_CELLS, MOST_SEED, MOST_STEPS, memory_amount
from pipeloom.schedule import Costs, Schedule
from pipeloom.schedule.channels import size_words
from pipeloom.schedule.families import baseline, baseline_memory
from pipeloom.schedule.families.construct.layout import require_sizes
from pipeloom.schedule.placement import NAMED, named, require_placement
from pipeloom.schedule.transforms import half_split

NAME = "search"

_SEARCH_SECONDS = 300.0  # how long ranks wait for a search where train.timeout is "auto"


@dataclass(frozen=True)
class SearchRequest:
    """A request for a search, and the schedule that runs until it is done.

    Attributes:
        ranks, microbatches, chunks: p, m, v.
        placement: stage -> rank; None: any of the named ones.
        memory: the most stage-micro-batches of a rank, in units of the costs' activation; or bytes of its device.
        in_bytes: whether they are bytes.
        memory_of: the family that `memory` is taken from; "" where it was given.
        costs: of the stages; None: measured in the first steps, or before them where the memory is in bytes.
        trial: the steps of each schedule in the trial after the search; 0: no trial, as in a run with too few steps.
        objective: of the search.
        options: as they are configured.
        family: the schedule that the result is compared with: the placement's first family that fits, else a list schedule; the
            first family where the memory is in bytes.
        first: the schedule that runs until then: `family` with every other backward split, so that B, I and W are all measured.
    """

    ranks: int
    microbatches: int
    chunks: int
    placement: tuple[int, ...] | None
    memory: float
    in_bytes: bool
    memory_of: str
    costs: Costs | None
    trial: int
    objective: Literal["makespan", "span"]
    options: SearchOptions
    family: Schedule
    first: Schedule

    @property
    def before_start(self) -> bool:
        """Return whether the schedule is searched before the first step."""
        return self.costs is not None or self.in_bytes

    @property
    def note(self) -> str:
        """Describe the search in words."""
        if self.in_bytes:
            return (
                f"the schedule is searched before the first step, within {size_words(self.memory)} per device, with "
                "recomputation and copies to host memory"
            )
        room = f"{self.memory:g} stage-micro-batches per rank" + (f", as {self.memory_of} needs" * bool(self.memory_of))
        if self.costs is not None:
            return f"the schedule is searched before the first step, for the costs given and {room}"
        return (
            f"the schedule is searched for {room}, and for the costs that {self.options.measure} steps of {self.first.name} show "
            "(with every other backward split into I and W)"
        )


def _per_stage(value: Any) -> Any:
    """A number of at least 0, or a list of them (then a tuple)."""
    items = list(value) if isinstance(value, list | tuple) else [value]
    for item in items:
        if isinstance(item, bool) or not isinstance(item, int | float) or not 0 <= item < float("inf"):
            raise ValueError("it must be a number of at least 0, or a list with one for each stage")
    if not items:
        raise ValueError("it must not be empty")
    return tuple(map(float, items)) if isinstance(value, list | tuple) else float(value)


def _amount(value: Any) -> Any:
    """(amount, whether it is in bytes) of a number above 0, or of a size in words."""
    amount = memory_amount(value) if isinstance(value, str) else (value, False)
    if amount is None or type(amount[0]) not in (int, float) or not 0 < amount[0] < float("inf"):
        raise ValueError('it must be stage-micro-batches above 0, such as 6, or bytes, such as "20GiB"')
    return float(amount[0]), amount[1]


def _place(value: Any) -> Any:
    if isinstance(value, str) and value in NAMED:
        return value
    if not isinstance(value, list | tuple) or not all(type(rank) is int for rank in value):
        raise ValueError("it must be 'linear', 'loop', 'vee' or the rank of every stage, as in [0, 1, 1, 0]")
    return tuple(value)


StageTimes = Annotated[Any, BeforeValidator(_per_stage)]


class _Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, hide_input_in_errors=True)


class CostOptions(_Options):
    """`[schedule.options.costs]`: times of one micro-batch in any one unit."""

    forward: StageTimes
    input_grad: StageTimes
    weight_grad: StageTimes
    backward: StageTimes = None
    p2p: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    held: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0


class SearchOptions(_Options):
    """`[schedule.options]` of a search."""

    memory: Annotated[Any, BeforeValidator(_amount)] = None
    placement: Annotated[Any, BeforeValidator(_place)] = None
    costs: CostOptions | None = None
    measure: Annotated[int, Field(ge=3, le=MOST_STEPS)] = 3
    trial: Annotated[int, Field(ge=0, le=MOST_STEPS)] = 4
    objective: Literal["makespan", "span"] | None = None
    time_limit: Positive | None = None
    iterations: Annotated[int, Field(ge=0, le=MOST_STEPS)] | None = None
    seed: Annotated[int, Field(ge=0, le=MOST_SEED)] = 0
    reuse: bool = True


def search_request(config: Config) -> SearchRequest:
    """Return the request in `config`. Raises ConfigError with every problem of its options."""
    try:
        options = SearchOptions.model_validate(config.schedule.options)
    except ValidationError as error:
        raise ConfigError(option_sentences(error, config.schedule.options, SearchOptions)) from None
    ranks, m = config.parallel.pp, config.schedule.microbatches
    require_sizes(MOST_SEARCHED_CELLS, ranks=ranks, microbatches=m, chunks=config.schedule.chunks or 1)
    placement, problems = _placement(options.placement, ranks, config.schedule.chunks)
    costs, more = _costs(options.costs, len(placement))
    problems += more
    least = max(placement.count(rank) for rank in range(ranks)) if not problems else 0
    memory, in_bytes = options.memory or (None, False)
    if memory is not None and memory < least:
        problems.append(
            f"schedule.options.memory = {memory:g}: one micro-batch in each of a rank's stages takes {least}; "
            f"nearest: {least}"
        )
    if options.costs is None and not in_bytes and config.train.steps <= options.measure:
        problems.append(
            f"schedule.options.measure = {options.measure}: the run has {config.train.steps} steps, and the schedule is "
            f"searched after the measured ones; use train.steps = {options.measure + 1} or more, or give schedule.options.costs"
        )
    patience = config.train.seconds or _SEARCH_SECONDS
    if options.time_limit is not None and options.time_limit >= patience:
        problems.append(
            f"schedule.options.time_limit = {options.time_limit:g}: the other ranks wait at most {patience:g} s for the search "
            f"(train.timeout); use less than {patience:g}"
        )
    if problems:
        raise ConfigError(problems)
    memory_of = ""
    if memory is None:
        memory, memory_of = baseline_memory(placement, ranks, m)
    try:
        family = baseline(placement, ranks, m, math.inf if in_bytes else memory, costs)
    except ArgumentError as error:
        raise ConfigError(f"schedule.options.{error.argument}{error.words}") from None
    default_objective: Literal["makespan", "span"] = "makespan" if config.optimizer.barrier else "span"
    return SearchRequest(
        ranks=ranks,
        microbatches=m,
        chunks=least,
        placement=None if options.placement is None and (costs is not None or in_bytes) else placement,
        memory=memory,
        in_bytes=in_bytes,
        memory_of=memory_of,
        costs=costs,
        trial=options.trial if config.train.steps > options.measure + 2 * options.trial else 0,
        objective=options.objective or default_objective,
        options=options,
        family=family,
        first=half_split(family),
    )


def _placement(
    asked: str | tuple[int, ...] | None, ranks: int, chunks: int | None
) -> tuple[tuple[int, ...], list[str]]:
    """(stage -> rank, problems)."""
    if asked is None or isinstance(asked, str):
        name = asked or "loop"
        return named(name, ranks, chunks if chunks is not None else 2 if name == "vee" else 1), []
    try:
        return require_placement(asked, ranks, chunks), []
    except ArgumentError as error:
        key = {"placement": "schedule.options.placement", "chunks": "schedule.chunks"}[error.argument]
        return asked, [f"{key}{error.words}"]


def _costs(given: CostOptions | None, stages: int) -> tuple[Costs | None, list[str]]:
    if given is None:
        return None, []
    costs = Costs(**given.model_dump())
    problems = [
        f"schedule.options.costs.{name} = {list(value)}: {len(value)} values for {stages} stages; "
        f"give one number, or {stages}"
        for name in costs.stage_times()
        if isinstance(value := getattr(given, name), tuple) and len(value) != stages
    ]
    return (None if problems else costs), problems
