"""Skip all of it where the systems are not installed."""

from __future__ import annotations

import pytest

from other_systems import FOLDER


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not (FOLDER / "torchtitan").is_dir():
        for item in items:
            if item.path.is_relative_to(FOLDER.parent / "tests/interop"):
                item.add_marker(pytest.mark.skip(reason="the other systems are not installed: run `make interop`"))
