"""A case: a model, a schedule, a layout and options, all of it in one line of JSON; and how cases are drawn."""

from __future__ import annotations

import dataclasses
import json
import random
from dataclasses import dataclass
from functools import cache
from typing import Any

import pipeloom as pl
from batch_walk import check_batches
from fuzz._layers import ALIASING, CLOSING, CUTTING, FROZEN, HOOKS, KINDS, OPENING, STATEFUL, Layout
from pipeloom.errors import ScheduleError, UsageError
from pipeloom.schedule.channels import traffic

LARGEST_WORLD = 4
FAMILIES = tuple(pl.schedules.FAMILIES)
TRANSFORMS = (
    *("unpair", "split-cooldown", "half-split", "half-split=1", "merge-backward", "cut-stages=2"),
    *("defer-last-stage-weights", "defer-last-stage-weights=1"),
)
COMPLEX = ("complex", "phase")  # the trainer's optimizer, which sharded gradients need, steps real weights only
TRANSPORTS = ("individual", "batched", "shared")


@dataclass(frozen=True)
class Case:
    """What is run. Defaults are the simplest values: the shrinker moves towards them, and JSON leaves them out.

    Attributes:
        layers: their texts (see _layers.py), in order.
        schedule, ranks, microbatches, chunks, cooldown, transform: what the schedule is built from.
        shuffle: seed of a random order of the schedule's actions, some of its backwards split; 0: as it is built.
        stages: layers of each stage; None: spread evenly.
        rows: of each micro-batch. A replica's own are these, rotated by its number, the first longer by its number.
        dp: data-parallel replicas, in processes of their own; 0: LocalPipeline.
        ties: pairs of layers that share a weight.
        one_object: whether they share one Parameter object from the start, not by `tied=`.
        modules: layers are given as built modules, not as factories.
        recompute: the option, with numbers of layers in place of names.
        steps: optimizer steps. accumulate: steps of the pipeline for each of them, `unsynced`: the first under no_sync.
        evaluate: whether an evaluation follows each step.
        zero: how gradients are dropped: by the pipeline, set to None, or filled with zeros.
        seed: of weights and data.
    """

    layers: tuple[str, ...] = ("linear",)
    schedule: str = "gpipe"
    ranks: int = 1
    microbatches: int = 1
    chunks: int | None = None
    cooldown: bool = False
    transform: str = ""
    shuffle: int = 0
    stages: tuple[int, ...] | None = None
    rows: tuple[int, ...] = (1,)
    dp: int = 0
    ties: tuple[tuple[int, int], ...] = ()
    one_object: bool = False
    modules: bool = False
    recompute: str | tuple[int, ...] = "none"
    dtype: str = "float64"
    all_outputs: bool = False
    steps: int = 1
    accumulate: int = 1
    unsynced: bool = False
    evaluate: bool = False
    zero: str = "pipeline"
    deallocate: bool = True
    shapes: str = "once"
    transport: str = "individual"
    overlap_p2p: bool = True
    receive_depth: int = 2
    main_gradients: bool = False
    shard_gradients: bool = False
    seed: int = 0

    @property
    def world(self) -> int:
        """Processes that run it."""
        return self.ranks * max(1, self.dp)

    @property
    def layouts(self) -> tuple[Layout, ...]:
        return tuple(map(Layout.parse, self.layers))

    def replica_rows(self, replica: int) -> tuple[int, ...]:
        """Rows of each micro-batch of a replica."""
        turn = replica % len(self.rows)
        first, *others = self.rows[turn:] + self.rows[:turn]
        return (first + replica, *others)

    def recomputed(self, layer: int) -> bool:
        return self.recompute == "full" or (isinstance(self.recompute, tuple) and layer in self.recompute)

    def to_json(self) -> str:
        """One line; fields at their defaults are left out."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return json.dumps({name: value for name, value in values.items() if value != _DEFAULTS[name]})

    @classmethod
    def from_json(cls, text: str) -> Case:
        return cls(**{name: _as_tuple(value) for name, value in json.loads(text).items()})


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


_DEFAULTS = {field.name: field.default for field in dataclasses.fields(Case)}


# -- the schedule of a case --------------------------------------------------------------------------------------------


@cache
def build_schedule(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int | None,
    cooldown: bool,
    transform: str,
    shuffle: int,
    batched: bool,
) -> pl.Schedule:
    """Raises UsageError or ScheduleError for what the family refuses."""
    options = {"cooldown": "split"} if cooldown else {}
    schedule = pl.schedules.build(name, ranks, microbatches, chunks, options)
    schedule = pl.schedules.transformed(schedule, [transform] if transform else [])
    if shuffle:
        schedule = shuffled(schedule, random.Random(shuffle))
    pl.check(schedule)
    if batched:
        check_batches(traffic(schedule))
    return schedule


def schedule_of(case: Case) -> pl.Schedule:
    return build_schedule(
        case.schedule,
        case.ranks,
        case.microbatches,
        case.chunks,
        case.cooldown,
        case.transform,
        case.shuffle,
        case.dp > 0 and case.transport == "batched",
    )


def shuffled(schedule: pl.Schedule, draw: random.Random) -> pl.Schedule:
    """Neighbouring actions exchanged and backwards split at random, as long as the schedule can run."""
    programs = [list(program) for program in schedule.programs]
    for _ in range(4 * len(programs)):
        before = [list(program) for program in programs]
        row = draw.choice([program for program in programs if len(program) > 1] or programs)
        at = draw.randrange(len(row))
        action: Any = row[at]
        if draw.random() < 0.3 and getattr(action, "kind", "") == "B":
            row[at] = action._replace(kind="I")
            row.insert(draw.randrange(at + 1, len(row) + 1), action._replace(kind="W"))
        else:
            to = min(max(at + draw.choice((-2, -1, 1, 2)), 0), len(row) - 1)
            row.insert(to, row.pop(at))
        try:
            candidate = pl.Schedule.of(
                programs,
                placement=schedule.placement,
                microbatches=schedule.microbatches,
                name="shuffled",
                routes=schedule.routes,
                route_of=schedule.route_of,
            )
            pl.check(candidate)
        except ScheduleError:
            programs = before
        else:
            schedule = candidate
    return schedule


def is_valid(case: Case) -> bool:
    """Whether the case can be asked for at all: its schedule exists, and its sizes fit."""
    try:
        schedule = schedule_of(case)
    except (UsageError, ScheduleError):
        return False
    stages = case.stages
    kinds = [layout.kind for layout in case.layouts]
    if any(kind == "input hook" and before in ALIASING for before, kind in zip(kinds, kinds[1:], strict=False)):
        return False  # across a cut the hook does not see the other tensors' gradients: docs/own_model.md
    return (
        len(case.rows) == case.microbatches
        and case.world <= LARGEST_WORLD * (1 if case.dp else 2)
        and (len(stages) == schedule.positions if stages is not None else len(case.layers) >= schedule.positions)
        and (stages is None or sum(stages) == len(case.layers))
    )


# -- drawing -----------------------------------------------------------------------------------------------------------


def draw_case(draw: random.Random) -> Case:
    """A random case that can be asked for."""
    while True:
        case = _draw(draw)
        if is_valid(case):
            return case


def _draw(draw: random.Random) -> Case:
    dp = draw.choice((1, 2)) if draw.random() < 0.3 else 0
    ranks = draw.randint(1, LARGEST_WORLD // dp if dp else 4)
    case = Case(
        schedule=draw.choice(FAMILIES),
        ranks=ranks,
        microbatches=draw.choice((1, 2, 3, 4, 5, 2 * ranks)),
        chunks=draw.choice((None, None, 1, 2, 3)),
        cooldown=draw.random() < 0.2,
        transform=draw.choice(TRANSFORMS) if draw.random() < 0.3 else "",
        shuffle=draw.randrange(1, 1_000_000) if draw.random() < 0.2 else 0,
        dp=dp,
    )
    if dp:
        case = _distributed(draw, case)
    try:
        schedule = schedule_of(case)
    except (UsageError, ScheduleError):
        return dataclasses.replace(case, rows=())  # not valid: drawn again
    in_order = len(schedule.routes) == 1 and not case.shuffle
    case = _layers(draw, case, schedule.positions, stateful=in_order)
    count = len(case.layers)
    rows = [draw.randint(1, 2)] * case.microbatches
    if draw.random() < 0.4:
        rows = [draw.randint(1, 3) for _ in rows]
    return dataclasses.replace(
        case,
        rows=tuple(rows),
        recompute=draw.choice(("none", "none", "full", tuple(at for at in range(count) if draw.random() < 0.5))),
        dtype="float32" if draw.random() < 0.15 and not case.shard_gradients else "float64",
        all_outputs=draw.random() < 0.5,
        modules=case.modules or draw.random() < 0.3,
        steps=draw.choice((2, 2, 5)),
        accumulate=draw.choice((1, 1, 1, 2)),
        evaluate=draw.random() < 0.15,
        zero=draw.choice(("pipeline", "pipeline", "none", "zeros")),
        deallocate=draw.random() < 0.8,
        shapes=draw.choice(("once", "once", "each")),
        seed=draw.randrange(1_000),
    )


def _distributed(draw: random.Random, case: Case) -> Case:
    transport = draw.choice(TRANSPORTS)
    return dataclasses.replace(
        case,
        transport=transport,
        overlap_p2p=transport == "shared" or draw.random() < 0.7,
        receive_depth=draw.choice((1, 2, 2, 3)),
        main_gradients=draw.random() < 0.3,
        shard_gradients=draw.random() < 0.15,
        unsynced=draw.random() < 0.5,
    )


def _layers(draw: random.Random, case: Case, positions: int, stateful: bool) -> Case:
    """Random layers, their stages, and their ties.

    `stateful`: some whose buffers or attributes depend on the order of the micro-batches, which is outside the stage contract
    where a stage does not see all of them in order.
    """
    count = positions + draw.choice((0, 0, 1, 2))
    stages = None
    if draw.random() < 0.3:
        cuts = sorted(draw.randint(0, count) for _ in range(positions - 1))
        stages = tuple(b - a for a, b in zip((0, *cuts), (*cuts, count), strict=True))
    usual = draw.random() < 0.3  # a model of ordinary layers around one or two special ones
    layers: list[Layout] = []
    beside = False  # whether more than the hidden tensor crosses the present boundary
    plain = True  # whether that is a real tensor
    aliased = False  # whether a tensor crosses it twice
    for _ in range(count):
        kinds = [
            kind
            for kind, how in KINDS.items()
            if (beside or kind not in CLOSING)
            and not (how.bare and (beside or not plain))
            and not (kind in STATEFUL and not stateful)
            and not (kind == "changed input" and aliased)  # outside the contract: two inputs of one memory
            and not (kind in COMPLEX and case.shard_gradients)
            and not (kind in CUTTING and any(layout.kind == "segmented" for layout in layers))
            and not (kind == "segmented" and beside and any(layout.kind in CUTTING for layout in layers))
        ]
        kind = draw.choices(kinds, [KINDS[kind].weight for kind in kinds])[0]
        if usual and draw.random() < 0.7:
            kind = "linear"
        beside = (beside or kind in OPENING) and kind not in CLOSING
        aliased = beside and (aliased or kind == "twice")
        plain = kind not in ("integers", "phase")
        frozen = draw.choice(FROZEN) if draw.random() < 0.12 else ""
        hooks = [hook for hook in HOOKS if draw.random() < 0.5] if draw.random() < 0.12 else []
        if hooks and draw.random() < 0.7:
            hooks = hooks[:1]
        layers.append(Layout(kind, frozen, tuple(hooks)))
    case = dataclasses.replace(case, layers=tuple(map(str, layers)), stages=stages)
    if count > 1 and draw.random() < 0.2:
        pair = tuple(sorted(draw.sample(range(count), 2)))
        linear = Layout("linear", draw.choice(("", "", "", "bias", "weight")))
        texts = [str(linear if at in pair else each) for at, each in enumerate(layers)]
        one_object = draw.random() < 0.5
        modules = one_object and (case.dp > 0 or draw.random() < 0.5)
        case = dataclasses.replace(
            case,
            layers=tuple(texts),
            ties=(pair,),
            one_object=one_object,
            modules=modules,  # type: ignore[arg-type]
        )
    return case
