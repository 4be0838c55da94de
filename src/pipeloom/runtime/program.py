"""Lowering: from a checked schedule to the program of instructions of one rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple
from zlib import crc32

from pipeloom.errors import ConfigError
from pipeloom.runtime.actions.signals import Signal, signals_of
from pipeloom.runtime.offload import Parts
from pipeloom.runtime.options import RuntimeOptions
from pipeloom.schedule.actions import (
    COMPUTE,
    GRADS,
    INPUT_GRADIENT,
    OUTPUT,
    Action,
    Cell,
    equal_part,
    fraction_of,
    kind_of,
)
from pipeloom.schedule.batched_p2p import MessageBatch, batches_of, message_clock
from pipeloom.schedule.channels import (
    Channel,
    Edge,
    Message,
    NamedEdges,
    message_kind,
    posting_plan,
    released_sends,
    traffic,
)
from pipeloom.schedule.graph import EntryWait, entry_waits
from pipeloom.schedule.model import Schedule, parts
from pipeloom.schedule.transforms import forward_only, unpair
from pipeloom.schedule.vocabulary import layers_alone


class Task(NamedTuple):
    """One action of an instruction.

    Attributes:
        unit: the number of its micro-batch, or of its slice where sequences are cut: both are called a micro-batch at run time.
        receives: the messages that it waits for, in the order of its inputs; all other inputs are on this rank.
        sends: the messages with its results, in their order; all other results stay on this rank.
    """

    action: Action
    unit: int
    receives: tuple[Message, ...]
    sends: tuple[Message, ...]


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
class Saving:
    """Choice of what the forward of one micro-batch on a stage saves for its backward, and of where that is until then.

    Attributes:
        whole: whether R runs the forward again, which keeps only what R needs.
        kept_travels: whether what R needs travels to host memory and back.
        blocks: whether its layers, or some of them, are recomputed one by one in its backward.
        parts: the parts of its layers that an R of their own recomputes.
        travels: the parts that travel to host memory and back of what its backward needs; None: nothing does.
        splits: whether its backward is I and W, so that weight gradients wait for W.
    """

    whole: bool = False
    kept_travels: bool = False
    blocks: bool = False
    parts: frozenset[str] = frozenset()
    travels: Parts | None = None
    splits: bool = False

    def part_of(self, at: int, layers: int) -> str | None:
        """Return the part among those recomputed that layer `at` of so many is in: `2/4` of the second quarter of them."""
        return next((part for part in self.parts if at in equal_part(part, layers)), None)


SAVES_ALL = Saving()
"""Everything that the backward needs is saved, and stays."""


@dataclass(frozen=True)
class StageProgram:
    """One stage of the schedule. Where it cuts sequences, each slice of a micro-batch is called a micro-batch here.

    Attributes:
        input_edge, output_edge: edges from the previous stage of its route and to the next one; None for the first and the last
            stage.
        saving: micro-batch -> what its forward saves.
        in_order: whether every micro-batch passes through it, in order and uncut, and it has no replica: a replica without
            micro-batches would keep old state.
        reads: edges of the tensors that it reads by name, from earlier stages.
        writes: name of a tensor -> edges to the later stages that read it.
    """

    input_edge: Edge | None
    output_edge: Edge | None
    saving: Mapping[int, Saving]
    in_order: bool
    reads: tuple[Edge, ...] = ()
    writes: Mapping[str, tuple[Edge, ...]] = field(default_factory=dict)

    @cached_property
    def splits(self) -> bool:
        """Return whether the backward of any micro-batch is I and W."""
        return any(saving.splits for saving in self.saving.values())

    @cached_property
    def inputs(self) -> tuple[Edge, ...]:
        """Edges of its inputs: from the previous stage, if there is one, then named tensors."""
        return self.reads if self.input_edge is None else (self.input_edge, *self.reads)


@dataclass(frozen=True)
class RankProgram:
    """The program of one rank for a step.

    Attributes:
        instructions: the instructions, in order.
        stages: stage of this rank -> its part of the schedule.
        channels: the channels of the whole pipeline, sorted: every rank creates their process groups in this order.
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
    def orders(self) -> tuple[int, int]:
        """Return numbers of 20 bits for the order of its actions, and for that of its actions on whole stages."""
        actions = [action for each in self.instructions for action in each.actions]
        of_stages = [action for action in actions if kind_of(action.kind).of_stage]
        numbers = [crc32(" ".join(map(str, exchanges)).encode()) >> 12 for exchanges in (actions, of_stages)]
        return numbers[0], numbers[1]

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
        ("slices", schedule.slices, current.slices),
        ("gathers and reductions by stage", schedule.stage_actions, current.stage_actions),
        ("routes", _routes(schedule), _routes(current)),
    ):
        if value != now:
            raise ConfigError(f"the pipeline cannot change its {words} from {now} to {value}")
    if schedule.splits_backward and not splits_backward:
        raise ConfigError("the pipeline was built for a schedule without split backwards, and this one has some")


def _routes(schedule: Schedule) -> tuple[object, ...]:
    """Return the routes, and where there are several the micro-batches of each: a step needs not take all of them."""
    return schedule.routes, schedule.route_of if len(schedule.routes) > 1 else ()


class Lowering:
    """A schedule that ranks lower, and what it says of all of them, each computed once.

    Args:
        schedule: it must have passed `check`.

    Attributes:
        traffic: rank -> its program with messages.
        unpaired_traffic: the same where ranks run the two actions of a pair one after the other, as a peer may.
        clock: when each message moves, for the batched transport.
        channels: the channels of all ranks, sorted.
        waits: (rank, position) -> the entries that it waits for.
        awaited, signalled: (rank, position) -> the signals that the entry waits for, and that it sends.
    """

    def __init__(self, schedule: Schedule, options: RuntimeOptions) -> None:
        self.schedule, self.options = schedule, options
        self.traffic = traffic(schedule)
        self.unpaired_traffic = traffic(unpair(schedule)) if schedule.has_pairs else self.traffic
        self.clock = message_clock(self.traffic) if options.transport == "batched" else None
        self.channels = tuple(sorted({m.channel for p in self.traffic for entry in p for m in entry.sends}))
        self.waits = entry_waits(schedule)
        self.awaited, self.signalled = signals_of(schedule)
        self.named_edges = NamedEdges.of(schedule)

    def of_rank(self, rank: int) -> RankProgram:
        """Return the program of `rank`: its actions, the messages that each waits for and sends, and when receives are posted.

        Raises ConfigError for a part that is recomputed behind its I, which has used what the forward saves.
        """
        schedule, options, entries = self.schedule, self.options, self.traffic[rank]
        batches, ahead = None, options.overlap_p2p is not False
        if self.clock is not None:
            # If each message brings its shape, a receive posted early would wait for the shape before the present action
            # computes.
            calls = batches_of(self.traffic, rank, ahead and options.shapes == "once", self.clock)
            batches = tuple(batch for gap in calls for batch in gap)
            plan = tuple(tuple(m for batch in gap for m in batch if m.channel.source != rank) for gap in calls[:-1])
        else:
            plan = posting_plan(entries, options.receive_depth, ahead)
        last = {a.stage: at for at, e in enumerate(entries) for a in parts(e.cell) if GRADS in kind_of(a.kind).adds}
        instructions = []
        for at, (entry, posts) in enumerate(zip(entries, plan, strict=True)):
            queue, place = kind_of(parts(entry.cell)[0].kind).queue, (rank, at)
            completes = tuple(stage for stage in sorted(last) if last[stage] == at) if queue == COMPUTE else ()
            tasks = tuple(
                Task(
                    a, schedule.unit_of(a), *(_of_kind(message_kind(a), each) for each in (entry.receives, entry.sends))
                )
                for a in parts(entry.cell)
            )
            signals = self.awaited.get(place, ()), self.signalled.get(place, ())
            instructions.append(Instruction(entry.cell, tasks, posts, completes, queue, (), (), (), (), *signals))
        issued_first = _with_queues(self.waits, rank, instructions) if schedule.has_queues else ()
        _with_reductions(schedule.stage_actions.get("REDUCE_GRAD", frozenset()), instructions)
        stages = _stage_programs(schedule, rank, self.named_edges)
        releases = released_sends(self.unpaired_traffic, rank)
        sizes = schedule.slices, bool(self.awaited)
        return RankProgram(tuple(instructions), stages, self.channels, releases, batches, issued_first, *sizes)


@dataclass(frozen=True)
class ProgramsOfRanks:
    """The programs of the ranks of one process, each lowered when it is first run.

    Attributes:
        schedule: that of a training step, checked; forwards alone are derived from it.
    """

    schedule: Schedule
    ranks: Collection[int]
    options: RuntimeOptions
    _programs: dict[tuple[int | None, bool], dict[int, RankProgram]] = field(default_factory=dict)

    def of_rank(self, rank: int, forwards: int | None = None, whole: bool = False) -> RankProgram:
        """Return the program of a training step, or of only the forwards of so many micro-batches.

        Args:
            whole: whether the forwards are of whole micro-batches where the schedule cuts them into slices, and of layers alone
                where it spreads the vocabulary.
        """
        if (forwards, whole) not in self._programs:
            given = forwards is None or (self.schedule.forwards_alone and forwards == self.schedule.microbatches)
            schedule = self.schedule if given else forward_only(self.schedule, forwards)
            schedule = whole_forwards(layers_alone(schedule)) if whole else schedule
            lowering = Lowering(schedule, self.options)
            self._programs[forwards, whole] = {each: lowering.of_rank(each) for each in self.ranks}
        return self._programs[forwards, whole][rank]


def lower(schedule: Schedule, rank: int, options: RuntimeOptions) -> RankProgram:
    """Return the program of one rank, as `Lowering.of_rank`."""
    return Lowering(schedule, options).of_rank(rank)


def _with_queues(
    ordered: Mapping[tuple[int, int], tuple[EntryWait, ...]], rank: int, instructions: list[Instruction]
) -> tuple[int, ...]:
    """Add queues, waits and issues to a rank's instructions; return `RankProgram.issued_first`."""
    issued: dict[int | None, list[int]] = {None: []}
    computation: int | None = None
    before: dict[str, int] = {}
    posts: tuple[Message, ...] = ()  # those of entries on other queues are opened before the next computation
    for at, instruction in enumerate(instructions):
        queue = instruction.queue
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
        instructions[at] = replace(instruction, waits=tuple(sorted(positions)))
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


def _stage_programs(schedule: Schedule, rank: int, named: NamedEdges) -> dict[int, StageProgram]:
    input_edges, output_edges = _neighbour_edges(schedule)
    actions: dict[int, list[Action]] = {stage: [] for stage in schedule.stages_of[rank]}
    for action in [action for cell in schedule.programs[rank] for action in parts(cell)]:
        actions[action.stage].append(action)
    replicas = Counter(schedule.position_of)
    everything = list(range(schedule.microbatches))
    forwards = {stage: [a.microbatch for a in mine if kind_of(a.kind).is_forward] for stage, mine in actions.items()}
    return {
        stage: StageProgram(
            input_edges[stage],
            output_edges[stage],
            _savings(schedule, mine),
            replicas[schedule.position_of[stage]] == schedule.slices == 1 and forwards[stage] == everything,
            named.reads[stage],
            {name: tuple(e for e in named.writes[stage] if e.name == name) for _, _, name in named.writes[stage]},
        )
        for stage, mine in actions.items()
    }


def _savings(schedule: Schedule, actions: Sequence[Action]) -> dict[int, Saving]:
    """Return `StageProgram.saving` from the actions of a stage.

    Raises ConfigError for a part that is recomputed behind its I, for copies of parts with a name or of two sizes, and for one
    of what is kept that no R needs.
    """
    savings: dict[int, Saving] = {}
    for action in actions:
        kind, unit = kind_of(action.kind), schedule.unit_of(action)
        saving = savings.get(unit, SAVES_ALL)
        letter = action.kind.partition(":")[0]
        if kind.produces == (INPUT_GRADIENT,):
            saving = replace(saving, splits=True, blocks=bool(kind.fuses))
        elif kind.fuses:
            saving = replace(saving, blocks=True)
        elif action.kind == "R":
            saving = replace(saving, whole=True)
        elif action.kind == "OKEPT":
            if action._replace(kind="R") not in actions:
                raise ConfigError(
                    f"{action}: what is kept is copied to host memory for an R of the whole stage, and there is no "
                    f"{action.stage}R{action.unit}: recompute in an action of its own (recompute=whole)"
                )
            saving = replace(saving, kept_travels=True)
        elif letter == "O":
            part, count = fraction_of(action.kind) or ((1, 1) if not kind.part else (0, 0))
            numbers, of = saving.travels or (frozenset(), count)
            if not 1 <= part <= count or of != count:
                raise ConfigError(
                    f"{action}: a copy to host memory is of the whole, or of one of so many equal parts as the other copies of "
                    "its micro-batch on the stage, such as 0O0:1/4 and 0O0:2/4"
                )
            saving = replace(saving, travels=Parts(numbers | {part}, count))
        elif letter == "R":
            if saving.splits:
                raise ConfigError(
                    f"{action} stands behind the backward's I, which needs all that the forward saves: such a schedule can be "
                    f"simulated, not run; put it before {action.stage}I{action.unit}"
                )
            saving = replace(saving, parts=saving.parts | {kind.part})
        savings[unit] = saving
    return savings


def _neighbour_edges(schedule: Schedule) -> tuple[list[Edge | None], list[Edge | None]]:
    """Return stage -> the edges from the previous stage of its route and to the next one."""
    before, after = schedule.neighbours
    input_edges = [None if other is None else Edge(other, stage, OUTPUT) for stage, other in enumerate(before)]
    output_edges = [None if other is None else Edge(stage, other, OUTPUT) for stage, other in enumerate(after)]
    if schedule._spreads_embedding:
        first = schedule.routes[0][0]
        input_edges[first] = Edge(schedule.vocabulary[schedule.placement[first]], first, OUTPUT)
    return input_edges, output_edges


def _of_kind(kind: str | None, messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Return those of a pair's messages that are its forward's, activations, or its backward's, gradients."""
    return tuple([message for message in messages if message.channel.kind == kind])
