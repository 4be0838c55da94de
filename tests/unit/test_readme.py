"""The README's table is true, and no file holds half of a merge."""

from __future__ import annotations

import re

import pytest

import pipeloom as pl
from paths import ROOT
from pipeloom.errors import PipeloomError
from pipeloom.schedule.families import FAMILIES, build


@pytest.mark.parametrize("name", FAMILIES)
def test_the_table_of_micro_batches(name: str) -> None:
    for p in (2, 3, 4):
        for m in (1, 2, 5, 2 * p - 1, 2 * p, 2 * p + 1, 2 * p + 2):
            allowed = {
                "dualpipe": p % 2 == 0 and m % 2 == 0 and m >= 2 * p,
                "dualpipev": m >= 2 * p,
                "chimera": p % 2 == 0,
            }.get(name, True)
            try:
                pl.check(build(name, ranks=p, microbatches=m))
            except PipeloomError:
                assert not allowed, (name, p, m)
            else:
                assert allowed, (name, p, m)


def test_no_file_has_the_marks_of_a_merge() -> None:
    folders = [ROOT / name for name in ("src", "tests", "docs", "benchmarks", "examples", "configs")]
    files = [*ROOT.glob("*.*"), *(path for folder in folders for path in folder.rglob("*.*"))]
    marks = re.compile(rb"^(<{7} |>{7} )", re.MULTILINE)
    marked = [path.name for path in files if path.is_file() and marks.search(path.read_bytes())]
    assert marked == []
