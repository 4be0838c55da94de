"""Every impossible setting, in one error, each with the nearest valid values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeloom.config import load, load_layout
from pipeloom.errors import ConfigError, ScheduleError
from resolved import resolve


def problems(path: Path | str | None = None, world_size: int | None = None, **overrides: Any) -> list[str]:
    dotted = {key.replace("__", "."): value for key, value in overrides.items()}
    with pytest.raises(ConfigError) as caught:
        load_layout(path, dotted, world_size=world_size)
    assert caught.value.exit_code == 2
    return caught.value.problems


def test_a_key_outside_its_section(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("steps = 3\nmodel = 4\n")
    found = problems(path)
    assert any("did you mean train.steps?" in problem for problem in found)
    assert any(problem.startswith(f"model = 4 (in {path}): it must be a table") for problem in found)


def test_three_errors_at_once_with_where_they_were_set(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[train]\nstepz = 3\n[optimizer]\nlr = "fast"\n[parallel]\npp = 9\n')
    found = problems(path, train__seq_len=0)
    assert len(found) == 4
    assert found[0] == "train.seq_len = 0: it must be at least 1; nearest: 1"
    assert f"train.stepz = 3 (in {path})" in found[1]
    assert found[2] == f'optimizer.lr = "fast" (in {path}): it must be a number'
    assert "parallel.pp = 9: the model has 8 decoder layers" in found[3]


def test_number_of_workers_that_torchrun_started() -> None:
    found = problems(world_size=3)
    assert "needs 4 workers, but WORLD_SIZE is 3; start 4 workers, or set parallel.pp = 3" in found[0]
    assert load_layout(world_size=4).world_size == 4
    found = problems(world_size=12, parallel__tp=2, parallel__dp=2, parallel__pp=2)
    assert "pp 2 x dp 2 x tp 2 needs 8 workers, but WORLD_SIZE is 12" in found[0]
    assert found[0].endswith("start 8 workers, or set parallel.pp = 3 or parallel.dp = 3 or parallel.tp = 3")


def test_an_axis_that_the_number_of_workers_decides() -> None:
    for axis, others in (("pp", {"dp": 2}), ("dp", {"pp": 4, "tp": 2}), ("tp", {"pp": 2, "dp": 2})):
        overrides = {f"parallel.{axis}": -1, **{f"parallel.{name}": size for name, size in others.items()}}
        overrides |= {"train.global_batch_size": 32, "schedule.name": "1f1b"}
        layout = load_layout("tiny", overrides, world_size=8)
        assert layout.world_size == 8
        assert getattr(layout.config.parallel, axis) == getattr(layout.mesh, axis)
    found = problems("tiny", world_size=9, parallel__dp=-1)
    assert found == [
        "parallel.dp = -1: pp 2 x tp 1 = 2 does not divide the 9 workers of WORLD_SIZE; start 8 or 10 workers"
    ]
    assert "only one axis can be computed" in problems("tiny", world_size=8, parallel__dp=-1, parallel__tp=-1)[0]


def test_a_schedule_that_deadlocks_is_exit_code_3() -> None:
    paper = {"schedule.options.rounds": "paper", "schedule.chunks": 3, "schedule.microbatches": 5}
    with pytest.raises(ScheduleError, match="deadlocks"):
        load_layout(None, paper, {"model.num_hidden_layers": 12})
    with pytest.raises(ConfigError, match=r"train.steps"):
        load_layout(None, paper, {"model.num_hidden_layers": 12, "train.steps": 0})


def test_problems_of_resolve_and_load_are_the_same() -> None:
    with pytest.raises(ConfigError, match="more than there are decoder layers"):
        resolve(load(None, {"parallel.pp": 5}))


def test_more_ranks_than_layers_are_refused_before_the_schedule_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """A V schedule of thousands of ranks takes minutes."""

    def build(*_: object, **__: object) -> None:
        raise AssertionError("the schedule is built")

    monkeypatch.setattr("pipeloom.config.layout.make_schedule", build)
    flags = {"parallel.pp": 4096, "schedule.name": "zbv", "model.num_hidden_layers": 4, "schedule.microbatches": 4}
    with pytest.raises(
        ConfigError, match=r"parallel\.pp = 4096: the model has 4 decoder layers, .* nearest: --parallel\.pp 4,"
    ):
        load_layout(None, flags)
