"""What one process of a run holds: layers, parameters, buffers, and how they are laid over the mesh."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from pipeloom.errors import UsageError
from pipeloom.parallel.laid import Laid
from pipeloom.parallel.mesh import Mesh
from pipeloom.runtime.assembly import Assembly
from pipeloom.runtime.options import RuntimeOptions


class Holdings:
    """The part of a Pipeline that is there between steps.

    Attributes:
        layouts: global name -> how the parameter is laid over the mesh.
    """

    def __init__(self, assembly: Assembly, mesh: Mesh, options: RuntimeOptions) -> None:
        self._assembly = assembly
        self.mesh = mesh
        self.options = options
        self.layouts: dict[str, Laid] = {each.name: each.laid for each in assembly.held}

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        """Layer name -> module, of this rank's stages."""
        return self._assembly.modules

    @property
    def layer_names(self) -> tuple[tuple[str, ...], ...]:
        """The names of the layers of each stage here, in order of the stages."""
        return tuple(stage.layers.names for _, stage in sorted(self._assembly.rank.stages.items()))

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(global name, parameter) of this rank's stages; a weight tied within the rank once, under its first name."""
        yield from self._assembly.parameters.items()

    def parameters(self) -> Iterator[nn.Parameter]:
        yield from self._assembly.parameters.values()

    def owns(self, name: str) -> bool:
        """Whether norms and checkpoints count what this process holds under this name.

        Of a tied weight, of replicas, and of what tensor-parallel ranks hold in full, one process of the mesh does.
        """
        place, laid = self.mesh.place, self.layouts[name]
        replica = place.dp if laid.over("ep") is None else place.edp
        first = replica == 0 and (place.tp == 0 or laid.over("tp") is not None)
        return first and name not in self._assembly.copies

    def counts(self, name: str) -> bool:
        """Whether this process adds its gradient of this name to a global norm; of sharded gradients each replica its slice."""
        if not self.options.shard_gradients:
            return self.owns(name)
        sharded = self.layouts[name].over("tp") is not None
        return (sharded or self.mesh.place.tp == 0) and name not in self._assembly.copies

    def state_dict(self) -> dict[str, Tensor]:
        """Global name -> parameter or buffer of this rank's stages."""
        return {**dict(self.named_parameters()), **self._assembly.buffers}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copies values by global name; raises UsageError when one of this rank's is missing."""
        for name, value in self.state_dict().items():
            if name not in state:
                raise UsageError(f"the state holds no {name!r}")
            with torch.no_grad():
                value.copy_(state[name])

    def train(self, mode: bool = True) -> None:
        for stage in self._assembly.rank.stages.values():
            for module in stage.modules:
                module.train(mode)

    def eval(self) -> None:
        self.train(False)
