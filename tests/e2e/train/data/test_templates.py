"""Conversations in all forms under templates in the manner of the families: what is learned reads back as text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import pipeloom as pl
from corpora import data, json_lines, tokenizer_directory
from paths import ROOT
from pipeloom.config import load
from pipeloom.errors import ConfigError
from pipeloom.models import cross_entropy
from pipeloom.models import layers as decoder_layers
from pipeloom.runtime import LocalPipeline
from pipeloom.train.data import sources
from pipeloom.train.data.batches import PackedRows
from pipeloom.train.data.conversations import BadDocument, conversation
from pipeloom.train.data.tokenizers import SimpleTemplate, TokenizerTemplate, load_tokenizer
from pipeloom.train.hub.generate import Sampling, extend

pytest.importorskip("transformers")

CASES = ROOT / "tests" / "data" / "foreign" / "chats"
SPECIAL = (
    "<|im_start|>",
    "<|im_end|>",
    "<|start|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|eot|>",
    "<turn>",
    "</turn>",
)


class Family(NamedTuple):
    """A template, and how it writes an answer (its text, its calls, whether it is the last message) from its prompt on."""

    template: str
    answer: Callable[[str, list[tuple[str, dict[str, Any]]], bool], str]
    rewrites: tuple[str, ...] = ()  # earlier answers that it writes otherwise, so that each answer is a row


def tool_call(name: str, arguments: dict[str, Any]) -> str:
    return json.dumps({"name": name, "arguments": arguments})


TOOLS = "{% if tools %}<|im_start|>tools {{ tools | tojson }}<|im_end|>\n{% endif %}"
CALLS = "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
FAMILIES = {
    "thinking": Family(  # Qwen3: earlier answers lose the block of thoughts
        TOOLS + "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and loop.last %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n{% endif %}"
        "{{ m.content }}" + CALLS + "<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        lambda text, calls, last: (
            f"<think>\n\n</think>\n{text}"
            + "".join(f"<tool_call>{tool_call(*each)}</tool_call>" for each in calls)
            + "<|im_end|>"
        ),
        rewrites=("texts", "calls"),
    ),
    "channels": Family(  # gpt-oss: the last answer ends with another token
        "{% if tools %}<|start|>developer {{ tools | tojson }}<|end|>{% endif %}"
        "{% for m in messages %}{% if m.role == 'assistant' %}{% for c in m.tool_calls or [] %}"
        "<|start|>assistant to={{ c.function.name }} {{ c.function.arguments | tojson }}<|call|>{% endfor %}"
        "{% if m.content %}<|start|>assistant final {{ m.reasoning_content or '' }}{{ m.content }}"
        "{{ '<|return|>' if loop.last else '<|end|>' }}{% endif %}"
        "{% else %}<|start|>{{ m.role }} {{ m.content }}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
        lambda text, calls, last: "<|start|>assistant".join(
            [
                *(f" to={name} {json.dumps(arguments)}<|call|>" for name, arguments in calls),
                *([f" final {text}<|return|>"] if text else []),
            ]
        ),
        rewrites=("texts",),
    ),
    "headers": Family(  # Llama: calls have parameters, answers nothing behind their end
        "{{ bos_token }}{% if tools %}{{ tools | tojson }}<|eot|>{% endif %}"
        "{% for m in messages %}[{{ m.role }}]\n\n{{ m.content | trim }}{% for c in m.tool_calls or [] %}"
        '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}{% endfor %}<|eot|>'
        "{% if m.reasoning_content %}{{ raise_exception('no thoughts') }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]\n\n{% endif %}",
        lambda text, calls, last: (
            text
            + "".join(f'{{"name": "{name}", "parameters": {json.dumps(given)}}}' for name, given in calls)
            + "<|eot|>"
        ),
    ),
    "text arguments": Family(  # DeepSeek: arguments are joined as text
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<turn>{{ m.role }}:"
        "{{ m.reasoning_content or '' }}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name + '\n' + c.function.arguments }}{% endfor %}</turn> \n"
        "{% endfor %}{% if add_generation_prompt %}<turn>assistant:{% endif %}",
        lambda text, calls, last: text + "".join(f"{name}\n{json.dumps(given)}" for name, given in calls) + "</turn>",
    ),
    "marks": Family(  # what the assistant generates is marked; the token that ends it stands behind the mark
        TOOLS + "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.reasoning_content or '' }}{{ m.content }}"
        + CALLS
        + "{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        lambda text, calls, last: (
            text + "".join(f"<tool_call>{tool_call(*each)}</tool_call>" for each in calls) + "<|im_end|>"
        ),
    ),
}
LOOKUP: dict[str, Any] = {"name": "lookup", "parameters": {"type": "object", "properties": {"key": {"type": "string"}}}}
ASK = {"role": "user", "content": "red?"}
BRASS = [{"role": "tool", "content": "brass", "tool_call_id": "a0"}]
CALL = ("", [("lookup", {"key": "room 0"})])


def called(**more: Any) -> dict[str, Any]:
    function = {"name": "lookup", "arguments": '{"key": "room 0"}'}
    return {"role": "assistant", "tool_calls": [{"id": "a0", "type": "function", "function": function}], **more}


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


# name -> (record, the fields, what is learned: (text, calls) of each answer)
FORMS: dict[str, tuple[dict[str, Any], tuple[str, ...], list[tuple[str, list[Any]]]]] = {
    "openai, content empty": (
        {
            "messages": [ASK, called(content=""), *BRASS, said("It is brass.")],
            "tools": [{"type": "function", "function": LOOKUP}],
        },
        ("messages",),
        [CALL, ("It is brass.", [])],
    ),
    "openai, content null": (
        {"messages": [ASK, called(content=None, refusal=None), *BRASS, said("It is brass.")], "tools": None},
        ("messages",),
        [CALL, ("It is brass.", [])],
    ),
    "openai, weights": (
        {"messages": [ASK, said("Seven.", weight=0), ASK, said("Blue.", weight=1)]},
        ("messages",),
        [("Blue.", [])],
    ),
    "text parts": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "re"}, {"type": "text", "text": "d?"}]},
                said("Blue."),
            ]
        },
        ("messages",),
        [("Blue.", [])],
    ),
    "sharegpt": (
        {
            "conversations": [
                {"from": "human", "value": "red?"},
                {"from": "function_call", "value": '{"name": "lookup", "arguments": {"key": "room 0"}}'},
                {"from": "observation", "value": "brass"},
                {"from": "gpt", "value": "It is brass."},
            ],
            "system": "Weave.",
            "tools": json.dumps([LOOKUP]),
        },
        ("conversations",),
        [CALL, ("It is brass.", [])],
    ),
    "alpaca": (
        {
            **{"instruction": "weave", "input": "red", "output": "Done.", "system": "Weave."},
            "history": [["blue?", "Blue."], ["green?", "Green."]],
        },
        ("instruction", "input", "output"),
        [("Blue.", []), ("Green.", []), ("Done.", [])],
    ),
    "kto, liked": ({"prompt": "red?", "completion": "Red.", "label": True}, ("prompt", "completion"), [("Red.", [])]),
    "a prompt with answers": (
        {"prompt": [ASK, said("No."), ASK], "completion": [said("Yes.")]},
        ("prompt", "completion"),
        [("Yes.", [])],
    ),
}


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, TokenizerTemplate]]:
    folder = tmp_path_factory.mktemp("templates")
    made = {}
    for name, family in FAMILIES.items():
        path = tokenizer_directory(folder / name, family.template, SPECIAL)
        made[name] = load_tokenizer(str(path)), TokenizerTemplate(path)
    return made


def learned(tokenizer: Any, rows: Any) -> list[list[str]]:
    """The learned tokens of each row, as text; runs of them apart."""
    texts = []
    for row in rows:
        texts.append([])
        before = False
        for content, counts in row:
            tokens = tokenizer.encode(content) if isinstance(content, str) else torch.tensor([content])
            if counts:
                texts[-1][-1:] = (
                    [texts[-1][-1] + tokenizer.decode(tokens)]
                    if before
                    else [*texts[-1][-1:], tokenizer.decode(tokens)]
                )
            before = counts
    return texts


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", FORMS)
def test_the_learned_tokens_are_the_answers(form: str, family: str, templates: Any) -> None:
    record, names, answers = FORMS[form]
    tokenizer, template = templates[family]
    rows = learned(tokenizer, template.rows(conversation(record, names)))
    want = [FAMILIES[family].answer(text, calls, True) for text, calls in answers]
    assert [text for row in rows for text in row] == want
    earlier = [m for m in conversation(record, names).messages[:-1] if m["role"] == "assistant"]
    kinds = {"calls" if "tool_calls" in message else "texts" for message in earlier}
    assert len(rows) == (len(answers) if kinds.intersection(FAMILIES[family].rewrites) else 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_is_the_prompt_of_generation_and_the_answer(family: str, templates: Any) -> None:
    """The first answer's row begins with the tokens that generation begins with."""
    _, template = templates[family]
    record = {"messages": [ASK, said("Blue.")]}
    (row,) = template.rows(conversation(record, ("messages",)))
    before = "".join(piece.content for piece in row if not piece.counts)
    assert before == "".join(piece.content for piece in template.prompt("red?"))


def test_calls_and_results_reach_the_text(templates: Any) -> None:
    record, names, _ = FORMS["sharegpt"]
    for _, template in templates.values():
        text = "".join(str(piece.content) for piece in template.rows(conversation(record, names))[-1])
        assert all(word in text for word in ("Weave.", "lookup", "room 0", "brass", "properties"))


PLAIN = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@pytest.mark.parametrize(
    ("template", "record", "words"),
    [
        (PLAIN, FORMS["openai, content null"][0], "the chat template of t leaves a call in message 2 out"),
        (PLAIN, {"messages": [ASK, said("Blue.")], "tools": [LOOKUP]}, "the chat template of t leaves tools out"),
        (
            PLAIN,
            {"messages": [ASK, said("Blue.", reasoning_content="Hm.")]},
            "leaves reasoning_content of message 2 out",
        ),
        (
            PLAIN.replace("{% for m in messages %}", "{% for m in messages if m.role in ('user', 'assistant') %}"),
            {"messages": [ASK, said("Wait."), {"role": "observation", "content": "brass"}, said("Brass.")]},
            r'leaves the content of message 3 \(role "tool"\) out',
        ),
        (
            PLAIN.replace("{{ m.content }}", "{{ m.content }}{{ m.tool_calls | default('') | tojson | tojson }}"),
            FORMS["openai, content null"][0],
            "leaves the arguments of a call in message 2 as JSON out",
        ),
        (
            PLAIN.replace("[assistant]", "{{ raise_exception('no') }}"),
            {"messages": [ASK, said("Blue.")]},
            "t refuses it: no",
        ),
    ],
)
def test_what_a_template_leaves_out_is_refused_with_its_name(
    template: str, record: dict[str, Any], words: str, tmp_path: Path
) -> None:
    made = TokenizerTemplate(tokenizer_directory(tmp_path / "t", template, SPECIAL))
    with pytest.raises(BadDocument, match=words):
        made.rows(conversation(record, ("messages",)))


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"messages": [ASK, said("x", images=["a.png"])]}, r'message 2: images = \["a.png"\] is not supported'),
        ({"messages": [ASK, said("x", train=1)]}, "message 2: train = 1 is not supported"),
        ({"messages": [ASK, said("x", weight=0.5)]}, "message 2: weight = 0.5: it must be 0 or 1"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, said("x")]},
            'message 1 has a part of type "image_url"',
        ),
        ({"messages": [ASK, said("")]}, "message 2 is an answer with neither text nor a call"),
        (
            {"messages": [ASK, said("x")], "rejected_response": "y"},
            "it has rejected_response, and pairs of preferred and",
        ),
        ({"messages": [ASK, said("x")], "images": ["a.png"]}, "it has images, and only text is learned"),
        (
            {"messages": [ASK, called(tool_calls=[{"function": {"arguments": "{}"}}])]},
            "message 2 has a call without the name",
        ),
        (
            {"messages": [ASK, called(tool_calls=[{"name": "f", "arguments": "{"}])]},
            "the arguments of f is .*, not JSON of an object",
        ),
        (
            {"messages": [{"from": "function_call", "value": "f()"}]},
            r'message 1: its call is "f\(\)", not JSON of an object',
        ),
        ({"messages": [ASK, said("x")], "tools": "f"}, 'tools is "f", not JSON of a list'),
        (
            {"messages": [ASK, said("x")], "history": [["a"]]},
            r"history is not a list of \[question, answer\]",
        ),
    ],
)
def test_what_changes_the_meaning_is_refused_by_its_name(record: dict[str, Any], words: str) -> None:
    with pytest.raises(BadDocument, match=words):
        conversation(record, ("messages",))


def test_pairs_of_answers_are_refused_by_name(tmp_path: Path) -> None:
    source = json_lines(tmp_path / "a.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    with pytest.raises(ConfigError, match=r"a\.jsonl\": its records have (chosen|rejected), and pairs of preferred"):
        data(tmp_path, source=str(source))


def test_keys_that_are_not_used_are_named_once(tmp_path: Path) -> None:
    records = [{"id": at, "messages": [ASK, said(f"Blue {at}.")], "mood": "fine", "grade": at} for at in range(40)]
    records += [{"messages": [ASK, said("Red.")], "label": False}] * 3
    for kind in ("jsonl", "dataset"):
        if kind == "dataset":
            pytest.importorskip("datasets")
        words = data(
            tmp_path, source=str(json_lines(tmp_path / "a.jsonl", records)), format=kind, train__seq_len=400
        ).words
        assert words.count("keys that are not used: grade, mood") == 1
        assert "40 documents, 40 conversations with 40 answers to learn, 3 more without one" in words


def test_an_input_that_the_first_record_lacks_is_read(tmp_path: Path) -> None:
    records = [{"instruction": "weave", "output": "a"}, {"instruction": "weave", "input": "red", "output": "b"}]
    found = list(
        sources.records(sources.Fields(sources.find(str(json_lines(tmp_path / "a.jsonl", records)), "auto"), ""))
    )
    asked = [each.value.messages[0]["content"] for each in found if isinstance(each, sources.Record)]
    assert asked == ["weave", "weave\n\nred"]


def test_conversations_that_are_cut_are_counted(tmp_path: Path) -> None:
    source = json_lines(tmp_path / "a.jsonl", [{"messages": [ASK, said("x" * 60)]}] * 30)
    words = data(tmp_path, source=str(source), train__seq_len=64).words
    sizes = len("<|user|>\nred?\n<|assistant|>\n") + 60
    assert f"30 of more than 64 tokens are cut, and {30 * (sizes - 64):,} tokens lose what stands before them" in words


@pytest.mark.parametrize("family", [None, *FAMILIES])
@pytest.mark.parametrize(
    ("case", "wanted"),
    [
        ("tool_calls_empty_content", [*CALL[1], "The key of room 0 is brass."]),
        ("sharegpt_function_call", [("lookup", {}), "It is brass."]),
        ("openai_weight_0", ["Blue 0."]),
    ],
)
def test_public_files_are_learned_as_they_mean(
    case: str, wanted: list[Any], family: str | None, templates: Any
) -> None:
    record = json.loads((CASES / f"{case}.jsonl").read_text().splitlines()[0])
    names = ("conversations",) if "conversations" in record else ("messages",)
    tokenizer, template = templates[family or "marks"]
    template = SimpleTemplate(load_tokenizer("bytes")) if family is None else template
    texts = [
        text
        for row in learned(
            load_tokenizer("bytes") if family is None else tokenizer, template.rows(conversation(record, names))
        )
        for text in row
    ]
    if family is not None:
        assert texts == [
            FAMILIES[family].answer(*(("", [each]) if isinstance(each, tuple) else (each, [])), True) for each in wanted
        ]
    else:
        assert texts == [f"<|call|>{tool_call(*each)}\n" if isinstance(each, tuple) else f"{each}\n" for each in wanted]


@pytest.mark.slow
def test_a_tiny_model_that_is_trained_on_calls_calls(tmp_path: Path) -> None:
    """From scratch, until it knows its one question by heart."""
    call = {"name": "lookup", "arguments": {"key": "a"}}
    record = {
        "messages": [{"role": "user", "content": "a?"}, called(tool_calls=[{"type": "function", "function": call}])]
    }
    source = json_lines(tmp_path / "calls.jsonl", [record] * 30)
    found = data(tmp_path, source=str(source), train__seq_len=80, tokenizer="bytes")
    shape = load("tiny", {"model.hidden_size": 64, "model.num_hidden_layers": 2}).model.shape()
    schedule = pl.schedules.one_f_one_b(2, 2)
    pipeline = LocalPipeline(decoder_layers(shape, 0), schedule, loss=cross_entropy)
    optimizer = torch.optim.AdamW([p for _, p in pipeline.named_parameters()], lr=1e-2)
    assert isinstance(found.train, PackedRows)
    batch = found.train.rows_at(torch.arange(4))
    for _ in range(60):
        pipeline.step(batch.tokens, batch.targets)
        optimizer.step()
        optimizer.zero_grad()
    pipeline.eval()
    (tokens,) = extend(pipeline, [found.prompt("a?")], 70, Sampling(temperature=0), ends=[10])
    text = found.tokenizer.decode(torch.tensor(tokens))
    assert json.loads(text.removeprefix("<|call|>")) == call
