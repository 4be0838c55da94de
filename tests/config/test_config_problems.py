"""Every impossible setting, in one error, each with the nearest valid values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeloom.config import load, load_layout, resolve
from pipeloom.errors import ConfigError, ScheduleError


def problems(path: Path | str | None = None, world_size: int | None = None, **overrides: Any) -> list[str]:
    dotted = {key.replace("__", "."): value for key, value in overrides.items()}
    with pytest.raises(ConfigError) as caught:
        load_layout(path, dotted, world_size=world_size)
    assert caught.value.exit_code == 2
    return caught.value.problems


def test_misspelt_keys_and_sections() -> None:
    assert problems(train__stepz=3) == ["train.stepz = 3: there is no such key; did you mean 'steps'?"]
    assert "did you mean 'model'?" in problems(modl__hidden_size=3)[0]
    assert "did you mean optimizer.lr?" in problems(train__lr=3)[0]
    assert "no option 'roundz'; did you mean 'rounds'?" in problems(schedule__options__roundz="tail")[0]


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
    assert "18 stages, more than layers; nearest: 18 layers" in found[3]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("train.steps", 1.5, "a whole number"),
        ("train.steps", True, "a whole number"),
        ("train.deterministic", 1, "true or false"),
        ("train.dtype", "float3", "did you mean 'float32'"),
        ("train.device", "gpu", "'auto', 'cpu' or 'cuda'"),
        ("optimizer.lr", float("nan"), "a finite number"),
        ("optimizer.lr", -1.0, "above 0"),
        ("optimizer.betas", [0.9], "needs more values"),
        ("optimizer.betas", [0.9, 1.0], "below 1"),
        ("schedule.transport", "batch", "did you mean 'batched'"),
        ("schedule.name", "", "must not be empty"),
        ("schedule.name", "interleave", "did you mean 'interleaved'"),
        ("schedule.name", "nowhere.csv", "no such file"),
        ("schedule.name", "os:nothing", "nothing"),
        ("parallel.pp", 0, "at least 1"),
        ("parallel.dp", 2, "data parallelism is not there yet"),
        ("parallel.tp", 2, "tensor parallelism is not there yet"),
        ("parallel.sp", 2, "sequence parallelism is not there yet"),
        ("parallel.ep", 2, "expert parallelism is not there yet"),
        ("model.num_attention_heads", 3, "nearest: 2 or 4"),
        ("model.num_attention_heads", 128, "odd width"),
        ("model.num_key_value_heads", 3, "nearest: 2 or 4"),
        ("model.vocab_size", 100, "nearest: 256"),
        ("train.global_batch_size", 8, "9 micro-batches on 1 data-parallel replica need at least 9"),
        ("optimizer.min_lr", 1.0, "must not be above optimizer.lr"),
        ("data.source", "/nowhere/at/all", "no such file or folder"),
        ("data.tokenizer", "words", "'bytes'"),
        ("log.dir", __file__, "it is a file"),
        ("model.num_hidden_layers", 7, "8 stages, more than layers"),
        ("parallel.stages", "Et*3|ttL", "holds 5 blocks"),
        ("debug.fault", "explode", "there is no fault 'explode'"),
        ("debug.fault", "kill:4:0", "there is no rank 4; the schedule has 4 (0..3)"),
        ("debug.fault", "kill:0:160", "there is no step 160; the run has 160"),
        ("debug.fault", "swap-microbatches:0,9", "there is no micro-batch 9"),
        ("debug.fault", "swap-microbatches:1,1", "with itself"),
        ("debug.fault", "raise:1:0F0", "rank 1 does not run 0F0; it holds stages 1, 5"),
        ("debug.fault", "raise:1:zero", "'zero' is not an action"),
        ("debug.fault", "drop-send:1", "drop-send is written drop-send:RANK:N"),
    ],
)
def test_impossible_values(key: str, value: Any, message: str) -> None:
    found = problems(**{key.replace(".", "__"): value})
    assert message in found[0]
    assert found[0].startswith(key)


def test_chunks_for_a_schedule_that_takes_none() -> None:
    found = problems(schedule__name="1f1b", schedule__chunks=2)
    assert "take chunks" in found[0]


def test_number_of_workers_that_torchrun_started() -> None:
    found = problems(world_size=3)
    assert "needs 4 workers, but WORLD_SIZE is 3; start 4 workers, or set parallel.pp = 3" in found[0]
    assert load_layout(world_size=4).world_size == 4


def test_a_schedule_that_deadlocks_is_exit_code_3() -> None:
    paper = {"schedule.options.rounds": "paper", "schedule.chunks": 3, "schedule.microbatches": 5}
    with pytest.raises(ScheduleError, match="deadlocks"):
        load_layout(None, paper, {"model.num_hidden_layers": 12})
    with pytest.raises(ConfigError, match=r"train.steps"):
        load_layout(None, paper, {"model.num_hidden_layers": 12, "train.steps": 0})


def test_problems_of_resolve_and_load_are_the_same() -> None:
    with pytest.raises(ConfigError, match="more than layers"):
        resolve(load(None, {"parallel.pp": 5}))
