"""Modules of src/pipeloom that import each other, directly or in a circle: none, but for the exceptions named here."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from paths import ROOT

SOURCE = ROOT / "src"

EXCEPTIONS = {
    # `Schedule.save` is public and a method of the value, while the text forms read and make that value.
    ("pipeloom.schedule.model", "pipeloom.schedule.files"),
    # A notebook asks the value itself for its drawing, and drawings read the value.
    ("pipeloom.schedule.model", "pipeloom.draw.html"),
    ("pipeloom.schedule.timeline", "pipeloom.draw.html"),
    # `Timeline.save` is public and a method of the value, while the form of files of timelines reads and makes it.
    ("pipeloom.schedule.timeline", "pipeloom.traces.timelines"),
}


def modules() -> dict[str, str]:
    """Return module name -> its text."""
    texts = {}
    for path in sorted(SOURCE.rglob("*.py")):
        name = ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
        texts[name] = path.read_text()
    return texts


def imported(name: str, text: str, known: Mapping[str, str]) -> Iterator[str]:
    """Yield the modules that `name` imports, in functions and for type checking too."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in known else node.module


def imports(texts: Mapping[str, str]) -> set[tuple[str, str]]:
    """Return (module, another that it imports)."""
    return {(name, other) for name, text in texts.items() for other in imported(name, text, texts) if other != name}


def in_cycles(edges: set[tuple[str, str]]) -> set[str]:
    """Return the modules that import each other: what is left when modules without imports, or importers, are removed."""
    while True:
        inner = {one for one, _ in edges} & {other for _, other in edges}
        kept = {(one, other) for one, other in edges if one in inner and other in inner}
        if kept == edges:
            return inner
        edges = kept


def test_no_modules_import_each_other_and_every_exception_is_needed() -> None:
    texts = modules()
    assert len(texts) > 200
    edges = imports(texts)
    assert edges > EXCEPTIONS
    assert not in_cycles(edges - EXCEPTIONS)
    for exception in EXCEPTIONS:
        assert in_cycles(edges - EXCEPTIONS | {exception}), exception


def test_lazy_and_type_checking_imports_count() -> None:
    lazy = "def f():\n    from p.b import g\n"
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p import a\n"
    texts = {"p": "", "p.a": lazy, "p.b": typed, "p.c": "import p.a\n"}
    assert in_cycles(imports(texts)) == {"p.a", "p.b"}
    assert not in_cycles(imports(texts) - {("p.a", "p.b")})
