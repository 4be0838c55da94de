"""LocalPipeline: all ranks of a schedule in one process and one thread, for notebooks, debuggers and tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.errors import ScheduleError
from pipeloom.runtime.assembly import Assembly, Thread, assemble, unique_parameters
from pipeloom.runtime.batch import (
    Microbatches,
    Weighing,
    Weight,
    as_inputs,
    batch_rows,
    chosen_sizes,
    join,
    split_batch,
)
from pipeloom.runtime.layers import LayerSource
from pipeloom.runtime.options import RuntimeOptions
from pipeloom.runtime.rank import Loss
from pipeloom.runtime.ties import share
from pipeloom.runtime.transport import InProcessTransport, Mailroom
from pipeloom.runtime.work import StepResult
from pipeloom.schedule.check import check
from pipeloom.schedule.model import Schedule


class LocalPipeline:
    """As `Pipeline`, with every rank here: the same lowering, engine and channels, over memory instead of a network.

    Attribute `next_step`: the number of the next step, for layers that draw random numbers.

    `check_first=False` runs a schedule unproved (for tests of the engine); one that deadlocks then raises ScheduleError.
    """

    def __init__(
        self,
        layers: Sequence[LayerSource],
        schedule: Schedule,
        *,
        loss: Loss,
        weight: Weight | None = None,
        stages: Sequence[int] | None = None,
        tied: Sequence[Sequence[str]] = (),
        options: RuntimeOptions = RuntimeOptions(),
        check_first: bool = True,
    ) -> None:
        if check_first:
            check(schedule)
        self.schedule = schedule
        self.options = options
        self._weight = weight
        self.next_step = 0
        device = options.device if options.device is not None else torch.device("cpu")
        thread = Thread()
        self._assemblies: list[Assembly] = [
            assemble(layers, schedule, rank, stages, tied, loss, options, device, thread)
            for rank in range(schedule.ranks)
        ]
        modules = {name: module for assembly in self._assemblies for name, module in assembly.modules.items()}
        for tie in {tie for assembly in self._assemblies for tie in assembly.ties}:
            share(tie, modules)
        self._parameters = unique_parameters(modules)
        self._results: list[StepResult] = []

    def step(self, inputs: Any, targets: Any, **keywords: Any) -> Tensor:
        """Forward and backward of the whole schedule; returns the mean loss."""
        self._run(None, self._split(inputs, targets, keywords, self.schedule.microbatches))
        self.next_step += 1
        return self._loss()

    @torch.no_grad()
    def evaluate(self, inputs: Any, targets: Any, **keywords: Any) -> Tensor:
        """The mean loss, forward only."""
        count = min(self.schedule.microbatches, batch_rows(as_inputs(inputs)))
        self._run(count, self._split(inputs, targets, keywords, count))
        return self._loss()

    @torch.no_grad()
    def predict(self, inputs: Any, **keywords: Any) -> Any:
        """The outputs of the last stage for the whole batch."""
        count = min(self.schedule.microbatches, batch_rows(as_inputs(inputs)))
        self._run(count, self._split(inputs, None, keywords, count), keep_outputs=True)
        outputs = {mb: output for result in self._results for mb, output in result.outputs.items()}
        return join([outputs[mb] for mb in range(count)])

    def _run(self, forwards: int | None, batch: Microbatches, keep_outputs: bool = False) -> None:
        """A training step, or the forwards of so many micro-batches."""
        mailroom = Mailroom()
        runs = {}
        for rank, assembly in enumerate(self._assemblies):
            transport, program = InProcessTransport(mailroom), assembly.rank.program(forwards)
            runs[rank] = assembly.rank.run(program, batch, transport, keep_outputs=keep_outputs)
        results: dict[int, StepResult] = {}
        waits: dict[int, Any] = {}
        while runs:
            before = [a.rank.status.done for a in self._assemblies], len(runs)
            for rank in list(runs):
                try:
                    waits[rank] = next(runs[rank])
                except StopIteration as done:
                    results[rank] = done.value
                    del runs[rank]
            if runs and before == ([a.rank.status.done for a in self._assemblies], len(runs)):
                stuck = "; ".join(f"rank {rank} waits for {waits[rank].words}" for rank in runs)
                raise ScheduleError(f"the schedule deadlocks: {stuck}")
        self._results = [results[rank] for rank in range(self.schedule.ranks)]

    def _loss(self) -> Tensor:
        shares = [result.loss for result in self._results if result.loss is not None]
        return torch.stack(shares).sum()

    def _split(self, inputs: Any, targets: Any, keywords: Mapping[str, Any], count: int) -> Microbatches:
        sizes = chosen_sizes(inputs, count, self.options.microbatch_sizes)
        return split_batch(inputs, targets, keywords, sizes, Weighing(self._weight, step=self.next_step))

    @property
    def peak_activations(self) -> tuple[int, ...]:
        """rank -> the most stage-micro-batches alive at once in the last step, counted."""
        return tuple(result.peak_alive for result in self._results)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(global name, parameter) of all ranks."""
        yield from self._parameters.items()

    def parameters(self) -> Iterator[nn.Parameter]:
        yield from self._parameters.values()

    def zero_grad(self) -> None:
        """Sets every gradient to None."""
        for parameter in self.parameters():
            parameter.grad = None
