"""Hugging Face models as layers: what a cut gives, what it refuses, and where its weights come from."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from hf_families import MODEL_FAMILIES, SCHEDULES, VARIANTS, Variant, compare, make_batch, verify_family
from pipeloom.errors import ConfigError, UsageError
from pipeloom.models import cross_entropy, hf
from pipeloom.models.hf import weights
from pipeloom.models.hf.parts import TransposedLinear
from pipeloom.ops.deferred import WeightGradContext, WeightGradQueue
from pipeloom.ops.live_bytes import LiveBytes
from pipeloom.runtime import LocalPipeline
from pipeloom.shapes.hub import VERIFIED_FAMILIES
from processes import run_ranks

# left padding of rows and Conv1D; a sliding window; experts in three dimensions; other widths outside; returned tuples
SAMPLE = ("gpt2", "openai-gpt", "mistral", "mixtral", "opt", "gptj")


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in SAMPLE else [pytest.mark.full]) for name in MODEL_FAMILIES]
)
def test_loss_and_gradients_equal_one_process(family: str, variant: Variant) -> None:
    tiny = MODEL_FAMILIES[family]
    model = hf.layers(tiny.build())
    if variant.packed and not model.cut.keeps_documents_apart():
        assert family not in ("gpt2", "mistral", "mixtral", "gptj", "llama4")
        pytest.skip("attends across documents")
    verdict = verify_family(tiny, variant, model, 1e-5)
    assert verdict.passed, verdict


@pytest.mark.core
def test_the_comparison_sees_a_wrong_gradient() -> None:
    """A comparison that finds nothing proves nothing: one gradient off by a thousandth fails."""
    tiny, variant = MODEL_FAMILIES["llama"], Variant("1f1b")
    model = hf.layers(tiny.build())
    pipeline = LocalPipeline(model, SCHEDULES["1f1b"](), loss=cross_entropy)
    batch = make_batch("llama")
    loss = pipeline.step(batch.tokens, batch.targets, **batch.keywords).item()
    parameters = dict(pipeline.named_parameters())
    name = "model.layers.2.mlp.up_proj.weight"
    others = [(key, parameter) for key, parameter in parameters.items() if key != name]
    right = parameters[name]
    wrong = torch.nn.Parameter(right.detach().clone())
    wrong.grad = right.grad * 1.001
    assert compare(tiny, variant, model, [*others, (name, right)], loss, 1e-5).passed
    different = compare(tiny, variant, model, [*others, (name, wrong)], loss, 1e-5)
    assert not different.passed
    assert different.worst_parameter == name
    assert not compare(tiny, variant, model, others, loss, 1e-5).passed
    assert not compare(tiny, variant, model, [*others, (name, right)], loss * 1.001, 1e-5).passed


def _two_processes(rank: int) -> list[Any]:
    found = []
    for schedule in ("1f1b", "zbv"):
        model = hf.layers(MODEL_FAMILIES["gpt2"].build())
        pipeline = pl_pipeline(model, schedule)
        batch = make_batch("gpt2")
        loss = pipeline.step(batch.tokens, batch.targets, **batch.keywords).item()
        held = {name: (p.detach().numpy(), p.grad.numpy()) for name, p in pipeline.named_parameters()}
        found.append((loss, held))
        pipeline.close()
    return found


def pl_pipeline(model: hf.ModelLayers, schedule: str) -> Any:
    from pipeloom.runtime import Pipeline

    return Pipeline(model, SCHEDULES[schedule](), loss=cross_entropy, tied=model.tied)


def with_gradient(value: Any, gradient: Any) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.from_numpy(value))
    parameter.grad = torch.from_numpy(gradient)
    return parameter


@pytest.mark.core
def test_ties_across_processes_are_summed_once() -> None:
    """GPT-2's output layer is its embedding: under 1F1B they are on two ranks, under ZBV on one."""
    found = run_ranks(_two_processes, 2)
    model = hf.layers(MODEL_FAMILIES["gpt2"].build())
    for at, schedule in enumerate(("1f1b", "zbv")):
        ranks = [{name: with_gradient(*values) for name, values in rank[at][1].items()} for rank in found]
        parameters = [held for rank in ranks for held in rank.items()]
        verdict = compare(MODEL_FAMILIES["gpt2"], Variant(schedule), model, parameters, found[0][at][0], 1e-5)
        assert verdict.passed, verdict
        holders = [name for rank in ranks for name in rank if name in model.tied[0]]
        assert len(holders) == (2 if schedule == "1f1b" else 1)
        assert sum("h.0." in name for name in ranks[1]) == 0, "a rank builds its own layers only"


def test_the_families_that_count_as_verified_are_those_of_the_file() -> None:
    assert {family.build().model_type for family in MODEL_FAMILIES.values()} == VERIFIED_FAMILIES


@pytest.mark.core
def test_names_are_those_of_transformers() -> None:
    config = MODEL_FAMILIES["qwen2"].build()
    model = hf.layers(config)
    with torch.device("meta"):
        whole = transformers.AutoModelForCausalLM.from_config(config)
    names = [f"{layer.name}.{inner}" for layer in model for inner, _ in layer().named_parameters()]
    assert [layer.name for layer in model] == ["first", *(f"model.layers.{i}" for i in range(4)), "last"]
    assert [hf.hub_name(name) for name in names] == [n for n, _ in whole.named_parameters(remove_duplicate=False)]
    assert model.tied == (("first.model.embed_tokens.weight", "last.lm_head.weight"),)


@pytest.mark.core
@pytest.mark.parametrize("family", ["llama", "gpt-oss", "apertus", "openai-gpt", "gemma3", "gpt-neo"])
def test_buffers_that_no_file_holds_are_computed_again(family: str) -> None:
    config = MODEL_FAMILIES[family].build()
    whole = dict(transformers.AutoModelForCausalLM.from_config(config).named_buffers())
    found = {hf.hub_name(f"{layer.name}.{n}"): b for layer in hf.layers(config) for n, b in layer().named_buffers()}
    assert found.keys() == whole.keys()
    for name, buffer in found.items():
        assert torch.equal(buffer, whole[name]), name


@pytest.mark.core
def test_first_weights_follow_from_seed_and_name() -> None:
    """Two cuts of a configuration draw the same weights, whatever the schedule; deviations are those of transformers."""
    config = MODEL_FAMILIES["openai-gpt"].build()
    one, two = (
        dict(LocalPipeline(hf.layers(config), SCHEDULES[s](), loss=cross_entropy).named_parameters())
        for s in ("1f1b", "zbv")
    )
    whole = dict(transformers.AutoModelForCausalLM.from_config(config).named_parameters(remove_duplicate=False))
    for name, weight in one.items():
        assert torch.equal(weight, two[name])
        assert float(weight.detach().std(unbiased=False)) == pytest.approx(
            float(whole[hf.hub_name(name)].detach().std(unbiased=False)), rel=0.25, abs=1e-6
        )


@pytest.mark.core
def test_a_model_with_weights_is_used_as_it_is() -> None:
    """Its parameters are trained in place, and its modules stay untouched."""
    config = MODEL_FAMILIES["gpt2"].build()
    whole = transformers.AutoModelForCausalLM.from_config(config)
    batch = make_batch("gpt2")
    with torch.no_grad():
        want = whole.eval()(batch.tokens, **batch.keywords).logits
    model = hf.layers(whole)
    pipeline = LocalPipeline(model, SCHEDULES["zbv"](), loss=cross_entropy, tied=model.tied)
    assert torch.allclose(pipeline.predict(batch.tokens, **batch.keywords), want, atol=1e-6)
    pipeline.step(batch.tokens, batch.targets, **batch.keywords)
    assert {id(p) for p in pipeline.parameters()} == {id(p) for p in whole.parameters()}
    assert all(p.grad is not None for p in whole.parameters())
    assert type(whole.transformer.h[0].attn.c_attn).__name__ == "Conv1D"
    assert not whole.training
    with torch.no_grad():
        assert torch.equal(whole(batch.tokens, **batch.keywords).logits, want)


@pytest.mark.core
def test_masks_of_micro_batches_do_not_mix() -> None:
    """The hand-over to layers is kept between stages: other masks of the same shape, and none, are not taken for it."""
    model = hf.layers(MODEL_FAMILIES["llama"].build())
    pipeline = LocalPipeline(model, SCHEDULES["interleaved"](), loss=cross_entropy)
    whole = transformers.AutoModelForCausalLM.from_config(model.config).eval()
    with torch.no_grad():
        own = dict(pipeline.named_parameters())
        for name, parameter in whole.named_parameters():
            parameter.copy_(own[next(n for n in own if hf.hub_name(n) == name)])
        batch = make_batch("llama")
        mask = batch.keywords["attention_mask"]
        for given in ({"attention_mask": mask}, {"attention_mask": mask.flip(0)}, {}, {"attention_mask": mask.flip(1)}):
            want = whole(batch.tokens, **given).logits
            assert torch.allclose(pipeline.predict(batch.tokens, **given), want, atol=1e-5), list(given)
        positions = torch.arange(12).expand(5, 12) + 7 * torch.arange(5)[:, None]
        want = whole(batch.tokens, position_ids=positions).logits
        assert torch.allclose(pipeline.predict(batch.tokens, position_ids=positions), want, atol=1e-5)


@pytest.mark.core
def test_conv1d_waits_for_w_and_equals_its_own_gradient() -> None:
    plain = transformers.pytorch_utils.Conv1D(5, 3)
    layer, grad_context = TransposedLinear(plain), WeightGradContext()
    layer.set_weight_grad_context(grad_context)
    x = torch.randn(2, 4, 3, requires_grad=True)
    (plain(x) * torch.arange(5)).sum().backward()
    want, want_x = plain.weight.grad, x.grad
    plain.weight.grad = x.grad = plain.bias.grad = None
    grad_context.queue = WeightGradQueue()
    (layer(x) * torch.arange(5)).sum().backward()
    assert plain.weight.grad is None
    assert torch.allclose(x.grad, want_x)
    grad_context.queue.flush()
    assert torch.allclose(plain.weight.grad, want)


@pytest.mark.core
@pytest.mark.parametrize(
    ("config", "values", "reason"),
    [
        ("MixtralConfig", {"output_router_logits": True}, "does not decompose into stages"),
        ("OPTConfig", {"layerdrop": 0.1}, "layerdrop is 0.1"),
        ("Gemma3nTextConfig", {}, "depends on weights or on hidden states"),
        ("XLNetConfig", {}, "passes decoder layer 1 argument 2, which depends on weights or on hidden states"),
        ("Gemma4TextConfig", {"num_kv_shared_layers": 0}, "its forward fails without its decoder layers"),
        ("LongcatFlashConfig", {"num_layers": 2}, r"it has no list of 4 decoder layers \(num_hidden_layers\)"),
        ("ViTConfig", {}, "transformers builds no causal model of ViTConfig"),
        ("T5Config", {}, "T5Config describes an encoder and a decoder; supported: causal language models"),
        ("BartConfig", {}, "BartConfig describes an encoder and a decoder"),
        ("BertConfig", {}, "BertLMHeadModel .* as in an encoder; supported: .* with is_decoder = true"),
        ("MegatronBertConfig", {}, "as in an encoder"),
        ("GemmaConfig", {"use_bidirectional_attention": True}, "GemmaForCausalLM .* as in an encoder; supported"),
    ],
)
def test_what_cannot_be_cut_gets_one_sentence(config: str, values: dict[str, Any], reason: str) -> None:
    if config in ("Gemma3nTextConfig", "Gemma4TextConfig"):
        values = {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 16, "vocab_size": 32, "head_dim": 4}
        values |= {"vocab_size_per_layer_input": 32, "hidden_size_per_layer_input": 4, "num_kv_shared_layers": 0}
        values |= {"layer_types": ["sliding_attention", "full_attention"], "activation_sparsity_pattern": None}
    with pytest.raises(ConfigError, match=reason) as error:
        hf.layers(getattr(transformers, config)(**values))
    assert "\n" not in str(error.value)


# -- weights of a directory ----------------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("family", ["llama-tied", "gpt2", "qwen3-moe", "phi3"])
def test_a_directory_gives_the_logits_of_transformers(family: str, tmp_path: Path) -> None:
    """Sharded with an index; experts, which are written one by one, are put together."""
    whole = written(family, tmp_path)
    model = hf.layers(tmp_path)
    pipeline = LocalPipeline(model, SCHEDULES["zbv"](), loss=cross_entropy, tied=model.tied)
    batch = make_batch(family)
    with torch.no_grad():
        want = whole(batch.tokens, **batch.keywords).logits
    assert torch.allclose(pipeline.predict(batch.tokens, **batch.keywords), want, atol=1e-5)
    own = dict(whole.named_parameters(remove_duplicate=False))
    assert all(torch.equal(p, own[hf.hub_name(name)]) for name, p in pipeline.named_parameters())


@pytest.mark.parametrize("family", ["llama-tied", "qwen3-moe"])
def test_a_rank_reads_its_own_layers_only(family: str, tmp_path: Path) -> None:
    """No more bytes than the layer has, and no more memory than the layer; experts are put together in place."""
    written(family, tmp_path)
    model = hf.layers(tmp_path)
    for layer in model:
        layer()  # reads headers, and builds what all layers share
        before = model.cut.bytes_read
        with LiveBytes() as live:
            built = layer()
        held = sum(p.numel() * p.element_size() for p in built.parameters())
        assert model.cut.bytes_read - before == held
        assert live.peak <= held + sum(b.nbytes for b in built.buffers()) + 2048


@pytest.mark.parametrize(
    ("shape", "part", "start"),
    [
        ((6, 5), (6, 5), (0, 0)),
        ((6, 5), (2, 5), (3, 0)),
        ((6, 5), (6, 2), (0, 3)),
        ((4, 3, 6), (2, 3, 2), (1, 0, 4)),
        ((4, 3, 6), (1, 2, 6), (3, 1, 0)),
        ((7,), (3,), (4,)),
        ((), (), ()),
    ],
)
def test_a_part_of_a_tensor_is_read(
    shape: tuple[int, ...], part: tuple[int, ...], start: tuple[int, ...], tmp_path: Path
) -> None:
    whole = torch.randn(shape)
    save_file({"before": torch.ones(3), "it": whole}, tmp_path / "model.safetensors")
    folder = weights.stored_tensors(tmp_path)
    found = torch.empty(part, dtype=torch.float64)
    folder.read_into("it", found, start)
    want = whole[tuple(slice(at, at + size) for at, size in zip(start, part, strict=True))]
    assert torch.equal(found, want.double())
    assert folder.bytes_read == want.numel() * 4


@pytest.mark.core
@pytest.mark.parametrize(
    ("changes", "layer", "words"),
    [
        ({"intermediate_size": 40}, 1, r"gate_proj\.weight is \[48, 32\], and the configuration says \[40, 32\]"),
        # before 137 GB are allocated for it
        ({"vocab_size": 2**30}, 0, r"embed_tokens\.weight is .*, and the configuration says \[1073741824, 32\]"),
        ({"num_hidden_layers": 5}, 5, r"has no weights for model\.layers\.4\."),
    ],
)
def test_a_configuration_that_does_not_fit_its_weights_is_refused(
    changes: dict[str, Any], layer: int, words: str, tmp_path: Path
) -> None:
    written("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ConfigError, match=words):
        hf.layers(tmp_path)[layer]()


@pytest.mark.core
def test_what_is_wrong_with_the_files_of_a_directory_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        hf.layers(tmp_path)
    written("llama", tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    shard = tmp_path / sorted(set(json.loads(index.read_text())["weight_map"].values()))[0]
    os.truncate(shard, shard.stat().st_size - 10)
    refused = [
        (index.read_text(), "is not a complete safetensors file"),
        (json.dumps({"weight_map": {"a": "../x"}}), "outside of the directory: '../x'"),
        (json.dumps({"weight_map": {"a": 5}}), "outside of the directory: 5"),
        (json.dumps({"weight_map": {"a": ["x"]}}), "is not a safetensors index"),
        (json.dumps([1]), "is not a safetensors index"),
        ('{"weight_map":' * 300_000, "is not JSON: nested too deeply"),
    ]
    for text, words in refused:
        index.write_text(text)
        with pytest.raises(ConfigError, match=words):
            hf.layers(tmp_path)[1]()
    index.unlink()
    with pytest.raises(ConfigError, match="has no weights in safetensors"):
        hf.layers(tmp_path)[1]()


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (ValueError("dropout must be\nbetween"), ConfigError),
        *((each, type(each)) for each in (torch.OutOfMemoryError("full"), torch.distributed.DistNetworkError("gone"))),
    ],
)
def test_an_error_of_a_layer_is_the_configuration_s_unless_it_is_the_machine_s(
    error: Exception, raised: type[Exception]
) -> None:
    """The configuration class accepts settings with which only a training step fails."""

    def forward(*_: Any, **__: Any) -> None:
        raise error

    model = hf.layers(MODEL_FAMILIES["llama"].build())
    model.cut.trunk[1].forward = forward
    pipeline = LocalPipeline(model, SCHEDULES["1f1b"](), loss=cross_entropy, tied=model.tied)
    with pytest.raises(raised) as caught:
        pipeline.step(torch.zeros(4, 4, dtype=torch.int64), torch.zeros(4, 4, dtype=torch.int64))
    wrapped = "LlamaDecoderLayer of transformers fails with its configuration: ValueError: dropout must be between"
    assert str(caught.value) == (wrapped if raised is ConfigError else str(error))


@pytest.mark.core
@pytest.mark.parametrize("model_type", ["unknown", "vit"])  # a configuration of the folder, and one of transformers
def test_code_of_a_model_folder_never_runs(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Not even if standard input answers "y" to the question that transformers asks by default."""
    ran = tmp_path / "ran"
    (tmp_path / "code.py").write_text(f"from pathlib import Path\nPath({str(ran)!r}).touch()\n", encoding="utf-8")
    classes = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "auto_map": classes}))
    monkeypatch.setattr("builtins.input", lambda question="": "y")
    with pytest.raises(ConfigError, match="auto_map names code in the model's folder, which Pipeloom never runs"):
        hf.layers(tmp_path)
    assert not ran.exists()
    assert capfd.readouterr().out == ""


@pytest.mark.core
@pytest.mark.parametrize("named", ["somebody/attention", {"text_config": "somebody/attention"}])
def test_a_model_folder_names_no_attention_to_download(named: object, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "attn_implementation": named}))
    with pytest.raises(ConfigError, match="'somebody/attention' names code to be downloaded"):
        hf.layers(tmp_path)


def written(family: str, folder: Path) -> Any:
    """A model of the family with random weights, none of them at its first value, saved in `folder`."""
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(MODEL_FAMILIES[family].build(), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder, max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return model


@pytest.mark.core
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "llama4"])
def test_packed_documents_have_the_loss_of_separate_ones(family: str) -> None:
    model = hf.layers(MODEL_FAMILIES[family].build())
    assert model.cut.keeps_documents_apart()
    tokens = make_batch("llama").tokens[:4].clone()
    assert tokens.shape == (4, 12)
    cuts = [(12,), (5, 7), (3, 4, 5), (6, 6)]
    positions = torch.stack([torch.cat([torch.arange(size) for size in row]) for row in cuts])
    targets = tokens.roll(-1, 1)
    targets[:, -1] = -100
    targets[:, :-1][positions[:, 1:] == 0] = -100
    pipeline = LocalPipeline(model, SCHEDULES["1f1b"](), loss=cross_entropy, tied=model.tied)
    loss = pipeline.step(tokens, targets, position_ids=positions).item()
    whole = transformers.AutoModelForCausalLM.from_config(model.config).eval()
    own = {hf.hub_name(name): parameter for name, parameter in pipeline.named_parameters()}
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            parameter.copy_(own[name])
    total = 0.0
    for row, sizes in zip(tokens, cuts, strict=True):
        for document in row.split(sizes):
            logits = whole(document[None]).logits[0, :-1]
            total += torch.nn.functional.cross_entropy(logits, document[1:], reduction="sum").item()
    assert loss == pytest.approx(total / int((targets != -100).sum()), abs=1e-5)


@pytest.mark.core
@pytest.mark.parametrize(
    ("family", "masked", "words"),
    [
        ("opt", False, "the layers of OPTForCausalLM do not keep them apart; nearest"),
        ("bloom", False, "the layers of BloomForCausalLM do not"),
        ("falcon-h1", False, "the layers of FalconH1ForCausalLM do not"),  # by its convolution
        ("llama", True, "the layers of LlamaForCausalLM do not keep them apart where attention_mask is given"),
    ],
)
def test_packed_rows_are_refused_where_documents_would_mix(family: str, masked: bool, words: str) -> None:
    batch = make_batch(family, packed=True)
    keywords = {**batch.keywords, **({"attention_mask": torch.ones_like(batch.tokens)} if masked else {})}
    pipeline = LocalPipeline(hf.layers(MODEL_FAMILIES[family].build()), SCHEDULES["1f1b"](), loss=cross_entropy)
    with pytest.raises(UsageError, match=words):
        pipeline.predict(batch.tokens, **keywords)
