"""Rules between features: which two do not go together, why, and what to use instead.

The configuration, the planner and the layers read the same rows, each with the features that it knows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
ep_blocks | cut | it needs whole sequences, which slices or context parallelism cut; use ep_chunks
ep_blocks | capacity_factor | it needs capacity_factor 0, not {capacity_factor:g}; or use ep_chunks
ep_blocks | tp | it needs tp 1, not {tp}; or use ep_chunks
ep_chunks | ep_blocks | use either this or parallel.ep_blocks {ep_blocks}, not both
ep, ep_nodes, ep_chunks, ep_blocks | dense model | the model has no experts; nearest: 1, or set model.num_experts
num_shared_experts, moe_layer_freq, experts_class, router_class | dense model | there are no experts; set model.num_experts
tp, ep | source | it applies to Pipeloom's own decoder only, not to model.source; nearest: 1
lora_dropout | tp | the ranks of parallel.tp {tp} would drop different inputs; nearest: 0
sp | one tensor rank | it spreads tokens over the tensor-parallel ranks; set parallel.tp to 2 or more
unshard_slots | whole weights | parallel.zero is {zero}, and only 3 gathers parameters; set parallel.zero = 3
recomputed part | source | the layers of a model of transformers name no parts; nearest: "full"
recomputed part | compile | compiled blocks have no parts; set train.compile = "none", or recompute "full"
compile | tp | blocks that parallel.tp = {tp} divides exchange inside; set parallel.tp = 1
compile | experts | a block with experts runs in segments, which are not compiled; set train.compile = "none"
compile | slices | compiled blocks keep no state of a slice; nearest: "none"
vocabulary | one pipeline rank | there is one pipeline rank; nearest: "last"
vocabulary | num_nextn_predict_layers | the blocks that predict further ahead use the output layer too; nearest: "last"
vocabulary | reproducible | its sums depend on the number of ranks; set train.reproducible = false
vocabulary | search | a searched schedule runs as the search found it; name a family, such as 1f1b
spread vocabulary | whole vocabulary | vocabulary: set parallel.vocabulary = "pp" to spread the output layer
transforms | search | a searched schedule runs as the search found it; leave them out
slices | search | schedules are searched for whole sequences; name a family, such as 1f1b
overlap_p2p | shared memory | the shared-memory transport posts no receives; set schedule.transport = "individual"
receive_depth | no open receives | the {transport} transport keeps no receives open; set schedule.transport = "individual"
source weights | sorted documents | batches sorted by length take each document of all sources once an epoch; leave them out
sampling | sorted documents | batches sorted by length have a shuffled order of their own; nearest: "shuffle-then-split"
no momentum | nesterov | optimizer.nesterov = true needs momentum; set it above 0, or optimizer.nesterov = false
muon | no barrier | ranks gather whole matrices in each step, which is a barrier; set optimizer.barrier = true
on_nan, on_spike | no barrier | a step is known to be bad only after the next has begun; set optimizer.barrier = true
norms | no barrier | a step is final only after the next one has begun; set optimizer.barrier = true
"""


def _read(rows: str) -> Iterator[Exclusion]:
    for row in rows.strip().splitlines():
        features, other, reason = row.split(" | ")
        yield from (Exclusion(feature, other, reason) for feature in features.split(", "))


RULES = tuple(_read(_ROWS))


def broken(features: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (feature, reason) for each rule whose two features are in use.

    Args:
        features: those in use -> their values, and what the reasons name besides.
    """
    for rule in RULES:
        if rule.feature in features and rule.other in features:
            yield rule.feature, rule.reason.format_map(features)


def require_rules(**features: Any) -> None:
    """Raise ArgumentError for the first rule that is broken; a feature with a value such as 0 or "" is not in use."""
    used = {name: value for name, value in features.items() if value}
    for name, reason in broken(used):
        value = used[name]
        text = f'"{value}"' if isinstance(value, str) else f"{value:g}"
        raise ArgumentError(name, f"={text} {reason.removeprefix('it ')}")
