"""RankEngine: what one rank of a pipeline runs its steps with, and how they are measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pipeloom.parallel.collectives import Tag
from pipeloom.parallel.mesh import PipelineMesh
from pipeloom.runtime.actions.registry import StepHooks
from pipeloom.runtime.actions.signals import Signals
from pipeloom.runtime.assembly import PipelineSpec
from pipeloom.runtime.executor import DeviceClock, Executor, HostClock
from pipeloom.runtime.flight import StepResult
from pipeloom.runtime.overlap import CommStream
from pipeloom.runtime.p2p.base import Transport
from pipeloom.runtime.program import ProgramsOfRanks, RankProgram
from pipeloom.runtime.spread_vocabulary import SpreadVocabulary
from pipeloom.runtime.stage import Stage
from pipeloom.runtime.tensor_spec import ShapeCache
from pipeloom.schedule.model import Schedule
from pipeloom.schedule.timeline import Exposed, Timeline

_ROUND_TRIPS = 5  # of a clock's comparison: the quickest one is seldom disturbed, and all take well below a millisecond


@dataclass(frozen=True)
class RankStats:
    """Statistics of one rank of a pipeline.

    Attributes:
        schedule: the executed schedule, of all ranks.
        rank: the rank's number in the pipeline.
        messages_sent, messages_received: number of messages in a training step.
        receive_buffers, receive_bytes: number and bytes of the buffers created since the start; they are reused.
        send_segments: shared-memory segments created for sending; None: messages do not go through shared memory.
        peak_activations: the most stage-micro-batches alive at once in the last step.
        exposed: kind of communication ("tp", "dp", "all-to-all") -> seconds for which computation waited for it inside
            actions in the last step; None: not measured (on a GPU without `trace`).
        starts, ends: seconds (time.perf_counter) of each entry of this rank's program in the last step.
        turns: entry of a pair -> when execution switched from its forward to its backward.
    """

    schedule: Schedule
    rank: int
    messages_sent: int
    messages_received: int
    receive_buffers: int
    receive_bytes: int
    send_segments: int | None
    peak_activations: int
    exposed: Mapping[str, float] | None
    starts: tuple[float, ...]
    ends: tuple[float, ...]
    turns: Mapping[int, float]


@dataclass(eq=False)
class RankEngine:
    """One rank of a pipeline: its stages, its programs, its transport and its hooks.

    Attributes:
        rank: in the pipeline.
        spec: the pipeline's arguments.
        stages: stage number -> stage, of this rank.
        communications: the stream of the communications inside the rank's stages.
        transport: a program -> the transport for one run of it.
        hooks: called while a step runs.
        specs: shapes of messages, remembered from step to step.
        vocabulary: the rank's share of a vocabulary that is spread over the pipeline.
        programs: of the next step.
    """

    rank: int
    spec: PipelineSpec
    stages: Mapping[int, Stage]
    communications: CommStream
    transport: Callable[[RankProgram], Transport]
    hooks: StepHooks
    specs: ShapeCache
    vocabulary: SpreadVocabulary | None = None
    programs: ProgramsOfRanks = field(init=False)

    def require_order(self, programs: ProgramsOfRanks) -> None:
        """Raise ConfigError if a layer's statistics depend on the order of these programs."""
        step = programs.of_rank(self.rank)
        for index, stage in self.stages.items():
            stage.require_order(programs.schedule.name, step.stages[index])

    def executor(
        self, forwards: int | None, traced: bool, whole: bool = False, signals: Signals | None = None
    ) -> Executor:
        """Return the executor of a training step, or of the forwards of so many micro-batches.

        Args:
            traced: whether actions on a GPU are timed there.
            whole: as of `ProgramsOfRanks.of_rank`.
            signals: as of `Executor`.
        """
        program = self.programs.of_rank(self.rank, forwards, whole)
        stages = {number: self.stages[number] for number in program.stages}
        transport = self.hooks.faults.over(self.transport(program))
        stream, checksums = self.communications, self.spec.options.checksum
        stream.timed = traced
        clock = DeviceClock(stream.device) if traced and stream.device.type == "cuda" else HostClock()
        return Executor(
            program,
            stages,
            transport,
            self.hooks,
            self.spec.loss,
            self.specs,
            stream,
            clock,
            checksums,
            self.vocabulary,
            signals,
        )

    def stats(
        self, result: StepResult, received: tuple[int, int] = (0, 0), send_segments: int | None = None
    ) -> RankStats:
        """Return the figures of the step that had this result.

        Args:
            received: number and bytes of the receive buffers.
        """
        instructions = self.programs.of_rank(self.rank).instructions
        sent, arrived = sum(len(each.sends) for each in instructions), sum(len(each.receives) for each in instructions)
        return RankStats(
            self.programs.schedule,
            self.rank,
            sent,
            arrived,
            *received,
            send_segments,
            result.peak_alive,
            result.exposed,
            tuple(result.starts),
            tuple(result.ends),
            dict(result.turns),
        )


def measured_rank(result: StepResult, offset: float) -> dict[str, Any]:
    """Return the times of one rank's step for `merged_timeline`, as JSON values, in seconds of rank 0's clock.

    Args:
        offset: seconds to subtract from the rank's clock.
    """
    return {
        "starts": [t - offset for t in result.starts],
        "ends": [t - offset for t in result.ends],
        "turns": [[at, t - offset] for at, t in result.turns.items()],
        "exposed": None if result.exposed is None else dict(result.exposed),
        "after": dict(result.after),
        "end": result.end - offset,
    }


def merged_timeline(schedule: Schedule, ranks: Sequence[Mapping[str, Any]]) -> Timeline:
    """Return the measured timeline of a step, in seconds from its first action; its costs are the measured ones.

    Args:
        schedule: the executed schedule.
        ranks: `measured_rank` of each, in order.
    """
    origin = min(each["starts"][0] for each in ranks)
    starts = tuple(tuple(t - origin for t in each["starts"]) for each in ranks)
    ends = tuple(tuple(t - origin for t in each["ends"]) for each in ranks)
    turns = [{at: t - origin for at, t in each["turns"]} for each in ranks]
    exposed: tuple[Exposed, ...] = ()
    if all(each["exposed"] is not None for each in ranks):
        exposed = tuple(
            Exposed(each["exposed"], each["after"], max(each["end"] - origin, last[-1]))
            for each, last in zip(ranks, ends, strict=True)
        )
    return Timeline.measured(schedule, starts, ends, turns, exposed)


def clock_offset(mesh: PipelineMesh, group: Any) -> float:
    """Return the seconds to subtract from this rank's `time.perf_counter` to get rank 0's, by the quickest of a few round trips.

    Collective over the pipeline, through `group`, which moves tensors of the CPU. Half the quickest round trip bounds the
    error (Cristian's algorithm).
    """
    if mesh.group is None:
        return 0.0
    stamp = torch.zeros(1, dtype=torch.float64)
    for rank in range(1, len(mesh.ranks)):
        if mesh.rank == 0:
            for _ in range(_ROUND_TRIPS):
                group.recv([stamp], rank, Tag.CLOCK).wait()
                stamp[0] = time.perf_counter()
                group.send([stamp], rank, Tag.CLOCK).wait()
        elif mesh.rank == rank:
            best = (float("inf"), 0.0)
            for _ in range(_ROUND_TRIPS):
                sent = time.perf_counter()
                group.send([stamp], 0, Tag.CLOCK).wait()
                group.recv([stamp], 0, Tag.CLOCK).wait()
                back = time.perf_counter()
                best = min(best, (back - sent, (sent + back) / 2 - stamp.item()))
            return best[1]
    return 0.0
