"""The plain attributes of a module at one moment, for the same forward once more from the same values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype)


class AttributeState:
    """Numbers, strings and random generators among the attributes of a module and of those inside it, before a forward.

    What else an attribute may hold (lists, dicts, objects) is not looked at.
    """

    def __init__(self, module: nn.Module) -> None:
        self._plain: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._generators: list[tuple[torch.Generator, Tensor]] = []
        self._outside: list[tuple[list[dict[str, Any]], list[Tensor]]] = []
        for part in module.modules():
            attributes = part.__dict__
            self._plain.append((attributes, {k: v for k, v in attributes.items() if type(v) in _PLAIN}))
            self._generators += [(v, v.get_state()) for v in attributes.values() if isinstance(v, torch.Generator)]

    def keep_what_changed(self) -> None:
        """Drops what the forward has left alone. Call it once, behind the forward."""
        changed = [
            (attributes, {name: value for name, value in before.items() if attributes.get(name) is not value})
            for attributes, before in self._plain
        ]
        self._plain = [(attributes, before) for attributes, before in changed if before]
        self._generators = [(g, state) for g, state in self._generators if not torch.equal(g.get_state(), state)]

    def swap_in(self) -> None:
        """Puts the values of that moment in place, until `swap_out`."""
        self._outside.append(
            (
                [{name: attributes.get(name) for name in before} for attributes, before in self._plain],
                [generator.get_state() for generator, _ in self._generators],
            )
        )
        for attributes, before in self._plain:
            attributes.update(before)
        for generator, state in self._generators:
            generator.set_state(state)

    def swap_out(self) -> None:
        """Puts the values back that stood there."""
        plain, states = self._outside.pop()
        for (attributes, _), values in zip(self._plain, plain, strict=True):
            attributes.update(values)
        for (generator, _), state in zip(self._generators, states, strict=True):
            generator.set_state(state)
