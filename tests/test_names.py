"""Names in src/pipeloom: one class, and one public type or constant, per name."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "pipeloom"


def _is_type_or_constant(name: str) -> bool:
    """Tell a public name that begins with a capital letter."""
    return name[:1].isupper()


def defined(tree: ast.Module) -> Iterator[str]:
    """Yield the classes, and the public type aliases and constants, that a module defines at its top level."""
    for statement in tree.body:
        if isinstance(statement, ast.ClassDef):
            yield statement.name
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            names = (node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name))
            yield from filter(_is_type_or_constant, names)


def duplicates(sources: dict[str, str]) -> dict[str, list[str]]:
    """Return name -> the modules that define it, for the names that several do (`sources`: module -> its text)."""
    modules = defaultdict(list)
    for module, text in sources.items():
        for name in set(defined(ast.parse(text))):
            modules[name].append(module)
    return {name: found for name, found in modules.items() if len(found) > 1}


def test_no_class_type_or_constant_is_defined_in_two_modules() -> None:
    sources = {str(path.relative_to(SOURCE)): path.read_text() for path in sorted(SOURCE.rglob("*.py"))}
    assert len(sources) > 200
    assert not duplicates(sources)


def test_a_name_defined_twice_is_found() -> None:
    first = "class Batch: ...\nLIMIT: int = 1\nA, B = 1, 2\n_C = 1\nBatch.size = 3\n"
    second = "Batch = tuple[int, ...]\nLIMIT = 2\nB = 1\n_C = 1\nname = 1\n"
    third = "class Other:\n    LIMIT = 3\nname = 2\n__all__ = []\n"
    assert duplicates({"a": first, "b": second, "c": third}) == {
        "Batch": ["a", "b"],
        "LIMIT": ["a", "b"],
        "B": ["a", "b"],
    }
