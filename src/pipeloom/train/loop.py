"""The training loop of one worker."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor

from pipeloom.config import Config, Layout
from pipeloom.errors import PipeloomError, Preempted
from pipeloom.runtime import Pipeline
from pipeloom.schedule import Timeline
from pipeloom.train.batches import Batch, Batches, spread
from pipeloom.train.build import build_pipeline
from pipeloom.train.collect import gather, maxima
from pipeloom.train.corpus import read_corpus
from pipeloom.train.experts import ExpertLoads, Loads, shows_all_to_all
from pipeloom.train.held import table, what_ranks_hold
from pipeloom.train.metrics import StepMetrics, memory_in_use, model_flops_utilization, shared_cores, simulated
from pipeloom.train.optimizer import Optimizer, global_norm
from pipeloom.train.rate import learning_rate
from pipeloom.train.report import Report
from pipeloom.train.sample import generate
from pipeloom.train.searched import Measuring, settle
from pipeloom.train.speculative import Outcome, SpeculativeOptimizer
from pipeloom.train.tokenizer import ByteTokenizer

if TYPE_CHECKING:
    from pipeloom.train.worker import WorkerContext

HELD_OUT_BATCHES = 16


def run(layout: Layout, context: WorkerContext) -> None:
    """Trains `layout` on this worker; every worker of the run calls it. Rank 0 reports.

    Raises:
        Preempted: a worker was told to stop; the step under way was finished first.
        ConfigError: a corpus or a folder that cannot be used.
    """
    config = layout.config
    tokenizer = ByteTokenizer()
    corpus = read_corpus(config.data.source)
    text, held_out = tokenizer.encode(corpus.train), tokenizer.encode(corpus.held_out)
    test = spread(held_out, config.train.global_batch_size, config.train.seq_len, HELD_OUT_BATCHES)
    Batches(text, config, layout.mesh.dp)  # a text that is too short is refused before the start
    with _reporting(config, context) as report:
        layout = settle(layout, context, report)
        pipeline = build_pipeline(layout, context.device)
        trainer = Trainer(config, pipeline, context, report)
        if layout.search is not None:
            trainer.measuring = Measuring(layout, pipeline, context, report)
        held = what_ranks_hold(pipeline, trainer.optimizer)
        if report is not None and held is not None:
            report.say("\n".join(table(held)))
            report.say(f"corpus: {corpus.name}, {corpus.files} files, {len(text):,} bytes, {len(held_out):,} held out")
        before = trainer.held_out_loss(test)
        if report is not None:
            report.say(f"held-out loss before training: {before:.4f} nats a byte")
        trainer.train(text)
        after = trainer.held_out_loss(test)
        written = generate(pipeline, tokenizer, config.train.seq_len, config.train.seed)
        if report is not None:
            count = sum(batch.targets.numel() for batch in test)
            report.record("held-out", before=before, after=after, bytes=count)
            crowded = shared_cores(layout.world_size, context.device)
            _conclude(report, trainer.traces, (before, after, count), written, crowded)
        pipeline.close()


class Trainer:
    """One rank's optimizer and the traces of its pipeline, from step to step.

    `measuring`, where a schedule is searched for costs that the first steps show, looks at each of them.
    """

    def __init__(self, config: Config, pipeline: Pipeline, context: WorkerContext, report: Report | None) -> None:
        self.config = config
        self.pipeline = pipeline
        self.traces: list[Timeline] = []
        self.measuring: Measuring | None = None
        self._context = context
        self._report = report
        named = list(pipeline.named_parameters())
        self.optimizer = Optimizer(named, config.optimizer, pipeline.sync, pipeline.counts)
        self._seconds: list[float] = []
        self._experts = ExpertLoads(config, pipeline)
        self._speculative: SpeculativeOptimizer | None = None
        if not config.optimizer.barrier:
            self._speculative = SpeculativeOptimizer(pipeline, self.optimizer)

    def train(self, text: Tensor) -> None:
        """All steps. Raises Preempted after a step in which a worker was told to stop."""
        options = self.config.train
        place, shape = self.pipeline.mesh.place, self.pipeline.mesh.shape
        batches = Batches(text, self.config, shape.dp)
        self.pipeline.train()
        final = 0
        for step in range(options.steps):
            start = time.perf_counter()
            batch = batches.of_step(step).part(place.dp, shape.dp)
            rate = learning_rate(step, options.steps, self.config.optimizer, shape.dp)
            logs = step + 1 == options.steps or (step + 1) % self.config.log.every == 0
            outcomes = self._final_steps(batch, rate, logs or self.measuring is not None)
            self._seconds.append(time.perf_counter() - start)
            loads = self._experts.after_step(logs)
            for outcome in outcomes:
                final += 1
                self._record(final, outcome)
            stop = any(outcome.stop for outcome in outcomes)
            if logs or stop:
                self._log(step + 1, outcomes[-1], loads)
            if self.measuring is not None and not stop and self.measuring.after_step():
                self.measuring = None
                self.traces.clear()  # of another schedule
            if stop:
                self.pipeline.close()
                raise Preempted(f"stopped after step {step + 1} of {options.steps}, as asked")
        if self._report is not None:
            self._report.end_progress()

    def _final_steps(self, batch: Batch, rate: float, settle: bool) -> list[Outcome]:
        """Makes one step, and returns those that are final after it: with a barrier this step.

        Without one the step before it, and this one too if `settle` asks or training ends here.
        """
        if self._speculative is None:
            loss, norm, stop = self.step(batch, rate)
            return [Outcome(loss, norm, rate, stop)]
        device = self.pipeline.device
        tokens, targets = batch.tokens.to(device), batch.targets.to(device)
        outcomes = [self._speculative.step(tokens, targets, rate, self._context.stop_requested)]
        if settle or any(each is not None and (each.stop or not math.isfinite(each.norm)) for each in outcomes):
            outcomes.append(self._speculative.settle())
        return [outcome for outcome in outcomes if outcome is not None]

    def _record(self, step: int, outcome: Outcome) -> None:
        """Writes a final step down. Raises PipeloomError when training has diverged."""
        loss, norm = outcome.loss, outcome.norm
        if self._report is not None:
            self._report.record("step", step=step, loss=loss, grad_norm=norm, lr=outcome.rate)
            self._report.advance()
        if not math.isfinite(norm):
            raise PipeloomError(
                f"step {step}: the loss is {loss} and the gradient norm {norm}; training diverged: "
                f"use a smaller optimizer.lr than {self.config.optimizer.lr}, or a longer optimizer.warmup_steps"
            )

    def step(self, batch: Batch, rate: float) -> tuple[float, float, bool]:
        """One optimizer step: (loss, global gradient norm before clipping, whether any worker was told to stop)."""
        device = self.pipeline.device
        loss = self.pipeline.step(batch.tokens.to(device), batch.targets.to(device))
        rows = gather(self.pipeline, [self.optimizer.square_norm(), float(self._context.stop_requested)])
        norm = global_norm([row[0] for row in rows])
        self.optimizer.step(norm, rate)
        return loss.item(), norm, any(row[1] for row in rows)

    def held_out_loss(self, batches: list[Batch]) -> float:
        """The mean over all targets of the batches, nats; the same on every rank. Replicas share a batch that they divide."""
        device, total, count = self.pipeline.device, 0.0, 0
        place, replicas = self.pipeline.mesh.place, self.pipeline.mesh.shape.dp
        self.pipeline.eval()
        for batch in batches:
            own = batch if len(batch.tokens) % replicas else batch.part(place.dp, replicas)
            loss = self.pipeline.evaluate(own.tokens.to(device), own.targets.to(device))
            total += loss.item() * batch.targets.numel()
            count += batch.targets.numel()
        return total / count

    def _log(self, step: int, outcome: Outcome, loads: Loads | None) -> None:
        """The figures since the last line; measures the step's bubble, which takes all ranks."""
        options, pipeline = self.config.train, self.pipeline
        measured = pipeline.timeline()
        self.traces.append(measured)
        memory, exposed = maxima(pipeline, [memory_in_use(pipeline.device), pipeline.exposed or 0.0])
        seconds = sum(self._seconds) / len(self._seconds)
        self._seconds = []
        if self._report is None:
            return
        self._report.step(
            StepMetrics(
                step=step,
                loss=outcome.loss,
                grad_norm=outcome.norm,
                lr=outcome.rate,
                step_time=seconds,
                tps=options.global_batch_size * options.seq_len / seconds,
                memory=memory,
                mfu=model_flops_utilization(self.config, seconds, pipeline.device, pipeline.mesh.shape.world),
                bubble_measured=measured.bubble_rate,
                bubble_simulated=simulated(measured).bubble_rate,
                expert_load=None if loads is None else loads.largest,
                expert_drops=None if loads is None else loads.dropped,
                all_to_all=exposed if shows_all_to_all(self.config) and pipeline.exposed is not None else None,
            )
        )


@contextlib.contextmanager
def _reporting(config: Config, context: WorkerContext) -> Iterator[Report | None]:
    """The run's report on rank 0, None on the others."""
    if context.rank != 0:
        yield None
        return
    with Report(config) as report:
        yield report


def typical(traces: list[Timeline]) -> Timeline:
    """The trace with the median makespan; the first one, in which things still warm up, only when it is alone."""
    settled = sorted(traces[1:] or traces, key=lambda timeline: timeline.makespan)
    return settled[len(settled) // 2]


def _conclude(
    report: Report, traces: list[Timeline], losses: tuple[float, float, int], written: str, crowded: str
) -> None:
    """The end of the run on the terminal: losses, bubble, a sample, where the files are."""
    before, after, count = losses
    measured = typical(traces)
    prediction = simulated(measured)
    report.draw(measured)
    ranks = measured.schedule.ranks
    report.say(f"\nheld-out loss: {after:.4f} nats a byte (before training {before:.4f}; {count:,} bytes)")
    report.say(
        f"bubble rate, Σ idle / (p · makespan): measured {measured.bubble_rate:.4f}, simulated with the measured stage "
        f"costs {prediction.bubble_rate:.4f}"
        + (f" ({crowded}: they take turns, so idle ranks wait for cores too)" if crowded else "")
    )
    report.say(f"step: measured {measured.makespan:.3f} s, simulated {prediction.makespan:.3f} s")
    report.record(
        "bubble",
        ranks=ranks,
        shared_cores=crowded,
        measured=measured.bubble_rate,
        simulated=prediction.bubble_rate,
        makespan_measured=measured.makespan,
        makespan_simulated=prediction.makespan,
    )
    report.record("sample", text=written)
    report.say("sample:\n" + "\n".join(f"  | {line}" for line in written.split("\n")))
    report.say(f"log:    {report.folder.log}")
    report.say(f"trace:  {report.folder.trace}  (open it in ui.perfetto.dev)")
    report.say(f"svg:    {report.folder.svg}  (measured above simulated)")
