"""Conversations: the forms in which files have them, read as messages of one form, and which answers are learned.

A key of a message that is neither used nor harmless is refused: it could change what is learned. Nothing here imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeloom.errors import ConfigError, shortened
from pipeloom.foreign import as_json, refuse_unknown

ANSWERS = "assistant"
# Fields that are a conversation together: a question, what belongs to it if it is there and not empty, and the answer.
PAIRS = (("prompt", "", "completion"), ("instruction", "input", "output"))
# Other names of those who speak, as in ShareGPT -> the roles of chat templates
_SPEAKERS = {
    **{"human": "user", "gpt": ANSWERS, "chatgpt": ANSWERS, "bing": ANSWERS, "bard": ANSWERS, "function_call": ANSWERS},
    **{"observation": "tool", "function": "tool", "function_response": "tool"},
}
# Keys beside a conversation that belong to it, and those that make it something else than answers to learn.
BESIDE = ("system", "history", "tools", "functions", "label", "kto_tag")
_PREFERENCES = ("chosen", "rejected", "rejected_response", "preferred_output", "non_preferred_output")
_MEDIA = ("images", "image", "videos", "video", "audios", "audio")
REFUSED = {
    **dict.fromkeys(_PREFERENCES, "pairs of preferred and rejected answers are not learned"),
    **dict.fromkeys(_MEDIA, "only text is learned"),
    "chat_template_kwargs": "templates are rendered without options",
}
_USED = ("role", "content", "from", "value", "weight", "tool_calls", "tool_call_id", "function_call", "name")
REASONING = ("reasoning_content", "reasoning", "thinking")
_OF_FILES = """
    id idx index uuid message_id parent_id conversation_id conversation_hash turn_identifier timestamp created_at date model
    source dataset split language lang meta metadata toxic redacted country state hashed_ip header finish_reason usage token_count
"""
HARMLESS = frozenset(_OF_FILES.split())


class BadDocument(ValueError):
    """A document that cannot be read, or a conversation that cannot be rendered as text, with the reason."""


@dataclass(frozen=True)
class Conversation:
    """Messages as chat templates take them.

    Attributes:
        messages: with "role" and "content", a text, and what else they have, up to the last answer; the arguments of calls are
            objects.
        tools: functions that may be called, as templates take them; None: there are none.
        learned: for each message whether it is an answer to learn.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    learned: tuple[bool, ...]


def conversation(record: Mapping[str, Any], names: Sequence[str]) -> Conversation:
    """Return the conversation in the fields `names` of a record. Raises BadDocument for one that cannot be learned."""
    for key, why in REFUSED.items():
        if record.get(key):
            raise BadDocument(f"it has {key}, and {why}")
    given = list(record[names[0]]) if len(names) == 1 else _pair([record.get(name) for name in names])
    before = _history(_parsed(record.get("history") or [], "history", list))
    if system := record.get("system"):
        before.insert(0, {"role": "system", "content": system})
    read = [_message(number, message) for number, message in enumerate([*before, *given], 1 - len(before))]
    liked = all(record.get(key) is not False for key in ("label", "kto_tag"))
    answers = [at for at, (message, _) in enumerate(read) if message["role"] == ANSWERS]
    if not answers:
        raise BadDocument(f'no message has the role "{ANSWERS}", so there is nothing to learn')
    read = read[: answers[-1] + 1]
    messages = [message for message, _ in read]
    return Conversation(messages, _tools(record), tuple(liked and learned for _, learned in read))


def _pair(fields: list[Any]) -> list[Any]:
    """Return the messages of a question, with what belongs to it, and its answer, which alone is learned."""
    *question, answer = fields
    if question[-1] in (None, ""):  # an instruction without input
        question = question[:1]
    if isinstance(question[0], list):
        asked = [{**each, "weight": 0} if isinstance(each, dict) else each for each in question[0]]
    else:
        texts = [part for part in question if isinstance(part, str)]
        asked = [{"role": "user", "content": "\n\n".join(texts) if len(texts) == len(question) else None}]
    return [*asked, *(answer if isinstance(answer, list) else [{"role": ANSWERS, "content": answer}])]


def _history(pairs: list[Any]) -> list[dict[str, Any]]:
    if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        raise BadDocument("history is not a list of [question, answer]")
    return [
        {"role": role, "content": text} for pair in pairs for role, text in zip(("user", ANSWERS), pair, strict=True)
    ]


def _message(number: int, given: Any) -> tuple[dict[str, Any], bool]:
    """Return a message in one form, and whether it is learned."""
    what = f"message {number}"
    message = dict(given) if isinstance(given, dict) else {}
    speaker = message.pop("from", None)
    if "role" not in message:
        message |= {"role": speaker, "content": message.pop("value", None)}
        if speaker == "function_call":
            message |= {"tool_calls": [_parsed(message["content"], f"{what}: its call")], "content": ""}
    _require_known(what, message, (*_USED, *REASONING))
    message = {key: value for key, value in message.items() if key not in HARMLESS and value is not None}
    if call := message.pop("function_call", None):
        message["tool_calls"] = [call]
    weight, content, role = message.pop("weight", 1), message.get("content"), message.get("role")
    if calls := message.pop("tool_calls", None):
        message["tool_calls"] = [_call(call, what) for call in (calls if isinstance(calls, list) else [calls])]
        content = content or ""
    if isinstance(content, list):
        content = "".join(_text_of(part, what) for part in content)
    if not isinstance(role, str) or not isinstance(content, str):
        raise BadDocument(f'{what} is not {{"role": text, "content": text}}')
    if weight not in (0, 1):
        raise BadDocument(f"{what}: weight = {as_json(weight)}: it must be 0 or 1")
    message |= {"role": _SPEAKERS.get(role, role), "content": content}
    try:
        json.dumps(message, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise BadDocument(f"{what} holds half of a surrogate pair, which is not text") from None
    learned = message["role"] == ANSWERS and bool(weight)
    if learned and not content.strip() and not message.keys() & {"tool_calls", *REASONING}:
        raise BadDocument(f"{what} is an answer with neither text nor a call, from which silence would be learned")
    return message, learned


def _require_known(what: str, values: Mapping[str, Any], used: Sequence[str]) -> None:
    try:
        refuse_unknown(what, values, used, HARMLESS)
    except ConfigError as error:
        raise BadDocument(str(error)) from None


def _text_of(part: Any, what: str) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else part
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, dict) else part
        raise BadDocument(f"{what} has a part of type {as_json(kind)}, and only text is learned")
    return text


def _call(given: Any, what: str) -> dict[str, Any]:
    """Return a call of a function, {"type": "function", "function": {"name": …, "arguments": {…}}}, with its id."""
    function = given.get("function", given) if isinstance(given, dict) else None
    for keys in (given, function):
        if isinstance(keys, dict):
            _require_known(f"{what}: its call", keys, ("id", "type", "function", "name", "arguments"))
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str):
        raise BadDocument(f"{what} has a call without the name of a function: {as_json(given)}")
    arguments = _parsed(function.get("arguments") or {}, f"{what}: the arguments of {shortened(name, 60)}")
    identity = {"id": given["id"]} if isinstance(given.get("id"), str) else {}
    return {**identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def _tools(record: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    tools = [
        _parsed(tool, "a tool") for tool in _parsed(record.get("tools") or record.get("functions") or [], "tools", list)
    ]
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools] or None


def _parsed(value: Any, what: str, kind: type = dict) -> Any:
    """Return an object, or a list, that may be given as JSON text."""
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, kind):
        raise BadDocument(f"{what} is {as_json(value)}, not JSON of {'an object' if kind is dict else 'a list'}")
    return parsed


def markers(given: Conversation) -> tuple[Conversation, dict[str, str]]:
    """Return the conversation with a mark in place of each content, call and tool, and what each mark stands for.

    A template that leaves one out of its text leaves it out of every conversation of this form. Earlier reasoning may be left
    out, since templates do that on purpose.
    """
    marks: dict[str, str] = {}

    def mark(what: str) -> str:
        text = f"pipeloom{len(marks)}mark"
        marks[text] = what
        return text

    messages = []
    for number, message in enumerate(given.messages, 1):
        marked = dict(message)
        if message["content"]:
            marked["content"] = mark(f'the content of message {number} (role "{message["role"]}")')
        for key in REASONING:
            if key in message and number == len(given.messages):
                marked[key] = mark(f"{key} of message {number}")
        if "tool_calls" in message:
            what = f"a call in message {number}"
            marked["tool_calls"] = [
                {**call, "function": {"name": mark(what), "arguments": {mark(f"the arguments of {what} as JSON"): "x"}}}
                for call in message["tool_calls"]
            ]
        messages.append(marked)
    tools = given.tools and [
        {**tool, "function": {**_parsed(tool["function"], "a tool"), "name": mark("tools")}} for tool in given.tools
    ]
    return Conversation(messages, tools, given.learned), marks


def with_text_arguments(messages: Any) -> Any:
    """Return the messages with the arguments of calls as JSON text, as some templates expect them."""

    def text(value: dict[str, Any]) -> dict[str, Any]:
        is_call = "name" in value and isinstance(value.get("arguments"), dict)
        return {**value, "arguments": json.dumps(value["arguments"], ensure_ascii=False)} if is_call else value

    return json.loads(json.dumps(messages), object_hook=text)
