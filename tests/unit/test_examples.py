"""The examples in docstrings of public functions print what they say."""

from __future__ import annotations

import doctest
import sys
from typing import Any

import pytest

import pipeloom as pl
from pipeloom import plan
from pipeloom.runtime import Pipeline


@pytest.mark.parametrize(
    "function",
    [pl.schedules.build, pl.simulate, pl.search, plan.search, Pipeline, pl.verify, pl.compare, pl.best_layouts],
    ids=lambda each: each.__name__,
)
def test_the_example_of_a_docstring_prints_what_it_says(function: Any) -> None:
    (test,) = doctest.DocTestFinder(recurse=False).find(function, globs=vars(sys.modules[function.__module__]).copy())
    assert test.examples
    assert doctest.DocTestRunner(verbose=False).run(test).failed == 0
