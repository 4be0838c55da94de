"""Conversations: answers are learned, the rest is read; templates; what is no conversation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from corpora import TEMPLATE, config, data, documents, json_lines, tokenizer_file
from corpora import tokenizer_directory as directory
from pipeloom.errors import ConfigError
from pipeloom.train.data.batches import PackedRows
from pipeloom.train.data.prepare import prepare
from pipeloom.train.data.tokenizers import load_tokenizer

CHAT = [
    {"role": "system", "content": "Weave."},
    {"role": "user", "content": "red wool"},
    {"role": "assistant", "content": "the loom weaves red wool"},
    {"role": "user", "content": "and blue"},
    {"role": "assistant", "content": "blue thread over red"},
]


def chats(count: int = 40) -> list[dict[str, Any]]:
    return [{"messages": [*CHAT[:-1], {"role": "assistant", "content": text}]} for text in documents(count, 12)]


def learned(rows: Any, tokenizer: Any) -> tuple[list[str], list[str]]:
    """The texts of each document of the first rows, and of what is learned of it; tokens of special kinds as they are."""
    whole, answers = [], []
    batch = rows.rows_at(torch.arange(rows.count))
    for tokens, targets, positions in zip(batch.tokens, batch.targets, batch.positions, strict=True):
        starts = [*torch.nonzero(positions == 0).flatten().tolist(), len(tokens)]
        for start, end in zip(starts, starts[1:], strict=False):
            counted = targets[start:end]
            if bool((counted != -100).any()):
                whole.append(tokenizer.decode(tokens[start:end]))
                answers.append(tokenizer.decode(counted[counted != -100]))
    return whole, answers


def test_only_answers_are_learned_under_the_simple_template(tmp_path: Path) -> None:
    json_lines(tmp_path / "chat.jsonl", chats())
    keys: dict[str, Any] = {"source": str(tmp_path / "chat.jsonl"), "train__seq_len": 400}
    found = data(tmp_path, **keys)
    assert isinstance(found.train, PackedRows)
    whole, answers = learned(found.train, found.tokenizer)
    want = [text for at, text in enumerate(documents(40, 12)) if at % 20 != 10]
    start = "<|system|>\nWeave.\n<|user|>\nred wool\n<|assistant|>\nthe loom weaves red wool\n<|user|>\nand blue\n"
    assert sorted(whole) == sorted(f"{start}<|assistant|>\n{text}" for text in want)
    assert sorted(answers) == sorted(f"the loom weaves red wool\n{text}\n" for text in want)
    assert bytes(found.prompt("red wool")) == b"<|user|>\nred wool\n<|assistant|>\n"
    assert bytes(found.prompt("")) == start.partition("the loom")[0].encode()
    everything = data(tmp_path, **keys, loss_on="all")
    assert everything.prompt("") == everything.held_out[0].tokens[0, :16].tolist()
    _, learned_all = learned(everything.train, found.tokenizer)
    assert sorted(learned_all) == sorted(f"{start[1:]}<|assistant|>\n{text}\n" for text in want)


def test_the_tokenizers_own_template_is_used(tmp_path: Path) -> None:
    """Training sees the tokens that generation will: those of the prompt alone, and then the answer's."""
    transformers = pytest.importorskip("transformers")
    folder = directory(tmp_path / "tokenizer")
    json_lines(tmp_path / "chat.jsonl", chats())
    keys: dict[str, Any] = {"source": str(tmp_path / "chat.jsonl"), "tokenizer": str(folder), "train__seq_len": 200}
    found = data(tmp_path, **keys, model__vocab_size=400)
    whole, answers = learned(found.train, found.tokenizer)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    first = chats()[0]["messages"]
    text = theirs.apply_chat_template(first, tokenize=False)
    assert (
        text.removesuffix("<|endoftext|>\n") in whole
    )  # the last token is a target only, and what follows it is not read
    last = first[-1]["content"]
    assert f"the loom weaves red wool<|endoftext|>{last}<|endoftext|>" in answers
    assert (
        "38 conversations with 76 answers to learn" in found.words or "40 conversations with 80 answers" in found.words
    )
    asked = theirs.apply_chat_template([{"role": "user", "content": "red"}], tokenize=False, add_generation_prompt=True)
    assert found.tokenizer.decode(torch.tensor(found.prompt("red"))) == asked
    simple = data(tmp_path, **keys, model__vocab_size=400, template="simple")
    assert "<|assistant|>" in learned(simple.train, found.tokenizer)[0][0]
    thinking = directory(
        tmp_path / "thinking", TEMPLATE.replace("[assistant] {% endif %}", "[assistant] <think>{% endif %}")
    )
    with pytest.raises(ConfigError, match=r"line 1: .*prompts for an answer with '<think>', which it does not write"):
        data(tmp_path, **keys | {"tokenizer": str(thinking)}, model__vocab_size=400)
    changing = directory(tmp_path / "changing", "{{ messages | length }}" + TEMPLATE)
    with pytest.raises(
        ConfigError, match=r'line 1: the chat template of changing prompts .* before message 3; .*"simple"'
    ):
        data(tmp_path, **keys | {"tokenizer": str(changing)}, model__vocab_size=400)


@pytest.mark.parametrize(
    ("record", "question"),
    [
        ({"prompt": "red wool", "completion": "{}"}, "red wool"),
        ({"instruction": "weave", "input": "red wool", "output": "{}"}, "weave\n\nred wool"),
        ({"instruction": "weave", "input": "", "output": "{}"}, "weave"),
        (
            {"prompt": [{"role": "user", "content": "red"}], "completion": [{"role": "assistant", "content": "{}"}]},
            "red",
        ),
        ({"conversations": [{"from": "human", "value": "red"}, {"from": "gpt", "value": "{}"}]}, "red"),
        ({"conversations": [{"role": "user", "content": "red"}, {"role": "assistant", "content": "{}"}]}, "red"),
    ],
)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_question_and_its_answer_are_a_conversation(
    tmp_path: Path, record: dict[str, Any], question: str, kind: str
) -> None:
    answers = documents(40, 12)
    records = [json.loads(json.dumps({"id": 1, **record}).replace("{}", answer)) for answer in answers]
    source = json_lines(tmp_path / "pairs.jsonl", records)
    if kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow.parquet")
        source = tmp_path / "pairs.parquet"
        pyarrow.write_table(pytest.importorskip("pyarrow").Table.from_pylist(records), source)
    found = data(tmp_path, source=str(source), train__seq_len=400)
    whole, learned_texts = learned(found.train, found.tokenizer)
    want = [text for at, text in enumerate(answers) if at % 20 != 10]
    assert sorted(whole) == sorted(f"<|user|>\n{question}\n<|assistant|>\n{text}" for text in want)
    assert sorted(learned_texts) == sorted(f"{text}\n" for text in want)


def test_a_question_that_is_no_text_is_named(tmp_path: Path) -> None:
    pairs = [{"prompt": "red", "completion": "wool"}, {"prompt": 5, "completion": "x"}, {"prompt": "x"}]
    source = str(json_lines(tmp_path / "a.jsonl", [*pairs, *[pairs[0]] * 40]))
    for line, bad in ((2, 1), (3, 2)):
        with pytest.raises(ConfigError, match=rf'a\.jsonl, line {line}: message {bad} is not {{"role": text'):
            data(tmp_path, source=source)
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(p) + "\n" for p in [pairs[0], pairs[0], pairs[2]]))


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([{"role": "user", "content": "x"}], "so there is nothing to learn"),
        ([{"role": "user"}], "message 1 is not"),
        (["x"], r"is \['x'\], not a string or a list of messages"),
        ([*CHAT, {"role": "assistant", "content": "\ud800"}], "message 6 holds half of a surrogate pair"),
        ("text", "it is a text, and those before are conversations"),
    ],
)
def test_a_bad_conversation_is_named(tmp_path: Path, messages: Any, why: str) -> None:
    json_lines(tmp_path / "chat.jsonl", [*chats(3), {"messages": messages}, *chats(30)])
    with pytest.raises(ConfigError, match=rf"chat\.jsonl, line 4: .*{why}"):
        data(tmp_path, source=str(tmp_path / "chat.jsonl"))
    found = data(tmp_path, source=str(tmp_path / "chat.jsonl"), on_error="skip")
    assert "33 documents, 1 bad one left out" in found.words


def test_conversations_are_not_cut_anywhere(tmp_path: Path) -> None:
    json_lines(tmp_path / "chat.jsonl", chats())
    with pytest.raises(
        ConfigError, match=r'data\.documents = "concatenate": windows would cut the .*chat\.jsonl .* anywhere'
    ):
        prepare(config(tmp_path, source=str(tmp_path / "chat.jsonl"), documents="concatenate"))
    with pytest.raises(ConfigError, match='"tokenizer": bytes has no chat template; nearest: "simple"'):
        prepare(config(tmp_path, source=str(tmp_path / "chat.jsonl"), template="tokenizer"))


def test_special_tokens_of_a_tokenizer(tmp_path: Path) -> None:
    name = str(tokenizer_file(tmp_path / "tokenizer.json"))
    folder = str(directory(tmp_path / "folder"))
    assert (load_tokenizer(name).bos, load_tokenizer(name).eos) == (None, 0)
    assert (load_tokenizer(folder).bos, load_tokenizer(folder).eos) == (
        None,
        0,
    )  # it has <s>, and does not begin with it
    assert (load_tokenizer(folder, bos="<s>", eos="none").bos, load_tokenizer(name, eos="none").eos) == (1, None)
    assert load_tokenizer(name).vocab_size == 300
    assert load_tokenizer(name).decode(load_tokenizer(name).encode("red wool\n")) == "red wool\n"
    with pytest.raises(ConfigError, match=r'data\.eos = "<\|end\|>": .* no such token; did you mean'):
        load_tokenizer(name, eos="<|end|>")
    with pytest.raises(ConfigError, match="bytes have no such token"):
        load_tokenizer("bytes", eos="</s>")
    (tmp_path / "no.json").write_text("{}")
    with pytest.raises(ConfigError, match="it is not a tokenizer"):
        load_tokenizer(str(tmp_path / "no.json"))
    named = tmp_path / "folder" / "tokenizer_config.json"
    named.write_text(json.dumps({"eos_token": {"content": 5}}))
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: eos_token = 5: it must be text"):
        load_tokenizer(folder)
    json_lines(tmp_path / "a.jsonl", [{"text": "x"}])
    with pytest.raises(ConfigError, match=r"model\.vocab_size = 256: the tokenizer .* has 300 tokens; nearest: 300"):
        prepare(config(tmp_path, source=str(tmp_path / "a.jsonl"), tokenizer=name, model__vocab_size=256))


def test_our_own_decoder_has_as_many_tokens_as_its_tokenizer(tmp_path: Path) -> None:
    name, folder = str(tokenizer_file(tmp_path / "tokenizer.json")), str(directory(tmp_path / "folder"))
    assert config(tmp_path).model.vocab_size == 256
    assert config(tmp_path, tokenizer=name).model.vocab_size == 300
    assert config(tmp_path, tokenizer=folder).model.vocab_size == 300
    assert config(tmp_path, tokenizer=name, model__vocab_size=512).model.vocab_size == 512
    for wrong in ([], {"model": {"vocab": 3}}, {"model": {"vocab": {"a": "b"}}}):
        (tmp_path / "wrong.json").write_text(json.dumps(wrong))
        assert config(tmp_path, tokenizer=str(tmp_path / "wrong.json")).model.vocab_size == 256
