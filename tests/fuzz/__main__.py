"""Random cases until one fails: `python -m tests.fuzz [PART ...] [--seed N] [--cases N | --minutes M | --case TEXT]`.

A part is a module of this folder without a leading underscore; it defines

    main(seed: int, cases: int | None, deadline: float | None) -> int

which runs its cases (a number of them, or until `time.monotonic()` passes `deadline`; neither: a default of its own), prints
every failure shrunk, with a line that reproduces it, and a last line with what ran and how long it took. It returns the number
of failures. Without a PART, every part runs in turn, each with its share of the minutes. A part that describes a case by a text
may define `replay(text: str) -> int`, which runs that case alone: `--case` calls it.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).parent


def parts() -> list[str]:
    """The names of the parts: this folder's public modules."""
    return sorted(path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith(("_", "test_")))


def run(arguments: list[str] | None = None) -> int:
    """Run the chosen parts; 0 where nothing failed, 1 where something did."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Random cases, part by part.")
    parser.add_argument("part", nargs="*", help=f"of {', '.join(parts())}; default: all")
    parser.add_argument("--seed", type=int, default=0, help="of all random choices (default 0)")
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument("--cases", type=int, help="cases for each part")
    amount.add_argument("--minutes", type=float, help="minutes for all parts together")
    amount.add_argument("--case", help="run this one case of one part, as a failure prints it")
    chosen = parser.parse_args(arguments)
    names = chosen.part or parts()
    unknown = [name for name in names if name not in parts()]
    if unknown:
        parser.error(f"no part {unknown[0]!r}; there are {', '.join(parts())}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # the tests' own modules (processes, fuzz, ...) by name, as in conftest.py
    sys.path[:0] = [str(FOLDER.parent), str(FOLDER.parent / "support")]
    if chosen.case is not None:
        if len(names) != 1 or not hasattr(part := importlib.import_module(f"fuzz.{names[0]}"), "replay"):
            parser.error("--case needs one PART that runs a case from its text")
        return part.replay(chosen.case)  # type: ignore[no-any-return]
    failures = 0
    for name in names:
        deadline = None if chosen.minutes is None else time.monotonic() + 60 * chosen.minutes / len(names)
        failures += importlib.import_module(f"fuzz.{name}").main(chosen.seed, chosen.cases, deadline)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(run())
