"""The checkpoints of a training run: the one that it starts from, when others are due, and what they hold."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeloom.config import Config
from pipeloom.config.problems import file_sentence
from pipeloom.config.sections import OptimizerSection
from pipeloom.errors import CheckpointError, ConfigError, echo
from pipeloom.limits import MOST_STEPS, expanded
from pipeloom.runtime import Pipeline
from pipeloom.train.checkpoint.folder import RunClaim, complete, newest_checkpoint, remove_leftovers, step_path
from pipeloom.train.checkpoint.load import Loaded, load
from pipeloom.train.checkpoint.manifest import EXTRA, MANIFEST, BaseWeights
from pipeloom.train.checkpoint.reader import read_extra, verified
from pipeloom.train.checkpoint.save import Saver
from pipeloom.train.collect import agreed, from_every_rank, from_every_worker
from pipeloom.train.optimizer import Optimizer
from pipeloom.train.replica_check import ReplicaCheck
from pipeloom.train.report.report import Report
from pipeloom.train.workers.context import WorkerContext
from pipeloom.train.workers.failures import DIGESTS_FILE, facts_in

_Count = Annotated[int, Field(ge=0, le=MOST_STEPS)]
_Model = TypeVar("_Model", bound=BaseModel)


class RunFacts(BaseModel):
    """The part of `extra.json` that is read.

    Attributes:
        batch: number of batches that were read; None: as many as steps.
        rollbacks: number of rollbacks so far.
        held_out: step -> loss on the held-out text.
        norms: the latest gradient norms.
        run: the run's folder.
        data: digest of the data.
        config: the configuration, section by section.
        source: the Hugging Face directory that the weights were imported from.
        chat: whether the data are conversations; None: it was imported.
        replan: the schedule in its place, and the costs that it suits, where `schedule.replan` was on.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    batch: _Count | None = None
    rollbacks: _Count = 0
    held_out: dict[str, float] = {}
    norms: list[float] = []
    run: str = ""
    data: str | None = None
    config: dict[str, dict[str, Any]] = {}
    source: str | None = None
    chat: bool | None = None
    replan: dict[str, Any] = {}

    @classmethod
    def of(cls, extra: Any, directory: Path) -> RunFacts:
        """Return the facts in `extra`, as `save` was given it. Raises CheckpointError if a trainer cannot have written it."""
        return validated(cls, {} if extra is None else extra, directory)

    @classmethod
    def read(cls, directory: Path) -> RunFacts:
        """Return the facts of the checkpoint in `directory`. Raises CheckpointError as `of`, and if it cannot be read."""
        return cls.of(read_extra(directory), directory)

    def batch_after(self, step: int) -> int:
        """Return the number of batches that were read when `step` steps were completed."""
        return step if self.batch is None else self.batch

    def model(self, directory: Path) -> dict[str, Any]:
        """Return the section of the model. Raises CheckpointError if there is none."""
        if "model" not in self.config:
            raise CheckpointError(
                f"{directory}: it does not name its model, so it was not written by Pipeloom's trainer"
            )
        return self.config["model"]


@dataclass
class RunState:
    """State of a run besides its tensors, from step to step and from one part of the run to the next.

    Attributes:
        steps_done: number of steps made, including those that were skipped.
        batch: number of the next batch; larger than `steps_done` after a rollback, which leaves out batches.
        rollbacks: number of rollbacks so far.
        held_out: losses on the held-out text: "before", once it is measured.
        norms: the latest gradient norms of good steps (`BadSteps`).
        chat: whether the data are conversations, for those who generate with a checkpoint.
        folder: the run's folder.
    """

    steps_done: int = 0
    batch: int = 0
    rollbacks: int = 0
    held_out: dict[str, float] = field(default_factory=dict)
    norms: list[float] = field(default_factory=list)
    chat: bool = False
    folder: Path = Path()

    def adopt(self, loaded: Loaded) -> RunFacts:
        """Continue from a checkpoint, and return all of its facts. Raises CheckpointError if it is not a trainer's."""
        facts = RunFacts.of(loaded.extra, loaded.path)
        self.steps_done, self.batch = loaded.step, facts.batch_after(loaded.step)
        self.rollbacks, self.held_out = facts.rollbacks, facts.held_out
        self.norms[:] = facts.norms
        return facts

    def facts(self) -> dict[str, Any]:
        """Return the values for a checkpoint, under the names of `RunFacts`."""
        values = {"batch": self.batch, "chat": self.chat, "rollbacks": self.rollbacks, "held_out": self.held_out}
        return {**values, "norms": self.norms, "run": str(self.folder)}


def validated(model: type[_Model], values: Any, directory: Path) -> _Model:
    """Return what `model` makes of `values`, which are from `extra.json`. Raises CheckpointError if it refuses them."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise CheckpointError(
            f"{directory / EXTRA}: it was not written by Pipeloom's trainer: {file_sentence(error)}"
        ) from None


# -- the start of a run ------------------------------------------------------------------------------------------------

# Keys that determine the names and shapes of parameters and buffers.
_MODEL_KEYS = (
    *("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "attention_bias"),
    *("qkv_bias", "intermediate_size", "vocab_size", "tie_word_embeddings", "num_experts", "moe_intermediate_size"),
    *("num_shared_experts", "router"),
)
# Further ones, with the value at which the digests of older runs do not have them.
_LATER_KEYS = {"qk_norm": False, "num_nextn_predict_layers": 0, "moe_layer_freq": 1}
# Keys that may change from one part of a run to the next without a note. Most change results by rounding at most; train.steps
# moves the decay of the learning rate too, but changing it is the usual reason to resume.
_FREE = re.compile(
    r"(parallel|schedule|log|checkpoint|debug|sample)\..*|data\.(source|cache)|optimizer\.(zero1|barrier)"
    r"|train\.(steps|devices?|threads|recompute|deterministic|reproducible|timeout|check_every|on_nan|on_spike|rollbacks|restarts)"
    r"|train\.(profile_(from|steps)|memory_snapshot)"
)


@dataclass(frozen=True)
class Start:
    """Starting point of a run.

    Attributes:
        path: the checkpoint; None: the run starts at the first step.
        folder: the folder of the run that continues; None: the run creates a new one.
        notes: messages for the log: checkpoints that were skipped, and changes since this one.
        optimizer: the section with the checkpoint's values of the automatic keys; None: the run starts at the first step.
    """

    path: Path | None = None
    folder: Path | None = None
    notes: tuple[str, ...] = ()
    optimizer: OptimizerSection | None = None


def digests(config: Config, data: str) -> dict[str, str]:
    """Return the digests that two runs must have in common for one to continue the other: `model` and `data`."""
    model = config.model.model_dump(include=set(_MODEL_KEYS), mode="json")
    model |= {key: value for key, default in _LATER_KEYS.items() if (value := getattr(config.model, key)) != default}
    if config.lora.r:
        model["lora"] = [config.lora.r, config.lora.target_modules]
    return {"model": hashlib.sha256(json.dumps(model, sort_keys=True).encode()).hexdigest()[:16], "data": data}


def find_start(
    config: Config,
    mine: Mapping[str, str],
    context: WorkerContext | None,
    run: Path | None = None,
    claim: RunClaim | None = None,
    automatic: Collection[str] = (),
) -> Start:
    """Find and verify the checkpoint that `checkpoint.resume` selects; collective over all workers.

    Args:
        mine: the run's `digests`.
        context: None: a dry run, which locks no folder and compares files by their sizes.
        run: folder of the attempt that this run restarts, whose newest checkpoint is taken whatever `checkpoint.resume` says;
            None: this is the first attempt. `checkpoint.dir`, where set, replaces the folder. Without either, the newest run
            below `log.dir` is searched.
        claim: locks the folder that the run will save into, if that exists already or is configured, before it is searched.
        automatic: keys of `[optimizer]` that nobody set, whose values the checkpoint keeps.

    Raises:
        CheckpointError: the selected checkpoint is absent or damaged, or all candidates are damaged.
        ConfigError: `checkpoint.dir` holds checkpoints that new ones would be mixed with, or another run saves there.
    """
    group = dist.group.WORLD if context is not None and context.world_size > 1 else None
    candidates = _look(config, mine, run, None) if context is None else _candidates(config, mine, context, run, claim)
    notes: list[str] = []
    for number, text in enumerate(candidates["paths"]):
        path = Path(text)
        if context is None:
            manifest, problem = verified(path, None, whole=False)
        else:
            with context.waiting("the other workers to compare a checkpoint's checksums", "load"):
                manifest, problem = verified(path, group, context.rank, context.world_size)
        if manifest is None:
            if candidates["exact"]:
                raise CheckpointError(problem)
            last = number + 1 == len(candidates["paths"])
            notes.append(f"{problem}{', and there is none before it' if last else '; taking the one before it'}")
            continue
        facts = RunFacts.read(path)
        earlier = facts.config.get("optimizer", {})
        if manifest.names("optimizer") and earlier.get("name", config.optimizer.name) != config.optimizer.name:
            raise CheckpointError(
                f'{path}: it holds the state of optimizer.name = "{earlier["name"]}", and the run\'s is "{config.optimizer.name}"'
            )
        rates = {key: earlier[key] for key in automatic if key in earlier}
        optimizer = validated(OptimizerSection, config.optimizer.model_dump() | rates, path)
        config = config.model_copy(update={"optimizer": optimizer})
        notes += _differences(config, mine, facts)
        return Start(path, _folder(config, candidates, facts), tuple(notes), optimizer)
    if notes:
        raise CheckpointError("\n".join(notes))
    return Start(folder=Path(candidates["folder"]) if candidates["folder"] else None)


def _candidates(
    config: Config, mine: Mapping[str, str], context: WorkerContext, run: Path | None, claim: RunClaim | None
) -> dict[str, Any]:
    """Return the first rank's candidates: `paths` to try in order, `exact` (no other may be taken), and the run's `folder`."""

    def look() -> dict[str, Any]:
        try:
            return _look(config, mine, run, claim or RunClaim()) if context.rank == 0 else {}
        except OSError as error:
            raise CheckpointError(f"{error.filename}: cannot be read: {error.strerror}") from None

    exchange = partial(from_every_worker, context, what="rank 0 to look for a checkpoint", phase="load")
    candidates: dict[str, Any] = agreed(exchange, look)[0]
    return candidates


def _look(config: Config, mine: Mapping[str, str], run: Path | None, claim: RunClaim | None) -> dict[str, Any]:
    """Apply `checkpoint.resume`: "auto" continues the newest run, as a restart does; a step or a directory begins a new one."""
    section = config.checkpoint
    resume = section.resume if run is None else "auto"
    configured = expanded(section.dir).absolute() if section.dir else None
    folder = configured or run or (newest_run(config, mine) if resume != "none" else None)
    target = folder if resume == "auto" else configured
    if target is not None and claim is not None:
        claim.lock(target, f'checkpoint.dir = "{section.dir}"' if section.dir else f'log.dir = "{config.log.dir}"')
        remove_leftovers(target)
    if resume == "auto":
        paths = [str(path) for _, path in complete(folder)] if folder is not None else []
        continued = run or (folder if paths and configured is None else None)
        return {"paths": paths, "exact": False, "folder": str(continued or "")}
    source = None
    if isinstance(resume, int):
        source = _of_step(config, folder, resume)
    elif resume != "none":
        source = expanded(resume).absolute()
        with contextlib.suppress(CheckpointError):  # refused with a reason where it is read
            source = newest_checkpoint(source)
    there = complete(configured) if configured is not None else []
    if there and there[0][1] != source:
        raise ConfigError(
            f'checkpoint.dir = "{configured}": it has checkpoints up to step {there[0][0]}, which new ones would be mixed with; '
            'use another folder, or checkpoint.resume = "auto" to continue from there'
        )
    return {"paths": [] if source is None else [str(source)], "exact": source is not None, "folder": ""}


def _of_step(config: Config, folder: Path | None, step: int) -> Path:
    """Return the checkpoint of a step in a folder. Raises CheckpointError if there is none."""
    option = f"checkpoint.resume = {step}"
    if folder is None:
        raise CheckpointError(f"{option}: no run in {config.log.dir} has this model and data")
    if not (step_path(folder, step) / MANIFEST).is_file():
        steps = [str(number) for number, _ in reversed(complete(folder))]
        raise CheckpointError(
            f"{option}: {folder} has no complete checkpoint of that step; it has {', '.join(steps) or 'none'}"
        )
    return step_path(folder, step)


def newest_run(config: Config, mine: Mapping[str, str]) -> Path | None:
    """Return the folder of the newest run below `log.dir` with the same model and data; None: there is none."""
    root = expanded(config.log.dir).absolute()
    runs = []
    for path in root.iterdir() if root.is_dir() else ():
        facts = facts_in(path / DIGESTS_FILE)
        if facts and all(facts.get(key) == value for key, value in mine.items()):
            runs.append((float(facts.get("started", 0.0)), path))
    return max(runs)[1] if runs else None


def _folder(config: Config, candidates: Mapping[str, Any], facts: RunFacts) -> Path | None:
    """Return the folder of the run that continues; None: a copy of its checkpoints, or another `log.dir`, gets a new one."""
    if candidates["exact"]:
        return None
    folder = Path(candidates["folder"] or facts.run)
    recorded = facts_in(folder / DIGESTS_FILE) if folder.is_absolute() else {}
    if not recorded or candidates["folder"]:
        return folder if recorded else None
    there = str(expanded(config.checkpoint.dir).absolute())
    same = folder.parent == expanded(config.log.dir).absolute() and recorded.get("checkpoints", there) == there
    return folder if same else None


def _differences(config: Config, mine: Mapping[str, str], facts: RunFacts) -> list[str]:
    """Return a message for each way in which data or settings differ from those of the checkpoint."""
    notes = []
    if facts.data not in (None, mine["data"]):
        notes.append("the data differs from the checkpoint's: its order restarts at the current batch number")
    dumped, before = config.model_dump(mode="json"), facts.config
    changed = [
        f"{section}.{key} {echo(before[section][key])} -> {value!r}"
        for section, table in dumped.items()
        for key, value in table.items()
        if section in before and key in before[section] and before[section][key] != value
        if not _FREE.fullmatch(f"{section}.{key}")
    ]
    if changed:
        notes.append(f"changed since the checkpoint: {', '.join(changed)}")
    if config.model.num_experts and (config.model.aux_loss_coef or config.model.capacity_factor):
        earlier, now = _sizes(before), _sizes(dumped)
        if earlier and earlier != now:
            notes.append(
                f"a micro-batch has {now} instead of {earlier} sequences, and load-balance losses and capacities of experts are "
                "computed per micro-batch: losses will differ by more than rounding"
            )
    return notes


def _sizes(config: Mapping[str, Any]) -> str:
    """Return the sizes of a replica's micro-batches, from a dumped configuration, in words; "" if it lacks a key."""
    try:
        parts = config["schedule"]["microbatches"]
        rows = config["train"]["global_batch_size"] // config["parallel"]["dp"]
        return " or ".join(map(str, sorted({rows // parts, -(-rows // parts)})))
    except (KeyError, TypeError, ZeroDivisionError):
        return ""


# -- saves -------------------------------------------------------------------------------------------------------------

_PROBE = ".pipeloom-probe"


class RunCheckpoints:
    """Saves the state of a run. Every rank creates one and makes the same calls.

    Args:
        folder: the folder of the checkpoints, which all ranks share.
        state: the run's state, saved with the tensors.
        facts: returns further values to store.
        path: the checkpoint that the run starts from, which need not be saved again.
        base: source of the frozen weights, which are not saved; None: all weights are saved.
        replicas: the check that replicas are equal, made before each save.
        claim: the run's claim to the folder, of which the first rank's is used; None: the folder is not claimed.

    Attributes:
        path: the newest checkpoint of the run; None: there is none yet.
    """

    def __init__(
        self,
        config: Config,
        pipeline: Pipeline,
        optimizer: Optimizer,
        folder: Path,
        state: RunState,
        facts: Callable[[], Mapping[str, Any]],
        report: Report,
        replicas: ReplicaCheck,
        *,
        path: Path | None = None,
        base: BaseWeights | None = None,
        claim: RunClaim | None = None,
    ) -> None:
        section = config.checkpoint
        self.path = path
        self._pipeline, self._optimizer, self._report, self._folder = pipeline, optimizer, report, folder
        self._state, self._facts = state, facts
        self._saved = (state.steps_done, state.batch) if path is not None else None
        self._pending: tuple[int, Path, Path | None] | None = None
        self._key = f'checkpoint.dir = "{section.dir}"' if section.dir else f'log.dir = "{config.log.dir}"'
        self._asynchronous = section.asynchronous
        how: dict[str, Any] = section.model_dump(include={"keep", "keep_every", "asynchronous"})
        self._saver = Saver(folder, pipeline, optimizer, base=base, **how)
        self._base, self._replicas, self._claim = base, replicas, claim

    def require_room(self) -> None:
        """Claim the folder; raise ConfigError, on every rank, if a checkpoint could not be written there.

        Call it before the first step; collective.
        """
        rank, probe = self._pipeline.mesh.everyone.index, self._folder / _PROBE
        exchange = partial(
            from_every_rank, self._pipeline, what="the other ranks to look at the folder of checkpoints", phase="save"
        )

        def begin() -> int:
            if rank == 0:
                self._begin(probe)
            return self._share()

        need = sum(agreed(exchange, begin))

        def look() -> None:
            if not probe.is_file():
                raise ConfigError(
                    f"{self._key}: rank {rank} does not see {self._folder}, where rank 0 writes; all hosts must share it"
                )
            if rank == 0 and (free := shutil.disk_usage(self._folder).free) < need:
                raise ConfigError(
                    f"{self._key}: a checkpoint takes about {need / 1e9:.3g} GB, and {free / 1e9:.3g} GB are free there"
                )

        try:
            agreed(exchange, look)
        finally:
            if rank == 0:
                probe.unlink(missing_ok=True)

    def _share(self) -> int:
        """Return the bytes of this rank's weights, of AdamW's two averages, and of fp32 copies of smaller weights."""
        size = 0
        for name, parameter in self._pipeline.named_parameters():
            if self._pipeline.owns(name):
                size += parameter.nbytes if parameter.requires_grad or self._base is None else 0
                size += parameter.numel() * (8 if parameter.dtype.itemsize >= 4 else 12) * parameter.requires_grad
        return size

    def _begin(self, probe: Path) -> None:
        """Create the folder, claim it, and write a file there, on the first rank. Raises ConfigError if that fails."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._claim is not None:
                self._claim.lock(self._folder, self._key)
            probe.write_text("")
        except OSError as error:
            raise ConfigError(f"{self._key}: cannot write there: {error.strerror or error}") from None

    def save(self) -> None:
        """Save the state, unless it is saved already. A checkpoint that cannot be written is reported, and training continues."""
        self._go_on_after(self.require)

    def require(self) -> None:
        """Save the state, unless it is saved already. Raises CheckpointError if it cannot be written.

        An asynchronous save fails in `finish` instead. Raises DistributedError, and saves nothing, if replicas differ.
        """
        step = self._state.steps_done
        now = step, self._state.batch
        if self._saved == now:
            return
        self._go_on_after(self.finish)
        if self._asynchronous:  # the state changes while it is written
            self._compare(step)
        facts = {**self._facts(), **self._state.facts()}
        path = self._saver.save(step, facts, None if self._asynchronous else partial(self._compare, step))
        self._pending = step, path, self.path
        self._saved, self.path = now, path
        if not self._asynchronous:
            self.finish()

    def _compare(self, step: int) -> None:
        self._replicas.before_save(step)
        self._saver.equal_until = self._replicas.equal_until

    def finish(self) -> None:
        """Wait for the checkpoint that is being written. Raises CheckpointError if it could not be written."""
        if self._pending is None:
            return
        (step, path, before), self._pending = self._pending, None
        if self._asynchronous:
            try:
                self._saver.wait()
            except CheckpointError:
                self.path, self._saved = before, None
                raise
        self._report.say(f"checkpoint of step {step}: {path}")
        self._report.record("checkpoint", step=step, path=str(path), stalled=self._saver.stalled)

    def back(self) -> Loaded:
        """Load the tensors of the newest checkpoint. Raises CheckpointError if there is none, or if it cannot be loaded."""
        self.finish()
        if self.path is None:
            raise CheckpointError("there is no checkpoint to roll back to")
        loaded = load(self.path, self._pipeline, self._optimizer, self._base)
        self._saved = loaded.step, RunFacts.of(loaded.extra, loaded.path).batch_after(loaded.step)
        return loaded

    def _go_on_after(self, save: Callable[[], None]) -> None:
        try:
            save()
        except CheckpointError as error:
            self._report.say(f"{error}; training continues, and the newest checkpoint is {self.path or 'none'}")
