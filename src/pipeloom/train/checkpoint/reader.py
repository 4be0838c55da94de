"""A checkpoint's content: the checksum of every file is verified before any is used, then regions of tensors are read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeloom.errors import CheckpointError, ConfigError, UsageError
from pipeloom.limits import read_json
from pipeloom.models.stored_tensors import StoredTensors
from pipeloom.parallel.exchange import all_gather_json
from pipeloom.train.checkpoint.boxes import Box
from pipeloom.train.checkpoint.folder import DTYPE_NAMES, verify
from pipeloom.train.checkpoint.manifest import DTYPES_BY_NAME, EXTRA, Manifest, StoredBox, read_manifest

_EXTRA_BYTES = 2**28
_MOST_NESTED = 1000  # values of a user's own program may be nested deeper than a configuration


class Reader:
    """A checkpoint whose files have been verified."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.directory, self.manifest = directory, manifest
        self.tensors: dict[str, tuple[int, ...]] = {key: entry.shape for key, entry in manifest.tensors.items()}
        self._files: dict[str, StoredTensors] = {}

    @property
    def numbers(self) -> Mapping[str, float]:
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

    def whole(self, key: str) -> Tensor:
        """Read all of the tensor `key`, as `region` does."""
        return self.region(key, Box.whole(self.tensors[key]))

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


def verified(
    directory: Path, group: Any, index: int = 0, count: int = 1, whole: bool = True
) -> tuple[Manifest | None, str]:
    """Return (manifest, "") for a checkpoint whose files all match their checksums (without `whole` their sizes); (None, the
    reason) for any other.

    Collective over `group`, of whose `count` processes this is number `index`: each verifies some of the files. The result
    is the same on all.
    """
    manifest, problem = None, ""
    try:
        manifest = read_manifest(directory)
        sizes = sorted(manifest.files.items(), key=lambda item: (-item[1].size, item[0]))
        for name, stored in sizes[index::count]:
            problem = problem or verify(directory, name, stored, whole)
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


def opened(directory: Path) -> Reader:
    """Return a checkpoint whose files match their checksums. Raises CheckpointError with the reason for another one."""
    manifest, problem = verified(directory, None)
    if manifest is None:
        raise CheckpointError(problem)
    return Reader(directory, manifest)
