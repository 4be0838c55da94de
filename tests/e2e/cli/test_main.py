"""The command as a whole: without torch, with its documented exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from pipeloom import __version__
from pipeloom.cli.failures import exit_code_of
from pipeloom.errors import CapacityError, ConfigError

pytestmark = pytest.mark.core

Run = Callable[[str], Any]


def test_help_names_the_commands(pipeloom: Run) -> None:
    ended = pipeloom("--help")
    assert ended.code == 0
    assert all(word in ended.out for word in ("schedule", "compare", "check", "train", "verify"))


def test_torch_free_commands_do_not_import_torch() -> None:
    code = (
        "import sys\nfrom pipeloom.cli import main\n"
        "try:\n    main(['compare', '1f1b', '--ranks', '2', '--microbatches', '2'])\n"
        "except SystemExit as end:\n    assert end.code == 0\n"
        "import pipeloom\npipeloom.draw.svg\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600, stdout=subprocess.DEVNULL)


def test_version_and_no_arguments(pipeloom: Run) -> None:
    assert pipeloom("--version") == (0, f"pipeloom {__version__}\n", "")
    ended = pipeloom("")
    assert ended.code == 2
    assert "Usage: pipeloom" in ended.out


def test_exit_codes_of_errors(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(error: BaseException) -> Callable[[], None]:
        def run() -> None:
            raise error

        return run

    monkeypatch.delenv("PIPELOOM_DEBUG", raising=False)
    assert exit_code_of(fails(CapacityError("no room")), as_json=False) == 4
    assert capsys.readouterr().err == "pipeloom: no room\n"
    assert exit_code_of(fails(ConfigError(["first", "second"])), as_json=True) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["problems"] == ["first", "second"]
    assert exit_code_of(fails(KeyboardInterrupt()), as_json=False) == 130
    assert exit_code_of(fails(ZeroDivisionError("by zero")), as_json=False) == 1
    err = capsys.readouterr().err
    assert "ZeroDivisionError: by zero" in err
    assert "Traceback" not in err
    monkeypatch.setenv("PIPELOOM_DEBUG", "1")
    assert exit_code_of(fails(ZeroDivisionError("by zero")), as_json=False) == 1
    assert "Traceback" in capsys.readouterr().err
    assert exit_code_of(lambda: 7, as_json=False) == 7
    assert exit_code_of(lambda: None, as_json=False) == 0
