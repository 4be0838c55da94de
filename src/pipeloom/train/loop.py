"""The training loop of one worker."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NoReturn

import torch
from torch import Tensor

from pipeloom.config import Config, Layout
from pipeloom.config.rates import AUTO_RATE, AUTOMATIC, learning_rate
from pipeloom.errors import DivergedError, Interrupted, Preempted
from pipeloom.limits import expanded
from pipeloom.measure.build import build_pipeline, ties
from pipeloom.ops.random_state import stable_seed
from pipeloom.plan.run import boundary_bytes
from pipeloom.plan.volume import volumes
from pipeloom.runtime import Pipeline
from pipeloom.runtime.batch import count_targets
from pipeloom.runtime.health.status import seconds_running
from pipeloom.schedule.json_form import to_dict
from pipeloom.train.checkpoint.folder import RunClaim
from pipeloom.train.checkpoint.load import Loaded, load
from pipeloom.train.checkpoint.run import RunCheckpoints, RunFacts, RunState, Start, digests, find_start
from pipeloom.train.collect import from_every_worker, gather
from pipeloom.train.data.batches import Batch, Batches, Mixture, Rows, SortedDocuments
from pipeloom.train.data.planned import PlannedBatch, StepPlanner
from pipeloom.train.data.prepare import Data, open_data, require_masks
from pipeloom.train.hub.generate import generate
from pipeloom.train.hub.lora_files import base_weights, begin_weights
from pipeloom.train.observers import ExpertLoads, StepEnd, StepLog, StepObserver, observers, profiled_steps
from pipeloom.train.optimizer import Optimizer
from pipeloom.train.replan import Replanner, prepared
from pipeloom.train.replica_check import ReplicaCheck
from pipeloom.train.report.metrics import memory_history, shared_cores
from pipeloom.train.report.prediction import compared
from pipeloom.train.report.profile import OperatorProfile
from pipeloom.train.report.report import Report, reported
from pipeloom.train.report.step_bytes import BytesCheck
from pipeloom.train.report.tables import what_ranks_hold
from pipeloom.train.schedule_search import MeasureThenSearch, resolve_before_start
from pipeloom.train.speculative import SpeculativeOptimizer
from pipeloom.train.step import BadSteps, NormRow, Outcome, first_not_finite, layer_norms, norm_of
from pipeloom.train.tuning import GarbageCollection, trim_freed_memory
from pipeloom.train.workers.context import INTERRUPT, SAVE, STOP, WorkerContext, require_agreement, together
from pipeloom.train.workers.failures import failure_of_run, note_run, restarted_run
from pipeloom.train.workers.preflight import as_packed


def run(layout: Layout, context: WorkerContext, observers: Sequence[StepObserver] = ()) -> None:
    """Train `layout` on this worker; every worker of the run calls it. Rank 0 reports.

    Args:
        observers: rows to add to those of the configuration, the same on every worker.

    Raises:
        Preempted, Interrupted: a worker was requested to stop; the step under way was finished, and a checkpoint saved.
        CheckpointError: the checkpoint to resume from is absent or damaged, or the last one could not be written.
        ConfigError: data or a folder that cannot be used.
        DivergedError: training diverged.
    """
    config = layout.config
    data = open_data(config, context)
    Batches(data.train, config, layout.mesh.dp)  # a text that is too short is refused before the start
    require_masks(config, data)
    require_agreement([layout], context, data.facts)
    facts = digests(config, "; ".join(data.facts.values()))
    with contextlib.closing(RunClaim()) as claim:
        automatic = [key for key in AUTOMATIC if layout.origins.get(f"optimizer.{key}", "").startswith(AUTO_RATE)]
        start = find_start(config, facts, context, restarted_run(), claim, automatic)
        if start.optimizer is not None:
            origins = dict(layout.origins) | {f"optimizer.{key}": str(start.path) for key in automatic}
            layout = replace(layout, config=config.model_copy(update={"optimizer": start.optimizer}), origins=origins)
        _train(layout, context, data, facts, start, claim, observers)


def _train(
    layout: Layout,
    context: WorkerContext,
    data: Data,
    facts: Mapping[str, str],
    start: Start,
    claim: RunClaim,
    observers: Sequence[StepObserver],
) -> None:
    """Train from `start` to the last step, and report the end; arguments and errors as for `run`."""
    config, test = layout.config, data.held_out
    with _reporting(layout, context, start, facts) as report, contextlib.ExitStack() as stack:
        folder = _run_folder(report, context)
        records = config.train.memory_snapshot and context.device.type == "cuda"
        stack.enter_context(memory_history(folder / f"memory_{context.rank}.pickle" if records else None))
        if context.log is not None:
            context.log.open(folder)
        layout = resolve_before_start(layout, context, report)
        drawn = start.path is None and not config.model.weights
        replans = config.schedule.replan > 0
        pipeline = build_pipeline(
            prepared(layout) if replans else layout, context.device, watchdog=context.watchdog, drawn=drawn
        )
        context.close_to_strangers()
        begin_weights(config, pipeline, start.path is not None)
        trainer = Trainer(config, pipeline, context, report, data.unit, observers)
        sizes = BytesCheck(as_packed(layout, data.packed), pipeline, trainer.optimizer, report)
        # On a CPU the step whose bytes are counted takes longer, and a search would be for its times.
        planned = config.data.batching == "planned"  # what is predicted is a step of equal micro-batches
        if config.train.steps > 1 and not planned and (layout.search is None or context.device.type != "cpu"):
            trainer.more_observers.append(sizes.row)
            trainer.log.slowed = lambda: sizes.slows
        trainer.state.chat = data.template is not None
        if layout.search is not None:
            trainer.measuring = MeasureThenSearch(layout, pipeline, context, report)
        if replans:
            pipeline.adopt(layout.schedule)
            trainer.replanner = Replanner(layout, pipeline, context, report)
            stack.callback(trainer.replanner.close)
        held = what_ranks_hold(layout, pipeline, trainer.optimizer)
        if report is not None:
            report.say("\n".join(held))
            report.record("messages", volumes=[asdict(volume) for volume in volumes(layout)])
            report.say(data.words)
        trainer.begin(start, folder, facts, claim)
        losses = trainer.state.held_out
        if "before" not in losses:
            losses["before"] = trainer.held_out_loss(test)
        before = losses["before"]
        if report is not None:
            report.say(f"held-out loss before training: {before:.4f} nats per {data.unit}")
        trainer.train(data.train, test)
        after = trainer.held_out_loss(test)
        written, sample = "", config.sample
        if sample.tokens:
            prompt, length = data.prompt(sample.prompt), config.train.seq_len
            written = generate(pipeline, data.tokenizer, prompt, sample.tokens, length, config.train.seed)
        if report is not None:
            count = int(sum(count_targets(batch.targets) for batch in test))
            report.record("held-out", before=before, after=after, **{f"{data.unit}s": count})
            crowded = shared_cores(layout.world_size, context.device)
            message = fmean(boundary_bytes(layout))
            traces = [replace(trace, costs=replace(trace.costs, message=message)) for trace in trainer.log.traces]
            name = torch.cuda.get_device_name(context.device) if context.device.type == "cuda" else ""
            compare = partial(compared, layout, device_name=name, sizes=(sizes.predicted, sizes.measured))
            report.conclude(traces, (before, after, count), data.unit, written, crowded, None if planned else compare)
        pipeline.close()


class Trainer:
    """The training of one rank's part of a pipeline: its optimizer, checkpoints, checks and traces.

    Args:
        unit: the word for a target in reports.
        observers: rows to add to those of the configuration (`observers.observers`).

    Attributes:
        state: what changes from step to step besides tensors.
        measuring: the search for costs measured in the first steps, which gets each of them; None: no search is left to do.
        replanner: searches again where measured costs drift; None: `schedule.replan` is 0.
        checkpoints: the checkpoints of this run, once `begin` was called; None: nothing is saved.
        log: the log lines, with the traces of their steps.
        observers: the rows of the present `train`, in the order of their calls.
        more_observers: rows to add to those of the configuration, before the first step.
    """

    def __init__(
        self,
        config: Config,
        pipeline: Pipeline,
        context: WorkerContext,
        report: Report | None,
        unit: str = "token",
        observers: Sequence[StepObserver] = (),
    ) -> None:
        self.config, self.pipeline, self.state = config, pipeline, RunState()
        self.measuring: MeasureThenSearch | None = None
        self.replanner: Replanner | None = None
        self.checkpoints: RunCheckpoints | None = None
        self.profile: OperatorProfile | None = None
        self.garbage = GarbageCollection(trim_freed_memory)
        self.optimizer = Optimizer.of(pipeline, config)
        self.replicas = ReplicaCheck(pipeline, self.optimizer, config.train.check_every, ties(config))
        self.experts = ExpertLoads(config, pipeline)
        self.log = StepLog(config, pipeline, report, self.experts)
        self.observers: list[StepObserver] = []
        self.more_observers = list(observers)
        self._context, self._report, self._unit = context, reported(report), unit
        self._row = NormRow(pipeline, self.optimizer)
        self._bad_steps = BadSteps(config.train.on_nan, config.train.on_spike, self.state.norms)
        self._recorded = 0  # steps whose outcomes are final and recorded
        self._held_out: Sequence[Batch] = ()
        self._speculative = None if config.optimizer.barrier else SpeculativeOptimizer(pipeline, self.optimizer)

    def begin(
        self, start: Start, folder: Path, facts: Mapping[str, str] | None = None, claim: RunClaim | None = None
    ) -> None:
        """Load the checkpoint that the run starts from, if any, and prepare to save checkpoints; collective.

        Args:
            folder: the run's folder.
            facts: name -> digest of what a checkpoint must fit: configuration and data.
            claim: the run's claim to the folder of its checkpoints.
        """
        state, config, base = self.state, self.config, base_weights(self.config)
        if start.path is not None:
            begun = time.perf_counter()
            stored = self._adopted(load(start.path, self.pipeline, self.optimizer, base))
            if self.replanner is not None and self.measuring is None:
                self.replanner.restore(stored.replan, stored.config.get("schedule", {}))
            self.say(f"resumed after step {state.steps_done} from {start.path} ({_recovery(begun)})")
            self._report.record("resume", step=state.steps_done, batch=state.batch, path=str(start.path))
        state.folder = folder
        if profiled := profiled_steps(config):
            self.profile = OperatorProfile(self.pipeline, profiled[0], profiled[-1], folder)
        where = expanded(config.checkpoint.dir).absolute() if config.checkpoint.dir else folder
        self.checkpoints = RunCheckpoints(
            config,
            self.pipeline,
            self.optimizer,
            where,
            state,
            partial(self._more_facts, facts or {}),
            self._report,
            self.replicas,
            path=start.path if start.path is not None and start.path.parent == where else None,
            base=base,
            claim=claim,
        )
        self.checkpoints.require_room()

    def _adopted(self, loaded: Loaded) -> RunFacts:
        """Continue after a checkpoint that was loaded, and return its facts."""
        facts = self.state.adopt(loaded)
        self._recorded = self.state.steps_done
        return facts

    def _more_facts(self, facts: Mapping[str, str]) -> dict[str, Any]:
        """Return the values that checkpoints hold besides tensors and the state."""
        return {
            **facts,
            "config": self.config.model_dump(mode="json"),
            "schedule": to_dict(self.pipeline.schedule),
            **({} if self.replanner is None else {"replan": self.replanner.state()}),
        }

    def train(self, text: Tensor | Rows | Mixture | SortedDocuments, held_out: Sequence[Batch] = ()) -> None:
        """Make all steps that are left, on batches of `text`.

        Args:
            held_out: batches to evaluate on after every `train.eval_every`-th step.

        Raises:
            Preempted, Interrupted: a worker was requested to stop; raised after the step under way.
            CheckpointError: the last checkpoint could not be written.
            DistributedError: the state of replicas differs.
            DivergedError: training diverged.
        """
        options, mesh, state = self.config.train, self.pipeline.mesh, self.state
        batches = Batches(text, self.config, mesh.shape.dp)
        planner: StepPlanner | None = None
        if self.config.data.batching == "planned":
            planner = StepPlanner(self.config, self.pipeline.schedule.chunks, batches.of_step(0))
            self.say(f"the first batch as planned: {planner.words}")
        self._held_out = held_out
        self._before_steps()
        with self.garbage:
            while state.steps_done < options.steps:
                step = state.steps_done + 1
                due = [row for row in self.observers if row.due(step)]
                for row in due:
                    if row.before_step is not None:
                        row.before_step(step)
                needs = {need for row in due for need in row.needs}
                self.pipeline.trace = "trace" in needs
                begun = time.perf_counter()
                whole, replica = batches.of_step(state.batch), mesh.place.dp
                if planner is not None:
                    batch: Batch | PlannedBatch = planner.part(whole, replica)
                else:
                    batch = whole.with_ahead(self.config.model.num_nextn_predict_layers).part(replica, mesh.shape.dp)
                # Dropout of Hugging Face models draws from torch's generator: a resumed run must draw the same.
                torch.manual_seed(stable_seed("step", options.seed, state.steps_done, mesh.everyone.index))
                rate = learning_rate(state.steps_done, options.steps, self.config.optimizer, mesh.shape.dp)
                if self._speculative is None:
                    outcomes = [self.step(batch, rate, "norms" in needs)]
                else:
                    outcomes = self.step_early(batch, rate, "outcome" in needs)
                end = StepEnd(step, batch, time.perf_counter() - begun, outcomes)
                state.steps_done, state.batch = step, state.batch + 1
                flags = end.flags
                for row in self.observers:
                    if row.after_step is not None and not end.rolled_back and (row in due or row.requests & flags):
                        row.after_step(end)
        self._report.end_progress()
        self._save_end()

    def _before_steps(self) -> None:
        options, done = self.config.train, self.state.steps_done
        if done >= options.steps:
            self.say(f"all {options.steps} steps are done (train.steps): the checkpoint is of step {done}")
        self.pipeline.train()
        self._recorded = done
        if self.checkpoints is not None and "rollback" in (options.on_nan, options.on_spike):
            self.checkpoints.save()  # the first checkpoint to roll back to
        self.observers = observers(self.config, done + 1, self.measuring is not None, self) + self.more_observers

    def measure(self) -> None:
        """Hand the step to the search; once that has chosen a schedule, the row of this call goes."""
        if self.measuring is not None and self.measuring.after_step():
            self.measuring = None
            self.observers = [row for row in self.observers if row.name != "measuring for the search"]

    def replan(self, step: int) -> None:
        """Hand the step to the search that follows the costs, unless the first schedule is still searched for."""
        if self.replanner is not None and self.measuring is None:
            self.replanner.after_step(step)

    def _save_end(self) -> str:
        """Save the final state, unless it is saved already. Return where it is, in words."""
        if self.checkpoints is None or not self.state.steps_done:
            return "no step has run, so nothing is saved"
        self.checkpoints.require()
        self.checkpoints.finish()
        return f"saved as {self.checkpoints.path}"

    def evaluate(self, step: int) -> None:
        """Report the loss on the held-out text after a step. It does not affect the training that follows."""
        if step == self.config.train.steps or not self._held_out:
            return  # `run` always computes the loss after the last step
        loss = self.held_out_loss(self._held_out)
        self.pipeline.train()
        self.say(f"held-out loss after step {step}: {loss:.4f} nats per {self._unit}")
        self._report.record("evaluation", step=step, loss=loss)
        self._report.figures(step, {"held_out_loss": loss})

    def save(self, flags: int) -> None:
        """Save a checkpoint. Requests up to now are met by it; a request that arrives while it is saved leads to another one."""
        if flags & SAVE:
            self._context.requests.flags &= ~SAVE
            self._save_file.unlink(missing_ok=True)
        if self.checkpoints is not None:
            self.checkpoints.save()

    @property
    def _save_file(self) -> Path:
        """Return the file that a user creates in the run's folder to request a checkpoint."""
        return self.state.folder / "save"

    def _flags(self) -> int:
        """Return the requests that this rank has received, as bits of `train.workers.context`."""
        asked = self._context.rank == 0 and self.state.folder.is_absolute() and self._save_file.exists()
        return self._context.flags | SAVE * asked

    def end(self, flags: int) -> NoReturn:
        """Save a checkpoint, and end the run as requested: raise Preempted or Interrupted."""
        where = self._save_end()
        if self.profile is not None:
            self.say(*self.profile.finish())
        self.pipeline.close()
        kind = Interrupted if flags & INTERRUPT else Preempted
        raise kind(f"stopped after step {self.state.steps_done} of {self.config.train.steps}, as requested; {where}")

    def record(self, end: StepEnd) -> None:
        """Record the steps that are final now. Raises DivergedError if one is bad, and the run is configured to stop then."""
        self.log.count(end)
        for outcome in end.outcomes:
            self._recorded += 1
            step, loss, norm = self._recorded, outcome.loss, outcome.norm
            figures = {"loss": loss, "grad_norm": norm, "lr": outcome.rate, **outcome.terms}
            self._report.record("step", step=step, **figures)
            self._report.figures(step, figures)
            self._report.advance()
            if not outcome.bad:
                continue
            action = self._bad_steps.actions[outcome.bad]
            what = f"step {step}: the loss is {loss} and the gradient norm {norm}"
            if action == "stop":
                raise DivergedError(self._divergence(what, outcome))
            if action == "skip":
                self.say(f"{what}; skipped")
                self._report.record("skip", step=step, kind=outcome.bad)
            end.rolled_back |= action == "rollback"
        if end.rolled_back:
            self._roll_back()

    def _divergence(self, what: str, outcome: Outcome) -> str:
        """Return the reason why the run ends at a bad step, and what to do about it."""
        cause = outcome.cause
        if cause is not None:
            what += f": {cause.words}"
            if cause.advice:
                return f"{what}; {cause.advice}"
        return (
            f"{what}; training diverged: use a smaller optimizer.lr than {self.config.optimizer.lr}, or a longer "
            f'optimizer.warmup_steps; or train.on_{outcome.bad} = "skip" or "rollback"'
        )

    def _roll_back(self) -> None:
        """Load the newest checkpoint, and continue with the batch after the bad one."""
        state, allowed = self.state, self.config.train.rollbacks
        bad, batch, used = state.steps_done, state.batch, state.rollbacks + 1
        if used > allowed:
            raise DivergedError(
                f"step {bad}: another bad step after {allowed} rollback{'s' * (allowed != 1)} (train.rollbacks): use a "
                f"smaller optimizer.lr than {self.config.optimizer.lr}"
            )
        assert self.checkpoints is not None  # a run that rolls back saves before its first step
        self._adopted(self.checkpoints.back())
        left_out = f"batches {state.batch} to {batch - 1} are left out"
        state.batch, state.rollbacks = batch, used
        self.say(f"step {bad}: rolled back to step {state.steps_done}; {left_out} (rollback {used} of {allowed})")
        self._report.record("rollback", step=bad, to=state.steps_done, batch=batch)

    def say(self, *lines: str) -> None:
        """Print lines, on the rank that reports."""
        for line in lines:
            self._report.say(line)

    def step(self, batch: Batch | PlannedBatch, rate: float, norms: bool = False) -> Outcome:
        """Make one optimizer step, unless its gradient is bad: then the weights stay as they are.

        Args:
            norms: whether to compute the norms by layer (or by parameter, as `log.norms` is set) for the outcome.
        """
        loss = self.pipeline.step(**batch.to(self.pipeline.device).arguments)
        with self.pipeline.waiting_for_device():
            row = self._row.make(float(self._flags()))
        rows = gather(self.pipeline, row)
        norm = norm_of(rows, 1)
        by_layer = layer_norms(self.pipeline, self.optimizer, self.config.log.norms) if norms else None
        bad = self._bad_steps.judge(norm)
        cause = first_not_finite(self.pipeline, self.optimizer) if self._stops_at(bad) else None
        self.optimizer.step(math.nan if bad else norm, rate)
        flags = together(row[0] for row in rows)
        terms = {key: value.item() for key, value in self.pipeline.loss_terms.items()}
        outcome = Outcome(loss.item(), norm, rate, flags, bad=bad, norms=by_layer, cause=cause, terms=terms)
        return outcome.without_terms(self.config.model.mtp_loss_coef)

    def step_early(self, batch: Batch | PlannedBatch, rate: float, settle: bool) -> list[Outcome]:
        """Make one step without a barrier, and return the outcomes of the steps that are final after it.

        That is the step before; this step too with `settle`, or if the step before has a request or a gradient norm that is not
        finite.
        """
        speculative, there = self._speculative, batch.to(self.pipeline.device)
        assert speculative is not None
        outcomes = [speculative.step(there.arguments, rate, self._flags())]
        if settle or any(each is not None and (each.flags or not math.isfinite(each.norm)) for each in outcomes):
            outcomes.append(speculative.settle())
        coefficient = self.config.model.mtp_loss_coef
        finished = [outcome.without_terms(coefficient) for outcome in outcomes if outcome is not None]
        bad = ["" if math.isfinite(outcome.norm) else "nan" for outcome in finished]
        stops = any(self._stops_at(kind) for kind in bad)
        cause = first_not_finite(self.pipeline, self.optimizer) if stops else None
        return [replace(each, bad=kind, cause=cause) for each, kind in zip(finished, bad, strict=True)]

    def _stops_at(self, bad: str) -> bool:
        """Return whether a step ends the run because something in it is not finite, whose place is then looked for."""
        return bad == "nan" and self._bad_steps.actions[bad] == "stop"

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
            loss = self.pipeline.evaluate(**there.arguments)
            targets = count_targets(batch.targets)
            with self.pipeline.waiting_for_device():
                total += loss.item() * targets
            count += targets
            flags = together(row[0] for row in gather(self.pipeline, [float(self._flags())]))
            if flags & (STOP | INTERRUPT):
                self.end(flags)
        return total / count


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
        if layout.config.checkpoint.resume == "auto":
            report.say(f'checkpoint.resume = "auto": {_continued(layout.config, start)}; log: {report.folder.log}')
        for note in start.notes:
            report.say(note)
        note_run(report.folder.root.absolute())
        if context.watchdog is not None:
            context.watchdog.share_folder(str(report.folder.root.absolute()))
        yield report


def _continued(config: Config, start: Start) -> str:
    """Return which run is continued, in words."""
    if start.path is None:
        where = expanded(config.checkpoint.dir or config.log.dir)
        return f"no checkpoint of this model and data in {where}, so a new run begins"
    return f"continuing {start.folder or start.path.parent} from {start.path.name}"


def _recovery(begun: float) -> str:
    """Return a text with the time to load a checkpoint, since `begun`, and the time since this process started."""
    load, since = time.perf_counter() - begun, seconds_running()
    return f"{load:.1f} s to load" + (f", {since:.1f} s since the worker's start" if since is not None else "")


def _run_folder(report: Report | None, context: WorkerContext) -> Path:
    """Return the run's folder, the same on every worker; collective."""
    folder = "" if report is None else str(report.folder.root.absolute())
    return Path(from_every_worker(context, folder, "rank 0 to report the run's folder", "start-up")[0])
