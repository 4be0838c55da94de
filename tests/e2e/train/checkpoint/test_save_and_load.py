"""Checkpoints saved on one layout and loaded on another: the same tensors, bit for bit."""

from __future__ import annotations

import contextlib
import itertools
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import pipeloom as pl
from checkpoint_states import BASE, MOE, Run, contents, layout_of
from pipeloom import checkpoint
from pipeloom.config import load_layout
from pipeloom.errors import CheckpointError, UsageError
from pipeloom.runtime import Layer, Pipeline
from pipeloom.train.checkpoint.boxes import Box
from pipeloom.train.checkpoint.folder import verify, write_tensors
from pipeloom.train.checkpoint.manifest import MANIFEST, TensorEntry, read_manifest, to_bytes
from pipeloom.train.checkpoint.run import digests, find_start
from pipeloom.train.checkpoint.save import write_whole
from processes import run_ranks

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16),
    *(torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2),
]


def same(a: Path, b: Path, but: str = "nothing") -> None:
    first, second = contents(a), contents(b)
    assert first.keys() == second.keys()
    for key, value in first.items():
        assert value.dtype == second[key].dtype, key
        if but not in key:
            assert torch.equal(value, second[key]), key


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    tensors = {str(dtype): (torch.arange(21) % 5).view(7, 3).to(dtype) for dtype in DTYPES}
    tensors |= {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 4), "odd": torch.ones(3, dtype=torch.uint8)}
    stored = write_tensors(tmp_path / "a.safetensors", tensors)
    found = safetensors.torch.load_file(tmp_path / "a.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)) if tensor.ndim else True
        assert found[name].shape == tensor.shape
    assert float(found["scalar"]) == 3.5
    assert verify(tmp_path, "a.safetensors", stored) == ""


def saved_and_loaded(rank: int, first: str, second: str, folder: str, changes: dict[str, Any]) -> None:
    """Saves on one layout, loads on another with as many ranks, and saves that."""
    run = Run(layout_of(first, **changes))
    run.steps(2)
    path = checkpoint.save(f"{folder}/first", 2, run.pipeline, run.optimizer, extra={"data": [1, 2.5, "x"]})
    run.pipeline.close()
    other = Run(layout_of(second, **changes))
    loaded = checkpoint.load(f"{folder}/first", other.pipeline, other.optimizer)
    assert (loaded.step, loaded.extra, loaded.path) == (2, {"data": [1, 2.5, "x"]}, path)
    assert other.pipeline.next_step == 2
    checkpoint.save(f"{folder}/second", 2, other.pipeline, other.optimizer)
    other.pipeline.close()


DENSE_2 = ["pp 2", "pp 2, v", "two routes", "tp 2", "vocabulary", "gathers", "zero"]


@pytest.mark.parametrize(("first", "second"), list(itertools.pairwise([*DENSE_2, DENSE_2[0]])))
def test_any_layout_loads_any_others(first: str, second: str, tmp_path: Path) -> None:
    changes = {"model__tie_word_embeddings": first in ("pp 2", "vocabulary")}
    run_ranks(saved_and_loaded, 2, first, second, str(tmp_path), changes)
    same(tmp_path / "first/step-000002", tmp_path / "second/step-000002")


@pytest.mark.parametrize(("first", "second"), [("ep 2", "pp 2"), ("pp 2", "ep 2")])
def test_experts_and_router_biases_move_too(first: str, second: str, tmp_path: Path) -> None:
    changes = {key.replace(".", "__"): value for key, value in MOE.items()}
    run_ranks(saved_and_loaded, 2, first, second, str(tmp_path), changes)
    same(tmp_path / "first/step-000002", tmp_path / "second/step-000002")
    names = read_manifest(tmp_path / "first/step-000002").names("model")
    assert sum(name.endswith("e_score_correction_bias") for name in names) == 4


def test_shares_of_the_vocabulary_are_parts_of_one_weight(tmp_path: Path) -> None:
    run_ranks(saved_and_loaded, 4, "vocabulary, tp 2", "dp 2, tp 2, zero", str(tmp_path), {})
    same(tmp_path / "first/step-000002", tmp_path / "second/step-000002")


def test_bf16_with_masters_in_slices(tmp_path: Path) -> None:
    changes = {"train__dtype": "bfloat16"}
    run_ranks(saved_and_loaded, 4, "dp 2, tp 2, zero", "dp 2, pp 2, zero", str(tmp_path), changes)
    same(tmp_path / "first/step-000002", tmp_path / "second/step-000002")
    masters = [key for key in contents(tmp_path / "first/step-000002") if key.endswith(".master")]
    assert len(masters) > 20
    # each rank has its slices: nothing is written twice, and no rank writes everything
    manifest = read_manifest(tmp_path / "first/step-000002")
    sizes = [stored.size for stored in manifest.files.values() if stored.size > 1000]
    assert len(sizes) == 4
    assert max(sizes) < 0.5 * sum(sizes)


def trained(**changes: Any) -> Run:
    run = Run(layout_of("one", **changes))
    run.steps(1)
    return run


def test_asynchronous_saving_takes_the_state_before_it_returns(tmp_path: Path) -> None:
    run = trained()
    before = {name: value.detach().clone() for name, value in run.pipeline.state_dict().items()}
    saver = checkpoint.Saver(tmp_path, run.pipeline, run.optimizer, asynchronous=True)
    for step in (1, 2):  # the second save uses the first one's memory
        path = saver.save(step)
        with torch.no_grad():
            for parameter in run.pipeline.parameters():
                parameter.fill_(7.0)
        assert saver.wait() == path
    first, second = contents(tmp_path / "step-000001"), contents(tmp_path / "step-000002")
    for name, value in before.items():
        assert torch.equal(first[f"model.{name}"], value)
        if value.requires_grad or name in dict(run.pipeline.named_parameters()):
            assert bool((second[f"model.{name}"] == 7.0).all())


def test_the_newest_stay_and_every_nth(tmp_path: Path) -> None:
    run = trained()
    (tmp_path / ".step-000009.partial").mkdir()
    saver = checkpoint.Saver(tmp_path, run.pipeline, run.optimizer, keep=2, keep_every=4)
    for step in range(1, 10):
        saver.save(step)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-00000{n}" for n in (4, 8, 9)]
    saver.save(9, {"again": True})  # replaces it
    assert checkpoint.load(tmp_path, run.pipeline, run.optimizer).extra == {"again": True}


def test_a_later_damaged_checkpoint_does_not_push_out_the_new_one(tmp_path: Path) -> None:
    run = trained()
    saver = checkpoint.Saver(tmp_path, run.pipeline, keep=1)
    later = saver.save(9)
    (later / "rank-00000.safetensors").write_bytes(b"")
    saver.save(4)
    saver.save(6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000006", "step-000009"]


def test_a_checkpoint_about_to_be_replaced_survives_the_end_of_its_process(tmp_path: Path) -> None:
    run = trained()
    saver = checkpoint.Saver(tmp_path, run.pipeline, keep=2)
    path = saver.save(2, {"first": True})
    path.rename(tmp_path / ".step-000002.replaced")  # as far as `publish` came
    saver.save(3)
    assert checkpoint.load(tmp_path / "step-000002", run.pipeline).extra == {"first": True}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002", "step-000003"]


def test_a_state_that_was_never_made_loads_and_a_partial_one_does_not(tmp_path: Path) -> None:
    fresh = Run(layout_of("one"))
    path = checkpoint.save(tmp_path, 0, fresh.pipeline, fresh.optimizer)
    assert read_manifest(path).names("optimizer") == set()
    run = trained()
    checkpoint.load(path, run.pipeline, run.optimizer)
    assert run.optimizer.optimizers[0].state == {}
    run = trained()
    master = run.optimizer.masters.all[0]
    del run.optimizer.optimizers[0].state[master.tensor]["exp_avg_sq"]
    name = master.name
    broken = checkpoint.save(tmp_path, 1, run.pipeline, run.optimizer)
    other = Run(layout_of("one"))
    with pytest.raises(CheckpointError, match=rf"{name}.*expected step, exp_avg and exp_avg_sq.*found exp_avg, step"):
        checkpoint.load(broken, other.pipeline, other.optimizer)
    run = trained()
    state = run.optimizer.optimizers[0].state[run.optimizer.masters.all[0].tensor]
    state["max_exp_avg_sq"] = state["exp_avg_sq"].clone()  # of another variant of the optimizer
    foreign = checkpoint.save(tmp_path, 2, run.pipeline, run.optimizer)
    with pytest.raises(CheckpointError, match="or none of them; found exp_avg, exp_avg_sq, max_exp_avg_sq, step"):
        checkpoint.load(foreign, other.pipeline, other.optimizer)


def test_parameters_that_have_made_different_numbers_of_steps(tmp_path: Path) -> None:
    """One without a gradient in the first step: its moments are younger, and stay so on any layout."""
    run = Run(layout_of("one"))
    names = [name for name, _ in run.pipeline.named_parameters()]
    for step in range(3):
        for at, (_, parameter) in enumerate(run.pipeline.named_parameters()):
            parameter.grad = None if step == 0 and at % 2 else torch.full_like(parameter, 0.5 + step)
        run.optimizer.step(None, 1e-2)
    path = checkpoint.save(tmp_path, 3, run.pipeline, run.optimizer)
    assert {float(contents(path)[f"optimizer.{name}.step"]) for name in names} == {2.0, 3.0}
    results = run_ranks(load_and_save, 2, "zero", str(tmp_path))
    assert results == [True, True]
    same(path, tmp_path / "again/step-000003")


def load_and_save(rank: int, name: str, folder: str) -> bool:
    run = Run(layout_of(name))
    checkpoint.load(folder, run.pipeline, run.optimizer)
    checkpoint.save(f"{folder}/again", 3, run.pipeline, run.optimizer)
    return True


def test_another_model_is_refused(tmp_path: Path) -> None:
    run = trained()
    path = checkpoint.save(tmp_path, 1, run.pipeline, run.optimizer)
    for change, words in {
        "model__intermediate_size": r"mlp.*expected shape \[96, 32\], found \[64, 32\]",
        "model__num_hidden_layers": "holds no 'model.layers.4",
    }.items():
        other = Run(layout_of("one", **{change: 96 if "size" in change else 6}))
        before = [p.detach().clone() for p in other.pipeline.parameters()]
        with pytest.raises(CheckpointError, match=words):
            checkpoint.load(path, other.pipeline, other.optimizer)
        assert all(torch.equal(a, b) for a, b in zip(before, other.pipeline.parameters(), strict=True))
    smaller = Run(layout_of("one", model__num_hidden_layers=2))
    with pytest.raises(CheckpointError, match="more weights, which the model does not have"):
        checkpoint.load(path, smaller.pipeline, smaller.optimizer)


def own_pipeline() -> Pipeline:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)]
    with torch.device("meta"):
        layers = [type(layer)(*((4, 4) if isinstance(layer, nn.Linear) else (4,))) for layer in layers]
    return Pipeline(layers, pl.schedules.gpipe(ranks=1, microbatches=2), loss=nn.functional.mse_loss)


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Adagrad", "NAdam"])
def test_torchs_optimizers(kind: str, tmp_path: Path) -> None:
    make = {
        "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
        "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
        "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    }[kind]
    x, y = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(1))

    def steps(pipeline: Pipeline, optimizer: torch.optim.Optimizer, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            losses.append(float(pipeline.step(x, y)))
            optimizer.step()
            optimizer.zero_grad()
        return losses

    straight = own_pipeline()
    optimizer = make(straight.parameters())
    steps(straight, optimizer, 2)
    path = checkpoint.save(tmp_path, 2, straight, optimizer, extra={"lr": 0.1})
    wanted = steps(straight, optimizer, 3)
    again = own_pipeline()
    other = make(again.parameters())
    steps(again, other, 1)
    checkpoint.load(path, again, other)
    assert steps(again, other, 3) == wanted
    for name, value in straight.state_dict().items():  # running statistics are among them
        assert torch.equal(value, again.state_dict()[name]), name


def damages(path: Path) -> dict[str, Any]:
    manifest = path / MANIFEST
    file = path / "rank-00000.safetensors"

    def change(target: Path, at: int, by: int = 1) -> None:
        data = bytearray(target.read_bytes())
        data[at] ^= by
        target.write_bytes(data)

    return {
        "a flipped bit in a tensor": lambda: change(file, -5),
        "a flipped bit in a header": lambda: change(file, 40),
        "a shorter file": lambda: file.write_bytes(file.read_bytes()[:-8]),
        "a longer file": lambda: file.write_bytes(file.read_bytes() + b"\0"),
        "no file": file.unlink,
        "no manifest": manifest.unlink,
        "no extra": (path / "extra.json").unlink,
        "another step": lambda: manifest.write_text(manifest.read_text().replace('"step": 1', '"step": 2')),
        "half a manifest": lambda: manifest.write_text(manifest.read_text()[:1000]),
        "an empty manifest": lambda: manifest.write_text("{}"),
        "a directory in the place of a file": lambda: (file.unlink(), file.mkdir()),
        "another format": lambda: manifest.write_text(manifest.read_text().replace("checkpoint/1", "checkpoint/9")),
    }


def test_damages_are_found(tmp_path: Path) -> None:
    run = trained()
    path = checkpoint.save(tmp_path / "good", 1, run.pipeline, run.optimizer, extra={"a": 1})
    for number, words in enumerate(damages(path)):
        copy = tmp_path / f"bad{number}" / path.name
        shutil.copytree(path, copy)
        damages(copy)[words]()
        with pytest.raises(CheckpointError) as error:
            checkpoint.load(copy, run.pipeline, run.optimizer)
        assert "expected" in str(error.value) or "no manifest" in str(error.value) or "read" in str(error.value), words
        assert "\n" not in str(error.value)


def test_a_manifest_that_leads_out_of_its_directory_is_refused(tmp_path: Path) -> None:
    run = trained()
    path = checkpoint.save(tmp_path, 1, run.pipeline, run.optimizer)
    manifest = read_manifest(path)
    files = {"../x": manifest.files["rank-00000.safetensors"]}
    (path / MANIFEST).write_bytes(to_bytes(replace(manifest, files=files)))
    with pytest.raises(CheckpointError, match="is not a file of a checkpoint"):
        read_manifest(path)


def test_a_manifest_that_promises_more_than_its_files_hold_is_refused(tmp_path: Path) -> None:
    run = trained()
    path = checkpoint.save(tmp_path, 1, run.pipeline, run.optimizer)
    manifest = read_manifest(path)
    key = next(key for key, entry in manifest.tensors.items() if len(entry.shape) == 2)
    stored = manifest.tensors[key].boxes[0]
    half = Box((0,), (2**40,)), Box((2**40,), (2**40,))
    huge = TensorEntry("F32", (2**41,), tuple(replace(stored, offset=box.offset, shape=box.shape) for box in half))
    (path / MANIFEST).write_bytes(to_bytes(replace(manifest, tensors={**manifest.tensors, key: huge})))
    with pytest.raises(CheckpointError, match=r"bytes of tensors in 'rank-00000.safetensors', found"):
        read_manifest(path)


@pytest.mark.parametrize(
    ("change", "noted"),
    [
        ({"parallel.dp": 2}, True),
        ({"parallel.dp": 2, "schedule.microbatches": 1}, False),  # the same sequences in each
        ({"parallel.dp": 2, "model.aux_loss_coef": 0.0}, False),
        ({"parallel.dp": 2, "model.aux_loss_coef": 0.0, "model.capacity_factor": 1.0}, True),
    ],
)
def test_experts_in_other_micro_batches_are_noted(change: dict[str, Any], noted: bool, tmp_path: Path) -> None:
    changes = {key.replace(".", "__"): value for key, value in MOE.items()}
    run = Run(layout_of("one", **changes))
    facts = digests(run.config, "text")
    extra = {**facts, "config": run.config.model_dump(mode="json")}
    path = checkpoint.save(tmp_path, 1, run.pipeline, extra=extra)
    flags = {**BASE, **MOE, **change, "checkpoint.resume": str(path), "train.profile_from": 2}
    context: Any = SimpleNamespace(rank=0, world_size=1, waiting=lambda *_: contextlib.nullcontext())
    notes = find_start(load_layout("tiny", flags).config, facts, context).notes
    assert any("a micro-batch has 2 instead of 4 sequences" in note for note in notes) == noted
    assert not any("profile" in note for note in notes)


class Refusing(torch.optim.AdamW):
    """Raises when it is asked for its state, once it refuses."""

    refuses = False

    def __getattribute__(self, name: str) -> Any:
        if name == "state" and object.__getattribute__(self, "refuses"):
            raise ZeroDivisionError("no state")
        return super().__getattribute__(name)


def refused_by_one(rank: int, folder: str) -> list[str]:
    """What two saves say on this rank: in the first one the last rank's optimizer raises."""
    layers = [Layer(f"l{i}", lambda: nn.Linear(3, 3)) for i in range(2)]
    pipeline = Pipeline(layers, pl.schedules.gpipe(2, 2), loss=nn.functional.mse_loss)
    adam = Refusing(pipeline.parameters())
    pipeline.step(torch.ones(2, 3), torch.zeros(2, 3))
    adam.step()
    said = []
    for refuses in (True, False):
        adam.refuses = refuses and rank == 1
        try:
            said.append(checkpoint.save(folder, 1, pipeline, adam).name)
        except (CheckpointError, ZeroDivisionError) as error:
            said.append(f"{type(error).__name__}: {error}")
    adam.refuses = False
    pipeline.close()
    return said


def test_state_that_one_rank_cannot_give_ends_the_save_on_all(tmp_path: Path) -> None:
    first, second = run_ranks(refused_by_one, 2, str(tmp_path))
    words = "CheckpointError: the checkpoint was not written: rank 1: ZeroDivisionError: no state"
    assert first == [words, "step-000001"]
    assert second == ["ZeroDivisionError: no state", "step-000001"]


@pytest.mark.parametrize("extra", [object(), {"a": object()}, {"a": float("nan")}, [1]])
def test_extra_that_is_no_json_is_refused_before_anything_is_written(extra: Any, tmp_path: Path) -> None:
    pipeline = Pipeline([nn.Linear(3, 3)], pl.schedules.gpipe(1, 2), loss=nn.functional.mse_loss)
    with pytest.raises(UsageError, match=r"extra is .*; it must be a dict that JSON can hold"):
        checkpoint.save(tmp_path / "run", 1, pipeline, extra=extra)
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_that_another_process_writes_stays(tmp_path: Path) -> None:
    """Of two imports into one folder, the second must not remove what the first has written so far."""
    (tmp_path / ".step-000000.partial").mkdir()
    (tmp_path / ".step-000000.partial" / "weights").write_text("half")
    with pytest.raises(CheckpointError, match=r"\.step-000000\.partial: it exists, so another process is writing this"):
        write_whole(tmp_path, 0, iter([{"weight": torch.ones(2)}]), {})
    assert (tmp_path / ".step-000000.partial" / "weights").read_text() == "half"
