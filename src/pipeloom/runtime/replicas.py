"""Replicated weights and buffers: compared by checksum before the first step, and made equal or refused.

Tensors that several processes hold in full must start equal: on data-parallel replicas, on tensor-parallel ranks if not
sharded, copies of an expert, tied weights, and the replicas of two routes. Gradients are the same on all of them, so a
difference would never disappear.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeloom.errors import DistributedError
from pipeloom.ops.checksum import checksums
from pipeloom.parallel.exchange import all_gather_json
from pipeloom.parallel.mesh import Axis, Mesh
from pipeloom.parallel.sharding import WHOLE, ParameterSharding
from pipeloom.parallel.through_host import start
from pipeloom.runtime import tied_weights as ties
from pipeloom.runtime.assembly import Assembly
from pipeloom.runtime.health.names import Names

_LOG = logging.getLogger("pipeloom")


class Replicated(NamedTuple):
    """A tensor that other processes may hold too.

    Attributes:
        name: the first name of the weight, the same on all holders.
        tensor: the tensor of this process.
        sharding: its layout over the mesh.
        holders: the pipeline ranks that hold it.
    """

    name: str
    tensor: Tensor
    sharding: ParameterSharding
    holders: tuple[int, ...]


@dataclass(frozen=True)
class Difference:
    """A tensor that does not have the same values everywhere.

    Attributes:
        key: name of the tensor, and its part.
        first, other: two processes with different values.
    """

    key: str
    first: int
    other: int


def replicated(assembly: Assembly, mesh: Mesh) -> dict[str, Replicated]:
    """Return key -> tensor of this process, for each parameter and buffer that another process may hold too, sorted by key.

    A key names the tensor and the part of it that this process holds: equal keys mean equal values.
    """
    first_names = {weight: (tie.names[0], tie.holders) for tie, weight in assembly.ties.items()}
    layouts = {candidate.parameter: candidate.sharding for candidate in assembly.held}
    tensors = []
    for name, parameter in assembly.parameters.items():
        first, holders = first_names.get(parameter, (name, ()))
        tensors.append(Replicated(first, parameter.detach(), layouts[parameter], holders))
    for name, buffer in assembly.buffers.items():
        layer = ties.layer_of(name, assembly.modules)
        assert layer is not None
        owner = assembly.modules[layer].get_submodule(name[len(layer) + 1 :].rpartition(".")[0])
        sharding = _like_neighbours(owner, layouts)
        tensors.append(Replicated(name, buffer, sharding, assembly.replicated_layers.get(layer, ())))
    keyed = {}
    for candidate in tensors:
        expert, cut = candidate.sharding.over("ep") is not None, candidate.sharding.over("tp") is not None
        copies = (mesh.edp if expert else mesh.dp).size * (1 if cut else mesh.tp.size) * max(len(candidate.holders), 1)
        if copies > 1 and candidate.tensor.layout == torch.strided and candidate.tensor.numel():
            parts = [f"{shard.axis} {getattr(mesh.place, shard.axis)}" for shard in candidate.sharding.shards]
            keyed[" ".join([candidate.name, *parts])] = candidate
    return dict(sorted(keyed.items()))


def compare(mine: Mapping[str, Replicated], mesh: Mesh) -> list[Difference]:
    """Return the tensors that are not equal, the same list on every rank. Collective over the mesh.

    Raises DistributedError for tensors of different shapes or types.
    """
    values = checksums([each.tensor for each in mine.values()])
    sums = {key: [_kind(each.tensor), value] for (key, each), value in zip(mine.items(), values, strict=True)}
    everyone = all_gather_json(sums, mesh.everyone.group)
    known: dict[str, tuple[int, list[Any]]] = {}
    differences: dict[str, Difference] = {}
    for number, theirs in enumerate(everyone):
        for key, value in theirs.items():
            first, expected = known.setdefault(key, (number, value))
            if value[0] != expected[0]:
                names = Names(mesh)
                raise DistributedError(
                    f"{key!r} is {expected[0]} on {names.of(first)} and {value[0]} on {names.of(number)}"
                )
            if value != expected:
                differences.setdefault(key, Difference(key, first, number))
    return [differences[key] for key in sorted(differences)]


def words(differences: Sequence[Difference], mesh: Mesh) -> str:
    """Return the differences as the beginning of a sentence: `"'a.weight' and 2 more differ between rank 0 and rank 2"`."""
    first = differences[0]
    more = f" and {len(differences) - 1} more" if len(differences) > 1 else ""
    verb = "differ" if more else "differs"
    names = Names(mesh)
    return f"{first.key!r}{more} {verb} between {names.of(first.first)} and {names.of(first.other)}"


@torch.no_grad()
def make_equal(
    mine: Mapping[str, Replicated], differences: Sequence[Difference], mesh: Mesh, rank: int, group: Any
) -> None:
    """Give every copy the values of the one at the lowest place of the mesh. Collective over the mesh.

    Args:
        rank: this process's place in its pipeline.
        group: for messages between the pipeline's ranks.
    """
    for difference in differences:
        held_tensor = mine.get(difference.key)
        if held_tensor is None:
            continue
        data = held_tensor.tensor.contiguous().view(-1).view(torch.uint8)
        if len(held_tensor.holders) > 1:
            ties.send_first(held_tensor.holders, rank, data, group)
        axes = [mesh.edp if held_tensor.sharding.over("ep") is not None else mesh.dp]
        if held_tensor.sharding.over("tp") is None:
            axes.insert(0, mesh.tp)
        for axis in axes:
            _broadcast(data, axis)
        held_tensor.tensor.copy_(data.view(held_tensor.tensor.dtype).view(held_tensor.tensor.shape))


def say(differences: Sequence[Difference], mesh: Mesh) -> None:
    """Log one warning, on the first process, about weights that were made equal."""
    if mesh.everyone.index == 0:
        _LOG.warning(
            "replicas did not start equal: %s; all have the first one's values now (RuntimeOptions.init)",
            words(differences, mesh),
        )


def _like_neighbours(owner: nn.Module, layouts: Mapping[nn.Parameter, ParameterSharding]) -> ParameterSharding:
    """Return the layout of a buffer, which declares none: it is sharded like the parameters of its module."""
    beside = [layouts[parameter] for parameter in owner.parameters(recurse=False) if parameter in layouts]
    return next((sharding for sharding in beside if sharding.shards), WHOLE)


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _broadcast(data: Tensor, axis: Axis) -> None:
    if axis.size > 1:
        start(dist.broadcast, data, None, axis.ranks[0], group=axis.group).wait()
