"""Transforms: functions from a schedule to a schedule that trains the same model with the same gradients.

Anything that should run differently from what a family creates is written as a transform, and applied before the schedule
is checked, drawn, simulated and executed. A transform keeps the placement, the routes and the work: every stage and
micro-batch gets the same forward, input gradient and weight gradient as before, a B counting as both. The exceptions are
`forward_only`, which drops the backwards, `cut_stages`, which cuts every stage into several, and `vocabulary`, which adds stages.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import Parameter, getdoc, signature

from pipeloom.errors import UsageError, did_you_mean
from pipeloom.schedule.actions import EMBEDDED, HIDDEN, PART, SAVED, SUMS, Action, Cell, kind_number, kind_of, whole_of
from pipeloom.schedule.costs import TIME_TOLERANCE, Costs, durations
from pipeloom.schedule.model import Program, Schedule, actions_of, of_schedule, parts
from pipeloom.schedule.offload import offload_share
from pipeloom.schedule.sharding import reduce_gradients, shard, shard_as_torch
from pipeloom.schedule.simulate import simulate
from pipeloom.schedule.slices import cut_sequences
from pipeloom.schedule.vocabulary import embedding, vocabulary

# The share of a weight gradient's time that a wait must have before one is computed in it. 1: it delays nothing; 0: it is
# computed in any wait, which pays where the waits are short and many. The shortest of the three is taken.
_FITTING_SHARES = (0.0, 0.5, 1.0)


# -- pairs ---------------------------------------------------------------------------------------------------------------


@of_schedule
def unpair(schedule: Schedule, stages: Collection[int] | None = None) -> Schedule:
    """Return `schedule` with its pairs as a forward and then a backward.

    A pair starts when both its inputs have arrived, so where nothing overlaps inside it this is never slower. Memory: no
    more stage-micro-batches than before; a pair whose backward ends first may hold fewer bytes.

    Args:
        stages: only the pairs whose two stages are both among these; None: all.
    """
    if not schedule.has_pairs:
        return schedule
    limit, units = schedule._pair_stride, schedule.units
    unpaired = frozenset(range(schedule.stages) if stages is None else stages)

    def cells(code: int) -> tuple[int, ...]:
        if code < limit:
            return (code,)
        forward, backward = code // limit - 1, code % limit
        both = {code // units % schedule.stages for code in (forward, backward)}
        return (forward, backward) if both <= unpaired else (code,)

    codes = tuple(tuple(part for code in program for part in cells(code)) for program in schedule.codes)
    return schedule if codes == schedule.codes else replace(schedule, codes=codes)


# -- backwards in one part or two ------------------------------------------------------------------------------------------


@of_schedule
def half_split(schedule: Schedule, parity: int = 0) -> Schedule:
    """Return `schedule` with the backwards of every second micro-batch as I and W, and those of the others as one B.

    A B that is split becomes an I directly followed by its W; a merged B takes the place of its I. Pairs are taken apart.
    Memory: no rank's peak is larger than before.

    Args:
        parity: the first micro-batch whose backwards are split, 0 or 1; of one micro-batch always 0.
    """
    even = parity % 2 if schedule.microbatches > 1 else 0

    def cells(action: Action) -> tuple[Cell, ...]:
        kind, mb = action.kind, action.microbatch
        if kind == "B" and mb % 2 == even:
            return action._replace(kind="I"), action._replace(kind="W")
        if kind == "I" and mb % 2 != even:
            return (action._replace(kind="B"),)
        return () if kind == "W" and mb % 2 != even else (action,)

    return schedule.with_programs(_rewritten(schedule, cells))


@of_schedule
def merge_backward(schedule: Schedule, backwards: Collection[tuple[int, int]] | None = None) -> Schedule:
    """Return `schedule` with I and W as one B at the place of the I. Pairs are taken apart.

    Memory: no rank's peak is larger than before, as a B frees at once what an I leaves for its W.

    Args:
        backwards: (stage, unit) of those to merge; None: all.
    """
    merged = None if backwards is None else frozenset(backwards)

    def cells(action: Action) -> tuple[Cell, ...]:
        if action.kind not in ("I", "W") or (
            merged is not None and (action.stage, schedule.unit_of(action)) not in merged
        ):
            return (action,)
        return (action._replace(kind="B"),) if action.kind == "I" else ()

    return schedule.with_programs(_rewritten(schedule, cells))


@of_schedule
def split_cooldown(schedule: Schedule, costs: Costs | None = None) -> Schedule:
    """Return `schedule` with every B after a rank's last forward that another rank waits for written as I and W.

    The order of the input gradients stays. The last micro-batch's gradient goes back through p-1 input gradients, not p-1
    backwards. (The zero-bubble paper, arXiv 2401.10241, splits every backward, this only those after the last forward.) With
    uniform stages, m >= p and w <= f the idle time of `1f1b`, `gpipe`, `interleaved` and `looped-bfs` falls from (p-1)(f+B) to
    (p-1)(f+b). Memory: no rank's peak is larger than before, as nothing is allocated after the last forward.

    A W follows its I at once, or fills the first wait that it fits, wholly or half: what is shortest at `costs` (default
    1, 1, 1, 0). Where nothing is shorter than the schedule as it is, its actions stay as they are.
    """
    before, _ = schedule.neighbours
    places = schedule.placement
    awaited = [other is not None and places[other] != places[stage] for stage, other in enumerate(before)]
    stride, units = schedule._kind_stride, schedule.units

    def due(code: int) -> bool:
        letter = schedule.kinds[code // stride].letter
        return letter in ("I", "W") or (letter == "B" and awaited[code % stride // units])

    tails = [_behind_last_forward(schedule, rank)[1] for rank in range(schedule.ranks)]
    cooldowns = [
        _Cooldown.of(schedule, rank, [code % stride for code in tail if due(code)]) for rank, tail in enumerate(tails)
    ]
    shortest = _with_weights_in_waits(schedule, cooldowns, costs, at_most=schedule)
    options = dict(schedule.options) | {"cooldown": "split"}
    return replace(shortest, options=tuple(sorted(options.items())))


@of_schedule
def defer_last_stage_weights(schedule: Schedule, last: int = 0, costs: Costs | None = None) -> Schedule:
    """Return `schedule` with weight gradients of each route's last stage computed in its rank's cool-down.

    The last stage holds the output layer, whose weight gradient is the largest of a language model, and every other rank
    waits for its input gradients. Its B are written as I and W, and the W of the last `last` micro-batches are computed
    after the rank's last forward: each in the first wait that it fits, the others at the end. To defer the output layer
    alone, make it a stage of its own.

    Memory: on the ranks of last stages at most `last` micro-batches more of what a W holds (`Costs.held` of the stage's
    activation); on other ranks as before.

    Args:
        last: how many micro-batches to defer on each rank that holds a last stage; 0: all. The last ones are deferred,
            because what they hold is held for the shortest time.
        costs: at which waits are measured; default 1, 1, 1, 0.

    Raises UsageError for a number below 0 or above the number of micro-batches.
    """
    if not 0 <= last <= schedule.microbatches:
        raise UsageError(
            f"defer_last_stage_weights: last is {last}; a step has {schedule.microbatches} micro-batches: use 1 to "
            f"{schedule.microbatches}, or 0 for all"
        )
    ends = frozenset(route[-1] for route in schedule.routes)
    stride, limit, units = schedule._kind_stride, schedule._pair_stride, schedule.units

    def at_end(code: int) -> bool:
        return schedule.kinds[code // stride].letter in ("B", "I") and code % stride // units in ends

    backwards = [[code % limit % stride for code in program if at_end(code % limit)] for program in schedule.codes]
    cooldowns = [_Cooldown.of(schedule, rank, each[-last * schedule.slices :]) for rank, each in enumerate(backwards)]
    return _with_weights_in_waits(schedule, cooldowns, costs)


@dataclass(frozen=True)
class _Cooldown:
    """One rank's program, cut after its last forward, without the weight gradients that are still to be placed.

    Attributes:
        head: the entries up to the last forward.
        rest: those after it.
        weights: I -> its W, for each W to be placed, in the order in which they become due.
    """

    head: Program
    rest: Program
    weights: Mapping[int, int]

    @classmethod
    def of(cls, schedule: Schedule, rank: int, places: Iterable[int]) -> _Cooldown:
        """Split every B of these places (stage and unit), and leave their W to be placed."""
        backward, input_grad, weight_grad = (kind_number(letter) * schedule._kind_stride for letter in "BIW")
        weights = {input_grad + place: weight_grad + place for place in places}
        apart, placed, limit = input_grad - backward, set(weights.values()), schedule._pair_stride

        def rewritten(program: Program) -> Program:
            return tuple(code + apart * (code % limit + apart in weights) for code in program if code not in placed)

        head, tail = _behind_last_forward(schedule, rank)
        return cls(rewritten(head), rewritten(tail), weights)

    @property
    def late(self) -> Program:
        """The program with every W to be placed at its end."""
        return (*self.head, *self.rest, *self.weights.values())

    def filled(self, needs: Sequence[float], starts: Sequence[float], ends: Sequence[float]) -> Program:
        """The program with each W in the first wait of the cool-down that is as long as it needs; the others at the end.

        Args:
            needs: code -> time; 0: a W fits every wait, and follows its I at once where there is none.
            starts, ends: of the entries of `late`.
        """
        program, at = list(self.head), len(self.head)
        now = ends[at - 1] if at else 0.0
        later = set(self.rest)
        ready = deque(weight for code, weight in self.weights.items() if code not in later)
        for code, start, end in zip(self.rest, starts[at:], ends[at:], strict=False):
            while ready and now + needs[ready[0]] <= max(start, now) + TIME_TOLERANCE:
                now += needs[ready[0]]
                program.append(ready.popleft())
            program.append(code)
            now = end
            if code in self.weights:
                ready.append(self.weights[code])
        return (*program, *ready)


def _behind_last_forward(schedule: Schedule, rank: int) -> tuple[Program, Program]:
    """A rank's program up to its last forward or pair, and the rest: its cool-down."""
    program, stride = schedule.codes[rank], schedule._kind_stride
    forwards = [at for at, code in enumerate(program) if code < stride or code >= schedule._pair_stride]
    cut = forwards[-1] + 1 if forwards else 0
    return program[:cut], program[cut:]


def _with_weights_in_waits(
    schedule: Schedule, cooldowns: Sequence[_Cooldown], costs: Costs | None, at_most: Schedule | None = None
) -> Schedule:
    """The shortest of `schedule` with the cool-downs' weight gradients placed; `at_most` where none is shorter."""
    cost_model = costs if costs is not None else Costs()
    late = simulate(replace(schedule, codes=tuple(each.late for each in cooldowns)), cost_model)
    duration = durations(schedule, cost_model)
    best = at_most
    least = float("inf") if at_most is None else simulate(at_most, cost_model).makespan
    for share in _FITTING_SHARES:
        needs = [share * each for each in duration]
        codes = tuple(
            each.filled(needs, starts, ends)
            for each, starts, ends in zip(cooldowns, late.starts, late.ends, strict=True)
        )
        candidate = replace(schedule, codes=codes)
        makespan = simulate(candidate, cost_model).makespan
        if best is None or makespan < least - TIME_TOLERANCE:
            best, least = candidate, makespan
    assert best is not None
    return best


# -- recomputation ------------------------------------------------------------------------------------------------------


@of_schedule
def recompute(
    schedule: Schedule, whole: bool = False, actions: Collection[tuple[int, int]] | None = None, part: str = ""
) -> Schedule:
    """Return `schedule` with every backward's activations recomputed, so that F leaves only the stage's inputs until then.

    In blocks (2R0;2B0), also inside pairs, each layer is recomputed just before its own backward. Memory: `Costs.kept` of an
    activation from F on, and while the block runs one layer's activations (which simulations count as the whole stage's).
    Split backwards are recomputed in their I. Transforms that split backwards are applied before this one.

    Args:
        whole: an R for the whole stage before the entry with its backward instead. It waits for no message, so it runs while the
            backward's gradient is on its way; memory: a whole stage's activations from then on.
        actions: (stage, unit) of the backwards to recompute; None: all.
        part: that of a part alone, such as `2R0:norms`, in an action of its own there.

    Raises UsageError for a part without a valid name.
    """
    if part:
        _require_part(part)
    stride, limit = schedule._kind_stride, schedule._pair_stride
    block = {kind_number(letter): kind_number(f"R{letter}") for letter in "BI"}
    again = kind_number(f"R:{part}" if part else "R") * stride

    def cells(code: int) -> Iterator[int]:
        forward, backward = divmod(code, limit) if code >= limit else (0, code)
        kind, place = divmod(backward, stride)
        if kind not in block or (actions is not None and divmod(place, schedule.units) not in actions):
            yield code
        elif whole or part:
            yield from (again + place, code)
        else:
            yield forward * limit + block[kind] * stride + place

    return schedule.with_programs([[cell for code in program for cell in cells(code)] for program in schedule.codes])


def recompute_stages(schedule: Schedule, stages: Collection[int], part: str = "") -> Schedule:
    """Return `schedule` with the backwards of these stages in blocks, unless another action moves or makes what is saved; or with
    an R of a part before each, unless it is recomputed already.
    """
    wanted = {(stage, unit) for stage in stages for unit in range(schedule.units)}
    if part:
        again = {place for place, values in schedule._remade.items() if values & {SAVED, f"{SAVED}:{part}"}}
        return recompute(schedule, actions=wanted - again, part=part)
    for action in actions_of(schedule) if wanted else ():
        kind = kind_of(action.kind)
        saved = any(whole_of(value) == SAVED for value in (*kind.makes, *kind.frees))
        if saved and not (kind.is_forward or kind.is_backward):
            wanted.discard((action.stage, schedule.unit_of(action)))
    return recompute(schedule, actions=wanted) if wanted else schedule


def _require_part(part: str) -> None:
    """Raise UsageError for anything but a name of a part."""
    if not re.fullmatch(PART, part):
        raise UsageError(
            f"recompute: {part!r:.200} is not a part; give block, whole, or a part's name, such as norms, mlp or attention"
        )


# -- other stages, or no backward --------------------------------------------------------------------------------------------


@of_schedule
def cut_stages(schedule: Schedule, pieces: int) -> Schedule:
    """Return `schedule` on stages cut into `pieces` each: F through them in order, I and W through them in reverse.

    Every B is split and every pair taken apart. Memory: in units of the old stages at most what the schedule with split
    backwards holds.

    Raises UsageError for a schedule of two routes, for less than one piece, and for tensors with names.
    """
    if schedule.tensors:
        raise UsageError(
            f"cut_stages: nothing says which piece of a stage writes or reads tensor {schedule.tensors[0].name!r:.200}; cut the "
            "stages first, then use with_tensors"
        )
    if pieces < 1:
        raise UsageError(f"cut_stages: pieces is {pieces}; use 1 or more")
    if len(schedule.routes) > 1:
        raise UsageError(f"cut_stages: schedule {schedule.name} has {len(schedule.routes)} routes; it must have one")

    def cells(action: Action) -> Iterable[Cell]:
        stages = range(action.stage * pieces, (action.stage + 1) * pieces)
        kind = kind_of(action.kind)
        if not kind.is_backward:
            return [action._replace(stage=stage) for stage in stages]
        letters: Sequence[str] = {"B": ("I", "W"), "RB": ("RI", "W")}.get(action.kind, (action.kind,))
        return [action._replace(kind=letter, stage=stage) for letter in letters for stage in reversed(stages)]

    return Schedule.of(
        _rewritten(schedule, cells),
        placement=[rank for rank in schedule.placement for _ in range(pieces)],
        microbatches=schedule.microbatches,
        slices=schedule.slices,
        name=schedule.name,
        options=dict(schedule.options),
    ).with_slots({value: count * pieces for value, count in schedule.slots})


@of_schedule
def forward_only(schedule: Schedule, microbatches: int | None = None) -> Schedule:
    """Return the forwards of `schedule` alone, in their order, for evaluation.

    A stage that gathers its parameters does so where a forward uses them before they are freed.

    Args:
        microbatches: how many to run: of the first, or more, for which the order is repeated; None: as many as it has.
    """
    period = schedule.microbatches
    count = period if microbatches is None else microbatches
    turns = [turn * period for turn in range(-(-count // period))]
    programs = [
        _forwards([_later(a, turn) for turn in turns for cell in program for a in parts(cell)], count)
        for program in schedule.programs
    ]
    return Schedule.of(
        programs,
        placement=schedule.placement,
        microbatches=count,
        slices=schedule.slices,
        name=f"{schedule.name} (forward only)",
        routes=schedule.routes,
        route_of=[schedule.route_of[mb % period] for mb in range(count)],
    ).with_tensors(schedule.tensors)


def _later(action: Action, microbatches: int) -> Action:
    """Return the action of the micro-batch so many later; one of a whole stage stays."""
    return action if kind_of(action.kind).of_stage else action._replace(microbatch=action.microbatch + microbatches)


def _forwards(actions: Sequence[Action], microbatches: int) -> list[Action]:
    """Return the forwards of the first micro-batches, and the UNSHARD and RESHARD around them."""
    run: list[Action | None] = []
    gathered: dict[int, int] = {}  # stage -> where its UNSHARD is, if nothing has used it yet
    for action in actions:
        if action.kind == "UNSHARD":
            gathered[action.stage] = len(run)
            run.append(action)
        elif _evaluates(action) and action.microbatch < microbatches:
            gathered.pop(action.stage, None)
            run.append(action)
        elif action.kind == "RESHARD":
            unused = gathered.pop(action.stage, None)
            if unused is None:
                run.append(action)
            else:
                run[unused] = None
    return [action for action in run if action is not None]


def _evaluates(action: Action) -> bool:
    """Return whether a loss without gradients needs the action: a forward, or an entry that makes values for one."""
    kind = kind_of(action.kind)
    return kind.is_forward or (kind.group and not {HIDDEN, SUMS, EMBEDDED}.isdisjoint(kind.makes))


def _rewritten(schedule: Schedule, cells: Callable[[Action], Iterable[Cell]]) -> list[list[Cell]]:
    """Return the programs with each action replaced by `cells(action)`, and pairs taken apart."""
    return [
        [cell for entry in program for action in parts(entry) for cell in cells(action)]
        for program in schedule.programs
    ]


# -- by name -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NamedTransform:
    """A transform as the command line and configurations name it: `name`, or `name=value`.

    Attributes:
        function: (schedule, value, costs) -> schedule; its parameters say whether there must be a value, and whether it is a
            number or a word.
        value: the meaning of the value; None: it takes none.
    """

    function: Callable[..., Schedule]
    value: str | None = None

    @cached_property
    def _arguments(self) -> dict[str, Parameter]:
        return dict(signature(self.function).parameters)

    @property
    def words(self) -> str:
        """The first paragraph of the function's documentation."""
        return (getdoc(self.function) or "").partition("\n\n")[0]

    @property
    def needs_value(self) -> bool:
        return self.value is not None and [*self._arguments.values()][1].default is Parameter.empty

    @property
    def takes_word(self) -> bool:
        return "str" in [*self._arguments.values()][1].annotation

    def apply(self, schedule: Schedule, value: int | str | None, costs: Costs | None) -> Schedule:
        """Return the schedule after the transform; None: without a value."""
        more = {"costs": costs} if "costs" in self._arguments else {}
        return self.function(schedule, *([] if value is None else [value]), **more)


def _recomputed(schedule: Schedule, word: str = "block") -> Schedule:
    """Return `recompute` in blocks, of whole stages, or of a part."""
    return recompute(schedule, word == "whole", part="" if word in ("block", "whole") else word)


def _shard_for_torch(schedule: Schedule, slots: int) -> Schedule:
    """Return `shard` with parameters kept for W, as torch's runtime reads them there."""
    return shard(schedule, slots, for_torch=True)


TRANSFORMS: dict[str, NamedTransform] = {
    "unpair": NamedTransform(unpair),
    "split-cooldown": NamedTransform(split_cooldown),
    "defer-last-stage-weights": NamedTransform(defer_last_stage_weights, "micro-batches"),
    "half-split": NamedTransform(half_split, "the first micro-batch that is split: 0 or 1"),
    "forward-only": NamedTransform(forward_only),
    "merge-backward": NamedTransform(merge_backward),
    "recompute": NamedTransform(_recomputed, "block, whole, or the name of a part such as norms"),
    "offload": NamedTransform(offload_share, "a share such as 3/4, or kept: what recomputation needs"),
    "shard": NamedTransform(shard, "slots"),
    "shard-for-torch": NamedTransform(_shard_for_torch, "slots"),
    "shard-as-torch": NamedTransform(shard_as_torch, "slots"),
    "reduce-gradients": NamedTransform(reduce_gradients, "backwards"),
    "slices": NamedTransform(cut_sequences, "slices"),
    "vocabulary": NamedTransform(vocabulary, "fused (one reduction) or two"),
    "embedding": NamedTransform(embedding),
    "cut-stages": NamedTransform(cut_stages, "pieces of a stage"),
}


@of_schedule
def transformed(schedule: Schedule, words: Iterable[str], costs: Costs | None = None) -> Schedule:
    """Return `schedule` after the transforms that `words` name, in order; each word is `name` or `name=number`.

    Args:
        costs: of a stage, for the transforms that place weight gradients in waits.

    Raises UsageError for an unknown name, with the nearest ones, and for a number that is missing, refused or not taken.
    """
    costs = None if costs is None else replace(costs, sends="free")  # an order is chosen as if no sender waited
    for transform, value in [parsed_transform(word) for word in words]:
        schedule = transform.apply(schedule, value, costs)
    return schedule


def of_zero(level: int, slots: int = 2, spread: bool = False) -> tuple[str, ...]:
    """The words of the transforms of a ZeRO level; with level 3 a rank has the parameters of `slots` stages at a time, and
    beside them those of its share of a vocabulary that is `spread`.
    """
    return {2: ("reduce-gradients=1",), 3: (f"shard={slots + spread}",)}.get(level, ())


def parsed_transform(word: str) -> tuple[NamedTransform, int | str | None]:
    """The transform that `word` names, and its number or word. Raises UsageError as `transformed` does."""
    name, equals, text = (part.strip() for part in word.partition("="))
    transform = TRANSFORMS.get(name)
    if transform is None:
        raise UsageError(f"there is no transform {name!r:.200}{did_you_mean(name, TRANSFORMS)}")
    if not equals:
        if transform.needs_value:
            raise UsageError(f"transform {name} needs a number ({transform.value}), such as {name}=2")
        return transform, None
    if transform.value is None:
        raise UsageError(f"transform {name} takes no number, but is given {text!r:.200}")
    if transform.takes_word:
        if name == "recompute" and text not in ("block", "whole"):
            _require_part(text)
        return transform, text
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise UsageError(f"transform {name}: {text!r:.200} is not a whole number of at least 0 ({transform.value})")
    return transform, int(text)
