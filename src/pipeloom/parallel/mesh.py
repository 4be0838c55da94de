"""The mesh at run time: the pipeline of this process and the process groups of its axes."""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from pipeloom.errors import DistributedError, UsageError
from pipeloom.limits import of_annotated_types, require_types
from pipeloom.shapes.mesh import AXES, MeshShape, Place

# torch's function that names a group; an internal name, which torch may remove, and the only way to choose a name.
_NAME_OF_GROUP = "_hash_ranks_to_str"
_MADE: WeakKeyDictionary[Any, Counter[tuple[int, ...]]] = WeakKeyDictionary()
"""Default group -> number of groups that `group_of_members` has created per tuple of ranks; equal on all of these ranks."""


def group_of_members(ranks: Sequence[int], **options: Any) -> Any:
    """Return a process group of these global ranks. Only they call this; `options` are passed to `dist.new_group`."""
    world: Any = dist.group.WORLD
    bound = world.bound_device_id
    # With a device bound to the default group, torch splits its NCCL communicator, which requires a call on every rank.
    world.bound_device_id = None
    try:
        with _named_alike(tuple(ranks)):
            return dist.new_group(list(ranks), use_local_synchronization=True, **options)
    finally:
        world.bound_device_id = bound


@contextlib.contextmanager
def _named_alike(ranks: tuple[int, ...]) -> Iterator[None]:
    """Give the next group of `ranks` the same name on all of them, inside the context.

    torch includes the number of groups of the process in the name. Members of different numbers of other groups, such as the
    first and a middle rank of a pipeline with one group per channel, would wait forever for different keys of the store
    (pytorch/pytorch#189073).
    """
    name_of = getattr(distributed_c10d, _NAME_OF_GROUP, None)
    if name_of is None or dist.get_rank() not in ranks:
        yield
        return
    count = _MADE.setdefault(dist.group.WORLD, Counter())
    words = f"pipeloom {' '.join(map(str, ranks))} {count[ranks]}"
    count[ranks] += 1
    setattr(distributed_c10d, _NAME_OF_GROUP, lambda _: hashlib.sha1(words.encode(), usedforsecurity=False).hexdigest())
    try:
        yield
    finally:
        setattr(distributed_c10d, _NAME_OF_GROUP, name_of)


@dataclass(frozen=True)
class PipelineMesh:
    """The processes of one pipeline, in the order of its ranks.

    Attributes:
        ranks: pipeline rank -> global rank.
        rank: this process's pipeline rank.
        group: their process group; None if the pipeline is a single process without one.
    """

    ranks: tuple[int, ...]
    rank: int
    group: Any

    def __post_init__(self) -> None:
        _require_ascending(self.ranks)

    @classmethod
    def of(cls, ranks: Sequence[int]) -> PipelineMesh:
        """Return the pipeline of these global ranks; all of them must call this, others need not.

        Raises DistributedError if they do not ascend, this process is not among them, or torch.distributed is not
        initialized.
        """
        if not dist.is_initialized():
            if tuple(ranks) == (0,):
                return cls((0,), 0, None)
            raise DistributedError("torch.distributed is not initialized: start with torchrun or `pipeloom train`")
        mine = dist.get_rank()
        if mine not in ranks:
            raise DistributedError(f"global rank {mine} is not one of the pipeline's ranks {list(ranks)}")
        whole = tuple(ranks) == tuple(range(dist.get_world_size()))
        group = dist.group.WORLD if whole else group_of_members(ranks)
        return cls(tuple(ranks), tuple(ranks).index(mine), group)

    @classmethod
    def of_device_mesh(cls, mesh: DeviceMesh, axis: str = "pp") -> PipelineMesh:
        """Return the pipeline of this process along `axis` of a torch DeviceMesh.

        A mesh with a single unnamed axis is accepted too. Other axes are left to the caller: gradients are not summed over
        them, and a warning names those longer than 1. Raises UsageError if no axis is called `axis`.
        """
        names = mesh.mesh_dim_names
        if axis not in (names or ()) and not (names is None and mesh.ndim == 1):
            has = f"its axes are {', '.join(names)}" if names else f"its {mesh.ndim} axes have no names"
            raise UsageError(
                f"the device mesh has no axis {axis!r}, {has}; call the pipeline's axis {axis!r} in init_device_mesh's "
                "mesh_dim_names, or give the mesh of that axis alone as PipelineMesh.of(ranks)"
            )
        others = [
            f"{name} {size}" for name, size in zip(names or (), mesh.shape, strict=False) if name != axis and size > 1
        ]
        if others:
            warnings.warn(
                f"the pipeline takes the axis {axis!r} of the device mesh and leaves {', '.join(others)} to the caller: "
                "gradients are not summed over them. Mesh.of(MeshShape(pp=…, dp=…, tp=…)) makes a mesh over which they are",
                stacklevel=4,
            )
        line = mesh if mesh.ndim == 1 else mesh[axis]
        return cls(tuple(line.mesh.flatten().tolist()), line.get_local_rank(), line.get_group())


@dataclass(frozen=True)
class Axis:
    """The processes along one axis of the mesh that includes this process.

    Attributes:
        ranks: index on the axis -> global rank.
        index: index of this process on the axis.
        group: their process group; None if there is only this process.
    """

    ranks: tuple[int, ...]
    index: int
    group: Any

    @property
    def size(self) -> int:
        return len(self.ranks)


ALONE = Axis((0,), 0, None)


@dataclass(frozen=True)
class Mesh:
    """Position of this process among dp · cp · tp parallel pipelines, and its process groups.

    Attributes:
        shape: sizes of the axes, and order of the ranks.
        place: index of this process on each axis.
        pipeline: the pipeline that this process belongs to.
        dp: the processes that hold the same weights, dp · cp of them: gradients are summed over them. edp and ep together.
        tp, ep, edp, cp: the processes along these axes.
        everyone: all processes of the mesh, in rank order.
        device_mesh: torch's mesh of the axes longer than 1, named pp, edp, ep, tp; None for one process.
        inside, across: if the ep axis spans machines: its ranks on this machine, and the ranks at this rank's position on
            each machine. Otherwise both are `ALONE`.
    """

    shape: MeshShape
    place: Place
    pipeline: PipelineMesh
    dp: Axis
    tp: Axis
    ep: Axis
    edp: Axis
    everyone: Axis
    device_mesh: DeviceMesh | None
    inside: Axis = ALONE
    across: Axis = ALONE
    cp: Axis = ALONE

    @classmethod
    @of_annotated_types
    def of(cls, shape: MeshShape, ranks: Sequence[int] | None = None) -> Mesh | None:
        """Return the mesh of these global ranks (default: all), or None on processes outside `ranks`.

        Every process of the default group must call this, in the same order as other calls that create groups.

        Raises DistributedError if the ranks do not ascend or their number does not match the shape, for example because
        torch.distributed is not initialized.
        """
        started = dist.is_initialized()
        world = dist.get_world_size() if started else 1
        members = tuple(range(world) if ranks is None else ranks)
        _require_ascending(members)
        if len(members) != shape.world:
            hint = "" if started else ": start with torchrun or `pipeloom train`"
            raise DistributedError(
                f"a mesh of {shape} needs {shape.world} processes, and there are {len(members)}{hint}"
            )
        if shape.world == 1:
            me = dist.get_rank() if started else 0
            return cls.of_pipeline(PipelineMesh((me,), 0, None)) if me in members else None
        torch_mesh = _torch_mesh(shape, members)
        dp_groups = [[members[at] for at in group] for group in shape.groups("dp")]
        dp_group = _line(dp_groups).group if shape.ep > 1 and shape.edp > 1 else None
        everyone_group = dist.group.WORLD if members == tuple(range(world)) else _line([members]).group
        inside, across = (
            _line([[members[at] for at in line] for line in groups]) if shape.ep_nodes > 1 else ALONE
            for groups in shape.node_groups()
        )
        cp = _line([[members[at] for at in group] for group in shape.context_groups()]) if shape.cp > 1 else ALONE
        if dist.get_rank() not in members:
            return None
        mine = members.index(dist.get_rank())
        place = shape.place(mine)

        def axis(name: str, group: Any = None) -> Axis:
            line = tuple(members[at] for at in shape.group_of(mine, name))
            if group is None and len(line) > 1:
                group = torch_mesh.get_group(name)
            return Axis(line, line.index(members[mine]), group)

        edp, ep, pp = axis("edp"), axis("ep"), axis("pp")
        dp = axis("dp", dp_group or (edp.group if shape.ep == 1 else ep.group)) if shape.replicas > 1 else axis("dp")
        everyone = Axis(members, mine, everyone_group)
        pipeline = PipelineMesh(pp.ranks, pp.index, pp.group)
        return cls(shape, place, pipeline, dp, axis("tp"), ep, edp, everyone, torch_mesh, inside, across, cp)

    @classmethod
    def of_pipeline(cls, pipeline: PipelineMesh) -> Mesh:
        """Return the mesh of a single pipeline."""
        me = pipeline.ranks[pipeline.rank]
        single = Axis((me,), 0, None)
        shape = MeshShape(pp=len(pipeline.ranks))
        everyone = Axis(pipeline.ranks, pipeline.rank, pipeline.group)
        return cls(shape, shape.place(pipeline.rank), pipeline, single, single, single, single, everyone, None)

    @classmethod
    def resolve(cls, mesh: Mesh | PipelineMesh | DeviceMesh | None) -> Mesh:
        """Return `mesh` as a Mesh; None means that all processes are one pipeline."""
        require_types(Mesh.resolve, {"mesh": mesh})
        if isinstance(mesh, Mesh):
            return mesh
        if mesh is None:
            mesh = PipelineMesh.of(range(dist.get_world_size() if dist.is_initialized() else 1))
        return cls.of_pipeline(mesh if isinstance(mesh, PipelineMesh) else PipelineMesh.of_device_mesh(mesh))

    @property
    def index(self) -> dict[str, int]:
        """Axis -> index of this process, as `sharding.shard_of` expects it."""
        return self.place._asdict()


def _require_ascending(ranks: Sequence[int]) -> None:
    """Raise DistributedError for ranks that do not ascend: torch's process groups number their members in ascending order."""
    if any(first >= second for first, second in pairwise(ranks)):
        raise DistributedError(
            f"the mesh's ranks are {list(ranks)!r:.200}; they must ascend, as the members of a process group do: other orders "
            "of the axes are MeshShape(order=…), and a schedule's placement says which rank holds which stage"
        )


def _torch_mesh(shape: MeshShape, members: Sequence[int]) -> DeviceMesh:
    """Return torch's mesh of the axes longer than 1, which creates their groups in the same order on every process."""
    by_stride = [(axis, size) for axis, size in shape.outermost_first if size > 1]
    in_axis_order = sorted(by_stride, key=lambda axis_stride: AXES.index(axis_stride[0]))
    numbered = torch.tensor(members, dtype=torch.int).view([size for _, size in by_stride])
    layout = numbered.permute([by_stride.index(axis_stride) for axis_stride in in_axis_order]).contiguous()
    kind = "cuda" if "nccl" in str(dist.get_backend_config()) and torch.cuda.is_available() else "cpu"
    return DeviceMesh(kind, layout, mesh_dim_names=tuple(axis for axis, _ in in_axis_order))


def _line(groups: Sequence[Sequence[int]]) -> Axis:
    """Create a process group for each line of ranks longer than 1; return the axis of this process, or ALONE if it has none."""
    mine = ALONE
    for ranks in groups:
        group = dist.new_group(list(ranks)) if len(ranks) > 1 else None
        if dist.get_rank() in ranks:
            mine = Axis(tuple(ranks), ranks.index(dist.get_rank()), group)
    return mine
