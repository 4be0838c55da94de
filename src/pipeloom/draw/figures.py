"""The figures that go with a drawing, by the names of the JSON output, and how a number is printed."""

from __future__ import annotations

import math
from typing import Any

from pipeloom.schedule import Costs, Schedule, Timeline, lower_bound, period

BUBBLE_WORDS = {
    "bubble_ratio": "Σ idle / Σ busy (Megatron's figure)",
    "bubble_rate": "Σ idle / (p · makespan)",
    "span_bubble_rate": "1 − busy / largest span (zero-bubble papers' figure)",
}


def figures(timeline: Timeline) -> dict[str, Any]:
    """makespan, busy, idle, spans, the three bubble figures, period, peak activations and memory, lower bound, gap.

    busy, idle, spans and the peaks are lists with one value a rank; times are in the unit of the costs. The period
    and the lower bound follow from the timeline's costs.
    """
    bound = lower_bound(timeline.schedule, timeline.costs)
    return {
        "makespan": plain(timeline.makespan),
        "busy": list(timeline.busy),
        "idle": list(timeline.idle),
        "spans": [plain(span) for span in timeline.spans],
        "bubble_ratio": timeline.bubble_ratio,
        "bubble_rate": timeline.bubble_rate,
        "span_bubble_rate": timeline.span_bubble_rate,
        "period": period(timeline.schedule, timeline.costs, overlap_p2p=timeline.overlap_p2p),
        "peak_activations": list(timeline.peak_activations),
        "peak_memory": list(timeline.peak_memory),
        "lower_bound": bound,
        "gap": timeline.makespan / bound - 1 if bound else 0.0,
    }


def full_rank(schedule: Schedule) -> float:
    """What one stage-micro-batch is in full-rank units: what a stage holds of 1/p of the model (1/v in a loop)."""
    return schedule.ranks / schedule.positions


def plain(value: float) -> float:
    """`value` without the dust that adding floats leaves."""
    return round(value, 9) + 0.0


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
    """What was drawn: "interleaved, 4 ranks, 2 chunks, 9 micro-batches, rounds=balanced"."""
    schedule = timeline.schedule
    words = [schedule.name, _count(schedule.ranks, "rank")]
    if schedule.chunks > 1:
        words.append(_count(schedule.chunks, "chunk"))
    words.append(_count(schedule.microbatches, "micro-batch", "es"))
    if len(schedule.routes) > 1:
        words.append(_count(len(schedule.routes), "route"))
    words += [f"{key}={value}" for key, value in schedule.options if key != "chunks" and _is_short(value)]
    return ", ".join(words)


def cost_words(timeline: Timeline) -> str:
    """Which costs it was simulated with: "costs of a stage: F 1, I 1, W 1; p2p 0"."""
    if timeline.source == "measured":
        return "measured"
    return f"costs of a stage: {cost_numbers(timeline.costs)}"


def cost_numbers(costs: Costs) -> str:
    """ "F 1, I 1, W 1; p2p 0"; a range where stages differ."""
    named = (("F", costs.forward), ("I", costs.input_grad), ("W", costs.weight_grad))
    p2p = "by link" if isinstance(costs.p2p, tuple) else number(costs.p2p)
    sizes = f"; micro-batches times {_spread(costs.microbatch)}" if costs.microbatch else ""
    return f"{', '.join(f'{letter} {_spread(value)}' for letter, value in named)}; p2p {p2p}{sizes}"


def _spread(value: float | tuple[float, ...]) -> str:
    if not isinstance(value, tuple):
        return number(value)
    low, high = min(value), max(value)
    return number(low) if low == high else f"{number(low)}..{number(high)}"


def _count(value: int, word: str, plural: str = "s") -> str:
    return f"{value} {word}{'' if value == 1 else plural}"


def _is_short(value: object) -> bool:
    return isinstance(value, (str, int, float)) and len(str(value)) <= 20
