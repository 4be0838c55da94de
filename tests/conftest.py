"""Shared set-up: tests' own modules on the path, one thread a process."""

import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
for folder in (".", "runtime"):  # the modules that several folders of tests import
    sys.path.insert(0, str(Path(__file__).parent / folder))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """A test that starts a worker in this process gives torch more threads; on busy cores they wait for each other."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
