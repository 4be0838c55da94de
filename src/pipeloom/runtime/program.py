"""Lowering: from a checked schedule to the program of instructions of one rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from pipeloom.errors import ConfigError
from pipeloom.runtime.offload import Parts
from pipeloom.runtime.options import RuntimeOptions
from pipeloom.runtime.signals import Signal, signals_of
from pipeloom.schedule.actions import (
    COMPUTE,
    COPY_OUT,
    GRADS,
    INPUT_GRADIENT,
    KEPT,
    OUTPUT,
    PENDING,
    Action,
    Cell,
    Kind,
    equal_part,
    fraction_of,
    kind_of,
)
from pipeloom.schedule.batched_p2p import MessageBatch, batches_of
from pipeloom.schedule.channels import (
    Channel,
    Edge,
    EntryTraffic,
    Message,
    NamedEdges,
    message_kind,
    neighbours,
    posting_plan,
    released_sends,
    traffic,
)
from pipeloom.schedule.graph import entry_waits
from pipeloom.schedule.model import Schedule, parts
from pipeloom.schedule.transforms import unpair


class Task(NamedTuple):
    """One action of an instruction.

    Attributes:
        unit: the number of its micro-batch, or of its slice where sequences are cut: both are called a micro-batch at run time.
        receives: the messages that it waits for, in the order of its inputs; all other inputs are on this rank.
        sends: the messages with its results, in their order; all other results stay on this rank.
        defers: whether it leaves weight gradients to W.
    """

    action: Action
    unit: int
    receives: tuple[Message, ...]
    sends: tuple[Message, ...]
    defers: bool


@dataclass(frozen=True)
class Instruction:
    """One entry of a rank's program.

    Attributes:
        cell: the action or pair, as the schedule has it.
        tasks: its actions, in order.
        post_receives: the receives to open before it.
        completes_stages: the stages whose gradients are complete after it; those that an entry on another queue completes are
            reduced at the end of the step.
        queue: where it runs: COMPUTE, or beside the computation.
        waits: the entries of this program, by their positions, whose ends it waits for besides those before it on COMPUTE.
        issues: the entries on other queues that are issued when it starts.
        opens: the stages whose gradients it is the first to add to, in the step or since they were taken to be reduced.
        takes: the stages whose gradients are taken when it ends; both only of stages that are reduced by actions.
        awaits: the ends of entries of other ranks that it waits for.
        signals: those waits of other ranks that its own end ends.
    """

    cell: Cell
    tasks: tuple[Task, ...]
    post_receives: tuple[Message, ...]
    completes_stages: tuple[int, ...] = ()
    queue: str = COMPUTE
    waits: tuple[int, ...] = ()
    issues: tuple[int, ...] = ()
    opens: tuple[int, ...] = ()
    takes: tuple[int, ...] = ()
    awaits: tuple[Signal, ...] = ()
    signals: tuple[Signal, ...] = ()

    @cached_property
    def second(self) -> Task | None:
        """Return the backward of a pair."""
        return self.tasks[1] if len(self.tasks) > 1 else None

    @property
    def actions(self) -> tuple[Action, ...]:
        return tuple(task.action for task in self.tasks)

    @property
    def receives(self) -> tuple[Message, ...]:
        """Return the messages that its actions wait for."""
        return tuple(message for task in self.tasks for message in task.receives)

    @property
    def sends(self) -> tuple[Message, ...]:
        """Return the messages with the results of its actions."""
        return tuple(message for task in self.tasks for message in task.sends)

    @cached_property
    def words(self) -> str:
        """Name it as something that is waited for, as `Message.words` and `Signal.words` do."""
        return f"the end of {self.cell.words}"


@dataclass(frozen=True)
class StageProgram:
    """One stage of the schedule. Where it cuts sequences, each slice of a micro-batch is called a micro-batch here.

    Attributes:
        takes, gives: edges from the previous stage of its route and to the next one; None for the first and the last stage.
        split: the micro-batches whose backward is I and W.
        in_order: whether every micro-batch passes through it, in order and uncut, and it has no replica: a replica without
            micro-batches would keep old state.
        reads: edges of the tensors that it reads by name, from earlier stages.
        writes: name of a tensor -> edges to the later stages that read it.
        recomputed: the micro-batches whose F keeps only what R needs.
        in_blocks: those whose layers, or some of them, are recomputed one by one in their backward.
        offloaded: micro-batch -> the parts that travel of what its backward needs, to host memory and back.
        kept_on_host: micro-batches of which what R needs travels to host memory and back.
        parts: micro-batch -> the parts of its layers that an R of their own recomputes.
    """

    takes: Edge | None
    gives: Edge | None
    split: frozenset[int]
    in_order: bool
    reads: tuple[Edge, ...] = ()
    writes: Mapping[str, tuple[Edge, ...]] = field(default_factory=dict)
    recomputed: frozenset[int] = frozenset()
    in_blocks: frozenset[int] = frozenset()
    offloaded: Mapping[int, Parts] = field(default_factory=dict)
    kept_on_host: frozenset[int] = frozenset()
    parts: Mapping[int, frozenset[str]] = field(default_factory=dict)

    def part_of(self, microbatch: int, at: int, layers: int) -> str | None:
        """Return the part among those recomputed that layer `at` of so many is in: `2/4` of the second quarter of them."""
        parts = (part for part in self.parts.get(microbatch, ()) if at in equal_part(part, layers))
        return next(parts, None)

    @cached_property
    def unsaved(self) -> frozenset[int]:
        """The micro-batches whose F keeps only what a recomputation needs."""
        return self.recomputed | self.in_blocks

    @cached_property
    def inputs(self) -> tuple[Edge, ...]:
        """Edges of its inputs: from the previous stage, if there is one, then named tensors."""
        return self.reads if self.takes is None else (self.takes, *self.reads)


@dataclass(frozen=True)
class RankProgram:
    """The program of one rank for a step.

    Attributes:
        instructions: the instructions, in order.
        stages: stage of this rank -> its part of the schedule.
        channels: the channels of this rank, sorted.
        all_channels: the channels of the whole pipeline, sorted: every rank creates their process groups in this order.
        releases_sends: received message -> sends of this rank that must have arrived by then, since the peer's program uses
            them before it sends that message. Their buffers are released without a query of the network.
        batches: this rank's calls of the batched transport, in order; None with another transport.
        issued_first: the entries on other queues before the first computation.
        slices: into how many the sequences of each micro-batch are cut.
        has_signals: whether entries of any rank wait for signals.
    """

    instructions: tuple[Instruction, ...]
    stages: dict[int, StageProgram]
    channels: tuple[Channel, ...]
    all_channels: tuple[Channel, ...]
    releases_sends: dict[Message, tuple[Message, ...]]
    batches: tuple[MessageBatch, ...] | None = None
    issued_first: tuple[int, ...] = ()
    slices: int = 1
    has_signals: bool = False

    @cached_property
    def computation(self) -> tuple[int, ...]:
        """Return the positions of the entries that compute; the others run beside them."""
        return tuple(at for at, each in enumerate(self.instructions) if each.queue == COMPUTE)

    @cached_property
    def has_queues(self) -> bool:
        """Return whether an instruction runs beside the computation, or waits for more than messages."""
        return self.has_signals or len(self.computation) < len(self.instructions)


def as_executed(schedule: Schedule, segmented: Collection[int]) -> Schedule:
    """Return `schedule` as all ranks run it: pairs in which nothing overlaps are split.

    Such a pair would start when both its inputs have arrived; its parts do not wait for each other's.

    Args:
        segmented: stages with segments, of all ranks.
    """
    return unpair(schedule, [stage for stage in range(schedule.stages) if stage not in segmented])


def whole_forwards(schedule: Schedule) -> Schedule:
    """Return a schedule of forwards alone with those of whole micro-batches, in the order of their first slices."""
    units, slices = schedule.units, schedule.slices
    if slices == 1:
        return schedule
    codes = tuple(
        tuple(code // units * schedule.microbatches + code % units // slices for code in program if not code % slices)
        for program in schedule.codes
    )
    return replace(schedule, codes=codes, slices=1)


def require_same_stages(schedule: Schedule, current: Schedule, splits_backward: bool) -> None:
    """Raise ConfigError if a pipeline that runs `current` cannot run `schedule` on its stages.

    Args:
        splits_backward: whether the pipeline's layers were prepared to defer weight gradients.
    """
    for words, value, now in (
        ("placement", schedule.placement, current.placement),
        ("micro-batches", schedule.microbatches, current.microbatches),
        ("slices", schedule.slices, current.slices),
        ("gathers and reductions by stage", schedule.stage_actions, current.stage_actions),
        ("routes", (schedule.routes, schedule.route_of), (current.routes, current.route_of)),
    ):
        if value != now:
            raise ConfigError(f"the pipeline cannot change its {words} from {now} to {value}")
    if schedule.splits_backward and not splits_backward:
        raise ConfigError("the pipeline was built for a schedule without split backwards, and this one has some")


def lower(schedule: Schedule, rank: int, options: RuntimeOptions) -> RankProgram:
    """Return the program of `rank`: its actions, the messages that each waits for and sends, and when receives are posted.

    `schedule` must have passed `check`. Raises ConfigError for a part that is recomputed behind its I, which has used what the
    forward saves.
    """
    programs = traffic(schedule)
    entries = programs[rank]
    batches, ahead = None, options.overlap_p2p is not False
    if options.transport == "batched":
        # If each message brings its shape, posting a receive early would wait for the shape before the present action computes.
        calls = batches_of(programs, rank, ahead and options.shapes == "once")
        batches = tuple(batch for gap in calls for batch in gap)
        plan = tuple(tuple(m for batch in gap for m in batch if m.channel.source != rank) for gap in calls[:-1])
    else:
        plan = posting_plan(entries, options.receive_depth, ahead)
    last = {a.stage: at for at, e in enumerate(entries) for a in parts(e.cell) if GRADS in kind_of(a.kind).adds}
    instructions = []
    for at, (entry, posts) in enumerate(zip(entries, plan, strict=True)):
        beside = kind_of(parts(entry.cell)[0].kind).queue != COMPUTE
        completes = () if beside else tuple(stage for stage in sorted(last) if last[stage] == at)
        tasks = tuple(_task(schedule, action, entry) for action in parts(entry.cell))
        instructions.append(Instruction(entry.cell, tasks, posts, completes))
    issued_first = _with_queues(schedule, rank, instructions) if schedule.has_queues else ()
    awaited, signalled = signals_of(schedule)
    if awaited:
        instructions = [
            replace(each, awaits=awaited.get((rank, at), ()), signals=signalled.get((rank, at), ()))
            for at, each in enumerate(instructions)
        ]
    _with_reductions(schedule.stage_actions.get("REDUCE_GRAD", frozenset()), instructions)
    channels = sorted({m.channel for entry in entries for m in (*entry.receives, *entry.sends)})
    every = sorted({m.channel for program in programs for entry in program for m in entry.sends})
    # A peer may run the two actions of a pair one after the other.
    apart = traffic(unpair(schedule)) if schedule.has_pairs else programs
    return RankProgram(
        tuple(instructions),
        _stage_programs(schedule, rank),
        tuple(channels),
        tuple(every),
        released_sends(apart, rank),
        batches,
        issued_first,
        schedule.slices,
        bool(awaited),
    )


def _with_queues(schedule: Schedule, rank: int, instructions: list[Instruction]) -> tuple[int, ...]:
    """Add queues, waits and issues to a rank's instructions; return `RankProgram.issued_first`."""
    ordered = entry_waits(schedule)
    issued: dict[int | None, list[int]] = {None: []}
    computation: int | None = None
    before: dict[str, int] = {}
    posts: tuple[Message, ...] = ()  # those of entries on other queues are opened before the next computation
    for at, instruction in enumerate(instructions):
        queue = kind_of(instruction.actions[0].kind).queue
        # A part is waited for where it is saved and used (`SavedTensors`).
        waits = [
            wait for wait in ordered.get((rank, at), ()) if wait.share == 1.0 and not wait.late and wait.rank == rank
        ]
        posts += instruction.post_receives
        instruction = replace(instruction, post_receives=posts if queue == COMPUTE else ())
        if queue == COMPUTE:
            computation, issued[at], posts = at, [], ()
        else:
            issued[computation].append(at)
        positions = {*(wait.at for wait in waits), *([before[queue]] if queue != COMPUTE and queue in before else ())}
        before[queue] = at
        instructions[at] = replace(instruction, queue=queue, waits=tuple(sorted(positions)))
    for before_at, entries in issued.items():
        if before_at is not None:
            instructions[before_at] = replace(instructions[before_at], issues=tuple(entries))
    return tuple(issued[None])


def _with_reductions(stages: Collection[int], instructions: list[Instruction]) -> None:
    """Add `opens` and `takes` of the stages whose gradients are reduced by actions."""
    last: dict[int, int] = {}  # stage -> the entry that has added to its gradients since they were taken
    for at, instruction in enumerate(instructions if stages else ()):
        for action in instruction.actions:
            kind, stage = kind_of(action.kind), action.stage
            if GRADS in kind.adds and stage in stages:
                if stage not in last:
                    instructions[at] = replace(instructions[at], opens=(*instructions[at].opens, stage))
                last[stage] = at
            elif GRADS in kind.takes:
                adder = last.pop(stage)
                instructions[adder] = replace(instructions[adder], takes=(*instructions[adder].takes, stage))


def _stage_programs(schedule: Schedule, rank: int) -> dict[int, StageProgram]:
    named = NamedEdges.of(schedule)
    takes, gives = _neighbour_edges(schedule)
    actions = [action for cell in schedule.programs[rank] for action in parts(cell)]
    everything = list(range(schedule.microbatches))
    replicas = Counter(schedule.position_of)

    def microbatches(stage: int, wanted: Callable[[Kind], bool]) -> list[int]:
        return [schedule.unit_of(each) for each in actions if each.stage == stage and wanted(kind_of(each.kind))]

    return {
        stage: StageProgram(
            takes[stage],
            gives[stage],
            frozenset(microbatches(stage, lambda kind: kind.produces == (INPUT_GRADIENT,))),
            replicas[schedule.position_of[stage]] == schedule.slices == 1
            and microbatches(stage, lambda kind: kind.is_forward) == everything,
            named.reads[stage],
            {name: tuple(e for e in named.writes[stage] if e.name == name) for _, _, name in named.writes[stage]},
            frozenset(microbatches(stage, lambda kind: kind.letter == "R")),
            frozenset(microbatches(stage, lambda kind: bool(kind.fuses))),
            _offloaded(schedule, actions, stage),
            _kept_on_host(schedule, actions, stage),
            _recomputed_parts(schedule, actions, stage),
        )
        for stage in schedule.stages_of[rank]
    }


def _recomputed_parts(schedule: Schedule, actions: Sequence[Action], stage: int) -> dict[int, frozenset[str]]:
    """Return `StageProgram.parts`. Raises ConfigError for a part behind I."""
    names: dict[int, frozenset[str]] = {}
    begun: set[int] = set()
    for action in (action for action in actions if action.stage == stage):
        kind, unit = kind_of(action.kind), schedule.unit_of(action)
        if kind.is_backward:
            begun.add(unit)
        elif kind.part and KEPT in (need.value for need in kind.needs):
            if unit in begun:
                raise ConfigError(
                    f"{action} stands behind the backward's I, which needs all that the forward saves: such a schedule can be "
                    f"simulated, not run; put it before {stage}I{action.unit}"
                )
            names[unit] = names.get(unit, frozenset()) | {kind.part}
    return names


def _offloaded(schedule: Schedule, actions: Sequence[Action], stage: int) -> dict[int, Parts]:
    """Return `StageProgram.offloaded`. Raises ConfigError for a part with a name, and for parts of two sizes."""
    travelling: dict[int, Parts] = {}
    for action in actions:
        kind = kind_of(action.kind)
        if kind.queue != COPY_OUT or kind.divides is None or action.stage != stage:
            continue
        part, count = fraction_of(action.kind) or ((1, 1) if not kind.part else (0, 0))
        before = travelling.get(schedule.unit_of(action), Parts(frozenset(), count))
        if not 1 <= part <= count or before.of != count:
            raise ConfigError(
                f"{action}: a copy to host memory is of the whole, or of one of so many equal parts as the other copies of its "
                "micro-batch on the stage, such as 0O0:1/4 and 0O0:2/4"
            )
        travelling[schedule.unit_of(action)] = Parts(before.numbers | {part}, count)
    return travelling


def _kept_on_host(schedule: Schedule, actions: Sequence[Action], stage: int) -> frozenset[int]:
    """Return `StageProgram.kept_on_host`. Raises ConfigError where no R needs it."""
    mine = [action for action in actions if action.stage == stage]
    recomputed = {schedule.unit_of(action) for action in mine if action.kind == "R"}
    moved = [action for action in mine if action.kind == "OKEPT"]
    for action in moved:
        if schedule.unit_of(action) not in recomputed:
            raise ConfigError(
                f"{action}: what is kept is copied to host memory for an R of the whole stage, and there is no "
                f"{stage}R{action.unit}: recompute in an action of its own (recompute=whole)"
            )
    return frozenset(map(schedule.unit_of, moved))


def _neighbour_edges(schedule: Schedule) -> tuple[list[Edge | None], list[Edge | None]]:
    """Return stage -> the edges from the previous stage of its route and to the next one."""
    before, after = neighbours(schedule)
    takes = [None if other is None else Edge(other, stage, OUTPUT) for stage, other in enumerate(before)]
    gives = [None if other is None else Edge(stage, other, OUTPUT) for stage, other in enumerate(after)]
    if schedule.spreads_embedding:
        first = schedule.routes[0][0]
        takes[first] = Edge(schedule.vocabulary[schedule.placement[first]], first, OUTPUT)
    return takes, gives


def _task(schedule: Schedule, action: Action, entry: EntryTraffic) -> Task:
    receives = _messages_of(action, entry.receives, "consumer")
    sends = _messages_of(action, entry.sends, "producer")
    return Task(action, schedule.unit_of(action), receives, sends, PENDING in kind_of(action.kind).makes)


def _messages_of(action: Action, messages: tuple[Message, ...], end: str) -> tuple[Message, ...]:
    """Return the messages that `action` waits for ("consumer"), or those with its results ("producer")."""
    wanted = message_kind(action), action.stage, action.microbatch, action.slice
    return tuple(m for m in messages if (m.channel.kind, getattr(m, end), m.microbatch, m.slice) == wanted)
