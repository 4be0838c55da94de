"""`register_kind`: a kind of a user's own, from `check` to spawned workers."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from paths import SUPPORT

pytestmark = pytest.mark.core


def test_a_registered_kind_works_everywhere() -> None:
    path = [*map(str, (SUPPORT, SUPPORT.parent)), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "register_kind_cases.py")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert "a registered kind works everywhere" in done.stdout


def test_a_user_adds_a_kind_in_fewer_than_40_lines() -> None:
    assert len((SUPPORT / "note_kind.py").read_text().splitlines()) < 40
