"""The checkpoints of a training run: when they are due, what they hold, and what is reported about them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pipeloom.config import Config
from pipeloom.errors import CheckpointError, ConfigError
from pipeloom.parallel.exchange import all_gather_json
from pipeloom.runtime import Pipeline
from pipeloom.train.checkpoint.facts import RunFacts
from pipeloom.train.checkpoint.load import Loaded, load
from pipeloom.train.checkpoint.manifest import BaseWeights
from pipeloom.train.checkpoint.save import Saver
from pipeloom.train.lock import TAKEN, RunClaim
from pipeloom.train.optimizer import Optimizer
from pipeloom.train.replica_check import ReplicaCheck
from pipeloom.train.report.report import Report
from pipeloom.train.restarts import restarted_run

_PROBE = ".pipeloom-probe"


class RunCheckpoints:
    """Saves the state of a run. Every rank creates one and makes the same calls.

    Args:
        folder: the folder of the checkpoints, which all ranks share.
        facts: returns the values to store with the tensors.
        path: the checkpoint that the run starts from.
        saved: its step and batch number, which need not be saved again.
        base: source of the frozen weights, which are not saved; None: all weights are saved.
        replicas: the check that replicas are equal, made before each save; None: they are not compared.
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
        facts: Callable[[], Mapping[str, Any]],
        report: Report | None,
        path: Path | None = None,
        saved: tuple[int, int] | None = None,
        base: BaseWeights | None = None,
        replicas: ReplicaCheck | None = None,
        claim: RunClaim | None = None,
    ) -> None:
        section = config.checkpoint
        self.path = path
        self._every = section.every
        self._continues = section.resume != "none" or restarted_run() is not None
        self._pipeline, self._optimizer, self._report = pipeline, optimizer, report
        self._facts, self._saved = facts, saved
        self._folder = folder
        self._key = f'checkpoint.dir = "{section.dir}"' if section.dir else f'log.dir = "{config.log.dir}"'
        self._asynchronous = section.asynchronous
        self._saver = Saver(
            folder,
            pipeline,
            optimizer,
            keep=section.keep,
            keep_every=section.keep_every,
            asynchronous=section.asynchronous,
            base=base,
            claim=claim,
        )
        self._base, self._replicas, self._claim = base, replicas, claim

    def require_room(self) -> None:
        """Claim the folder; raise ConfigError, on every rank, if a checkpoint could not be written there.

        Call it before the first step; collective.
        """
        pipeline, first = self._pipeline, self._pipeline.mesh.everyone.index == 0
        weights = sum(
            p.nbytes
            for name, p in pipeline.named_parameters()
            if pipeline.owns(name) and (p.requires_grad or self._base is None)
        )
        states = sum(
            p.numel() * (8 if p.dtype.itemsize >= 4 else 12)
            for name, p in pipeline.named_parameters()
            if pipeline.owns(name) and p.requires_grad
        )
        problem, probe = "", self._folder / _PROBE
        if first:
            try:
                self._begin()
                probe.write_text("")
            except ConfigError as error:
                problem = str(error)
            except OSError as error:
                problem = f"{self._key}: cannot write there: {error.strerror or error}"
        sizes = self._exchange([weights + states, problem])
        problem = problem or ("" if sizes[0][1] or probe.is_file() else self._unseen())
        need = sum(size for size, _ in sizes)
        if first and not problem and (free := shutil.disk_usage(self._folder).free) < need:
            problem = (
                f"{self._key}: a checkpoint takes about {need / 1e9:.3g} GB, and {free / 1e9:.3g} GB are free there"
            )
        problems = [text for text in self._exchange(problem) if text]
        if first:
            probe.unlink(missing_ok=True)
        if problems:
            raise ConfigError(problems[0])

    def _begin(self) -> None:
        """Create the folder and claim it, on the first rank. Raises ConfigError or OSError if that fails."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._claim is None:
            return
        self._claim.lock(self._folder, self._key)
        self._claim.begin(self._continues)
        if not self._claim.locks:
            self._say(
                f"{self._folder}: the file system has no locks; if another run begins to save there, this one notices it only "
                "at its next checkpoint, and ends"
            )

    def due(self, step: int) -> bool:
        """Return whether a checkpoint is due after `step` steps."""
        return self._every > 0 and step % self._every == 0

    def save(self, step: int, batch: int) -> None:
        """Save the state, unless it is saved already. A checkpoint that cannot be written is reported, and training continues.

        Raises CheckpointError if another run has taken the folder.
        """
        try:
            self.require(step, batch)
        except CheckpointError as error:
            if TAKEN in str(error):
                raise
            self._say(f"{error}; training continues, and the newest checkpoint is {self.path or 'none'}")

    def require(self, step: int, batch: int) -> None:
        """Save the state, unless it is saved already. Raises CheckpointError if it cannot be written.

        An asynchronous save fails in `finish` instead. Raises DistributedError, and saves nothing, if replicas differ.
        """
        if self._saved == (step, batch):
            return
        self._settle()
        if self._replicas is not None:
            self._replicas.before_save(step)
            self._saver.equal_until = self._replicas.equal_until
        path = self._saver.save(step, self._facts())
        self._saved, before, self.path = (step, batch), self.path, path
        if not self._asynchronous:
            self._tell(step, path)
            return
        self._pending = step, path, before

    _pending: tuple[int, Path, Path | None] | None = None

    def finish(self) -> None:
        """Wait for the checkpoint that is being written. Raises CheckpointError if it could not be written."""
        if self._pending is None:
            return
        (step, path, before), self._pending = self._pending, None
        try:
            self._saver.wait()
        except CheckpointError:
            self.path, self._saved = before, None
            raise
        self._tell(step, path)

    def back(self) -> Loaded:
        """Load the state of the newest checkpoint. Raises CheckpointError if there is none, or if it cannot be loaded."""
        self.finish()
        if self.path is None:
            raise CheckpointError("there is no checkpoint to roll back to")
        loaded = load(self.path, self._pipeline, self._optimizer, self._base)
        self._saved = loaded.step, RunFacts.of(loaded.extra, loaded.path).batch_after(loaded.step)
        return loaded

    def _settle(self) -> None:
        try:
            self.finish()
        except CheckpointError as error:
            self._say(f"{error}; training continues, and the newest checkpoint is {self.path or 'none'}")

    def _tell(self, step: int, path: Path) -> None:
        self._say(f"checkpoint of step {step}: {path}")
        if self._report is not None:
            self._report.record("checkpoint", step=step, path=str(path), stalled=self._saver.stalled)

    def _say(self, text: str) -> None:
        if self._report is not None:
            self._report.say(text)

    def _unseen(self) -> str:
        rank = self._pipeline.mesh.everyone.index
        return f"{self._key}: rank {rank} does not see {self._folder}, where rank 0 writes; all hosts must share it"

    def _exchange(self, value: Any) -> list[Any]:
        if self._pipeline.mesh.everyone.size == 1:
            return [value]
        with self._pipeline.waiting("the other ranks to look at the folder of checkpoints", "save"):
            return all_gather_json(value, self._pipeline.run_control)
