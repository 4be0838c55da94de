"""Sharded parameters: where a rank gathers the parameters of its stages, frees them, and reduces their gradients.

Each replica holds a share of every stage's parameters. A rank has N equal slots for whole ones, and a gather holds its slot from
its issue. With the order of the actions known, the fewest gathers are those of paging with a known future (Belady, IBM Systems
Journal 5, 1966): each gap between two uses of a stage either keeps a slot throughout or costs a gather.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from pipeloom.errors import UsageError
from pipeloom.schedule.actions import GRADS, PARAMS, PENDING, Action, Cell, kind_of
from pipeloom.schedule.model import Schedule, of_schedule, parts

StageSet = frozenset[int]  # the stages whose parameters an entry needs

RESHARD, UNSHARD, REDUCE = 0, 1, 2  # the order of actions that follow the same entry


@of_schedule
def shard(schedule: Schedule, slots: int, for_torch: bool = False) -> Schedule:
    """Return `schedule` with the fewest gathers of parameters for `slots` stages per rank at a time, and gradients reduced.

    A gather is issued as soon as a slot is free, in the order in which parameters are needed; where the fewest gathers leave a
    choice, at least one computation before its stage's. Gradients are reduced behind a stage's last backward. Memory: per
    rank the parameters of `slots` stages, and its shares.

    Args:
        slots: 1 or more; 2 or more for pairs.
        for_torch: keep parameters for W too, which torch's runtime reads there.

    Raises UsageError for too few slots, and for a schedule that gathers already.
    """
    _require_slots(schedule, slots)

    def inserted(program: Sequence[Cell]) -> Iterator[tuple[int, int, Action]]:
        spans = _early_spans(uses_of_parameters(program, for_torch), slots)
        ends = sorted(end for _, _, end in spans)
        last: dict[int, int] = {}
        issued = -1
        for number, (stage, _, end) in enumerate(spans):
            free = ends[number - slots] if number >= slots else -1
            issued = max(issued, free, last.get(stage, -1))
            last[stage] = end
            yield issued, UNSHARD, Action("UNSHARD", stage)
            yield end, RESHARD, Action("RESHARD", stage)

    return reduce_gradients(_with_inserted(schedule, inserted))


@of_schedule
def shard_as_torch(schedule: Schedule, slots: int) -> Schedule:
    """Return `schedule` with the gathers of torch's pipeline runtime (`_add_unshard_reshard`), for comparison.

    Before each action the next `slots` stages are gathered and all others freed; a pair may be the stage too many.

    Raises UsageError as `shard` does.
    """
    _require_slots(schedule, slots)

    def inserted(program: Sequence[Cell]) -> Iterator[tuple[int, int, Action]]:
        present: list[int] = []
        for at in range(len(program)):
            coming: list[int] = []
            for cell in program[at:]:
                coming += [stage for action in parts(cell) if (stage := action.stage) not in coming]
                if len(coming) >= slots:
                    break
            for stage in [stage for stage in present if stage not in coming]:
                present.remove(stage)
                yield at - 1, RESHARD, Action("RESHARD", stage)
            for stage in [stage for stage in coming if stage not in present]:
                present.append(stage)
                yield at - 1, UNSHARD, Action("UNSHARD", stage)
        for stage in present:
            yield len(program) - 1, RESHARD, Action("RESHARD", stage)

    return reduce_gradients(_with_inserted(schedule, inserted))


@of_schedule
def reduce_gradients(schedule: Schedule, every: int = 0) -> Schedule:
    """Return `schedule` with the gradients of each stage reduced over the replicas behind every `every`-th weight gradient of it.

    Behind the last one they are reduced in any case; 0: there alone. Memory: gradients of a stage are held from its first weight
    gradient after a reduction to the end of the next one.

    Raises UsageError for a schedule that reduces them already.
    """
    if "REDUCE_GRAD" in schedule.stage_actions:
        raise UsageError(f"schedule {schedule.name} reduces gradients already: it has REDUCE_GRAD")

    def inserted(program: Sequence[Cell]) -> Iterator[tuple[int, int, Action]]:
        places: dict[int, list[int]] = defaultdict(list)
        for at, cell in enumerate(program):
            for action in parts(cell):
                kind = kind_of(action.kind)
                if GRADS in kind.adds and PENDING not in kind.makes:
                    places[action.stage].append(at)
        for stage, ends in places.items():
            positions = [*ends[every - 1 :: every], ends[-1]] if every else ends[-1:]
            for at in {_behind_groups(program, at) for at in positions}:
                yield at, REDUCE, Action("REDUCE_GRAD", stage)

    return _with_inserted(schedule, inserted)


def _behind_groups(program: Sequence[Cell], at: int) -> int:
    """Return the position of the last of the group entries that follow the one there, and may run beside it.

    Sums run on the queue of the groups, which would wait with one before them until that entry has ended.
    """
    while at + 1 < len(program) and any(kind_of(action.kind).group for action in parts(program[at + 1])):
        at += 1
    return at


def gathers(schedule: Schedule) -> tuple[int, ...]:
    """rank -> the number of its UNSHARD."""
    return tuple(sum(action.kind == "UNSHARD" for cell in p for action in parts(cell)) for p in schedule.programs)


def _require_slots(schedule: Schedule, slots: int) -> None:
    least = 2 if schedule.has_pairs else 1
    if slots < least:
        words = "a pair needs the parameters of two stages" if least == 2 else "an action needs those of one stage"
        raise UsageError(f"shard: slots is {slots}, and {words}; nearest: {least}")
    if "UNSHARD" in schedule.stage_actions:
        raise UsageError(f"schedule {schedule.name} gathers parameters already: it has UNSHARD")


def uses_of_parameters(program: Sequence[Cell], for_torch: bool) -> list[tuple[int, StageSet]]:
    """Return (position, stages) of the entries that need parameters."""
    needed = []
    for at, cell in enumerate(program):
        stages = frozenset(a.stage for a in parts(cell) if _needs_parameters(a.kind) or (for_torch and a.kind == "W"))
        if stages:
            needed.append((at, stages))
    return needed


def _needs_parameters(letter: str) -> bool:
    return any(need.value == PARAMS for need in kind_of(letter).needs)


def _early_spans(requests: Sequence[tuple[int, StageSet]], slots: int) -> list[tuple[int, int, int]]:
    """Return `_spans`, with each stage present one entry earlier where it can be without one gather more."""
    spans = _spans(requests, slots)
    for at in range(1, len(requests)):
        (before, held), (position, stages) = requests[at - 1 : at + 1]
        late = {stage for stage, first, _ in spans if first == position} & stages
        if late and len(held | late) <= slots:
            earlier = [*requests[: at - 1], (before, held | late), *requests[at:]]
            tried = _spans(earlier, slots)
            if len(tried) == len(spans):
                spans, requests = tried, earlier
    return spans


def _spans(requests: Sequence[tuple[int, StageSet]], slots: int) -> list[tuple[int, int, int]]:
    """Return (stage, position of its first use, of its last use) of each time that a stage is present, in order of first uses.

    Where all slots are taken, the stage whose next use is farthest gives way; of those without one, the longest unused.
    """
    uses: dict[int, list[int]] = defaultdict(list)
    for at, stages in reversed(requests):
        for stage in stages:
            uses[stage].append(at)
    present: dict[int, list[int]] = {}  # stage -> its first and last use, oldest first
    spans: list[tuple[int, int, int]] = []
    for at, stages in requests:
        for stage in sorted(stages):
            uses[stage].pop()
            if stage not in present and len(present) == slots:
                victim = max(
                    present.keys() - stages, key=lambda s: (uses[s][-1] if uses[s] else float("inf"), -present[s][1])
                )
                spans.append((victim, present[victim][0], present.pop(victim)[1]))
            present.setdefault(stage, [at, at])[1] = at
    spans += [(stage, first, last) for stage, (first, last) in present.items()]
    return sorted(spans, key=lambda span: span[1])


def _with_inserted(
    schedule: Schedule, inserted: Callable[[Sequence[Cell]], Iterator[tuple[int, int, Action]]]
) -> Schedule:
    """Return `schedule` with actions behind the entries of each program: (position, -1: at the start; order; action)."""
    programs = []
    for program in schedule.programs:
        behind: dict[int, list[tuple[int, Action]]] = defaultdict(list)
        for at, order, action in inserted(program):
            behind[at].append((order, action))
        cells: list[Cell] = []
        for at in range(-1, len(program)):
            cells += [program[at]] if at >= 0 else []
            cells += [action for _, action in sorted(behind[at], key=lambda item: item[0])]
        programs.append(cells)
    return schedule.with_programs(programs)
