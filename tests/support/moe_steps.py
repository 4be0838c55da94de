"""A decoder with experts on a mesh without a pipeline: a step's loss and whole gradients, against one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import layouts
from layouts import LENGTH, Gradients
from pipeloom.config import ModelSection, load
from pipeloom.models import layers, token_loss
from pipeloom.models.gate import gates_of, take_loads
from pipeloom.parallel.dispatch import ExpertParallel
from pipeloom.parallel.mesh import ALONE, Mesh
from pipeloom.parallel.sharding import join, shardings_of
from pipeloom.parallel.tensor import TensorParallel
from pipeloom.shapes.mesh import MeshShape

MICROBATCHES = 2


def model(**changes: Any) -> ModelSection:
    small = {"num_hidden_layers": 2, "num_experts": 4, "moe_intermediate_size": 24, "hidden_size": 32}
    return load("tiny", {f"model.{key}": value for key, value in {**small, **changes}.items()}).model


@dataclass(frozen=True)
class Way:
    """How a step is run; nothing of it may change a gradient."""

    split: bool = False
    recompute: bool = False
    chunks: int = 1
    blocks: int = 1
    sequence: bool = False


def batch(replica: int) -> list[tuple[Tensor, Tensor]]:
    """Two micro-batches of 2 and 3 sequences, different on each replica."""
    generator = torch.Generator().manual_seed(31 + replica)
    both = torch.randint(0, 256, (2, 5, LENGTH), generator=generator)
    return [(both[0, :2], both[1, :2]), (both[0, 2:], both[1, 2:])]


def run(
    built: Mapping[str, nn.Module], shape: ModelSection, way: Way, replicas: Sequence[int], of: int, tensor: Any = None
) -> float:
    """Forward and backward of these replicas' micro-batches, of the `of` that make a step; the sum of their losses."""
    microbatches = [
        (replica * MICROBATCHES + at, pair) for replica in replicas for at, pair in enumerate(batch(replica))
    ]
    return layouts.run(built, token_loss(shape, 0.0, tensor), way, microbatches, 5 * LENGTH * of)


def serial(shape: ModelSection, replicas: int) -> tuple[float, Gradients, list[int]]:
    """One process with all replicas' micro-batches: loss, gradients, loads of the first block."""
    built = {layer.name: layer() for layer in layers(shape, 5)}
    loss = run(built, shape, Way(), range(replicas), replicas)
    gradients = {f"{name}.{inner}": p.grad for name, m in built.items() for inner, p in m.named_parameters()}
    return loss, gradients, take_loads(gates_of(built.values())[0]).tolist()


def step_on(mesh: Mesh, shape: ModelSection, way: Way) -> tuple[float, Gradients, list[int]]:
    """The same on this process of the mesh, gradients reduced and joined."""
    tensor = TensorParallel(mesh.tp, way.sequence) if mesh.tp.size > 1 else None
    nodes, levels = mesh.shape.ep_nodes, (mesh.inside, mesh.across)
    expert = ExpertParallel(mesh.ep, nodes, *(levels if nodes > 1 else (None, None)), way.chunks, way.blocks)
    built = {layer.name: layer() for layer in layers(shape, 5, torch.float32, "cpu", tensor, expert)}
    loss = torch.tensor(run(built, shape, way, [mesh.dp.index], mesh.dp.size, tensor))
    counts = take_loads(gates_of(built.values())[0])
    if mesh.dp.group is not None:
        dist.all_reduce(loss, group=mesh.dp.group)
        dist.all_reduce(counts, group=mesh.dp.group)
    return loss.item(), joined(built, mesh), counts.tolist()


def joined(built: Mapping[str, nn.Module], mesh: Mesh, reduced: bool = False) -> Gradients:
    """Reduced (or `reduced` already) over the replicas of each part, summed over tp where partial, and joined over ep and tp."""
    found = {}
    for layer, module in built.items():
        layouts = shardings_of(module)
        for inner, parameter in module.named_parameters():
            sharding, gradient = layouts[inner], parameter.grad
            assert gradient is not None, inner
            axis = mesh.edp if sharding.over("ep") is not None else mesh.dp
            for each in () if reduced else (axis, mesh.tp if sharding.partial else ALONE):
                if each.group is not None:
                    dist.all_reduce(gradient, group=each.group)
            found[f"{layer}.{inner}"] = whole(gradient, sharding, mesh)
    return found


def whole(gradient: Tensor, sharding: Any, mesh: Mesh) -> Tensor:
    axes = {"ep": mesh.ep, "tp": mesh.tp}
    parts = {(): gradient}
    for shard in sharding.shards:
        axis = axes[shard.axis]
        gathered: list[Any] = [None] * axis.size
        dist.all_gather_object(gathered, {key: part.numpy() for key, part in parts.items()}, group=axis.group)
        parts = {(*key, at): torch.from_numpy(part) for at, each in enumerate(gathered) for key, part in each.items()}
    return join(parts, sharding)


def mesh_of(**shape: Any) -> Mesh:
    mesh = Mesh.of(MeshShape(**shape))
    assert mesh is not None
    return mesh
