"""`module:function` and `file.py:function`: the user's code. A module is searched in everything that is installed, and then in
one given folder; a file's path is relative to this folder.

Such a module runs with the user's rights, so a configuration that names one must be trusted like a program.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from pipeloom.errors import PipeloomError, ScheduleError, UsageError, did_you_mean

Result = TypeVar("Result")


@contextlib.contextmanager
def importable_from(folder: str | Path | None) -> Iterator[None]:
    """Let imports inside find modules of `folder` (None: the working directory) that are found nowhere else.

    The folder is put at the end of the path, so no file in it can shadow a module of Python or of a package.
    """
    entry = os.path.abspath(folder if folder is not None else os.getcwd())
    if entry in sys.path:
        yield
        return
    sys.path.append(entry)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(entry)


def is_function(name: str) -> bool:
    """Return whether `name` is `module:function` or `file.py:function`, and not a family or a file."""
    module = _module_name(name)
    return (
        ":" in name and not name.lower().endswith((".csv", ".json")) and (module.endswith(".py") or "/" not in module)
    )


def source_file(name: str) -> str | None:
    """The file that `module:function` was imported from; None where it has not been, or has no file."""
    return getattr(sys.modules.get(_module_name(name)), "__file__", None)


def _module_name(name: str) -> str:
    """Return the module of `module:function`, or the file of `file.py:function`, which is its module's name too."""
    return name.rpartition(":")[0]


def user_object(name: str, folder: Path, what: str) -> Any:
    """Return the function or class that `module:function` names, imported inside `importable_from(folder)`.

    Args:
        what: what it is used as, for the messages ("schedule").

    Raises:
        UsageError: there is no such module, file or name, the name cannot be called, or importing raised, with the
            file and line of the user's code.
    """
    module_name, _, attribute = name.rpartition(":")
    is_file = module_name.endswith(".py")
    if not (attribute.isidentifier() and (is_file or all(part.isidentifier() for part in module_name.split(".")))):
        raise UsageError(f"{what} {name!r:.200} is not of the form module:function or file.py:function")
    if is_file and not (folder / module_name).is_file():
        raise UsageError(f"{what} {name!r:.200}: there is no file {(folder / module_name).absolute()}")
    try:
        module = run_user_code(
            name, what, lambda: _run(module_name, folder) if is_file else importlib.import_module(module_name)
        )
    except UsageError as error:
        if isinstance(error.__cause__, ModuleNotFoundError) and error.__cause__.name == module_name:
            raise UsageError(f"{error} among what is installed, nor in {folder.absolute()}") from None
        raise
    try:
        value = getattr(module, attribute)
    except AttributeError as error:
        names = [each for each, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        raise UsageError(f"{what} {name!r:.200}: {error}{did_you_mean(attribute, names)}") from None
    if not callable(value):
        raise UsageError(f"{what} {name!r:.200} is not a {'class' if what == 'class' else 'function'}")
    return value


def _run(file: str, folder: Path) -> ModuleType:
    """Return the module in a file, which is run once; it may import modules of its own folder."""
    path = (folder / file).absolute()
    if source_file(f"{file}:") != str(path):
        spec = importlib.util.spec_from_file_location(file, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[file] = importlib.util.module_from_spec(spec)
        try:
            with importable_from(path.parent):
                spec.loader.exec_module(sys.modules[file])
        except BaseException:
            del sys.modules[file]
            raise
    return sys.modules[file]


def run_user_code(name: str, what: str, run: Callable[[], Result]) -> Result:
    """The result of `run`, which executes code of the user's module that `name` is from.

    Raises UsageError (ScheduleError where the user's code raised one) that names the file and line for any exception.
    """
    try:
        return run()
    except Exception as error:
        where, raised = _origin(error, name), f"{type(error).__name__}: {error}".rstrip(": ")
        if isinstance(error, SyntaxError):
            raised = f"{type(error).__name__}: {error.msg}"
        if where is None:  # not a line of the user's: no such module, or a call that the function does not take
            raise UsageError(f"{what} {name!r:.200}: {error}") from error
        kind = ScheduleError if isinstance(error, ScheduleError) else UsageError
        text = str(error) if isinstance(error, PipeloomError) else f"{what} {name!r:.200} raised {raised}"
        raise kind(f"{where}: {text}") from error


def _origin(error: Exception, name: str) -> str | None:
    """`file:line` of the user's code that raised the error: its innermost line in the module of `name`.

    Where no line of that module ran, the innermost line of any file outside Pipeloom and the import system; else None.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_short_path(error.filename)}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    here = str(Path(__file__).parents[1])
    outside = [f for f in frames if not f.filename.startswith((here, "<frozen ")) and f.filename != importlib.__file__]
    file = source_file(name)
    of_file = [frame for frame in outside if frame.filename == file] or outside
    return f"{_short_path(of_file[-1].filename)}:{of_file[-1].lineno}" if of_file else None


def _short_path(file: str) -> str:
    """`file` relative to the working directory where it lies below it."""
    path, here = Path(file), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else file
