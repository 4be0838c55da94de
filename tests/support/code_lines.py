"""Code lines: lines that are neither blank nor a comment nor part of a docstring.

python tests/support/code_lines.py             of the library, per package
python tests/support/code_lines.py --files     per file too
python tests/support/code_lines.py --tests     of the tests
python tests/support/code_lines.py --check     fail where `code-lines.txt` allows fewer
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "pipeloom"
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


def modules(folder: Path) -> dict[Path, int]:
    """Return each module's code lines, by its path in `folder`."""
    return {path.relative_to(folder): code_lines(path.read_text()) for path in sorted(folder.rglob("*.py"))}


def script_lines() -> int:
    """Return the lines of the page's scripts that are neither blank nor a comment on its own."""
    texts = [path.read_text() for path in (SOURCE / "draw" / "page").glob("*.js")]
    return sum(1 for text in texts for line in text.splitlines() if line.strip() and not line.lstrip().startswith("//"))


def check() -> int:
    """Compare with `code-lines.txt`; return the exit code."""
    counts = {"library": sum(modules(SOURCE).values()), "page": script_lines()}
    lines = [line.split() for line in (ROOT / "code-lines.txt").read_text().splitlines() if not line.startswith("#")]
    allowed = {name: int(number) for number, name in lines}
    for name, count in counts.items():
        print(f"{count:6}  {name}, of {allowed[name]} allowed")
    if all(count <= allowed[name] for name, count in counts.items()):
        return 0
    print("remove as many as you add; code-lines.txt is raised only in a commit that names the feature")
    return 1


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(check())
    counted = modules(ROOT / "tests" if "--tests" in sys.argv else SOURCE)
    if "--files" in sys.argv:
        for path, lines in counted.items():
            print(f"{lines:6}  {path}")
    packages: Counter[str] = Counter()
    for path, lines in counted.items():
        packages[path.parts[0] if len(path.parts) > 1 else "top"] += lines
    for package, lines in sorted(packages.items()):
        print(f"{lines:6}  {package}")
    print(f"{packages.total():6}  in {len(counted)} modules")
