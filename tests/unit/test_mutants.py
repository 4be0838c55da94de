"""The table of mutants: each applies to today's source, changes it, and names tests that exist."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

import mutants

TABLE = mutants.read()


@pytest.mark.parametrize("mutant", TABLE, ids=[each.title for each in TABLE])
def test_a_mutant_applies(mutant: mutants.Mutant) -> None:
    path, text = mutants.mutated(mutant)
    assert text != ast.unparse(ast.parse((mutants.SOURCE / path).read_text())) + "\n"
    assert mutant.tests
    assert mutant.why
    for test in mutant.tests:
        assert (mutants.ROOT / test.split("::")[0]).exists(), test


def test_each_mutant_stands_once_in_the_table() -> None:
    places = [(each.target, each.find, each.replace, each.nth) for each in TABLE]
    assert len(set(places)) == len(places)


@pytest.mark.parametrize(
    ("target", "find", "message"),
    [
        ("pipeloom.nowhere:f", "a", "there is no module"),
        ("pipeloom.errors:nothing", "a", "there is no nothing"),
        ("pipeloom.errors:", "there_is_no_such_name", "0 places"),
    ],
)
def test_a_mutant_that_no_longer_applies_is_refused(target: str, find: str, message: str) -> None:
    with pytest.raises(mutants.DoesNotApply, match=message):
        mutants.mutated(mutants.Mutant(target, find, "b", ("tests",)))


def test_the_runner_tells_a_found_mutant_from_one_that_survives(tmp_path: Path) -> None:
    """One test that fails under the change and one that does not, though this process knows the package as it is."""
    importlib.import_module("pipeloom.errors")
    bites, sleeps = tmp_path / "test_bites.py", tmp_path / "test_sleeps.py"
    bites.write_text("from pipeloom.errors import PipeloomError\ndef test(): assert PipeloomError.exit_code == 1\n")
    sleeps.write_text("import pipeloom.errors\ndef test(): pass\n")
    changes = [
        mutants.Mutant("pipeloom.errors:PipeloomError", "1", "99", (str(test),), nth=1) for test in (bites, sleeps)
    ]
    ended = list(mutants.run_all(changes, 1))
    verdicts = {mutant.tests[0]: verdict for mutant, verdict, _, _ in ended}
    assert verdicts == {str(bites): "found", str(sleeps): "survived"}, [log for *_, log in ended]
