"""Names in src/pipeloom: one class, type or constant per name."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "pipeloom"


def _is_type_or_constant(name: str) -> bool:
    """Begins with a capital letter, after the underscore of a private name."""
    return not name.startswith("__") and name.lstrip("_")[:1].isupper()


def defined(tree: ast.Module) -> Iterator[str]:
    """Yield the classes, type aliases and constants that a module defines at its top level."""
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
    first = "class Batch: ...\nLIMIT: int = 1\n_A, _B = 1, 2\nBatch.size = 3\n"
    second = "Batch = tuple[int, ...]\nLIMIT = 2\n_B = 1\nname = 1\n"
    third = "class Other:\n    LIMIT = 3\nname = 2\n__all__ = []\n"
    assert duplicates({"a": first, "b": second, "c": third}) == {
        "Batch": ["a", "b"],
        "LIMIT": ["a", "b"],
        "_B": ["a", "b"],
    }
