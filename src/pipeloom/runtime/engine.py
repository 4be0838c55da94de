"""RankEngine: what one rank of a pipeline runs its steps with, and how they are measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pipeloom.parallel.collectives import Tag
from pipeloom.parallel.mesh import PipelineMesh
from pipeloom.runtime.assembly import Assembly, PipelineSpec
from pipeloom.runtime.executor import Executor, StepHooks, StepResult, clock_for
from pipeloom.runtime.overlap import CommStream
from pipeloom.runtime.p2p.base import Transport
from pipeloom.runtime.program import RankProgram, lower, whole_forwards
from pipeloom.runtime.signals import Signals
from pipeloom.runtime.spread_vocabulary import SpreadVocabulary
from pipeloom.runtime.tensor_spec import ShapeCache
from pipeloom.schedule.model import Schedule
from pipeloom.schedule.timeline import Exposed, Timeline
from pipeloom.schedule.transforms import forward_only
from pipeloom.schedule.vocabulary import layers_alone

_ROUND_TRIPS = 5  # of a clock's comparison: the quickest one is seldom disturbed, and all take well below a millisecond


@dataclass(frozen=True)
class RankStats:
    """Statistics of one rank of a pipeline.

    Attributes:
        schedule: the executed schedule, of all ranks.
        rank: the rank's number in the pipeline.
        messages_sent, messages_received: number of messages in a training step.
        receive_buffers: buffers created since the start; they are reused.
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
    send_segments: int | None
    peak_activations: int
    exposed: Mapping[str, float] | None
    starts: tuple[float, ...]
    ends: tuple[float, ...]
    turns: Mapping[int, float]


class RankEngine:
    """One rank of a pipeline: its stages, its programs, its transport and its hooks.

    Args:
        rank: in the pipeline.
        spec: the pipeline's arguments.
        assembly: the stages of this process, those of `rank` among them.
        communications: the stream of the communications inside the rank's stages.
        transport: a program -> the transport for one run of it.
        hooks: called while a step runs.
        specs: shapes of messages, remembered from step to step.
        vocabulary: the rank's share of a vocabulary that is spread over the pipeline.

    Attributes:
        schedule: the schedule that it runs.
    """

    schedule: Schedule

    def __init__(
        self,
        rank: int,
        spec: PipelineSpec,
        assembly: Assembly,
        communications: CommStream,
        transport: Callable[[RankProgram], Transport],
        hooks: StepHooks,
        specs: ShapeCache,
        vocabulary: SpreadVocabulary | None = None,
    ) -> None:
        self.rank = rank
        self.vocabulary = vocabulary
        self.stages = {number: assembly.stages[number] for number in spec.schedule.stages_of[rank]}
        self.hooks = hooks
        self._spec = spec
        self._communications = communications
        self._transport = transport
        self._specs = specs
        self._programs: dict[tuple[int | None, bool], RankProgram] = {}

    def follow(self, schedule: Schedule) -> None:
        """Run `schedule` from the next step on. Raises ConfigError if a layer's statistics depend on its order."""
        step = lower(schedule, self.rank, self._spec.options)
        for index, stage in self.stages.items():
            stage.require_order(schedule.name, step.stages[index])
        self.schedule, self._programs = schedule, {(None, False): step}

    def program(self, forwards: int | None = None, whole: bool = False) -> RankProgram:
        """Return the program of a training step, or of only the forwards of so many micro-batches. Each is lowered once.

        Args:
            whole: whether the forwards are of whole micro-batches where the schedule cuts them into slices, and of layers alone
                where it spreads the vocabulary.
        """
        if (forwards, whole) not in self._programs:
            assert forwards is not None
            schedule = forward_only(self.schedule, forwards)
            schedule = whole_forwards(layers_alone(schedule)) if whole else schedule
            self._programs[forwards, whole] = lower(schedule, self.rank, self._spec.options)
        return self._programs[forwards, whole]

    def executor(
        self, forwards: int | None, traced: bool, whole: bool = False, signals: Signals | None = None
    ) -> Executor:
        """Return the executor of a training step, or of the forwards of so many micro-batches.

        Args:
            traced: whether actions on a GPU are timed there.
            whole: as of `program`.
            signals: as of `Executor`.
        """
        program = self.program(forwards, whole)
        self._communications.timed = traced
        return Executor(
            program,
            {number: self.stages[number] for number in program.stages},
            self.hooks.faults.over(self._transport(program)),
            self.hooks,
            loss=self._spec.loss,
            specs=self._specs,
            communications=self._communications,
            clock=clock_for(self._communications.device, traced),
            checksums=self._spec.options.checksum,
            vocabulary=self.vocabulary,
            signals=signals,
        )

    def stats(self, result: StepResult, receive_buffers: int = 0, send_segments: int | None = None) -> RankStats:
        """Return the figures of the step that had this result."""
        program = self.program()
        return RankStats(
            self.schedule,
            self.rank,
            sum(len(instruction.sends) for instruction in program.instructions),
            sum(len(instruction.receives) for instruction in program.instructions),
            receive_buffers,
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
