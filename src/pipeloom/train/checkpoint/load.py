"""Loading: the ranks verify a checkpoint together, then each reads the regions that it needs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pipeloom.errors import CheckpointError
from pipeloom.limits import of_annotated_types
from pipeloom.parallel.exchange import all_gather_json
from pipeloom.runtime import Pipeline
from pipeloom.train.checkpoint.folder import newest_checkpoint
from pipeloom.train.checkpoint.manifest import BaseWeights
from pipeloom.train.checkpoint.reader import Reader, read_extra, verified
from pipeloom.train.checkpoint.state import AnyOptimizer, load_model, load_optimizer, require_shapes, required_names
from pipeloom.train.collect import agreed, from_every_rank


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


def opened_together(path: Path, pipeline: Pipeline) -> Reader:
    """Return the checkpoint that `path` refers to, as the first rank sees it; collective.

    Raises CheckpointError, the same on every rank, if it is absent or damaged.
    """
    everyone = pipeline.mesh.everyone
    group = pipeline._run_control if everyone.size > 1 else None
    with contextlib.suppress(CheckpointError):  # refused with a reason where it is read
        path = newest_checkpoint(path)
    with pipeline.waiting("the other ranks to compare a checkpoint's checksums", "load"):
        directory = Path(str(path) if group is None else all_gather_json(str(path), group)[0])
        manifest, problem = verified(directory, group, everyone.index, everyone.size)
    if manifest is None:
        raise CheckpointError(problem)
    return Reader(directory, manifest)


@of_annotated_types
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
    reader = opened_together(Path(path), pipeline)
    directory, manifest = reader.directory, reader.manifest
    _require_base(directory, manifest.base, base)
    adapters = manifest.base is not None
    _require(reader, pipeline, adapters)
    extra = read_extra(directory)

    def put() -> None:
        load_model(reader, pipeline, adapters)
        if optimizer is not None and "optimizer" in manifest.stored:
            load_optimizer(reader, pipeline, optimizer)

    on_every_rank(pipeline, put)
    pipeline.next_step = manifest.step
    return Loaded(manifest.step, extra, directory)


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
    agreed(partial(from_every_rank, pipeline, what="the other ranks to load a checkpoint", phase="load"), work)
