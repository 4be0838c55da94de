"""Records collectives of the tensor-parallel layers, their waits, and the matrix products between them, in order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from pipeloom.parallel import collectives

# gloo's reduce-scatter is ours: an exchange and a sum
NAMES = {
    "all_reduce": "all-reduce",
    "all_gather_single": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_single": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "all_to_all_single": "reduce-scatter",
}
PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_")


class _Work:
    def __init__(self, work: Any, name: str, log: list[str]) -> None:
        self.work, self.name, self.log = work, name, log

    def wait(self) -> None:
        self.log.append(f"{self.name} waited for")
        self.work.wait()


class _Recorder:
    """torch.distributed, seen by the layers."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.real = collectives.dist

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.real, name)
        if name not in NAMES:
            return value

        def call(*arguments: Any, **keywords: Any) -> Any:
            self.log.append(f"{NAMES[name]} started")
            return _Work(value(*arguments, **keywords), NAMES[name], self.log)

        return call


class _Products(TorchDispatchMode):
    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function._schema.name in PRODUCTS:
            self.log.append(f"product {tuple(result.shape)}")
        return result


@contextmanager
def recorded() -> Iterator[list[str]]:
    """What happens inside, in the order of this process."""
    log: list[str] = []
    real = collectives.dist
    collectives.dist = _Recorder(log)  # type: ignore[assignment]
    try:
        with _Products(log):
            yield log
    finally:
        collectives.dist = real


def started(log: list[str]) -> list[str]:
    """The collectives only, in order of their starts."""
    return [entry.removesuffix(" started") for entry in log if entry.endswith(" started")]
