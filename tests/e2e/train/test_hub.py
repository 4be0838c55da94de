"""Weights in and out: Hugging Face directories as checkpoints, checkpoints as directories, and a model trained in between."""

from __future__ import annotations

import json
from ast import literal_eval
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

import pipeloom as pl
from commands import pipeloom
from corpora import tokenizer_directory, tokenizer_file
from pipeloom import checkpoint
from pipeloom.config import load, load_layout, to_toml
from pipeloom.errors import CheckpointError, ConfigError
from pipeloom.measure.build import build_pipeline
from pipeloom.models import cross_entropy, hf, hub_name, layers, tied
from pipeloom.ops.live_bytes import LiveBytes
from pipeloom.runtime import Pipeline
from pipeloom.shapes.decoder import DecoderShape
from pipeloom.train.checkpoint.boxes import Box
from pipeloom.train.checkpoint.reader import Reader, verified
from pipeloom.train.checkpoint.save import Saver
from pipeloom.train.checkpoint.state import holders
from pipeloom.train.data.conversations import conversation
from pipeloom.train.data.prepare import require_data
from pipeloom.train.data.sources import tokenizer_name
from pipeloom.train.data.tokenizers import SimpleTemplate, TokenizerTemplate, load_tokenizer
from pipeloom.train.hub import conversion as hub
from pipeloom.train.hub.generate import open_model, text_of
from pipeloom.train.hub.lora_files import base_weights, read_directory
from processes import run_ranks

_SIZES = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_QWEN_MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 32,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (
        "LlamaConfig",
        {**_SIZES, "attention_bias": True, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    ),
    "qwen2": ("Qwen2Config", {**_SIZES, "tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    "mixtral": ("MixtralConfig", {**_SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2-moe": ("Qwen2MoeConfig", {**_SIZES, **_QWEN_MOE, "norm_topk_prob": False}),
    "qwen2-moe mixed": (
        "Qwen2MoeConfig",
        {**_SIZES, **_QWEN_MOE, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    ),
    "qwen3": ("Qwen3Config", {**_SIZES, "head_dim": 12}),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {
            **_SIZES,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "head_dim": 8,
            "mlp_only_layers": [1],
        },
    ),
    "gpt2": ("GPT2Config", {"vocab_size": 256, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64}),
}
OWN = [name for name in MODELS if name != "gpt2"]


def written(name: str, folder: Path) -> Any:
    """A model with random weights, none of them at its first value, saved in `folder` in two files or more."""
    kind, values = MODELS[name]
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**values), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder, max_shard_size="60KB")
    return model.eval()


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def same(a: Path, b: Path) -> None:
    first, second = tensors(a), tensors(b)
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def tokens() -> Tensor:
    return torch.randint(0, 256, (3, 24), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", MODELS)
def test_in_and_out_again_is_bit_equal(name: str, tmp_path: Path) -> None:
    """And the checkpoint in between computes the logits of `transformers`, our own decoder where it can."""
    model = written(name, tmp_path / "hub")
    (tmp_path / "hub/tokenizer.json").write_text("{}")
    path, own = hub.import_directory(tmp_path / "hub", tmp_path / "checkpoints")
    assert own == (name in OWN)
    imported = load(tmp_path / "checkpoints/model.toml")
    section = imported.model
    assert tokenizer_name(imported.data.tokenizer, section.source or section.weights) == str(tmp_path / "hub")
    chosen = layers(section.shape(), 0) if own else hf.layers(section.source)
    groups = tied(section.shape()) if own else chosen.tied  # type: ignore[attr-defined]
    pipeline = Pipeline(chosen, pl.schedules.gpipe(1, 1), loss=cross_entropy, tied=groups)
    checkpoint.load(path, pipeline)
    pipeline.eval()
    with torch.no_grad():
        assert torch.allclose(pipeline.predict(tokens()), model(tokens()).logits, atol=1e-5)
    pipeline.close()
    assert hub.export(tmp_path / "checkpoints", tmp_path / "out") == path
    same(tmp_path / "hub", tmp_path / "out")
    configs = [json.loads((tmp_path / where / "config.json").read_text()) for where in ("hub", "out")]
    assert configs[1] == configs[0]  # also what our own decoder does not know, such as the tokens that end a text
    assert (tmp_path / "out/tokenizer.json").is_file()
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    with torch.no_grad():
        assert torch.allclose(again(tokens()).logits, model(tokens()).logits, atol=1e-5)


def _read_in_parts(rank: int, folder: str, flags: dict[str, Any]) -> tuple[int, int, dict[str, Any]]:
    """(bytes of tensors that this rank read, bytes of its parameters, what it holds by its place)."""
    layout = load_layout(None, {**flags, "model.weights": folder, "train.device": "cpu"})
    pipeline = build_pipeline(layout, torch.device("cpu"))
    count = read_directory(Path(folder), pipeline)
    held = {
        f"{one.name} {box.offset}": part.numpy() for one in holders(pipeline) for box, part in one.parts(one.tensor)
    }
    pipeline.close()
    return count, sum(tensor.nbytes for tensor in held.values()), held


@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe", pytest.param("qwen3-moe", marks=pytest.mark.full)])
def test_our_own_decoder_reads_its_boxes_of_a_directory(name: str, tmp_path: Path) -> None:
    """Over pp, tp and ep each rank reads the bytes that it holds and no others: those that import puts into a checkpoint."""
    written(name, tmp_path / "hub")
    flags = {"parallel.pp": 1, "parallel.dp": 2, "parallel.tp": 2, "parallel.ep": 2, "schedule.name": "gpipe"}
    ranks = run_ranks(_read_in_parts, 4, str(tmp_path / "hub"), {**flags, "model.dropout": 0.1})
    path, _ = hub.import_directory(tmp_path / "hub", tmp_path / "checkpoints")
    manifest, _ = verified(path, None)
    assert manifest is not None
    reader = Reader(path, manifest)
    for read, size, held in ranks:
        assert read == size
        for place, tensor in held.items():
            key, _, offset = place.partition(" ")
            box = Box(literal_eval(offset), tuple(tensor.shape))
            assert np.array_equal(reader.region(f"model.{key}", box).numpy(), tensor), place


def test_a_directory_that_our_own_decoder_does_not_compute_is_refused(tmp_path: Path) -> None:
    written("gpt2", tmp_path / "hub")
    with pytest.raises(ConfigError, match=r"Pipeloom's own decoder cannot compute this gpt2; nearest: model\.source"):
        load_layout(None, {"model.weights": str(tmp_path / "hub")})
    sizes = {**_SIZES, "model_type": "llama", "num_key_value_heads": 4}
    for keys, why in [
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, r'this llama \(rope_type = "llama3"\)'),
        ({"hidden_act": "gelu", "mlp_bias": True}, r'\(hidden_act = "gelu"\)'),
        ({"mlp_bias": True}, r"\(mlp_bias = true\)"),
        ({"model_type": "mistral"}, r"this mistral \(windows of attention\)"),  # the file leaves it out
        ({"model_type": "qwen3", "sliding_window": 8, "use_sliding_window": True}, r"\(use_sliding_window = true\)"),
    ]:
        (tmp_path / "hub/config.json").write_text(json.dumps({**sizes, **keys}))
        with pytest.raises(ConfigError, match=why):
            load_layout(None, {"model.weights": str(tmp_path / "hub")})
    (tmp_path / "hub/config.json").write_text(json.dumps({**sizes, "model_type": "qwen3", "sliding_window": 8}))
    assert load(None, {"model.weights": str(tmp_path / "hub")}).model.head_dim == 128  # transformers' own default
    written("mixtral", tmp_path / "own")
    with pytest.raises(ConfigError, match=r"model\.num_experts = 2: model\.weights = .* sets it"):
        load_layout(None, {"model.weights": str(tmp_path / "own"), "model.num_experts": 2})


def _loaded_and_saved(rank: int, folder: str, flags: dict[str, Any]) -> None:
    layout = load_layout(f"{folder}/checkpoints/model.toml", {**flags, "train.device": "cpu"})
    pipeline = build_pipeline(layout, torch.device("cpu"))
    checkpoint.load(f"{folder}/checkpoints", pipeline)
    extra = {"config": layout.config.model_dump(mode="json")}
    checkpoint.save(f"{folder}/again", 1, pipeline, extra=extra)
    pipeline.close()


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("llama", {"parallel.tp": 2}),
        ("qwen2-moe mixed", {"parallel.dp": 2, "parallel.ep": 2}),
        ("qwen3-moe", {"parallel.tp": 2}),
    ],
    ids=["tp2 pp2", "ep2 pp2", "experts, tp2 pp2"],
)
def test_a_round_trip_over_parts_is_bit_equal(name: str, flags: dict[str, Any], tmp_path: Path) -> None:
    written(name, tmp_path / "hub")
    hub.import_directory(tmp_path / "hub", tmp_path / "checkpoints")
    common = {"parallel.pp": 2, "schedule.name": "1f1b", "schedule.microbatches": 4}
    run_ranks(_loaded_and_saved, 4, str(tmp_path), {**common, **flags})
    hub.export(tmp_path / "again", tmp_path / "out")
    same(tmp_path / "hub", tmp_path / "out")


@pytest.mark.parametrize(
    ("key", "name", "schedule", "output"),
    [("source", "gpt2", "zbv", "last"), ("weights", "qwen2", "interleaved", "last"), ("source", "qwen3", "1f1b", "pp")],
    ids=["foreign", "own", "foreign, vocabulary"],
)
def test_a_directory_trains_and_comes_out(key: str, name: str, schedule: str, output: str, tmp_path: Path) -> None:
    """Five steps from a directory on two ranks, and out, with embeddings that are tied where one rank has the output layer:
    `transformers` has the loss before the steps, and the logits of the trained checkpoint."""
    model = written(name, tmp_path / "hub")
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == (output == "last")
    (tmp_path / "hub/special_tokens_map.json").write_text("{}")
    (tmp_path / "text.txt").write_text("the loom weaves " * 4000)
    keys = {f"model.{key}": "hub", "parallel.pp": 2, "schedule.name": schedule, "schedule.microbatches": 4}
    keys |= {"parallel.vocabulary": output}
    keys |= {
        "train.steps": 5,
        "train.seq_len": 24,
        "train.global_batch_size": 8,
        "train.device": "cpu",
        "sample.tokens": 0,
    }
    keys |= {"data.source": "text.txt", "log.dir": "runs", "train.recompute": "[1]", "data.tokenizer": "bytes"}
    done = pipeloom("train", *(f"--{key}={value}" for key, value in keys.items()), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    hub.export(run, tmp_path / "out")
    trained = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    section = load(None, {f"model.{key}": str(tmp_path / "hub")}).model
    cut = hf.layers(tmp_path / "hub") if key == "source" else layers(section.shape(), 0)
    groups = cut.tied if key == "source" else tied(section.shape())  # type: ignore[attr-defined]
    pipeline = Pipeline(cut, pl.schedules.gpipe(1, 1), loss=cross_entropy, tied=groups)
    checkpoint.load(run, pipeline)
    pipeline.eval()
    corpus = {"data.source": str(tmp_path / "text.txt"), "data.tokenizer": "bytes", "train.seq_len": 24}
    held = require_data(load(None, {**corpus, "train.global_batch_size": 8}), 1).held_out
    with torch.no_grad():
        before, after = model(tokens()).logits, trained(tokens()).logits
        losses = [torch.stack([cross_entropy(m(b.tokens).logits, b.targets) for b in held]) for m in (model, trained)]
        assert torch.allclose(pipeline.predict(tokens()), after, atol=1e-5)
    pipeline.close()
    assert float((after - before).abs().max()) > 1e-2
    records = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    (said,) = [record for record in records if record["event"] == "held-out"]
    counts = torch.tensor([float(batch.targets.numel()) for batch in held])
    want = [float((each * counts).sum() / counts.sum()) for each in losses]
    assert [said["before"], said["after"]] == pytest.approx(want, rel=1e-5)
    assert (tmp_path / "out/special_tokens_map.json").read_text() == "{}"


def test_a_tokenizer_of_its_own_goes_out_with_the_model(tmp_path: Path) -> None:
    """And a configuration that is not the directory's any more is not taken for it."""
    written("qwen2", tmp_path / "hub")
    hub.import_directory(tmp_path / "hub", tmp_path / "checkpoints")
    section = load(tmp_path / "checkpoints/model.toml").model
    pipeline = Pipeline(
        layers(section.shape(), 0), pl.schedules.gpipe(1, 1), loss=cross_entropy, tied=tied(section.shape())
    )
    (tmp_path / "words.json").write_text('{"own": 1}')
    (tmp_path / "words").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (tmp_path / "words" / name).write_text('{"folder": 1}')
    config = tmp_path / "hub/config.json"
    config.write_text(config.read_text().replace('"intermediate_size": 48', '"intermediate_size": 64'))
    for number, tokenizer in enumerate(("words.json", "words", "gone.json")):
        described = {"model": section.model_dump(mode="json"), "data": {"tokenizer": str(tmp_path / tokenizer)}}
        path = checkpoint.save(tmp_path / "runs", number, pipeline, extra={"config": described})
        out = tmp_path / f"out{number}"
        hub.export(path, out)
        assert json.loads((out / "config.json").read_text())["intermediate_size"] == 48
        files = {file.name for file in out.glob("*.json")}
        assert ("tokenizer.json" in files) == (tokenizer != "gone.json")
        assert ("tokenizer_config.json" in files) == (tokenizer == "words")
    pipeline.close()
    assert json.loads((tmp_path / "out0/tokenizer.json").read_text()) == {"own": 1}


def test_prediction_blocks_are_left_out_of_an_export(tmp_path: Path) -> None:
    section = load("tiny", {"model.num_nextn_predict_layers": 1, "model.num_hidden_layers": 2}).model
    pipeline = Pipeline(layers(section.shape(), 0), pl.schedules.gpipe(1, 1), loss=cross_entropy)
    path = checkpoint.save(tmp_path / "runs", 0, pipeline, extra={"config": {"model": section.model_dump(mode="json")}})
    weights = {name: value.detach().clone() for name, value in pipeline.named_parameters()}
    pipeline.close()
    hub.export(path, tmp_path / "out")
    exported = tensors(tmp_path / "out")
    model = {name for name in weights if not name.startswith("model.layers.2.") and "mtp" not in name}
    assert exported.keys() == {hub_name(name) for name in model}
    assert all(torch.equal(exported[hub_name(name)], weights[name]) for name in model)


def test_what_cannot_be_exported_is_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        hub.export(tmp_path, tmp_path / "out")
    written("qwen2", tmp_path / "hub")
    path, _ = hub.import_directory(tmp_path / "hub", tmp_path / "checkpoints")
    with pytest.raises(ConfigError, match="is not empty"):
        hub.export(path, tmp_path / "hub")
    extra = path / "extra.json"
    whole = extra.read_text()
    extra.write_text(whole.replace("256", "257"))
    with pytest.raises(CheckpointError, match="damaged"):
        hub.export(path, tmp_path / "out")
    sizes = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2}
    shape = DecoderShape(**sizes, intermediate_size=8, vocab_size=9, num_experts=2, router="switch")
    with pytest.raises(ConfigError, match='router = "softmax", not "switch"'):
        hub.hub_config(shape)
    mixed = replace(shape, router="softmax", moe_layer_freq=(1, 0))
    with pytest.raises(ConfigError, match=r"expert_blocks = \[true, true\], not \[true, false\]"):
        hub.hub_config(mixed)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"parallel.tp": 2},
            r"parallel\.tp = 2: it applies to Pipeloom's own decoder only, not to model\.source; nearest: 1",
        ),
        ({"parallel.dp": 2, "parallel.ep": 2}, r"parallel\.ep = 2: it applies to Pipeloom's own decoder only"),
        ({"model.hidden_size": 64}, r'model\.hidden_size = 64: model\.source = ".*" sets it; leave it out'),
        ({"model.qk_norm": True}, r'model\.qk_norm = true: model\.source = ".*" sets it; leave it out'),
        ({"model.source": "/nowhere"}, r"config\.json cannot be read"),
    ],
)
def test_a_source_and_keys_that_contradict_it(flags: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_SIZES))
    with pytest.raises(ConfigError, match=message):
        load_layout("tiny", {"model.source": str(tmp_path), "model.num_hidden_layers": 4, **flags})


def test_a_source_gives_its_sizes(tmp_path: Path) -> None:
    gpt = {"model_type": "gpt2", "n_layer": 6, "n_embd": 48, "n_head": 3, "vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps(gpt))
    model = load(None, {"model.source": str(tmp_path)}).model
    assert (model.num_hidden_layers, model.hidden_size, model.num_attention_heads, model.vocab_size) == (6, 48, 3, 300)
    config = load(None, {"model.source": str(tmp_path), "train.seq_len": 32})
    (tmp_path / "config.toml").write_text(to_toml(config))
    assert load(tmp_path / "config.toml") == config
    sizes = {**_SIZES, **_QWEN_MOE, "num_hidden_layers": 6, "head_dim": 8}
    deepseek = {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "kv_lora_rank": 8,
        "shared_expert_intermediate_size": 0,
    }
    deepseek |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    for keys, sparse in [
        ({"model_type": "qwen2_moe"}, [1, 1, 1, 1, 1, 1]),
        ({"model_type": "qwen2_moe", "decoder_sparse_step": 2, "mlp_only_layers": [3]}, [0, 1, 0, 0, 0, 1]),
        ({**deepseek, "moe_layer_freq": 2, "first_k_dense_replace": 1}, [0, 0, 1, 0, 1, 0]),
        ({**deepseek, "first_k_dense_replace": 6}, [0] * 6),
    ]:
        (tmp_path / "config.json").write_text(json.dumps({**sizes, **keys}))
        section = load(None, {"model.source": str(tmp_path)}).model
        assert [int(block) for block in section.expert_blocks] == sparse, keys
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 6}))
    with pytest.raises(ConfigError, match="has no hidden_size"):
        load(None, {"model.source": str(tmp_path)})


def test_an_import_holds_one_layer_at_a_time(tmp_path: Path) -> None:
    """Not the whole model, and not the experts twice but for their own layer's."""
    model = written("qwen3-moe", tmp_path / "hub")
    largest = max(sum(p.nbytes for p in layer.parameters()) for layer in model.model.layers)
    whole = sum(p.nbytes for p in model.parameters())
    hub.import_directory(tmp_path / "hub", tmp_path / "once")  # imports and caches are not what is measured
    with LiveBytes() as live:
        hub.import_directory(tmp_path / "hub", tmp_path / "checkpoints")
    assert live.peak < 3 * largest + 20_000 < whole, (live.peak, largest, whole)


@pytest.mark.parametrize(
    ("more", "count"), [pytest.param([], 52, marks=pytest.mark.full), (["--lora.r", "2"], 52 + 2 * 4 * 4)]
)
def test_verify_compares_a_directory_and_its_adapters_over_replicas(
    more: list[str], count: int, tmp_path: Path
) -> None:
    written("gpt2", tmp_path / "hub")
    words = ["verify", "--model.source", str(tmp_path / "hub"), "--json"]
    words += ["--parallel.pp", "1", "--parallel.dp", "2", "--schedule.name", "1f1b", "--schedule.microbatches", "2"]
    words += ["--train.seq_len", "12", "--train.global_batch_size", "8", "--train.device", "cpu"]
    done = pipeloom(*words, *more, folder=tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    (layout,) = json.loads(done.stdout)["layouts"]
    assert layout["passed"]
    assert layout["parameters"] == count


@pytest.mark.parametrize("kind", ["bytes", "file", "directory", "own template"])
def test_prompts_of_an_export_are_those_of_the_run(kind: str, tmp_path: Path) -> None:
    """Of chats: the run's template and tokenizer go out with the weights, and with adapters alone."""
    name = "bytes"
    if kind == "file":
        name = str(tokenizer_file(tmp_path / "words.json"))
    elif kind != "bytes":
        name = str(tokenizer_directory(tmp_path / "words"))
    data = {"tokenizer": name, "template": "auto" if kind == "own template" else "simple"}
    if kind == "file":
        data["eos"] = "<s>"
    size = {"model.vocab_size": 300, "model.hidden_size": 32, "model.num_hidden_layers": 2}
    section = load("tiny", size).model
    pipeline = Pipeline(layers(section.shape(), 0), pl.schedules.gpipe(1, 1), loss=cross_entropy)
    extra = {"config": {"model": section.model_dump(mode="json"), "data": data}, "chat": True}
    run = checkpoint.save(tmp_path / "runs", 0, pipeline, extra=extra)
    pipeline.close()
    out = tmp_path / "out"
    hub.export(run, out)
    before, after = (text_of(open_model(path, 1, {})) for path in (run, out))
    prompt = before.encode("red wool\nand blue")
    assert after.encode("red wool\nand blue") == prompt
    assert after.decode(prompt) == before.decode(prompt)
    if kind == "bytes":
        assert bytes(prompt) == b"<|user|>\nred wool\nand blue\n<|assistant|>\n"
        return
    assert after.ends == before.ends
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    asked = [{"role": "user", "content": "red wool\nand blue"}]
    assert theirs.apply_chat_template(asked, add_generation_prompt=True)["input_ids"] == prompt
    if kind == "own template":
        return
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": "é"}}}
    answers = [{"role": "assistant", "content": "", "tool_calls": [call, call]}, {"role": "tool", "content": "5"}]
    record = {"messages": [*asked, *answers, {"role": "assistant", "content": "It is 5."}], "tools": [{"name": "f"}]}
    given = conversation(record, ("messages",))
    tokenizer = load_tokenizer(name, data.get("bos", "auto"), data.get("eos", "auto"))
    (ours,) = SimpleTemplate(tokenizer).rows(given)
    (exported,) = TokenizerTemplate(out).rows(given)
    texts = [tokenizer.decode(torch.tensor([p.content])) if isinstance(p.content, int) else p.content for p in ours]
    assert "".join(str(piece.content) for piece in exported) == "".join(texts)
    assert "".join(str(piece.content) for piece in exported if piece.counts) == "".join(
        text for text, piece in zip(texts, ours, strict=True) if piece.counts
    )


def test_the_tokenizer_and_the_template_of_a_run_are_beside_its_adapters(tmp_path: Path) -> None:
    folder = tmp_path / "hub"
    sizes = {**_SIZES, "vocab_size": 300}
    transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**sizes)).save_pretrained(folder)
    tokenizer_directory(folder)
    values = {"model.source": str(folder), "lora.r": 2, "data.template": "simple", "train.device": "cpu"}
    layout = load_layout(None, {**values, "parallel.pp": 1, "schedule.name": "gpipe", "schedule.microbatches": 1})
    pipeline = build_pipeline(layout, torch.device("cpu"))
    config = layout.config.model_dump(mode="json")
    saver = Saver(tmp_path / "runs", pipeline, base=base_weights(layout.config))
    run = saver.save(0, {"config": config, "chat": True})
    pipeline.close()
    hub.export(run, tmp_path / "out")
    assert (tmp_path / "out/adapter_model.safetensors").is_file()
    before, after = (text_of(open_model(path, 1, {})) for path in (run, tmp_path / "out"))
    assert after.encode("red") == before.encode("red")
    assert before.decode(before.encode("red")) == "<|user|>\nred\n<|assistant|>\n"
    assert after.ends == before.ends
