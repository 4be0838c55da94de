"""`pipeloom generate`: greedy text equals that of `transformers`; what limits and seeds do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from commands import pipeloom
from corpora import tokenizer_directory
from hf_families import MODEL_FAMILIES, SCHEDULES
from pipeloom.config import load, load_layout
from pipeloom.errors import CheckpointError, ConfigError, UsageError
from pipeloom.measure.build import build_pipeline
from pipeloom.models import cross_entropy, hf
from pipeloom.models import layers as decoder_layers
from pipeloom.runtime import LocalPipeline
from pipeloom.train.checkpoint.save import write_whole
from pipeloom.train.hub import conversion as hub
from pipeloom.train.hub.generate import Sampling, continue_prompts, extend, open_model, text_of

PROMPTS = [[5, 9, 11], [7, 8, 9, 10, 11, 12, 13], [3]]


def model(family: str) -> Any:
    torch.manual_seed(3)
    whole = transformers.AutoModelForCausalLM.from_config(MODEL_FAMILIES[family].build(), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return whole


def greedy(whole: Any, prompt: Sequence[int], count: int) -> list[int]:
    found = whole.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False, pad_token_id=0)
    return list(found[0, len(prompt) :].tolist())


@pytest.fixture
def lengths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens of each pass through a pipeline."""
    passes: list[int] = []
    predict = LocalPipeline.predict
    monkeypatch.setattr(
        LocalPipeline, "predict", lambda self, x, **more: passes.append(x.shape[1]) or predict(self, x, **more)
    )
    return passes


def in_pipeline(whole: Any, schedule: str = "1f1b") -> LocalPipeline:
    layers = hf.layers(whole)
    pipeline = LocalPipeline(layers, SCHEDULES[schedule](), loss=cross_entropy, tied=layers.tied)
    pipeline.eval()
    return pipeline


@pytest.mark.parametrize(
    ("family", "schedule"), [("llama", "1f1b"), ("mistral", "interleaved"), ("mixtral", "zbv"), ("mamba2", "1f1b")]
)
def test_greedy_text_is_that_of_transformers(family: str, schedule: str, lengths: list[int]) -> None:
    """Without keys and values kept, past the first window of 32 tokens, and with them: then each pass has one token.

    A window of attention that slides, experts, and a family that keeps states instead.
    """
    whole = model(family)
    whole.generation_config.eos_token_id = None
    pipeline = in_pipeline(whole, schedule)
    prompts = PROMPTS[:2]
    want = [greedy(whole, prompt, 30) for prompt in prompts]
    end = want[0][4]
    stopped = [tokens[: tokens.index(end) + 1] if end in tokens else tokens for tokens in want]
    for keep in (False, True):
        assert extend(pipeline, prompts, 30, Sampling(temperature=0), ends=[end], keep=keep) == stopped
        lengths.clear()
        assert extend(pipeline, prompts, 30, Sampling(temperature=0), keep=keep) == want
    # The prompts have 3 and 7 tokens: the second one's others are passed while the first has its continuation already.
    assert lengths == [3, *[1] * (4 + 29)]


def test_text_longer_than_the_context_is_computed_whole(lengths: list[int]) -> None:
    pipeline = in_pipeline(model("llama"))
    want = extend(pipeline, PROMPTS[:2], 20, Sampling(2.0), context=20)
    lengths.clear()
    assert extend(pipeline, PROMPTS[:2], 20, Sampling(2.0), context=20, keep=True) == want
    assert lengths == [3, *[1] * 17, *[20] * 6]
    prompts = [PROMPTS[0], [*range(3, 28)]]
    end = extend(pipeline, prompts, 4, Sampling(2.0), context=20)[1][-1]
    want = extend(pipeline, prompts, 10, Sampling(2.0), context=20, ends=[end])
    lengths.clear()
    assert extend(pipeline, prompts, 10, Sampling(2.0), context=20, ends=[end], keep=True) == want
    # Until the long text ends, both are computed whole.
    assert lengths == [*[20] * 4, 3 + 4, *[1] * 5]


@pytest.mark.parametrize("family", ["openai-gpt", "recurrent-gemma"])
def test_a_family_that_keeps_nothing_in_caches_is_computed_whole(family: str, lengths: list[int]) -> None:
    """One has no caches, the other keeps states in its layers."""
    pipeline = in_pipeline(model(family))
    want = extend(pipeline, PROMPTS, 4, Sampling(0.0))
    lengths.clear()
    assert extend(pipeline, PROMPTS, 4, Sampling(0.0), keep=True) == want
    assert lengths == [32] * 4


@pytest.mark.parametrize(("schedule", "experts"), [("1f1b", 0), ("zbv", 4)])
def test_keeping_keys_and_values_changes_no_token(schedule: str, experts: int, lengths: list[int]) -> None:
    """Each pass has one token of each sequence, until a sequence is longer than the context."""
    shape = load("tiny", {"model.num_experts": experts, "model.num_key_value_heads": 2}).model.shape()
    pipeline = LocalPipeline(decoder_layers(shape, 3), SCHEDULES[schedule](), loss=cross_entropy)
    pipeline.eval()
    sampling = Sampling(2.0, seed=3)
    for context, ends in ((None, [77]), (20, [])):
        want = extend(pipeline, PROMPTS, 30, sampling, context=context, ends=ends)
        lengths.clear()
        assert extend(pipeline, PROMPTS, 30, sampling, context=context, ends=ends, keep=True) == want
        # The longest prompt has 7 tokens.
        assert lengths[:14] == [32 if context is None else 20, *[1] * 13]
        assert {*lengths[14:]} == ({1} if context is None else {20})


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_model_without_finite_probabilities_is_refused(bad: float) -> None:
    with pytest.raises(UsageError, match="gives the next token no finite probabilities: its weights, or settings"):
        Sampling().choose(torch.tensor([0.0, bad, 1.0]), torch.Generator())


def test_draws_follow_from_the_seed_and_the_number_of_the_prompt() -> None:
    pipeline = in_pipeline(model("llama"))
    same = [PROMPTS[0]] * 2
    one, two = extend(pipeline, same, 20, Sampling(2.0, seed=4))
    assert one != two
    assert extend(pipeline, [PROMPTS[0], PROMPTS[1]], 20, Sampling(2.0, seed=4))[0] == one
    assert extend(pipeline, same, 20, Sampling(2.0, seed=5)) != [one, two]
    assert extend(pipeline, same, 20, Sampling(2.0, top_k=1)) == extend(pipeline, same, 20, Sampling(0.0))


def test_top_k_and_top_p_leave_the_likeliest_tokens() -> None:
    logits = torch.tensor([0.1, 0.4, 0.3, 0.2]).log()
    generator = torch.Generator().manual_seed(0)

    def drawn(sampling: Sampling) -> set[int]:
        return {sampling.choose(logits, generator) for _ in range(200)}

    assert drawn(Sampling(1.0)) == {0, 1, 2, 3}
    assert drawn(Sampling(1.0, top_k=2)) == {1, 2}
    assert drawn(Sampling(1.0, top_p=0.4)) == {1}
    assert drawn(Sampling(1.0, top_p=1e-50)) == {1}  # below what fp32 can tell from 0
    assert drawn(Sampling(1.0, top_p=0.41)) == {1, 2}
    assert drawn(Sampling(1.0, top_k=3, top_p=0.9)) == {1, 2, 3}
    assert drawn(Sampling(0.0)) == {1}


def written(folder: Path, vocabulary: int = 256) -> Any:
    torch.manual_seed(3)
    values = {**MODEL_FAMILIES["llama"].values, "vocab_size": vocabulary, "eos_token_id": None}
    config = transformers.LlamaConfig(**values)
    whole = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    whole.save_pretrained(folder)
    return whole


@pytest.mark.core
@pytest.mark.parametrize(
    ("source", "flags"), [("hub", ("--pp", "2")), pytest.param("ckpt", ("--tp", "2"), marks=pytest.mark.full)]
)
def test_the_command_gives_the_text_of_a_directory_and_of_its_checkpoint(
    source: str, flags: tuple[str, ...], tmp_path: Path
) -> None:
    """On two pipeline ranks, and of our own decoder on two tensor-parallel ranks."""
    whole = written(tmp_path / "hub")
    want = greedy(whole, list(b"ab"), 5)
    hub.import_directory(tmp_path / "hub", tmp_path / "ckpt")
    ended = pipeloom(
        "generate", str(tmp_path / source), *flags, "--prompt", "ab", "--tokens", "5", "--greedy", "--json"
    )
    assert ended.returncode == 0, ended.stderr
    (row,) = json.loads(ended.stdout)["sequences"]
    assert row["tokens"] == want
    assert row["prompt"] == "ab"
    assert row["text"].startswith("ab")


def test_a_prompt_is_a_message_where_the_directory_has_a_chat_template(tmp_path: Path) -> None:
    """As `transformers` renders it; `--raw` takes it as it stands."""
    folder = tokenizer_directory(tmp_path / "hub")
    whole = written(folder, 300)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    asked = tokenizer.apply_chat_template([{"role": "user", "content": "red"}], add_generation_prompt=True)["input_ids"]
    plain = tokenizer("red", add_special_tokens=False)["input_ids"]
    for flags, prompt in ((), asked), (("--raw",), plain):
        ended = pipeloom("generate", str(folder), *flags, "--prompt", "red", "--tokens", "5", "--greedy", "--json")
        assert ended.returncode == 0, ended.stderr
        (row,) = json.loads(ended.stdout)["sequences"]
        assert row["tokens"] == greedy(whole, prompt, 5)
        assert row["text"] == tokenizer.decode([*prompt, *row["tokens"]])


def test_a_checkpoint_on_plain_text_continues_it_and_an_imported_one_asks(tmp_path: Path) -> None:
    folder = tokenizer_directory(tmp_path / "hub")
    written(folder, 300)
    imported = open_model(hub.import_directory(folder, tmp_path / "ckpt")[0], 1, {})
    message = text_of(imported).encode("red")
    assert message == text_of(open_model(folder, 1, {})).encode("red")
    assert text_of(imported).decode(message) == "<s>[user] red\n[assistant] "
    for chat, prompt in ((True, message), (False, text_of(imported, raw=True).encode("red"))):
        assert text_of(replace(imported, chat=chat)).encode("red") == prompt
    assert len(prompt) < len(message)
    tokenizer_directory(folder, "{{ raise_exception('no message of the system') }}")
    with pytest.raises(UsageError, match=r"refuses it: no message of the system; nearest: --raw"):
        continue_prompts(imported, None, ["red"], 1, Sampling())  # type: ignore[arg-type]


def test_a_checkpoint_of_conversations_gets_its_prompts_as_messages_and_streams(tmp_path: Path) -> None:
    config = load_layout("tiny", {"parallel.pp": 1, "schedule.name": "gpipe"})
    pipeline = build_pipeline(config, torch.device("cpu"))
    pipeline.eval()
    weights = iter([{name: p.detach() for name, p in pipeline.named_parameters()}])
    extra = {"batch": 0, "chat": True, "config": config.config.model_dump(mode="json")}
    opened = open_model(write_whole(tmp_path, 0, weights, extra), 1, {})
    parts: list[str] = []
    ((text, added),) = continue_prompts(opened, pipeline, ["red"], 12, Sampling(0.0), parts.append)
    pipeline.close()
    assert parts[0] == "<|user|>\nred\n<|assistant|>\n"
    assert len(added) == 12
    assert len(parts) > 2
    assert text.startswith("".join(parts))


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    from pipeloom.train.hub.generate import open_model

    with pytest.raises(CheckpointError, match="does not exist; give a checkpoint, a run, or a Hugging Face directory"):
        open_model(tmp_path / "absent", 1, {})
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        open_model(tmp_path, 1, {})
    layers = hf.layers(MODEL_FAMILIES["llama"].build())
    pipeline = LocalPipeline(layers, SCHEDULES["1f1b"](), loss=cross_entropy)
    with pytest.raises(UsageError, match="prompt 1 is empty"):
        extend(pipeline, [[1], []], 2, Sampling())


def test_a_checkpoint_whose_model_is_code_is_run_when_that_is_allowed_only(tmp_path: Path) -> None:
    model = load("tiny", {"model.num_experts": 4, "model.experts_class": "no_such_module:Mine"}).model
    weights = iter([{"norm.weight": torch.ones(32)}])
    path = write_whole(tmp_path, 0, weights, {"batch": 0, "config": {"model": model.model_dump(mode="json")}})
    with pytest.raises(ConfigError, match=r'model\.experts_class = "no_such_module:Mine".*--trust-code allows it'):
        open_model(path, 1, {})
    with pytest.raises(ConfigError, match="No module named 'no_such_module'"):
        open_model(path, 1, {}, trust_code=True)
    with pytest.raises(ConfigError, match="no model of transformers computes"):
        hub.export(path, tmp_path / "out")
