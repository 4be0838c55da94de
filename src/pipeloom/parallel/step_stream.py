"""The CUDA stream of a step, for work that autograd's hooks start."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


class StepStream:
    """The stream that was current on `device` when the step began; on a CPU nothing.

    Autograd calls a parameter's hook on the stream that was current when the parameter's node was created. That stream may differ
    from the step's, and it is not ordered after a gradient that a layer has added to its buffer without autograd.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None

    def begin(self) -> None:
        """Record the current stream as the step's."""
        if self._device.type == "cuda":
            self._stream = torch.cuda.current_stream(self._device)

    @contextlib.contextmanager
    def in_order(self) -> Iterator[None]:
        """Run the work inside on the step's stream: after all work on the current stream so far, and before its later work."""
        here = None if self._stream is None else torch.cuda.current_stream(self._device)
        if here is None or here == self._stream:
            yield
            return
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            yield
        here.wait_stream(self._stream)
