"""How work is laid over processes: the mesh (data, tensor and expert parallelism come with their own modules)."""

from pipeloom.parallel.mesh import PipelineMesh

__all__ = ["PipelineMesh"]
