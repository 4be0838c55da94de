"""Adapters that peft wrote, of sixteen kinds: the logits are peft's, or the file is refused by its key; and tied weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipeloom as pl
from hf_families import MODEL_FAMILIES
from pipeloom.errors import ConfigError
from pipeloom.models import cross_entropy, hf
from pipeloom.models.hf.library import transformers
from pipeloom.models.lora import LoraOptions, with_adapters
from pipeloom.runtime import LocalPipeline
from pipeloom.shapes.hub import adapter_keys
from pipeloom.train.hub.lora_files import read_adapter

peft: Any = pytest.importorskip("peft")
TOKENS = torch.arange(48).view(4, 12) % 31

# options of peft -> what the refusal says; "" where the adapter is read
KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "plain": ({}, ""),
    "gaussian": ({"init_lora_weights": "gaussian"}, ""),
    "orthogonal": ({"init_lora_weights": "orthogonal"}, ""),
    "random": ({"init_lora_weights": False}, ""),
    "rank-stabilised": ({"use_rslora": True}, ""),
    "regular expression": ({"target_modules": r".*\.(q|v)_proj"}, ""),
    "all linear": ({"target_modules": "all-linear"}, ""),
    "pissa": ({"init_lora_weights": "pissa"}, 'init_lora_weights = "pissa": such an adapter belongs to weights'),
    "fast pissa": ({"init_lora_weights": "pissa_niter_4"}, 'init_lora_weights = "pissa_niter_4"'),
    "olora": ({"init_lora_weights": "olora"}, 'init_lora_weights = "olora"'),
    "dora": ({"use_dora": True}, "use_dora = true is not supported"),
    "ranks by pattern": ({"rank_pattern": {"q_proj": 2}}, r'rank_pattern = \{"q_proj": 2\} is not supported'),
    "factors by pattern": ({"alpha_pattern": {"q_proj": 3}}, r'alpha_pattern = \{"q_proj": 3\} is not supported'),
    "some layers": ({"layers_to_transform": [0]}, r"layers_to_transform = \[0\] is not supported"),
    "biases": ({"bias": "lora_only"}, "bias = \"lora_only\": it must be 'none'"),
    "bias of adapters": ({"lora_bias": True}, "lora_bias = true is not supported"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, r'modules_to_save = \["lm_head"\] is not supported'),
    "excluded": ({"exclude_modules": ["layers.1.self_attn.q_proj"]}, "exclude_modules = .* is not supported"),
    "loftq": ({"init_lora_weights": "loftq"}, 'init_lora_weights = "loftq"'),
    "corda": ({"init_lora_weights": "corda"}, 'init_lora_weights = "corda"'),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(5)
    transformers().AutoModelForCausalLM.from_config(MODEL_FAMILIES["llama"].build()).save_pretrained(folder)
    return folder


def loaded(base: Path) -> Any:
    return transformers().AutoModelForCausalLM.from_pretrained(base)


@torch.no_grad()
def written(base: Path, folder: Path, options: dict[str, Any]) -> Tensor:
    """Write an adapter as if it had been trained; return the logits of peft that reads it."""
    kind = options.get("init_lora_weights")
    by_name = kind in ("loftq", "corda")  # which need packages or data: their files have the same form
    options = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **options}
    model = peft.get_peft_model(
        loaded(base), peft.LoraConfig(**options | ({"init_lora_weights": True} if by_name else {}))
    )
    generator = torch.Generator().manual_seed(1)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.1)
    model.save_pretrained(folder)
    if by_name:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"init_lora_weights": kind}))
        return torch.empty(0)
    logits: Tensor = peft.PeftModel.from_pretrained(loaded(base), folder).eval()(TOKENS).logits
    return logits


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_of_peft_is_computed_as_there_or_refused_by_its_key(kind: str, base: Path, tmp_path: Path) -> None:
    options, refusal = KINDS[kind]
    want = written(base, tmp_path, options)
    if refusal:
        with pytest.raises(ConfigError, match=rf"lora\.adapter: adapter_config\.json: {refusal}"):
            adapter_keys(str(tmp_path), "lora.adapter")
        return
    keys, layers = adapter_keys(str(tmp_path), "lora.adapter"), hf.layers(base)
    targets = keys["target_modules"]
    rule = targets if isinstance(targets, str) else tuple(targets)
    lora = LoraOptions(r=keys["r"], lora_alpha=keys["lora_alpha"], target_modules=rule)
    pipeline = LocalPipeline(
        with_adapters(layers, lora, 0), pl.schedules.one_f_one_b(2, 2), loss=cross_entropy, tied=layers.tied
    )
    read_adapter(tmp_path, pipeline)
    out = pipeline.predict(TOKENS)
    logits = getattr(out, "logits", out)
    assert float((logits - want).norm() / want.norm()) < 1e-5


def tied(folder: Path, change: float) -> Path:
    """A directory whose configuration ties the head to the embedding, and whose file has a head of its own."""
    from safetensors.torch import load_file, save_file

    config = MODEL_FAMILIES["llama"].build()
    config.tie_word_embeddings = True
    transformers().AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    head = embedding + change * torch.arange(len(embedding))[:, None]
    save_file({**weights, "lm_head.weight": head.contiguous()}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_head_that_differs_from_the_embedding_it_is_tied_to_is_refused(tmp_path: Path) -> None:
    module: nn.Module = hf.layers(tied(tmp_path / "same", 0.0))[0]()
    assert module is not None
    layers = hf.layers(tied(tmp_path / "other", 1e-3))
    with pytest.raises(ConfigError, match=r"ties .*lm_head\.weight.* other values.*tie_word_embeddings = false"):
        layers[0]()
