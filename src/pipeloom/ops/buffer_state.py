"""The buffers of a module at one moment, to find which of them a forward changes and to rerun it from the same values."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from pipeloom.errors import UsageError
from pipeloom.ops.attribute_state import Attribute, same_values
from pipeloom.ops.layouts import is_strided


class BufferState:
    """The buffers of a module and of those inside it as they are now, before a forward."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parts = [_Part(part) for part in module.modules() if part._buffers]

    def changed(self) -> Iterator[Attribute]:
        """Yield the buffers that have been changed in place or replaced."""
        for part in self._parts:
            for name, buffer in part.before.items():
                now = part.module._buffers.get(name)
                if buffer is None or now is None or not buffer.numel():  # a table without values yet is made only now
                    continue
                copy, version = part.copies[name]
                if now is not buffer or buffer._version != version or not same_values(buffer, copy):
                    yield Attribute(part.module, name, name)

    def keep_what_changed(self) -> None:
        """Drop the copies of unchanged buffers. A buffer that was replaced still holds its values itself."""
        for part in self._parts:
            part.keep_what_changed()

    @property
    def share_memory(self) -> bool:
        """Return whether two of the buffers whose copies are kept are views of one memory, which their copies are not."""
        copied = {id(b): b for part in self._parts for name, b in part.before.items() if name in part.copies}
        memory = [
            b.untyped_storage().data_ptr() for b in copied.values() if b is not None and is_strided(b) and b.numel()
        ]
        return len(set(memory)) < len(memory)

    def swap_in(self) -> None:
        """Replace the buffers by copies of their recorded values, until `swap_out`.

        Copies, because the graphs of other forwards may hold the buffers themselves. Raises UsageError for a buffer that the
        forward after the recording left unchanged, and that was changed later.
        """
        copies: dict[int, Tensor] = {}  # of one tensor in two places: one
        states = [part.state(self._module, copies) for part in self._parts]
        for part, state in zip(self._parts, states, strict=True):
            part.outside.append(part.module._buffers)
            part.module._buffers = state

    def swap_out(self) -> None:
        """Put the buffers themselves back."""
        for part in self._parts:
            part.module._buffers = part.outside.pop()


def batch_statistics(module: nn.Module) -> str | None:
    """Return the class name of the first part of `module` that updates running statistics in its forward, or None."""
    for part in module.modules():
        if isinstance(part, _NormBase) and part.training and part.running_mean is not None:
            return type(part).__name__
    return None


class _Part:
    """The buffers of one module.

    Attributes:
        before: name -> buffer.
        copies: name -> a copy of its values, and its version.
        versions: name -> the version of a buffer whose copy was dropped.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.before = dict(module._buffers)
        self.copies = {name: (b.detach().clone(), b._version) for name, b in self.before.items() if b is not None}
        self.versions: dict[str, int] = {}
        self.outside: list[dict[str, Tensor | None]] = []

    def keep_what_changed(self) -> None:
        for name, (copy, version) in list(self.copies.items()):
            buffer = self.before[name]
            assert buffer is not None
            if buffer._version == version and not _may_have_changed(buffer, copy):
                self.versions[name] = version
                del self.copies[name]

    def state(self, module: nn.Module, copies: dict[int, Tensor]) -> dict[str, Tensor | None]:
        state = dict(self.before)
        for name, buffer in self.before.items():
            if buffer is None:
                continue
            if name not in self.copies:
                if buffer._version != self.versions[name]:
                    raise UsageError(
                        f"{type(module).__name__} is recomputed, and its buffer {name!r} was changed between its forward and its "
                        "backward, though not by that forward; leave the layer out of `recompute`"
                    )
                continue
            if id(buffer) not in copies:
                copies[id(buffer)] = self.copies[name][0].clone()
            state[name] = copies[id(buffer)]
        return state


def _may_have_changed(buffer: Tensor, copy: Tensor) -> bool:
    """Return whether a kernel may have changed the buffer but not its version, as batch norm does with its statistics.

    Vectors are not compared: their copies are small, and on a GPU a comparison would wait for the device.
    """
    return buffer.is_floating_point() and (buffer.ndim < 2 or not same_values(buffer, copy))
