"""Lowering: a checked schedule and a rank in, the rank's flat program out."""

from __future__ import annotations

from dataclasses import dataclass

from pipeloom.schedule.actions import Action, Cell
from pipeloom.schedule.channels import Channel, Message, batched_plan, posting_plan, smallest_depths, traffic
from pipeloom.schedule.model import Schedule, parts
from pipeloom.runtime.options import RuntimeOptions


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
    """

    at: int
    cell: Cell
    actions: tuple[Action, ...]
    posts: tuple[Message, ...]
    receives: tuple[Message | None, ...]
    sends: tuple[Message | None, ...]


@dataclass(frozen=True)
class RankProgram:
    """What one rank runs in a step, and the channels that it takes part in, in an order that all ranks share."""

    steps: tuple[Step, ...]
    channels: tuple[Channel, ...]
    depths: dict[Channel, int]


def lower(schedule: Schedule, rank: int, options: RuntimeOptions) -> RankProgram:
    """The program of `rank`: its actions with the messages that each waits for and makes, and when receives are posted.

    `schedule` must have passed `check` for the same transport.
    """
    programs = traffic(schedule)
    mine = programs[rank]
    if options.transport == "batched":
        plan = batched_plan(mine, options.overlap_p2p)
    else:
        plan = posting_plan(mine, options.receive_depth, options.overlap_p2p)
    steps = []
    for at, (entry, posts) in enumerate(zip(mine, plan, strict=True)):
        actions = parts(entry.cell)
        receives = tuple(_of(action, entry.receives, schedule, incoming=True) for action in actions)
        sends = tuple(_of(action, entry.sends, schedule, incoming=False) for action in actions)
        steps.append(Step(at, entry.cell, actions, posts, receives, sends))
    channels = sorted({m.channel for entry in mine for m in (*entry.receives, *entry.sends)})
    least = smallest_depths(mine)
    return RankProgram(tuple(steps), tuple(channels), {c: max(options.receive_depth, d) for c, d in least.items()})


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


def _of(action: Action, messages: tuple[Message, ...], schedule: Schedule, *, incoming: bool) -> Message | None:
    kind = "activation" if action.kind == "F" else "gradient"
    for message in messages:
        producer = message.stage if not incoming else _producer(schedule, action)
        if message.channel.kind == kind and message.microbatch == action.microbatch and (
            message.stage == producer if incoming else message.stage == action.stage
        ):
            return message
    return None


def _producer(schedule: Schedule, action: Action) -> int | None:
    route = schedule.routes[schedule.route_of[action.microbatch]]
    position = schedule.position_of[action.stage] + (-1 if action.kind == "F" else 1)
    return route[position] if 0 <= position < len(route) else None
