"""The CSV form: one row per rank, one action or pair a cell, as `torch.distributed.pipelining` reads and writes it.

A row gives neither the number of micro-batches nor the rank of a stage, so both are derived: m is
the number of micro-batches that most stages have, and a stage's rank is the one that holds most of its actions. A cell that
disagrees with the majority is then refused, here or by `check`, in a message that names it.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from typing import NamedTuple

from pipeloom.errors import ScheduleError, UsageError
from pipeloom.limits import MOST_CELLS, MOST_RANKS
from pipeloom.schedule.actions import Action, Cell, kind_of, parse_cell
from pipeloom.schedule.comms_form import CommunicationCell, parse_communication, require_communications
from pipeloom.schedule.model import Schedule, parts

_ACTION = re.compile(r"\(?\d+(?!REDUCE)[A-Z]")  # the start of an action; the rest of the cell may still be invalid


class _Place(NamedTuple):
    """Position of a cell in the text; line and column count from 1."""

    line: int
    column: int


def to_csv(schedule: Schedule) -> str:
    """One line per rank, its cells in program order, without idle cells; `from_csv` and torch read it.

    Raises ScheduleError for a schedule with two routes, with slices, with tensors that stages pass by name or with slots: this
    form cannot express them.
    """
    for holds, words in (
        (schedule.slices > 1, f"cuts sequences into {schedule.slices} slices"),
        (len(schedule.routes) > 1, f"has {len(schedule.routes)} routes"),
        *((True, f"passes tensor {name!r:.200} by name between stages") for name, *_ in schedule.tensors),
        *((True, f"holds at most {count} of what is {value}") for value, count in schedule.slots),
    ):
        if holds:
            raise ScheduleError(f"{schedule.name} {words}, which the CSV form cannot say; write it as JSON")
    return "".join(",".join(map(str, program)) + "\n" for program in schedule.programs)


def from_csv(text: str, name: str = "csv", source: str | None = None) -> Schedule:
    """The schedule written in `text`, with one route through all stages of layers in order. Does not run `check`.

    Empty cells are idle and are left out; spaces around a cell, quotes, trailing commas and empty lines at the end do
    not matter. Sends and receives (torch's `compute_comms`) are checked and left out, since they are derived from the rest.

    Args:
        name: the schedule's name.
        source: the file, for messages.

    Raises:
        UsageError: the text is not a schedule: none of its cells is an action.
        ScheduleError: with file:line:column, for a cell that is not an action, for a stage or micro-batch beyond the number that
            the other cells imply, and for a send or receive that is missing or out of place.
    """
    where = source or name
    _require_size(text, where)
    _require_actions(text, where)
    read, places = _read(text, where)
    rows = [[cell for cell in row if not isinstance(cell, CommunicationCell)] for row in read]
    every = [
        (action, place)
        for row, row_places in zip(read, places, strict=True)
        for cell, place in zip(row, row_places, strict=True)
        if not isinstance(cell, CommunicationCell)
        for action in parts(cell)
    ]
    stages = len({action.stage for action, _ in every})
    shares = {action.stage for action, _ in every if kind_of(action.kind).vocabulary}
    microbatches = _microbatches([action for action, _ in every])
    for action, place in every:
        if action.slice is not None:
            raise ScheduleError(
                f"{where}:{place.line}:{place.column}: {action} names a slice, which the CSV form cannot say; write it as JSON"
            )
        for what, value, count in (("stage", action.stage, stages), ("micro-batch", action.microbatch, microbatches)):
            if value >= count:
                raise ScheduleError(
                    f"{where}:{place.line}:{place.column}: {action} names {what} {value} of {count} (0..{count - 1}); "
                    f"{'most stages run' if what == 'micro-batch' else 'the file names'} {count}"
                )
    try:
        schedule = Schedule.of(
            rows,
            placement=_placement(rows, stages),
            microbatches=microbatches,
            name=name,
            routes=[[stage for stage in range(stages) if stage not in shares]],
            route_of=[0] * microbatches,
        )
    except ScheduleError as error:
        raise ScheduleError(f"{where}: {error}") from None
    if read != rows:
        require_communications(schedule, read, [[f"{where}:{line}:{column}" for line, column in row] for row in places])
    return schedule


def _require_size(text: str, where: str) -> None:
    """Raise UsageError for a text of more rows or cells than a schedule may have, before it is taken apart."""
    lines, cells = text.rstrip().count("\n") + 1, text.count(",") + text.count("\n")
    if lines > MOST_RANKS:
        raise UsageError(f"{where} has {lines:,} lines; a schedule has one for each rank, and at most {MOST_RANKS:,}")
    if cells > 16 * MOST_CELLS:  # idle cells are cells too
        raise UsageError(f"{where} has {cells:,} cells; a schedule has at most {16 * MOST_CELLS:,}")


def _require_actions(text: str, where: str) -> None:
    """Raise UsageError when no cell looks like an action."""
    lines = text.removeprefix("\ufeff").splitlines()
    words = [word for line in lines for word in map(_word, filter(None, line.split(","))) if word]
    if not words:
        raise UsageError(f"{where}: the file contains no actions")
    if not any(map(_ACTION.match, words)):
        raise UsageError(
            f"{where} is not a schedule: none of its cells is an action, such as 0F0, 3B2, 3I2, 3W2 or "
            f"(0F5;3B1)OVERLAP_F_B; the first cell is {words[0]!r:.60}"
        )


def _word(piece: str) -> str:
    """A cell without the spaces and quotes around it."""
    return piece.strip().strip('"').strip()


def _read(text: str, where: str) -> tuple[list[list[Cell | CommunicationCell]], list[list[_Place]]]:
    """Each rank's cells and their places in the text."""
    rows: list[list[Cell | CommunicationCell]] = []
    places: list[list[_Place]] = []
    for line, content in enumerate(text.removeprefix("\ufeff").rstrip().splitlines(), start=1):
        row: list[Cell | CommunicationCell] = []
        row_places: list[_Place] = []
        column = 1
        for piece in content.split(","):
            word = piece and _word(piece)
            if word:
                place = _Place(line, column + len(piece) - len(piece.lstrip()))
                row.append(parse_communication(word) or _cell(word, f"{where}:{place.line}:{place.column}"))
                row_places.append(place)
            column += len(piece) + 1
        rows.append(row)
        places.append(row_places)
    return rows, places


def _cell(word: str, where: str) -> Cell:
    try:
        return parse_cell(word)
    except ScheduleError as error:
        raise ScheduleError(f"{where}: {error}") from None


def _microbatches(actions: list[Action]) -> int:
    """m: how many micro-batches go forward through most of the stages; ties go to the larger."""
    seen: dict[int, set[int]] = defaultdict(set)
    forwards = [action for action in actions if action.kind == "F"]
    for action in forwards or [action for action in actions if not kind_of(action.kind).of_stage] or actions:
        seen[action.stage].add(action.microbatch)
    return max(Counter(map(len, seen.values())).items(), key=lambda item: (item[1], item[0]))[0]


def _placement(rows: list[list[Cell]], stages: int) -> list[int]:
    """stage -> the rank with most of its actions; the first of two with equally many."""
    votes: list[Counter[int]] = [Counter() for _ in range(stages)]
    for rank, row in enumerate(rows):
        for cell in row:
            for action in parts(cell):
                votes[action.stage][rank] += 1
    return [vote.most_common(1)[0][0] for vote in votes]
