"""Names of ranks in messages: the number in the whole run, with the place on the mesh."""

from __future__ import annotations

from dataclasses import dataclass

from pipeloom.parallel.mesh import Mesh


@dataclass(frozen=True)
class Names:
    """Names of the ranks of a run; without a mesh, the number of the pipeline rank.

    Attributes:
        mesh: the run's processes, or None for one process with all ranks.
    """

    mesh: Mesh | None = None

    def place(self, number: int) -> str:
        """Return the place of a rank, by its number in the run: `"pp 1, dp 0, tp 1"`; empty if the run is a single pipeline."""
        if self.mesh is None or self.mesh.shape.world == self.mesh.shape.pp:
            return ""
        place, shape = self.mesh.shape.place(number), self.mesh.shape
        axes = (("pp", place.pp), ("dp", place.dp), ("tp", place.tp))
        return ", ".join(f"{axis} {index}" for axis, index in axes if getattr(shape, axis) > 1)

    def of(self, number: int) -> str:
        """Return `"rank 5 (pp 1, dp 0, tp 1)"` for a number in the run."""
        where = self.place(number)
        return f"rank {number} ({where})" if where else f"rank {number}"

    def on_line(self, rank: int) -> str:
        """Return the same for a rank of this process's pipeline."""
        return self.of(self.number(rank))

    def number(self, rank: int) -> int:
        """Return the number in the run of a rank of this process's pipeline."""
        if self.mesh is None:
            return rank
        return self.mesh.everyone.ranks.index(self.mesh.pipeline.ranks[rank])
