"""Loading: the checksum of every file is verified before any is used, then each rank reads the regions that it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeloom.errors import CheckpointError, ConfigError, UsageError
from pipeloom.limits import read_json
from pipeloom.models.stored_tensors import StoredTensors
from pipeloom.parallel.exchange import all_gather_json
from pipeloom.runtime import Pipeline
from pipeloom.train.checkpoint.boxes import Box
from pipeloom.train.checkpoint.folder import DTYPE_NAMES, DTYPES_BY_NAME, newest_checkpoint, verify
from pipeloom.train.checkpoint.manifest import EXTRA, BaseWeights, Manifest, StoredBox, read_manifest
from pipeloom.train.checkpoint.state import (
    AnyOptimizer,
    Number,
    load_model,
    load_optimizer,
    require_shapes,
    required_names,
)
from pipeloom.train.collect import from_every_rank

_EXTRA_BYTES = 2**28
_MOST_NESTED = 1000  # values of a user's own program may be nested deeper than a configuration


@dataclass(frozen=True)
class Loaded:
    """Content of a checkpoint apart from its tensors.

    Attributes:
        step: the number of completed steps.
        extra: the value passed to `save`, or None.
        path: the checkpoint's directory.
    """

    step: int
    extra: Any
    path: Path


class Reader:
    """A checkpoint whose files have been verified."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.directory, self.manifest = directory, manifest
        self.tensors: dict[str, tuple[int, ...]] = {key: entry.shape for key, entry in manifest.tensors.items()}
        self._files: dict[str, StoredTensors] = {}

    @property
    def numbers(self) -> Mapping[str, Number]:
        return self.manifest.numbers

    def region(self, key: str, box: Box) -> Tensor:
        """Read `box` of the tensor `key`: on the CPU, in the stored dtype. Raises CheckpointError if it cannot be read."""
        entry = self.manifest.tensors[key]
        pieces = [(stored, common) for stored in entry.boxes if (common := stored.box.intersection(box)) is not None]
        if len(pieces) == 1 and pieces[0][1] == box:
            return self._read(pieces[0][0], key, box)
        whole = torch.empty(box.shape, dtype=DTYPES_BY_NAME[entry.dtype])
        for stored, common in pieces:
            whole[common.slices_in(box)] = self._read(stored, key, common)
        return whole

    def _read(self, stored: StoredBox, key: str, wanted: Box) -> Tensor:
        path, name = self.directory / stored.file, stored.name
        try:
            if stored.file not in self._files:
                self._files[stored.file] = StoredTensors([path], DTYPES_BY_NAME)
            entry = self._files[stored.file].entries.get(name)
            if entry is None:
                raise CheckpointError(f"{path}: it has no {name!r}")
            expected, present = (
                (tuple(stored.shape), self.manifest.tensors[key].dtype),
                (entry.shape, DTYPE_NAMES[entry.dtype]),
            )
            if present != expected:
                raise CheckpointError(f"{path}: {name!r}: expected {expected}, found {present}")
            values = torch.empty(wanted.shape, dtype=entry.dtype)
            self._files[stored.file].read_into(name, values, wanted.moved([-n for n in stored.offset]).offset)
            return values
        except (ConfigError, OSError) as error:
            raise CheckpointError(f"{path}: {name!r} cannot be read: {str(error)[:200]}") from None

    def extra(self) -> Any:
        """Return the value passed to `save` as `extra`, or None."""
        return read_extra(self.directory) if EXTRA in self.manifest.files else None


def read_extra(directory: Path) -> Any:
    """Return the value passed to `save` as `extra`, or None; for a checkpoint that has been verified.

    Raises CheckpointError if it is not JSON.
    """
    path = directory / EXTRA
    try:
        return read_json(path, _EXTRA_BYTES, "extra.json", _MOST_NESTED)
    except FileNotFoundError:
        return None
    except (OSError, UsageError) as error:
        raise CheckpointError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def verified(directory: Path, group: Any, index: int = 0, count: int = 1) -> tuple[Manifest | None, str]:
    """Return (manifest, "") for a checkpoint whose files all match their checksums; (None, the reason) for any other.

    Collective over `group`, of whose `count` processes this is number `index`: each verifies some of the files. The result
    is the same on all.
    """
    manifest, problem = None, ""
    try:
        manifest = read_manifest(directory)
        sizes = sorted(manifest.files.items(), key=lambda item: (-item[1].size, item[0]))
        for name, stored in sizes[index::count]:
            problem = problem or verify(directory, name, stored)
    except CheckpointError as error:
        problem = str(error)
    facts = [problem, "" if manifest is None else _identity(manifest)]
    answers = [facts] if group is None else all_gather_json(facts, group)
    problems = [defect for defect, _ in answers if defect]
    if not problems and len({identity for _, identity in answers}) > 1:
        problems = [f"{directory}: the ranks see different checkpoints there; it must be a folder that they share"]
    return (None, problems[0]) if problems else (manifest, "")


def _identity(manifest: Manifest) -> str:
    return " ".join(f"{name} {stored.sha256}" for name, stored in sorted(manifest.files.items()))


def load(
    path: str | Path, pipeline: Pipeline, optimizer: AnyOptimizer | None = None, base: BaseWeights | None = None
) -> Loaded:
    """Load the state of a checkpoint into a pipeline and its optimizer; collective. Any layout loads a checkpoint of any other.

    Sets `pipeline.next_step` to the checkpoint's step.

    Args:
        path: a checkpoint, or a folder of checkpoints, of which the newest complete one is loaded.
        optimizer: the optimizer of its parameters; None: only weights are loaded. If the checkpoint holds weights only, the
            optimizer's state is left as it is.
        base: source of the pipeline's frozen weights, for a checkpoint without them.

    Returns:
        the checkpoint's step, `extra` and directory.

    Raises:
        CheckpointError: no checkpoint; a file that is absent or damaged; weights or state that are incomplete, or of another
            shape; adapters of other weights than `base`. On every rank, with the same message.
    """
    everyone = pipeline.mesh.everyone
    group = pipeline.run_control if everyone.size > 1 else None
    with pipeline.waiting("the other ranks to compare a checkpoint's checksums", "load"):
        directory = agreed_checkpoint(Path(path), group)
        manifest, problem = verified(directory, group, everyone.index, everyone.size)
    if manifest is None:
        raise CheckpointError(problem)
    _require_base(directory, manifest.base, base)
    adapters = manifest.base is not None
    reader = Reader(directory, manifest)
    _require(reader, pipeline, adapters)
    extra = reader.extra()

    def put() -> None:
        load_model(reader, pipeline, adapters)
        if optimizer is not None:
            if "optimizer" in reader.manifest.stored:
                load_optimizer(reader, pipeline, optimizer)
            elif not isinstance(optimizer, torch.optim.Optimizer):
                optimizer.read_parameters()

    on_every_rank(pipeline, put)
    loaded = Loaded(manifest.step, extra, directory)
    pipeline.next_step = manifest.step
    return loaded


def agreed_checkpoint(path: Path, group: Any) -> Path:
    """Return the checkpoint that `path` refers to, as the first rank sees it; collective."""
    try:
        checkpoint = newest_checkpoint(path)
    except CheckpointError:
        checkpoint = path  # refused with a reason where it is read
    answers = [str(checkpoint)] if group is None else all_gather_json(str(checkpoint), group)
    return Path(answers[0])


def _require_base(directory: Path, stored: BaseWeights | None, given: BaseWeights | None) -> None:
    """Raise CheckpointError for adapters if the pipeline does not have the weights that they were trained with."""
    if stored is None:
        return
    if given is None:
        raise CheckpointError(
            f"{directory}: it holds adapters only, of the model in {stored.path}: train or generate with that model, or write "
            f"both as one: pipeloom export --merge {directory} OUT_DIR"
        )
    if given.digest != stored.digest:
        raise CheckpointError(
            f"{directory}: its adapters were trained with the weights in {stored.path} (SHA-256 {stored.digest[:16]}…), and "
            f"those in {given.path} differ ({given.digest[:16]}…)"
        )


def _require(reader: Reader, pipeline: Pipeline, adapters: bool) -> None:
    """Raise CheckpointError, on every rank, if the checkpoint's model is not that of the pipeline."""
    needed = required_names(pipeline, adapters)
    on_every_rank(pipeline, lambda: require_shapes(reader, needed))
    everyone = from_every_rank(pipeline, list(needed), "the other ranks to load a checkpoint", "load")
    unknown = sorted(reader.manifest.names("model") - {name for names in everyone for name in names})
    if unknown:
        raise CheckpointError(
            f"{reader.directory}: it holds {unknown[0]!r}{f' and {len(unknown) - 1} more weights' * (len(unknown) > 1)}, "
            "which the model does not have"
        )


def on_every_rank(pipeline: Pipeline, work: Callable[[], None]) -> None:
    """Call `work`; if it fails on any rank, raise the same CheckpointError on every rank."""
    problem = ""
    try:
        work()
    except CheckpointError as error:
        problem = str(error)
    for failure in from_every_rank(pipeline, problem, "the other ranks to load a checkpoint", "load"):
        if failure:
            raise CheckpointError(failure)
