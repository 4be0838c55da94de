"""`pipeloom compare --paper`."""

from __future__ import annotations

import json

import pytest

from pipeloom.cli import papers
from pipeloom.errors import UsageError


def test_the_zero_bubble_table_has_no_figure_worse_than_published() -> None:
    rows = papers.recompute("zero-bubble")
    assert len(rows) == 6
    for row in rows:
        for column, published in row["published"].items():
            assert round(row["here"][column], 4) <= published, (row["model"], row["microbatches"], column)
    text = papers.table(rows)
    assert max(map(len, text.splitlines())) <= 80
    assert ", 0 worse" in text
    json.dumps(rows)


def test_an_unknown_paper_is_refused() -> None:
    with pytest.raises(UsageError, match="zero-bubble"):
        papers.recompute("zero-bubbel")
