"""The parameters of a module at one moment: which of them a forward changes."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from pipeloom.ops.checksum import checksums


class ParameterState:
    """The parameters of a module as they are now, before a forward.

    Args:
        by_value: compare values, too: what is written through `.data` does not count as a change otherwise.
    """

    def __init__(self, module: nn.Module, by_value: bool) -> None:
        self._named = dict(module.named_parameters())
        self._versions = self._marks()
        self._values = self._sums() if by_value else None

    def changed(self) -> Iterator[tuple[str, bool]]:
        """(name, whether autograd knows) of each parameter that has been written to, or that has other memory."""
        before = self._versions
        sums = None if self._values is None else self._sums()
        for at, (name, mark) in enumerate(zip(self._named, self._marks(), strict=True)):
            if mark[0] != before[at][0]:
                yield name, True
            elif mark != before[at] or (sums is not None and self._values is not None and sums[at] != self._values[at]):
                yield name, False

    def trains(self, name: str) -> bool:
        """Return whether the parameter called so requires a gradient."""
        return self._named[name].requires_grad

    def _marks(self) -> list[tuple[int, int]]:
        return [(0 if p.is_inference() else p._version, p.data_ptr()) for p in self._named.values()]

    def _sums(self) -> list[int]:
        return checksums(list(self._named.values()))
