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
    assert "parallel.pp = 9: the model has 8 decoder layers" in found[3]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("train.steps", 1.5, "a whole number"),
        ("train.steps", True, "a whole number"),
        ("train.deterministic", 1, "true or false"),
        ("train.timeout", 0.001, "a number of seconds of at least 1, or 'auto'"),
        ("train.dtype", "float3", "did you mean 'float32'"),
        ("train.device", "gpu", "'auto', 'cpu' or 'cuda'"),
        ("train.threads", True, "a whole number from 1 to 1,024, or 'auto'"),
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
        ("parallel.dp", -2, "at least 1, or -1"),
        ("parallel.dp", -1, "give a number"),
        ("parallel.tp", 3, "must divide model.num_attention_heads 4 and model.num_key_value_heads 4 and model"),
        ("parallel.tp", 3, "nearest: 2 or 4"),
        ("parallel.tp", 16, "nearest: 4"),
        ("parallel.sp", 2, "true or false"),
        ("parallel.sp", True, "set parallel.tp to 2 or more"),
        ("parallel.order", "dp-tp-xp-ep", "it must name tp, ep, dp and pp once each; nearest: dp-tp-ep-pp"),
        ("schedule.receive_depth", 0, "at least 1"),
        ("schedule.shapes", "every", "'once' or 'each'"),
        ("parallel.ep", 2, "must divide parallel.dp 1; nearest: 1"),
        (
            "schedule.transforms",
            ["defer-last-stage-weights=10"],
            "a step has 9 micro-batches: use 1 to 9, or 0 for all",
        ),
        ("schedule.transforms", ["unpiar"], "there is no transform 'unpiar'; did you mean 'unpair'"),
        ("schedule.transforms", 2, "it must be a list of transforms"),
        ("train.recompute", "all", "'full'"),
        ("train.recompute", [0, 8], "there is no block 8; the model has 8 (0..7)"),
        ("train.recompute", [-1], "blocks counted from 0"),
        ("train.label_smoothing", 1.0, "below 1"),
        ("model.dropout", 1.0, "below 1"),
        ("optimizer.lr_rule", "root", "'sqrt'"),
        ("data.sampling", "shuffle", "'shuffle-then-split'"),
        ("model.num_attention_heads", 3, "nearest: 2 or 4"),
        ("model.num_attention_heads", 128, "into heads of one even width; nearest: 64"),
        ("model.head_dim", 7, "nearest: 6 or 8"),
        ("model.rms_norm_eps", 0.0, "must be above 0"),
        ("model.num_key_value_heads", 3, "nearest: 2 or 4"),
        ("model.vocab_size", 100, "nearest: 256"),
        ("train.global_batch_size", 8, "9 micro-batches on 1 data-parallel replica need at least 9"),
        ("optimizer.min_lr", 1.0, "must not be above optimizer.lr"),
        ("data.source", "/nowhere/at/all", "no such file or folder"),
        ("data.tokenizer", "words", "there is no such file or folder"),
        ("log.dir", __file__, "it is a file"),
        ("model.num_hidden_layers", 7, "8 stages, more than there are decoder layers"),
        ("parallel.stages", "Et*3|ttL", "holds 5 blocks"),
        ("debug.fault", "explode", "unknown fault 'explode'"),
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
    found = problems(world_size=12, parallel__tp=2, parallel__dp=2, parallel__pp=2)
    assert "pp 2 x dp 2 x tp 2 needs 8 workers, but WORLD_SIZE is 12" in found[0]
    assert found[0].endswith("start 8 workers, or set parallel.pp = 3 or parallel.dp = 3 or parallel.tp = 3")


def test_a_batch_that_the_replicas_cannot_share() -> None:
    found = problems(parallel__dp=4)
    assert "9 micro-batches on 4 data-parallel replicas need at least 36 sequences" in found[0]
    assert "parallel.dp 3 must divide it; nearest: 30 or 33" in problems(parallel__dp=3)[0]


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
        ConfigError, match=r"parallel\.pp = 4096: the model has 4 decoder layers, .* nearest: parallel\.pp = 4,"
    ):
        load_layout(None, flags)
