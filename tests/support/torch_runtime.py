"""Layers on torch's own pipeline runtime, running a schedule of ours through its CSV."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from models import mse
from pipeloom import Schedule
from pipeloom.schedule.csv_form import to_csv


class TorchPipeline:
    """A rank's stages under `_PipelineScheduleRuntime`; layer i is stage i."""

    def __init__(
        self,
        rank: int,
        layers: Sequence[Callable[[], nn.Module]],
        schedule: Schedule,
        folder: Path,
        loss: Any = mse,
    ) -> None:
        self.rank = rank
        self.names = [getattr(layer, "name", str(at)) for at, layer in enumerate(layers)]
        self.modules = {stage: layers[stage]() for stage in schedule.stages_of[rank]}
        stages = [PipelineStage(m, s, schedule.stages, torch.device("cpu")) for s, m in self.modules.items()]
        self.runtime = _PipelineScheduleRuntime(stages, schedule.microbatches, loss_fn=loss)
        path = folder / f"{rank}.csv"
        path.write_text(to_csv(schedule))
        torch_schedule = self.runtime
        torch_schedule._load_csv(str(path), format="compute_only")
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
            f"{self.names[stage]}.{name}": p.grad.clone()
            for stage, module in self.modules.items()
            for name, p in module.named_parameters()
            if p.grad is not None
        }
