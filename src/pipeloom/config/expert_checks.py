"""Conditions between the keys of experts and those of their parallelism."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeloom.config.keys import sentence
from pipeloom.config.problems import shown
from pipeloom.config.sections import Config
from pipeloom.decoder_shape import ROUTERS, frequency_problem
from pipeloom.errors import ArgumentError, UsageError, divisors, nearest
from pipeloom.schedule.functions import importable_from, user_object

CLASS_KEYS = ("experts_class", "router_class")
_GATE = "pipeloom.models.gate.TopKGate"


def router_problems(config: Config) -> Iterator[str]:
    """Yield a sentence for each key of the router or the experts that contradicts another."""
    model = config.model
    experts, top_k = model.num_experts, model.num_experts_per_tok
    if experts == 0:
        if model.num_shared_experts:
            yield f"model.num_shared_experts = {model.num_shared_experts}: there are no experts; set model.num_experts"
        if model.moe_layer_freq != 1:
            yield f"model.moe_layer_freq = {shown(model.moe_layer_freq)}: there are no experts; set model.num_experts"
        for key in CLASS_KEYS:
            if getattr(model, key):
                yield f'model.{key} = "{getattr(model, key)}": there are no experts; set model.num_experts'
        return
    problem = frequency_problem(model.moe_layer_freq, model.num_hidden_layers)
    if problem:
        yield sentence(ArgumentError("moe_layer_freq", problem))
    wanted = ROUTERS[model.router] or top_k
    if top_k != wanted:
        yield f'model.num_experts_per_tok = {top_k}: router "{model.router}" chooses {wanted}; use {wanted}'
    elif top_k > experts:
        yield f"model.num_experts_per_tok = {top_k}: model.num_experts is {experts}; nearest: {experts}"


def user_classes(config: Config, folders: Mapping[str, Path]) -> tuple[dict[str, Any], list[str]]:
    """(key of `[model]` -> the user's class that it names, a sentence for each that cannot be used).

    Args:
        folders: "section.key" -> the folder from which the module that the key names is imported; default: the working directory.
    """
    classes: dict[str, Any] = {}
    problems: list[str] = []
    for key in CLASS_KEYS:
        name = getattr(config.model, key)
        if not name or not config.model.num_experts:
            continue
        folder = folders.get(f"model.{key}", Path())
        try:
            with importable_from(folder):
                classes[key] = user_object(name, folder, "class")
        except UsageError as error:
            problems.append(f'model.{key} = "{name}": {error}')
            continue
        mro = getattr(classes[key], "__mro__", ())
        bases = [f"{base.__module__}.{base.__qualname__}" for base in mro]
        if not bases:
            problems.append(f'model.{key} = "{name}": it is a {type(classes[key]).__name__}, not a class')
        elif key == "router_class" and _GATE not in bases:
            problems.append(f'model.{key} = "{name}": it is not a subclass of {_GATE}')
    return classes, problems


def spread_problems(config: Config) -> Iterator[str]:
    """Yield a sentence for each key that asks for an impossible spread or overlap of experts."""
    parallel, experts = config.parallel, config.model.num_experts
    if experts == 0:
        for key in ("ep", "ep_nodes", "ep_chunks", "ep_blocks"):
            degree = getattr(parallel, key)
            if degree > 1:
                yield f"parallel.{key} = {degree}: the model has no experts; use 1, or set model.num_experts"
        return
    if experts % parallel.ep:
        near = nearest(parallel.ep, divisors(experts))
        yield f"parallel.ep = {parallel.ep}: it must divide model.num_experts {experts}; {near}"
    if parallel.ep % parallel.ep_nodes:
        near = nearest(parallel.ep_nodes, divisors(parallel.ep))
        yield f"parallel.ep_nodes = {parallel.ep_nodes}: it must divide parallel.ep {parallel.ep}; {near}"
    if parallel.ep_chunks > 1 and parallel.ep_blocks > 1:
        yield f"parallel.ep_chunks = {parallel.ep_chunks}: use either this or parallel.ep_blocks {parallel.ep_blocks}, not both"
    if parallel.ep_blocks > 1:
        yield from _block_problems(config)


def _block_problems(config: Config) -> Iterator[str]:
    blocks, length = config.parallel.ep_blocks, config.train.seq_len
    if blocks > length:
        yield f"parallel.ep_blocks = {blocks}: a sequence has train.seq_len {length} tokens; nearest: {length}"
    if config.model.capacity_factor:
        yield (
            f"parallel.ep_blocks = {blocks}: which tokens exceed a capacity is known only when all are routed; "
            f"set model.capacity_factor to 0, or use parallel.ep_chunks"
        )
    if config.parallel.tp > 1:
        yield f"parallel.ep_blocks = {blocks}: it needs parallel.tp = 1, not {config.parallel.tp}; or use parallel.ep_chunks"
