"""How a command ends: its exit code, and one clear message when it fails."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import typer

from pipeloom.errors import ConfigError, PipeloomError

# typer brings its own copy of click in newer versions, so that its base class of usage errors is found through this one
_ClickError: Any = next(base for base in reversed(typer.BadParameter.__mro__) if base.__name__ == "ClickException")

INTERRUPTED, BROKEN_PIPE = 130, 141


def exit_code_of(run: Callable[[], Any], as_json: bool) -> int:
    """Runs `run` and returns its exit code; an error goes to standard error, or as JSON to standard output.

    0 or what `run` returns; a PipeloomError's own code; 2 for wrong usage; 130 after Ctrl-C; 1 for anything else, with
    the traceback when PIPELOOM_DEBUG=1.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        code = run()
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except PipeloomError as error:
        return _report(error, str(error), error.exit_code, as_json)
    except _ClickError as error:
        return _usage(error, as_json)
    except Exception as error:
        if os.environ.get("PIPELOOM_DEBUG") == "1":
            traceback.print_exc()
        text = f"{type(error).__name__}: {error}"
        return _report(error, f"a bug of Pipeloom, or a case it does not know: {text}", 1, as_json, hint=True)


def _usage(error: Any, as_json: bool) -> int:
    """typer's own complaints; an empty one is the help that it has printed already."""
    text = error.format_message().rstrip()
    if type(error).__name__ == "NoArgsIsHelpError":
        print(text)
        return int(error.exit_code)
    context = getattr(error, "ctx", None)
    where = f" ({context.command_path} --help shows the options)" if context is not None else ""
    return _report(error, f"{text}{where}", int(error.exit_code), as_json)


def _report(error: Exception, message: str, code: int, as_json: bool, hint: bool = False) -> int:
    if as_json:
        found: dict[str, Any] = {"type": type(error).__name__, "message": message, "exit_code": code}
        if isinstance(error, ConfigError):
            found["problems"] = error.problems
        print(json.dumps({"error": found}), flush=True)
        return code
    print(f"pipeloom: {message}", file=sys.stderr)
    if hint and os.environ.get("PIPELOOM_DEBUG") != "1":
        print("pipeloom: PIPELOOM_DEBUG=1 shows the traceback", file=sys.stderr)
    return code
