"""The training loop of one worker."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from pipeloom.config import Config, Layout, training_flops
from pipeloom.config.volume import boundary_bytes, volumes
from pipeloom.errors import Interrupted, PipeloomError, Preempted
from pipeloom.limits import expanded
from pipeloom.ops.random_state import stable_seed
from pipeloom.parallel.exchange import all_gather_json
from pipeloom.runtime import Pipeline
from pipeloom.runtime.batch import count_targets
from pipeloom.runtime.health.status import seconds_running
from pipeloom.schedule import Timeline
from pipeloom.schedule.json_form import to_dict
from pipeloom.train.adapters import base_weights, begin_weights
from pipeloom.train.build import build_pipeline, shows_all_to_all, ties
from pipeloom.train.checkpoint.folder import RunClaim
from pipeloom.train.checkpoint.load import Loaded, load
from pipeloom.train.checkpoint.run import RunCheckpoints, RunFacts, Start, digests, find_start
from pipeloom.train.collect import gather, maxima
from pipeloom.train.data.batches import Batch, Batches, Mixture, Rows, SortedDocuments
from pipeloom.train.data.prepare import Data, open_data, require_masks
from pipeloom.train.observers import ExpertLoads, Loads
from pipeloom.train.optimizer import Optimizer
from pipeloom.train.replica_check import ReplicaCheck
from pipeloom.train.report.metrics import StepMetrics, memory_in_use, model_flops_utilization, shared_cores, simulated
from pipeloom.train.report.report import Report
from pipeloom.train.report.tables import table, what_ranks_hold
from pipeloom.train.sample import generate
from pipeloom.train.schedule_search import MeasureThenSearch, resolve_before_start
from pipeloom.train.speculative import SpeculativeOptimizer
from pipeloom.train.step import (
    BadSteps,
    NormRow,
    NotFinite,
    Outcome,
    first_not_finite,
    layer_norms,
    learning_rate,
    norm_of,
)
from pipeloom.train.tuning import StepGarbage, trim_freed_memory
from pipeloom.train.workers.context import INTERRUPT, SAVE, STOP, require_agreement, together
from pipeloom.train.workers.failures import failure_of_run, note_run, restarted_run

if TYPE_CHECKING:
    from pipeloom.train.report.profile import OperatorProfile
    from pipeloom.train.workers.context import WorkerContext

TRACES = 9  # logged steps whose median is drawn at the end; a trace takes 50 KB for a tiny model, and megabytes for a large one


def run(layout: Layout, context: WorkerContext) -> None:
    """Train `layout` on this worker; every worker of the run calls it. Rank 0 reports.

    Raises:
        Preempted, Interrupted: a worker was requested to stop; the step under way was finished, and a checkpoint saved.
        CheckpointError: the checkpoint to resume from is absent or damaged, or the last one could not be written.
        ConfigError: data or a folder that cannot be used.
        PipeloomError: training diverged.
    """
    config = layout.config
    data = open_data(config, context)
    Batches(data.train, config, layout.mesh.dp)  # a text that is too short is refused before the start
    require_masks(config, data)
    require_agreement([layout], context, data.facts)
    facts = digests(config, "; ".join(data.facts.values()))
    with contextlib.closing(RunClaim()) as claim:
        start = find_start(config, facts, context, restarted_run(), claim)
        _train(layout, context, data, facts, start, claim)


def _train(
    layout: Layout, context: WorkerContext, data: Data, facts: Mapping[str, str], start: Start, claim: RunClaim
) -> None:
    """Train from `start` to the last step, and report the end; arguments and errors as for `run`."""
    config, test = layout.config, data.held_out
    with _reporting(layout, context, start, facts) as report:
        folder = _run_folder(report, context)
        if context.log is not None:
            context.log.open(folder)
        layout = resolve_before_start(layout, context, report)
        pipeline = build_pipeline(layout, context.device, watchdog=context.watchdog)
        context.close_to_strangers()
        begin_weights(config, pipeline, start.path is not None)
        trainer = Trainer(config, pipeline, context, report, facts, data.unit, claim)
        if layout.search is not None:
            trainer.measuring = MeasureThenSearch(layout, pipeline, context, report)
        held = what_ranks_hold(pipeline, trainer.optimizer)
        if report is not None and held is not None:
            report.say("\n".join(table(held)))
            report.record("messages", volumes=[asdict(volume) for volume in volumes(layout)])
            report.say(data.words)
        trainer.begin(start, folder)
        if "before" not in trainer.held_out:
            trainer.held_out["before"] = trainer.held_out_loss(test)
        before = trainer.held_out["before"]
        if report is not None:
            report.say(f"held-out loss before training: {before:.4f} nats per {data.unit}")
        trainer.train(data.train, test)
        after = trainer.held_out_loss(test)
        written = generate(pipeline, data.tokenizer, config.train.seq_len, config.train.seed)
        if report is not None:
            count = int(sum(count_targets(batch.targets) for batch in test))
            report.record("held-out", before=before, after=after, **{f"{data.unit}s": count})
            crowded = shared_cores(layout.world_size, context.device)
            size = fmean(boundary_bytes(layout))
            traces = [replace(trace, costs=replace(trace.costs, message=size)) for trace in trainer.traces]
            _conclude(report, traces, (before, after, count), data.unit, written, crowded)
        pipeline.close()


class Trainer:
    """The training of one rank's part of a pipeline: its optimizer, checkpoints, checks and traces.

    Attributes:
        made: number of steps made, including those that were skipped.
        batch: number of the next batch; larger than `made` after a rollback, which leaves out batches.
        traces: measured steps, the newest last.
        measuring: the search for costs measured in the first steps, which gets each of them; None: no search is left to do.
        checkpoints: the checkpoints of this run, once `begin` was called; None: nothing is saved.
        held_out: losses on the held-out text: "before", once it is measured.
    """

    def __init__(
        self,
        config: Config,
        pipeline: Pipeline,
        context: WorkerContext,
        report: Report | None,
        facts: Mapping[str, str] | None = None,
        unit: str = "token",
        claim: RunClaim | None = None,
    ) -> None:
        self.config = config
        self.pipeline = pipeline
        self.traces: deque[Timeline] = deque(maxlen=TRACES)
        self.measuring: MeasureThenSearch | None = None
        self.made, self.batch = 0, 0
        self.checkpoints: RunCheckpoints | None = None
        self.held_out: dict[str, float] = {}
        self._context = context
        self._report = report
        self._facts = dict(facts or {})
        self._unit, self._claim = unit, claim
        self.optimizer = Optimizer.of(pipeline, config)
        self._base = base_weights(config)
        self.replicas = ReplicaCheck(pipeline, self.optimizer, config.train.check_every, ties(config))
        self._row = NormRow(pipeline, self.optimizer)
        self._bad_steps = BadSteps(config.train.on_nan, config.train.on_spike)
        self._not_finite: NotFinite | None = None  # of the step that ends the run
        self._rollbacks = 0
        self._run_folder = Path()
        self._seconds, self._timed = 0.0, 0  # seconds and number of the steps since the last log line
        self._places, self._flops = 0, 0  # tokens and FLOPs of their batches over all replicas
        self._experts = ExpertLoads(config, pipeline)
        self._profile: OperatorProfile | None = None
        self._speculative: SpeculativeOptimizer | None = None
        if not config.optimizer.barrier:
            self._speculative = SpeculativeOptimizer(pipeline, self.optimizer)

    def begin(self, start: Start, folder: Path) -> None:
        """Load the checkpoint that the run starts from, if any, and prepare to save checkpoints; collective."""
        saved = None
        if start.path is not None:
            begun = time.perf_counter()
            self._adopt(load(start.path, self.pipeline, self.optimizer, self._base))
            saved = self.made, self.batch
            self._say(f"resumed after step {self.made} from {start.path} ({_recovery(begun)})")
            if self._report is not None:
                self._report.record("resume", step=self.made, batch=self.batch, path=str(start.path))
        self._run_folder = folder
        if self.config.train.profile_from:
            from pipeloom.train.report.profile import OperatorProfile

            first, steps = self.config.train.profile_from, self.config.train.profile_steps
            self._profile = OperatorProfile(
                self.pipeline, first, min(first + steps - 1, self.config.train.steps), folder
            )
        section = self.config.checkpoint
        where = expanded(section.dir).absolute() if section.dir else folder
        path = start.path if start.path is not None and start.path.parent == where else None
        self.checkpoints = RunCheckpoints(
            self.config,
            self.pipeline,
            self.optimizer,
            where,
            self._extra,
            self._report,
            path,
            saved if path else None,
            self._base,
            self.replicas,
            self._claim,
        )
        self.checkpoints.require_room()

    def _adopt(self, loaded: Loaded) -> None:
        """Restore the values that a checkpoint holds besides tensors. Raises CheckpointError if it is not a trainer's."""
        facts = RunFacts.of(loaded.extra, loaded.path)
        self.made = self.pipeline.next_step = loaded.step
        self.batch = facts.batch_after(loaded.step)
        self._rollbacks, self.held_out, self._bad_steps.norms = facts.rollbacks, facts.held_out, facts.norms

    def _extra(self) -> dict[str, Any]:
        """Return the values that checkpoints hold besides tensors."""
        return {
            **self._facts,
            "batch": self.batch,
            "rollbacks": self._rollbacks,
            "held_out": self.held_out,
            "norms": self._bad_steps.norms,
            "run": str(self._run_folder),
            "config": self.config.model_dump(mode="json"),
            "schedule": to_dict(self.pipeline.schedule),
        }

    def train(self, text: Tensor | Rows | Mixture | SortedDocuments, held_out: Sequence[Batch] = ()) -> None:
        """Make all steps that are left, on batches of `text`.

        Args:
            held_out: batches to evaluate on after every `train.eval_every`-th step.

        Raises:
            Preempted, Interrupted: a worker was requested to stop; raised after the step under way.
            CheckpointError: the last checkpoint could not be written.
            DistributedError: the state of replicas differs.
            PipeloomError: training diverged.
        """
        options = self.config.train
        place, shape = self.pipeline.mesh.place, self.pipeline.mesh.shape
        batches = Batches(text, self.config, shape.dp)
        if self.made >= options.steps:
            self._say(f"all {options.steps} steps are done (train.steps): the checkpoint is of step {self.made}")
        self.pipeline.train()
        if options.on_nan == "rollback" or options.on_spike == "rollback":
            self._save()  # the first checkpoint to roll back to
        final = self.made
        with StepGarbage(trim_freed_memory) as garbage:
            while self.made < options.steps:
                if self._profile is not None:
                    self._profile.before_step(self.made + 1)
                start = time.perf_counter()
                batch = batches.of_step(self.batch).part(place.dp, shape.dp)
                # Dropout of Hugging Face models draws from torch's generator: a resumed run must draw the same.
                torch.manual_seed(stable_seed("step", options.seed, self.made, self.pipeline.mesh.everyone.index))
                rate = learning_rate(self.made, options.steps, self.config.optimizer, shape.dp)
                step = self.made + 1
                logs = step == options.steps or step % self.config.log.every == 0
                due = self.checkpoints is not None and self.checkpoints.due(step)
                evaluates = bool(held_out) and self._evaluates(step)
                settle = logs or due or evaluates or self.measuring is not None
                profiles = self._profile is not None and self._profile.recording
                self.pipeline.trace = logs or self.measuring is not None or profiles
                if self._speculative is None:
                    outcomes = [self.step(batch, rate, logs and self.config.log.norms != "none")]
                else:
                    outcomes = self.final_steps(batch, rate, settle)
                self._seconds += time.perf_counter() - start
                self._timed += 1
                self._count(batch)
                if self._profile is not None:
                    self._say(*self._profile.after_step(step))
                loads = self._experts.after_step(logs)
                self.made, self.batch = step, self.batch + 1
                for outcome in outcomes:
                    final += 1
                    self._record(final, outcome)
                if any(outcome.bad and self._bad_steps.action(outcome.bad) == "rollback" for outcome in outcomes):
                    self._roll_back()
                    final = self.made
                    continue
                self.replicas.after_step(step)
                garbage.after_step(step)
                flags = together(outcome.flags for outcome in outcomes)
                if logs or flags & (STOP | INTERRUPT):
                    self._log(step, outcomes[-1], loads)
                if flags & (STOP | INTERRUPT):
                    self._end(flags)
                if evaluates:
                    self._evaluate(step, held_out)
                if due or flags & SAVE:
                    self.save_as_asked(flags)
                if self.measuring is not None and self.measuring.after_step():
                    self.measuring = None
                    self.traces.clear()  # they are of other schedules
        self._finish()

    def _finish(self) -> None:
        """Save the final state, unless it is saved already."""
        if self._report is not None:
            self._report.end_progress()
        if self.checkpoints is not None:
            self.checkpoints.require(self.made, self.batch)
            self.checkpoints.finish()

    def _count(self, batch: Batch) -> None:
        """Add the tokens and FLOPs of a step's batch, whose shape may differ from that of other steps."""
        rows, length = batch.tokens.shape
        rows *= self.pipeline.mesh.shape.dp
        self._places += rows * length
        self._flops += training_flops(self.config.model, length, rows)

    def _evaluates(self, step: int) -> bool:
        """Return whether the held-out loss is due after step `step`; `run` always computes the one after the last step."""
        options = self.config.train
        return bool(options.eval_every) and step % options.eval_every == 0 and step < options.steps

    def _evaluate(self, step: int, held_out: Sequence[Batch]) -> None:
        """Report the loss on the held-out text. It does not affect the training that follows."""
        loss = self.held_out_loss(held_out)
        self.pipeline.train()
        if self._report is not None:
            self._report.say(f"held-out loss after step {step}: {loss:.4f} nats per {self._unit}")
            self._report.record("evaluation", step=step, loss=loss)
            self._report.figures(step, {"held_out_loss": loss})

    def _save(self) -> None:
        if self.checkpoints is not None:
            self.checkpoints.save(self.made, self.batch)

    def save_as_asked(self, flags: int) -> None:
        """Save a checkpoint. Requests up to now are met by it; a request that arrives while it is saved leads to another one."""
        if flags & SAVE:
            self._context.requests.save = False
            self._save_file.unlink(missing_ok=True)
        self._save()

    @property
    def _save_file(self) -> Path:
        """Return the file that a user creates in the run's folder to request a checkpoint."""
        return self._run_folder / "save"

    def _flags(self) -> int:
        """Return the requests that this rank has received, as bits of `train.workers.context`."""
        asked = self._report is not None and self._run_folder.is_absolute() and self._save_file.exists()
        return self._context.flags | SAVE * asked

    def _end(self, flags: int) -> NoReturn:
        """Save a checkpoint, and end the run as requested: raise Preempted or Interrupted."""
        where = "no step has run, so nothing is saved"
        if self.checkpoints is not None and self.made:
            self.checkpoints.require(self.made, self.batch)
            self.checkpoints.finish()
            where = f"saved as {self.checkpoints.path}"
        if self._profile is not None:
            self._say(*self._profile.finish())
        self.pipeline.close()
        kind = Interrupted if flags & INTERRUPT else Preempted
        raise kind(f"stopped after step {self.made} of {self.config.train.steps}, as requested; {where}")

    def _roll_back(self) -> None:
        """Load the newest checkpoint, and continue with the batch after the bad one."""
        options, bad, batch = self.config.train, self.made, self.batch
        self._rollbacks += 1
        used = self._rollbacks
        if used > options.rollbacks:
            raise PipeloomError(
                f"step {bad}: another bad step after {options.rollbacks} rollback{'s' * (options.rollbacks != 1)} "
                f"(train.rollbacks): use a smaller optimizer.lr than {self.config.optimizer.lr}"
            )
        if self.checkpoints is None:
            raise PipeloomError(f"step {bad}: there is no checkpoint to roll back to")
        self._adopt(self.checkpoints.back())
        left_out = f"batches {self.batch} to {batch - 1} are left out"
        self.batch, self._rollbacks = batch, used
        self._say(f"step {bad}: rolled back to step {self.made}; {left_out} (rollback {used} of {options.rollbacks})")
        if self._report is not None:
            self._report.record("rollback", step=bad, to=self.made, batch=batch)

    def _say(self, *lines: str) -> None:
        if self._report is not None:
            for line in lines:
                self._report.say(line)

    def final_steps(self, batch: Batch, rate: float, settle: bool) -> list[Outcome]:
        """Make one step, and return the outcomes of the steps that are final after it.

        With a barrier, that is this step. Without one it is the step before; this step too with `settle`, or if the step before
        has a request or a gradient norm that is not finite.
        """
        if self._speculative is None:
            return [self.step(batch, rate)]
        there = batch.to(self.pipeline.device)
        outcomes = [self._speculative.step(there.tokens, there.targets, rate, self._flags(), **there.keywords)]
        if settle or any(each is not None and (each.flags or not math.isfinite(each.norm)) for each in outcomes):
            outcomes.append(self._speculative.settle())
        finished = [outcome for outcome in outcomes if outcome is not None]
        if self.config.train.on_nan == "stop" and any(not math.isfinite(outcome.norm) for outcome in finished):
            self._not_finite = first_not_finite(self.pipeline, self.optimizer)
        return [replace(each, bad="" if math.isfinite(each.norm) else "nan") for each in finished]

    def _record(self, step: int, outcome: Outcome) -> None:
        """Record a final step in the log. Raises PipeloomError if training has diverged, and is configured to stop then."""
        loss, norm = outcome.loss, outcome.norm
        if self._report is not None:
            self._report.record("step", step=step, loss=loss, grad_norm=norm, lr=outcome.rate)
            self._report.figures(step, {"loss": loss, "grad_norm": norm, "lr": outcome.rate})
            self._report.advance()
        if not outcome.bad:
            return
        action = self._bad_steps.action(outcome.bad)
        what = f"step {step}: the loss is {loss} and the gradient norm {norm}"
        if action == "stop":
            if self._not_finite is not None:
                what += f": {self._not_finite.words}"
            if self._not_finite is not None and self._not_finite.advice:
                raise PipeloomError(f"{what}; {self._not_finite.advice}")
            raise PipeloomError(
                f"{what}; training diverged: use a smaller optimizer.lr than {self.config.optimizer.lr}, or a longer "
                f'optimizer.warmup_steps; or train.on_{outcome.bad} = "skip" or "rollback"'
            )
        if action == "skip":
            self._say(f"{what}; skipped")
            if self._report is not None:
                self._report.record("skip", step=step, kind=outcome.bad)

    def step(self, batch: Batch, rate: float, norms: bool = False) -> Outcome:
        """Make one optimizer step, unless its gradient is bad: then the weights stay as they are.

        Args:
            norms: whether to compute the norms by layer (or by parameter, as `log.norms` is set) for the outcome.
        """
        there = batch.to(self.pipeline.device)
        loss = self.pipeline.step(there.tokens, there.targets, **there.keywords)
        with self.pipeline.waiting_for_device():
            row = self._row.make(float(self._flags()))
        rows = gather(self.pipeline, row)
        norm = norm_of(rows, 1)
        by_layer = layer_norms(self.pipeline, self.optimizer, self.config.log.norms) if norms else None
        bad = self._bad_steps.judge(norm)
        if bad == "nan" and self._bad_steps.action(bad) == "stop":
            self._not_finite = first_not_finite(self.pipeline, self.optimizer)
        self.optimizer.step(math.nan if bad else norm, rate)
        return Outcome(loss.item(), norm, rate, together(row[0] for row in rows), bad=bad, norms=by_layer)

    def held_out_loss(self, batches: Sequence[Batch]) -> float:
        """Return the mean loss per target over the batches, in nats; collective, and the same on every rank.

        Replicas share a batch if their number divides its rows; otherwise each of them evaluates the whole batch.
        """
        device, total, count = self.pipeline.device, 0.0, 0.0
        place, replicas = self.pipeline.mesh.place, self.pipeline.mesh.shape.dp
        self.pipeline.eval()
        for batch in batches:
            part = batch if len(batch.tokens) % replicas else batch.part(place.dp, replicas)
            there = part.to(device)
            loss = self.pipeline.evaluate(there.tokens, there.targets, **there.keywords)
            targets = count_targets(batch.targets)
            with self.pipeline.waiting_for_device():
                total += loss.item() * targets
            count += targets
            flags = together(row[0] for row in gather(self.pipeline, [float(self._flags())]))
            if flags & (STOP | INTERRUPT):
                self._end(flags)
        return total / count

    def _log(self, step: int, outcome: Outcome, loads: Loads | None) -> None:
        """Report the figures since the last log line, and the bubble of this step; collective."""
        pipeline = self.pipeline
        measured = pipeline.timeline()
        self.traces.append(measured)
        memory, exposed = maxima(pipeline, [memory_in_use(pipeline.device), pipeline.exposed or 0.0])
        seconds, tokens = self._seconds / self._timed, self._places / self._seconds
        flops = self._flops / self._seconds
        self._seconds, self._timed, self._places, self._flops = 0.0, 0, 0, 0
        if self._report is None:
            return
        if outcome.norms is not None:
            kinds = asdict(outcome.norms)
            self._report.record("norms", step=step, **kinds)
            names = {f"{kind}_norm/{name}": norm for kind, norms in kinds.items() for name, norm in norms.items()}
            self._report.figures(step, names)
        self._report.step(
            StepMetrics(
                step=step,
                loss=outcome.loss,
                grad_norm=outcome.norm,
                lr=outcome.rate,
                step_time=seconds,
                tps=tokens,
                memory=memory,
                mfu=model_flops_utilization(self.config, flops, pipeline.device, pipeline.mesh.shape.world),
                bubble_measured=measured.bubble_rate,
                bubble_simulated=simulated(measured).bubble_rate,
                expert_load=None if loads is None else loads.largest,
                expert_drops=None if loads is None else loads.dropped,
                all_to_all=exposed if shows_all_to_all(self.config) and pipeline.exposed is not None else None,
            )
        )


@contextlib.contextmanager
def _reporting(
    layout: Layout, context: WorkerContext, start: Start, facts: Mapping[str, str]
) -> Iterator[Report | None]:
    """Open the run's report: yield it on rank 0, and None on the other ranks."""
    if context.rank != 0:
        yield None
        return
    failure = failure_of_run(start.folder) if start.folder is not None else ""
    with Report(layout.config, start.folder, facts, layout.origins) as report:
        if failure:
            report.say(f"continues the run that failed: {failure}")
        for note in start.notes:
            report.say(note)
        note_run(report.folder.root.absolute())
        if context.watchdog is not None:
            context.watchdog.share_folder(str(report.folder.root.absolute()))
        yield report


def _recovery(begun: float) -> str:
    """Return a text with the time to load a checkpoint, since `begun`, and the time since this process started."""
    load, since = time.perf_counter() - begun, seconds_running()
    return f"{load:.1f} s to load" + (f", {since:.1f} s since the worker's start" if since is not None else "")


def _run_folder(report: Report | None, context: WorkerContext) -> Path:
    """Return the run's folder, the same on every worker; collective."""
    folder = "" if report is None else str(report.folder.root.absolute())
    if context.world_size == 1:
        return Path(folder)
    with context.waiting("rank 0 to report the run's folder", "start-up"):
        return Path(str(all_gather_json(folder, dist.group.WORLD)[0]))


def typical(traces: Sequence[Timeline]) -> Timeline:
    """Return the trace with the median makespan, excluding the first trace (warm-up) unless it is the only one."""
    settled = sorted(list(traces)[1:] or traces, key=lambda timeline: timeline.makespan)
    return settled[len(settled) // 2]


def _conclude(
    report: Report, traces: Sequence[Timeline], losses: tuple[float, float, int], unit: str, written: str, crowded: str
) -> None:
    """Report the end of the run: losses, bubble, a sample, and the paths of its files.

    Args:
        traces: measured steps; none where all steps were made before, or the last one ended the measuring for a search.
    """
    before, after, count = losses
    if traces:
        report.draw(typical(traces), traces)
    report.say(f"\nheld-out loss: {after:.4f} nats per {unit} (before training {before:.4f}; {count:,} {unit}s)")
    if traces:
        _say_bubble(report, typical(traces), crowded)
    report.record("sample", text=written)
    report.say("sample:\n" + "\n".join(f"  | {line}" for line in written.split("\n")))
    report.say_files(drawn=bool(traces))


def _say_bubble(report: Report, measured: Timeline, crowded: str) -> None:
    """Report bubble rate and step time, measured and simulated with the measured costs."""
    prediction = simulated(measured)
    report.say(
        f"bubble rate, Σ idle / (p · makespan): measured {measured.bubble_rate:.4f}, simulated with the measured stage "
        f"costs {prediction.bubble_rate:.4f}"
        + (f" ({crowded}: CPU cores are oversubscribed, so idle time includes waiting for a core)" if crowded else "")
    )
    report.say(f"step: measured {measured.makespan:.3f} s, simulated {prediction.makespan:.3f} s")
    report.record(
        "bubble",
        ranks=measured.schedule.ranks,
        shared_cores=crowded,
        measured=measured.bubble_rate,
        simulated=prediction.bubble_rate,
        makespan_measured=measured.makespan,
        makespan_simulated=prediction.makespan,
    )
