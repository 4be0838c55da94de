"""Subcommands: one table of their names, and a module of each that is imported when it runs."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys

import pytest

from pipeloom.cli import COMMANDS, app

IMPORTED = """
import sys
from pipeloom.cli import app
try:
    app(["check", "absent.csv"], standalone_mode=False)
except Exception as error:
    print(type(error).__name__)
print(sorted(name for name in sys.modules if name.startswith("pipeloom.cli.")))
print([name for name in ("numpy", "torch", "pipeloom.config", "pipeloom.solver", "pipeloom.plan") if name in sys.modules])
"""


@pytest.mark.parametrize("name", COMMANDS)
def test_the_table_has_the_first_sentence_of_a_commands_help(name: str) -> None:
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        app([name, "--help"], standalone_mode=False)
    usage, sentence = text.getvalue().split("\n\n")[:2]
    assert usage.startswith("Usage: ")
    assert f" {name} " in usage
    assert " ".join(sentence.split()) == COMMANDS[name]


def test_a_command_imports_no_other_and_none_of_their_packages() -> None:
    ran = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, timeout=600, check=True)
    modules = [f"pipeloom.cli.{name}" for name in ("check", "failures", "options", "output", "workers")]
    assert ran.stdout.splitlines() == ["UsageError", str(modules), "[]"]
