"""Exit code of a command, and its one message when it fails."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import typer

from pipeloom.cli.options import message_with_flags
from pipeloom.errors import (
    INTERRUPTED,
    ArgumentError,
    ConfigError,
    PipeloomError,
    did_you_mean,
    folded,
    from_machine,
    printable,
    sentence,
)
from pipeloom.train.workers.failures import FAILURES, claim_message

# newer versions of typer contain their own copy of click, so the base class of its usage errors is looked up here
_ClickError: Any = next(base for base in reversed(typer.BadParameter.__mro__) if base.__name__ == "ClickException")


class Output(io.FileIO):
    """Standard output or error that never fails: data that a closed pipe or a full disk does not accept is dropped.

    Attributes:
        failure: the first error other than a closed pipe; None if there was none.
    """

    failure: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except BlockingIOError:
            raise
        except OSError as error:
            if error.errno != errno.EPIPE:
                self.failure = self.failure or error
            return len(data)


class FoldedText(io.TextIOWrapper):
    """Standard error, which holds messages alone: their long lines are folded."""

    def write(self, text: str) -> int:
        super().write(folded(text))
        return len(text)


def protect_streams() -> None:
    """Replace standard output and error by streams to which writing never fails; streams replaced by a test are left alone.

    Standard error folds long lines, unless our launcher reads them, which does so with the rank in front.

    Open descriptors 0, 1 and 2 where they are closed: otherwise the next file to be opened could become standard output.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is `descriptor`
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is not getattr(sys, f"__{name}__"):
            continue
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.flush()
        raw = Output(descriptor, "w", closefd=False)
        traced = os.environ.get("PIPELOOM_DEBUG") == "1"  # tracebacks keep their lines
        folds = descriptor == 2 and not traced and (FAILURES not in os.environ or os.environ.get("RANK") == "0")
        text = (FoldedText if folds else io.TextIOWrapper)(
            io.BufferedWriter(raw),
            encoding=getattr(stream, "encoding", None) or "utf-8",
            errors="replace",
            line_buffering=descriptor == 2 or os.isatty(descriptor),
        )
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)


def _output_failure() -> OSError | None:
    """Return the error with which writing to standard output failed; None if it has not failed."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return raw.failure if isinstance(raw, Output) else None


def exit_code_of(run: Callable[[], Any], as_json: bool, given: Sequence[str] = ()) -> int:
    """Run `run` and return its exit code; an error goes to standard error, or as JSON to standard output.

    The exit code is 0 or the result of `run`; a PipeloomError's own code; 2 for wrong usage or if standard output cannot be
    written (0 for `train`, whose run folder is complete); 4 if memory is exhausted; 130 after Ctrl-C; and 1 for any other error,
    with the traceback if PIPELOOM_DEBUG=1. A closed pipe is not a failure.

    Args:
        given: the words of the command line.
    """
    code = _exit_code_of(run, as_json)
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    failure = _output_failure()
    if failure is None or code:
        return code
    if FAILURES in os.environ:  # a worker of our own launcher, which reports the failure
        return code
    trains = given[:1] == ["train"] and not {"-h", "--help"} & set(given)
    print(
        f"pipeloom: cannot write to standard output: {failure.strerror}"
        + ("; the run's folder has everything" if trains else ""),
        file=sys.stderr,
    )
    return 0 if trains else 2


def _exit_code_of(run: Callable[[], Any], as_json: bool) -> int:
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        code = run()
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except BrokenPipeError:
        return 0
    except (KeyboardInterrupt, typer.Abort):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one does not change how the command ends
        return INTERRUPTED
    except PipeloomError as error:
        return _report(error, message_with_flags(error), error.exit_code, as_json)
    except _ClickError as error:
        return _usage(error, as_json)
    except Exception as error:
        known = from_machine(error)
        if known is not None:
            return _report(error, known[1], known[0], as_json)
        if os.environ.get("PIPELOOM_DEBUG") == "1":
            traceback.print_exc()
        return _report(error, f"internal error (please report): {type(error).__name__}: {error}", 1, as_json, hint=True)


def _usage(error: Any, as_json: bool) -> int:
    """Report a usage error of typer, and return its exit code. For a command without arguments, print its help instead."""
    text = error.format_message().rstrip()
    if type(error).__name__ == "NoArgsIsHelpError":
        print(text)
        return int(error.exit_code)
    if problems := getattr(error.__cause__ or error.__context__, "errors", None):  # pydantic's, without the value
        (problem, *_) = problems()
        text = text.replace(problem["msg"], _refused(problem))
    context = getattr(error, "ctx", None)
    if context is not None and (option := getattr(error, "option_name", "")):
        from pipeloom.config.settings import named_otherwise

        known = [name.removeprefix("--") for each in context.command.params for name in each.opts]
        other = named_otherwise(option.lstrip("-"), known)
        names = [f"--{name}" for name in ([other] if other else known)]
        text = f"there is no option {option}{did_you_mean(names[0] if other else option, names, listed=False)}"
    where = f" ({context.command_path} --help shows the options)" if context is not None else ""
    return _report(error, f"{text}{where}", int(error.exit_code), as_json)


def _refused(problem: Mapping[str, Any]) -> str:
    """Return a sentence that names the value that pydantic refused, and the nearest valid one."""
    value, limits = f"{problem['input']!r:.100}", problem.get("ctx", {})
    if "error" in limits:
        return str(limits["error"]).rstrip(".")
    for name, side in (("ge", "at least"), ("le", "at most")):
        if name in limits:
            return f"{value} is not {side} {limits[name]}; nearest: {limits[name]}"
    words = {"int_parsing": "a whole number", "float_parsing": "a number"}.get(problem["type"])
    return f"{value} is not {words}" if words else str(problem["msg"])


def _report(error: Exception, message: str, code: int, as_json: bool, hint: bool = False) -> int:
    message = sentence(message)
    if as_json:
        report: dict[str, Any] = {"type": type(error).__name__, "message": message, "exit_code": code}
        if isinstance(error, ConfigError):
            problems = [message] if isinstance(error, ArgumentError) else error.problems
            report["problems"] = [sentence(problem) for problem in problems]
        print(json.dumps({"error": report}), flush=True)
        return code
    if not claim_message(message):
        return code
    print(f"pipeloom: {printable(message)}", file=sys.stderr)
    if hint and os.environ.get("PIPELOOM_DEBUG") != "1":
        print("pipeloom: PIPELOOM_DEBUG=1 shows the traceback", file=sys.stderr)
    return code
