"""Checkpoints out to torch.distributed.checkpoint and in again, bit by bit; what is not ours is refused in one sentence."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from pipeloom import checkpoint, schedules
from pipeloom.cli import main
from pipeloom.errors import CheckpointError, ConfigError
from pipeloom.runtime import Layer, Pipeline
from pipeloom.train.checkpoint.dcp import RECORD, export_dcp, import_dcp
from pipeloom.train.checkpoint.reader import Reader, read_extra, verified

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def saved(folder: Path) -> tuple[Path, Pipeline, torch.optim.Optimizer]:
    layers = [Layer("in", lambda: nn.Linear(3, 5)), Layer("out", lambda: nn.Linear(5, 3))]
    pipeline = Pipeline(layers, schedules.gpipe(1, 2), loss=nn.functional.mse_loss)
    adam = torch.optim.AdamW(pipeline.parameters(), lr=0.1)
    for step in range(2):
        values = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
        pipeline.step(values, values)
        adam.step()
        adam.zero_grad()
    return checkpoint.save(folder, 2, pipeline, adam, extra={"batch": 7}), pipeline, adam


def command(*words: str | Path) -> int:
    with pytest.raises(SystemExit) as end:
        main([str(word) for word in words])
    return int(end.value.code or 0)


def contents(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, object], object]:
    manifest, problem = verified(path, None)
    assert manifest is not None, problem
    reader = Reader(path, manifest)
    tensors = {key: reader.region(key, entry.boxes[0].box) for key, entry in manifest.tensors.items()}
    return tensors, dict(manifest.numbers), (manifest.step, read_extra(reader.directory))


def test_out_and_in_again_is_bit_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, pipeline, adam = saved(tmp_path / "run")
    assert command("export", "--format", "dcp", tmp_path / "run", tmp_path / "out") == 0
    wanted = contents(path)
    read = {key: torch.zeros_like(tensor) for key, tensor in wanted[0].items()}
    dcp.load(read, checkpoint_id=tmp_path / "out", no_dist=True)  # torch's own reader
    assert all(torch.equal(read[key], tensor) for key, tensor in wanted[0].items())
    assert any(key.startswith("optimizer.") for key in read)
    capsys.readouterr()
    assert command("import", "--format", "dcp", tmp_path / "out", tmp_path / "back") == 0
    assert "only from sources that you trust" in capsys.readouterr().err
    found = contents(tmp_path / "back" / path.name)
    assert found[1:] == wanted[1:]
    assert found[0].keys() == wanted[0].keys()
    assert all(torch.equal(found[0][key], tensor) for key, tensor in wanted[0].items())
    with torch.no_grad():
        weights = [p.clone() for p in pipeline.parameters()]
        for parameter in pipeline.parameters():
            parameter.zero_()
    assert checkpoint.load(tmp_path / "back", pipeline, adam).extra == {"batch": 7}
    assert all(map(torch.equal, pipeline.parameters(), weights))


def test_what_is_not_ours_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, *_ = saved(tmp_path / "run")
    export_dcp(path, tmp_path / "out")
    dcp.save({"weight": torch.ones(2)}, checkpoint_id=tmp_path / "foreign", no_dist=True)
    damaged = tmp_path / "out" / ".metadata"
    for source, words in (
        (tmp_path / "run", "found no .metadata"),
        (tmp_path / "foreign", f"expected the key '{RECORD}'"),
        (tmp_path / "out", "cannot be read"),
    ):
        if words == "cannot be read":
            damaged.write_bytes(damaged.read_bytes()[:40])
        assert command("import", "--format", "dcp", source, tmp_path / "new") == 5
        assert words in capsys.readouterr().err
        assert not (tmp_path / "new").exists()
    assert command("import", "--format", "zip", path, tmp_path / "new") == 2
    assert "'zip' is not one of 'hf', 'dcp'" in capsys.readouterr().err


def test_a_refused_import_leaves_nothing(tmp_path: Path) -> None:
    record = {"step": -1, "stored": ["model"], "numbers": {}, "base": None}
    for weight, words in ((torch.ones(2), "step = -1"), (torch.ones(2, dtype=torch.complex128), "complex128")):
        packed = torch.tensor(list(json.dumps(record).encode()), dtype=torch.uint8)
        dcp.save({RECORD: packed, "model.a.weight": weight}, checkpoint_id=tmp_path / weight.type(), no_dist=True)
        with pytest.raises(CheckpointError, match=words):
            import_dcp(tmp_path / weight.type(), tmp_path / "new")
        assert not (tmp_path / "new").exists() or not list((tmp_path / "new").iterdir())


def test_what_is_no_tensor_is_not_unpickled(tmp_path: Path) -> None:
    dcp.save({RECORD: torch.ones(2, dtype=torch.uint8), "other": {1, 2}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(CheckpointError, match="'other' is of BytesStorageMetadata"):
        import_dcp(tmp_path / "dcp", tmp_path / "new")


def test_out_and_in_again_warn_of_nothing(tmp_path: Path) -> None:
    """torch warns of the process group that it misses, which one process has no use for."""
    saved(tmp_path / "run")
    with warnings.catch_warnings(action="error"):
        export_dcp(tmp_path / "run", tmp_path / "out")
        import_dcp(tmp_path / "out", tmp_path / "back")


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    saved(tmp_path / "run")
    (tmp_path / "out").symlink_to(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"out cannot be created: File exists"):
        export_dcp(tmp_path / "run", tmp_path / "out")
