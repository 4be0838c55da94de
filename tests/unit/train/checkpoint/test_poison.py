"""Checkpoints made to do harm: nothing is unpickled, nothing outside the directory is read, and the command ends with 5."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from checkpoint_states import Run, layout_of
from pipeloom import checkpoint, schedules
from pipeloom.cli import main
from pipeloom.errors import CheckpointError
from pipeloom.runtime import Layer, Pipeline
from pipeloom.train.checkpoint.boxes import Box
from pipeloom.train.checkpoint.manifest import read_manifest
from pipeloom.train.checkpoint.reader import Reader, verified
from pipeloom.train.checkpoint.run import RunFacts

FILE = "rank-00000.safetensors"


class Marker:
    """A pickle of it makes a directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def run_of() -> tuple[Pipeline, torch.optim.Optimizer]:
    pipeline = Pipeline([Layer("a", lambda: nn.Linear(3, 3))], schedules.gpipe(1, 2), loss=nn.functional.mse_loss)
    adam = torch.optim.AdamW(pipeline.parameters(), lr=0.1)
    pipeline.step(torch.ones(2, 3), torch.zeros(2, 3))
    adam.step()
    return pipeline, adam


@pytest.fixture
def no_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("something was unpickled")

    run_of()  # the first optimizer of a process imports torch._dynamo, which derives a class from Unpickler
    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, refuse)


def rewritten(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes the manifest, and gives it a right checksum again."""
    manifest = path / "manifest.json"
    content = json.loads(manifest.read_text())
    del content["sha256"]
    change(content)
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    manifest.write_text(json.dumps({**content, "sha256": hashlib.sha256(text.encode()).hexdigest()}))


def moved_to(name: str) -> Callable[[dict[str, Any]], None]:
    """The file of the tensors is said to be another."""

    def change(content: dict[str, Any]) -> None:
        content["files"][name] = content["files"].pop(FILE)
        for entry in content["tensors"].values():
            for box in entry["boxes"]:
                box["file"] = name

    return change


def replaced(path: Path, name: str, data: bytes) -> None:
    """Gives a file other content, and the manifest its checksum."""
    (path / name).write_bytes(data)
    stored = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    rewritten(path, lambda content: content["files"].update({name: stored}))


def linked(path: Path, name: str) -> None:
    outside = path.parent / "outside"
    (path / name).rename(outside)
    (path / name).symlink_to(outside)


def written(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def piped(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def poisons(path: Path) -> dict[str, Callable[[], None]]:
    pickled = pickle.dumps(Marker(path.parent / "marker"))
    return {
        "a pickle in the place of tensors": lambda: replaced(path, FILE, pickled),
        "a pickle in the place of extra": lambda: replaced(path, "extra.json", pickled),
        "a pickle in the place of the manifest": lambda: written(path / "manifest.json", pickled),
        "a file above the directory": lambda: rewritten(path, moved_to(f"../{FILE}")),
        "an absolute file": lambda: rewritten(path, moved_to(str(path / FILE))),
        "a hidden file": lambda: rewritten(path, moved_to(".hidden")),
        "a link in the place of tensors": lambda: linked(path, FILE),
        "a link in the place of extra": lambda: linked(path, "extra.json"),
        "a link in the place of the manifest": lambda: linked(path, "manifest.json"),
        "a pipe in the place of tensors": lambda: piped(path / FILE),
    }


def test_a_file_cut_short_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    """Of a mapped file, the next access would end the process by SIGBUS."""
    pipeline, adam = run_of()
    path = checkpoint.save(tmp_path, 1, pipeline, adam)
    manifest, _ = verified(path, None)
    assert manifest is not None
    reader = Reader(path, manifest)
    assert torch.equal(reader.region("model.a.weight", Box((1, 0), (2, 3))), next(iter(pipeline.parameters()))[1:])
    os.truncate(path / FILE, 8)
    with pytest.raises(CheckpointError, match=r"'model\.a\.bias' cannot be read: .* ends within one of its tensors"):
        reader.region("model.a.bias", Box((0,), (3,)))


def test_poison_is_refused(no_pickle: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipeline, adam = run_of()
    path = checkpoint.save(tmp_path / "good", 1, pipeline, adam, extra={"batch": 3})
    assert checkpoint.load(path, *run_of()).extra == {"batch": 3}
    for number, words in enumerate(poisons(path)):
        copy = tmp_path / f"bad{number}" / path.name
        shutil.copytree(path, copy)
        poisons(copy)[words]()
        before = [p.detach().clone() for p in pipeline.parameters()]
        with pytest.raises(CheckpointError) as error:
            checkpoint.load(copy, pipeline, adam)
        assert str(copy) in str(error.value), words
        assert all(map(torch.equal, pipeline.parameters(), before)), words
        with pytest.raises(SystemExit) as end:
            main(["export", str(copy), str(tmp_path / "out")])
        assert end.value.code == 5, (words, capsys.readouterr().err)
        assert not (copy.parent / "marker").exists(), words


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda content: content["tensors"]["model.a.bias"].update(dtype=["F32"]),
            r"dtype = \['F32'\]: it must be text",
        ),
        (lambda content: content["tensors"]["model.a.bias"].update(shape=[3.0]), "it must be a whole number"),
        (lambda content: content.update(step=10**15), r"step = 10{15}: it must be at most 10{12}"),
        (lambda content: content.update(numbers={"a": float("inf")}), "it must be a finite number"),
        (lambda content: content.pop("files"), "files is missing"),
    ],
)
def test_a_value_of_another_type_in_the_manifest_is_named(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], words: str
) -> None:
    pipeline, adam = run_of()
    path = checkpoint.save(tmp_path, 1, pipeline, adam)
    rewritten(path, change)
    with pytest.raises(CheckpointError, match=f"manifest.json: it is not a manifest: .*{words}"):
        read_manifest(path)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ([1], r"content = \[1\]: it must be a table"),
        ({"batch": -5}, "batch = -5: it must be at least 0"),
        ({"norms": ["x"]}, "it must be a number"),
        ({"config": {"model": 5}}, "config.model = 5: it must be a table"),
    ],
)
def test_facts_that_no_trainer_writes_are_refused(extra: Any, words: str) -> None:
    with pytest.raises(CheckpointError, match=f"^run/extra.json: it was not written by Pipeloom's trainer: .*{words}"):
        RunFacts.of(extra, Path("run"))


def test_the_batch_of_a_checkpoint_without_facts_is_its_step() -> None:
    assert RunFacts.of(None, Path()).batch_after(7) == 7
    assert RunFacts.of({"batch": 9}, Path()).batch_after(7) == 9


def test_deeply_nested_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(b"[" * 300_000)
    (tmp_path / "extra.json").write_bytes(b'{"a":' * 300_000)
    with pytest.raises(CheckpointError, match=r"manifest\.json: cannot be read: .* is not JSON: nested too deeply"):
        read_manifest(tmp_path)
    with pytest.raises(CheckpointError, match=r"extra\.json: cannot be read: .* is not JSON: nested too deeply"):
        RunFacts.read(tmp_path)


@pytest.mark.parametrize(
    ("state", "value", "words"),
    [
        ("step", torch.tensor(-5.0), "expected a number of steps, found -5.0"),
        ("step", torch.ones(2), r"expected shape \[\], found \[2\]"),
        ("exp_avg", torch.ones(9), r"expected shape .*, found \[9\]"),
        ("master", torch.ones(70, 70, 2), r"expected shape .*, found \[70, 70, 2\]"),
    ],
)
def test_state_of_the_optimizer_that_cannot_be_its_own_is_refused(
    tmp_path: Path, state: str, value: torch.Tensor, words: str
) -> None:
    run = Run(layout_of("one"))
    run.steps(1)
    path = checkpoint.save(tmp_path, 1, run.pipeline, run.optimizer)
    tensors = safetensors.torch.load((path / FILE).read_bytes())
    name = next(key for key in tensors if key.endswith(".exp_avg")).removesuffix(".exp_avg")
    key = f"{name}.{state}"
    (path / FILE).write_bytes(safetensors.torch.save({**tensors, key: value}))
    replaced(path, FILE, (path / FILE).read_bytes())
    box = {"file": FILE, "name": key, "offset": [0] * value.ndim, "shape": list(value.shape)}
    rewritten(
        path,
        lambda content: content["tensors"].update({key: {"dtype": "F32", "shape": list(value.shape), "boxes": [box]}}),
    )
    with pytest.raises(CheckpointError, match=words):
        checkpoint.load(path, run.pipeline, run.optimizer)
