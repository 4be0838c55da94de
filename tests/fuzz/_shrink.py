"""The cases of `gradients` that are simpler than a given one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from fuzz._cases import _DEFAULTS, Case, is_valid, schedule_of

SIMPLER_SCHEDULES = ("gpipe", "1f1b", "zb-h1", "interleaved", "zbv", "1f1b-overlap", "chimera")


def simpler(case: Case) -> Iterator[Case]:
    """Valid cases with one thing less, those that save most first."""
    yield from filter(is_valid, _simpler(case))


def _simpler(case: Case) -> Iterator[Case]:
    yield from _fewer_processes(case)
    yield _with(case, steps=1)
    yield from _simpler_schedule(case)
    for at in reversed(range(len(case.layers))):
        yield from _without_layer(case, at)
    for name in _OPTIONS:
        yield _with(case, **{name: _DEFAULTS[name]})
    yield _with(case, rows=(1,) * case.microbatches)
    for at in range(len(case.layers)):
        yield from _simpler_layer(case, at)


_OPTIONS = (
    *("ties", "one_object", "modules", "stages", "recompute", "dtype", "all_outputs", "accumulate"),
    *("unsynced", "evaluate", "zero", "deallocate", "shapes", "transport", "overlap_p2p", "receive_depth"),
    *("main_gradients", "shard_gradients", "seed"),
)


def _with(case: Case, **changes: Any) -> Case:
    return dataclasses.replace(case, **changes)


def _fewer_processes(case: Case) -> Iterator[Case]:
    if case.dp:
        local = {"transport", "overlap_p2p", "receive_depth", "main_gradients", "shard_gradients", "unsynced"}
        yield _with(case, dp=0, **{name: _DEFAULTS[name] for name in local})
        yield _with(case, dp=1)


def _simpler_schedule(case: Case) -> Iterator[Case]:
    """Fewer ranks and micro-batches, a simpler family; layers that find no stage any more are dropped, or stages merge."""
    for ranks in range(1, case.ranks):
        yield _fitting(_with(case, ranks=ranks))
    for count in range(1, case.microbatches):
        yield _fitting(_with(case, microbatches=count))
    for name in SIMPLER_SCHEDULES[: _place(case.schedule)]:
        yield _fitting(_with(case, schedule=name, chunks=None))
        yield _fitting(_with(case, schedule=name, chunks=None, cooldown=False, transform="", shuffle=0))
    for name in ("chunks", "cooldown", "transform", "shuffle"):
        yield _fitting(_with(case, **{name: _DEFAULTS[name]}))


def _place(name: str) -> int:
    return SIMPLER_SCHEDULES.index(name) if name in SIMPLER_SCHEDULES else len(SIMPLER_SCHEDULES)


def _fitting(case: Case) -> Case:
    """The case with as many micro-batches' rows as it has micro-batches, and as many stages as its schedule."""
    rows = (case.rows + case.rows[-1:] * case.microbatches)[: case.microbatches]
    case = _with(case, rows=rows)
    if case.stages is not None:
        try:
            positions = schedule_of(case).positions
        except Exception:
            return case
        if positions < len(case.stages):
            case = _with(case, stages=(*case.stages[: positions - 1], sum(case.stages[positions - 1 :])))
    return case


def _without_layer(case: Case, at: int) -> Iterator[Case]:
    def moved(other: int) -> int:
        return other - (other > at)

    if len(case.layers) == 1:
        return
    recompute = case.recompute
    if isinstance(recompute, tuple):
        recompute = tuple(moved(other) for other in recompute if other != at)
    ties = tuple((moved(a), moved(b)) for a, b in case.ties if at not in (a, b))
    rest = _with(case, layers=case.layers[:at] + case.layers[at + 1 :], ties=ties, recompute=recompute)
    if case.stages is None:
        yield rest
        return
    stage, before = 0, 0
    while before + case.stages[stage] <= at:
        before, stage = before + case.stages[stage], stage + 1
    stages = list(case.stages)
    stages[stage] -= 1
    yield _with(rest, stages=tuple(stages))
    yield _with(rest, stages=None)


def _simpler_layer(case: Case, at: int) -> Iterator[Case]:
    def changed(**values: Any) -> Case:
        layer = dataclasses.replace(case.layouts[at], **values)
        return _with(case, layers=(*case.layers[:at], str(layer), *case.layers[at + 1 :]))

    layout = case.layouts[at]
    if layout.hooks:
        yield changed(hooks=())
        for hook in layout.hooks:
            yield changed(hooks=tuple(other for other in layout.hooks if other != hook))
    if layout.frozen:
        yield changed(frozen="")
    if layout.kind != "linear":
        yield changed(kind="linear")
