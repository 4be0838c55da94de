"""`module:function`: code of the user's, imported from one folder that is named, after everything that is installed.

Such a module is a program that runs with the user's rights, so a configuration that names one is to be trusted as one.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def importable_from(folder: str | Path | None) -> Iterator[None]:
    """Let imports inside find modules of `folder` (None: the working directory) that are found nowhere else.

    The folder stands at the end of the path, so that no file in it takes the place of a module of Python or of a package.
    """
    entry = os.path.abspath(folder if folder is not None else os.getcwd())
    if entry in sys.path:
        yield
        return
    sys.path.append(entry)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(entry)


def is_function(name: str) -> bool:
    """Return whether `name` is `module:function`, and not a family or a file."""
    return ":" in name and not name.lower().endswith((".csv", ".json")) and "/" not in name


def source_file(name: str) -> str | None:
    """The file that `module:function` was imported from; None where it has not been, or has no file."""
    return getattr(sys.modules.get(name.partition(":")[0]), "__file__", None)
