"""The command line of a benchmark that has parts: all of them, or those that are named."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping


def run_parts(parts: Mapping[str, Callable[[], object]]) -> None:
    """Runs the parts that the command line names, or all; an unknown name ends the process with those that there are."""
    chosen = sys.argv[1:] or list(parts)
    unknown = [name for name in chosen if name not in parts]
    if unknown:
        sys.exit(f"there is no part {unknown[0]!r}; parts: {', '.join(parts)}")
    for part in chosen:
        parts[part]()
        print()
