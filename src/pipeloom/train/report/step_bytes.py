"""Predicted bytes of a step: the peak of each rank by what it consists of, compared with that of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pipeloom.config import Layout
from pipeloom.measure.device_profile import predicted_timeline
from pipeloom.measure.layer_bytes import layer_bytes
from pipeloom.ops.live_bytes import LiveBytes
from pipeloom.plan.memory import RankMemory, ranks_of
from pipeloom.plan.run import predicted as planned
from pipeloom.runtime import Pipeline
from pipeloom.schedule.channels import size_words
from pipeloom.train.collect import gather
from pipeloom.train.observers import StepEnd, StepObserver
from pipeloom.train.optimizer import Optimizer
from pipeloom.train.report.report import Report


def predicted(layout: Layout) -> Sequence[RankMemory]:
    """Return the bytes of each pipeline rank: of whole layers, from one layer of each kind; of layers that ranks divide, and of
    gathered ones, as a dry run.

    Raises as `layer_bytes`, and UsageError for divided layers that cannot be planned.
    """
    mesh = layout.mesh
    if mesh.tp * mesh.cp * mesh.ep > 1 or layout.schedule.vocabulary or layout.schedule.stage_actions:
        return planned(layout).ranks
    return ranks_of(predicted_timeline(layout, layer_bytes(layout)))


class BytesCheck:
    """Compares the predicted peak of each rank with that of the second step of a run, before which all buffers exist; of steps
    that are profiled it takes none, since the profile would show its own operations.

    On a CPU the tensors that the step makes are counted, which takes some microseconds for each operation of that one step.

    Attributes:
        measured, predicted: bytes of each rank, on rank 0 once they are known.
    """

    def __init__(self, layout: Layout, pipeline: Pipeline, optimizer: Optimizer, report: Report | None) -> None:
        # The device may be configured as "auto"; messages on a CPU are in memory that is not torch's.
        train = layout.config.train.model_copy(update={"device": pipeline.device.type})
        self._layout = replace(layout, config=layout.config.model_copy(update={"train": train}))
        self._pipeline, self._optimizer, self._report = pipeline, optimizer, report
        self._steps, self._due = 0, False
        self.measured: list[float] = []
        self.predicted: list[float] = []
        self._live: LiveBytes | None = None

    @property
    def slows(self) -> bool:
        """Return whether the last step took longer because its tensors were counted."""
        return self._due and self._live is not None

    @property
    def row(self) -> StepObserver:
        return StepObserver("bytes at the peak", self._before_step, self._after_step)

    def _before_step(self, step: int) -> None:
        train = self._layout.config.train
        profiled = 0 < train.profile_from <= step < train.profile_from + train.profile_steps
        self._steps += not profiled
        self._due = self._steps == 2 and not profiled
        if not self._due:
            return
        device = self._pipeline.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return
        sync, parameters = self._pipeline.sync, [parameter for _, parameter in self._pipeline.named_parameters()]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        held: list[Tensor] = [*parameters, *gradients, *self._optimizer.held]
        if sync is not None:
            held += sync.held
        self._live = LiveBytes(held=held, resized=() if sync is None else sync.gathered)
        self._live.__enter__()  # type: ignore[no-untyped-call]

    def _after_step(self, end: StepEnd) -> None:
        if not self._due:
            return
        if self._live is not None:
            self._live.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            peak = self._live.peak + self._pipeline.stats.receive_bytes
        else:
            peak = torch.cuda.max_memory_allocated(self._pipeline.device)
        measured = [row[0] for row in gather(self._pipeline, [float(peak)])]
        if self._report is None:
            return
        mesh, ranks = self._layout.mesh, []
        try:
            with torch.random.fork_rng([]):
                ranks = list(predicted(self._layout))
        except Exception as error:  # such as a user's class that needs more than shapes: it must not end a run
            self._report.say(f"bytes at the peak: not predicted: {error}")
        expected = [ranks[mesh.place(at).pp].total for at in range(mesh.world)] if ranks else []
        worst = max(range(mesh.world), key=measured.__getitem__)
        beside = f" (predicted {size_words(expected[worst])})" if expected else ""
        self._report.say(f"bytes at the peak: at most {size_words(measured[worst])}, on rank {worst}{beside}")
        self._report.record("bytes", measured=measured, predicted=expected)
        self.measured, self.predicted = measured, expected
