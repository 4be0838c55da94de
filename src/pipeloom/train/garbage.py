"""Garbage collection, and release of free heap memory, at fixed steps, so that all ranks pause in the same step."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import TracebackType

EVERY_STEPS = 100


class StepGarbage:
    """Full collections after the same steps on every rank, of the objects created after the first step.

    A context manager around a training loop. A worker holds about half a million long-lived objects when training starts. To
    traverse them takes a tenth of a second, at a moment of Python's choice, while the other ranks wait; `gc.freeze` excludes
    them. The automatic collections stay enabled.

    Args:
        trim: called after each collection but the first.
    """

    def __init__(self, trim: Callable[[], None] | None = None) -> None:
        self._frozen = False
        self._trim = trim

    def __enter__(self) -> StepGarbage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._frozen:
            gc.unfreeze()

    def after_step(self, step: int) -> None:
        """Collect if it is due after `step` steps."""
        if not self._frozen:
            gc.collect()
            gc.freeze()
            self._frozen = True
        elif step % EVERY_STEPS == 0:
            gc.collect()
            if self._trim is not None:
                self._trim()
