"""Distribution of work over processes: the mesh, and data, tensor, sequence and expert parallelism."""

from pipeloom.parallel.mesh import ALONE, Axis, Mesh, PipelineMesh
from pipeloom.shapes.mesh import MeshShape

__all__ = ["ALONE", "Axis", "Mesh", "MeshShape", "PipelineMesh"]
