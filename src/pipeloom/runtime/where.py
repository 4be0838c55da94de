"""Where a pipeline runs: its mesh, its device, and what the replicas agree on before a step."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pipeloom.parallel.mesh import Mesh, PipelineMesh
from pipeloom.runtime.alarm import Alarm
from pipeloom.runtime.options import RuntimeOptions


def mesh_of(mesh: Mesh | PipelineMesh | DeviceMesh | None) -> Mesh:
    """What the caller of `Pipeline` gave, as a mesh; None: all processes are one pipeline."""
    if isinstance(mesh, Mesh):
        return mesh
    if mesh is None:
        mesh = PipelineMesh.whole_world()
    return Mesh.of_pipeline(mesh if isinstance(mesh, PipelineMesh) else PipelineMesh.of_device_mesh(mesh))


def device_of(options: RuntimeOptions, mesh: Mesh) -> torch.device:
    """The device of the stages: as asked, else the current GPU under NCCL, else the CPU."""
    if options.device is not None:
        return torch.device(options.device)
    group = mesh.everyone.group
    if group is not None and "nccl" in str(dist.get_backend_config(group)) and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def sum_over_replicas(weight: float, mesh: Mesh, device: torch.device, alarm: Alarm) -> float:
    """The sum of a number over the data-parallel replicas, the same on each. Collective over them."""
    if mesh.dp.group is None:
        return weight
    has_gloo = "gloo" in str(dist.get_backend_config(mesh.dp.group))
    with alarm.telling():
        alarm.status.wait_between("the other replicas' numbers of targets")
        total = torch.tensor([weight], dtype=torch.float64, device="cpu" if has_gloo else device)
        dist.all_reduce(total, group=mesh.dp.group)
        alarm.status.leave()
    return float(total.item())
