"""The command line of a benchmark that has parts: all of them, or those that are named; `--tuned` tunes both sides' processes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

from pipeloom.train.tuning import tune_process

TUNED = "--tuned"


def run_parts(parts: Mapping[str, Callable[[], object]]) -> None:
    """Run the parts that the command line names, or all; an unknown name ends the process with those that there are."""
    words = sys.argv[1:]
    if TUNED in words:
        tune_process()  # the processes of a part are forked from this one
    chosen = [word for word in words if word != TUNED] or list(parts)
    unknown = [name for name in chosen if name not in parts]
    if unknown:
        sys.exit(f"there is no part {unknown[0]!r}; parts: {', '.join(parts)}")
    for part in chosen:
        parts[part]()
        print()
