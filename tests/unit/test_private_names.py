"""Private names of torch and other libraries in src/pipeloom: few, and each with its reason beside it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from paths import ROOT

SOURCE = ROOT / "src" / "pipeloom"
MOST = 58
OF_TORCH = frozenset(
    {"_version", "_buffers", "_parameters", "_modules"}
)  # also where a class of ours has the same name
OF_PYTHON = frozenset({"_asdict", "_current_frames", "_exit", "_fields", "_replace"})  # documented


def defined(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a module's classes, functions and assignments define."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and getattr(node.value, "id", "") == "self"
        ):
            yield node.attr


def used(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of attributes, imports, and strings that are one name."""
    nodes = list(ast.walk(tree))
    parts = {part for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if isinstance(node, ast.Attribute):
            yield node.end_lineno or node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from (
                (node.lineno, name) for name in [*(node.module or "").split("."), *(a.name for a in node.names)]
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in parts:
            yield node.lineno, node.value


def private_names(sources: dict[str, str]) -> list[tuple[str, int, str]]:
    """Return (module, line, name) of the names with one underscore at their start that `sources` do not define."""
    trees = {module: ast.parse(text) for module, text in sources.items()}
    ours = {name for tree in trees.values() for name in defined(tree)} - OF_TORCH | OF_PYTHON
    return [
        (module, line, name)
        for module, tree in trees.items()
        for line, name in used(tree)
        if re.fullmatch(r"_[A-Za-z]\w*", name) and name not in ours
    ]


def test_private_names_are_few_and_have_reasons() -> None:
    sources = {str(path.relative_to(SOURCE)): path.read_text() for path in sorted(SOURCE.rglob("*.py"))}
    names = private_names(sources)
    assert len(names) <= MOST, "\n".join(map(str, names))
    lines = {module: text.splitlines() for module, text in sources.items()}
    without = [
        (module, at, name) for module, at, name in names if "#" not in "".join(lines[module][max(0, at - 8) : at])
    ]
    assert not without, "no comment in the lines before it says why:\n" + "\n".join(map(str, without))


def test_a_private_name_is_found() -> None:
    text = "from torch._a import _b, c\nclass A:\n    def _f(self):\n        self._g = x._h\n"
    text += "        self._modules = getattr(x, '_i')\n        return self._f, y._g, x._asdict(), '__name__', '_two words'\n"
    assert {name for _, _, name in private_names({"m": text})} == {"_a", "_b", "_h", "_modules", "_i"}
