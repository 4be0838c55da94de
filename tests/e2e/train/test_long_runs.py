"""What a long run measures and writes beside its steps: evaluation, norms, TensorBoard, W&B, where settings are from."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import sys
import tomllib
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import pipeloom as pl
from optimizer_states import optimizer_states
from pipeloom.config import load_layout
from pipeloom.config.settings import to_toml
from pipeloom.errors import ConfigError
from pipeloom.measure.build import build_pipeline
from pipeloom.parallel.mesh import Mesh
from pipeloom.train.data.batches import Batches, evenly_spaced
from pipeloom.train.loop import Trainer
from pipeloom.train.optimizer import Optimizer
from pipeloom.train.report.report import Report
from pipeloom.train.step import LayerNorms, layer_norms
from pipeloom.train.workers.preflight import READ, SECRET
from processes import run_ranks
from run_notes import Notes, context

CPU = torch.device("cpu")
TEXT = torch.randint(0, 256, (4000,), generator=torch.Generator().manual_seed(3), dtype=torch.uint8)
ONE = {"parallel.pp": 1, "schedule.name": "1f1b", "schedule.microbatches": 2}


# -- evaluation --------------------------------------------------------------------------------------------------------------


def trained(**changes: Any) -> tuple[Notes, dict[str, Tensor]]:
    """What six steps told, and the weights, buffers and optimizer state after them."""
    keys = {key.replace("__", "."): value for key, value in changes.items()}
    layout = load_layout("tiny", {**ONE, "train.steps": 6, "log.every": 3, **keys})
    pipeline = build_pipeline(layout, CPU)
    notes = Notes()
    trainer = Trainer(layout.config, pipeline, context(), notes)  # type: ignore[arg-type]
    train = layout.config.train
    trainer.train(TEXT, evenly_spaced(TEXT[:1500], train.global_batch_size, train.seq_len, train.eval_batches))
    state = {name: value.clone() for name, value in pipeline.state_dict().items()}
    for name, kinds in optimizer_states(trainer.optimizer).items():
        state |= {f"{name} {kind}": value.clone() for kind, value in kinds.items() if isinstance(value, Tensor)}
    return notes, state


MOE = {"model__num_experts": 4, "model__router": "sigmoid", "model__num_experts_per_tok": 2}


@pytest.mark.parametrize("barrier", [True, False])
def test_evaluation_changes_no_bit_of_training(barrier: bool) -> None:
    keys = {**MOE, "model__dropout": 0.2, "optimizer__barrier": barrier}
    quiet, want = trained(**keys)
    noisy, found = trained(**keys, train__eval_every=2, train__eval_batches=3)
    assert [event["step"] for event in noisy.of("evaluation")] == [2, 4]
    assert quiet.of("evaluation") == []
    assert noisy.of("step") == quiet.of("step")
    assert found.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(found[name], value), name


# -- norms -------------------------------------------------------------------------------------------------------------------

LAYOUTS: dict[str, dict[str, Any]] = {
    "pp 2, dp 2": {"parallel.pp": 2, "parallel.dp": 2},
    "dp 2, tp 2, zero": {"parallel.dp": 2, "parallel.tp": 2, "parallel.sp": True, "optimizer.zero1": True},
    "two routes": {"parallel.pp": 4, "schedule.name": "dualpipe", "schedule.microbatches": 8},
}
FINE = {"train.dtype": "float64", "train.global_batch_size": 8, "model.tie_word_embeddings": True}


def norms_on(keys: dict[str, Any], by: str) -> LayerNorms:
    layout = load_layout("tiny", {**ONE, **FINE, **keys})
    mesh = Mesh.of(layout.mesh)
    assert mesh is not None
    pipeline = build_pipeline(layout, CPU, mesh)
    optimizer = Optimizer.of(pipeline, layout.config)
    batch = Batches(TEXT, layout.config, layout.mesh.dp).of_step(0).part(mesh.place.dp, layout.mesh.dp)
    pipeline.step(batch.tokens, batch.targets)
    norms = layer_norms(pipeline, optimizer, by)
    pipeline.close()
    return norms


def norms_of_ranks(rank: int) -> dict[str, LayerNorms]:
    return {name: norms_on(keys, "layer") for name, keys in LAYOUTS.items()}


def plain_norms() -> LayerNorms:
    """Of one process, from torch's own gradients and weights."""
    layout = load_layout("tiny", {**ONE, **FINE})
    pipeline = build_pipeline(layout, CPU)
    batch = Batches(TEXT, layout.config, 1).of_step(0)
    pipeline.step(batch.tokens, batch.targets)
    squares: dict[str, list[float]] = {}
    for name, parameter in pipeline.named_parameters():
        layer = next(layer for layer in pipeline.modules if name.startswith(f"{layer}."))
        sums = squares.setdefault(layer, [0.0, 0.0])
        assert parameter.grad is not None
        sums[0] += float(parameter.grad.square().sum())
        sums[1] += float(parameter.detach().square().sum())
    gradient, parameters = ({name: math.sqrt(sums[at]) for name, sums in squares.items()} for at in range(2))
    return LayerNorms(gradient, parameters)


def test_norms_of_layers_are_those_of_one_process() -> None:
    want = plain_norms()
    assert len(want.gradient) == 6
    for found in run_ranks(norms_of_ranks, 4):
        for name, norms in found.items():
            assert norms.gradient == pytest.approx(want.gradient, rel=1e-9), name
            assert norms.parameter == pytest.approx(want.parameter, rel=1e-9), name


def test_norms_are_logged_with_each_line() -> None:
    notes, _ = trained(log__norms="parameter")
    assert [event["step"] for event in notes.of("norms")] == [3, 6]
    event = notes.of("norms")[0]
    assert len(event["gradient"]) == len(event["parameter"]) == 39
    step = next(figures for figures in notes.of("step") if figures["step"] == 3)
    assert math.hypot(*event["gradient"].values()) == pytest.approx(step["grad_norm"], rel=1e-6)
    figures = next(
        figures for at, figures in notes.given if at == 3 and any("gradient_norm/" in key for key in figures)
    )
    assert figures["parameter_norm/head.norm.weight"] == event["parameter"]["head.norm.weight"]
    assert trained()[0].of("norms") == []


# -- writers -----------------------------------------------------------------------------------------------------------------


def test_tensorboard_has_the_figures(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    layout = load_layout("tiny", {"log.dir": str(tmp_path), "log.tensorboard": True})
    with Report(layout.config, origins=layout.origins) as report:
        for step in (1, 2):
            report.figures(step, {"loss": 5.0 - step, "mfu": None, "grad_norm": math.nan, "step": step})
    (folder,) = tmp_path.iterdir()
    events = event_accumulator.EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["loss"]
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 4.0), (2, 3.0)]


class FakeWandb(types.ModuleType):
    """`wandb` as far as a run needs it."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.__spec__ = importlib.util.spec_from_loader("wandb", None)
        self.calls: list[tuple[str, Any]] = []
        self.fails = False

    def init(self, **keys: Any) -> FakeWandb:
        self.calls.append(("init", keys))
        return self

    def log(self, figures: dict[str, float], step: int) -> None:
        if self.fails:
            raise RuntimeError("no room")
        self.calls.append(("log", (step, figures)))

    def finish(self) -> None:
        self.calls.append(("finish", None))


def test_wandb_is_offline_and_has_the_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    layout = load_layout("tiny", {"log.dir": str(tmp_path), "log.wandb": "loom"})
    with Report(layout.config, origins=layout.origins) as report:
        report.figures(3, {"loss": 2.0, "bubble_rate": 0.25})
        fake.fails = True
        report.figures(4, {"loss": 1.0})
        fake.fails = False
        report.figures(5, {"loss": 1.0})
    (folder,) = tmp_path.iterdir()
    (kind, keys), *rest = fake.calls
    assert kind == "init"
    assert (keys["project"], keys["mode"], keys["name"], keys["dir"]) == ("loom", "offline", folder.name, str(folder))
    assert keys["config"]["optimizer"]["name"] == "adamw"
    assert rest == [("log", (3, {"loss": 2.0, "bubble_rate": 0.25}))]
    assert "WandbFigures: RuntimeError: no room; training continues without it" in capsys.readouterr().out
    with Report(layout.config):
        pass
    assert fake.calls[-1] == ("finish", None)


@pytest.mark.parametrize(("key", "value", "package"), [("tensorboard", True, "tensorboard"), ("wandb", "p", "wandb")])
def test_a_missing_package_is_one_sentence(key: str, value: Any, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find(name))
    with pytest.raises(ConfigError, match=rf"^log\.{key} = .*: the package {package} is not installed: pip install"):
        load_layout("tiny", {f"log.{key}": value})


# -- where settings are from ---------------------------------------------------------------------------------------------------


def test_the_runs_configuration_says_where_each_value_is_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "off\nline")
    monkeypatch.setenv("PIPELOOM_SECRET", "hush-hush")
    own = tmp_path / "own.toml"
    own.write_text('extends = "tiny"\n[optimizer]\nlr = 0.5\n[parallel]\ndp = -1\n[schedule]\nmicrobatches = 2\n')
    layout = load_layout(own, {"train.steps": 9, "log.dir": str(tmp_path / "runs")}, world_size=4)
    with Report(layout.config, origins=layout.origins):
        pass
    (folder,) = (tmp_path / "runs").iterdir()
    text = (folder / "config.toml").read_text()
    assert text.partition("# environment of rank 0:\n")[2].count("WANDB_MODE = 'off") == 1
    assert "#   PIPELOOM_SECRET: set\n" in text
    assert "hush" not in text
    lines = {line.partition(" = ")[0]: line for line in text.splitlines() if " = " in line and line[0] != "#"}
    assert lines["lr"] == f"lr = 0.5  # {own}"
    assert lines["steps"] == "steps = 9  # --train.steps"
    assert lines["dp"].endswith("  # environment (WORLD_SIZE)")
    assert lines["rms_norm_eps"].endswith("  # default")
    assert lines["hidden_size"].endswith("  # tiny")
    assert all("  # " in line for line in lines.values())
    assert tomllib.loads(text) == tomllib.loads(to_toml(layout.config))
    json.dumps(dict(layout.origins))


def test_every_variable_that_is_read_is_recorded_or_internal() -> None:
    source = Path(pl.__file__).parent
    read = {
        name
        for path in source.rglob("*.py")
        for name in re.findall(r"""os\.environ(?:\.get|\.setdefault|\.pop)?[(\[]"([A-Z_]+)\"""", path.read_text())
    }
    # who a worker is, or who else would start some; how a terminal looks; how much the profiler prints
    internal = {
        "RANK",
        "GROUP_RANK",
        "TORCHELASTIC_RUN_ID",
        "SLURM_NTASKS",
        "NO_COLOR",
        "TERM",
        "COLORTERM",
        "KINETO_LOG_LEVEL",
    }
    assert "WANDB_MODE" in read
    assert read - {*READ, *SECRET} <= internal
