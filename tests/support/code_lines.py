"""Code lines of each package: lines that are neither blank nor a comment nor part of a docstring.

python tests/support/code_lines.py             per package
python tests/support/code_lines.py --files     per file too
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src" / "pipeloom"
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(text: str) -> int:
    """Return the number of code lines in a module's text."""
    without: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            without.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines = enumerate(text.splitlines(), 1)
    return sum(
        1 for number, line in lines if number not in without and line.strip() and not line.lstrip().startswith("#")
    )


def package_of(path: Path) -> str:
    """Return the package of `src/pipeloom` that holds a module, or `top`."""
    parts = path.relative_to(SOURCE).parts
    return parts[0] if len(parts) > 1 else "top"


def modules() -> dict[Path, int]:
    """Return each module's code lines."""
    return {path: code_lines(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}


def per_package() -> Counter[str]:
    """Return each package's code lines."""
    totals: Counter[str] = Counter()
    for path, lines in modules().items():
        totals[package_of(path)] += lines
    return totals


if __name__ == "__main__":
    if "--files" in sys.argv:
        for path, lines in modules().items():
            print(f"{lines:6}  {path.relative_to(SOURCE)}")
    for package, total in sorted(per_package().items()):
        print(f"{total:6}  {package}")
    print(f"{sum(per_package().values()):6}  in {len(modules())} modules")
