"""What the uses share: a folder, short enough that paths in it fit a line, and few of Python's own files as a text."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeloom.train.data import sources
from uses import Use


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Iterator[Use]:
    """A user's folder; at the end, the record of what was done there (`pytest -s`)."""
    monkeypatch.setattr(sources, "stdlib_files", lambda root: sorted(root.glob("*.py"))[:50])  # of some thousand
    with tempfile.TemporaryDirectory() as folder:
        made = Use(Path(folder))
        yield made
    print(f"\npages: {', '.join(made.pages)}; no line over 80 columns; commands:")
    print("".join(f"  {command}\n" for command in made.commands), end="")
