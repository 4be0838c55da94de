"""`pipeloom compare --lengths FILE`: the plan of a step of sequences of these lengths beside simple packings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pipeloom.draw.figures import in_columns, number
from pipeloom.draw.svg import LINE, SHEET_MARGIN, Sheet, svg_document, svg_style, wrapped
from pipeloom.errors import UsageError
from pipeloom.limits import read_text
from pipeloom.plan.step import SequenceTime, StepPlan, plan_step, simple_plans
from pipeloom.schedule import Costs, Timeline

_MOST_BYTES = 10_000_000
_TIMES = "makespan: in the times of the costs (default: F, I and W of 1,000 tokens on 1/p of the model take 1 each)"


def lengths_in(path: str) -> list[int]:
    """Return the whole numbers in a file, apart by spaces, commas or lines. Raises UsageError for anything else in it."""
    words = read_text(path, _MOST_BYTES, "lengths").replace(",", " ").split()
    wrong = [word for word in words if not word.isdecimal()]
    if wrong or not words:
        what = f"{wrong[0]!r:.40} is no number of tokens" if wrong else "the file is empty"
        raise UsageError(f"--lengths {path}: {what}; give whole numbers, such as 900 80 70")
    return [int(word) for word in words]


def plans_of(
    lengths: list[int], ranks: int, replicas: int, tokens: int | None, attention: int | None, costs: Costs
) -> list[tuple[str, StepPlan]]:
    """Return the plan, then simple packings with 1F1B and interleaving.

    Args:
        tokens: the most of a micro-batch; None: of the longest sequence.
        attention: tokens of a sequence at which attention takes as long as all else; None: it takes no time.
        costs: of 1/p of the model, for 1,000 tokens.
    """
    most = max(lengths) if tokens is None else tokens
    time = SequenceTime(linear=1e-3, square=0.0 if attention is None else 1e-3 / attention)
    plan = plan_step(lengths, ranks, replicas, tokens=most, time=time, costs=costs)
    return [("plan", plan), *simple_plans(lengths, ranks, replicas, tokens=most, time=time, costs=costs)]


def as_dict(plans: list[tuple[str, StepPlan]]) -> dict[str, Any]:
    """Return the plans as JSON values."""
    rows = [
        {
            "label": label,
            "schedule": plan.family[0],
            "chunks": plan.family[1],
            "makespan": plan.makespan,
            "replicas": [{"makespan": each.timeline.makespan, "tokens": list(each.tokens)} for each in plan.replicas],
        }
        for label, plan in plans
    ]
    return {"bound": plans[0][1].bound, "plans": rows}


def drawn(plan: StepPlan) -> list[Timeline]:
    """Return the timelines of the replicas, named after them."""
    return [replace(run.timeline, label=f"replica {at}: {run.schedule.name}") for at, run in enumerate(plan.replicas)]


def token_lines(plan: StepPlan, width: float) -> str:
    """Return an SVG document of `width` pixels with the tokens of each replica's micro-batches, by their numbers."""
    sheet, title, y = Sheet(width), "number:tokens of each micro-batch", 28.0
    sheet.text(SHEET_MARGIN, y, title, "h")
    for at, each in enumerate(plan.replicas):
        words = [f"replica {at}:", *(f"{batch}:{tokens}" for batch, tokens in enumerate(each.tokens))]
        for line in wrapped(" ".join(words), 12, width - 2 * SHEET_MARGIN):
            y += LINE
            sheet.text(SHEET_MARGIN, y, line)
    return svg_document((width, y + 14), title, svg_style(), sheet.out)


def table(plans: list[tuple[str, StepPlan]]) -> list[str]:
    """Return a line for each plan, and the tokens of each replica's micro-batches, replicas under each other."""
    shortest = plans[0][1].makespan
    lines = [["micro-batches", "schedule", "makespan", "over plan"]]
    for label, plan in plans:
        name, chunks = plan.family
        schedule = f"{name}:chunks={chunks}" if chunks > 1 else name
        lines.append([label, schedule, number(plan.makespan), f"{plan.makespan / shortest:.3f}"])
    tokens = [
        ["" if at else label, str(at), " ".join(map(str, each.tokens))]
        for label, plan in dict(plans).items()
        for at, each in enumerate(plan.replicas)
    ]
    heading = ["micro-batches", "replica", "tokens of each in order"]
    return [*in_columns(lines, 2), "", *in_columns([heading, *tokens], 3, ragged=True), "", _TIMES]
