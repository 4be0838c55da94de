"""Values that several processes must hold alike, compared by checksum: weights and buffers, and the batch of a replica.

Tensors that several processes hold in full must start equal: on data-parallel replicas, on tensor-parallel ranks if not
sharded, copies of an expert, tied weights, and the replicas of two routes. Gradients are the same on all of them, so a
difference would never disappear. The ranks of one data-parallel replica must be passed the same batch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeloom.errors import DistributedError
from pipeloom.ops.checksum import checksums
from pipeloom.parallel.collectives import start_collective
from pipeloom.parallel.exchange import all_gather_json
from pipeloom.parallel.mesh import Axis, Mesh
from pipeloom.parallel.sharding import WHOLE, ParameterSharding
from pipeloom.runtime import tied_weights as ties
from pipeloom.runtime.assembly import Assembly
from pipeloom.runtime.health.status import Names
from pipeloom.runtime.tensor_spec import memory_of
from pipeloom.shapes.mesh import MeshShape

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
        same, others: the processes with the value of the first holder, and those with another one.
        kinds: dtype and shape on the first of each, as text.
    """

    key: str
    same: tuple[int, ...]
    others: tuple[int, ...]
    kinds: tuple[str, str]


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
        expert, cut = candidate.sharding.over("ep") is not None, not candidate.sharding.whole_over_tp
        copies = (mesh.edp if expert else mesh.dp).size * (1 if cut else mesh.tp.size) * max(len(candidate.holders), 1)
        if copies > 1 and candidate.tensor.layout == torch.strided and candidate.tensor.numel():
            parts = [f"{shard.axis} {getattr(mesh.place, shard.axis)}" for shard in candidate.sharding.shards]
            keyed[" ".join([candidate.name, *parts])] = candidate
    return dict(sorted(keyed.items()))


def compare(mine: Mapping[str, Tensor], group: Any, shape: MeshShape, tolerance: float = 0.0) -> list[Difference]:
    """Return the tensors of equal keys that are not equal, the same list on every process. Collective over `group`.

    Args:
        shape, tolerance: as of `differences`.
    """
    tensors = list(mine.values())
    norms = [0.0] * len(tensors)
    if tolerance and tensors:
        norms = torch.stack([tensor.detach().double().norm() for tensor in tensors]).tolist()
    values = zip(map(_kind, tensors), checksums(tensors), norms, strict=True)
    return differences(all_gather_json(dict(zip(mine, values, strict=True)), group), shape, tolerance)


def differences(
    everyone: Sequence[Mapping[str, Sequence[Any]]], shape: MeshShape, tolerance: float = 0.0
) -> list[Difference]:
    """Return the keys with unequal values, sorted.

    Args:
        everyone: process -> key -> (kind, checksum, norm). Values are equal if kinds and checksums are.
        tolerance: two processes with different places in tp may also have norms that differ by at most `tolerance` times
            the larger one.
    """
    holders: dict[str, dict[int, Sequence[Any]]] = {}
    for process, sums in enumerate(everyone):
        for key, value in sums.items():
            holders.setdefault(key, {})[process] = value

    def equal(one: int, other: int, values: Mapping[int, Sequence[Any]]) -> bool:
        (kind, checksum, norm), (other_kind, other_checksum, other_norm) = values[one], values[other]
        if kind != other_kind or checksum == other_checksum:
            return bool(kind == other_kind)
        if not tolerance or shape.place(one).tp == shape.place(other).tp:
            return False
        return bool(abs(norm - other_norm) <= tolerance * max(abs(norm), abs(other_norm)))

    different = []
    for key, values in sorted(holders.items()):
        same = tuple(process for process in values if equal(min(values), process, values))
        others = tuple(process for process in values if process not in same)
        if others:
            different.append(Difference(key, same, others, (values[min(values)][0], values[others[0]][0])))
    return different


def words(differences: Sequence[Difference], mesh: Mesh) -> str:
    """Return the differences as the beginning of a sentence: `"'a.weight' and 2 more differ between rank 0 and rank 2"`."""
    first, names = differences[0], Names(mesh)
    here, there = names.of(first.same[0]), names.of(first.others[0])
    if first.kinds[0] != first.kinds[1]:
        return f"{first.key!r} is {first.kinds[0]} on {here} and {first.kinds[1]} on {there}"
    more = f" and {len(differences) - 1} more differ" if len(differences) > 1 else " differs"
    return f"{first.key!r}{more} between {here} and {there}"


def require_alike(differences: Sequence[Difference], mesh: Mesh) -> None:
    """Raise DistributedError for a tensor that has another shape or dtype on another rank."""
    for difference in differences:
        if difference.kinds[0] != difference.kinds[1]:
            raise DistributedError(words([difference], mesh))


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
        if held_tensor.sharding.whole_over_tp:
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


class BatchCheck:
    """Comparison of the batches that the ranks of one replica are passed, in the first step and every `every` steps.

    What a rank does not pass, or passes on the meta device or as a sparse or nested tensor, is not compared.

    Args:
        every: steps from one comparison to the next, the same on every rank; 0: none.
    """

    def __init__(self, mesh: Mesh, every: int) -> None:
        self._mesh = mesh
        self._every = every if mesh.shape.pp * mesh.shape.cp * mesh.shape.tp > 1 else 0
        self._steps = 0

    def due(self) -> bool:
        """Return whether this step's batch is to be compared. Call it once in each step."""
        self._steps += 1
        return bool(self._every) and (self._steps - 1) % self._every == 0

    def differences(self, arguments: Mapping[str, Any], group: Any) -> list[Difference]:
        """Return what differs between ranks of one replica, the same on every rank. Collective over all replicas.

        Args:
            arguments: name -> what this rank was passed.
        """
        of_replica = f" of replica {self._mesh.place.dp}" if self._mesh.shape.dp > 1 else ""
        named = {f"{name}{of_replica}": tensor for name, tensor in _named_tensors(arguments)}
        return compare(named, group, self._mesh.shape)

    def require_none(self, differences: Sequence[Difference], step: int) -> None:
        """Raise DistributedError, on every rank, if there are differences in the batch of step `step`."""
        if differences:
            raise DistributedError(
                f"step {step}: {words(differences, self._mesh)}; pass the same batch on all ranks of a replica, or tensors on "
                "the meta device on a rank with neither a first nor a last stage"
            )


def _named_tensors(values: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield each strided tensor with data, also of tuples, lists and dicts, as `("inputs[0]", tensor)`."""
    for name, value in values.items():
        if isinstance(value, Tensor):
            if memory_of(value) is not None:
                yield name, value
        elif isinstance(value, (Mapping, tuple, list)):
            items = value.items() if isinstance(value, Mapping) else enumerate(value)
            yield from _named_tensors({f"{name}[{key!r}]": item for key, item in items})


def _like_neighbours(owner: nn.Module, layouts: Mapping[nn.Parameter, ParameterSharding]) -> ParameterSharding:
    """Return the layout of a buffer, which declares none: it is sharded like the parameters of its module."""
    beside = [layouts[parameter] for parameter in owner.parameters(recurse=False) if parameter in layouts]
    return next((sharding for sharding in beside if sharding.shards), WHOLE)


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _broadcast(data: Tensor, axis: Axis) -> None:
    if axis.size > 1:
        start_collective(dist.broadcast, data, None, axis.ranks[0], group=axis.group).wait()
