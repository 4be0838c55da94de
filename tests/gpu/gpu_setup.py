"""What the parts of the proof on a GPU share: where they run, how large, and the rows that they report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pipeloom.models import layers, token_loss
from pipeloom.runtime import LocalPipeline, RuntimeOptions
from pipeloom.schedule.model import Schedule
from pipeloom.shapes.decoder import DecoderShape


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        name: what was looked at.
        measured: in words, with units.
        target: what it is held against; "" for a figure without one.
        passed: None for a figure without a target.
    """

    name: str
    measured: str
    target: str = ""
    passed: bool | None = None


def at_most(name: str, value: float, limit: float, form: str = "{:.3g}") -> Row:
    return Row(name, form.format(value), f"at most {form.format(limit)}", value <= limit)


def at_least(name: str, value: float, limit: float, form: str = "{:.3g}") -> Row:
    return Row(name, form.format(value), f"at least {form.format(limit)}", value >= limit)


@dataclass(frozen=True)
class Setup:
    """Where a part runs; on a CPU with tiny sizes, which shows that its logic holds and measures nothing."""

    device: torch.device

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def shape(self) -> DecoderShape:
        """A small decoder for numbers: 10 layers, enough for every family on 4 ranks."""
        width = 256 if self.cuda else 32
        return DecoderShape(8, width, 4, 2, 2 * width, 199)

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def tokens(self, rows: int, length: int, vocabulary: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        both = torch.randint(0, vocabulary, (2, rows, length), generator=torch.Generator().manual_seed(seed))
        return both[0].to(self.device), both[1].to(self.device)

    def pipeline(
        self, schedule: Schedule, shape: DecoderShape, dtype: torch.dtype = torch.float32, **options: Any
    ) -> LocalPipeline:
        chosen = replace(RuntimeOptions(device=self.device, seed=1), **options)
        return LocalPipeline(layers(shape, 1, dtype, self.device), schedule, loss=token_loss(shape), options=chosen)

    def plain(
        self,
        shape: DecoderShape,
        inputs: Tensor,
        targets: Tensor,
        sizes: Sequence[int],
        dtype: torch.dtype = torch.float32,
    ) -> tuple[float, dict[str, Tensor]]:
        """Loss and gradients of a loop over micro-batches that knows nothing of pipelines."""
        built = {layer.name: layer() for layer in layers(shape, 1, dtype, self.device)}
        loss_of, total, counted = token_loss(shape), 0.0, int((targets != -100).sum())
        for x, y in zip(torch.split(inputs, list(sizes)), torch.split(targets, list(sizes)), strict=True):
            out = x
            for module in built.values():
                out = module(out)
            share = loss_of(out, y) * (int((y != -100).sum()) / counted)
            share.backward()  # type: ignore[no-untyped-call]
            total += float(share.detach())
        return total, {
            f"{name}.{inner}": parameter.grad
            for name, module in built.items()
            for inner, parameter in module.named_parameters()
            if parameter.grad is not None
        }


def gradients(pipeline: LocalPipeline) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in pipeline.named_parameters() if p.grad is not None}


def worst(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """The largest max|a-b| / max|b| over the parameters; infinite when the sets differ."""
    if got.keys() != want.keys():
        return float("inf")
    each = ((got[k].float() - want[k].float()).abs().max() / want[k].float().abs().max().clamp_min(1e-30) for k in want)
    return max((value.item() for value in each), default=0.0)


Part = Callable[[Setup], list[Row]]
