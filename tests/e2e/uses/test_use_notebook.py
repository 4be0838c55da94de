"""The cells of the page on notebooks: run one after the other, and shown as a notebook shows the value of a last line."""

from __future__ import annotations

import ast
from html import unescape
from typing import Any

import pytest

from documents import blocks
from paths import ROOT
from uses import Use


def run_cell(code: str, names: dict[str, Any]) -> str:
    """Run a cell in the names of those before it, and return what is shown below it: HTML, or text."""
    body = ast.parse(code).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), "<cell>", "exec"), names)
    if last is None:
        return ""
    assert isinstance(last, ast.Expr)
    value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
    shown = value._repr_html_() if hasattr(value, "_repr_html_") else None
    return repr(value) if shown is None else str(shown)


def test_the_cells_of_a_notebook_show_tables_and_pages(use: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs/page.md").read_text("utf-8")
    cells = [block.text for block in blocks(ROOT / "docs/page.md") if block.language == "python"]
    assert text.index("## In a notebook") < text.index(cells[0])
    names: dict[str, Any] = {}
    monkeypatch.chdir(use.folder)
    shown = [run_cell(use.code("page.md", cell), names) for cell in cells]
    assert [part for part in shown if not part] == []
    for name in ("1f1b", "interleaved", "zb-h1", "zbv"):
        assert name in shown[0]
    assert shown[1].startswith('<iframe sandbox="allow-scripts')
    assert "pipeloom.page/1" in unescape(shown[1])
    assert shown[2].count("<img ") == 4
    assert "1f1b, no costs given" in (use.folder / "1f1b.html").read_text("utf-8")
    assert shown[3].startswith("<table>")
    assert "dp=4,pp=2" in shown[3]
    assert use.pages == ["page.md"]
