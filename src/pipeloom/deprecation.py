"""Names that were public and became internal: they work for one minor version more, with a warning (docs/policy.md)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from typing import Any


def made_internal(owner: str, names: Collection[str], goes: str) -> Callable[[Any, str], Any]:
    """Return a `__getattr__` that gives each of these names what stands under the same name with an underscore.

    Args:
        owner: the class, for messages.
        goes: when the names go, and what replaces them.
    """

    def get(instance: Any, name: str) -> Any:
        if name not in names:
            raise AttributeError(f"{type(instance).__name__!r} object has no attribute {name!r:.200}")
        warnings.warn(f"{owner}.{name} is internal and goes in {goes}", DeprecationWarning, stacklevel=2)
        return getattr(instance, f"_{name}")

    return get
