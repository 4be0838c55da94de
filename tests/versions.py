"""A fixed selection of the tests with other versions of torch and transformers, and a table of what passed.

    python tests/versions.py                        every version of VERSIONS
    python tests/versions.py transformers==5.22.2   these

A version is installed alone into `.versions/`, which stands before the installed packages. One that no index of pip offers is a
row that says so: PyPI has only the CUDA build of torch for Linux, the CPU build is in PyTorch's index.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CPU = "+cpu" if sys.platform == "linux" else ""
VERSIONS = (f"torch==2.11.0{CPU}", f"torch==2.13.0{CPU}", "transformers==5.23.0", "transformers==5.24.0")
TESTS = {
    "torch": (
        *("unit/ops", "unit/runtime/test_families.py", "unit/runtime/test_recompute_actions.py", "unit/models"),
        *("dist/runtime/test_cells.py", "dist/torch_behaviour", "dist/train/test_verify.py"),
    ),
    "transformers": ("unit/models/test_auto_layers.py", "dist/models", "e2e/models", "e2e/train/test_hub.py"),
}
INDEX = "https://download.pytorch.org/whl/cpu"


def overlay(requirement: str) -> Path | None:
    """Install one package without its dependencies and return its folder, or None if no index offers it."""
    folder = ROOT / ".versions" / requirement.replace("==", "-")
    if not folder.is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--retries", "0"]
        done = subprocess.run([*pip, "--extra-index-url", INDEX, "--target", folder, requirement], capture_output=True)
        if done.returncode:
            return None
    return folder


def outcome(requirement: str) -> tuple[str, bool]:
    """Return pytest's last line for the package's selection, and whether nothing failed."""
    folder = overlay(requirement)
    if folder is None:
        return "not offered by an index", True
    path = os.pathsep.join((str(folder), str(ROOT / "src")))
    tests = [str(ROOT / "tests" / name) for name in TESTS[requirement.partition("==")[0]]]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, cwd=ROOT, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines()
    return lines[-1].strip("= "), done.returncode == 0


def main(requirements: tuple[str, ...]) -> int:
    print("| version | tests |\n| --- | --- |")
    passed = True
    for requirement in requirements:
        line, right = outcome(requirement)
        print(f"| {requirement} | {line} |", flush=True)
        passed &= right
    return not passed


if __name__ == "__main__":
    sys.exit(main(tuple(sys.argv[1:]) or VERSIONS))
