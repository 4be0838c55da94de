"""AdamW, SGD and Muon: torch's own steps on one process, and the same steps on every layout, resumed or not."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from checkpoint_states import MOE, Run, contents, layout_of
from pipeloom import checkpoint
from pipeloom.config import load
from pipeloom.config.sections import ModelSection, OptimizerSection
from pipeloom.errors import CheckpointError, ConfigError
from pipeloom.runtime import LocalPipeline
from pipeloom.schedule.families import build as build_schedule
from pipeloom.train.muon import direction_of, fused_in, orthogonalized, scale_of
from pipeloom.train.optimizer import Optimizer, role_of
from processes import run_ranks

RATE, STEPS = 0.02, 6
SHAPES = {
    "embed.weight": (9, 6),
    "layers.0.up.weight": (8, 6),
    "layers.0.down.weight": (6, 8),
    "layers.0.norm.weight": (6,),
    "layers.0.up.bias": (8,),
    "head.weight": (9, 6),
}
MATRICES = ("layers.0.up.weight", "layers.0.down.weight")
VECTORS = ("layers.0.norm.weight", "layers.0.up.bias")


def options(**changes: Any) -> OptimizerSection:
    return load("tiny", {f"optimizer.{key}": value for key, value in changes.items()}).optimizer


def drawn(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def parameters() -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(value) for name, value in drawn(100).items()}


def stepped(step: Callable[[], object], held: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    for number in range(STEPS):
        for name, gradient in drawn(number).items():
            held[name].grad = gradient
        step()
    return {name: value.detach() for name, value in held.items()}


def ours(**changes: Any) -> dict[str, Tensor]:
    held = parameters()
    optimizer = Optimizer(list(held.items()), options(**changes))
    return stepped(lambda: optimizer.step(None, RATE), held)


def groups(held: dict[str, nn.Parameter], decays: dict[str, float]) -> list[dict[str, Any]]:
    return [{"params": [held[name]], "weight_decay": decay} for name, decay in decays.items()]


DECAYS = {name: 0.0 if name in VECTORS else 0.3 for name in SHAPES}


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_sgd_is_torchs(momentum: float, nesterov: bool) -> None:
    held = parameters()
    theirs = torch.optim.SGD(groups(held, DECAYS), lr=RATE, momentum=momentum, nesterov=nesterov)
    want = stepped(theirs.step, held)
    found = ours(name="sgd", weight_decay=0.3, momentum=momentum, nesterov=nesterov)
    for name, value in want.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7)


def test_adamw_is_torchs_with_a_decay_for_each_group() -> None:
    held = parameters()
    decays = {name: 0.05 if name in VECTORS else 0.3 if name in MATRICES else 0.7 for name in SHAPES}
    theirs = torch.optim.AdamW(groups(held, decays), lr=RATE, betas=(0.8, 0.9))
    want = stepped(theirs.step, held)
    found = ours(weight_decay=0.3, embedding_decay=0.7, vector_decay=0.05, betas=[0.8, 0.9])
    for name, value in want.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rule", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_is_torchs_and_adamw_steps_the_rest(rule: str, nesterov: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's iterates in bf16 whatever the weights are; here they are fp32, and so is the arithmetic."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    held = parameters()
    matrices = {name: held[name] for name in MATRICES}
    muon = torch.optim.Muon(
        list(matrices.values()), lr=RATE, weight_decay=0.3, momentum=0.9, nesterov=nesterov, adjust_lr_fn=rule
    )
    rest = {name: decay for name, decay in DECAYS.items() if name not in MATRICES}
    adam = torch.optim.AdamW(groups(held, rest), lr=RATE, betas=(0.9, 0.95))
    want = stepped(lambda: (muon.step(), adam.step()), held)
    found = ours(name="muon", weight_decay=0.3, momentum=0.9, nesterov=nesterov, adjust_lr_fn=rule)
    for name, value in want.items():
        torch.testing.assert_close(found[name], value, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("shape", [(12, 20), (20, 12), (1, 7)])
def test_matrices_are_orthogonalised_as_torch_does(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    parameter = nn.Parameter(torch.zeros(shape))
    parameter.grad = matrix
    torch.optim.Muon([parameter], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False).step()
    want = -parameter.detach()
    found = orthogonalized(matrix, torch.bfloat16) * scale_of(shape, "original")
    torch.testing.assert_close(found.float(), want, rtol=1e-2, atol=0)
    values = torch.linalg.svdvals(orthogonalized(matrix, torch.float64))
    assert float(values.min()) > 0.6
    assert float(values.max()) < 1.3


def test_roles_follow_from_names_and_dimensions() -> None:
    assert role_of("model.layers.3.mlp.up_proj.weight", 2) == "matrix"
    assert role_of("model.layers.3.mlp.experts.up_proj.weight", 3) == "matrix"
    assert role_of("model.layers.3.mlp.experts.gate_up_proj_bias", 2) == "vector"
    assert role_of("model.layers.3.input_layernorm.weight", 1) == "vector"
    assert role_of("model.embed_tokens.weight", 2) == role_of("head.lm_head.weight", 2) == "embedding"


def sizes(**changes: Any) -> ModelSection:
    return load("tiny", {f"model.{key}": value for key, value in changes.items()}).model


@pytest.mark.parametrize(
    ("name", "shape", "parts", "dim"),
    [
        ("h.0.attn.c_attn.weight", (32, 64), [(0, 32), (32, 48), (48, 64)], 1),
        ("layers.0.self_attn.qkv_proj.weight", (64, 32), [(0, 32), (32, 48), (48, 64)], 0),
        ("layers.0.mlp.gate_up_proj.weight", (128, 32), [(0, 64), (64, 128)], 0),
        ("layers.0.mlp.experts.gate_up_proj", (4, 32, 128), [(0, 64), (64, 128)], 2),
    ],
)
def test_fused_projections_are_stepped_one_by_one(
    name: str, shape: tuple[int, ...], parts: list[tuple[int, int]], dim: int
) -> None:
    """4 query heads and 2 key and value heads of width 8."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    fused = fused_in(name, shape, sizes())
    found = direction_of(weight, fused, "original", torch.float32)
    for start, stop in parts:
        part = weight.narrow(dim, start, stop - start)
        want = direction_of(part, None, "original", torch.float32)
        torch.testing.assert_close(found.narrow(dim, start, stop - start), want)
    assert not torch.allclose(found, direction_of(weight, None, "original", torch.float32), atol=1e-2)


def test_projections_that_are_fused_head_by_head() -> None:
    fused = fused_in("layers.0.attention.query_key_value.weight", (64, 32), sizes())
    assert fused is not None
    # of each key and value head: 2 query heads, its key, its value
    heads = [sorted({int(row) // 8 for row in part}) for part in fused.indices]
    assert heads == [[0, 1, 4, 5], [2, 6], [3, 7]]
    assert fused_in("layers.0.self_attn.q_proj.weight", (32, 32), sizes()) is None
    assert fused_in("layers.0.self_attn.qkv_proj.weight", (64, 32), None) is None


# float64: rounding turns over neither a choice of experts nor AdamW's step of a gradient near 0
FINE = {"train__dtype": "float64"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "muon": ("dp 2, tp 2, zero", {"optimizer__name": "muon"}),
    "muon, experts": (
        "dp 2, tp 2, zero",
        {"optimizer__name": "muon", "parallel__ep": 2, **{key.replace(".", "__"): value for key, value in MOE.items()}},
    ),
    "muon, pp": ("pp 2", {"optimizer__name": "muon", "parallel__dp": 2}),
    "sgd": ("dp 2, tp 2, zero", {"optimizer__name": "sgd", "optimizer__embedding_decay": 0.5}),
}


def one_process(name: str) -> dict[str, Any]:
    """The same micro-batches, which the losses of routers depend on."""
    changes = {key: value for key, value in CASES[name][1].items() if not key.startswith("parallel")}
    return {**changes, "schedule__microbatches": 4}


def on_four_ranks(rank: int, folder: str) -> dict[str, list[float]]:
    """The losses after resuming one process's checkpoint on each layout, whose own steps are saved too."""
    losses = {}
    for name, (layout, changes) in CASES.items():
        fresh = Run(layout_of(layout, **FINE, **changes))
        fresh.steps(2)
        checkpoint.save(f"{folder}/{name}/fresh", 2, fresh.pipeline, fresh.optimizer)
        fresh.pipeline.close()
        resumed = Run(layout_of(layout, **FINE, **changes))
        checkpoint.load(f"{folder}/{name}/one/step-000002", resumed.pipeline, resumed.optimizer)
        losses[name] = resumed.steps(2)
        checkpoint.save(f"{folder}/{name}/resumed", 4, resumed.pipeline, resumed.optimizer)
        resumed.pipeline.close()
    return losses


def test_every_layout_makes_one_processs_steps(tmp_path: Path) -> None:
    wanted = {}
    for name in CASES:
        one = Run(layout_of("one", **FINE, **one_process(name)))
        one.steps(2)
        checkpoint.save(tmp_path / name / "one", 2, one.pipeline, one.optimizer)
        wanted[name] = one.steps(2)
        checkpoint.save(tmp_path / name / "one", 4, one.pipeline, one.optimizer)
    for losses in run_ranks(on_four_ranks, 4, str(tmp_path)):
        for name, values in losses.items():
            assert values == pytest.approx(wanted[name], rel=1e-6), name
    for name in CASES:
        for step, other in ((2, "fresh"), (4, "resumed")):
            want = contents(tmp_path / name / "one" / f"step-00000{step}")
            found = contents(tmp_path / name / other / f"step-00000{step}")
            assert want.keys() == found.keys()
            assert sum(key.endswith("momentum_buffer") for key in want) > 10
            for key, value in want.items():
                torch.testing.assert_close(found[key], value, rtol=1e-7, atol=1e-10, msg=f"{name}, {other}: {key}")


@pytest.mark.parametrize(
    ("saved", "loaded", "words"),
    [
        (
            {"optimizer__name": "muon"},
            {},
            "expected step, exp_avg and exp_avg_sq, or none of them; found momentum_buffer",
        ),
        (
            {},
            {"optimizer__name": "sgd", "optimizer__momentum": 0.0, "optimizer__nesterov": False},
            "expected none; found exp_avg, exp_avg_sq, step",
        ),
    ],
)
def test_the_state_of_another_optimizer_is_refused(
    tmp_path: Path, saved: dict[str, Any], loaded: dict[str, Any], words: str
) -> None:
    first = Run(layout_of("one", **saved))
    first.steps(1)
    checkpoint.save(tmp_path, 1, first.pipeline, first.optimizer)
    other = Run(layout_of("one", **loaded))
    with pytest.raises(CheckpointError, match=words):
        checkpoint.load(tmp_path, other.pipeline, other.optimizer)


class Scaled(nn.Module):
    """A layer with a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3, dtype=torch.float64)
        self.scale = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.inner(x)


def test_the_state_of_a_parameter_without_dimensions_is_loaded(tmp_path: Path) -> None:
    def built() -> tuple[LocalPipeline, Optimizer]:
        torch.manual_seed(1)
        schedule = build_schedule("1f1b", 2, 2)
        pipeline = LocalPipeline([Scaled, Scaled], schedule, loss=nn.functional.mse_loss)
        return pipeline, Optimizer(list(pipeline.named_parameters()), options())

    def step(pipeline: LocalPipeline, optimizer: Optimizer) -> float:
        loss: float = pipeline.step(*torch.ones(2, 4, 3, dtype=torch.float64)).item()
        optimizer.step(None, RATE)
        return loss

    one, resumed = built(), built()
    step(*one)
    checkpoint.save(tmp_path, 1, *one)
    checkpoint.load(tmp_path, *resumed)
    assert [step(*one) for _ in range(3)] == [step(*resumed) for _ in range(3)]


def test_a_state_is_no_larger_than_its_moments() -> None:
    elements = sum(math.prod(shape) for shape in SHAPES.values())
    matrices = sum(math.prod(SHAPES[name]) for name in MATRICES)
    held = list(parameters().items())
    assert Optimizer(held, options()).state_bytes == 8 * elements
    assert Optimizer(held, options(name="sgd")).state_bytes == 4 * elements
    assert Optimizer(held, options(name="sgd", momentum=0.0, nesterov=False)).state_bytes == 0
    assert Optimizer(held, options(name="muon")).state_bytes == 8 * elements - 4 * matrices


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"name": "muon", "barrier": False}, 'optimizer.name = "muon": .* barrier'),
        ({"name": "sgd", "momentum": 0.0}, "optimizer.momentum = 0.0: .*nesterov"),
        ({"name": "lion"}, "optimizer.name"),
    ],
)
def test_what_cannot_be_stepped_is_refused(keys: dict[str, Any], sentence: str) -> None:
    from pipeloom.config import load_layout

    with pytest.raises(ConfigError, match=sentence):
        load_layout("tiny", {f"optimizer.{key}": value for key, value in keys.items()})
