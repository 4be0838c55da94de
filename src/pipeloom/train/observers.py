"""Whatever a training loop does around its steps, as rows of one list: what is called, before or after which steps.

`observers` returns the rows of a configuration, which `train --dry-run` prints and a Trainer calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from pipeloom.config import Config
from pipeloom.models.gate import balance, gates_of, take_loads
from pipeloom.models.layers import block_name
from pipeloom.parallel.collectives import carrier_of
from pipeloom.runtime import Pipeline
from pipeloom.schedule import Timeline
from pipeloom.shapes.layers import training_flops
from pipeloom.train.collect import maxima
from pipeloom.train.data.batches import Batch
from pipeloom.train.data.planned import PlannedBatch
from pipeloom.train.report.metrics import StepMetrics, memory_in_use, model_flops_utilization, simulated
from pipeloom.train.report.report import Report, reported
from pipeloom.train.step import Outcome
from pipeloom.train.tuning import EVERY_STEPS
from pipeloom.train.workers.context import INTERRUPT, SAVE, STOP, together

TRACES = 9  # logged steps whose median is drawn at the end; a trace takes 50 KB for a tiny model, and megabytes for a large one

StepNeed = Literal["outcome", "norms", "trace"]


@dataclass
class StepEnd:
    """A step that has been made.

    Attributes:
        step: its number, counted from 1.
        batch: this replica's part of its batch.
        seconds: duration, without the observers.
        outcomes: of the steps that are final now, oldest first, the same on every rank. With a barrier that is this step;
            without one it may be the step before, or both.
        rolled_back: set by an observer that has loaded an earlier state: the rows after it are not called.
    """

    step: int
    batch: Batch | PlannedBatch
    seconds: float
    outcomes: Sequence[Outcome]
    rolled_back: bool = False

    @property
    def flags(self) -> int:
        """Requests received by any rank, as bits of `workers.context`."""
        return together(outcome.flags for outcome in self.outcomes)


@dataclass(frozen=True)
class StepObserver:
    """A row of what a training loop does around its steps. Every rank has the same rows in the same order.

    So a call may be collective, as long as it communicates alike on every rank.

    Attributes:
        name: for the list that `train --dry-run` prints.
        before_step: called with the number of a step, from 1, before it.
        after_step: called after the step.
        every: interval in steps; 0: none.
        also: steps besides those of the interval.
        requests: bits of `workers.context`, of which any calls `after_step` whatever the step.
        needs: "outcome": that of the step itself, which a step without a barrier then waits for; "norms": norms by layer in
            the outcome; "trace": `Pipeline.timeline` with the times of a GPU.
    """

    name: str
    before_step: Callable[[int], object] | None = None
    after_step: Callable[[StepEnd], object] | None = None
    every: int = 1
    also: Collection[int] = ()
    requests: int = 0
    needs: tuple[StepNeed, ...] = ()

    def due(self, step: int) -> bool:
        """Return whether it is called before and after step `step` without a request."""
        return step in self.also or (self.every > 0 and step % self.every == 0)

    def when(self) -> str:
        """Return the steps in words, such as `"every 10 steps, after step 25, on SIGUSR1"`; "" for none."""
        words = [f"every {self.every} steps" if self.every > 1 else "every step"] * (self.every > 0)
        others = [step for step in self.also if not self.every or step % self.every]
        if others:
            first, last = min(others), max(others)
            words.append(f"steps {first} to {last}" if last > first else f"after step {first}")
        signals = {STOP: "SIGTERM", INTERRUPT: "SIGINT", SAVE: "SIGUSR1"}
        words += [f"on {name}" for bit, name in signals.items() if self.requests & bit]
        return ", ".join(words)


def observers(config: Config, first: int = 1, searches: bool = False, trainer: Any = None) -> list[StepObserver]:
    """Return the rows of a run in the order of their calls; those that are never called are left out.

    Args:
        first: the first step that is made.
        searches: whether the first steps are measured for a search.
        trainer: the `Trainer` that the rows call; None: they are listed, and nobody calls them.
    """
    train, last, ends = config.train, config.train.steps, STOP | INTERRUPT
    experts = bool(config.model.num_experts and not config.model.source)  # Hugging Face gates count no tokens
    outcome: tuple[StepNeed, ...] = ("outcome",)
    traced: tuple[StepNeed, ...] = (*outcome, "trace")
    logged: tuple[StepNeed, ...] = traced if config.log.norms == "none" else (*traced, "norms")
    rows = [
        StepObserver(
            "profile",
            lambda step: trainer.profile.before_step(step),
            lambda end: trainer.say(*trainer.profile.after_step(end.step)),
            every=0,
            also=profiled_steps(config),
            needs=("trace",),
        ),
        # Routers with biases need the loads of every step; otherwise they are only for the log.
        StepObserver(
            "expert loads",
            after_step=lambda end: trainer.experts.collect(),
            every=experts * (1 if config.model.router == "sigmoid" else config.log.every),
            also=(last,) if experts else (),
        ),
        StepObserver("record, and bad steps", after_step=lambda end: trainer.record(end)),
        StepObserver("replica check", None, lambda end: trainer.replicas.check(end.step), train.check_every),
        StepObserver("garbage collection", None, lambda end: trainer.garbage.collect(), EVERY_STEPS, also=(first,)),
        StepObserver(
            "log", None, lambda end: trainer.log.after_step(end), config.log.every, (last,), requests=ends, needs=logged
        ),
        StepObserver("end", None, lambda end: trainer.end(end.flags), every=0, requests=ends),
        StepObserver("evaluation", None, lambda end: trainer.evaluate(end.step), train.eval_every, needs=outcome),
        StepObserver(
            "checkpoint",
            None,
            lambda end: trainer.save(end.flags),
            config.checkpoint.every,
            requests=SAVE,
            needs=outcome,
        ),
        StepObserver("measuring for the search", None, lambda end: trainer.measure(), int(searches), needs=traced),
        StepObserver("replan", None, lambda end: trainer.replan(end.step), config.schedule.replan, needs=traced),
    ]
    return [row for row in rows if row.when()]


def profiled_steps(config: Config) -> range:
    """Return the steps whose operators are recorded."""
    first, steps = config.train.profile_from, config.train.profile_steps
    return range(first, min(first + steps - 1, config.train.steps) + 1) if first else range(0)


class StepLog:
    """The log lines of a run, with the figures of the steps since the last one.

    Attributes:
        traces: logged steps of the present schedule, the newest last.
        slowed: whether something made the last step take longer than the others, so that it is not traced unless the run ends.
    """

    def __init__(self, config: Config, pipeline: Pipeline, report: Report | None, experts: ExpertLoads) -> None:
        self.traces: deque[Timeline] = deque(maxlen=TRACES)
        self.slowed: Callable[[], bool] = lambda: False
        self._config, self._pipeline, self._report, self._experts = config, pipeline, reported(report), experts
        self._shape = config.model.shape()
        self._clear()

    def _clear(self) -> None:
        self._seconds, self._steps, self._tokens, self._flops = 0.0, 0, 0, 0.0

    def count(self, end: StepEnd) -> None:
        """Add a step, whose batch may have another shape than those of other steps."""
        self._seconds += end.seconds
        self._steps += 1
        if isinstance(end.batch, PlannedBatch):
            self._tokens += end.batch.tokens
            self._flops += end.batch.flops
            return
        rows, length = end.batch.tokens.shape
        rows *= self._pipeline.mesh.shape.dp
        self._tokens += rows * length
        self._flops += training_flops(self._shape, length, rows)

    def after_step(self, end: StepEnd) -> None:
        """Report the figures since the last log line, and the bubble of this step; collective."""
        pipeline, outcome, measured = self._pipeline, end.outcomes[-1], self._pipeline.timeline()
        load, drops = self._experts.take() or (None, None)
        if self.traces and self.traces[-1].schedule is not measured.schedule:
            self.traces.clear()
        if end.step == self._config.train.steps or not self.slowed():
            self.traces.append(measured)
        memory, exposed = maxima(pipeline, [memory_in_use(pipeline.device), pipeline.exposed or 0.0])
        # Only experts on several ranks exchange tokens, for which computation may have to wait.
        waits = self._config.parallel.ep > 1 and pipeline.exposed is not None
        metrics = StepMetrics(
            step=end.step,
            loss=outcome.loss,
            grad_norm=outcome.norm,
            lr=outcome.rate,
            step_time=self._seconds / self._steps,
            tps=self._tokens / self._seconds,
            memory=memory,
            mfu=model_flops_utilization(
                self._config, self._flops / self._seconds, pipeline.device, pipeline.mesh.shape.world
            ),
            bubble_rate=measured.bubble_rate,
            bubble_rate_simulated=simulated(measured).bubble_rate,
            expert_load=load,
            expert_drops=drops,
            all_to_all=exposed if waits else None,
        )
        self._clear()
        if outcome.norms is not None:
            kinds = asdict(outcome.norms)
            self._report.record("norms", step=end.step, **kinds)
            self._report.figures(
                end.step, {f"{kind}_norm/{name}": norm for kind, norms in kinds.items() for name, norm in norms.items()}
            )
        self._report.step(metrics)


class ExpertLoads:
    """Collects the loads of a pipeline's experts, and updates the biases of sigmoid routers by them."""

    def __init__(self, config: Config, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._experts = config.model.num_experts
        blocks = [block_name(number) for number, experts in enumerate(config.model.expert_blocks) if experts]
        self._blocks = len(blocks)
        held = [(at, pipeline.modules[name]) for at, name in enumerate(blocks) if name in pipeline.modules]
        self._gates = [(at, gate) for at, module in held for gate in gates_of([module])]
        self._table: torch.Tensor | None = None

    def collect(self) -> None:
        """Sum the last step's loads over the ranks, and update the biases of sigmoid routers; collective."""
        mesh, device = self._pipeline.mesh, self._pipeline.device
        table = torch.zeros(
            self._blocks, self._experts + 1, dtype=torch.int64, device=carrier_of(device, mesh.everyone.group)
        )
        for at, gate in self._gates:
            loads = take_loads(gate)
            if mesh.place.tp == 0:  # the other tensor-parallel ranks had the same tokens
                table[at] = loads
        if mesh.everyone.group is not None:
            with self._pipeline.waiting("the other ranks' loads of the experts"):
                dist.all_reduce(table, group=mesh.everyone.group)
        for at, gate in self._gates:
            balance(gate, table[at, :-1].to(device))
        self._table = table

    def take(self) -> tuple[float, float] | None:
        """Return the balance of the loads that were collected last; None if there are none since the last call.

        Returns:
            tokens of the busiest expert over the mean of its block, for the block where this is largest: between 1 (even) and the
            number of experts; and the share of all choices that were dropped because their expert was full.
        """
        if self._table is None:
            return None
        counts, drops = self._table[:, :-1], self._table[:, -1]
        self._table = None
        even = counts.sum(1) / self._experts
        largest = (counts.amax(1) / even.clamp_min(1e-9)).max()
        return float(largest), float(drops.sum() / counts.sum().clamp_min(1))
