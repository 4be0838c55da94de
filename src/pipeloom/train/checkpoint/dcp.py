"""Export and import of checkpoints in the format of `torch.distributed.checkpoint` (DCP), for programs that read no other.

DCP describes its files in `.metadata`, a pickle without a checksum, and to read a pickle is to run the code in it. A directory
is therefore imported only on an explicit command. Everything is exported as tensors, other values as the bytes of a JSON text,
so that nothing but `.metadata` is unpickled.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeloom.errors import CheckpointError
from pipeloom.train.checkpoint.folder import DTYPE_NAMES, make_directory, newest_checkpoint, require_new
from pipeloom.train.checkpoint.manifest import BaseWeights, Manifest
from pipeloom.train.checkpoint.reader import opened, read_extra
from pipeloom.train.checkpoint.save import write_alone

RECORD = "pipeloom.json"  # the key of the values that are not tensors


def export_dcp(path: Path, out: Path) -> Path:
    """Write a checkpoint, optimizer state included, as a directory that `torch.distributed.checkpoint.load` reads.

    Keys are those of the manifest (`model.NAME`, `optimizer.NAME.STATE`), each for a whole tensor. All of them are in memory at
    once.

    Args:
        path: a checkpoint, or a folder of checkpoints, of which the newest complete one is exported.
        out: a directory that does not exist, or is empty.

    Returns:
        the directory of the exported checkpoint.

    Raises:
        CheckpointError: the checkpoint is damaged, or there is none.
        ConfigError: `out` is not empty.
    """
    from torch.distributed.checkpoint.state_dict_saver import save

    directory = newest_checkpoint(path)
    require_new(out)
    reader = opened(directory)
    manifest = reader.manifest
    state = {key: reader.whole(key) for key in reader.tensors}
    record = {
        "step": manifest.step,
        "stored": list(manifest.stored),
        "numbers": dict(manifest.numbers),
        "base": None if manifest.base is None else asdict(manifest.base),
        "extra": read_extra(directory),
    }
    state[RECORD] = torch.tensor(list(json.dumps(record).encode()), dtype=torch.uint8)
    make_directory(out)
    with warnings.catch_warnings(action="ignore"):  # of a process group that is not there
        save(state, checkpoint_id=out, no_dist=True)
    return directory


def import_dcp(source: Path, folder: Path) -> Path:
    """Make a checkpoint from a DCP directory written by `export_dcp`, or by a program that kept its keys.

    Unpickles `source/.metadata`: use it only for directories that you trust.

    Args:
        folder: a new folder of checkpoints.

    Returns:
        the checkpoint's directory.

    Raises:
        CheckpointError: the directory is damaged, or lacks the keys of `export_dcp`.
        ConfigError: `folder` is not empty.
    """
    require_new(folder)
    state = _read(source)
    packed = state.pop(RECORD)
    try:
        record = json.loads(bytes(packed.tolist()))
        step, numbers, base = int(record["step"]), dict(record["numbers"]), record["base"]
        stored = tuple(str(each) for each in record["stored"])
        weights = None if base is None else BaseWeights(base["kind"], base["path"], base["digest"])
        extra = record["extra"] if "extra" in stored else None
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{source}: {RECORD!r} is damaged: {type(error).__name__} {str(error)[:200]}") from None
    writer = {
        "imported": "torch.distributed.checkpoint",
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
    }
    return write_alone(folder, Manifest(step, stored, {}, numbers, {}, writer, weights), [state], extra)


def _read(source: Path) -> dict[str, Tensor]:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    if not (source / ".metadata").is_file():
        raise CheckpointError(f"{source}: expected a directory of torch.distributed.checkpoint, found no .metadata")
    try:
        described: Mapping[str, Any] = FileSystemReader(source).read_metadata().state_dict_metadata
        if not isinstance(described.get(RECORD), TensorStorageMetadata):
            raise CheckpointError(f"{source}: expected the key {RECORD!r}, which `pipeloom export --format dcp` writes")
        for key, entry in described.items():
            kind = entry.properties.dtype if isinstance(entry, TensorStorageMetadata) else type(entry).__name__
            if kind not in DTYPE_NAMES:  # what is not a tensor would be unpickled
                raise CheckpointError(f"{source}: {key!r} is of {kind}, which no checkpoint holds")
        state = {key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in described.items()}
        with warnings.catch_warnings(action="ignore"):
            load(state, checkpoint_id=source, no_dist=True)
    except CheckpointError:
        raise
    except Exception as error:  # reading a damaged pickle can raise any exception
        words = str(error).strip().splitlines() or [""]
        raise CheckpointError(f"{source}: cannot be read: {type(error).__name__} {words[-1][:200]}") from None
    return state
