"""Tables for Python: text in a terminal, HTML in a notebook, dictionaries for code."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from pipeloom.draw.figures import FIGURE_WORDS, cost_numbers, figures, full_rank, in_blocks, messages, number
from pipeloom.errors import ArgumentError, UsageError, folded
from pipeloom.limits import of_annotated_types
from pipeloom.schedule import Costs, Schedule, Timeline, period, simulate
from pipeloom.schedule.channels import size_words
from pipeloom.schedule.costs import DEVICE


@dataclass(frozen=True)
class Table:
    """Rows of figures, which print as text.

    Attributes:
        rows: for each row name -> value.
        cells: the lines of the head, and the rows, as they are printed.
        notes: lines below them.
    """

    rows: tuple[Mapping[str, Any], ...]
    cells: tuple[Sequence[str], ...]
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return iter(self.rows)

    def __getitem__(self, at: int) -> Mapping[str, Any]:
        return self.rows[at]

    def __str__(self) -> str:
        return folded("\n".join([*in_blocks(self.cells), *self.notes]))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """For notebooks: the same cells."""
        lines = [
            "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row)
            for at, row in enumerate(self.cells)
            for tag in ("th" if at < len(self.cells) - len(self.rows) else "td",)
        ]
        notes = "<br>".join(escape(note) for note in self.notes)
        return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + f"</table><p>{notes}</p>"


@of_annotated_types
def compare(
    schedules: Iterable[Schedule | Timeline] | Mapping[str, Schedule | Timeline], costs: Costs | None = None
) -> Table:
    """Several schedules that do the same work, a row for each.

    >>> import pipeloom as pl
    >>> table = pl.compare({"plain": pl.schedules.one_f_one_b(4, 8), "chunks": pl.schedules.interleaved(4, 8)})
    >>> [(row["schedule"], row["makespan"]) for row in table]
    [('plain', 33.0), ('chunks', 28.5)]

    Args:
        schedules: they, or label -> schedule; timelines, which are not simulated again.
        costs: of 1/p of the model, so that a stage of a schedule with v chunks a rank costs 1/v of them; default: `Costs()`.

    Raises UsageError for what is neither a schedule nor a timeline, and where there is none.
    """
    costs = costs if costs is not None else Costs()
    labelled = schedules.items() if isinstance(schedules, Mapping) else [("", each) for each in schedules]
    timelines: list[tuple[str, Timeline]] = []
    for label, each in labelled:
        if isinstance(each, Schedule):
            each = simulate(each, shared_costs(costs, each))
        timelines.append((label or each.name, each))
    if not timelines:
        raise UsageError("schedules: there are none; give at least one pipeloom.Schedule")
    rows = tuple({"schedule": label, **figures(timeline)} for label, timeline in timelines)
    return Table(rows, *shown_figures(timelines, costs))


def shown_figures(
    timelines: Sequence[tuple[str, Timeline]], costs: Costs, limit: float | None = None
) -> tuple[tuple[list[str], ...], tuple[str, ...]]:
    """Return the head of two lines and a row of `figure_cells` for each (label, timeline), and the notes below.

    Without sizes of messages of 0, and peaks of memory that are those of activations. With bytes: the GiB of each pool on its
    worst rank, that rank, and whether a device of `limit` bytes holds them.
    """
    rows = [figure_cells(timeline) | _byte_cells(timeline, limit) for _, timeline in timelines]
    hidden = {("mem.", "max")} if all(row["mem.", "max"] == row["act.", "max"] for row in rows) else set()
    hidden |= {("mes.", "size")} if not costs.message else set()
    columns = [key for key in dict.fromkeys(key for row in rows for key in row) if key not in hidden]
    heads = [[word, *(key[at] for key in columns)] for at, word in enumerate(("", "schedule"))]
    lines = ([label, *(row.get(key, "-") for key in columns)] for (label, _), row in zip(timelines, rows, strict=True))
    memory = "" if hidden >= {("mem.", "max")} else "; mem.: peak memory in the same units"
    return (*heads, *lines), (
        f"costs of 1/p of the model: {cost_numbers(costs)} (a stage of a schedule with v chunks a rank costs 1/v of them)",
        *(f"{key.replace('_', ' ')}: {words}" for key, words in FIGURE_WORDS.items()),
        f"mes.: messages between ranks in a step{', and their size' * bool(costs.message)}; par: copies of the model",
        f"act.: peak activations in full-rank units (micro-batches of 1/p of the model){memory}",
        *(["GiB: the most bytes in each pool, on the rank that has the most"] if costs.bytes else []),
    )


def figure_cells(timeline: Timeline) -> dict[tuple[str, str], str]:
    """The two lines of a column's head -> the figure of `timeline` in that column."""
    peaks = full_rank_peaks(timeline)
    sent = messages(timeline.schedule, timeline.costs)
    return {
        ("", "makespan"): number(timeline.makespan),
        ("bubble", "ratio"): f"{timeline.bubble_ratio:.4f}",
        ("bubble", "rate"): f"{timeline.bubble_rate:.4f}",
        ("span", "rate"): f"{timeline.span_bubble_rate:.4f}",
        ("", "period"): number(period(timeline.schedule, timeline.costs, overlap_p2p=timeline.overlap_p2p)),
        ("mes.", "count"): str(sent["count"]),
        ("mes.", "size"): size_words(sent["size"]),
        ("", "par"): f"{timeline.schedule.stages // timeline.schedule.positions}x",
        ("act.", "max"): number(max(peaks)),
        ("act.", "mean"): number(sum(peaks) / len(peaks)),
        ("mem.", "max"): number(max(timeline.peak_memory)),
    }


def _byte_cells(timeline: Timeline, limit: float | None) -> dict[tuple[str, str], str]:
    cells: dict[tuple[str, str], str] = {}
    for pool, peaks in timeline.peak_bytes.items():
        most = max(peaks)
        cells |= {(pool, "GiB"): number(most / 2**30), (pool, "rank"): str(peaks.index(most))}
        if limit is not None and pool == DEVICE:
            cells[f"{number(limit / 2**30)} GiB", "fits"] = "yes" if most <= limit else "no"
    return cells


def full_rank_peaks(timeline: Timeline) -> list[float]:
    """Rank -> peak activations in full-rank units (micro-batches of 1/p of the model)."""
    full = full_rank(timeline.schedule)
    return [peak * full for peak in timeline.peak_activations]


def shared_costs(costs: Costs, schedule: Schedule) -> Costs:
    """The costs of a stage of `schedule` from `costs` of 1/p of the model (p values: one per p-th of the model).

    A stage is one of `positions` equal parts of the model, so its costs are p / positions of those given (1/v with v chunks
    per rank). Raises UsageError for a cost with neither one value nor p values.
    """
    factor = schedule.ranks / schedule.positions

    def spread(name: str, values: Any) -> Any:
        if not isinstance(values, tuple):
            return values
        if len(values) != schedule.ranks:
            words = f" has {len(values)} values; compare takes costs of 1/p of the model: give one number, or {schedule.ranks}"
            raise ArgumentError(name, words)
        positions = (at * schedule.ranks // schedule.positions for at in schedule.position_of)
        return tuple(spread(name, values[at]) for at in positions)

    return costs.changed(spread).resized(factor)
