"""Sizes of models of `transformers` as they are planned, against those of the models that it builds."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_families import MODEL_FAMILIES
from paths import DATA
from pipeloom.cli import app
from pipeloom.errors import ConfigError, UsageError
from pipeloom.models import hf
from pipeloom.models.hf.sizes import counted_shape
from pipeloom.runtime.stage_modules import layer_cost
from pipeloom.shapes import hub
from pipeloom.shapes.decoder import DecoderShape
from pipeloom.shapes.hub import VERIFIED_FAMILIES, shape_of
from pipeloom.shapes.layers import layer_sizes, parameter_count, whole_layers

# What a family is refused for -> words of the message.
REFUSED = (
    *("encoder", "indexer", "without hidden states", "timm"),
    *(
        "cannot be counted",
        "builds no causal model",
        "has no num_hidden_layers",
        "its forward",
        "cannot be read",
        "decoder layers",
        "besides the hidden states",
    ),
)
# One of each kind: of the table, experts in some blocks, windows, chunks, linear attention, latent attention, state spaces, tied
# weights by default, an encoder, an indexer, several streams, a vision tower beside the blocks.
SAMPLE = (
    *(
        "llama",
        "deepseek_v3",
        "llama4_text",
        "gpt_oss",
        "qwen3_next",
        "deepseek_v2",
        "mamba2",
        "gemma2",
        "bert",
        "deepseek_v32",
    ),
    *("gemma3n_text", "gemma3"),
)
PARTS = 12


@pytest.fixture(autouse=True)
def counter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_counters", [counted_shape])


def transformers() -> Any:
    return pytest.importorskip("transformers")


def compare(kind: str) -> str:
    """Compare the parameters of each layer of a family's default configuration; return why it is refused, or ""."""
    package = transformers()
    package.logging.set_verbosity_error()
    try:
        config = package.CONFIG_MAPPING[kind]()
        values = json.loads(config.to_json_string())
    except Exception as error:
        return f"no default configuration: {error}"
    reason = ""
    try:
        shape = shape_of(values, kind)
    except ConfigError as error:
        reason = str(error)
    if reason:
        assert reason.startswith(f"{kind}: ")
        assert any(words in reason for words in REFUSED), reason
        return reason
    with torch.device("meta"):
        model = package.AutoModelForCausalLM.from_config(config)
    compare_with(model, replace(shape, num_nextn_predict_layers=0), config.get_text_config().num_hidden_layers)
    return ""


def compare_with(model: Any, shape: DecoderShape, blocks: int) -> None:
    """Compare the parameters of each block, and of the model."""
    lists = [part for part in model.base_model.modules() if isinstance(part, nn.ModuleList) and len(part) == blocks]
    trunk = max(lists, key=lambda part: sum(each.numel() for each in part.parameters()))
    expected = [sum(each.numel() for each in layer.parameters()) for layer in trunk]
    sizes = layer_sizes(shape, 16)
    assert [size.parameters for size in sizes[1:-1]] == expected
    tied = round(whole_layers(shape, 16)[-1].tied)
    outside = sum(each.numel() for each in model.parameters()) - sum(expected)
    assert sizes[0].parameters + sizes[-1].parameters - tied == outside


@pytest.mark.slow
@pytest.mark.parametrize("kind", SAMPLE)
def test_parameters_of_each_layer_are_those_of_transformers(kind: str) -> None:
    refused = {
        "bert": "as in an encoder",
        "deepseek_v32": "index_topk = 2048",
        "gemma3n_text": "hidden_size_per_layer_input = 256",
    }
    reason = compare(kind)
    assert bool(reason) == (kind in refused)
    assert refused.get(kind, "") in reason


@pytest.mark.full
@pytest.mark.parametrize("part", range(PARTS))
def test_all_causal_families_have_the_parameters_of_transformers(part: int) -> None:
    """Or are refused by name; those that are verified in pipelines are not, but where transformers builds no default one."""
    families = transformers().models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    for kind in list(families)[part::PARTS]:
        reason = compare(kind)
        print(kind, reason or "equal")
        assert not reason or kind not in VERIFIED_FAMILIES or "no causal model" in reason, reason


SIZES = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "intermediate_size": 96,
}
TYPES = ["sliding_attention", "full_attention"] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "reach"),
    [
        ({"model_type": "gpt_oss", "layer_types": TYPES, "sliding_window": 8, "num_local_experts": 4}, (8, 0, 8, 0)),
        ({"model_type": "llama4_text", "attention_chunk_size": 8, "num_local_experts": 2}, (-8, -8, -8, 0)),
        ({"model_type": "cohere2", "layer_types": TYPES, "sliding_window": 8}, (8, 0, 8, 0)),
        ({"model_type": "phi3", "sliding_window": 8, "pad_token_id": 0}, (8,) * 4),
        ({"model_type": "phi3", "pad_token_id": 0}, (0,) * 4),
        (
            {"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"] * 2, "linear_key_head_dim": 24},
            (24, 0, 24, 0),
        ),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, (0, 8, 8, 8)),
    ],
)  # fmt: skip
def test_attention_sees_what_the_file_says(values: dict[str, Any], reach: tuple[int, ...]) -> None:
    shape = shape_of({**SIZES, "num_key_value_heads": 2, "num_experts": 2, "num_experts_per_tok": 1, **values}, "m")
    assert shape.reach == reach
    long, short = (whole_layers(shape, tokens) for tokens in (64, 8))
    kinds = dict(zip(reach, long[1:-1], strict=True))
    operations = {at: sum(op.flops for op in layer.ops if op.attends) for at, layer in kinds.items()}
    width = 2 * shape.num_attention_heads * shape.head_width
    seen = {0: 64, 8: 8 * (2 - 8 / 64), -8: 8, 24: 24 * (2 - 24 / 64)}  # twice the mean number of tokens
    assert operations == {at: 64 * seen[at] * width for at in kinds}
    if 8 in kinds:  # a sequence inside of the window
        assert len({sum(op.flops for op in layer.ops if op.attends) for layer in short[1:-1]}) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_key_value_heads": 3}, "num_attention_heads = 4, which do not share num_key_value_heads = 3"),
        ({"hidden_size": 1}, "m: "),
        ({"hidden_size": float("nan")}, "m: "),
        ({"hidden_size": 10**400}, "m: "),
        ({"num_hidden_layers": 5000}, "num_hidden_layers = 5000: at most 1,000 blocks are counted"),
        ({"num_hidden_layers": 10**9}, "it must be at most 100000"),
        ({"vocab_size": "x"}, "m: "),
        ({"model_type": "no_family"}, "no_family"),
        ({"model_type": ["gemma2"]}, r'model_type = \["gemma2"\]: it must be text'),
        ({"attn_implementation": "org/kernel"}, "names code to be downloaded"),
        ({"model_type": "bart"}, "encoder"),
    ],
)
def test_a_value_that_cannot_be_is_one_sentence(changes: dict[str, Any], words: str) -> None:
    values = {**SIZES, "model_type": "gemma2", "num_key_value_heads": 2, **changes}
    with pytest.raises(ConfigError, match=words) as error:
        shape_of(values, "m")
    assert str(error.value).startswith("m: ")
    assert "\n" not in str(error.value)
    assert "/tmp" not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "millions"), [("tied_by_default", 2_614.3), ("alternating_experts", 400_711.8), ("windows", None)]
)
def test_files_of_other_programs_have_their_published_sizes(name: str, millions: float | None) -> None:
    values = json.loads(Path(DATA / "foreign" / "plan_configs" / f"{name}.json").read_text(encoding="utf-8"))
    shape = shape_of(values, name)
    if millions is not None:
        assert parameter_count(shape) / 1e6 == pytest.approx(millions, abs=0.05)
        return
    attention = [sum(op.flops for op in layer.ops if op.attends) for layer in whole_layers(shape, 131_072)[1:-1]]
    assert attention[0] / attention[1] == pytest.approx(256 / 131_072, rel=1e-2)
    assert sum(attention) / (4 * attention[1]) == pytest.approx(0.5, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        *(("gpt_oss_20b", 20_914_757_184), ("deepseek_v2_lite", 15_706_484_224), ("qwen3_5_27b", None)),
        ("deepseek-v3", 671_026_404_352),  # and 256 biases of routers in each of 58 blocks, which are buffers
    ],
)
def test_published_models_have_the_parameters_of_transformers(name: str, parameters: int | None) -> None:
    """In each layer; and in all of them those of the published weights, where these hold nothing but the decoder."""
    file = Path(DATA / "foreign" / "plan_configs" / f"{name}.json")
    values = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else hub.presets()[name]
    config = transformers().AutoConfig.for_model(**values)
    with torch.device("meta"):
        model = transformers().AutoModelForCausalLM.from_config(config)
    shape = replace(shape_of(values, name), num_nextn_predict_layers=0)
    compare_with(model, shape, values["num_hidden_layers"])
    assert parameter_count(shape) == parameters or round(parameter_count(shape) / 1e9) == 27


def run_command(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    app(list(words), standalone_mode=False)
    return capsys.readouterr().out


# model_type -> its key of [model]; GLM has a block for multi-token prediction, which transformers does not train
WRITTEN: dict[str, tuple[dict[str, Any], str]] = {
    "glm4_moe": ({"n_routed_experts": 8, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1}, "source"),
    "deepseek_v3": (
        {
            **{"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1},
            **{"kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
            **{"moe_intermediate_size": 32, "num_key_value_heads": 4},
        },
        "source",
    ),
    "gemma2": ({"sliding_window": 8, "head_dim": 16}, "source"),
    "llama": ({}, "weights"),
    "qwen3_moe": ({"num_experts": 8, "moe_intermediate_size": 32, "head_dim": 16}, "weights"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", WRITTEN)
def test_what_plan_writes_of_a_directory_train_accepts(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    more, key = WRITTEN[kind]
    common = {**SIZES, "num_key_value_heads": 2, "num_experts_per_tok": 2} if "experts" in str(more) else {**SIZES}
    common.setdefault("num_key_value_heads", 2)
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps({**common, "model_type": kind, **more}))
    plan = ("plan", "--model", "model", "--global-batch", "8", "--seq", "2048", "--output", "run.toml")
    for words in (("--devices", "4"), ("--layout", "pp=2,m=8"), ("--layout", "pp=2,dp=2,m=4,v=2")):
        run_command(capsys, *plan, *words)
        run = tomllib.loads(Path("run.toml").read_text())
        assert run["model"] == {key: str(tmp_path / "model")}  # whose vocabulary is smaller than that of bytes
        assert "m" not in run["parallel"].get("stages", "")
        assert "would start" in run_command(capsys, "train", "run.toml", "--dry-run")
    allowed = key == "weights"
    for option, words in (("--layout", "tp=2,m=8"), ("--fixed", "tp=2"), ("--layout", "dp=2,ep=2,m=4")):
        devices = ("--devices", "4") if option == "--fixed" else ()
        if allowed and ("ep" not in words or kind != "llama"):
            run_command(capsys, *plan, option, words, *devices)
            assert "would start" in run_command(capsys, "train", "run.toml", "--dry-run")
        elif not allowed:
            with pytest.raises(
                UsageError, match=rf"^{option}: [te]p=2: the layers of transformers.*; nearest: [te]p=1$"
            ):
                run_command(capsys, *plan, option, words, *devices)


def test_layers_cost_their_parameters_without_embeddings() -> None:
    """So that stages are cut by them, as modules are."""
    layers = hf.layers(MODEL_FAMILIES["mixtral"].build())
    assert [layer.cost for layer in layers] == [layer_cost(layer()) for layer in layers]
    assert layers[0].cost == 1
