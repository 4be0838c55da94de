"""Files of a model's folder that somebody else wrote: types and limits of what is read of them."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paths import DATA
from pipeloom.config import load_layout
from pipeloom.config.settings import own_keys
from pipeloom.errors import ConfigError
from pipeloom.shapes import hub
from pipeloom.shapes.decoder import DecoderShape
from pipeloom.shapes.hub import adapter_keys, foreign_shape


def foreign(folder: str) -> DecoderShape:
    return foreign_shape(folder, f'model.source = "{folder}"')


def adapter(folder: str) -> dict[str, Any]:
    return adapter_keys(folder, f'lora.adapter = "{folder}"')


MODEL = {
    **{"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64},
    **{"intermediate_size": 64, "rms_norm_eps": 1e-5},
}
ADAPTER = {
    **{"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "some_later_option": None},
    **{"task_type": "CAUSAL_LM", "peft_version": "0.21.2", "megatron_core": "megatron.core", "use_dora": False},
    **{"rank_pattern": {}, "layers_to_transform": None, "init_lora_weights": True, "fan_in_fan_out": True},
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_scaling": [1]}, "rope_scaling = "),
        ({"rope_theta": "x"}, 'rope_theta = "x": it must be a number'),
        ({"rope_parameters": {"rope_theta": float("inf")}}, "it must be a finite number"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; it must be at most 100000"),
        ({"num_hidden_layers": [2]}, "it must be a whole number"),
        ({"hidden_size": -32}, "hidden_size = -32: it must be a whole number from 2 to "),
        ({"vocab_size": 64.0}, "vocab_size = 64.0: it must be a whole number"),
        ({"model_type": "qwen3_moe", "num_key_value_heads": 2, "mlp_only_layers": ["x" * 900]}, "mlp_only_layers"),
        ({"model_type": 5}, "model_type = 5: it must be text"),
        ({"model_type": ["llama"]}, r'model_type = \["llama"\]: it must be text'),
        ({"hidden_size": 1}, "hidden_size = 1: it must be a whole number from 2 to "),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps = 1.*: it must be a finite number"),
        (
            {"num_attention_heads": 32, "num_key_value_heads": 3},
            "num_attention_heads = 32, which do not share num_key_value_heads = 3 and hidden_size = 32",
        ),
        (
            {"num_attention_heads": 64, "num_key_value_heads": 64},
            "num_attention_heads = 64, which do not share num_key_value_heads = 64 and hidden_size = 32",
        ),
    ],
)
def test_a_value_of_another_type_in_a_models_configuration_is_named(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**MODEL, **changes}))
    for key, read in (("source", foreign), ("weights", own_keys)):
        with pytest.raises(ConfigError, match=rf'^model\.{key} = ".*": .*config\.json.*{words}') as error:
            read(str(tmp_path))
        assert len(str(error.value)) < 500 + 2 * len(str(tmp_path))


def test_null_counts_as_absent(tmp_path: Path) -> None:
    assert own_keys(str(written(tmp_path, {**MODEL, "rope_theta": None})))["rope_theta"] == 10_000.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"model_type": "a_family"},
            r'model_type = "a_family" is not known, and transformers, .* pip install -e ".\[train,hf\]"$',
        ),
        ({"mlp_bias": True}, "mlp_bias = true is not known, and transformers"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            r"layer_types = \[.* is not known, and transformers",
        ),
        ({"use_sliding_window": 1, "model_type": "qwen2"}, "use_sliding_window = 1 is not known, and transformers"),
        ({"num_attention_heads": None}, "has no num_attention_heads, and transformers"),
        (
            {"model_type": None, "n_routed_experts": 4},
            "n_routed_experts = 4 is not known; without model_type a file has the keys",
        ),
        ({"model_type": None, "hidden_size": None}, "has no hidden_size; without model_type"),
    ],
)
def test_what_the_table_lacks_is_refused_without_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], words: str
) -> None:
    monkeypatch.setattr(hub, "_counters", [])
    with pytest.raises(ConfigError, match=rf"config\.json:? {words}"):
        foreign(str(written(tmp_path, {**MODEL, **changes})))


def test_what_the_table_lacks_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that predict further ahead are none of a run's."""
    monkeypatch.setattr(hub, "_counters", [])
    shape = foreign(str(written(tmp_path, {**MODEL, "layer_types": ["full_attention"] * 2, "use_cache": True})))
    calls: list[Any] = []

    def counter(values: Any, where: str) -> DecoderShape:
        calls.append((values, where))
        return replace(shape, num_nextn_predict_layers=1)

    hub.count_with(counter)
    assert foreign(str(tmp_path)) == shape
    assert not calls
    values = {**MODEL, "layer_types": ["sliding_attention"] * 2}
    counted = foreign(str(written(tmp_path, values)))
    assert (counted, counted.name) == (shape, tmp_path.name)
    assert calls == [(values, f'model.source = "{tmp_path}": {tmp_path / "config.json"}')]


def written(folder: Path, content: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("text", ["[]", "[" * 300_000, "{", '"x"'])
def test_what_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    for name in ("config.json", "adapter_config.json"):
        (tmp_path / name).write_text(text)
    for read in (foreign, own_keys, adapter):
        with pytest.raises(ConfigError, match=r"config\.json (is not a JSON object|cannot be read: .* is not JSON)"):
            read(str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"r": 10**30}, "r = 1.*: it must be a whole number from 1 to 65,536"),
        ({"r": 0}, "r = 0: it must be a whole number from 1"),
        ({"lora_alpha": "x"}, 'lora_alpha = "x": it must be a number'),
        ({"lora_dropout": "x"}, 'lora_dropout = "x": it must be a number'),
        ({"target_modules": 5}, "target_modules"),
        ({"target_modules": []}, "target_modules"),
        ({"peft_type": "IA3"}, "peft_type = \"IA3\": it must be 'LORA'"),
        ({"bias": "all"}, "bias = \"all\": it must be 'none'"),
        ({"lora_alpha": 10**400}, "lora_alpha = 1.*: it must be a number from 0"),
        ({"use_dora": True}, "use_dora = true is not supported"),
        ({"some_later_option": {"x": 1}}, r'some_later_option = \{"x": 1\} is not supported'),
        (
            {"init_lora_weights": "pissa_niter_4"},
            'init_lora_weights = "pissa_niter_4": such an adapter belongs to weights',
        ),
        ({"init_lora_weights": ["pissa"]}, "init_lora_weights"),
    ],
)
def test_a_value_of_another_type_in_an_adapters_configuration_is_named(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({**ADAPTER, **changes}))
    with pytest.raises(ConfigError, match=rf"adapter_config\.json: {words}"):
        adapter(str(tmp_path))


def test_an_adapter_of_changed_weights_is_refused_by_its_key(tmp_path: Path) -> None:
    given = json.loads((DATA / "foreign" / "adapters" / "pissa.json").read_text(encoding="utf-8"))
    for kind, refused in (("pissa", True), (True, False)):
        (tmp_path / "adapter_config.json").write_text(json.dumps({**given, "init_lora_weights": kind}))
        with pytest.raises(ConfigError, match='init_lora_weights = "pissa"') if refused else nullcontext():
            assert adapter(str(tmp_path))["r"] == 4


@pytest.mark.parametrize(
    ("blocks", "flags", "cores", "world", "ranks", "chunks"),
    [
        (12, {}, 2, None, 2, 2),
        (12, {}, 16, None, 4, 2),
        (6, {}, 16, None, 4, 1),
        (2, {}, 16, None, 2, 1),
        (1, {}, 1, None, 1, 1),
        (12, {}, 2, 6, 6, 2),  # torchrun decides on the number of workers
        (12, {"parallel.dp": 2}, 4, None, 2, 2),
        (6, {"schedule.chunks": 3}, 4, None, 2, 3),
        (6, {"parallel.pp": 6}, 2, None, 6, 1),
        (6, {"schedule.name": "zbv"}, 16, None, 3, 2),
    ],
)
def test_the_pipeline_fits_the_layers_and_cores(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    blocks: int,
    flags: dict[str, Any],
    cores: int,
    world: int | None,
    ranks: int,
    chunks: int,
) -> None:
    monkeypatch.setattr("pipeloom.config.settings.usable_cores", lambda: cores)
    folder = written(tmp_path, {**MODEL, "num_hidden_layers": blocks})
    keys = {"model.source": str(folder), "train.device": "cpu", **flags}
    layout = load_layout(None, keys, world_size=world)
    assert (layout.schedule.ranks, layout.schedule.chunks) == (ranks, chunks)
    assert len(layout.stage_layers) <= blocks


def test_a_pipeline_that_does_not_fit_the_layers_is_refused_by_its_flags(tmp_path: Path) -> None:
    keys = {"model.source": str(written(tmp_path, {**MODEL, "num_hidden_layers": 6}))}
    with pytest.raises(ConfigError, match=r"6 decoder layers, .*; nearest: --parallel\.pp 6$"):
        load_layout(None, keys, {"parallel.pp": 8})
    with pytest.raises(
        ConfigError, match=r"8 stages, .* \(4 ranks of 2\); nearest: --parallel\.pp 3 or --schedule\.chunks 1$"
    ):
        load_layout(None, keys, {"parallel.pp": 4, "schedule.chunks": 2})


@pytest.mark.parametrize("key", ["source", "weights"])
def test_the_name_of_a_model_on_the_hub_is_not_downloaded(key: str) -> None:
    with pytest.raises(
        ConfigError, match=r"nothing is downloaded; first:\nhf download org/a-model --local-dir a-model$"
    ):
        load_layout(None, {f"model.{key}": "org/a-model"})
