"""The budget of code lines that each package has, in `pyproject.toml`."""

from __future__ import annotations

import tomllib

from code_lines import code_lines, per_package
from paths import ROOT


def test_no_package_exceeds_its_budget() -> None:
    budget = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pipeloom"]["code-lines"]
    lines = per_package()
    assert set(budget) == set(lines)
    assert {package: total for package, total in lines.items() if total > budget[package]} == {}


def test_blank_lines_comments_and_docstrings_do_not_count() -> None:
    assert code_lines('"""Doc.\n\nMore."""\n\n# why\nx = 1  # what\ndef f():\n    "Doc."\n    return """a\nb"""\n') == 4
