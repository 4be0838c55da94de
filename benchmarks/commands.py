"""Runs the commands that a benchmark measures, and brings their answers back."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any


def answer(*words: str) -> dict[str, Any]:
    """Return the JSON of `pipeloom WORDS --json`; where it fails, end with what it printed."""
    done = subprocess.run([sys.executable, "-m", "pipeloom", *words, "--json"], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    values: dict[str, Any] = json.loads(done.stdout)
    return values
