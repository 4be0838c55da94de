"""The largest sizes that Pipeloom accepts, the cores that it may use, and the one way in which it reads files that users name.

A size above its limit is refused in one sentence, before anything of that size is built. Each limit is several times what any
published run uses, and small enough that a typing error cannot exhaust the memory of the machine.
"""

from __future__ import annotations

import errno
import json
import math
import operator
import os
import re
import stat
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache, wraps
from inspect import signature
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, BinaryIO, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from pipeloom.errors import ArgumentError, ConfigError, UsageError, divisors, echo, nearest, reason_of, shortened

# Published pipelines have at most 128 ranks; a table with an entry for each pair of ranks has at most 17 million.
MOST_RANKS = 4_096
# Stages of a rank: a pipeline with more has stages of less than a layer.
MOST_CHUNKS = 1_024
# Stage-micro-batches, S * m: two or three actions each. 16 ranks of 8 stages could run 15,600 micro-batches.
MOST_CELLS = 2_000_000
# The same for families that plan action by action; not measured at this size.
MOST_PLANNED_CELLS = 131_072
# The same for a search, which repeats a short period where there are many micro-batches.
MOST_SEARCHED_CELLS = 262_144
# Workers of a run, over all machines.
MOST_WORKERS = 131_072
# Workers that one machine starts: each connects to all others, so a thousand of them need half a million connections.
MOST_LOCAL_WORKERS = 1_024
# Threads of a worker: several times the cores of any machine.
MOST_THREADS = 1_024
# Memory that a worker takes before it holds a single weight: torch itself.
WORKER_BYTES = 160_000_000
# Layers: a thousand times those of the deepest published models.
MOST_LAYERS = 100_000
# The largest side of a tensor (a width, a vocabulary, a sequence, a batch): the product of two of them still fits 64 bits.
MOST_WIDTH = 2**30
# The width of a head, for which tables of rotations are computed: a hundred times that of published models.
MOST_HEAD_WIDTH = 2**16
# A counter of steps or moves, and a seed.
MOST_STEPS = 10**12
MOST_SEED = 2**63 - 1
# Seconds of a limit: 11 days. Above 2**31 milliseconds (24 days) calls of the operating system overflow.
MOST_SECONDS = 1e6
# Seconds without progress: a process that is given no core for a moment is not stuck.
LEAST_TIMEOUT = 1.0
# Bytes of a schedule as text: four times what MOST_CELLS takes; of a configuration: a hundred times the default's.
SCHEDULE_BYTES = 32 * 2**20
CONFIG_BYTES = 2**18
# Bytes of a model's config.json: a thousand times a long one.
MODEL_CONFIG_BYTES = 10_000_000
# Bytes of plain text, which every worker holds in memory, and files of a source.
CORPUS_BYTES = 8 * 2**30
CORPUS_FILES = 200_000
# Bytes of a line of a file of records: a thousand times a long document.
LINE_BYTES = 64 * 2**20
# Bytes of a tokenizer's file: several times those of the largest vocabularies.
TOKENIZER_BYTES = 256 * 2**20
# Tables within tables, and lists within lists, of a configuration or a schedule.
MOST_NESTED = 20

# Suffix of a size, in lower case -> bytes.
BYTE_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}

_COUNTS = re.compile(
    r"(?:^|_)(?:(?P<parts>layers?|blocks?|depth|experts?|heads?|groups?|types)|(?P<head>(?:head|rotary)_dim)"
    r"|size|dim|rank|embeddings|positions|model|embd|inner|ctx)$"
)


def usable_cores() -> int:
    """Return the number of cores that this process may run on; if the system does not tell, the machine's cores.

    Processes that have a core each can wait by polling.
    """
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        return os.cpu_count() or 1


def newest_run(folder: Path) -> Path | None:
    """Return the newest run in a folder of runs, by its `config.toml`; None: there is none, or `folder` is itself a run."""
    return next(iter(runs_in(folder)), None)


def runs_in(folder: Path) -> list[Path]:
    """Return the runs in a folder of runs, newest first; [] where `folder` is itself a run."""
    if (folder / "config.toml").is_file():
        return []
    runs = [(path.stat().st_mtime, path.parent) for path in folder.glob("*/config.toml")]
    return [run for _, run in sorted(runs, reverse=True)]


def expanded(path: str | Path) -> Path:
    """Return `path` with `~` as the home directory. As in a shell, the `~name` of no user stays as it is."""
    return Path(os.path.expanduser(path))


def open_file(path: str | Path, what: str) -> BinaryIO:
    """Open a regular file for reading bytes; never block.

    Args:
        what: what is read, for messages: "a schedule".

    Raises:
        UsageError: not a regular file (a pipe, a device).
        OSError: as `open` raises it, for a folder too.
    """
    name, mode = shortened(str(path)), os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):  # checked before opening, which may have an effect on a device
        raise UsageError(f"{name} is {_kind(mode)}, and {what} is read from a file")
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    file = open(descriptor, "rb")  # noqa: SIM115  # its reader closes it
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        file.close()
        raise UsageError(f"{name} is {_kind(mode)}, and {what} is read from a file")
    return file


def read_file(path: str | Path, most: int, what: str) -> bytes:
    """Return the content of a regular file of at most `most` bytes; never block, and never read more.

    Args:
        what: what is read, for messages: "a schedule".

    Raises:
        UsageError: not a regular file (a pipe, a device), or a file that is too large.
        OSError: as `open` and `read` raise it, for a folder too.
    """
    with open_file(path, what) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(most + 1) if size <= most else b""  # files of /proc report a size of 0
    if max(size, len(content)) > most:
        name = shortened(str(path))
        raise UsageError(f"{name} has {max(size, len(content)):,} bytes; {what} has at most {most:,}")
    return content


def read_text(path: str | Path, most: int, what: str) -> str:
    """Return the text of a file, read as by `read_file`. Raises UsageError for any file that cannot be read or is not text."""
    try:
        return read_file(path, most, what).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not a text file (byte {error.start} is not UTF-8)") from None
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise UsageError(f"cannot read {shortened(str(path))}: {reason_of(error)}") from None


def read_json(path: str | Path, most: int, what: str, most_nested: int = MOST_NESTED) -> Any:
    """Return the value in a JSON file, read as by `read_file`.

    Raises:
        UsageError: as `read_file`; no JSON, or lists and objects that are nested too deeply.
        OSError: as `read_file`.
    """
    content = read_file(path, most, what)
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise UsageError(f"{shortened(str(path))} is not JSON: {shortened(reason)}") from None
    if depth(value, most_nested) > most_nested:
        raise UsageError(f"{shortened(str(path))} is nested too deeply; {what} has at most {most_nested} levels")
    return value


def memory_amount(text: str) -> tuple[float, bool] | None:
    """Return (amount, whether it is in bytes) of a limit such as 6, 20GiB or 512MiB; None for anything else."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?(?:e[+-]?\d{1,3})?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].lower() not in BYTE_UNITS:
        return None
    return float(match[1]) * BYTE_UNITS[match[2].lower()], bool(match[2])


def require_whole(name: str, value: object, least: int = 1) -> None:
    """Raise ArgumentError for a value of the argument `name` that is not a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ArgumentError(name, f" is {echo(value)}; it must be a whole number of at least {least}")


def whole_numbers(name: str, values: Iterable[Any], least: int) -> list[int]:
    """Return a list of whole numbers, also NumPy's. Raises ArgumentError where it is not one, or has one below `least`."""
    try:
        numbers = [operator.index(value) for value in values]
    except TypeError:
        numbers = [least - 1]
    if min(numbers, default=least) < least:
        raise ArgumentError(name, f" is {echo(values)}; it must be a list of whole numbers of at least {least}")
    return numbers


_Function = TypeVar("_Function", bound=Callable[..., Any])
_WORDS = {bool: "True or False", int: "a whole number", float: "a number", str: "a string", NoneType: "None"}
_NUMBERS: dict[Any, type] = {int: Integral, float: Real}


def of_annotated_types(function: _Function) -> _Function:
    """Decorate a public function: it refuses arguments of other types than their annotations, as `require_types` does.

    Whole numbers in lists it checks itself (`whole_numbers`): these may be arrays.
    """
    parameters = signature(function)

    @wraps(function)
    def checked(*arguments: Any, **keywords: Any) -> Any:
        with suppress(TypeError):  # the call says what is missing
            given, hints = parameters.bind(*arguments, **keywords).arguments, _hints(function)
            require_types(function, {name: each for name, each in given.items() if hints.get(name) != Sequence[int]})
        return function(*arguments, **keywords)

    return cast(_Function, checked)


def require_types(annotated: Any, values: Mapping[str, object]) -> None:
    """Raise ConfigError for `values` of other types than the function's or class's annotations of their names."""
    hints = _hints(annotated)
    problems = [
        ArgumentError(name, f" is {echo(value)}; it must be {_words(hints[name])}")
        for name, value in values.items()
        if not _is_a(value, hints.get(name, Any))
    ]
    if problems:
        raise problems[0] if len(problems) == 1 else ConfigError([str(each) for each in problems])


@cache
def _hints(annotated: Any) -> dict[str, Any]:
    """Name -> its type; none where annotations name what is imported for type checkers alone."""
    with suppress(NameError):
        return get_type_hints(annotated)
    return {}


def _is_a(value: Any, hint: Any) -> bool:
    """Return whether a value, and each of its elements, is of an annotated type."""
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        return any(_is_a(value, each) for each in inner)
    if kind is Literal:
        return any(isinstance(value, type(each)) and value == each for each in inner)
    if kind in _NUMBERS:
        return isinstance(value, _NUMBERS[kind]) and not isinstance(value, bool)
    if kind is bool:  # numpy's too
        return type(value).__name__ in ("bool", "bool_")
    if kind is Any or not isinstance(kind, type):
        return True
    if kind is tuple and isinstance(value, list):  # as JSON has them
        value = tuple(value)
    if not isinstance(value, kind) or (isinstance(value, str) and inner and kind is not str):
        return False
    if not inner or not isinstance(value, Collection):
        return True
    if isinstance(value, Mapping):
        return all(_is_a(each, inner[0]) for each in value) and all(_is_a(each, inner[-1]) for each in value.values())
    if kind is tuple and inner[-1] is not ...:
        return len(value) == len(inner) and all(map(_is_a, value, inner))
    return all(_is_a(each, inner[0]) for each in value)


def _words(hint: Any) -> str:
    """An annotation in words."""
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(map(_words, get_args(hint)))
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(repr, get_args(hint)))
    name = hint.__name__ if isinstance(hint, type) and not get_args(hint) else re.sub(r"\b(\w+\.)+", "", str(hint))
    return _WORDS.get(hint, f"{'an' if name[0] in 'AEIO' else 'a'} {name}")


def require_positive(name: str, value: object, most: float = math.inf) -> None:
    """Raise ArgumentError for a value of the argument `name` that is not a number above 0, or that is above `most`."""
    number: Any = math.nan if isinstance(value, bool) or not isinstance(value, Real) else value
    if not number > 0:
        raise ArgumentError(name, f" is {echo(value)}; it must be a number above 0")
    require_at_most(name, number, most)


def require_at_most(name: str, value: float, most: float) -> None:
    """Raise ArgumentError for a value of the argument `name` above `most`."""
    if value > most:
        raise ArgumentError(name, f" is {shortened(number(value))}; it must be at most {number(most)}")


def require_divides(name: str, size: int, total: int, what: str) -> None:
    """Raise ArgumentError unless `size`, the value of the argument `name`, divides `total`, which is `what` in words."""
    if size < 1 or total % size:
        raise ArgumentError(name, f"={size} does not divide {what}; {nearest(size, divisors(total))}")


def require_counts(values: Mapping[str, object]) -> None:
    """Raise UsageError for a count in a model's `config.json` above its limit, before anything of that size is built.

    A whole number's name tells what it counts: parts such as layers and experts, of which each is built, or the side of a tensor.
    """
    waiting = list(values.items())
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.items()
        elif isinstance(value, list):
            waiting += [(name, item) for item in value]
        elif type(value) is int and (ending := _COUNTS.search(str(name))):
            most = MOST_LAYERS if ending["parts"] else MOST_HEAD_WIDTH if ending["head"] else MOST_WIDTH
            require_at_most(str(name), value, most)


def require_schedule(ranks: int, microbatches: int, stages: int, most: int = MOST_CELLS) -> None:
    """Raise UsageError for a schedule that is too large, before it is built."""
    require_at_most("ranks", ranks, MOST_RANKS)
    require_at_most("stages", stages, MOST_RANKS * MOST_CHUNKS)
    if stages * microbatches > most:
        raise UsageError(
            f"{number(stages)} stages times {shortened(number(microbatches))} micro-batches are more than {most:,} forwards, "
            f"the most that one schedule may have; nearest: {max(1, most // stages)} micro-batches"
        )


def number(value: float) -> str:
    """`value` in digits; for a very long whole number, which Python may refuse to print, the number of its digits."""
    if isinstance(value, int) and abs(value) >= 10**30:
        return f"a number of about {int(value.bit_length() * 0.30103) + 1} digits"
    return str(value) if isinstance(value, int) else f"{value:g}"


def number_or_text(text: str) -> int | float | str:
    """Return the number that a word of a user's is, else the word."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def depth(value: object, most: int = MOST_NESTED) -> int:
    """Return how deeply tables and lists are nested, counted up to `most` + 1; without recursion."""
    level, here = 0, [value]
    while here and level <= most:
        here = [
            inner
            for outer in here
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        level += 1
    return level


def _kind(mode: int) -> str:
    return "a pipe" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"
