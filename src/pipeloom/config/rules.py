"""Features of a configuration, and the rules between them that name keys: what does not go with what.

Rules that the planner and the layers share are in `shapes/rules.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from pipeloom.config.sections import COMPUTED, PARTS_OF_BLOCKS, Config
from pipeloom.limits import memory_amount
from pipeloom.schedule.families import canonical_name
from pipeloom.schedule.files import names_a_file
from pipeloom.schedule.functions import is_function
from pipeloom.shapes import rules
from pipeloom.shapes.decoder import RANDOM_ROUTERS

# features | what they do not go with | why, and what to use instead
_ROWS = """
ep_chunks | ep_blocks | use either this or parallel.ep_blocks {ep_blocks}, not both
num_shared_experts, moe_layer_freq, experts_class, router_class | dense model | there are no experts; set model.num_experts
tp, ep | source | it applies to Pipeloom's own decoder only, not to model.source; nearest: 1
lora | untrained weights | there are no pretrained weights to adapt; set model.source or model.weights to a directory of them
lora_dropout | tp | the ranks of parallel.tp {tp} would drop different inputs; nearest: 0
sp | one tensor rank | it spreads tokens over the tensor-parallel ranks; set parallel.tp to 2 or more
unshard_slots | whole weights | parallel.zero is {zero}, and only 3 gathers parameters; set parallel.zero = 3
recomputed part | source | the layers of a model of transformers name no parts; nearest: "full"
recomputed part | compile | compiled blocks have no parts; set train.compile = "none", or recompute "full"
compile | tp | blocks that parallel.tp = {tp} divides exchange inside; set parallel.tp = 1
compile | experts | a block with experts runs in segments, which are not compiled; set train.compile = "none"
compile | slices | compiled blocks keep no state of a slice; nearest: "none"
vocabulary | reproducible | its sums depend on the number of ranks; set train.reproducible = false
vocabulary | search | a searched schedule runs as the search found it; name a family, such as 1f1b
spread vocabulary | whole vocabulary | vocabulary: set parallel.vocabulary = "pp" to spread the output layer
transforms | search | a searched schedule runs as the search found it; leave them out
tp, cp, ep | search in bytes | it divides layers, which are measured whole; give schedule.options.memory as a number, such as 6
recompute | search in bytes | the search decides what is recomputed; nearest: "none"
replan | search in bytes | a search in mid-run does not recompute or copy; nearest: 0
replan | recompute | train.recompute is {recompute} and adds R, which a search in mid-run does not order; nearest: 0
replan | compile | train.compile is {compile} and leaves W without time, which a search in mid-run orders; nearest: 0
slices | search | schedules are searched for whole sequences; name a family, such as 1f1b
overlap_p2p | shared memory | the shared-memory transport posts no receives; set schedule.transport = "individual"
source weights | sorted documents | batches sorted by length take each document of all sources once an epoch; leave them out
sorted documents | slices | the shortest batches have too few tokens to cut; set data.documents = "pack"
split sampling | several sources | it is for one source; nearest: "shuffle-then-split"
sampling | sorted documents | batches sorted by length have a shuffled order of their own; nearest: "shuffle-then-split"
no momentum | nesterov | optimizer.nesterov = true needs momentum; set it above 0, or optimizer.nesterov = false
muon | no barrier | ranks gather whole matrices in each step, which is a barrier; set optimizer.barrier = true
planned | concatenated documents, sorted documents | it packs whole documents; set data.documents = "pack"
planned | search, own schedule, schedule options, own transforms, replan | it builds schedules by the name alone; nearest: "equal"
planned | dualpipev | a step may have fewer micro-batches than it needs; set schedule.name = "zbv" or "1f1b"
planned | sharded gradients | replicas run different micro-batches, and zero {zero} gathers in each; set parallel.zero = 1
sampling | planned | the replicas divide every batch anew; nearest: "shuffle-then-split"
planned | ep | replicas run different micro-batches, and parallel.ep {ep} exchanges tokens in each; set parallel.ep = 1
planned | cp, sp | its micro-batches have any number of tokens, which ranks cannot share evenly; nearest: "equal"
planned | capacity_factor | a capacity would count choices over sequences of other lengths; set model.capacity_factor = 0
planned | vocabulary | its schedules have one output layer; set parallel.vocabulary = "last"
planned | compile | blocks would be compiled for each length; set train.compile = "none"
planned | reproducible | its micro-batches depend on the layout; set train.reproducible = false
on_nan, on_spike | no barrier | a step is known to be bad only after the next has begun; set optimizer.barrier = true
norms | no barrier | a step is final only after the next one has begun; set optimizer.barrier = true
"""
# The same, of what a schedule has that a configuration names or builds.
_OF_SCHEDULES = """
replan | two routes | the schedule has two routes, and a search in mid-run orders one; nearest: 0
replan | pairs | the schedule has pairs, and a search in mid-run orders single actions; nearest: 0
replan | slices | the schedule has slices, and a search in mid-run orders whole micro-batches; nearest: 0
replan | other kinds | the schedule has {other kinds}, and a search in mid-run orders F, B, I and W; nearest: 0
planned | two routes | it plans steps on one route; set schedule.name = "zbv" or "1f1b"
planned | slices | it plans whole sequences; set schedule.slices = 1
"""
EXCLUSIONS = (*rules.RULES, *rules.read(_ROWS))
EXCLUSIONS_OF_SCHEDULES = tuple(rules.read(_OF_SCHEDULES))
_SLOTS = 2  # parallel.unshard_slots where nothing sets it


def _unless(*plain: object) -> Callable[[Config, object], bool]:
    return lambda config, value: value not in plain


def _has_experts(config: Config) -> bool:
    return config.model.num_experts > 0 and not config.model.source


def _searches_in_bytes(config: Config, options: Mapping[str, Any]) -> bool:
    amount = memory_amount(str(options.get("memory")))
    return config.schedule.name == "search" and amount is not None and amount[1]


# Feature of the rules -> the key that a sentence about it names, then others that it depends on; whether it is in use, of the
# configuration and the first key's value.
FEATURES: dict[str, tuple[str, Callable[[Config, Any], object]]] = {
    "router": ("model.router model.num_experts model.source", lambda c, v: _has_experts(c) and v in RANDOM_ROUTERS),
    "capacity_factor": ("model.capacity_factor model.num_experts model.source", lambda c, v: _has_experts(c) and v),
    "pad_to_capacity": ("model.pad_to_capacity model.num_experts", lambda c, v: _has_experts(c) and v),
    "dropless": ("model.capacity_factor", lambda c, v: not v),
    "experts": ("model.num_experts model.source", lambda c, v: _has_experts(c)),
    "dense model": ("model.num_experts model.source", lambda c, v: not v and not c.model.source),
    "num_shared_experts": ("model.num_shared_experts", _unless(0)),
    "moe_layer_freq": ("model.moe_layer_freq", _unless(1)),
    "experts_class": ("model.experts_class", _unless("")),
    "router_class": ("model.router_class", _unless("")),
    "num_nextn_predict_layers": ("model.num_nextn_predict_layers", _unless(0)),
    "source": ("model.source", _unless("")),
    "lora": ("lora.r", _unless(0)),
    "untrained weights": ("model.weights model.source", lambda c, v: not v and not c.model.source),
    "lora_dropout": ("lora.lora_dropout lora.r", lambda c, v: v and c.lora.r),
    "tp": ("parallel.tp", _unless(1, COMPUTED)),
    "one tensor rank": ("parallel.tp", lambda c, v: v == 1),
    "ep": ("parallel.ep", _unless(1)),
    "ep_nodes": ("parallel.ep_nodes", _unless(1)),
    "ep_chunks": ("parallel.ep_chunks", _unless(1)),
    "ep_blocks": ("parallel.ep_blocks", _unless(1)),
    "cut": ("parallel.cp", _unless(1)),
    "cp": ("parallel.cp", _unless(1)),
    "sp": ("parallel.sp", _unless(False)),
    "zero": ("parallel.zero", _unless()),
    "whole weights": ("parallel.zero", _unless(3)),
    "sharded gradients": ("parallel.zero", lambda c, v: v >= 2),
    "unshard_slots": ("parallel.unshard_slots", _unless(_SLOTS)),
    "vocabulary": ("parallel.vocabulary", _unless("last")),
    "whole vocabulary": ("parallel.vocabulary", lambda c, v: v == "last"),
    "one pipeline rank": ("parallel.pp", lambda c, v: v == 1),
    "recompute": ("train.recompute", _unless("none")),
    "recomputed part": ("train.recompute", lambda c, v: v in PARTS_OF_BLOCKS),
    "compile": ("train.compile", _unless("none")),
    "reproducible": ("train.reproducible", _unless(False)),
    "search": ("schedule.name", lambda c, v: v == "search"),
    "dualpipev": ("schedule.name", lambda c, v: canonical_name(v) == "dualpipev"),
    "own schedule": ("schedule.name", lambda c, v: names_a_file(v) or is_function(v)),
    "schedule options": ("schedule.options", _unless({})),
    "search in bytes": ("schedule.options schedule.name", _searches_in_bytes),
    "replan": ("schedule.replan", _unless(0)),
    "slices": ("schedule.slices", _unless(None, 1)),
    "transforms": ("schedule.transforms", _unless(())),
    "own transforms": ("schedule.transforms parallel.zero", lambda c, v: v and c.parallel.zero < 2),
    "spread vocabulary": ("schedule.transforms", lambda c, v: "vocabulary" in {word.partition("=")[0] for word in v}),
    "overlap_p2p": ("schedule.overlap_p2p", lambda c, v: v is False),
    "shared memory": ("schedule.transport", lambda c, v: v == "shared"),
    "planned": ("data.batching", lambda c, v: v == "planned"),
    "concatenated documents": ("data.documents", lambda c, v: v == "concatenate"),
    "sorted documents": ("data.documents", lambda c, v: v == "sort"),
    "source weights": ("data.weights", _unless(())),
    "several sources": ("data.source", lambda c, v: len(v) > 1),
    "split sampling": ("data.sampling", lambda c, v: v == "split-then-shuffle"),
    "sampling": ("data.sampling", _unless("auto", "shuffle-then-split")),
    "nesterov": ("optimizer.nesterov optimizer.name", lambda c, v: v and c.optimizer.name == "sgd"),
    "no momentum": ("optimizer.momentum", lambda c, v: not v),
    "no barrier": ("optimizer.barrier", lambda c, v: not v),
    "muon": ("optimizer.name", lambda c, v: v == "muon"),
    "on_nan": ("train.on_nan", _unless("stop", "skip")),
    "on_spike": ("train.on_spike", _unless("ignore")),
    "norms": ("log.norms", _unless("none")),
}


def key_of(feature: str) -> str:
    """Return the key that a sentence about a feature names."""
    return FEATURES[feature][0].partition(" ")[0]


def value_of(config: Config, key: str) -> Any:
    """Return the value of `section.key`."""
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def features_of(config: Config, wrong: Collection[str] = ()) -> dict[str, Any]:
    """Return the features in use -> the values of their keys."""
    used = {}
    for name, (keys, is_used) in FEATURES.items():
        value = value_of(config, key_of(name))
        if not any(key in wrong or key.partition(".")[0] in wrong for key in keys.split()) and is_used(config, value):
            used[name] = value
    return used
