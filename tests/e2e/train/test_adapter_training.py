"""Adapters in training: checkpoints without frozen weights, resuming, peft's files in and out, merging, refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_families import MODEL_FAMILIES
from optimizer_states import optimizer_states
from pipeloom import checkpoint
from pipeloom.config import load, load_layout
from pipeloom.errors import CheckpointError, ConfigError
from pipeloom.measure.build import build_pipeline
from pipeloom.measure.device_profile import predicted_costs
from pipeloom.measure.layer_bytes import layer_bytes
from pipeloom.models.lora import is_adapter
from pipeloom.models.mtp import ahead
from pipeloom.plan.run import predicted as planned_run
from pipeloom.runtime import Pipeline
from pipeloom.train.checkpoint.manifest import read_manifest
from pipeloom.train.checkpoint.state import stepped_states
from pipeloom.train.hub import conversion as hub
from pipeloom.train.hub.generate import open_model, open_pipeline
from pipeloom.train.hub.lora_files import base_weights, begin_weights, require_targets
from pipeloom.train.optimizer import Optimizer
from pipeloom.train.report.step_bytes import predicted
from processes import run_ranks

WIDE = {"train.dtype": "float64"}  # AdamW's first steps have the size of the rate whatever the gradient's
FLAGS = {"train.device": "cpu", "train.global_batch_size": 4, "schedule.microbatches": 2, "train.seq_len": 12}


def written(folder: Path, family: str = "llama") -> Any:
    """A model with a vocabulary of bytes, saved in `folder`."""
    torch.manual_seed(3)
    kind = getattr(transformers, MODEL_FAMILIES[family].config)
    config = kind(**{**MODEL_FAMILIES[family].values, "vocab_size": 256, "eos_token_id": None, "attn_pdrop": 0.0})
    whole = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    whole.save_pretrained(folder)
    return whole


def tokens() -> Tensor:
    return torch.randint(0, 256, (2, 4, 12), generator=torch.Generator().manual_seed(1))


def build(flags: dict[str, Any]) -> tuple[Any, Pipeline, Optimizer]:
    layout = load_layout(None, {**FLAGS, **flags})
    pipeline = build_pipeline(layout, torch.device("cpu"))
    begin_weights(layout.config, pipeline)
    return layout.config, pipeline, Optimizer.of(pipeline, layout.config)


def steps(pipeline: Pipeline, optimizer: Optimizer, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        losses.append(pipeline.step(*tokens()).item())
        optimizer.step(None, 0.05)
    return losses


def saved(flags: dict[str, Any], folder: Path, count: int = 3) -> Any:
    """A checkpoint after some steps in `folder`, and the configuration."""
    config, pipeline, optimizer = build({"parallel.pp": 1, "schedule.name": "1f1b", **flags})
    steps(pipeline, optimizer, count)
    saver = checkpoint.Saver(folder, pipeline, optimizer, base=base_weights(config))
    saver.save(count, {"batch": count, "config": config.model_dump(mode="json")})
    pipeline.close()
    return config


def logits_of(flags: dict[str, Any], folder: Path) -> Tensor:
    config, pipeline, _ = build({"parallel.pp": 1, "schedule.name": "1f1b", **flags})
    checkpoint.load(folder, pipeline, base=base_weights(config))
    found = pipeline.eval() or pipeline.predict(tokens()[0])
    pipeline.close()
    return found


def theirs(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(tokens()[0]).logits
    return found


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_an_adapter_trained_here_loads_in_peft_and_merges(family: str, tmp_path: Path) -> None:
    whole = written(tmp_path / "hub", family)
    flags = {"model.source": str(tmp_path / "hub"), "lora.r": 4}
    saved(flags, tmp_path / "run")
    want = logits_of(flags, tmp_path / "run")
    assert float((want - theirs(whole)).abs().max()) > 1e-2, "three steps have changed something"
    names = read_manifest(tmp_path / "run/step-000003").names("model")
    assert names
    assert all(is_adapter(name) for name in names)
    hub.export(tmp_path / "run", tmp_path / "adapter")
    adapted = peft.PeftModel.from_pretrained(whole, tmp_path / "adapter")
    assert torch.allclose(theirs(adapted), want, atol=1e-5)
    hub.export(tmp_path / "run", tmp_path / "merged", merge=True)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert torch.allclose(theirs(again), want, atol=1e-5)
    opened = open_model(tmp_path / "adapter", 1, {"parallel.pp": 1})
    pipeline = open_pipeline(opened, torch.device("cpu"))
    assert torch.allclose(pipeline.predict(tokens()[0]), want, atol=1e-5)
    pipeline.close()


def test_an_adapter_of_peft_loads_here(tmp_path: Path) -> None:
    """With rank-stabilised scaling, and targets as a list; a wrong one is refused."""
    whole = written(tmp_path / "hub")
    options = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "down_proj"], use_rslora=True)
    adapted = peft.get_peft_model(whole, options)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.2)
    want = theirs(adapted)
    adapted.save_pretrained(tmp_path / "theirs")
    flags = {"model.source": str(tmp_path / "hub"), "lora.adapter": str(tmp_path / "theirs")}
    config, pipeline, _ = build({"parallel.pp": 1, "schedule.name": "1f1b", **flags})
    assert (config.lora.r, config.lora.lora_alpha) == (4, 12.0)
    assert torch.allclose(pipeline.eval() or pipeline.predict(tokens()[0]), want, atol=1e-5)
    pipeline.close()
    weights = tmp_path / "theirs/adapter_model.safetensors"
    found = load_file(weights)
    first = next(iter(found))
    save_file({name: value for name, value in found.items() if name != first}, weights)
    with pytest.raises(ConfigError, match=r"it has no model\.layers"):
        build({"parallel.pp": 1, "schedule.name": "1f1b", **flags})
    save_file({**found, first.replace("layers.0", "layers.9"): found[first].clone()}, weights)
    with pytest.raises(ConfigError, match="which the model has no linear layer for"):
        build({"parallel.pp": 1, "schedule.name": "1f1b", **flags})
    settings = tmp_path / "theirs/adapter_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"use_dora": True}))
    with pytest.raises(ConfigError, match=r"adapter_config\.json: use_dora = true is not supported"):
        load_layout(None, {**FLAGS, **flags})


def test_training_goes_on_from_a_checkpoint_of_adapters(tmp_path: Path) -> None:
    """Bit by bit; and not with other weights below the adapters."""
    written(tmp_path / "hub")
    flags = {"model.source": str(tmp_path / "hub"), "lora.r": 4, "parallel.pp": 1, "schedule.name": "1f1b"}
    config, pipeline, optimizer = build(flags)
    want = steps(pipeline, optimizer, 5)
    before = {name: p.detach().clone() for name, p in pipeline.named_parameters()}
    pipeline.close()
    saved(flags, tmp_path / "run", 3)
    config, pipeline, optimizer = build(flags)
    base = base_weights(config)
    assert checkpoint.load(tmp_path / "run", pipeline, optimizer, base).step == 3
    assert steps(pipeline, optimizer, 2) == want[3:]
    assert all(torch.equal(p, before[name]) for name, p in pipeline.named_parameters())
    assert len(optimizer_states(optimizer)) == sum(is_adapter(name) for name in before)
    with pytest.raises(CheckpointError, match="it holds adapters only, of the model in"):
        checkpoint.load(tmp_path / "run", pipeline)
    file = tmp_path / "hub/model.safetensors"
    changed = load_file(file)
    changed["lm_head.weight"][-1, -1] += 1
    save_file(changed, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"its adapters were trained with the weights in .* differ"):
        checkpoint.load(tmp_path / "run", pipeline, optimizer, base_weights(config))
    pipeline.close()
    with pytest.raises(CheckpointError, match="have changed since"):
        hub.export(tmp_path / "run", tmp_path / "out", merge=True)


def own_flags(folder: str | Path) -> dict[str, Any]:
    """The keys of our own decoder, imported into `folder`."""
    values = load(f"{folder}/ckpt/model.toml").model.model_dump(exclude_none=True, exclude={"source"})
    return {f"model.{key}": value for key, value in values.items()} | {"lora.r": 4, **WIDE}


def _own_on_a_mesh(rank: int, folder: str) -> None:
    layout = {"parallel.pp": 2, "parallel.tp": 2, "parallel.sp": True, "schedule.name": "zbv"}
    config, pipeline, optimizer = build({**own_flags(folder), **layout})
    steps(pipeline, optimizer, 3)
    saver = checkpoint.Saver(f"{folder}/run", pipeline, optimizer, base=base_weights(config))
    saver.save(3, {"batch": 3, "config": config.model_dump(mode="json")})
    pipeline.close()


def test_adapters_of_our_decoder_trained_on_four_ranks_are_those_of_one(tmp_path: Path) -> None:
    """tp 2 and pp 2 under ZBV, saved in parts; peft computes what a checkpoint of one process does."""
    whole = written(tmp_path / "hub")
    hub.import_directory(tmp_path / "hub", tmp_path / "ckpt")
    run_ranks(_own_on_a_mesh, 4, str(tmp_path))
    saved(own_flags(tmp_path), tmp_path / "one")
    for name in ("run", "one"):
        hub.export(tmp_path / name, tmp_path / f"{name}-adapter")
    adapters = [load_file(tmp_path / f"{name}-adapter/adapter_model.safetensors") for name in ("run", "one")]
    assert adapters[0].keys() == adapters[1].keys()
    assert all(torch.allclose(value, adapters[1][key], atol=1e-9) for key, value in adapters[0].items())
    assert json.loads((tmp_path / "run-adapter/adapter_config.json").read_text())["base_model_name_or_path"] == str(
        tmp_path / "hub"
    )
    hub.export(tmp_path / "run", tmp_path / "merged", merge=True)
    merged = theirs(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32))
    assert torch.allclose(merged, theirs(peft.PeftModel.from_pretrained(whole, tmp_path / "run-adapter")), atol=1e-5)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"lora.r": 4}, "there are no pretrained weights to adapt"),
        ({"lora.r": 4, "model.weights": "absent"}, "there is no such directory"),
        ({"lora.target_modules": "("}, "it is not a regular expression"),
        ({"lora.adapter": "absent"}, "adapter_config.json cannot be read"),
        (
            {"lora.r": 4, "lora.lora_dropout": 0.1, "parallel.tp": 2, "model.weights": "."},
            "would drop different inputs",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_layout(None, flags)


@pytest.mark.parametrize("key", ["model.source", "model.weights"])
def test_targets_that_no_layer_has_are_refused(tmp_path: Path, key: str) -> None:
    """In a run and in a dry run; each entry of a list on its own, and a regular expression."""
    written(tmp_path)
    flags = {key: str(tmp_path), "lora.r": 4, "parallel.pp": 1, "schedule.name": "1f1b"}
    for targets, words in (
        (["v_proj", "qproj"], "no linear layer is called 'qproj'; did you mean 'q_proj'"),
        ("model.*qproj", r"no linear layer is called 'model.\*qproj'; did you mean 'q_proj'"),
    ):
        config = load_layout(None, {**flags, "lora.target_modules": targets}).config
        with pytest.raises(ConfigError, match=words):
            require_targets(config)
        with pytest.raises(ConfigError, match=words):
            build({**flags, "lora.target_modules": targets})
    for targets in (["q_proj", "self_attn.v_proj", "model.layers.0.mlp.up_proj"], r".*\.[qv]_proj"):
        require_targets(load_layout(None, {**flags, "lora.target_modules": targets}).config)


def test_a_tied_weight_is_not_merged_and_a_whole_model_has_nothing_to_merge(tmp_path: Path) -> None:
    written(tmp_path / "hub", "llama-tied")
    flags = {"model.source": str(tmp_path / "hub"), "lora.r": 4, "lora.target_modules": ["lm_head"]}
    saved(flags, tmp_path / "run", 1)
    with pytest.raises(ConfigError, match=r"lm_head\.weight is tied to another weight"):
        hub.export(tmp_path / "run", tmp_path / "out", merge=True)
    shutil.rmtree(tmp_path / "run")
    saved({"model.source": str(tmp_path / "hub")}, tmp_path / "run", 1)
    with pytest.raises(ConfigError, match="holds no adapters to merge"):
        hub.export(tmp_path / "run", tmp_path / "out", merge=True)


def test_predicted_bytes_have_gradients_and_moments_of_the_adapters_alone(tmp_path: Path) -> None:
    written(tmp_path / "base")
    flags = {"model.source": str(tmp_path / "base"), "lora.r": 2, "parallel.pp": 1, "schedule.name": "1f1b"}
    _, pipeline, _ = build(flags)
    layout = load_layout(None, {**FLAGS, **flags})
    parameters = [parameter for _, parameter in pipeline.named_parameters()]
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    (rank,) = predicted(layout)
    assert 0 < trained < sum(parameter.numel() for parameter in parameters) / 2
    assert rank.standing - rank.buffers == sum(parameter.nbytes for parameter in parameters) + trained * (4 + 8)
    assert planned_run(layout).ranks[0].standing == pytest.approx(rank.standing, rel=0.06)
    pipeline.close()


def test_bytes_under_a_large_output_layer_are_predicted(tmp_path: Path) -> None:
    """When a block is recomputed, the logits are gone, which are more than it makes again."""
    written(tmp_path / "base")
    flags = {"model.source": str(tmp_path / "base"), "lora.r": 2, "parallel.pp": 2, "schedule.name": "zbv"}
    layout = load_layout(None, {**FLAGS, **flags, "train.recompute": "full"})
    sizes = predicted_costs(layout, layer_bytes(layout)).bytes_in("device", layout.schedule.stages)
    assert all(size >= 0 for size in sizes["layer"])


def test_targets_that_no_layer_has_are_refused_of_classes_of_your_own_too(tmp_path: Path) -> None:
    """Their layers are known once the model is built."""
    experts = {"model.num_experts": 4, "model.num_experts_per_tok": 2, "parallel.pp": 1, "schedule.name": "1f1b"}
    saved(experts, tmp_path, 1)
    flags = {**experts, "model.experts_class": "pipeloom.parallel.expert:Experts", "model.weights": str(tmp_path)}
    with pytest.raises(ConfigError, match="no linear layer is called 'qproj'; did you mean 'q_proj'"):
        build({**flags, "lora.r": 4, "lora.target_modules": ["v_proj", "qproj"]})
    build({**flags, "lora.r": 4, "lora.target_modules": ["v_proj"]})


AHEAD = {"model.num_nextn_predict_layers": 1, "parallel.pp": 1, "schedule.name": "1f1b", **WIDE}


def _gradients_of_adapters(rank: int, folder: str, layout: dict[str, Any]) -> dict[str, Any]:
    flags = {**AHEAD, **layout, "model.weights": folder, "lora.r": 2, "lora.target_modules": ["eh_proj"]}
    _, pipeline, optimizer = build(flags)
    pipeline.step(*tokens(), **ahead(*tokens(), 1))
    optimizer.step(None, 0.0)
    return {
        state.held.name: state.values()["exp_avg"].flatten().tolist() for state in stepped_states(pipeline, optimizer)
    }


def test_adapters_of_a_prediction_block_have_the_gradients_of_one_process(tmp_path: Path) -> None:
    saved(AHEAD, tmp_path, 1)
    want = _gradients_of_adapters(0, str(tmp_path), {})
    assert any("eh_proj.lora_B" in name for name in want)
    for found in run_ranks(_gradients_of_adapters, 2, str(tmp_path), {"parallel.tp": 2, "parallel.sp": True}):
        assert found.keys() == want.keys()
        for name, values in want.items():
            torch.testing.assert_close(torch.tensor(found[name]), torch.tensor(values), rtol=1e-5, atol=1e-9)
