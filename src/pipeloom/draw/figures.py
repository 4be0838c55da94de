"""The figures that go with a drawing, by the names of the JSON output, and how a number is printed."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from textwrap import wrap
from typing import Any

from pipeloom.errors import COLUMNS, printable
from pipeloom.schedule import Costs, Schedule, Timeline, lower_bound, period
from pipeloom.schedule.channels import message_counts, message_sizes, size_words
from pipeloom.schedule.timeline import CAUSES, plain, timelines_of

FIGURE_WORDS = {
    "period": "from step to step without a barrier",
    "bubble_ratio": "Σ idle / Σ busy (Megatron's figure)",
    "bubble_rate": "Σ idle / (p · makespan)",
    "span_bubble_rate": "1 − busy / largest span (zero-bubble papers' figure)",
}


def figures(timeline: Timeline) -> dict[str, Any]:
    """makespan, busy, idle, its causes, spans, the three bubble figures, period, peaks, messages, lower bound, gap.

    busy, idle, spans and the peaks are lists with one value per rank, and so is every cause of idle time; times are in the
    unit of the costs, of a measured timeline in seconds. The period
    and the lower bound follow from the timeline's costs.
    """
    timelines_of(timeline)
    bound = lower_bound(timeline.schedule, timeline.costs)
    return {
        "makespan": plain(timeline.makespan),
        "busy": list(timeline.busy),
        "idle": list(timeline.idle),
        "idle_by_cause": {cause: [row[cause] for row in timeline.idle_by_cause] for cause in CAUSES},
        "spans": [plain(span) for span in timeline.spans],
        "bubble_ratio": timeline.bubble_ratio,
        "bubble_rate": timeline.bubble_rate,
        "span_bubble_rate": timeline.span_bubble_rate,
        "period": period(timeline.schedule, timeline.costs, overlap_p2p=timeline.overlap_p2p),
        "peak_activations": list(timeline.peak_activations),
        "peak_memory": list(timeline.peak_memory),
        "messages": messages(timeline.schedule, timeline.costs),
        "lower_bound": bound,
        "gap": timeline.makespan / bound - 1 if bound else 0.0,
    }


def messages(schedule: Schedule, costs: Costs) -> dict[str, Any]:
    """Messages between ranks in a step: number and size in all, by kind and by channel, and the number that each rank sends.

    Sizes are in the unit of `Costs.message`; 0 where it is not given.
    """
    counts, sizes = message_counts(schedule), message_sizes(schedule, costs)
    sent = [0] * schedule.ranks
    kinds: dict[str, dict[str, float]] = {}
    for channel, count in counts.items():
        sent[channel.source] += count
        kind = kinds.setdefault(channel.kind, {"count": 0, "size": 0.0})
        kind["count"] += count
        kind["size"] += sizes[channel]
    channels = [channel._asdict() | {"count": count, "size": sizes[channel]} for channel, count in counts.items()]
    return {"count": sum(sent), "size": sum(sizes.values()), "sent": sent, "by_kind": kinds, "channels": channels}


def message_words(totals: dict[str, Any]) -> str:
    """ "48 between ranks, 192 MiB", of `messages`; without the size where it is not known."""
    return f"{totals['count']} between ranks" + (f", {size_words(totals['size'])}" if totals["size"] else "")


def full_rank(schedule: Schedule) -> float:
    """Return one stage-micro-batch, or slice of one, in full-rank units, micro-batches of 1/p of the model: 1/v in a loop of v
    chunks."""
    return schedule.ranks / schedule.positions / schedule.slices


def label_words(schedule: Schedule) -> str:
    """Return the meaning of the labels of actions."""
    return "micro-batch" if schedule.slices == 1 else "micro-batch.slice"


def number(value: float, digits: int = 4) -> str:
    """`value` for print: whole numbers whole, others with about `digits` significant digits and no exponent."""
    if not math.isfinite(value):
        return str(value)
    if value == round(value) or abs(value) >= 10**digits:
        return f"{value:.0f}"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def heading(timeline: Timeline) -> str:
    """Return the heading of a drawing: "interleaved, 4 ranks, 2 chunks, 9 micro-batches, rounds=balanced"."""
    schedule = timeline.schedule
    words = [timeline.name, _count(schedule.ranks, "rank")]
    if schedule.chunks > 1:
        words.append(_count(schedule.chunks, "chunk"))
    words.append(_count(schedule.microbatches, "micro-batch", "es"))
    if schedule.slices > 1:
        words.append(_count(schedule.slices, "slice"))
    if len(schedule.routes) > 1:
        words.append(_count(len(schedule.routes), "route"))
    words += [f"{key}={value}" for key, value in schedule.options if key != "chunks" and _is_short(value)]
    return printable(", ".join(words)).replace("\n", "\\n")


def time_unit(timelines: Sequence[Timeline]) -> tuple[float, str]:
    """(factor, unit) of the times that people read: seconds, ms or µs where one of the timelines is measured, else none."""
    if not any(timeline.source == "measured" for timeline in timelines):
        return 1.0, ""
    longest = max(timeline.makespan for timeline in timelines)
    return next(((factor, unit) for factor, unit in ((1.0, "s"), (1e3, "ms")) if longest * factor >= 1), (1e6, "µs"))


def assumptions(timeline: Timeline, unit: tuple[float, str] = (1.0, "")) -> str:
    """Return the assumptions of a drawing: the costs, in a unit of time, and the cost of pairs where there are any."""
    words = [cost_words(timeline, unit)]
    costs = timeline.costs
    if timeline.schedule.has_pairs and timeline.source == "simulated":
        if costs.pair is not None:
            words.append("a pair takes the time given")
        elif costs.all_to_all == 0:
            words.append("a pair takes as long as its halves")
        else:
            words.append("in a pair computation adds and all-to-all adds, and it takes the longer of the two")
    if not timeline.overlap_p2p:
        words.append("receivers wait for their messages")
    if costs.sends != "free":
        words.append(f"{costs.sends} sends")
    return "; ".join(words)


def cost_words(timeline: Timeline, unit: tuple[float, str] = (1.0, "")) -> str:
    """Return the costs of a simulation: "costs of a stage: F 1, I 1, W 1; p2p 0"; for a measured timeline, its unit."""
    if timeline.source == "measured":
        return f"measured, times in {time_unit([timeline])[1]}"
    return f"costs of a stage{f' in {unit[1]}' if unit[1] else ''}: {cost_numbers(timeline.costs, unit[0])}"


def cost_numbers(costs: Costs, factor: float = 1.0) -> str:
    """ "F 1, I 1, W 1; p2p 0", times `factor`; a range where stages differ."""
    named = (("F", costs.forward), ("I", costs.input_grad), ("W", costs.weight_grad))
    p2p = "by link" if isinstance(costs.p2p, tuple) else number(plain(costs.p2p * factor))
    talk = f"; all-to-all {_spread(costs.all_to_all)} of F and I" if costs.all_to_all else ""
    sizes = f"; micro-batches times {_spread(costs.microbatch)}" if costs.microbatch else ""
    return f"{', '.join(f'{letter} {_spread(value, factor)}' for letter, value in named)}; p2p {p2p}{talk}{sizes}"


def _spread(value: float | tuple[float, ...], factor: float = 1.0) -> str:
    if not isinstance(value, tuple):
        return number(plain(value * factor))
    low, high = plain(min(value) * factor), plain(max(value) * factor)
    return number(low) if low == high else f"{number(low)}..{number(high)}"


def _count(value: int, word: str, plural: str = "s") -> str:
    return f"{value} {word}{'' if value == 1 else plural}"


def _is_short(value: object) -> bool:
    return isinstance(value, (str, int, float)) and len(str(value)) <= 20


def in_columns(rows: Sequence[Sequence[str]], left: int = 1, *, ragged: bool = False) -> list[str]:
    """Return a line of text for each row: the first `left` columns to the left, the others to the right; `ragged`: the last one
    as it is, broken at words or commas where it is wider than the terminal."""
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if ragged:
        room = max(20, min(COLUMNS, shutil.get_terminal_size().columns) - sum(wide[:-1]) - 2 * len(wide[:-1]))
        parts = [_in_lines(row[-1], room) or [""] for row in rows]
        blank = [""] * (len(wide) - 1)
        rows = [
            [*(row[:-1] if at == 0 else blank), part]
            for row, lines in zip(rows, parts, strict=True)
            for at, part in enumerate(lines)
        ]
        wide[-1] = 0
    return [
        "  ".join(
            cell.ljust(w) if at < left else cell.rjust(w) for at, (cell, w) in enumerate(zip(row, wide, strict=True))
        )
        for row in rows
    ]


def _in_lines(cell: str, room: int) -> list[str]:
    """Return a cell in lines, broken at its words, or at its commas where it is one word."""
    if len(cell) <= room or " " in cell:
        return wrap(cell, room, break_long_words=False, break_on_hyphens=False)
    return [part.replace(", ", ",") for part in wrap(cell.replace(",", ", "), room, break_long_words=False)]


def in_blocks(rows: Sequence[Sequence[str]], width: int = COLUMNS, left: int = 1) -> list[str]:
    """`in_columns` within `width`.

    Columns that do not fit stand below the others, behind the first one again, and a cell of the first column that leaves them no
    room on a line of its own.
    """
    wide = [max(map(len, column)) + 2 for column in zip(*rows, strict=True)]
    room = max(width - sum(wide[1:]), width // 3)
    first = max(len(row[0]) for row in rows if len(row[0]) <= room or row is rows[0])
    blocks: list[list[int]] = [[]]
    for at, needed in enumerate(wide[1:], 1):
        if blocks[-1] and first + sum(wide[column] for column in blocks[-1]) + needed > width:
            blocks.append([])
        blocks[-1].append(at)
    lines: list[str] = []
    for block in blocks:
        cells = in_columns([[row[0] if len(row[0]) <= first else "", *(row[at] for at in block)] for row in rows], left)
        lines += [""] * bool(lines)
        for row, line in zip(rows, cells, strict=True):
            lines += (_in_lines(row[0], width) if len(row[0]) > first else []) + [line.rstrip()]
    return lines
