"""Layers on torch's own pipeline runtime, running a schedule of ours through its CSV."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.distributed.tensor import DTensor

from models import mse
from pipeloom import Schedule
from pipeloom.schedule.comms_form import to_torch_csv
from pipeloom.schedule.csv_form import to_csv


class TorchPipeline:
    """A rank's stages under `_PipelineScheduleRuntime`; layer i is stage i.

    Args:
        mesh: "pp" and "dp"; each stage is then sharded over dp by FSDP2, and the schedule is read with its sends, receives,
            gathers and reductions.
    """

    def __init__(
        self,
        rank: int,
        layers: Sequence[Callable[[], nn.Module]],
        schedule: Schedule,
        folder: Path,
        loss: Any = mse,
        mesh: DeviceMesh | None = None,
    ) -> None:
        self.rank = rank if mesh is None else mesh["pp"].get_local_rank()
        self.names = [getattr(layer, "name", str(at)) for at, layer in enumerate(layers)]
        self.modules = {stage: layers[stage]() for stage in schedule.stages_of[self.rank]}
        for module in self.modules.values() if mesh is not None else ():
            fully_shard(module, mesh=mesh["dp"], reshard_after_forward=False)  # type: ignore[index]
        group = mesh["pp"].get_group() if mesh is not None else None
        device = torch.device("cpu")
        stages = [PipelineStage(m, s, schedule.stages, device, group=group) for s, m in self.modules.items()]
        self.runtime = _PipelineScheduleRuntime(stages, schedule.microbatches, loss_fn=loss)
        path = folder / f"{rank}.csv"
        path.write_text(to_csv(schedule) if mesh is None else to_torch_csv(schedule)[0])
        torch_schedule = self.runtime
        torch_schedule._load_csv(str(path), format="compute_only" if mesh is None else "compute_comms")
        self.first, self.last = 0 in self.modules, schedule.stages - 1 in self.modules

    def step(self, x: Tensor, y: Tensor) -> list[float]:
        """The micro-batches' losses on the last stage's rank."""
        losses: list[Tensor] = []
        arguments = (x,) if self.first else ()
        more = {"target": y, "losses": losses} if self.last else {}
        self.runtime.step(*arguments, **more)
        return [loss.item() for loss in losses]

    def evaluate(self, x: Tensor, y: Tensor) -> None:
        arguments = (x,) if self.first else ()
        more: Any = {"target": y, "losses": []} if self.last else {}
        self.runtime.eval(*arguments, **more)

    def gradients(self) -> dict[str, Tensor]:
        return {
            f"{self.names[stage]}.{name}": p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad.clone()
            for stage, module in self.modules.items()
            for name, p in module.named_parameters()
            if p.grad is not None
        }
