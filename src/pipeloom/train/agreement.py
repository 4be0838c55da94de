"""Facts that the workers of a run must agree on beyond a pipeline's handshake: configuration, data, a user's code."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from pipeloom.config import Layout
from pipeloom.errors import DistributedError
from pipeloom.parallel.exchange import all_gather_json
from pipeloom.runtime.health.handshake import differences, source_facts
from pipeloom.schedule.functions import source_file

if TYPE_CHECKING:
    from pipeloom.train.context import WorkerContext

# The paths of the data may differ from machine to machine: their content is compared. Only rank 0 uses the folder of logs.
MAY_DIFFER = frozenset(
    {"data.source", "data.validation", "data.tokenizer", "data.cache", "log.dir", "train.device", "train.timeout"}
)
_SAMPLED_BYTES = 64 * 2**20  # takes at most a second to read, and covers most texts in full
_SAMPLES = 64


def require_agreement(layouts: Sequence[Layout], context: WorkerContext, data: Mapping[str, str] | None = None) -> None:
    """Raise DistributedError, on every worker, if two workers differ; it names the differences. Collective over the run.

    Compared are the versions, Pipeloom's source, the configuration except for MAY_DIFFER, the files of a user's schedule and
    classes, and the data: of texts the `fingerprint`, of tokens the digests of the files and settings they were made from.

    Args:
        data: name -> digest that must be equal on all workers.
    """
    if context.world_size == 1:
        return
    mine: dict[str, Any] = source_facts()
    for number, layout in enumerate(layouts):
        where = f"layout {number}, " if len(layouts) > 1 else ""
        mine |= {f"{where}{key}": value for key, value in _settings(layout).items()}
    mine |= data or {}
    with context.waiting("what the other workers are about to train", "start-up"):
        disagreements = differences(all_gather_json(mine, dist.group.WORLD))
    if disagreements:
        raise DistributedError("the ranks disagree:\n" + "\n".join(f"  {line}" for line in disagreements))


def fingerprint(data: bytes | memoryview) -> str:
    """Return the size and the SHA-256 of `data`; of more than 64 MiB, the SHA-256 of 64 samples of 1 MiB at fixed offsets."""
    view = memoryview(data).cast("B")
    hasher = hashlib.sha256()
    if len(view) <= _SAMPLED_BYTES:
        hasher.update(view)
    else:
        piece = _SAMPLED_BYTES // _SAMPLES
        for number in range(_SAMPLES):
            start = (len(view) - piece) * number // (_SAMPLES - 1)
            hasher.update(view[start : start + piece])
    return f"{len(view)} bytes, SHA-256 {hasher.hexdigest()[:16]}"


def _settings(layout: Layout) -> dict[str, Any]:
    """Return section.key -> value, as JSON holds it, and the fingerprints of a user's code."""
    dumped = layout.config.model_dump(mode="json")
    settings = {f"{section}.{key}": value for section, table in dumped.items() for key, value in table.items()}
    settings = {key: value for key, value in settings.items() if key not in MAY_DIFFER}
    if layout.code is not None:
        settings["code of the schedule"] = fingerprint(Path(layout.code).read_bytes())
    for key in layout.classes:
        file = source_file(getattr(layout.config.model, key))
        if file is not None:
            settings[f"code of model.{key}"] = fingerprint(Path(file).read_bytes())
    return settings
