"""Chosen mutations: every change of `mutants.toml`, one at a time, must turn a named test red.

    python tests/mutants.py                    all of them, after one run of their tests without a change
    python tests/mutants.py --sample 8         a random part (CI); the seed is printed
    python tests/mutants.py --only check       those whose target or name contains the text

A mutation names a function or class by its qualified name and a piece of its syntax tree, so it survives reformatting and
moves with a rename; one that no longer applies fails the run.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import contextlib
import importlib.util
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"
TABLE = ROOT / "tests" / "mutants.toml"
LIMIT = 240.0  # seconds per mutant; a mutant that hangs its tests counts as found


@dataclass(frozen=True)
class Mutant:
    """One change of the source.

    Attributes:
        target: `package.module:Class.function`; an empty part after the colon is the module's own level.
        find: an expression or statements of the target, as source text.
        replace: what stands there instead; empty: nothing (a `pass`).
        tests: what must fail, as pytest takes it.
        nth: which of several equal places, counted from 1; 0: there must be one.
        why: the error that it stands for.
    """

    target: str
    find: str
    replace: str
    tests: tuple[str, ...]
    nth: int = 0
    why: str = ""

    @property
    def title(self) -> str:
        """One line: the target and the change."""
        change = f"{self.find.strip().splitlines()[0]} -> {(self.replace.strip() or 'nothing').splitlines()[0]}"
        return f"{self.target}: {change}"


@dataclass(frozen=True)
class Change:
    """One changed module, as `overlay` and `run_all` take it: its path below `src/`, its whole new text, and the tests to run."""

    title: str
    path: Path
    text: str
    tests: tuple[str, ...]


MutantOrChange = TypeVar("MutantOrChange", Mutant, Change)


class DoesNotApply(Exception):
    """The source has no such place, or several."""


def read(path: Path = TABLE) -> list[Mutant]:
    """All mutants of the table."""
    rows = tomllib.loads(path.read_text())["mutant"]
    return [Mutant(**{**row, "tests": tuple(row["tests"])}) for row in rows]


def mutated(mutant: Mutant) -> tuple[Path, str]:
    """The path of the changed module below `src/`, and its new text. Raises DoesNotApply."""
    module, _, qualified = mutant.target.partition(":")
    path = Path(*module.split(".")).with_suffix(".py")
    if not (SOURCE / path).exists():
        path = Path(*module.split("."), "__init__.py")
    if not (SOURCE / path).exists():
        raise DoesNotApply(f"{mutant.target}: there is no module {module}")
    tree = ast.parse((SOURCE / path).read_text())
    _replace(_find_scope(tree, qualified, mutant), mutant)
    return path, ast.unparse(ast.fix_missing_locations(tree)) + "\n"


def _find_scope(tree: ast.Module, qualified: str, mutant: Mutant) -> ast.AST:
    scope: ast.AST = tree
    for name in qualified.split(".") if qualified else ():
        inner = [
            node
            for node in ast.walk(scope)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name
        ]
        if not inner:
            raise DoesNotApply(f"{mutant.target}: there is no {name}")
        scope = inner[0]
    return scope


def _replace(scope: ast.AST, mutant: Mutant) -> None:
    wanted = ast.parse(mutant.find.strip()).body
    is_expression = len(wanted) == 1 and isinstance(wanted[0], ast.Expr) and bool(mutant.replace.strip())
    places = list(_expressions(scope, wanted[0].value) if is_expression else _statements(scope, wanted))  # type: ignore[attr-defined]
    if not places and is_expression:
        places = list(_statements(scope, wanted))
        is_expression = False
    if not places or (mutant.nth == 0 and len(places) > 1) or mutant.nth > len(places):
        raise DoesNotApply(f"{mutant.target}: {len(places)} places read {mutant.find.strip()!r}")
    holder, field, at = places[max(0, mutant.nth - 1)]
    if is_expression:
        new = ast.parse(mutant.replace.strip(), mode="eval").body
        if at is None:
            setattr(holder, field, new)
        else:
            getattr(holder, field)[at] = new
    else:
        getattr(holder, field)[at : at + len(wanted)] = ast.parse(mutant.replace.strip() or "pass").body  # type: ignore[operator]


def _same(a: ast.AST, b: ast.AST) -> bool:
    return ast.dump(a).replace("Store()", "Load()") == ast.dump(b).replace("Store()", "Load()")


def _expressions(scope: ast.AST, wanted: ast.expr) -> Iterator[tuple[ast.AST, str, int | None]]:
    for node in ast.walk(scope):
        for field, value in ast.iter_fields(node):
            for at, each in enumerate(value) if isinstance(value, list) else ((None, value),):
                if isinstance(each, ast.expr) and _same(each, wanted):
                    yield node, field, at


def _statements(scope: ast.AST, wanted: Sequence[ast.stmt]) -> Iterator[tuple[ast.AST, str, int | None]]:
    for node in ast.walk(scope):
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if not isinstance(block, list):
                continue
            for at in range(len(block) - len(wanted) + 1):
                if all(_same(a, b) for a, b in zip(block[at : at + len(wanted)], wanted, strict=True)):
                    yield node, field, at


def _reason_not_to_apply(mutant: Mutant) -> str:
    try:
        mutated(mutant)
    except DoesNotApply as error:
        return str(error)
    return ""


# -- running -------------------------------------------------------------------------------------------------------------


def overlay(mutant: Mutant | Change | None, folder: Path) -> Path:
    """A copy of `src/` made of hard links, with the one changed file; returns the copy's path.

    Compiled modules come along, all but the changed one's: they save each mutant two seconds.
    """
    copy = folder / "src"
    (folder / "tests").symlink_to(ROOT / "tests")  # the hub's families are data of the tests, beside `src/`
    shutil.copytree(SOURCE, copy, copy_function=os.link, ignore=shutil.ignore_patterns("*.pyc.*"))
    if mutant is not None:
        path, text = (mutant.path, mutant.text) if isinstance(mutant, Change) else mutated(mutant)
        for compiled in (copy / path).parent.glob(f"__pycache__/{path.stem}.*"):
            compiled.unlink()
        (copy / path).unlink()
        (copy / path).write_text(text)
    return copy


def start(source: Path, tests: Iterable[str], log: Path) -> int:
    """Forks a process in which `import pipeloom` is the copy, and runs the tests there; returns its process number."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.chdir(ROOT)
        _import_from(source)
        path = [
            str(source),
            *filter(None, [os.environ.get("PYTHONPATH")]),
        ]  # an empty entry would be the working directory
        os.environ["PYTHONPATH"] = os.pathsep.join(path)
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        sys.dont_write_bytecode = True
        import pytest

        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--override-ini", "addopts=--strict-markers"]
        code = int(pytest.main([*options, "--timeout", "100", *tests]))
        sys.stdout.flush()
        os._exit(code)
    except BaseException as error:
        os.write(2, repr(error).encode())
        os._exit(70)


def _import_from(source: Path) -> None:
    """From now on `import pipeloom` is the copy, whatever this process has imported before."""
    sys.path.insert(0, str(source))
    for name in [name for name in sys.modules if name.partition(".")[0] == "pipeloom"]:
        del sys.modules[name]
    found = importlib.util.find_spec("pipeloom")
    if found is None or not found.origin or not Path(found.origin).is_relative_to(source):
        raise ImportError(f"pipeloom is {found}, and not the copy in {source}")


def finish(pid: int, begun: float, limit: float) -> str | None:
    """`found`, `survived`, `timeout` or `error N` once the process has ended; None while it runs."""
    done, status = os.waitpid(pid, os.WNOHANG)
    if not done:
        if time.monotonic() - begun < limit:
            return None
        os.waitpid(_kill(pid), 0)
        return "timeout"
    _kill(pid)  # what the tests may have left
    code = os.waitstatus_to_exitcode(status)
    return {0: "survived", 1: "found"}.get(code, "found" if code < 0 else f"error {code}")


def _kill(pid: int) -> int:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    return pid


def run_all(mutants: Sequence[MutantOrChange], jobs: int) -> Iterator[tuple[MutantOrChange, str, float, str]]:
    """(mutant, verdict, seconds, end of the tests' output) as each ends."""
    waiting = list(mutants)[::-1]
    running: dict[int, tuple[MutantOrChange, float, tempfile.TemporaryDirectory[str]]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                mutant = waiting.pop()
                folder = tempfile.TemporaryDirectory(prefix=".mutant-", dir=ROOT)
                source = overlay(mutant, Path(folder.name))
                running[start(source, mutant.tests, Path(folder.name) / "log")] = mutant, time.monotonic(), folder
            for pid, (mutant, begun, folder) in list(running.items()):
                verdict = finish(pid, begun, LIMIT)
                if verdict is not None:
                    del running[pid]
                    log = (Path(folder.name) / "log").read_text(errors="replace")
                    folder.cleanup()
                    yield mutant, verdict, time.monotonic() - begun, log[-3000:]
            time.sleep(0.05)
    finally:
        for pid, (_, _, folder) in running.items():
            os.waitpid(_kill(pid), 0)
            folder.cleanup()


def check_unchanged(tests: Iterable[str]) -> bool:
    """Runs the tests on the unchanged source, and says whether they pass."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=".mutant-", dir=ROOT) as folder:
        log = Path(folder) / "log"
        pid = start(overlay(None, Path(folder)), sorted(set(tests)), log)
        while (verdict := finish(pid, begun, 3600.0)) is None:
            time.sleep(0.05)
        passed = verdict == "survived"
        print(f"unchanged source: {'tests pass' if passed else verdict}, {time.monotonic() - begun:.0f} s", flush=True)
        if not passed:
            print(log.read_text(errors="replace")[-3000:])
    return passed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, metavar="N", help="run N random mutants instead of all")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="of the sample")
    parser.add_argument("--only", metavar="TEXT", help="run mutants whose line in the table contains TEXT")
    parser.add_argument("--jobs", type=int, default=2, help="how many run at once (2)")
    parser.add_argument("--no-baseline", action="store_true", help="do not run the tests on the unchanged source first")
    options = parser.parse_args(arguments)
    mutants = read()
    stale = [error for error in map(_reason_not_to_apply, mutants) if error]
    if stale:
        print("\n".join(stale))
        return 1
    chosen = [each for each in mutants if options.only is None or options.only in each.title]
    if not chosen:
        print(f"no mutant's line holds {options.only!r}")
        return 1
    if options.sample is not None:
        chosen = random.Random(options.seed).sample(chosen, min(options.sample, len(chosen)))
        print(f"{len(chosen)} of {len(mutants)} mutants, seed {options.seed}", flush=True)
    import torch._dynamo  # here once instead of in every fork
    import torch.distributed  # noqa: F401

    if not options.no_baseline and not check_unchanged(test for each in chosen for test in each.tests):
        return 1
    compileall.compile_dir(SOURCE, quiet=2)
    failures = 0
    begun = time.monotonic()
    for mutant, verdict, seconds, log in run_all(chosen, options.jobs):
        good = verdict in ("found", "timeout")
        failures += not good
        reason = f" ({mutant.why})" if mutant.why else ""
        print(f"{'ok  ' if good else 'FAIL'} {verdict:8} {seconds:5.1f} s  {mutant.title}{reason}", flush=True)
        if verdict.startswith("error"):
            print(log)
    print(f"{len(chosen) - failures} of {len(chosen)} as expected, {time.monotonic() - begun:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
