"""ZeRO levels and copies to the host against the same layout without: bitwise the same training, whatever else is on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from checkpoint_states import MOE, Run, layout_of
from pipeloom import checkpoint
from pipeloom.config import load_layout
from pipeloom.measure import build
from pipeloom.models.lora import LoraOptions
from pipeloom.parallel.mesh import Mesh
from pipeloom.train.hub.generate import Sampling, extend
from processes import run_ranks

LEVELS: dict[int, dict[str, Any]] = {
    0: {},
    1: {"parallel__zero": 1},
    2: {"parallel__zero": 2, "schedule__transforms": ["reduce-gradients"]},
    3: {"parallel__zero": 3},
}
CLIPPED = {"optimizer__clip_norm": 0.5, "schedule__name": "interleaved", "schedule__chunks": 2}


def step(run: Run) -> tuple[float, float]:
    """The loss and norm of the next step, which the norm clips."""
    place, shape = run.pipeline.mesh.place, run.pipeline.mesh.shape
    batch = run.batches.of_step(run.pipeline.next_step).part(place.dp, shape.dp)
    run.pipeline.train()
    loss = float(run.pipeline.step(batch.tokens, batch.targets))
    norm = float(run.pipeline.grad_norm())
    run.optimizer.step(norm, 1e-2)
    return loss, norm


def resumed(rank: int, folder: str) -> tuple[list[Any], list[Any]]:
    """Steps of one run, and of runs of other levels each of which continues the one before from its checkpoint."""
    straight = Run(layout_of("dp 2", **CLIPPED))
    wanted = [step(straight) for _ in range(5)]
    straight.pipeline.close()
    steps = []
    for at, level in enumerate((0, 3, 1, 2, 3)):
        run = Run(layout_of("dp 2", **CLIPPED, **LEVELS[level]))
        if at:
            checkpoint.load(folder, run.pipeline, run.optimizer)
        steps.append(step(run))
        checkpoint.save(folder, at + 1, run.pipeline, run.optimizer)
        run.pipeline.close()
    return wanted, steps


def test_a_run_resumes_at_any_other_level(tmp_path: Any) -> None:
    for wanted, steps in run_ranks(resumed, 2, str(tmp_path)):
        assert steps == wanted
        assert min(norm for _, norm in wanted) > 0.5


BESIDE: dict[str, dict[str, Any]] = {
    "muon": {"optimizer__name": "muon"},
    "adapters": {},
    "tied weights": {"model__tie_word_embeddings": True},
    "experts": {"parallel__ep": 2, **{key.replace(".", "__"): value for key, value in MOE.items()}},
    "bf16": {"train__dtype": "bfloat16"},
}


def trained(rank: int, name: str) -> list[Any]:
    """Two levels' steps, then a loss, outputs and tokens without gradients, and weights that are read between steps."""
    if name == "adapters":
        build.lora_options = lambda config: LoraOptions(r=2, lora_alpha=4.0)
    changes, results = BESIDE[name], []
    for level in (1, 3):
        run = Run(layout_of("dp 2", **CLIPPED, **changes, **LEVELS[level]))
        steps: list[Any] = [step(run) for _ in range(2)]
        run.pipeline.eval()
        batch = run.batches.of_step(2).part(0, 2)
        steps.append(float(run.pipeline.evaluate(batch.tokens, batch.targets)))
        steps.append(run.pipeline.predict(batch.tokens).float().sum(-1).tolist())
        steps.append(extend(run.pipeline, [[5, 6, 7]], 3, Sampling(temperature=0)))
        steps.append({name: value.float().sum().item() for name, value in run.pipeline.state_dict().items()})
        results.append(steps)
        run.pipeline.close()
    return results


@pytest.mark.parametrize("name", BESIDE)
def test_gathered_parameters_train_as_whole_ones(name: str) -> None:
    for whole, gathered in run_ranks(trained, 2, name):
        assert gathered == whole


COPIED: dict[str, dict[str, Any]] = {
    "experts": {"parallel.dp": 2, "parallel.ep": 2, **MOE},
    "experts of tensor parallel ranks": {"parallel.tp": 2, **MOE},
    "sharded": {"parallel.dp": 2, "parallel.zero": 3},
}


def copied(rank: int, keys: dict[str, Any]) -> list[Any]:
    """Loss and gradients of a step without copies, with copies of the whole, and in parts."""
    results = []
    base = {"schedule.name": "zbv", "schedule.microbatches": 4, "parallel.pp": 1, "model.dropout": 0.1, **keys}
    transforms = ["shard=1"] if "parallel.zero" in keys else []
    for words in ([], ["offload"], ["offload=2/2"]):
        layout = load_layout("tiny", {**base, "schedule.transforms": [*words, *transforms]})
        pipeline = build.build_pipeline(layout, torch.device("cpu"), Mesh.of(layout.mesh))
        assert any(str(cell)[1:3] == "O0" for program in pipeline.schedule.programs for cell in program) == bool(words)
        tokens = torch.randint(
            0,
            256,
            (8 // layout.mesh.dp, 17),
            generator=torch.Generator().manual_seed(rank if layout.mesh.dp > 1 else 0),
        )
        loss = float(pipeline.step(tokens[:, :-1], tokens[:, 1:]))
        assert pipeline.sync is not None
        gradients = pipeline.sync.whole_gradients()
        results.append((loss, {key: g if g is None else g.tolist() for key, g in gradients.items()}))
        pipeline.close()
    return results


@pytest.mark.parametrize("name", COPIED)
def test_copies_change_no_bit(name: str) -> None:
    for plain, whole, parts in run_ranks(copied, 2, COPIED[name]):
        assert whole == plain
        assert parts == plain
