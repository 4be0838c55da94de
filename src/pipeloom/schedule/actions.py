"""Actions: what one rank does for one stage and one micro-batch, the table of their kinds, and their one-cell text form.

Everything that depends on what an action is reads its `Kind`: the integer codes, durations, memory, `check`, the dependency
graph, the text forms, the drawings and the executor. `register_kind` adds your own kind.

The text of a cell is the one that `torch.distributed.pipelining` reads and writes: `0F0`, `3I2`, `3W2`, `3B2`,
`(0F5;3B1)OVERLAP_F_B`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from pipeloom.errors import ScheduleError, UsageError

Resource = Literal["computation", "communication"]
KindName = str  # the letter of a kind

OUTPUT, INPUT_GRADIENT, WEIGHT_GRADIENT = "output", "input gradient", "weight gradient"
EVENTS = (OUTPUT, INPUT_GRADIENT, WEIGHT_GRADIENT)
"""Results that each stage produces once for each of its micro-batches, whatever the kinds of its actions."""


class Need(NamedTuple):
    """The event that an action waits for.

    Attributes:
        event: one of EVENTS.
        step: of which stage: -1 the one before in the route, 0 the action's own, 1 the one after.
        at_end: the event of its own stage that replaces it where the route has no such stage; None: it waits for nothing.
    """

    event: str
    step: int = 0
    at_end: str | None = None


@dataclass(frozen=True)
class Kind:
    """One kind of action.

    Attributes:
        letter: capital letters; how a cell writes it (`3I2`).
        words: for people.
        produces: which of EVENTS the action completes. A complete schedule produces each exactly once for every stage and
            micro-batch; a kind that produces none is optional, at most once each.
        waits_for: the event that it needs beside its place in the program; None: nothing.
        memory: (a, b): the action changes the stage's memory by (a + b * held) * activation (`Costs.held`,
            `Costs.activation`), at its start where that is more, at its end where it is less. `check` refuses a schedule whose
            changes of one stage and micro-batch fall below zero or do not add up to it.
        duration: the name of a field of `StageCosts`, or a time.
        resource: the resource that it occupies. A rank that only communicates counts as idle.
        colour: (hue in degrees, chroma, lightness above or below the chunk's) in OKLCH.
        execute: `execute(modules, microbatch)` runs an action of a kind registered by a user: `modules` are the stage's
            layers, whose `.grad` is complete, and summed over the replicas, behind the stage's last backward (that of a
            weight that other ranks hold too, only after the step). None for the built-in kinds, which the executor knows.
    """

    letter: str
    words: str
    produces: tuple[str, ...] = ()
    waits_for: Need | None = None
    memory: tuple[float, float] = (0.0, 0.0)
    duration: str | float = 0.0
    resource: Resource = "computation"
    colour: tuple[float, float, float] = (0.0, 0.0, 0.0)
    execute: Callable[[tuple[Any, ...], int], None] | None = None

    @property
    def is_forward(self) -> bool:
        """Return whether it computes a stage's output."""
        return OUTPUT in self.produces

    @property
    def is_backward(self) -> bool:
        """Return whether it computes gradients."""
        return bool(self.produces) and not self.is_forward


_BACK = Need(INPUT_GRADIENT, 1, at_end=OUTPUT)
_KINDS: dict[str, Kind] = {
    kind.letter: kind
    for kind in (
        Kind("F", "forward", (OUTPUT,), Need(OUTPUT, -1), (1.0, 0.0), "forward", colour=(255.0, 0.15, -0.04)),
        Kind(
            "B",
            "backward",
            (INPUT_GRADIENT, WEIGHT_GRADIENT),
            _BACK,
            (-1.0, 0.0),
            "backward",
            colour=(45.0, 0.16, 0.02),
        ),
        Kind("I", "input gradient", (INPUT_GRADIENT,), _BACK, (-1.0, 1.0), "input_grad", colour=(85.0, 0.15, 0.10)),
        Kind(
            "W",
            "weight gradient",
            (WEIGHT_GRADIENT,),
            Need(INPUT_GRADIENT),
            (0.0, -1.0),
            "weight_grad",
            colour=(330.0, 0.15, -0.10),
        ),
    )
}
MOST_KINDS = 16
"""The number of kinds that integer codes have room for; fixed, so that a code keeps its meaning when a kind is registered."""


@lru_cache(maxsize=1)
def kinds() -> tuple[Kind, ...]:
    """All kinds, in the order of their numbers in integer codes."""
    return tuple(_KINDS.values())


def kind_of(letter: str) -> Kind:
    """The kind written `letter`."""
    return _KINDS[letter]


@lru_cache(maxsize=MOST_KINDS)
def kind_number(letter: str) -> int:
    """The number of the kind written `letter` in integer codes: F 0, B 1, I 2, W 3, then registered ones."""
    return list(_KINDS).index(letter)


_DURATIONS = ("forward", "backward", "input_grad", "weight_grad")


def _is_number(value: object, least: float = -math.inf) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value) and value >= least


def register_kind(kind: Kind, execute: Callable[[tuple[Any, ...], int], None] | None = None) -> Kind:
    """Add a kind of action; every process that reads or runs schedules with it registers it first, in the same order.

    Args:
        execute: `execute(modules, microbatch)`, which the executor calls; default: `kind.execute`.

    Raises UsageError for a letter that is taken or not in capitals, a kind that produces an event or waits for another stage,
    an unknown event or cost, numbers that are not finite, and a seventeenth kind.
    """
    if execute is not None:
        kind = Kind(**{**{name: getattr(kind, name) for name in Kind.__dataclass_fields__}, "execute": execute})
    if not re.fullmatch(r"[A-Z]{1,16}", kind.letter):
        raise UsageError(f"a kind's letter is 1 to 16 capital letters, not {kind.letter!r:.200}")
    if kind.letter in _KINDS:
        raise UsageError(f"the kind {kind.letter!r:.200} ({_KINDS[kind.letter].words}) exists already")
    if kind.produces:
        raise UsageError(
            f"kind {kind.letter}: {', '.join(kind.produces)} cannot be produced by a registered kind; leave produces empty"
        )
    need = kind.waits_for
    if need is not None and not isinstance(need, Need):
        raise UsageError(
            f"kind {kind.letter}: waits_for is {need!r:.200}; give Need(event) of pipeloom.schedule.actions, or None"
        )
    if need is not None and (need.event not in EVENTS or need.step not in (-1, 0, 1)):
        raise UsageError(f"kind {kind.letter} waits for {need}; events: {', '.join(EVENTS)}; steps: -1, 0, 1")
    if need is not None and need.step:
        raise UsageError(f"kind {kind.letter} waits for another stage's {need.event}; only F, B and I receive messages")
    if kind.duration not in _DURATIONS if isinstance(kind.duration, str) else not _is_number(kind.duration, least=0.0):
        raise UsageError(
            f"kind {kind.letter}: duration is {kind.duration!r:.200}; give a time of at least 0, or {', '.join(_DURATIONS)}"
        )
    for name, values, length in (("memory", kind.memory, 2), ("colour", kind.colour, 3)):
        if not isinstance(values, tuple) or len(values) != length or not all(map(_is_number, values)):
            raise UsageError(f"kind {kind.letter}: {name} is {values!r:.200}; give {length} numbers in a tuple")
    if len(_KINDS) == MOST_KINDS:
        raise UsageError(f"there are {MOST_KINDS} kinds already: {', '.join(_KINDS)}")
    _KINDS[kind.letter] = kind
    kinds.cache_clear()
    _patterns.cache_clear()
    return kind


class Action(NamedTuple):
    """One computation: `kind` (its letter) of `stage` for `microbatch`, all counted from 0."""

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @property
    def words(self) -> str:
        return f"{self.kind} of stage {self.stage} micro-batch {self.microbatch}"


class Pair(NamedTuple):
    """A forward and a backward (`B` or `I`) that run as one overlapped block."""

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"

    @property
    def words(self) -> str:
        return f"the pair {self.forward.words} | {self.backward.words}"


Cell = Action | Pair

_COMMUNICATION = re.compile(r"\d+(SEND|RECV|UNSHARD|RESHARD|REDUCE)")


@lru_cache(maxsize=1)
def _patterns() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return the patterns of a cell with one action and of a cell with a pair."""
    letters = {
        True: "|".join(kind.letter for kind in kinds() if kind.is_forward),
        False: "|".join(kind.letter for kind in kinds() if INPUT_GRADIENT in kind.produces),
    }
    every = "|".join(sorted(_KINDS, key=len, reverse=True))
    action = re.compile(rf"(\d{{1,9}})({every})(\d{{1,9}})", re.ASCII)
    pair = rf"\((\d{{1,9}}(?:{letters[True]})\d{{1,9}});(\d{{1,9}}(?:{letters[False]})\d{{1,9}})\)(?:OVERLAP_F_B)?"
    return action, re.compile(pair, re.ASCII)


def parse_action(text: str) -> Action:
    """The action written `text`; raises ScheduleError, with examples, on anything else."""
    match = _patterns()[0].fullmatch(text)
    if match is None:
        if _COMMUNICATION.match(text):
            raise ScheduleError(
                f"{text!r:.200} is a communication; sends and receives are derived here, so export the schedule without them "
                '(in torch: format="compute_only")'
            )
        raise ScheduleError(
            f"{text!r:.200} is not an action; one looks like 0F0, 3B2, 3I2, 3W2 or (0F5;3B1)OVERLAP_F_B"
        )
    return Action(match[2], int(match[1]), int(match[3]))


def parse_cell(text: str) -> Cell:
    """The action or pair written `text`; raises ScheduleError on anything else, trailing characters included."""
    match = _patterns()[1].fullmatch(text.replace(" ", ""))
    if match is None:
        return parse_action(text)
    return Pair(parse_action(match[1]), parse_action(match[2]))
