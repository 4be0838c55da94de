"""Hugging Face models whose sequences or vocabularies are spread over ranks, against one process."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
import transformers

from hf_families import MODEL_FAMILIES, make_batch
from pipeloom import schedules
from pipeloom.errors import ConfigError, UsageError
from pipeloom.models import VocabularyRanks, cross_entropy, hf
from pipeloom.parallel.context import ContextParallel
from pipeloom.parallel.mesh import ALONE, Mesh
from pipeloom.parallel.sharding import shard_of
from pipeloom.runtime import LocalPipeline, Pipeline, RuntimeOptions
from pipeloom.runtime.verify import relative_error
from pipeloom.shapes.decoder import context_problem
from pipeloom.shapes.mesh import MeshShape
from processes import run_ranks


def weighted(family: str) -> Any:
    """The family's model, with the same weights in every process."""
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(MODEL_FAMILIES[family].build())


def spread(rank: int, family: str, how: Literal["gather", "ring", "vocabulary"], packed: bool) -> list[float]:
    """The relative errors of the loss and of every gradient."""
    batch, options = make_batch(family, packed), RuntimeOptions(seed=0)
    whole = hf.layers(weighted(family))
    schedule = schedules.one_f_one_b(1, 4)
    one = LocalPipeline(whole, schedule, loss=cross_entropy, tied=whole.tied, options=options)
    wanted = one.step(batch.tokens, batch.targets, **batch.keywords).item()
    mesh = Mesh.of(MeshShape(pp=2) if how == "vocabulary" else MeshShape(cp=2))
    assert mesh is not None
    if how == "vocabulary":
        shares = VocabularyRanks(rank, 2)
        model = hf.layers(weighted(family), spread=shares)
        schedule = schedules.transformed(schedules.one_f_one_b(2, 4), ["vocabulary", "embedding"])
    else:
        context = ContextParallel(mesh.cp, how)
        model = hf.layers(weighted(family), context=context)
    pipeline = Pipeline(model, schedule, loss=cross_entropy, mesh=mesh, tied=model.tied, options=options)
    loss = pipeline.step(batch.tokens, batch.targets, **batch.keywords).item()
    errors = [abs(loss - wanted) / wanted]
    right = dict(one.named_parameters())
    for name, parameter in pipeline.named_parameters():
        assert parameter.grad is not None
        assert right[name].grad is not None
        want = shard_of(right[name].grad, pipeline.layouts[name], {"pp_tp": rank})
        errors.append(float((parameter.grad - want).abs().max() / want.abs().max().clamp_min(1e-6)))
    return errors


@pytest.mark.parametrize(
    ("family", "how", "packed"),
    [
        ("llama-tied", "gather", True),
        ("qwen3", "ring", True),
        ("mixtral", "gather", False),
        ("llama-tied", "vocabulary", True),
        ("qwen3", "vocabulary", False),
        ("gemma3", "vocabulary", False),  # its embedding scales
        ("mixtral", "vocabulary", False),
    ],
)
def test_loss_and_gradients_equal_one_process(family: str, how: str, packed: bool) -> None:
    for errors in run_ranks(spread, 2, family, how, packed):
        assert max(errors) < 1e-5, errors


@pytest.mark.parametrize(("family", "packed"), [("llama-tied", True), ("qwen3", False), ("mixtral", True)])
def test_slices_have_loss_and_gradients_of_whole_sequences(family: str, packed: bool) -> None:
    batch, tiny, options = make_batch(family, packed), MODEL_FAMILIES[family], RuntimeOptions(seed=0)
    schedule = schedules.one_f_one_b(2, 2)
    gradients = []
    for slices in (1, 3):
        model = hf.layers(tiny.build(), slices=slices > 1)
        schedule = schedules.cut_sequences(schedule, slices) if slices > 1 else schedule
        pipeline = LocalPipeline(model, schedule, loss=cross_entropy, tied=model.tied, options=options)
        loss = pipeline.step(batch.tokens, batch.targets, **batch.keywords).item()
        gradients.append({name: each.grad for name, each in pipeline.named_parameters()} | {"": torch.tensor(loss)})
    assert max(relative_error(gradients[1][name], want) for name, want in gradients[0].items()) < 1e-5
    unready = LocalPipeline(hf.layers(tiny.build()), schedule, loss=cross_entropy, options=options)
    with pytest.raises(UsageError, match="slices=True"):
        unready.step(batch.tokens, batch.targets)


@pytest.mark.parametrize("family", ["gemma2", "gptj"])  # its logits go through a tanh; its output layer has a bias
def test_other_output_layers_are_not_spread(family: str) -> None:
    with pytest.raises(ConfigError, match="not the output of one linear layer without bias"):
        hf.layers(MODEL_FAMILIES[family].build(), spread=VocabularyRanks(0, 2))


def test_an_attention_mask_is_refused() -> None:
    batch, context = make_batch("llama", False), ContextParallel(ALONE)
    layers = hf.layers(MODEL_FAMILIES["llama"].build(), context=context)
    pipeline = LocalPipeline(layers, schedules.one_f_one_b(1, 4), loss=cross_entropy, tied=layers.tied)
    with pytest.raises(UsageError, match="takes no attention_mask"):
        pipeline.evaluate(batch.tokens, batch.targets, attention_mask=batch.tokens)


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("gpt2", {}, "for the families llama, mistral"),
        ("mistral", {}, "no sliding window"),
        ("llama", {"attention_dropout": 0.1}, "no dropout of probabilities"),
    ],
)
def test_other_attention_is_refused_by_name(family: str, changes: dict[str, Any], words: str) -> None:
    config = MODEL_FAMILIES[family].build()
    for key, value in changes.items():
        setattr(config, key, value)
    assert words in context_problem(config.to_dict())
    with pytest.raises(ConfigError, match=words):
        hf.layers(config, context=ContextParallel(ALONE))
    assert not torch.distributed.is_initialized()
