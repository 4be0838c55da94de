"""Shared set-up: tests' own modules on the path, one thread a process."""

import os
import sys
from pathlib import Path

import pytest

_SECONDS = {"slow": 12.0, "dist": 6.0}  # of a test with this mark, about; of any other a tenth of a second

os.environ.setdefault("OMP_NUM_THREADS", "1")
for folder in (".", "runtime"):  # the modules that several folders of tests import
    sys.path.insert(0, str(Path(__file__).parent / folder))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files that take longest first: with one of them last, one worker of `pytest -n 2` would wait for the other."""
    seconds: dict[Path, float] = {}
    for item in items:
        marks = [_SECONDS[mark.name] for mark in item.iter_markers() if mark.name in _SECONDS]
        seconds[item.path] = seconds.get(item.path, 0.0) + max(marks, default=0.1)
    items.sort(key=lambda item: (-seconds[item.path], str(item.path)))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """A test that starts a worker in this process gives torch more threads; on busy cores they wait for each other."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
