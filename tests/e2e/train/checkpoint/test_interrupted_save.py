"""A process killed at any moment of a save leaves a whole newest checkpoint; weights that are not finite are not saved."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_states import Run, layout_of
from pipeloom import checkpoint
from pipeloom.errors import CheckpointError, DistributedError
from pipeloom.train.checkpoint.folder import complete

CALLS = ("mkdir", "write", "fsync", "rename", "unlink", "rmdir")


class Killed(BaseException):
    """The end of the process, from which nothing in it recovers."""


class Disc:
    """Kills the process before its `last`-th change of the file system, in the middle of a write; None: never."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.last: int | None = None
        self.calls: list[tuple[str, str]] = []
        for name in CALLS:
            monkeypatch.setattr(os, name, self._wrapped(name, getattr(os, name)))

    def _wrapped(self, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            if self.last is not None and len(self.calls) >= self.last:
                if name == "write" and len(self.calls) == self.last:
                    plain(arguments[0], arguments[1][: len(arguments[1]) // 2])
                self.calls.append((name, ""))  # it stays dead
                raise Killed
            self.calls.append((name, Path(str(arguments[0])).name))
            if name == "fsync":  # takes long, and a process that is killed loses nothing by it
                return None
            return plain(*arguments, **keywords)

        return call


@pytest.fixture
def disc(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disc]:
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)  # of a writer that was killed
    return Disc(monkeypatch)


def save(saver: checkpoint.Saver, step: int, words: str) -> bool:
    """Whether the save came to its end."""
    try:
        saver.save(step, {"words": words})
        saver.wait()
    except Killed:
        pass
    saver.release()  # the kernel does so
    return any(path.name == f"step-{step:06d}" for _, path in complete(saver.folder))


@pytest.mark.parametrize(
    ("step", "asynchronous"),  # in place of the one that is there, and after it
    [
        (1, False),
        (2, True),
        pytest.param(1, True, marks=pytest.mark.full),
        pytest.param(2, False, marks=pytest.mark.full),
    ],
)
def test_a_kill_at_any_moment_leaves_a_whole_newest_checkpoint(
    step: int, asynchronous: bool, tmp_path: Path, disc: Disc
) -> None:
    run = Run(layout_of("one"))

    def saver() -> checkpoint.Saver:
        return checkpoint.Saver(folder, run.pipeline, keep=1, asynchronous=asynchronous)

    seen: list[str] = []
    calls, moment = [("", "")], 0
    while not calls[-1][1]:  # until one came to its end
        folder = tmp_path / str(moment)
        assert save(saver(), 1, "first")
        disc.calls, disc.last = [], moment
        save(saver(), step, "second")
        calls, disc.last = [*disc.calls], None
        loaded = checkpoint.load(folder, run.pipeline)
        assert (loaded.step, loaded.extra["words"]) in ((1, "first"), (step, "second"))
        seen.append(loaded.extra["words"])
        assert save(saver(), 3, "third")
        assert [path.name for path in folder.iterdir()] == ["step-000003"]
        assert checkpoint.load(folder, run.pipeline).extra == {"words": "third"}
        moment += 1
    names = [name for name, _ in calls]
    assert names.count("fsync") >= 5  # weights, extra, manifest, and two directories
    assert len(seen) == len(names) + 1 > 12  # one round for each call, and one without a kill
    assert seen == sorted(seen)  # once the new one is there, it stays
    assert set(seen) == {"first", "second"}
    publication = next(at for at, (name, what) in enumerate(calls) if name == "rename" and what.endswith(".partial"))
    assert names[:publication].count("fsync") >= 4
    assert "fsync" in names[publication:]


def test_nothing_is_saved_where_what_runs_beside_the_writing_fails(tmp_path: Path) -> None:
    run = Run(layout_of("one"))
    saver = checkpoint.Saver(tmp_path, run.pipeline, run.optimizer)
    written: list[list[str]] = []

    def differ() -> None:
        written.append([file.name for file in sorted((tmp_path / ".step-000001.partial").iterdir())])
        raise DistributedError("replicas differ")

    with pytest.raises(DistributedError, match="replicas differ"):
        saver.save(1, {}, differ)
    assert written == [["rank-00000.safetensors"]]  # the manifest is not there yet
    assert list(tmp_path.iterdir()) == []
    saver.save(2, {}, lambda: None)  # the folder is not locked any more
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_what_runs_beside_the_writing_runs_once_where_writing_fails_too(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is collective: without this rank the others would wait for it."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    run = Run(layout_of("one"))
    saver = checkpoint.Saver(tmp_path, run.pipeline, run.optimizer)
    calls: list[str] = []
    monkeypatch.setattr(os, call, full)
    with pytest.raises(CheckpointError, match="No space left"):
        saver.save(1, {}, lambda: calls.append("called"))
    assert calls == ["called"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("asynchronous", [False, True])
def test_weights_that_are_not_finite_are_not_saved(asynchronous: bool, tmp_path: Path) -> None:
    run = Run(layout_of("one"))
    saver = checkpoint.Saver(tmp_path, run.pipeline, run.optimizer, asynchronous=asynchronous)

    def finish(step: int) -> None:
        saver.save(step)
        saver.wait()

    finish(1)
    name, weight = next(item for item in run.pipeline.named_parameters() if item[0].endswith("up_proj.weight"))
    for value in (float("nan"), float("inf")):
        with torch.no_grad():
            weight[1, 2] = value
        with pytest.raises(CheckpointError, match=f"not written: {name} has values that are not finite after step 2"):
            finish(2)
        assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    weight.requires_grad_(False)  # what does not train is as it was given
    finish(3)
    weight.requires_grad_()
    with torch.no_grad():
        weight[1, 2] = 0.5
    finish(4)
    assert len(list(tmp_path.iterdir())) == 3
