"""The CSV form that torch's runtime executes (`format="compute_comms"`): with sends and receives among the cells.

`0SEND_F3` sends the output of stage 0 for micro-batch 3, `1RECV_F3` opens its receive on the rank of stage 1, and `SEND_B` and
`RECV_B` do so for gradients. Here they are derived, so those of a file are checked and left out.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pipeloom.errors import ScheduleError
from pipeloom.schedule.actions import INPUT_GRADIENT, Action, Cell, kind_of
from pipeloom.schedule.model import Schedule, parts

_WORD = re.compile(r"(\d{1,9})(SEND|RECV)_([FB])(\d{1,9})", re.ASCII)

_LETTERS = {"RB": "B", "RI": "I"}
"""What is left of a block without its recomputation."""


class TorchMessage(NamedTuple):
    """A message: the output ("F") or input gradient ("B") of a stage for a micro-batch."""

    letter: str
    stage: int
    microbatch: int

    @property
    def reader(self) -> int:
        """The stage that reads it."""
        return self.stage + (1 if self.letter == "F" else -1)

    def cell(self, word: str) -> str:
        """The cell that sends it ("SEND") or opens its receive ("RECV")."""
        return f"{self.stage if word == 'SEND' else self.reader}{word}_{self.letter}{self.microbatch}"


class CommunicationCell(NamedTuple):
    """The cell of a send or receive: its word, "SEND" or "RECV", and the message."""

    word: str
    message: TorchMessage

    def __str__(self) -> str:
        return self.message.cell(self.word)


def parse_communication(text: str) -> CommunicationCell | None:
    """Return the send or receive written `text`; None of anything else."""
    match = _WORD.fullmatch(text)
    if match is None:
        return None
    stage, word, letter, microbatch = int(match[1]), match[2], match[3], int(match[4])
    before = 0 if word == "SEND" else -1 if letter == "F" else 1
    return CommunicationCell(word, TorchMessage(letter, stage + before, microbatch))


def _messages(schedule: Schedule, action: Action) -> tuple[TorchMessage | None, TorchMessage | None]:
    """Return the message from another rank that an action waits for, and the one to another rank that it makes."""
    kind = kind_of(action.kind)
    letter = "F" if kind.is_forward else "B" if INPUT_GRADIENT in kind.makes else ""
    if not letter:
        return None, None
    result = TorchMessage(letter, action.stage, action.microbatch)
    awaited = result._replace(stage=2 * action.stage - result.reader)

    def crosses(message: TorchMessage) -> bool:
        ends = message.stage, message.reader
        return (
            min(ends) >= 0 and max(ends) < len(schedule.routes[0]) and len({schedule.placement[s] for s in ends}) == 2
        )

    return awaited if crosses(awaited) else None, result if crosses(result) else None


def to_torch_csv(schedule: Schedule) -> tuple[str, tuple[str, ...]]:
    """Return (`schedule` as torch's runtime executes it, the letters of the actions left out, which it does not know).

    Each send stands behind the action that makes its message, and each receive where its sender's action is reached when ranks
    take turns, one action each: the order of torch's own preparation, so that a file of torch's is written back as it was.

    Raises ScheduleError for two routes, tensors by name, slices and a spread vocabulary, which torch's runtime does not have, and
    for a deadlock.
    """
    for reason, holds in (
        (f"has {len(schedule.routes)} routes", len(schedule.routes) > 1),
        ("passes tensors by name between stages", schedule.tensors),
        ("is cut into slices", schedule.slices > 1),
        ("spreads its vocabulary over the ranks", len(schedule.routes[0]) < schedule.stages),
    ):
        if holds:
            raise ScheduleError(f"{schedule.name} {reason}, which torch's runtime cannot execute; write it as JSON")
    omitted: dict[str, None] = {}
    programs = [list(_known_to_torch(program, omitted)) for program in schedule.programs]
    rows: list[list[str]] = [[] for _ in programs]
    opened: list[set[TorchMessage]] = [set() for _ in programs]
    at = [0] * len(programs)
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            if at[rank] == len(program):
                continue
            messages = [_messages(schedule, action) for action in parts(program[at[rank]])]
            if any(awaited is not None and awaited not in opened[rank] for awaited, _ in messages):
                continue
            moved = True
            rows[rank].append(str(program[at[rank]]))
            at[rank] += 1
            for _, message in messages:
                if message is not None:
                    other = schedule.placement[message.reader]
                    rows[rank].append(message.cell("SEND"))
                    rows[other].append(message.cell("RECV"))
                    opened[other].add(message)
    if any(done < len(program) for done, program in zip(at, programs, strict=True)):
        raise ScheduleError(f"{schedule.name} deadlocks; `check` says where")
    return "".join(",".join(row) + "\n" for row in rows), tuple(omitted)


def _known_to_torch(program: Sequence[Cell], omitted: dict[str, None]) -> Iterator[Cell]:
    for cell in program:
        actions = [action._replace(kind=_LETTERS.get(action.kind, action.kind)) for action in parts(cell)]
        omitted |= dict.fromkeys("R" for action in parts(cell) if action.kind in _LETTERS)
        letter = actions[0].kind.partition(":")[0]
        if letter in ("R", "O", "L", "OKEPT", "LKEPT"):
            omitted[letter] = None
        else:
            yield type(cell)(*actions) if len(actions) > 1 else actions[0]  # type: ignore[arg-type]


def require_communications(
    schedule: Schedule, rows: Sequence[Sequence[Cell | CommunicationCell]], places: Sequence[Sequence[str]]
) -> None:
    """Check the sends and receives of a file.

    Args:
        schedule: the actions of the file.
        rows: rank -> all its cells.
        places: rank -> where each of them stands, for messages.

    Raises ScheduleError unless every message between ranks is sent once, behind the action that makes it, received once, before
    the one that waits for it, and messages from one rank to another are received in the order in which they are sent.
    """
    ordered: dict[str, dict[tuple[int, int], list[TorchMessage]]] = {
        "SEND": defaultdict(list),
        "RECV": defaultdict(list),
    }
    for rank, row in enumerate(rows):
        unsent: set[TorchMessage] = set()
        opened: dict[TorchMessage, str] = {}
        for cell, place in zip(row, places[rank], strict=True):
            if not isinstance(cell, CommunicationCell):
                for awaited, message in (_messages(schedule, action) for action in parts(cell)):
                    if awaited is not None and opened.pop(awaited, None) is None:
                        raise ScheduleError(f"{place}: {cell} waits for {awaited.cell('RECV')}, which is not before it")
                    unsent |= {message} if message is not None else set()
                continue
            message = cell.message
            if cell.word == "SEND" and message not in unsent:
                raise ScheduleError(
                    f"{place}: {cell} is not behind an action that makes a message to another rank, or is there twice"
                )
            if cell.word == "SEND":
                unsent.remove(message)
                ordered["SEND"][rank, schedule.placement[message.reader]].append(message)
            elif 0 <= message.stage < schedule.stages and message not in opened:
                opened[message] = place
                ordered["RECV"][schedule.placement[message.stage], rank].append(message)
            else:
                raise ScheduleError(f"{place}: {cell} receives nothing, or is there twice")
        for message, place in opened.items():
            raise ScheduleError(f"{place}: no action behind {message.cell('RECV')} waits for it")
        for message in sorted(unsent):
            raise ScheduleError(f"{places[rank][-1]}: {message.cell('SEND')} is missing on rank {rank}")
    for (source, target), sent in ordered["SEND"].items():
        for first, second in zip(sent, ordered["RECV"][source, target], strict=False):
            if first != second:
                raise ScheduleError(
                    f"rank {source} sends {first.cell('SEND')} where rank {target} receives {second.cell('RECV')}"
                )
