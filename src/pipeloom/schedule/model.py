"""The Schedule: a frozen value that says, for every rank, which actions it runs and in which order.

Inside, a program is a tuple of integers, so that half a million actions are checked and simulated in about a second:

    code of an action = (kind * S + stage) * u + unit            kind: its number in the table of kinds (F 0, B 1, I 2, W 3)
    code of a pair    = (code of F + 1) * 1024 S u + code of B or I

A unit is a micro-batch or, where the sequences are cut into slices, one slice of one: unit = microbatch * slices + slice, and
u = m * slices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache, wraps
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from pipeloom.errors import ScheduleError, UsageError, echo
from pipeloom.limits import of_annotated_types, require_schedule, require_types
from pipeloom.schedule.actions import (
    BASIC_KINDS,
    COMPUTE,
    INPUT_GRADIENT,
    KEPT,
    MOST_KINDS,
    PENDING,
    SAVED,
    STAGE_VALUES,
    WEIGHT_GRADIENT,
    Action,
    Cell,
    Kind,
    Pair,
    kind_number,
    kind_of,
    kinds,
    parse_cell,
    together,
    whole_of,
)

Program = tuple[int, ...]


PublicFunction = TypeVar("PublicFunction", bound=Callable[..., Any])


class NamedTensor(NamedTuple):
    """A tensor with a name, sent from the stage that writes it to each stage that reads it, past the stages in between.

    A name may be written again by a later stage: that is another NamedTensor, and a stage reads the latest one before it.

    Attributes:
        name: a Python identifier.
        producer: the position in a route of the stage that writes it.
        consumers: the positions of the stages that read it, ascending, all after `producer`.
    """

    name: str
    producer: int
    consumers: tuple[int, ...]


class ActionValues(NamedTuple):
    """Values that an action needs, makes and frees on its own stage: with the parts of them that other actions there name."""

    needs: tuple[str, ...]
    makes: tuple[str, ...]
    frees: tuple[str, ...]


@dataclass(frozen=True, repr=False)
class Schedule:
    """A pipeline schedule as data. Create one with a family, with `Schedule.of`, or from CSV or JSON.

    Attributes:
        name: the family or file that it is from.
        ranks: p, the number of pipeline ranks.
        microbatches: m.
        placement: stage -> rank, S entries.
        codes: a rank's program as integers (see the module's docstring); `programs` gives them as actions.
        routes: each route's stages, in order; stages at the same position are replicas of the same layers. The stages behind
            those of the routes, one per rank, hold shares of the vocabulary.
        route_of: micro-batch -> index of its route.
        options: the family's options, sorted, for printing and for the text forms.
        tensors: those that stages read by name, past the stages in between (`with_tensors`).
        slots: (value, the most of it that a rank holds at once, each of a stage and micro-batch); sorted (`with_slots`).
        slices: K, how many slices along the sequence each micro-batch is cut into; 1: it is not cut. Values are then those of a
            stage and unit. F of a slice attends to the keys and values of the slices before it on its stage, which are part of
            what is kept until the backward of their own slice: F in the order of the slices, B or I in the reverse order.
    """

    name: str
    ranks: int
    microbatches: int
    placement: tuple[int, ...]
    codes: tuple[Program, ...]
    routes: tuple[tuple[int, ...], ...]
    route_of: tuple[int, ...]
    options: tuple[tuple[str, Any], ...] = field(default=())
    tensors: tuple[NamedTensor, ...] = ()
    slots: tuple[tuple[str, float], ...] = ()
    slices: int = 1

    def __post_init__(self) -> None:
        if not self.name.isprintable():
            raise ScheduleError(
                f"a schedule cannot be called {self.name[:200]!a}: its name is printed and drawn, and these characters "
                f"cannot be; nearest: {''.join(c for c in self.name[:200] if c.isprintable())!r:.200}"
            )
        _check_tensors(self.tensors, self.positions)

    @of_annotated_types
    def with_tensors(self, tensors: Iterable[NamedTensor | tuple[str, int, Sequence[int]]]) -> Schedule:
        """Return this schedule with messages for tensors that stages read by name.

        A producer sends to each consumer directly, and each consumer sends a gradient back. The order of actions does not
        change. A micro-batch runs F on the producer before any consumer, and its backwards in the reverse order, so every
        schedule that `check` accepts can carry tensors that are sent forward along the route.

        Args:
            tensors: (name, producer, consumers); producer and consumers are stage positions.

        Raises ScheduleError for a tensor sent backwards, one without a consumer, and one that a stage would receive twice.
        """
        return replace(self, tensors=tuple(sorted(NamedTensor(n, p, tuple(sorted(c))) for n, p, c in tensors)))

    @of_annotated_types
    def with_slots(self, slots: Mapping[str, Any]) -> Schedule:
        """Return this schedule with at most so many of each value on a rank, copies in progress included.

        An entry that makes one waits until enough of the entries before it in the program have freed theirs. Only schedules
        with entries beside the computation need that: elsewhere the order says it all. Of a value in equal parts each counts its
        share.

        Raises ScheduleError for less than one.
        """
        for value, count in slots.items():
            if not isinstance(count, (int, float)) or not 1 <= count < math.inf:
                raise ScheduleError(f"slots of {echo(value)}: {echo(count)}; give a number of at least 1")
        return replace(self, slots=tuple(sorted(slots.items())))

    @classmethod
    def of(
        cls,
        programs: Sequence[Iterable[Cell | str | int]],
        *,
        placement: Sequence[int],
        microbatches: int,
        name: str = "custom",
        options: Mapping[str, Any] | None = None,
        routes: Sequence[Sequence[int]] | None = None,
        route_of: Sequence[int] | None = None,
        slices: int = 1,
    ) -> Schedule:
        """Return a schedule of actions, pairs, their text (such as `"0F3"`) or their codes, one program per rank.

        It has one route through all stages in order unless `routes` and `route_of` are given.
        Raises ScheduleError for a stage, rank, micro-batch or slice out of range. Does not check that the programs are complete
        and free of deadlock; `check` does.
        """
        sizes = {"placement": placement, "microbatches": microbatches, "routes": routes, "route_of": route_of}
        require_types(cls.of, {**sizes, "name": name, "options": options})  # the programs may be long
        _check_sizes(len(programs), microbatches, placement, slices)
        chosen_routes = tuple(map(tuple, routes)) if routes is not None else (tuple(range(len(placement))),)
        chosen_route_of = tuple(route_of) if route_of is not None else (0,) * microbatches
        _check_routes(chosen_routes, chosen_route_of, placement, microbatches, len(programs))
        return cls(
            name=name,
            ranks=len(programs),
            microbatches=microbatches,
            placement=tuple(placement),
            codes=_encoded(programs, len(placement), microbatches, slices),
            routes=chosen_routes,
            route_of=chosen_route_of,
            options=tuple(sorted((options or {}).items())),
            slices=slices,
        )

    @property
    def stages(self) -> int:
        """S, the number of stages of all routes."""
        return len(self.placement)

    @property
    def units(self) -> int:
        """The number of micro-batches, or of their slices: m * slices."""
        return self.microbatches * self.slices

    @property
    def unit_names(self) -> tuple[str, ...]:
        """unit -> its micro-batch, or its micro-batch and slice: "3", "0.1"."""
        if self.slices == 1:
            return tuple(map(str, range(self.microbatches)))
        return tuple(f"{mb}.{part}" for mb in range(self.microbatches) for part in range(self.slices))

    def unit_of(self, action: Action) -> int:
        """Return the unit of an action of this schedule: microbatch * slices + slice."""
        return action.microbatch * self.slices + (action.slice or 0)

    @property
    def _kind_stride(self) -> int:
        """S * units: the distance between the codes of two kinds."""
        return len(self.placement) * self.microbatches * self.slices

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """rank -> its stages, ascending; the c-th is its chunk c."""
        held: list[list[int]] = [[] for _ in range(self.ranks)]
        for stage, rank in enumerate(self.placement):
            held[rank].append(stage)
        return tuple(map(tuple, held))

    @property
    def chunks(self) -> int:
        """v, the most stages of layers that a rank holds."""
        return max(map(len, self.stages_of)) - bool(self.vocabulary)

    @cached_property
    def position_of(self) -> tuple[int, ...]:
        """stage -> its position in its route (which layers it holds); of a share of the vocabulary one behind those."""
        position = [self.positions + stage - self.vocabulary.start for stage in range(self.stages)]
        for route in self.routes:
            for index, stage in enumerate(route):
                position[stage] = index
        return tuple(position)

    @property
    def vocabulary(self) -> range:
        """The stages that hold shares of the vocabulary, the first one on rank 0; empty where it is a layer as others are."""
        return range(len(self.routes) * self.positions, self.stages)

    @cached_property
    def _spreads_embedding(self) -> bool:
        """Return whether the shares of the vocabulary look up the tokens that the first stage gets."""
        number = kind_number("EMBED")
        return bool(self.vocabulary) and any(code // self._kind_stride == number for code in self._action_codes(0))

    @cached_property
    def neighbours(self) -> tuple[tuple[int | None, ...], tuple[int | None, ...]]:
        """stage -> the stage before it, and the stage after it, in its route.

        Behind the last stage of layers comes the share of the vocabulary on its rank, and behind the share on the first one's
        rank the first stage of layers, for which it looks tokens up.
        """
        before: list[int | None] = [None] * self.stages
        after: list[int | None] = [None] * self.stages
        for route in self.routes:
            for left, right in zip(route, route[1:], strict=False):
                before[right], after[left] = left, right
        if self.vocabulary:
            first, last = self.routes[0][0], self.routes[0][-1]
            share = self.vocabulary[self.placement[last]]
            before[share], after[last] = last, share
            after[self.vocabulary[self.placement[first]]] = first
        return tuple(before), tuple(after)

    @property
    def positions(self) -> int:
        """The number of distinct stages of the model: the length of a route."""
        return len(self.routes[0])

    @cached_property
    def _largest_code(self) -> int:
        return max((max(program) for program in self.codes if program), default=0)

    @property
    def _pair_stride(self) -> int:
        """The smallest code of a pair less that of its backward, and the distance between two forwards' pairs."""
        return MOST_KINDS * self._kind_stride

    @property
    def _no_action(self) -> int:
        """The index just past the last action in tables by code; it marks an entry without a second action."""
        return len(self.kinds) * self._kind_stride

    @cached_property
    def _kind_count(self) -> int:
        if self._largest_code < BASIC_KINDS * self._kind_stride:
            return BASIC_KINDS
        last = max((max(codes) for codes in map(self._action_codes, range(self.ranks)) if codes), default=0)
        return max(BASIC_KINDS, last // self._kind_stride + 1)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds that tables by code hold: F, B, I and W, and all up to the last one that it uses."""
        return kinds()[: self._kind_count]

    @cached_property
    def has_queues(self) -> bool:
        """Return whether an action runs on another queue than that of computation, or waits for more than `Kind.waits_for`."""
        special = {number for number, kind in enumerate(self.kinds) if not kind.is_plain}
        stride = self._kind_stride
        return bool(special) and any(
            code // stride in special for codes in map(self._action_codes, range(self.ranks)) for code in codes
        )

    @cached_property
    def queues(self) -> tuple[dict[str, tuple[int, ...]], ...]:
        """rank -> queue -> the positions of its entries, in order."""
        if not self.has_queues:
            return tuple({COMPUTE: tuple(range(len(program)))} for program in self.codes)
        by_rank: list[dict[str, list[int]]] = [{COMPUTE: []} for _ in self.codes]
        for queues, program in zip(by_rank, self.programs, strict=True):
            for at, cell in enumerate(program):
                queues.setdefault(kind_of(parts(cell)[0].kind).queue, []).append(at)
        return tuple({queue: tuple(positions) for queue, positions in queues.items()} for queues in by_rank)

    @cached_property
    def forwards_alone(self) -> bool:
        """Return whether no action computes the gradients of weights, or of a stage's input: a step of evaluation."""
        backward = {at for at, kind in enumerate(self.kinds) if kind.is_backward and not kind.vocabulary}
        backward |= {at for at, kind in enumerate(self.kinds) if WEIGHT_GRADIENT in kind.produces}
        codes = (code for rank in range(self.ranks) for code in self._action_codes(rank))
        return self.actions > 0 and not any(code // self._kind_stride in backward for code in codes)

    @cached_property
    def _remade(self) -> dict[tuple[int, int], frozenset[str]]:
        """(stage, unit) -> the values that its F leaves out: another computation makes them, or no backward needs them."""
        left = kinds()[0].makes
        if self.forwards_alone:
            return self._united([{KEPT, SAVED} if kind.letter == "F" else () for kind in self.kinds])
        return self._united(
            [
                {v for v in kind.makes if whole_of(v) in left} if kind.queue == COMPUTE and not kind.is_forward else ()
                for kind in self.kinds
            ]
        )

    @cached_property
    def _parted(self) -> dict[tuple[int, int], frozenset[str]]:
        """(stage, unit) -> the values that are parts of another, such as `saved:norms`, which its actions touch."""
        return self._united([{v for v in kind.touches if v != whole_of(v)} for kind in self.kinds])

    def _values_of(self, action: Action) -> ActionValues:
        """Return what an action of this schedule needs, makes and frees on its stage."""
        place = action.stage, self.unit_of(action)
        return _values_of(action.kind, self._remade.get(place, frozenset()), self._parted.get(place, frozenset()))

    @cached_property
    def _recomputed_parts(self) -> frozenset[str]:
        """The names of the parts of layers that an R of their own recomputes; equal parts, such as `1/4`, have none."""
        values = {value for values in self._parted.values() for value in values}
        return frozenset(value.partition(":")[2] for value in values if "/" not in value)

    @cached_property
    def _remade_parts(self) -> frozenset[str]:
        """The parts of what a forward saves that R of their own make, and those that are made together (`mlp+norms`)."""
        values = [{v for v in each if v.startswith(f"{SAVED}:")} for each in {*self._remade.values()}]
        return frozenset(v.partition(":")[2] for each in values if each for v in (*each, together(each)))

    def _united(self, values: Sequence[Collection[str]]) -> dict[tuple[int, int], frozenset[str]]:
        """(stage, unit) -> all `values` of the kinds of its actions, given by the number of the kind."""
        stride, united = self._kind_stride, dict[tuple[int, int], frozenset[str]]()
        for codes in map(self._action_codes, range(self.ranks)) if any(values) else ():
            for code in codes:
                if values[code // stride]:
                    place = divmod(code % stride, self.units)
                    united[place] = united.get(place, frozenset()).union(values[code // stride])
        return united

    @cached_property
    def stage_actions(self) -> dict[str, frozenset[int]]:
        """Letter of a kind of a whole stage, such as UNSHARD -> the stages with such actions; of the kinds that it uses."""
        letters = {number: kind.letter for number, kind in enumerate(self.kinds) if kind.of_stage}
        stages: dict[str, set[int]] = {}
        for codes in self.codes if letters else ():
            for kind, place in {divmod(code, self._kind_stride) for code in codes}:
                if kind in letters:
                    stages.setdefault(letters[kind], set()).add(place // self.units)
        return {letter: frozenset(held) for letter, held in stages.items()}

    @property
    def has_pairs(self) -> bool:
        return self._largest_code >= self._pair_stride

    def _split_entries(self, rank: int) -> tuple[Sequence[int], Sequence[int]]:
        """The first code of every entry of a rank, and the second: a pair's backward, or `_no_action`."""
        program, limit, none = self.codes[rank], self._pair_stride, self._no_action
        if not self.has_pairs:
            return program, [none] * len(program)
        firsts = [code if code < limit else code // limit - 1 for code in program]
        return firsts, [none if code < limit else code % limit for code in program]

    def _action_codes(self, rank: int) -> Sequence[int]:
        """A rank's program with every pair written as its forward, then its backward."""
        if not self.has_pairs:
            return self.codes[rank]
        limit = self._pair_stride
        return [
            c for code in self.codes[rank] for c in ((code,) if code < limit else (code // limit - 1, code % limit))
        ]

    @property
    def _has_split(self) -> bool:
        """Return whether it has a pair, or an action that is neither F nor B."""
        return self._largest_code >= 2 * self._kind_stride

    @cached_property
    def splits_backward(self) -> bool:
        """Return whether any backward is written as I and W."""
        apart = {number for number, kind in enumerate(self.kinds) if PENDING in kind.frees}
        return any(
            code // self._kind_stride in apart for rank in range(self.ranks) for code in self._action_codes(rank)
        )

    @cached_property
    def actions(self) -> int:
        """The number of program entries of all ranks (a pair is one)."""
        return sum(map(len, self.codes))

    @cached_property
    def programs(self) -> tuple[tuple[Cell, ...], ...]:
        """rank -> its actions and pairs, in order."""
        return tuple(tuple(map(self.decode, program)) for program in self.codes)

    def decode(self, code: int) -> Cell:
        """The action or pair that `code` stands for."""
        limit = self._pair_stride
        if code >= limit:
            forward, backward = divmod(code, limit)
            return Pair(self._decode_action(forward - 1), self._decode_action(backward))
        return self._decode_action(code)

    def _decode_action(self, code: int) -> Action:
        rest, unit = divmod(code, self.units)
        number, stage = divmod(rest, self.stages)
        kind = kinds()[number]
        return Action(kind.letter, stage, unit) if kind.of_stage else unit_action(self, kind.letter, stage, unit)

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields, and the letters of the kinds: their numbers are those of this process."""
        state = {spec.name: getattr(self, spec.name) for spec in fields(self)}
        return state | {"letters": [kind.letter for kind in self.kinds]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        letters = state.pop("letters")
        for name, value in state.items():
            object.__setattr__(self, name, value)
        numbers = list(map(kind_number, letters))
        if numbers != list(range(len(numbers))):
            stride, limit = self._kind_stride, self._pair_stride

            def code(old: int) -> int:
                first, second = divmod(old, limit)
                renumbered = numbers[second // stride] * stride + second % stride
                return renumbered + first * limit

            object.__setattr__(self, "codes", tuple(tuple(map(code, program)) for program in self.codes))

    def with_programs(self, programs: Sequence[Iterable[Cell | str | int]]) -> Schedule:
        """Return this schedule with other programs; raises as `of` does."""
        return replace(self, codes=_encoded(programs, self.stages, self.microbatches, self.slices))

    def save(self, path: str | Path) -> None:
        """Write it to a file that `pipeloom.load` reads: `.csv` in torch's CSV format, `.json` with all attributes.

        Raises UsageError for another ending or a file that cannot be written, ScheduleError for two routes or named tensors
        as CSV.
        """
        from pipeloom.schedule.files import save  # imported here because that module imports this one

        save(self, path)

    def _repr_svg_(self) -> str | None:
        """For notebooks: the drawing with unit costs."""
        from pipeloom.draw.html import svg_of

        return svg_of(self)

    def _repr_html_(self) -> str | None:
        """For notebooks: the page with unit costs."""
        from pipeloom.draw.html import html_of

        return html_of(self)

    def __repr__(self) -> str:
        options = "".join(f", {key}={value!r}" for key, value in self.options if key not in ("chunks", "slices"))
        if self.slices > 1:
            options = f", slices={self.slices}{options}"
        if self.tensors:
            options += f", tensors={len(self.tensors)}"
        return f"Schedule({self.name}, ranks={self.ranks}, chunks={self.chunks}, microbatches={self.microbatches}{options})"

    def __str__(self) -> str:
        """The representation and one line per rank, cut at 20 actions."""
        lines = [repr(self)]
        for rank, codes in enumerate(self.codes):
            cells = " ".join(str(self.decode(code)) for code in codes[:20])
            lines.append(f"rank {rank}: {cells}{' …' if len(codes) > 20 else ''}")
        return "\n".join(lines)


def require_is_schedule(schedule: object) -> None:
    """Raise UsageError for an argument `schedule` that is not a Schedule."""
    if isinstance(schedule, str):
        raise UsageError(
            f"schedule is {schedule!r:.200}, a name; make the schedule of it, such as "
            f"pipeloom.schedules.build({schedule!r:.200}, ranks=4, microbatches=8)"
        )
    if not isinstance(schedule, Schedule):
        raise UsageError(f"schedule is of type {type(schedule).__name__}; give a pipeloom.Schedule")


def of_schedule(function: PublicFunction) -> PublicFunction:
    """Decorate a public function of a schedule: another first argument is refused by `require_is_schedule`, and arguments of
    other types than their annotations.
    """
    of_types = of_annotated_types(function)

    @wraps(function)
    def checked(schedule: Schedule, *arguments: Any, **keywords: Any) -> Any:
        require_is_schedule(schedule)
        return of_types(schedule, *arguments, **keywords)

    return cast(PublicFunction, checked)


def actions_of(schedule: Schedule) -> Iterator[Action]:
    """Yield the actions of all ranks, those of pairs one by one."""
    return (action for program in schedule.programs for cell in program for action in parts(cell))


def places_of(schedule: Schedule, letter: str) -> dict[int, tuple[int, ...]]:
    """Return stage -> its micro-batches with an action of this kind, of a part of it, or fused of it and others."""
    places: dict[int, set[int]] = {}
    for action in actions_of(schedule):
        if letter in (action.kind.partition(":")[0], *(kind_of(action.kind).fuses or ())):
            places.setdefault(action.stage, set()).add(action.microbatch)
    return {stage: tuple(sorted(places[stage])) for stage in sorted(places)}


def unit_action(schedule: Schedule, letter: str, stage: int, unit: int) -> Action:
    """Return the action of this kind of a stage and a unit: a micro-batch, or a slice of one."""
    return (
        Action(letter, stage, unit) if schedule.slices == 1 else Action(letter, stage, *divmod(unit, schedule.slices))
    )


def parts(cell: Cell) -> tuple[Action, ...]:
    """The one action of `cell`, or a pair's two."""
    return (cell.forward, cell.backward) if isinstance(cell, Pair) else (cell,)


def steady_entries(program: Sequence[Cell]) -> tuple[int, int]:
    """Return the positions of the first backward (the length, if there is none) and of the last forward (-1)."""
    kinds_of = [[kind_of(action.kind) for action in parts(cell)] for cell in program]
    backwards = (at for at, entry in enumerate(kinds_of) if any(kind.is_backward for kind in entry))
    forwards = (at for at, entry in enumerate(kinds_of) if any(kind.is_forward for kind in entry))
    return next(backwards, len(program)), max(forwards, default=-1)


ValueKey = tuple[str, int, int]  # name, stage, and unit: -1 for a value of the stage


def value_key(value: str, stage: int, unit: int) -> ValueKey:
    """Return what tells this value of a stage, and of a unit unless it is one of STAGE_VALUES, from all others."""
    return value, stage, -1 if value in STAGE_VALUES else unit


@lru_cache(maxsize=MOST_KINDS)  # a schedule asks for few of them, once per action
def _values_of(letter: str, remade: frozenset[str], parted: frozenset[str]) -> ActionValues:
    """Return the values of an action, whose stage and unit have these values of `Schedule._remade` and `Schedule._parted`.

    Where actions name parts of a value, what is called by the name of the whole is the rest; a copy to the host or back is of
    that without the parts that a computation makes again, and a forward leaves out all that a later action makes again.
    """
    kind = kind_of(letter)
    parts_here = parted if kind.queue == COMPUTE else parted - remade

    def split_by_parts(values: tuple[str, ...]) -> tuple[str, ...]:
        return (*values, *sorted(part for part in parts_here if whole_of(part) in values))

    makes = split_by_parts(kind.makes)
    if kind.is_forward:
        makes = tuple(value for value in makes if value not in remade and whole_of(value) not in remade)
    needs = tuple(need.value for need in kind.needs if not need.step)
    return ActionValues(split_by_parts(needs), makes, split_by_parts(kind.frees))


def _encoded(
    programs: Sequence[Iterable[Cell | str | int]], stages: int, microbatches: int, slices: int
) -> tuple[Program, ...]:
    single = len(kinds()) * stages * microbatches * slices
    return tuple(
        tuple(
            [
                c if isinstance(c, int) and 0 <= c < single else _encode(c, (stages, microbatches, slices), rank, at)
                for at, c in enumerate(program)
            ]
        )
        for rank, program in enumerate(programs)
    )


def _encode(cell: Cell | str | int, sizes: tuple[int, int, int], rank: int, at: int) -> int:
    stages, microbatches, slices = sizes
    stride = stages * microbatches * slices
    if isinstance(cell, int):  # a pair, or nothing
        forward, backward = divmod(cell, MOST_KINDS * stride)
        if not 0 < forward <= stride or all(
            number != backward // stride for number, kind in enumerate(kinds()) if INPUT_GRADIENT in kind.produces
        ):
            raise ScheduleError(f"rank {rank}, action {at}: the code {cell} stands for no action")
        return cell
    try:
        value = parse_cell(cell) if isinstance(cell, str) else cell
    except ScheduleError as error:
        raise ScheduleError(f"rank {rank}, action {at}: {error}") from None
    codes = []
    for action in parts(value):
        named = ("stage", action.stage), ("micro-batch", action.microbatch), ("slice", action.slice or 0)
        for (what, number), count in zip(named, sizes, strict=True):
            if not 0 <= number < count:
                raise ScheduleError(
                    f"rank {rank}, action {at}: {action} names {what} {number} of {count} (0..{count - 1})"
                )
        if action.slice is None and slices > 1 and not kind_of(action.kind).of_stage:
            raise ScheduleError(
                f"rank {rank}, action {at}: {action} names no slice of {slices}; nearest: {action._replace(slice=0)}"
            )
        unit = action.microbatch * slices + (action.slice or 0)
        codes.append(kind_number(action.kind) * stride + action.stage * microbatches * slices + unit)
    if len(codes) == 1:
        return codes[0]
    first, second = (kind_of(action.kind) for action in parts(value))
    if not first.is_forward or first.vocabulary or INPUT_GRADIENT not in second.produces:
        raise ScheduleError(f"rank {rank}, action {at}: {value} is not a forward with a backward (F|B or F|I)")
    return (codes[0] + 1) * MOST_KINDS * stride + codes[1]


def _check_sizes(ranks: int, microbatches: int, placement: Sequence[int], slices: int) -> None:
    if not isinstance(slices, int) or isinstance(slices, bool) or slices < 1:
        raise ScheduleError(f"slices is {echo(slices)}; a micro-batch has a whole number of at least 1")
    if ranks < 1 or microbatches < 1 or not placement:
        raise ScheduleError(
            f"a schedule needs at least one rank, stage and micro-batch; got {ranks}, {len(placement)}, {microbatches}"
        )
    require_schedule(ranks, microbatches * slices, len(placement))
    for stage, rank in enumerate(placement):
        if not 0 <= rank < ranks:
            raise ScheduleError(f"stage {stage} is placed on rank {rank} of {ranks} (0..{ranks - 1})")
    empty = set(range(ranks)) - set(placement)
    if empty:
        raise ScheduleError(f"rank {min(empty)} holds no stage: placement {echo(list(placement))}")


def _check_routes(
    routes: tuple[tuple[int, ...], ...],
    route_of: tuple[int, ...],
    placement: Sequence[int],
    microbatches: int,
    ranks: int,
) -> None:
    stages, on_routes = len(placement), sum(map(len, routes))
    shares = list(placement[on_routes:])
    if shares == list(range(ranks)) and len(routes) == 1:
        stages = on_routes
    if sorted(stage for route in routes for stage in route) != list(range(stages)):
        raise ScheduleError(
            f"the routes {echo([list(r) for r in routes])} do not hold each of the {stages} stages exactly once"
        )
    if len({len(route) for route in routes}) != 1:
        raise ScheduleError(f"the routes are of different lengths: {echo([len(route) for route in routes])}")
    if len(route_of) != microbatches or not all(0 <= route < len(routes) for route in route_of):
        raise ScheduleError(
            f"route_of must give each of the {microbatches} micro-batches a route 0..{len(routes) - 1}; "
            f"got {echo(list(route_of))}"
        )


def _check_tensors(tensors: Sequence[NamedTensor], positions: int) -> None:
    """Raise ScheduleError for an invalid name or position, a tensor sent backwards or read by no stage, and one given twice."""
    reads: set[tuple[str, int]] = set()
    writes: set[tuple[str, int]] = set()
    for name, producer, consumers in tensors:
        if not isinstance(name, str) or not name.isidentifier() or name == "output":
            raise ScheduleError(f"a tensor is called {echo(name)}; give a Python identifier other than 'output'")
        for position in (producer, *consumers):
            if not isinstance(position, int) or not 0 <= position < positions:
                raise ScheduleError(
                    f"tensor {name!r:.200} names the stage position {echo(position)}; there are {positions} (0..{positions - 1})"
                )
        if not consumers:
            raise ScheduleError(f"tensor {name!r:.200} of position {producer} is read by no stage; give its consumers")
        for consumer in consumers:
            if consumer <= producer:
                raise ScheduleError(
                    f"tensor {name!r:.200} goes from position {producer} to position {consumer}, and a micro-batch passes "
                    f"through position {consumer} first, so that every order of actions deadlocks; "
                    f"nearest: a producer before {consumer}"
                )
            if (name, consumer) in reads:
                raise ScheduleError(
                    f"position {consumer} reads tensor {name!r:.200} from two positions; it can read one"
                )
            reads.add((name, consumer))
        if (name, producer) in writes:
            raise ScheduleError(
                f"tensor {name!r:.200} of position {producer} is given twice; give its consumers together"
            )
        writes.add((name, producer))
