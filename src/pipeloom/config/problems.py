"""Sentences for what is wrong: the key, its value, where it was set, and the nearest valid values.

They are translated from pydantic's errors, and from errors of the library, which name arguments.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from pipeloom.config.sections import SECTIONS
from pipeloom.errors import ArgumentError, ConfigError, did_you_mean, echo, shortened
from pipeloom.limits import number

_VALUE_KINDS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text in quotes",
    "dict_type": "a table",
    "model_type": "a table",
    "tuple_type": "a list",
    "finite_number": "a finite number",
}


def key_words(key: str, value: Any, origins: Mapping[str, str]) -> str:
    """`train.steps = 0 (in run.toml)`, the beginning of every problem; without the place for a default or a flag."""
    origin = origins.get(key) or origins.get(key.rpartition(".")[0], "")
    where = f" (in {origin})" if origin and origin != "default" and not origin.startswith("--") else ""
    return f"{key} = {shown(value)}{where}"


def shown(value: Any) -> str:
    """`value` as TOML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return (
        f'"{shortened(value)}"' if isinstance(value, str) else echo(list(value) if isinstance(value, tuple) else value)
    )


def sentences(error: ValidationError, values: Mapping[str, Any], origins: Mapping[str, str]) -> dict[str, str]:
    """ "section.key" -> the sentence for it, one for each key that pydantic refuses."""
    sentence_of_key: dict[str, str] = {}
    for detail in error.errors(include_url=False):
        path = [str(part) for part in detail["loc"]]
        key = ".".join(path[:2])
        start = key_words(key, _value_at(values, path[:2]), origins)
        if detail["type"] == "extra_forbidden":
            sentence_of_key.setdefault(key, _unknown(path, start))
        elif detail["type"] == "missing" and len(path) > 2:
            sentence_of_key.setdefault(key, f"{start}: it needs more values")
        else:
            sentence_of_key.setdefault(key, _sentence(detail, key, start))
    return sentence_of_key


def option_sentences(error: ValidationError, options: Mapping[str, Any], model: type[BaseModel]) -> list[str]:
    """The sentences for `[schedule.options]`, which `model` describes; one for each key, at any depth."""
    sentence_of_option: dict[str, str] = {}
    for detail in error.errors(include_url=False):
        *outer, name = path = [str(part) for part in detail["loc"]]
        fields = model.model_fields
        for part in outer:
            inner = [kind for kind in get_args(fields[part].annotation) if isinstance(kind, type)]
            fields = next((kind.model_fields for kind in inner if issubclass(kind, BaseModel)), {})
        key = ".".join(["schedule.options", *path])
        start = key_words(key, _value_at(options, path), {})
        unknown = f"{start}: there is no such option{did_you_mean(name, fields)}"
        is_known = detail["type"] != "extra_forbidden"
        sentence_of_option.setdefault(key, _sentence(detail, key, start) if is_known else unknown)
    return list(sentence_of_option.values())


def file_sentence(error: ValidationError) -> str:
    """The sentence for the first value of a file that its schema refuses: `a.b = 1.5: it must be a whole number`."""
    detail = error.errors(include_url=False)[0]
    key = ".".join(shortened(str(part)) for part in detail["loc"]) or "content"
    is_known = detail["type"] != "extra_forbidden"
    text = _sentence(detail, key, key_words(key, detail["input"], {})) if is_known else f"{key}: there is no such key"
    return " ".join(text.split())


def _value_at(values: Any, path: Iterable[str]) -> Any:
    for part in path:
        values = values.get(part) if isinstance(values, Mapping) else None
    return values


def _sentence(detail: Any, key: str, start: str) -> str:
    """Return the sentence for an error of pydantic about a key, which begins with `start` unless the key is missing."""
    kind, limits = detail["type"], detail.get("ctx", {})
    if kind == "missing":
        return f"{key} is missing"
    if kind == "literal_error":
        choices = [choice.strip("'") for choice in limits["expected"].replace(" or ", ", ").split(", ")]
        near = did_you_mean(str(detail["input"]), choices, listed=False)
        return f"{start}: it must be {limits['expected']}{near}"
    if kind in ("greater_than_equal", "less_than_equal"):
        side, limit = ("at least", limits["ge"]) if kind == "greater_than_equal" else ("at most", limits["le"])
        return f"{start}: it must be {side} {number(limit)}; nearest: {number(limit)}"
    if kind in ("greater_than", "less_than"):
        return (
            f"{start}: it must be {'above' if kind == 'greater_than' else 'below'} {limits.get('gt', limits.get('lt'))}"
        )
    if kind in ("too_long", "too_short", "missing_argument"):
        return f"{start}: it must hold {limits.get('max_length', limits.get('min_length'))} values"
    if kind == "string_too_short":
        return f"{start}: it must not be empty"
    if kind == "value_error":
        return f"{start}: {detail['msg'].removeprefix('Value error, ')}"
    wanted = _VALUE_KINDS.get(kind)
    return f"{start}: it must be {wanted}" if wanted else f"{start}: {detail['msg'].lower()}"


def _unknown(path: list[str], start: str) -> str:
    name = path[-1]
    if len(path) == 1:
        elsewhere = [section for section, model in SECTIONS.items() if name in model.model_fields]
        if elsewhere:
            return f"{start}: keys belong to a section; did you mean {elsewhere[0]}.{name}?"
        return f"there is no section [{name}]{did_you_mean(name, SECTIONS)}"
    near = did_you_mean(name, SECTIONS[path[0]].model_fields)
    keys = {f"{section}.{key}": key for section, model in SECTIONS.items() for key in model.model_fields}
    exact = [key for key, last in keys.items() if last == name]
    if exact or not near.startswith("; did"):
        close = difflib.get_close_matches(name, keys.values(), n=1, cutoff=0.75)
        others = exact or [key for key, last in keys.items() if last in close]
        near = f"; did you mean {' or '.join(others)}?" if others else near
    return f"{start}: there is no such key{near}"


_MODEL = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "router",
    "capacity_factor",
    "pad_to_capacity",
    "moe_layer_freq",
)
KEYS = {
    **{name: f"model.{name}" for name in (*_MODEL, "intermediate_size", "vocab_size")},
    **{axis: f"parallel.{axis}" for axis in ("pp", "dp", "tp", "ep", "ep_nodes", "ep_blocks")},
    "choices": "model.num_experts_per_tok",
    "nodes": "parallel.ep_nodes",
}


def sentence(error: ArgumentError) -> str:
    """`parallel.tp = 3: it does not divide 32 heads; nearest: 2 or 4`; the error's own words where its argument has no key."""
    key = KEYS.get(error.argument)
    if key is None:
        return str(error)
    given = re.match(r"=(\[.*?\]|\S+) ", error.words)
    return f"{key} = {given[1]}: it {error.words[given.end() :]}" if given else f"{key}{error.words}"


@contextmanager
def naming_keys() -> Iterator[None]:
    """Turn an ArgumentError that is raised inside into a ConfigError that names the key."""
    try:
        yield
    except ArgumentError as error:
        raise ConfigError(sentence(error)) from error
