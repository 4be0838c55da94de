"""The mesh: which processes form this process's pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pipeloom.errors import DistributedError


@dataclass(frozen=True)
class PipelineMesh:
    """The processes of one pipeline, in the order of its ranks.

    Attributes:
        ranks: pipeline rank -> global rank.
        rank: this process's pipeline rank.
        group: their process group; None when the pipeline is one process without torch.distributed.
    """

    ranks: tuple[int, ...]
    rank: int
    group: Any

    @classmethod
    def of(cls, ranks: Sequence[int]) -> PipelineMesh:
        """A mesh of these global ranks; every one of them must call this, others need not.

        Raises DistributedError when this process is not among them, or torch.distributed has not been started.
        """
        if not dist.is_initialized():
            if tuple(ranks) == (0,):
                return cls((0,), 0, None)
            raise DistributedError("torch.distributed is not initialized: start with torchrun or `pipeloom train`")
        mine = dist.get_rank()
        if mine not in ranks:
            raise DistributedError(f"global rank {mine} is not one of the pipeline's ranks {list(ranks)}")
        whole = tuple(ranks) == tuple(range(dist.get_world_size()))
        group = dist.group.WORLD if whole else dist.new_group(list(ranks), use_local_synchronization=True)
        return cls(tuple(ranks), tuple(ranks).index(mine), group)

    @classmethod
    def whole_world(cls) -> PipelineMesh:
        """All processes as one pipeline."""
        return cls.of(range(dist.get_world_size() if dist.is_initialized() else 1))

    @classmethod
    def of_device_mesh(cls, mesh: DeviceMesh, axis: str = "pp") -> PipelineMesh:
        """The pipeline that this process belongs to, along `axis` of a torch DeviceMesh."""
        names = mesh.mesh_dim_names or ()
        line = mesh if mesh.ndim == 1 else mesh[axis]
        if mesh.ndim > 1 and axis not in names:
            raise DistributedError(f"the device mesh has no axis {axis!r}; it has {list(names)}")
        return cls(tuple(line.mesh.flatten().tolist()), line.get_local_rank(), line.get_group())
