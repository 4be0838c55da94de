"""Actions: what one rank does for one stage and one micro-batch, the table of their kinds, and their one-cell text form.

Everything that depends on what an action is reads its `Kind`: the integer codes, durations, memory, `check`, the dependency
graph, the text forms, the drawings and the executor. `register_kind` adds your own kind.

The text of a cell is the one that `torch.distributed.pipelining` reads and writes, `0F0`, `3I2`, `3W2`, `3B2`,
`(0F5;3B1)OVERLAP_F_B`, `2UNSHARD`, `2RESHARD`, `2REDUCE_GRAD`, and for recomputation `2R0`, the block `(2R0;2B0)`, and that
block in a pair, `(0F5;2R0;2B0)OVERLAP_F_B`.
An action of a part of a value names the part behind its micro-batch: `2R0:norms`, or `2R0:1/4` for the first of four equal parts.
An action of one slice of the sequences names the slice behind the micro-batch: `2F0.1`, `(2R0.1;2B0.1)`, `2R0.1:norms`.
`2O0` copies what is saved to host memory, `2L0` back; `2OKEPT0` and `2LKEPT0` do so with what is kept. `8S3` and `8T3` are
those of a rank's share of the vocabulary, and `8BROADCAST3`, `8REDUCE3`, `8REDUCE_SUM3`, `8REDUCE_INPUT3`, `8EMBED3` and
`8EMBED_GRAD3` entries of a group: all ranks run them together.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple

from pipeloom.errors import ScheduleError, UsageError
from pipeloom.limits import of_annotated_types, require_types

KindName = str  # the letter of a kind
Resource = Literal["computation", "communication", "inside"]  # of segments; inside: links inside a node

OUTPUT, INPUT_GRADIENT, WEIGHT_GRADIENT = "output", "input gradient", "weight gradient"
EVENTS = (OUTPUT, INPUT_GRADIENT, WEIGHT_GRADIENT)
"""Values that each stage must have made once for each of its micro-batches, whatever the kinds of its actions."""

KEPT, SAVED, PENDING = "kept", "saved", "pending"
"""Values that a stage holds for a micro-batch: what a recomputation needs (inputs, random state), what a backward needs beyond
it, and what W needs after I."""

ON_HOST = "saved on the host"
"""The copy in host memory of what is saved."""

KEPT_ON_HOST = "kept on the host"
"""The copy in host memory of what is kept: the inputs, and of a slice its keys and values."""

HIDDEN, SCORES, SUMS = "hidden", "scores", "sums"
"""Values of a vocabulary stage for a micro-batch: its copy of the output of the last stage of layers; the exponentials of its
share of the logits; and for each token the largest logit, the sum of the exponentials and the target's logit over all shares."""

EMBEDDED = "embedded"
"""Value of a vocabulary stage for a micro-batch: the rows of its tokens in the share, on the first stage's rank those of all."""

PARAMS, SHARD, GRADS, GRAD_SHARD = "params", "shard", "grads", "grad_shard"
STAGE_VALUES = frozenset((PARAMS, SHARD, GRADS, GRAD_SHARD))
"""Values of a stage, whatever the micro-batch: its parameters, this replica's share of them, the gradients that this replica
has accumulated, and its share of their sum over the replicas."""

COMPUTE, COPY_OUT, COPY_IN, COLLECTIVE = "compute", "out", "in", "collective"
"""The queue of computation, those of copies to host memory and back, and that of collectives over the replicas. Other queues of a
rank run beside computation."""


def fraction_of(value: str) -> tuple[int, int] | None:
    """Return (1, 4) of `saved:1/4`, the first of four equal parts; None of anything else."""
    part, slash, count = value.partition(":")[2].partition("/")
    return (int(part), int(count)) if slash else None


def equal_part(part: str, layers: int) -> range:
    """Return the layers of a stage, of so many, in one of k equal parts (`2/4`): layer i of n is in part floor(i k / n) + 1.

    Of a part with a name, which is inside of layers, there are none.
    """
    if (fraction := fraction_of(f":{part}")) is None:
        return range(0)
    number, count = fraction
    return range(-(-(number - 1) * layers // count), -(-number * layers // count))


def whole_of(value: str) -> str:
    """Return the value that `value` is a part of, `saved` of `saved:norms`; itself if it is no part."""
    return value.partition(":")[0]


def together(values: Collection[str]) -> str:
    """Return the name of parts of one value, all of them: `saved:mlp+norms` of `saved:norms` and `saved:mlp`."""
    return f"{whole_of(min(values))}:{'+'.join(sorted(value.partition(':')[2] for value in values))}"


PART = r"(?:[a-z][a-z0-9_]{0,31}|[1-9][0-9]{0,2}/[1-9][0-9]{0,2})"
"""A regular expression of the part of a value that an action may name: a name, or one of so many equal parts."""


class Need(NamedTuple):
    """A value that an action needs.

    Attributes:
        value: its name: one of EVENTS, KEPT, SAVED, PENDING, or one that a registered kind makes.
        step: of which stage: -1 the one before in the route, 0 the action's own, 1 the one after.
        at_end: the value of its own stage that replaces it where the route has no such stage; None: it needs nothing there.
    """

    value: str
    step: int = 0
    at_end: str | None = None


@dataclass(frozen=True)
class Kind:
    """One kind of action: needs -> makes; frees.

    Attributes:
        letter: capital letters; how a cell writes it (`3I2`).
        words: for people.
        needs: the values that must exist before it starts.
        makes: the values that exist once it has ended, each made once for a stage and micro-batch. A forward leaves out what
            another action of its stage and micro-batch makes: recomputation needs no flag.
        frees: the values that are gone once it has ended; also of those that it makes, which then exist only while it runs.
        queue: what is busy meanwhile. An action on another queue than COMPUTE is issued when the computation before it in the
            program starts, and runs once its queue is free and what it needs exists.
        time: the name of a field of `StageCosts`, or a time.
        colour: (hue in degrees, chroma, lightness above or below the chunk's) in OKLCH.
        execute: `execute(modules, microbatch)` runs an action of a registered kind: `modules` are the stage's layers, whose
            `.grad` is complete, and summed over the replicas, behind the stage's last backward (that of a weight that other
            ranks hold too, only after the step). On another queue than COMPUTE it runs in a thread beside the computation, and
            gradients are this rank's own. None for the built-in kinds, which the executor knows.
        fuses: the letters of the actions of one stage and micro-batch that run as one block: a cell `(2R0;2B0)`.
        divides: the value of which it may also make, need or free a part; None: it has no parts.
        part: the name of the part; a kind with a part is derived from the one without where it is first named (`R:norms`).
        adds: the values that it makes where they do not exist, and else adds to.
        takes: the values that it takes over when it is issued: a later action that adds to them makes new ones meanwhile.
        vocabulary: whether it is of the stages with shares of the vocabulary (`Schedule.vocabulary`), and not of those of layers.
        group: whether every rank has one of each micro-batch, and all of them run together, once each rank has reached its own.
    """

    letter: str
    words: str
    needs: tuple[Need, ...] = ()
    makes: tuple[str, ...] = ()
    frees: tuple[str, ...] = ()
    queue: str = COMPUTE
    time: str | float = 0.0
    colour: tuple[float, float, float] = (0.0, 0.0, 0.0)
    execute: Callable[[tuple[Any, ...], int], None] | None = None
    fuses: tuple[str, ...] = ()
    divides: str | None = None
    part: str = ""
    adds: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    vocabulary: bool = False
    group: bool = False

    @cached_property
    def produces(self) -> tuple[str, ...]:
        """The values of EVENTS that it makes; none: it is optional."""
        return tuple(value for value in self.makes if value in EVENTS)

    @cached_property
    def of_stage(self) -> bool:
        """Return whether all its values are those of a stage: its cell names no micro-batch, and a program may repeat it."""
        values = {*(need.value for need in self.needs), *self.makes, *self.frees, *self.adds, *self.takes}
        return bool(values) and values <= STAGE_VALUES

    @cached_property
    def values(self) -> frozenset[str]:
        """The values of its own stage that it needs, makes, frees, adds to or takes, by the name of the whole."""
        return frozenset(map(whole_of, (*self.touches, *self.adds, *self.takes)))

    @cached_property
    def touches(self) -> frozenset[str]:
        """The values of its own stage that it needs, makes or frees."""
        return frozenset((*self.makes, *self.frees, *(need.value for need in self.needs if not need.step)))

    @cached_property
    def waits_for(self) -> Need | None:
        """The need of an output or input gradient, for which ranks wait; None: there is none."""
        return next((need for need in self.needs if need.value in (OUTPUT, INPUT_GRADIENT)), None)

    @property
    def is_forward(self) -> bool:
        """Return whether it computes a stage's output."""
        return OUTPUT in self.makes

    @property
    def is_backward(self) -> bool:
        """Return whether it computes gradients."""
        return bool(self.produces) and not self.is_forward

    def of_part(self, part: str) -> Kind:
        """Return the kind of these actions of one part: `saved` is `saved:norms` there, and the time is `recompute:norms`."""

        def named(value: str) -> str:
            return f"{value}:{part}" if value in (self.divides, ON_HOST) else value

        return replace(
            self,
            letter=f"{self.letter}:{part}",
            words=f"{self.words} of {part}",
            needs=tuple(need._replace(value=named(need.value)) for need in self.needs),
            makes=tuple(map(named, self.makes)),
            frees=tuple(map(named, self.frees)),
            time=f"{self.time}:{part}" if isinstance(self.time, str) else self.time,
            part=part,
        )

    @property
    def is_plain(self) -> bool:
        """Return whether `waits_for` and the order of one queue say all that it waits for."""
        return self.queue == COMPUTE and all(not need.step or need == self.waits_for for need in self.needs)


_BACK = Need(INPUT_GRADIENT, 1, at_end=OUTPUT)
_BEFORE = Need(OUTPUT, -1)
_PARAMS = Need(PARAMS)
_HELD = (SAVED, KEPT)


class _Kinds(dict[str, Kind]):
    """The kinds by letter; one of a part is added where it is first named."""

    def __missing__(self, letter: str) -> Kind:
        base, _, part = letter.partition(":")
        if not re.fullmatch(PART, part) or base not in self or self[base].divides is None:
            raise KeyError(letter)
        if len(self) == MOST_KINDS:
            raise ScheduleError(
                f"{letter!r:.200} is one kind too many: there are {MOST_KINDS}, those of parts included"
            )
        self[letter] = self[base].of_part(part)
        kinds.cache_clear()
        return self[letter]


# Letter, words, needs, makes, frees, queue, time, colour. Their order is that of the numbers in integer codes.
# fmt: off
_BUILT_IN = (
    Kind("F", "forward", (_BEFORE, _PARAMS), (OUTPUT, KEPT, SAVED), (), COMPUTE, "forward", (255.0, 0.15, -0.04)),
    Kind("B", "backward", (_BACK, Need(SAVED), _PARAMS), (INPUT_GRADIENT, WEIGHT_GRADIENT), _HELD,
         COMPUTE, "backward", (45.0, 0.16, 0.02), adds=(GRADS,)),
    # I adds the gradients of parameters that do not wait for W, such as norms.
    Kind("I", "input gradient", (_BACK, Need(SAVED), _PARAMS), (INPUT_GRADIENT, PENDING), _HELD,
         COMPUTE, "input_grad", (85.0, 0.15, 0.1), adds=(GRADS,)),
    Kind("W", "weight gradient", (Need(INPUT_GRADIENT), Need(PENDING)), (WEIGHT_GRADIENT,), (PENDING,),
         COMPUTE, "weight_grad", (330.0, 0.15, -0.1), adds=(GRADS,)),
    Kind("R", "recomputation", (Need(KEPT), _PARAMS), (SAVED,), (), COMPUTE, "recompute", (190.0, 0.1, 0.06), divides=SAVED),
    Kind("RB", "backward, each layer recomputed just before its own",
         (_BACK, Need(KEPT), _PARAMS), (INPUT_GRADIENT, WEIGHT_GRADIENT, SAVED), _HELD,
         COMPUTE, "recompute_backward", (20.0, 0.13, -0.04), fuses=("R", "B"), adds=(GRADS,)),
    Kind("RI", "input gradient, each layer recomputed just before its own",
         (_BACK, Need(KEPT), _PARAMS), (INPUT_GRADIENT, PENDING, SAVED), _HELD,
         COMPUTE, "recompute_input_grad", (110.0, 0.11, 0.02), fuses=("R", "I"), adds=(GRADS,)),
    Kind("O", "copy to the host", (Need(SAVED),), (ON_HOST,), (SAVED,),
         COPY_OUT, "copy", (150.0, 0.09, -0.02), divides=SAVED),
    Kind("L", "copy from the host", (Need(ON_HOST),), (SAVED,), (ON_HOST,),
         COPY_IN, "copy", (150.0, 0.09, 0.1), divides=SAVED),
    Kind("UNSHARD", "gather of the parameters", (Need(SHARD),), (PARAMS,), (), COLLECTIVE, "gather", (150.0, 0.1, 0.04)),
    # It takes no time, and in the order of computation its memory is free before any gather behind it is issued.
    Kind("RESHARD", "release of the parameters", (), (), (PARAMS,), COMPUTE, 0.0, (150.0, 0.06, 0.1)),
    Kind("REDUCE_GRAD", "sum of the gradients", (), (), (),
         COLLECTIVE, "reduce", (300.0, 0.1, 0.0), adds=(GRAD_SHARD,), takes=(GRADS,)),
    Kind("BROADCAST", "copy of the last output to every rank", (_BEFORE,), (HIDDEN,), (),
         COLLECTIVE, "broadcast", (220.0, 0.08, 0.06), vocabulary=True, group=True),
    Kind("S", "scores of a share of the vocabulary", (Need(HIDDEN), _PARAMS), (OUTPUT, SCORES), (),
         COMPUTE, "scores", (200.0, 0.15, 0.02), vocabulary=True),
    Kind("REDUCE", "sums of the scores and of the input gradient", (Need(OUTPUT), _PARAMS), (SUMS, INPUT_GRADIENT), (),
         COLLECTIVE, "combine", (300.0, 0.1, 0.04), vocabulary=True, group=True),
    Kind("REDUCE_SUM", "sums of the scores", (Need(OUTPUT),), (SUMS,), (),
         COLLECTIVE, "combine", (300.0, 0.1, 0.08), vocabulary=True, group=True),
    Kind("T", "gradients of a share of the vocabulary",
         (Need(SUMS), Need(SCORES), Need(HIDDEN), _PARAMS), (WEIGHT_GRADIENT,), (SUMS, SCORES, HIDDEN),
         COMPUTE, "scores_grad", (0.0, 0.14, -0.06), adds=(GRADS,), vocabulary=True),
    Kind("REDUCE_INPUT", "sum of the input gradient", (Need(WEIGHT_GRADIENT),), (INPUT_GRADIENT,), (),
         COLLECTIVE, "combine", (300.0, 0.1, 0.0), vocabulary=True, group=True),
    Kind("OKEPT", "copy of what is kept to the host", (Need(KEPT),), (KEPT_ON_HOST,), (KEPT,),
         COPY_OUT, "copy_kept", (150.0, 0.05, -0.02)),
    Kind("LKEPT", "copy of what is kept from the host", (Need(KEPT_ON_HOST),), (KEPT,), (KEPT_ON_HOST,),
         COPY_IN, "copy_kept", (150.0, 0.05, 0.1)),
    # Before EMBED: a schedule's tables end with the last kind that it has, so that with EMBED it has a row for this one too,
    # and `check` finds that it is missing.
    Kind("EMBED_GRAD", "copy of the first stage's input gradient to every rank, which adds its rows",
         (Need(INPUT_GRADIENT, 1), Need(EMBEDDED)), (), (EMBEDDED,),
         COLLECTIVE, "broadcast", (45.0, 0.08, 0.06), adds=(GRADS,), vocabulary=True, group=True),
    Kind("EMBED", "sum of the tokens' rows of all shares, the first stage's input", (_PARAMS,), (EMBEDDED,), (),
         COLLECTIVE, "combine", (255.0, 0.08, 0.06), vocabulary=True, group=True),
)
# fmt: on
_KINDS = _Kinds((kind.letter, kind) for kind in _BUILT_IN)
BASIC_KINDS = 4
"""F, B, I and W: the tables of a schedule that has no others hold only these."""
MOST_KINDS = 1024
"""The number of kinds that integer codes have room for; fixed, so that a code keeps its meaning when a kind is registered."""


@lru_cache(maxsize=1)
def kinds() -> tuple[Kind, ...]:
    """All kinds, in the order of their numbers in integer codes."""
    return tuple(_KINDS.values())


def kind_of(letter: str) -> Kind:
    """The kind written `letter`, with the part behind a colon: `"R"`, `"R:norms"`."""
    return _KINDS[letter]


@lru_cache(maxsize=MOST_KINDS)
def kind_number(letter: str) -> int:
    """The number of the kind called `letter` in integer codes: F 0, B 1, I 2, W 3, R, RB, RI, O, L 8, then others."""
    kind = kind_of(letter)  # adds one of a part, before the kinds are listed
    return list(_KINDS).index(kind.letter)


TIMES = tuple(dict.fromkeys(kind.time for kind in _BUILT_IN if isinstance(kind.time, str)))
"""The names that `Kind.time` may have."""


@of_annotated_types
def register_kind(kind: Kind, execute: Callable[[tuple[Any, ...], int], None] | None = None) -> Kind:
    """Add a kind of action; every process that reads or runs schedules with it registers it first, in the same order.

    It may need values of its own stage and of the stages before and after, make values of any new name, free values, and run
    on any queue.

    Args:
        execute: `execute(modules, microbatch)`, which the executor calls; default: `kind.execute`.

    Raises UsageError for a letter that is taken, a kind that makes one of EVENTS, and an attribute of another form.
    """
    kind = kind if execute is None else replace(kind, execute=execute)
    require_types(Kind, vars(kind))
    names = (*kind.makes, *kind.frees, kind.queue, *(need.value for need in kind.needs))
    numbers = (*kind.colour, kind.time) if not isinstance(kind.time, str) else kind.colour
    problems = {
        "its letter is 1 to 16 capital letters": re.fullmatch(r"[A-Z]{1,16}", kind.letter),
        f"{kind.letter!r:.200} exists already": kind.letter not in _KINDS,
        f"{', '.join(kind.produces)} cannot be made by a registered kind": not kind.produces,
        "the step of a Need is -1, 0 or 1": all(need.step in (-1, 0, 1) for need in kind.needs),
        "values and queues are names": all(isinstance(name, str) and name for name in names),
        f"time is a number of at least 0, or one of {', '.join(TIMES)}": kind.time in TIMES
        if isinstance(kind.time, str)
        else kind.time >= 0,
        "times and colours are finite": all(map(math.isfinite, numbers)),
        f"there are {MOST_KINDS} kinds already": len(_KINDS) < MOST_KINDS,
    }
    for rule, holds in problems.items():
        if not holds:
            raise UsageError(f"register_kind: {kind.letter!r:.200}: {rule}; got {kind!r:.400}")
    _KINDS[kind.letter] = kind
    kinds.cache_clear()
    _patterns.cache_clear()
    return kind


class Action(NamedTuple):
    """One action: `kind` (its letter, and its part: `R:norms`) of `stage` for `microbatch`, both counted from 0.

    An action of a kind of a whole stage has the micro-batch 0. `slice` is the slice of the micro-batch's sequences, counted from
    0; None in a schedule whose sequences are not cut, and of a kind of a whole stage.
    """

    kind: str
    stage: int
    microbatch: int = 0
    slice: int | None = None

    @property
    def unit(self) -> str:
        """The micro-batch and the slice as a cell writes them: `0`, `0.1`."""
        return f"{self.microbatch}" if self.slice is None else f"{self.microbatch}.{self.slice}"

    def __str__(self) -> str:
        kind = _KINDS[self.kind]
        if kind.fuses:
            return f"({';'.join(f'{self.stage}{letter}{self.unit}' for letter in kind.fuses)})"
        letter, colon, part = self.kind.partition(":")
        return f"{self.stage}{letter}" if kind.of_stage else f"{self.stage}{letter}{self.unit}{colon}{part}"

    @property
    def words(self) -> str:
        if _KINDS[self.kind].of_stage:
            return f"{self.kind} of stage {self.stage}"
        return f"{';'.join(_KINDS[self.kind].fuses) or self.kind} of stage {self.stage} {unit_words(self.microbatch, self.slice)}"


def unit_words(microbatch: int, part: int | None) -> str:
    """Return a micro-batch, and a slice of it unless `part` is None, in words."""
    return f"micro-batch {microbatch}" + ("" if part is None else f" slice {part}")


class Pair(NamedTuple):
    """A forward and a backward (`B` or `I`, also recomputed) that run as one overlapped block."""

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward};{str(self.backward).strip('()')})OVERLAP_F_B"

    @property
    def words(self) -> str:
        return f"the pair {self.forward.words} | {self.backward.words}"


Cell = Action | Pair

_UNIT = r"\d{1,9}(?:\.\d{1,9})?"
_COMMUNICATION = re.compile(r"\d+(SEND|RECV)")


@lru_cache(maxsize=1)
def _patterns() -> tuple[re.Pattern[str], re.Pattern[str], re.Pattern[str]]:
    """Return the patterns of a cell with one action, with one of a kind that fuses two, and with a pair."""
    forward = "|".join(kind.letter for kind in kinds() if kind.is_forward and not kind.vocabulary)
    letters = sorted((kind.letter for kind in kinds() if not kind.fuses and not kind.part), key=len, reverse=True)
    single, whole = ("|".join(each for each in letters if _KINDS[each].of_stage is of) for of in (False, True))
    fused = rf"(\d{{1,9}})([A-Z]+)({_UNIT});\1([A-Z]+)\3"
    back = rf"\d{{1,9}}[A-Z]+{_UNIT}(?:;\d{{1,9}}[A-Z]+{_UNIT})?"
    pair = rf"\((\d{{1,9}}(?:{forward}){_UNIT});({back})\)(?:OVERLAP_F_B)?"
    return (
        re.compile(rf"(\d{{1,9}})(?:({single})({_UNIT})(:{PART})?|({whole}))", re.ASCII),
        re.compile(rf"\({fused}\)", re.ASCII),
        re.compile(pair, re.ASCII),
    )


def parse_action(text: str) -> Action:
    """The action written `text`; raises ScheduleError, with examples, on anything else."""
    single, fused, _ = _patterns()
    match = single.fullmatch(text)
    if match is not None:
        if match[5]:
            return Action(match[5], int(match[1]))
        part = match[4] or ""
        if part and _KINDS[match[2]].divides is None:
            divided = [kind.letter for kind in kinds() if kind.divides and not kind.part]
            raise ScheduleError(f"{text!r:.200}: {match[2]} has no parts; {' or '.join(divided)} may name one")
        return Action(_KINDS[match[2] + part].letter, int(match[1]), *_unit(match[3]))
    match = fused.fullmatch(text)
    letters = match and next((kind.letter for kind in kinds() if kind.fuses == (match[2], match[4])), None)
    if match is not None and letters:
        return Action(letters, int(match[1]), *_unit(match[3]))
    if _COMMUNICATION.match(text):
        raise ScheduleError(
            f"{text!r:.200} is a communication; sends and receives are derived here, so export the schedule without them "
            '(in torch: format="compute_only")'
        )
    raise ScheduleError(f"{text!r:.200} is not an action; one looks like 0F0, 3B2, 3I2, 3W2 or (0F5;3B1)OVERLAP_F_B")


def _unit(text: str) -> tuple[int, int | None]:
    """The micro-batch and the slice of `0.1`, or of `0`, which names no slice."""
    microbatch, dot, part = text.partition(".")
    return int(microbatch), int(part) if dot else None


def parse_cell(text: str) -> Cell:
    """The action or pair written `text`; raises ScheduleError on anything else, trailing characters included."""
    match = _patterns()[2].fullmatch(text.replace(" ", ""))
    if match is None:
        return parse_action(text)
    pair = Pair(parse_action(match[1]), parse_action(f"({match[2]})" if ";" in match[2] else match[2]))
    if INPUT_GRADIENT not in _KINDS[pair.backward.kind].makes:
        raise ScheduleError(
            f"{text!r:.200} is not an action; a pair is a forward and a backward, as in (0F5;3B1)OVERLAP_F_B"
        )
    return pair
