"""A plan in words: the table, the memory of the fullest rank line by line, and why the neighbours of the best layout lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from pipeloom.draw.figures import in_blocks
from pipeloom.draw.tables import Table
from pipeloom.errors import CapacityError, UsageError, did_you_mean
from pipeloom.plan.memory import RankMemory
from pipeloom.plan.predict import LayoutCosts, Planner
from pipeloom.plan.search import Estimate, LayoutPlan, PlanRequest, fastest, search
from pipeloom.plan.time import StepTime
from pipeloom.plan.time import device as device_named
from pipeloom.shapes.hub import load as load_model
from pipeloom.shapes.ops import RUNTIMES

GIB = 2**30
_RELEASES = 0.39  # the largest difference of one layout's published steps (docs/planning.md)
_CAUSES = {
    "compute": "more computation", "exchange": "more exchange", "idle": "a larger bubble",
    "reduction": "a longer sum of gradients", "optimizer": "a slower optimizer", "host": "more waiting for hosts",
}  # fmt: skip
_SAVINGS = {
    "compute": "less computation", "exchange": "less exchange", "idle": "a smaller bubble",
    "reduction": "a shorter sum of gradients", "optimizer": "a faster optimizer", "host": "less waiting for hosts",
}  # fmt: skip
# Field of RankMemory -> the head of its column, and what that means.
_HEADS = {
    "parameters": ("params", "parameters"), "gradients": ("grads", "gradients"),
    "optimizer": ("optim", "the optimizer's state"), "gathered": ("gath", "gathered copies"),
    "buffers": ("buffers", "of messages and libraries"), "activations": ("activ", "activations"),
    "temporaries": ("temp", "used by the action at the peak"), "reserve": ("reserve", "of the allocator"),
    "overhead": ("overhead", "CUDA, NCCL"),
}  # fmt: skip


def gib(size: float) -> str:
    """Bytes as people write them in a table: "61.2"."""
    return f"{size / GIB:.1f}"


def step_words(step: StepTime, tokens: float, device: str, *, measured: bool = False) -> str:
    """A sentence with the seconds of a step, a range where nothing was `measured`, and `tokens` per second on each device."""
    parts = ", ".join(f"{name} {part:.3g} s" for name, part in step.parts().items() if part >= 0.001 * step.total)
    speed = f"{tokens:,.0f} tokens/s on each device ({parts})"
    if measured:
        return f"step: {step.total:.4g} s, {speed}"
    return (
        f"step on {device}: {step.total:.3g} to {step.total * (1 + _RELEASES):.3g} s, since releases of one runtime differ by "
        f"{100 * _RELEASES:.0f} %; at best {speed}"
    )


def table(predictions: list[LayoutCosts]) -> list[list[str]]:
    """Rows of a table, the head first."""
    rows = [["layout", "tokens/s", "idle", "exchange", "GiB"]]
    for each in predictions:
        parts = each.step.parts()
        shares = [f"{100 * parts[name] / each.step.total:.0f} %" for name in ("idle", "exchange")]
        rows.append([each.layout.text(), f"{each.tokens:,.0f}", *shares, gib(each.peak)])
    return rows


def best_layouts(
    model: str,
    devices: int,
    device: str = "h100",
    *,
    sequences: int | None = None,
    seq: int = 4096,
    memory: float | None = None,
    runtime: str = "pipeloom",
    fixed: Mapping[str, Any] | None = None,
) -> Table:
    """The layouts of a model on so many devices that fit, of which no other is as fast with as little memory.

    >>> import pipeloom as pl
    >>> best = pl.best_layouts("llama3-8b", 2, sequences=32, fixed={"tp": 1})[0]
    >>> best["layout"], best["peak_bytes"] < 80 * 2**30
    ('pp=2,m=32,recompute=full,slices=2,vocabulary=pp,recompute_layers=13', True)

    Args:
        model: a preset, such as llama3-8b, or a file or directory with a `config.json`.
        device: h100, or another name of `plan.load_device`.
        sequences: of a step; default: as many as make 4 Mi tokens.
        seq: tokens of a sequence.
        memory: bytes that a device may use; default: what its driver offers.
        runtime: pipeloom, megatron or torchtitan.
        fixed: field of `plan.PlannedLayout` -> its value.

    Raises UsageError for names that are not known and sizes without a layout; CapacityError where none fits.
    """
    if runtime not in RUNTIMES:
        raise UsageError(f"runtime is {runtime!r:.60}{did_you_mean(runtime, RUNTIMES)}")
    planned = device_named(device)
    planner = Planner(load_model(model), planned, RUNTIMES[runtime])
    request = PlanRequest.of(runtime, devices, memory or planned.memory, sequences, seq, fixed=fixed or {})
    plan = search(planner, request)
    if not plan.predictions:
        raise CapacityError(none_fits(plan, planner.shape.name, request))
    return Table(tuple(map(as_dict, plan.pareto)), tuple(table(plan.pareto)), (advice(plan),))


def none_fits(plan: LayoutPlan, model: str, request: PlanRequest) -> str:
    """Return how much memory the smallest layout lacks."""
    words = f"no layout of {model} fits into {gib(request.memory)} GiB on {request.devices} devices"
    if plan.smallest is None:
        return words
    least = plan.smallest.peak
    return f"{words}; the smallest needs {gib(least)} GiB, {gib(least - request.memory)} more: {plan.smallest.text}"


def memory_lines(
    ranks: Sequence[RankMemory], size: Callable[[float], str] = gib, total: str = "total GiB", most: int = 8
) -> list[str]:
    """A table of ranks (of more than `most` some), without columns of zeros, and what its heads mean."""
    last = len(ranks) - 1
    numbers = [*range(last + 1)] if last < most else [0, 1, 2, len(ranks) // 2, last - 1, last]
    names = [spec.name for spec in fields(RankMemory) if spec.name != "peak_action"]
    names = [name for name in names if any(size(getattr(each, name)) != size(0.0) for each in ranks)]
    rows = [["rank", *(_HEADS[name][0] for name in names), total]]
    rows += [[str(at), *(size(getattr(ranks[at], name)) for name in (*names, "total"))] for at in numbers]
    return [*in_blocks(rows), "; ".join(": ".join(_HEADS[name]) for name in names)]


def refined_lines(before: Sequence[LayoutCosts], after: Sequence[LayoutCosts]) -> list[str]:
    """Sentences: the layouts for which a search found a faster schedule than the family's."""
    steps = {each.layout: each.step.total for each in before}
    lines = [
        f"  {each.layout.text()}: step {steps[each.layout]:.4g} → {each.step.total:.4g} s, "
        f"{100 * (steps[each.layout] / each.step.total - 1):.1f} % faster, {gib(each.peak)} GiB"
        for each in after
        if each.searched is not None
    ]
    return ["", "searched schedules, the best first:", *(lines or ["  none is faster than those of the families"])]


def reason(layout: LayoutCosts | Estimate, best: LayoutCosts, memory: float) -> str:
    """Return why a layout is worse than `best` in `memory` bytes."""
    if isinstance(layout, Estimate):
        peak, seconds, about = layout.memory, layout.seconds, "about "
    else:
        peak, seconds, about = layout.peak, layout.step.total, ""
    slower = seconds / best.step.total - 1
    pace = f"{about}{100 * abs(slower):.1f} % {'slower' if slower > 0 else 'faster'}"
    if -0.001 <= slower < 0.0005:
        pace = f"{about}as fast"
    if peak > memory:
        return f"does not fit: {about}{gib(peak)} GiB, {gib(peak - memory)} too many ({pace})"
    if isinstance(layout, Estimate) or pace == "as fast":
        return pace
    parts, reference, sign = layout.step.parts(), best.step.parts(), 1 if slower > 0 else -1
    name = max(parts, key=lambda each: sign * (parts[each] - reference[each]))
    cause = _CAUSES[name] if slower > 0 else _SAVINGS[name]
    before, after = (round(each[name], 6) for each in (reference, parts))
    return f"{pace}: {cause}, {before:.3g} → {after:.3g} s of {seconds:.3g}"


def advice(plan: LayoutPlan) -> str:
    """Return a sentence that says whether the pipeline pays."""
    flat = [each for each in plan.predictions if each.layout.pp == 1]
    deep = [each for each in plan.predictions if each.layout.pp > 1]
    if not deep:
        return "do not pipeline this: no layout with pp above 1 is among those that fit"
    if not flat:
        return "a pipeline is needed: no layout with pp = 1 is among those that fit"
    gain = deep[0].tokens / flat[0].tokens - 1
    best = f"the best layout with pp = 1 ({flat[0].layout.text()})"
    if gain < 0.001:
        pace = f"{-100 * gain:.1f} % faster than" if gain <= -0.001 else "as fast as"
        return f"do not pipeline this: {best} is {pace} the best with a pipeline"
    return f"the pipeline pays: {100 * gain:.1f} % faster than {best}"


def as_dict(prediction: LayoutCosts) -> dict[str, object]:
    """The prediction as JSON."""
    return {
        "layout": prediction.layout.text(),
        "searched": prediction.searched is not None,
        "world": prediction.layout.world,
        "stages": list(prediction.stages),
        "step_seconds": prediction.step.total,
        "step_parts": prediction.step.parts(),
        "tokens_per_second_per_device": prediction.tokens,
        "peak_bytes": prediction.peak,
        "worst_rank": prediction.worst,
        "allocated_bytes": [round(each.allocated) for each in prediction.ranks],
        "reserved_margin_bytes": [round(each.reserve) for each in prediction.ranks],
        "overhead_bytes": [round(each.overhead) for each in prediction.ranks],
        "memory": [
            {
                spec.name: value if isinstance(value := getattr(each, spec.name), str) else round(value)
                for spec in fields(each)
            }
            for each in prediction.ranks
        ],
    }


def what_if(planner: Planner, request: PlanRequest, plan: LayoutPlan) -> list[str]:
    """Sentences: the best layout where links are half as fast, and where a tenth of the memory is missing."""
    best = plan.best
    slower = replace(planner, device=planner.device.with_links(0.5))
    less = replace(request, memory=0.9 * request.memory)
    lines = []
    for words, other in (
        ("links half as fast", fastest(slower, request, plan)),
        ("a tenth less memory", fastest(planner, less, plan)),
    ):
        if other is None:
            lines.append(f"with {words}: nothing fits")
            continue
        change = other.tokens / best.tokens - 1
        same = "the same layout" if other.layout == best.layout else other.layout.text()
        pace = f"{100 * change:+.1f} % tokens/s" if abs(change) >= 0.001 else "as fast"
        lines.append(f"with {words}: {same}, {pace}")
    return lines
