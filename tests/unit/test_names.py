"""Names in src/pipeloom: one class, and one public type or constant, per name."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache

import pytest

from paths import ROOT

SOURCE = ROOT / "src" / "pipeloom"


@cache
def parsed(text: str) -> ast.Module:
    return ast.parse(text)


@pytest.fixture(scope="module", autouse=True)
def _all_parsed() -> None:
    for path in SOURCE.rglob("*.py"):
        parsed(path.read_text())


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
        for name in set(defined(parsed(text))):
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


QUESTION = re.compile(r"(What|How|Whether|Where|Who|Whose|Which|When|Why)\b")


def questions(text: str) -> list[str]:
    """Return the first lines of the docstrings in a module's `text` that begin with a question word."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docs = (ast.get_docstring(node) or "" for node in ast.walk(parsed(text)) if isinstance(node, kinds))
    return [doc.partition("\n")[0] for doc in docs if QUESTION.match(doc)]


def test_docstrings_begin_with_a_noun_or_a_verb() -> None:
    """A relative clause ("What a rank holds") does not say what kind of thing it describes."""
    assert not [line for path in sorted(SOURCE.rglob("*.py")) for line in questions(path.read_text())]


def test_a_docstring_that_begins_with_a_question_word_is_found() -> None:
    assert questions(
        '"""Whatever."""\nclass A:\n    """What it is.\n\n    More."""\n    def f(self):\n        "Return it."'
    )
    assert not questions('"""Howitzers."""\ndef f():\n    """Return what it is."""')


PLACEHOLDERS = frozenset({"found", "made", "kept", "own", "usual", "chosen", "shown", "taken"})


def placeholders(text: str) -> set[str]:
    """Return the variables and arguments of a module's functions whose names do not say what they hold."""
    functions = (node for node in ast.walk(parsed(text)) if isinstance(node, ast.FunctionDef | ast.Lambda))
    nodes = [node for function in functions for node in ast.walk(function)]
    variables = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return PLACEHOLDERS & (variables | {node.arg for node in nodes if isinstance(node, ast.arg)})


def test_variables_are_named_by_nouns() -> None:
    names = {str(path.relative_to(SOURCE)): placeholders(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}
    assert {module: words for module, words in names.items() if words} == {}


def test_a_placeholder_is_found() -> None:
    text = "found = 1\ndef f(own):\n    kept: int = 2\n    for made, x in own: ...\n"
    text += "    return [lambda usual: y for shown in x if x.taken]\n"
    assert placeholders(text) == {"own", "kept", "made", "usual", "shown"}


def test_no_two_test_files_share_a_name() -> None:
    """pytest imports test files by their names alone, and refuses the second of a name only where it sees both."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
