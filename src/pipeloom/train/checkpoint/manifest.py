"""The manifest of a checkpoint: which tensors it holds, in which boxes of which files, and the checksum of every file.

`manifest.json` is written last, so a directory without one is no checkpoint. It also holds a SHA-256 of its own content, so
that damage to it is detected like damage to a tensor.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, FiniteFloat, TypeAdapter, ValidationError

from pipeloom.config.problems import file_sentence
from pipeloom.errors import CheckpointError, UsageError, echo
from pipeloom.limits import MOST_STEPS, read_json
from pipeloom.models.stored_tensors import STORED_DTYPES
from pipeloom.train.checkpoint.boxes import Box, tiling_problem

CHECKPOINT_FORMAT = "pipeloom.checkpoint/1"
MANIFEST = "manifest.json"
EXTRA = "extra.json"
# Largest manifest that is read. A tensor and its boxes take about 300 bytes, so this is enough for 3 million tensors.
MANIFEST_BYTES = 2**30
DTYPES_BY_NAME = STORED_DTYPES | {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64}
REST = {
    "random numbers": "a function of (seed, step, sample, layer): no generator has a state to store",
    "data": "read again from data.source of the configuration in extra.json, starting at the batch number stored there",
}
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,100}")
Extents = tuple[Annotated[int, Field(ge=0, lt=2**60)], ...]


@dataclass(frozen=True)
class StoredBox:
    """One box of a tensor.

    Attributes:
        file: the safetensors file in the checkpoint's directory.
        name: its name in that file.
        offset, shape: the part of the whole tensor that it holds.
    """

    file: str
    name: str
    offset: Extents
    shape: Extents

    @property
    def box(self) -> Box:
        """The part of the whole tensor that it holds."""
        return Box(self.offset, self.shape)


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: its dtype as safetensors writes it (`"F32"`), its whole shape, and boxes that hold each element once."""

    dtype: str
    shape: Extents
    boxes: tuple[StoredBox, ...]


@dataclass(frozen=True)
class StoredFile:
    """Size in bytes and SHA-256 (hexadecimal) of a file."""

    size: Annotated[int, Field(ge=0, alias="bytes")]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


@dataclass(frozen=True)
class BaseWeights:
    """Source of the frozen weights of a checkpoint that holds adapters only.

    Attributes:
        kind: "hugging face" for a model directory, or "checkpoint" for a checkpoint of Pipeloom's own decoder.
        path: its directory.
        digest: SHA-256 that identifies the weights (`directory_digest` or `checkpoint_digest` in `train/hub/lora_files.py`).
    """

    kind: str
    path: str
    digest: str


@dataclass(frozen=True)
class Manifest:
    """Table of contents of a checkpoint.

    Attributes:
        step: number of completed steps.
        stored: the kinds of content: some of "model", "optimizer" and "extra".
        tensors: key -> entry; a key is `model.NAME` or `optimizer.NAME.STATE`, where NAME is a global name.
        numbers: key -> optimizer state that is a number, not a tensor.
        files: name -> size and checksum, of every file but the manifest.
        writer: version of Pipeloom, number of ranks, and time of writing; never read by the program.
        base: source of the frozen weights; None: the checkpoint holds them too.
        equal_until: the last step after which replicas were compared and were equal; None: not known.
    """

    step: Annotated[int, Field(ge=0, le=MOST_STEPS)]
    stored: tuple[str, ...]
    tensors: Mapping[str, TensorEntry]
    numbers: Mapping[str, FiniteFloat | int | bool]
    files: Mapping[str, StoredFile]
    writer: Mapping[str, Any] = field(default_factory=dict)
    base: BaseWeights | None = None
    equal_until: Annotated[int, Field(ge=0, le=MOST_STEPS)] | None = None

    def names(self, kind: str) -> set[str]:
        """Return the keys of `kind` ("model" or "optimizer") without that first part."""
        return {key.partition(".")[2] for key in (*self.tensors, *self.numbers) if key.partition(".")[0] == kind}


_SCHEMA = TypeAdapter(Manifest)


def to_bytes(manifest: Manifest) -> bytes:
    """Return the content of `manifest.json`."""
    content = {"format": CHECKPOINT_FORMAT, "rest": REST}
    content |= _SCHEMA.dump_python(manifest, mode="json", by_alias=True, exclude_none=True)
    content["sha256"] = hashlib.sha256(_canonical(content)).hexdigest()
    return json.dumps(content, indent=1, allow_nan=False).encode() + b"\n"


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest of the checkpoint in `directory` and verify its own checksum; no other file is read.

    Raises CheckpointError with the file, what was expected and what was found.
    """
    path = directory / MANIFEST
    if path.is_symlink():
        raise CheckpointError(f"{path}: expected a file, found a symbolic link")
    try:
        content = read_json(path, MANIFEST_BYTES, "a manifest")
    except FileNotFoundError:
        what = "is not complete: it has no manifest.json" if directory.is_dir() else "does not exist"
        raise CheckpointError(f"{directory}: the checkpoint {what}") from None
    except (OSError, UsageError) as error:
        raise CheckpointError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    if content.get("format") != CHECKPOINT_FORMAT:
        raise CheckpointError(f"{path}: expected format {CHECKPOINT_FORMAT!r}, found {echo(content.get('format'))}")
    said = content.pop("sha256", None)
    text = _canonical(content)
    actual = hashlib.sha256(text).hexdigest()
    if said != actual:
        raise CheckpointError(f"{path}: expected SHA-256 {echo(said)} of its content, found {actual!r}: it is damaged")
    try:
        manifest = _SCHEMA.validate_json(text, strict=True)
    except ValidationError as error:
        raise CheckpointError(f"{path}: it is not a manifest: {file_sentence(error)}") from None
    _check(manifest, path)
    return manifest


def _canonical(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def _check(manifest: Manifest, path: Path) -> None:
    """Raise CheckpointError for file names outside the directory, and for tensors whose boxes do not cover them.

    A file must be large enough for the boxes listed for it, so that nothing is allocated for a tensor that is not there.
    """
    if manifest.equal_until is not None and manifest.equal_until > manifest.step:
        raise CheckpointError(f"{path}: equal_until is {manifest.equal_until}, after its step {manifest.step}")
    held = dict.fromkeys(manifest.files, 0)
    for name in manifest.files:
        if not _FILE.fullmatch(name) or name == MANIFEST:
            raise CheckpointError(f"{path}: {echo(name)} is not a file of a checkpoint")
    if ("extra" in manifest.stored) != (EXTRA in manifest.files):
        raise CheckpointError(f"{path}: expected {EXTRA} among its files, found {sorted(manifest.files)[:5]}")
    for key, entry in manifest.tensors.items():
        if entry.dtype not in DTYPES_BY_NAME:
            raise CheckpointError(f"{path}: {echo(key)} has the unknown dtype {echo(entry.dtype)}")
        for box in entry.boxes:
            if box.file not in manifest.files:
                raise CheckpointError(f"{path}: {echo(key)} is in {echo(box.file)}, which is not among its files")
            held[box.file] += box.box.elements * DTYPES_BY_NAME[entry.dtype].itemsize
        problem = tiling_problem(entry.shape, [box.box for box in entry.boxes])
        if problem:
            raise CheckpointError(f"{path}: {echo(key)} is not complete: {problem}")
    for name, size in held.items():
        if size > manifest.files[name].size:
            length = manifest.files[name].size
            raise CheckpointError(f"{path}: expected {size:,} bytes of tensors in {echo(name)}, found {length:,}")
