"""Figures of a run for TensorBoard and Weights & Biases. Each package is imported only if the configuration asks for it."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from pipeloom.config import Config


class FigureWriter(Protocol):
    """Destination of figures."""

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Write the figures of a step, counted from 1. Step numbers never decrease, and one may be written several times."""

    def close(self) -> None: ...


class TensorBoardFigures:
    """Event files in `tensorboard/` of the run's folder."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder / "tensorboard"))

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbFigures:
    """A run of Weights & Biases, named after the run's folder; offline unless WANDB_MODE is set."""

    def __init__(self, config: Config, folder: Path) -> None:
        import wandb  # type: ignore[import-not-found]

        self._run: Any = wandb.init(
            project=config.log.wandb,
            name=folder.name,
            dir=str(folder),
            config=config.model_dump(mode="json"),
            mode=os.environ.get("WANDB_MODE", "offline"),
        )

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        self._run.finish()


def figure_writers(config: Config, folder: Path) -> list[FigureWriter]:
    """Return the writers that `[log]` enables."""
    writers: list[FigureWriter] = []
    if config.log.tensorboard:
        writers.append(TensorBoardFigures(folder))
    if config.log.wandb:
        writers.append(WandbFigures(config, folder))
    return writers


def numbers_of(figures: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures that are finite numbers, without the step."""
    return {
        name: float(value)
        for name, value in figures.items()
        if name != "step" and isinstance(value, int | float) and math.isfinite(value)
    }
