"""Actions: what one rank does for one stage and one micro-batch, and their one-cell text form.

The text of a cell is the one that `torch.distributed.pipelining` reads and writes: `0F0`, `3I2`, `3W2`, `3B2`,
`(0F5;3B1)OVERLAP_F_B`.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple, cast

from pipeloom.errors import ScheduleError

KindName = Literal["F", "B", "I", "W"]
KINDS: tuple[KindName, ...] = ("F", "B", "I", "W")
KIND_WORDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}


class Action(NamedTuple):
    """One computation: `kind` of `stage` for `microbatch`, all counted from 0."""

    kind: KindName
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

_ACTION = re.compile(r"(\d{1,9})(F|B|I|W)(\d{1,9})", re.ASCII)
_PAIR = re.compile(r"\((\d{1,9}F\d{1,9});(\d{1,9}[BI]\d{1,9})\)(?:OVERLAP_F_B)?")
_COMMUNICATION = re.compile(r"\d+(SEND|RECV|UNSHARD|RESHARD|REDUCE)")


def parse_action(text: str) -> Action:
    """The action written `text`; raises ScheduleError that says what a cell looks like."""
    match = _ACTION.fullmatch(text)
    if match is None:
        if _COMMUNICATION.match(text):
            raise ScheduleError(
                f"{text!r} is a communication; sends and receives are derived here: export the compute-only form"
            )
        raise ScheduleError(f"{text!r} is not an action; one looks like 0F0, 3B2, 3I2, 3W2 or (0F5;3B1)OVERLAP_F_B")
    return Action(cast(KindName, match[2]), int(match[1]), int(match[3]))


def parse_cell(text: str) -> Cell:
    """The action or pair written `text`; raises ScheduleError on anything else, trailing characters included."""
    match = _PAIR.fullmatch(text.replace(" ", ""))
    if match is None:
        return parse_action(text)
    return Pair(parse_action(match[1]), parse_action(match[2]))
