"""Distribution of work over processes: the mesh, and data, tensor, sequence and expert parallelism."""

from pipeloom.parallel.mesh import ALONE, Axis, Mesh, PipelineMesh

__all__ = ["ALONE", "Axis", "Mesh", "PipelineMesh"]
