"""Tests in two rounds: what fails beside the others runs once more alone.

`python tests/support/twice.py ARGUMENTS` runs pytest with these arguments. The last line names the tests that failed twice,
and as flaky those that passed alone; the exit code is 1 with any of the former, or with more than two of the latter.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

MOST_FLAKY = 2


def verdict(first: Collection[str], again: Collection[str]) -> tuple[str, int]:
    """Return a line about the tests that failed in each round, and the exit code."""
    flaky = [test for test in first if test not in again]
    parts = [f"failed twice: {', '.join(again)}"] * bool(again)
    if flaky:
        parts.append(f"flaky (failed first, passed alone): {', '.join(flaky)}")
    many = len(flaky) > MOST_FLAKY
    parts += [f"{len(flaky)} flaky tests, and at most {MOST_FLAKY} are let pass"] * many
    return "; ".join(parts), int(bool(again) or many)


def main(arguments: Sequence[str]) -> int:
    with tempfile.TemporaryDirectory() as cache:  # a new one: it holds no failure of another run
        pytest = [sys.executable, "-m", "pytest", "-q", "-o", f"cache_dir={cache}"]

        def failed() -> list[str]:
            path = Path(cache) / "v/cache/lastfailed"
            return list(json.loads(path.read_text())) if path.exists() else []

        code = subprocess.run([*pytest, *arguments]).returncode
        first = failed()
        if code != 1 or not first:  # all passed, or pytest could not run them
            return code
        print("once more, alone:", flush=True)
        files = sorted({test.partition("::")[0] for test in first})
        code = subprocess.run([*pytest, "--last-failed", *files]).returncode
        line, ends = verdict(first, failed())
    print(line, flush=True)
    return ends or (code if code > 1 else 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
