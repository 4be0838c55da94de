"""Lowering: a checked schedule and a rank in, the rank's flat program out."""

from __future__ import annotations

from dataclasses import dataclass

from pipeloom.runtime.options import RuntimeOptions
from pipeloom.schedule.actions import Action, Cell
from pipeloom.schedule.channels import Channel, Entry, Message, posting_plan, traffic
from pipeloom.schedule.model import Schedule, parts


@dataclass(frozen=True)
class Step:
    """One entry of a rank's program.

    Attributes:
        at: its place in the schedule's program.
        cell: the action or pair.
        actions: its parts, in the order in which they run.
        posts: receives to open before it.
        receives: messages that it waits for, for each of its actions (None: the value is on this rank).
        sends: messages that it makes, for each of its actions.
        closes: the stages whose gradients are complete after it.
        cools: whether only backwards are left from here on.
    """

    at: int
    cell: Cell
    actions: tuple[Action, ...]
    posts: tuple[Message, ...]
    receives: tuple[Message | None, ...]
    sends: tuple[Message | None, ...]
    closes: tuple[int, ...] = ()
    cools: bool = False


@dataclass(frozen=True)
class RankProgram:
    """What one rank runs in a step.

    Attributes:
        steps: in order.
        channels: those that the rank takes part in, sorted.
        all_channels: the whole pipeline's, sorted: every rank creates their process groups in this one order.
        acknowledges: a message received -> the rank's own sends that must have arrived by then, because the peer's program
            uses them before it makes that message. So send buffers are released without asking the network.
    """

    steps: tuple[Step, ...]
    channels: tuple[Channel, ...]
    all_channels: tuple[Channel, ...]
    acknowledges: dict[Message, tuple[Message, ...]]


def lower(schedule: Schedule, rank: int, options: RuntimeOptions) -> RankProgram:
    """The program of `rank`: its actions with the messages that each waits for and makes, and when receives are posted.

    `schedule` must have passed `check` for the same transport, with or without its pairs taken apart.
    """
    programs = traffic(schedule)
    mine = programs[rank]
    ahead = options.overlap_p2p and options.transport != "batched"
    plan = posting_plan(mine, options.receive_depth, ahead)
    last = {a.stage: at for at, e in enumerate(mine) for a in parts(e.cell) if a.kind != "F"}
    last_forward = max((at for at, e in enumerate(mine) if any(a.kind == "F" for a in parts(e.cell))), default=-1)
    steps = []
    for at, (entry, posts) in enumerate(zip(mine, plan, strict=True)):
        actions = parts(entry.cell)
        receives = tuple(_of(action, entry.receives, schedule, incoming=True) for action in actions)
        sends = tuple(_of(action, entry.sends, schedule, incoming=False) for action in actions)
        closes = tuple(stage for stage in sorted(last) if last[stage] == at)
        steps.append(Step(at, entry.cell, actions, posts, receives, sends, closes, at > last_forward))
    channels = sorted({m.channel for entry in mine for m in (*entry.receives, *entry.sends)})
    every = sorted({m.channel for program in programs for entry in program for m in entry.sends})
    apart = traffic(schedule.unpaired()) if schedule.has_pairs else programs
    return RankProgram(tuple(steps), tuple(channels), tuple(every), _acknowledges(apart, rank))


def _acknowledges(programs: tuple[tuple[Entry, ...], ...], rank: int) -> dict[Message, tuple[Message, ...]]:
    """As RankProgram says, of programs without pairs: a peer may run the two parts of a pair one after the other."""
    peers = {m.channel.destination for entry in programs[rank] for m in entry.sends}
    used_at: dict[int, list[tuple[int, Message]]] = {}
    made_at: dict[Message, int] = {}
    for peer in peers:
        entries = enumerate(programs[peer])
        used_at[peer] = [(at, m) for at, entry in entries for m in entry.receives if m.channel.source == rank]
        made_at |= {
            m: at for at, entry in enumerate(programs[peer]) for m in entry.sends if m.channel.destination == rank
        }
    next_use = dict.fromkeys(peers, 0)
    result: dict[Message, tuple[Message, ...]] = {}
    for entry in programs[rank]:
        for message in entry.receives:
            peer = message.channel.source
            released = []
            uses = used_at.get(peer, [])
            while next_use.get(peer, 0) < len(uses) and uses[next_use[peer]][0] <= made_at[message]:
                released.append(uses[next_use[peer]][1])
                next_use[peer] += 1
            result[message] = tuple(released)
    return result


def forward_only(schedule: Schedule, microbatches: int | None = None) -> Schedule:
    """The forwards of `schedule` alone, in their order; of the first `microbatches` only, if given (evaluation)."""
    count = schedule.microbatches if microbatches is None else microbatches
    programs = [
        [a for cell in program for a in parts(cell) if a.kind == "F" and a.microbatch < count]
        for program in schedule.programs
    ]
    return Schedule.of(
        programs,
        placement=schedule.placement,
        microbatches=count,
        name=f"{schedule.name} (forward only)",
        routes=schedule.routes,
        route_of=schedule.route_of[:count],
    )


def whole_backwards(schedule: Schedule, rank: int) -> dict[int, frozenset[int]]:
    """Each stage of `rank` -> the micro-batches whose backward is one B there."""
    found: dict[int, set[int]] = {stage: set() for stage in schedule.stages_of[rank]}
    for cell in schedule.programs[rank]:
        for action in parts(cell):
            if action.kind == "B":
                found[action.stage].add(action.microbatch)
    return {stage: frozenset(microbatches) for stage, microbatches in found.items()}


def _of(action: Action, messages: tuple[Message, ...], schedule: Schedule, *, incoming: bool) -> Message | None:
    kind = "activation" if action.kind == "F" else "gradient"
    for message in messages:
        producer = message.stage if not incoming else _producer(schedule, action)
        if (
            message.channel.kind == kind
            and message.microbatch == action.microbatch
            and (message.stage == producer if incoming else message.stage == action.stage)
        ):
            return message
    return None


def _producer(schedule: Schedule, action: Action) -> int | None:
    route = schedule.routes[schedule.route_of[action.microbatch]]
    position = schedule.position_of[action.stage] + (-1 if action.kind == "F" else 1)
    return route[position] if 0 <= position < len(route) else None
