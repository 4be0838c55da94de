"""Saving: every rank writes its share of the state into one file, and the first rank publishes the checkpoint.

The ranks agree on a plan of which rank writes which boxes, and keep it until their boxes change. A box that several ranks hold
is written by the one with the least to write. The ranks gather how their writing ended, through no file: the file system may
be what failed. A thread that writes gathers over the watchdogs' connections, so it needs no process group.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeloom.errors import CheckpointError, UsageError
from pipeloom.limits import of_annotated_types, require_whole
from pipeloom.runtime import Pipeline
from pipeloom.train.checkpoint.boxes import Box, tiling_problem
from pipeloom.train.checkpoint.folder import (
    DTYPE_NAMES,
    locked,
    partial_path,
    prune,
    publish,
    remove_leftovers,
    step_path,
    write_bytes,
    write_tensors,
)
from pipeloom.train.checkpoint.manifest import (
    EXTRA,
    MANIFEST,
    BaseWeights,
    Manifest,
    StoredBox,
    StoredFile,
    TensorEntry,
    read_manifest,
    to_bytes,
)
from pipeloom.train.checkpoint.state import AnyOptimizer, Number, Part, model_parts, optimizer_parts
from pipeloom.train.collect import from_every_rank

_PARTS = "the other ranks to write their parts of a checkpoint"


@dataclass(frozen=True)
class _Plan:
    """Division of the boxes among the ranks that write them.

    Attributes:
        digest: digest of this rank's parts (keys, dtypes, shapes and boxes) for which the plan was made.
        mine: (position among this rank's parts, name in its file) of each box that it writes.
        entries: key -> entry of the manifest, for the tensors of all ranks.
    """

    digest: str
    mine: tuple[tuple[int, str], ...]
    entries: Mapping[str, TensorEntry]


class Saver:
    """Saves checkpoints of one run into a folder; every rank creates one with the same arguments, and makes the same calls.

    Args:
        folder: a folder that all ranks share; each checkpoint is a directory `step-000010` in it.
        pipeline: its weights and buffers are saved.
        optimizer: the optimizer of its parameters: one of torch's, or the trainer's; None: only weights are saved.
        keep: number of the newest checkpoints to keep; 0: all.
        keep_every: also keep the checkpoints of every n-th step; 0: none.
        asynchronous: `save` returns when the state has been copied; a thread writes the copy.
        base: source of the frozen weights, which are not saved; the manifest names it. None: all weights are saved.

    Raises UsageError if it is asynchronous, and the ranks of the pipeline have no watchdogs.

    Attributes:
        equal_until: for the manifest of the next checkpoint: the last step after which replicas were equal; None: not known.
        stalled: seconds for which the last `save` blocked its caller.
        written: bytes of this rank's last file.
        writer_cpu: CPU seconds that writing it took.
    """

    @of_annotated_types
    def __init__(
        self,
        folder: str | Path,
        pipeline: Pipeline,
        optimizer: AnyOptimizer | None = None,
        *,
        keep: int = 0,
        keep_every: int = 0,
        asynchronous: bool = False,
        base: BaseWeights | None = None,
    ) -> None:
        require_whole("keep", keep, 0)
        require_whole("keep_every", keep_every, 0)
        self.folder = Path(folder)
        self.base = base
        self.equal_until: int | None = None
        self.stalled = 0.0
        self.written = 0
        self.writer_cpu = 0.0
        self._pipeline, self._optimizer = pipeline, optimizer
        self._keep, self._keep_every = keep, keep_every
        self._asynchronous = asynchronous
        if asynchronous and pipeline._distributed and pipeline._watchdog is None:
            raise UsageError("asynchronous is True; without RuntimeOptions(monitor=True) it must be False")
        self._rank, self._world = pipeline.mesh.everyone.index, pipeline.mesh.everyone.size
        self._plan: _Plan | None = None
        self._numbers: dict[str, Number] = {}
        self._copies: list[Tensor] = []
        self._thread: threading.Thread | None = None
        self._written = threading.Event()  # set while the thread waits for other ranks
        self._problem = ""  # why the last save failed, as far as this rank has seen; "" if it has not
        self._path: Path | None = None
        self._held: int | None = None  # the folder, locked, on the first rank while it saves

    def save(
        self, step: int, extra: Mapping[str, Any] | None = None, meanwhile: Callable[[], None] | None = None
    ) -> Path:
        """Save the state after `step` steps; collective.

        Args:
            extra: a JSON object to store with it; the first rank's is stored.
            meanwhile: called on every rank while the file system writes, before the checkpoint is complete; not if
                asynchronous. What it raises on every rank is raised here, and nothing is saved.

        Returns:
            the checkpoint's directory: complete, or (asynchronous) complete when `wait` returns.

        Raises:
            CheckpointError: this checkpoint, or the asynchronous one before it, could not be written; on every rank. If the model
                or optimizer of a rank fails to return its state, that rank raises its own error instead.
            UsageError: `extra` cannot be written as JSON, `step` is negative, or the boxes of the ranks do not cover a tensor.
        """
        begun = time.perf_counter()
        content = _content(extra)
        if type(step) is not int or step < 0:
            raise UsageError(f"step is {step!r}; it must be a whole number of at least 0")
        self._join()
        final, partial = step_path(self.folder, step), partial_path(self.folder, step)
        prepared = self._prepare(partial) if self._rank == 0 else ""
        parts: list[Part] = []
        numbers: dict[str, Number] = {}
        failure: Exception | None = None
        try:
            parts = model_parts(self._pipeline, self.base is not None)
            if self._optimizer is not None:
                more, numbers = optimizer_parts(self._pipeline, self._optimizer)
                parts += more
        except Exception as error:  # reported in `_agree`, where the other ranks wait for this one
            failure = error
            prepared = prepared or f"rank {self._rank}: {' '.join(traceback.format_exception_only(error)).strip()}"
        try:
            self._agree(parts, numbers, prepared, partial)
            assert self._plan is not None
            tensors = self._snapshot([parts[at].tensor for at, _ in self._plan.mine])
            named = {name: tensor for (_, name), tensor in zip(self._plan.mine, tensors, strict=True)}
            trains = {f"model.{name}" for name, p in self._pipeline.named_parameters() if p.requires_grad}
            trained = frozenset(name for at, name in self._plan.mine if parts[at].key in trains)
            stored = ("model", *["optimizer"] * (self._optimizer is not None), *["extra"] * (content is not None))
            entries, writer = self._plan.entries, _writer(self._world)
            manifest = Manifest(step, stored, entries, self._numbers, {}, writer, self.base)
            job = _Job(self, final, partial, named, trained, manifest, content)
            if self._asynchronous:
                self._written.clear()
                self._thread = threading.Thread(target=job.run, name="pipeloom-checkpoint", daemon=True)
                self._thread.start()
            else:
                job.run(meanwhile)
        except BaseException:
            if self._held is not None:
                shutil.rmtree(partial, ignore_errors=True)
            self.release()
            if failure is not None:
                raise failure from None
            raise
        if not self._asynchronous:
            self._raise_together()
        self._path = final
        self.stalled = time.perf_counter() - begun
        return final

    def wait(self) -> Path | None:
        """Wait until the last checkpoint is complete, and return its directory (None: none was saved); collective.

        Raises CheckpointError, on every rank, if it could not be written.
        """
        self._join()
        self._raise_together()
        return self._path

    # -- together --------------------------------------------------------------------------------------------------------

    def _exchange(self, value: Any, what: str) -> list[Any]:
        return from_every_rank(self._pipeline, value, what, "save")

    def _join(self) -> None:
        if self._thread is not None:
            self._written.wait()  # until then the watchdogs must not see a rank that waits for others
            with self._pipeline.waiting(_PARTS, "save"):
                self._thread.join()
            self._thread = None

    def _gather(self, outcome: Any, key: str) -> list[Any]:
        """Return the outcomes of all ranks; in a thread, over the watchdogs' connections."""
        watchdog = self._pipeline._watchdog if self._asynchronous else None
        return self._exchange(outcome, _PARTS) if watchdog is None else watchdog.gather(key, outcome)

    def _raise_together(self) -> None:
        problems = self._exchange(self._problem, _PARTS)
        self._problem = ""
        _raise_first(problems)

    def _prepare(self, partial: Path) -> str:
        """Create an empty directory to write into. Return the reason if that fails; "" otherwise."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._held = os.open(self.folder, os.O_RDONLY | os.O_CLOEXEC)
            if not locked(self._held):  # without the lock, each run would remove what the other is writing
                self.release()
                return f"{self.folder}: another run is saving there; give each run its own folder"
            remove_leftovers(self.folder)
            partial.mkdir(mode=0o700)
        except OSError as error:
            return f"{partial}: cannot be created: {error.strerror or error}"
        return ""

    def release(self) -> None:
        """Unlock the folder, so that other runs can save into it."""
        held, self._held = self._held, None
        if held is not None:
            os.close(held)

    def _agree(self, parts: Sequence[Part], numbers: Mapping[str, Number], prepared: str, partial: Path) -> None:
        """Make a plan, or keep the last one if no rank's boxes have changed; collective."""
        mine = [[p.key, DTYPE_NAMES[p.tensor.dtype], p.shape, p.box.offset, p.box.shape, p.first] for p in parts]
        digest = hashlib.sha256(json.dumps(mine).encode()).hexdigest()
        fits = self._plan is not None and self._plan.digest == digest
        answers = self._exchange(
            [fits, self._problem or prepared, dict(numbers)], "the other ranks to begin a checkpoint"
        )
        self._problem = ""
        _raise_first([problem for _, problem, _ in answers])
        self._numbers = {key: value for _, _, given in answers for key, value in given.items()}
        if not all(fits for fits, *_ in answers):
            everyone = self._exchange([partial.is_dir(), mine], "the other ranks' parts of a checkpoint")
            _raise_first(
                [
                    ""
                    if sees
                    else f"{self.folder}: rank {rank} does not see what rank 0 writes there; all must share it"
                    for rank, (sees, _) in enumerate(everyone)
                ]
            )
            self._plan = _plan([parts for _, parts in everyone], self._rank, digest)

    @torch.no_grad()
    def _snapshot(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return contiguous tensors on the CPU. For a writing thread they are copies, in memory that later saves reuse."""
        if not self._asynchronous:
            return [tensor.detach().cpu().contiguous() for tensor in tensors]
        if [(t.shape, t.dtype) for t in tensors] != [(c.shape, c.dtype) for c in self._copies]:
            self._copies = []  # freed before the new ones are made
            self._copies = [torch.empty(t.shape, dtype=t.dtype, device="cpu") for t in tensors]
        for copy, tensor in zip(self._copies, tensors, strict=True):
            copy.copy_(tensor)
        return self._copies


@dataclass
class _Job:
    """The writing of one checkpoint on one rank.

    Attributes:
        trained: names of those tensors that are trained weights, all values of which must be finite.
        manifest: the checkpoint's, without files.
        stored: size and digest of this rank's file, once it is written; None: there is none.
    """

    saver: Saver
    final: Path
    partial: Path
    tensors: Mapping[str, Tensor]
    trained: frozenset[str]
    manifest: Manifest
    extra: bytes | None
    stored: dict[str, Any] | None = None

    def run(self, meanwhile: Callable[[], None] | None = None) -> None:
        """Write this rank's file, and publish on the first rank once all are written. A failure goes to `Saver._problem`."""
        saver, begun = self.saver, time.thread_time()
        once = None if meanwhile is None else cache(meanwhile)  # called with the file, or after it
        try:
            problem = self._failure_of(lambda: self._write(once), self.partial / file_name(saver._rank))
        finally:
            saver._written.set()
        if once is not None:
            once()  # collective, so also on a rank that writes nothing, or could not
        saver.writer_cpu = time.thread_time() - begun
        outcomes = saver._gather([problem, self.stored], str(self.final))
        if saver._rank == 0:
            problem = self._failure_of(lambda: self._publish(outcomes), self.partial)
            if problem:
                shutil.rmtree(self.partial, ignore_errors=True)
        saver.release()
        saver._problem = problem

    def _failure_of(self, write: Callable[[], None], path: Path) -> str:
        """Call `write`, and return a message about the error of the file system at `path` that ended it; "" if none did.

        In a thread any other error too: the other ranks would wait for a thread that has ended.
        """
        try:
            write()
        except CheckpointError as error:
            return str(error)
        except OSError as error:
            return f"{error.filename or path}: cannot be written: {error.strerror or error}"
        except Exception as error:
            if not self.saver._asynchronous:
                raise
            return f"{path}: cannot be written: {type(error).__name__}: {error}"
        return ""

    def _write(self, meanwhile: Callable[[], None] | None) -> None:
        """Write this rank's file. Raise CheckpointError if a trained weight in it has NaN or infinite values."""
        for name in sorted(self.trained):
            if not _is_finite(self.tensors[name]):
                weight = name.partition("@")[0].removeprefix("model.")
                raise CheckpointError(f"{weight} has values that are not finite after step {self.manifest.step}")
        if self.tensors:
            self.stored = asdict(write_tensors(self.partial / file_name(self.saver._rank), self.tensors, meanwhile))
            self.saver.written = self.stored["size"]

    def _publish(self, outcomes: Sequence[Any]) -> None:
        if problem := next((problem for problem, _ in outcomes if problem), ""):
            raise CheckpointError(problem)
        files = {file_name(rank): StoredFile(**stored) for rank, (_, stored) in enumerate(outcomes) if stored}
        for name, stored in files.items():
            size = os.stat(self.partial / name).st_size
            if size != stored.size:
                raise CheckpointError(f"{self.partial / name}: expected {stored.size:,} bytes, found {size:,}")
        if self.extra is not None:
            files[EXTRA] = write_bytes(self.partial / EXTRA, self.extra)
        manifest = replace(self.manifest, files=files, equal_until=self.saver.equal_until)
        write_bytes(self.partial / MANIFEST, to_bytes(manifest))
        publish(self.partial, self.final)
        prune(self.saver.folder, self.manifest.step, self.saver._keep, self.saver._keep_every)


def save(
    folder: str | Path,
    step: int,
    pipeline: Pipeline,
    optimizer: AnyOptimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    keep: int = 0,
    keep_every: int = 0,
) -> Path:
    """Save one checkpoint, and return its directory once it is on disk; collective. Arguments as for `Saver`."""
    return Saver(folder, pipeline, optimizer, keep=keep, keep_every=keep_every).save(step, extra)


def file_name(rank: int) -> str:
    """Return the name of the file with a rank's share."""
    return f"rank-{rank:05d}.safetensors"


def _content(extra: Mapping[str, Any] | None) -> bytes | None:
    """Return `extra` as JSON. Raises UsageError if JSON cannot hold it."""
    if extra is None:
        return None
    try:
        return json.dumps(dict(extra), allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(
            f"extra is {extra!r:.200}; it must be a dict that JSON can hold, of finite numbers, strings, lists and dicts: {error}"
        ) from None


def _is_finite(values: Tensor) -> bool:
    """Return whether no value is NaN or infinite; fast if none is."""
    if not values.is_floating_point() or values.dtype.itemsize < 2:
        return True
    # A sum in fp64 takes a third of the time of `isfinite` and no memory. Only sums of fp64 values can overflow.
    return math.isfinite(values.sum(dtype=torch.float64).item()) or bool(values.isfinite().all())


def _raise_first(problems: Sequence[str]) -> None:
    """Raise CheckpointError with the first of all ranks' problems, if there is one: the same on every rank."""
    reasons = list(dict.fromkeys(problem for problem in problems if problem))
    if reasons:
        raise CheckpointError(f"the checkpoint was not written: {reasons[0]}")


def _plan(everyone: Sequence[Sequence[Sequence[Any]]], rank: int, digest: str) -> _Plan:
    """Return the plan for the parts of every rank, each given as [key, dtype, shape, offset, box shape, first].

    Raises UsageError for a key that two ranks describe differently, and for boxes that do not cover a tensor exactly once.
    """
    positions: list[dict[tuple[str, Box], int]] = [{} for _ in everyone]
    holders: dict[tuple[str, Box], list[int]] = {}
    whole: dict[str, tuple[str, tuple[int, ...]]] = {}
    first_only: set[str] = set()
    for number, parts in enumerate(everyone):
        for at, (key, dtype, shape, offset, size, first) in enumerate(parts):
            box = Box(tuple(offset), tuple(size))
            if whole.setdefault(key, (dtype, tuple(shape))) != (dtype, tuple(shape)):
                raise UsageError(f"{key} is {whole[key]} on one rank and {(dtype, tuple(shape))} on rank {number}")
            if (key, box) not in positions[number]:
                positions[number][key, box] = at
                holders.setdefault((key, box), []).append(number)
            if first:
                first_only.add(key)
    load = [0] * len(everyone)
    entries: dict[str, list[StoredBox]] = {}
    mine: list[tuple[int, str]] = []
    for (key, box), ranks in holders.items():
        writer = ranks[0] if key in first_only else min(ranks, key=lambda number: load[number])
        load[writer] += box.elements
        name = key if box.shape == whole[key][1] else f"{key}@{','.join(map(str, box.offset))}"
        entries.setdefault(key, []).append(StoredBox(file_name(writer), name, *box))
        if writer == rank:
            mine.append((positions[rank][key, box], name))
    for key, boxes in entries.items():
        problem = tiling_problem(whole[key][1], [stored.box for stored in boxes])
        if problem:
            raise UsageError(f"{key} cannot be saved: {problem}")
    return _Plan(
        digest,
        tuple(mine),
        {key: TensorEntry(*whole[key], tuple(boxes)) for key, boxes in sorted(entries.items())},
    )


def _writer(ranks: int) -> dict[str, Any]:
    """Return the manifest's entry about the writing program, for people."""
    from pipeloom import __version__  # which is not set yet where `pipeloom.verify` imports this module

    time_of_writing = datetime.now().astimezone().isoformat(timespec="seconds")
    return {"pipeloom": __version__, "ranks": ranks, "time": time_of_writing}


# -- from one process --------------------------------------------------------------------------------------------------


def write_whole(folder: Path, step: int, groups: Iterable[Mapping[str, Tensor]], extra: Mapping[str, Any]) -> Path:
    """Write a checkpoint of weights from one process, one file for each of `groups`, of which one at a time is in memory.

    Args:
        groups: name in the checkpoint -> whole tensor, on the CPU.
        extra: values, as JSON can hold them, that a run that starts from the checkpoint needs besides the tensors.

    Returns:
        the checkpoint's directory.

    Raises:
        CheckpointError: it cannot be written, or another process is writing it.
    """
    keyed = ({f"model.{name}": tensor for name, tensor in group.items()} for group in groups)
    return write_alone(folder, Manifest(step, ("model", "extra"), {}, {}, {}, _writer(1)), keyed, extra)


def write_alone(folder: Path, manifest: Manifest, groups: Iterable[Mapping[str, Tensor]], extra: Any) -> Path:
    """Write a checkpoint with all but the tensors and files of `manifest`; `groups` have their keys. See `write_whole`."""
    final, partial = step_path(folder, manifest.step), partial_path(folder, manifest.step)
    entries: dict[str, TensorEntry] = {}
    files: dict[str, StoredFile] = {}
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial.mkdir(mode=0o700)
    except FileExistsError:  # it may be another process's, so it must stay
        raise CheckpointError(
            f"{partial}: it exists, so another process is writing this checkpoint, or was killed while it did; remove the "
            "directory if none is"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{partial}: cannot be created: {error.strerror or error}") from error
    try:
        for number, group in enumerate(groups):
            file = file_name(number)
            if group:
                files[file] = write_tensors(partial / file, {key: tensor.contiguous() for key, tensor in group.items()})
            for key, tensor in group.items():
                box = Box.whole(tensor.shape)
                entries[key] = TensorEntry(DTYPE_NAMES[tensor.dtype], box.shape, (StoredBox(file, key, *box),))
        if "extra" in manifest.stored:
            files[EXTRA] = write_bytes(partial / EXTRA, json.dumps(extra, allow_nan=False).encode())
        write_bytes(partial / MANIFEST, to_bytes(replace(manifest, tensors=dict(sorted(entries.items())), files=files)))
        read_manifest(partial)  # refuses numbers and names from elsewhere that no checkpoint can have
        publish(partial, final)
    except OSError as error:
        raise CheckpointError(f"{partial}: cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return final
