"""Checkpoints written by one process, a few tensors at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from torch import Tensor

from pipeloom.errors import CheckpointError
from pipeloom.train.checkpoint.boxes import Box
from pipeloom.train.checkpoint.files import DTYPE_NAMES, write_bytes, write_tensors
from pipeloom.train.checkpoint.folder import partial_path, publish, step_path
from pipeloom.train.checkpoint.manifest import EXTRA, MANIFEST, Manifest, StoredBox, StoredFile, TensorEntry, to_bytes
from pipeloom.train.checkpoint.save import file_name, package_version


def write_whole(folder: Path, step: int, groups: Iterable[Mapping[str, Tensor]], extra: Mapping[str, Any]) -> Path:
    """Write a checkpoint of weights, one file for each of `groups`, of which one at a time is in memory.

    Args:
        groups: name in the checkpoint -> whole tensor, on the CPU.
        extra: values, as JSON can hold them, that a run that starts from the checkpoint needs besides the tensors.

    Returns:
        the checkpoint's directory.

    Raises:
        CheckpointError: it cannot be written, or another process is writing it.
    """
    final, partial = step_path(folder, step), partial_path(folder, step)
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
            if not group:
                continue
            file = file_name(number)
            named = {f"model.{name}": tensor.contiguous() for name, tensor in group.items()}
            files[file] = write_tensors(partial / file, named)
            for key, tensor in named.items():
                box = Box((0,) * tensor.ndim, tuple(tensor.shape))
                entries[key] = TensorEntry(DTYPE_NAMES[tensor.dtype], box.shape, (StoredBox(file, key, *box),))
        files[EXTRA] = write_bytes(partial / EXTRA, json.dumps(dict(extra), allow_nan=False).encode())
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        writer = {"pipeloom": package_version(), "ranks": 1, "time": now}
        manifest = Manifest(step, ("model", "extra"), dict(sorted(entries.items())), {}, files, writer)
        write_bytes(partial / MANIFEST, to_bytes(manifest))
        publish(partial, final)
    except OSError as error:
        raise CheckpointError(f"{partial}: cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return final
