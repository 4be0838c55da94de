"""A layer of a model as a factory with a name: what models return, and what a pipeline builds on the rank that holds it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Layer:
    """A layer that is built only on the rank that holds it.

    Attributes:
        name: global name; parameters are called `name.parameter`.
        build: makes the module.
    """

    name: str
    build: Callable[[], nn.Module]

    def __call__(self) -> nn.Module:
        return self.build()
