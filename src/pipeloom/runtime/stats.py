"""Statistics of a rank: its executed schedule, its buffers, and figures of its last step, for tests, benchmarks and users."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeloom.runtime.executor import StepResult
from pipeloom.runtime.program import RankProgram
from pipeloom.schedule.model import Schedule


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

    @classmethod
    def of(
        cls,
        schedule: Schedule,
        rank: int,
        program: RankProgram,
        result: StepResult,
        receive_buffers: int = 0,
        send_segments: int | None = None,
    ) -> RankStats:
        """The figures of a rank whose last step left `result`."""
        return cls(
            schedule,
            rank,
            sum(len(messages) for instruction in program.instructions for messages in instruction.sends),
            sum(len(messages) for instruction in program.instructions for messages in instruction.receives),
            receive_buffers,
            send_segments,
            result.peak_alive,
            result.exposed,
            tuple(result.starts),
            tuple(result.ends),
            dict(result.turns),
        )
