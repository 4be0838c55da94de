"""The parameters of a module at one moment: which of them a forward changes."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from pipeloom.ops.attribute_state import Attribute
from pipeloom.ops.checksum import checksums
from pipeloom.ops.layouts import memory_of


class ParameterState:
    """The parameters of a module as they are now, before a forward.

    Args:
        by_value: compare values, too: otherwise writes through `.data` are not detected.
    """

    def __init__(self, module: nn.Module, by_value: bool) -> None:
        self._module = module
        self._named = dict(module.named_parameters())
        self._versions = self._marks()
        self._values = self._sums() if by_value else None

    def changed(self) -> Iterator[Attribute]:
        """Yield the parameters that have been written to or moved to other memory."""
        yield from (parameter for parameter, _ in self._changes())

    def changed_unseen(self) -> Iterator[Attribute]:
        """Yield those of them that require gradients and whose change autograd did not record."""
        for parameter, seen in self._changes():
            if not seen and self._named[parameter.path].requires_grad:
                yield parameter

    def _changes(self) -> Iterator[tuple[Attribute, bool]]:
        """Yield each parameter that has changed, and whether autograd recorded the change."""
        sums = None if self._values is None else self._sums()
        for at, (name, mark) in enumerate(zip(self._named, self._marks(), strict=True)):
            parameter = Attribute(self._module, name, name)
            if mark[0] != self._versions[at][0]:
                yield parameter, True
            elif mark != self._versions[at] or (
                sums is not None and self._values is not None and sums[at] != self._values[at]
            ):
                yield parameter, False

    def _marks(self) -> list[tuple[int, int | None]]:
        return [(0 if p.is_inference() else p._version, _address(p)) for p in self._named.values()]

    def _sums(self) -> list[int | None]:
        sums = iter(checksums([p for p in self._named.values() if memory_of(p) is not None]))
        return [None if memory_of(p) is None else next(sums) for p in self._named.values()]


def _address(parameter: nn.Parameter) -> int | None:
    return None if memory_of(parameter) is None else parameter.data_ptr()
