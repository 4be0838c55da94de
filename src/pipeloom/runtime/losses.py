"""A step's loss on its way from the rank that knows it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


class PendingLoss:
    """The loss of a step that this rank has finished and another may not have."""

    def __init__(self, finish: Callable[[], Tensor]) -> None:
        self._finish = finish
        self._loss: Tensor | None = None

    def wait(self) -> Tensor:
        """The mean loss over all targets of the batch, a 0-dim fp32 tensor, the same on every rank."""
        if self._loss is None:
            self._loss = self._finish()
        return self._loss
