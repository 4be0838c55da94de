"""Translation of the library's errors, which name arguments, into errors that name keys of the configuration."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from pipeloom.errors import ArgumentError, ConfigError

_MODEL = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "router",
    "moe_layer_freq",
)
KEYS = {
    **{name: f"model.{name}" for name in (*_MODEL, "intermediate_size", "vocab_size")},
    **{axis: f"parallel.{axis}" for axis in ("pp", "dp", "tp", "ep", "ep_nodes", "order")},
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
