"""Rules between features: which two do not go together, why, and what to use instead.

The configuration, the planner and the layers read these rows, each with the features that it knows. Rows that name keys are in
`config/rules.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import Any, NamedTuple

from pipeloom.errors import ArgumentError


class Exclusion(NamedTuple):
    """Two features that do not go together.

    Attributes:
        feature: the one that the sentence is about.
        other: what it does not go with.
        reason: the sentence behind `feature = value: `; `{name}` stands for the value of a feature in use.
    """

    feature: str
    other: str
    reason: str


# features | what they do not go with | why, and what to use instead
_ROWS = """
router | cut | it draws numbers for whole sequences, which slices or context parallelism cut; nearest: "softmax" or "sigmoid"
capacity_factor | cut | it counts choices of whole sequences, which slices or context parallelism cut; nearest: 0
pad_to_capacity | dropless | it needs a capacity; nearest: capacity_factor 1
pad_to_capacity | ep_nodes | it pads rows of experts, not of machines; nearest: ep_nodes 1
pad_to_capacity | ep_chunks | it pads rows of all tokens, not of chunks of them; nearest: ep_chunks 1
ep_blocks | cut | it needs whole sequences, which slices or context parallelism cut; use ep_chunks
ep_blocks | capacity_factor | it needs capacity_factor 0, not {capacity_factor:g}; or use ep_chunks
ep_blocks | tp | it needs tp 1, not {tp}; or use ep_chunks
ep, ep_nodes, ep_chunks, ep_blocks | dense model | the model has no experts; nearest: 1
vocabulary | one pipeline rank | there is one pipeline rank; nearest: "last"
vocabulary | num_nextn_predict_layers | the blocks that predict further ahead use the output layer too; nearest: "last"
"""


def read(rows: str) -> Iterator[Exclusion]:
    """Yield the rules in rows of text, `features | what they do not go with | why`."""
    for row in rows.strip().splitlines():
        *columns, reason = row.split(" | ")
        pairs = product(*(column.split(", ") for column in columns))
        yield from (Exclusion(feature, other, reason) for feature, other in pairs)


RULES = tuple(read(_ROWS))


def broken(features: Mapping[str, Any], rules: Iterable[Exclusion] = RULES) -> Iterator[tuple[str, str]]:
    """Yield (feature, reason) for each rule whose two features are in use.

    Args:
        features: those in use -> their values, and what the reasons name besides.
    """
    for rule in rules:
        if rule.feature in features and rule.other in features:
            yield rule.feature, rule.reason.format_map(features)


def require_rules(**features: Any) -> None:
    """Raise ArgumentError for the first rule that is broken; a feature with a value such as 0 or "" is not in use."""
    used = {name: value for name, value in features.items() if value}
    for name, reason in broken(used):
        value = used[name]
        text = f'"{value}"' if isinstance(value, str) else f"{value:g}"
        raise ArgumentError(name, f"={text} {reason.removeprefix('it ')}")
