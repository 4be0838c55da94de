"""Headers of safetensors files: what they say must fit the file, and is refused in one sentence where it does not."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pipeloom.errors import ConfigError
from pipeloom.models.stored_tensors import StoredTensors
from pipeloom.train.checkpoint.folder import DTYPES_BY_NAME, write_tensors


def tensor(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}


@pytest.mark.parametrize(
    ("header", "size"),
    [
        ({"a": tensor(dtype=["F32"])}, 8),
        ({"a": tensor(shape=[-1, -2])}, 8),
        ({"a": tensor(shape=[float("inf")])}, 8),
        ({"a": tensor(), "b": tensor(data_offsets=[4, 12])}, 12),
        ({"a": tensor(), "b": tensor(data_offsets=[16, 24])}, 24),
        ({"a": tensor(shape=[2**62, 4], data_offsets=[0, 0])}, 0),
        ({"a": [1]}, 8),
        (b"[" * 300_000, 0),
        (b'{"a":' * 300_000, 0),
        (b"\xff\xfe", 0),
    ],
)
def test_a_header_that_does_not_fit_its_file_is_refused(tmp_path: Path, header: Any, size: int) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file = tmp_path / "x.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))
    with pytest.raises(ConfigError, match=r"x\.safetensors is not a complete safetensors file: .") as error:
        StoredTensors([file])
    assert len(str(error.value)) < 400 + len(str(file))


def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("pipe", "zero", "absent", ".", "a\0b"):
        with pytest.raises(ConfigError, match="is not a complete safetensors file"):
            StoredTensors([tmp_path / name])


def test_a_type_that_is_not_read_is_named(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2, dtype=torch.uint16)}, tmp_path / "x.safetensors")
    with pytest.raises(ConfigError, match="of a type that is not supported: U16"):
        StoredTensors([tmp_path / "x.safetensors"])


def test_every_type_of_a_checkpoint_is_read_back(tmp_path: Path) -> None:
    tensors = {name: torch.ones(3, 2).to(dtype) for name, dtype in DTYPES_BY_NAME.items()}
    write_tensors(tmp_path / "x.safetensors", tensors)
    stored = StoredTensors([tmp_path / "x.safetensors"], DTYPES_BY_NAME)
    for name, values in tensors.items():
        read = stored.read(name)
        assert read.dtype == values.dtype
        assert torch.equal(read.view(torch.uint8), values.view(torch.uint8))
