"""Every error that Pipeloom raises on purpose, each with the exit code that a command ends with."""

from __future__ import annotations

import difflib
import errno
import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

TRAIN_PACKAGES = ("torch", "numpy", "safetensors")  # of the extra `train`


class PipeloomError(Exception):
    """Base class. Raised directly, it indicates a bug in Pipeloom.

    Attributes:
        exit_code: of a command that it ends.
        of_all_ranks: whether the ranks agree to raise it, so that none failed first.
    """

    exit_code = 1
    of_all_ranks = False


def add_note(error: BaseException, note: str) -> None:
    """Add a note as `error.add_note` does, also where the error's class refuses attributes (a frozen dataclass) or looks them up
    itself: the user must see the original error, not one from adding the note.
    """
    notes = error.__dict__.setdefault("__notes__", [])
    if isinstance(notes, list):
        notes.append(note)


class UsageError(PipeloomError):
    """Invalid arguments, an invalid configuration, or a file that cannot be read."""

    exit_code = 2


class ConfigError(UsageError):
    """One or more impossible settings, reported together.

    Attributes:
        problems: one sentence for each setting.
    """

    def __init__(self, problems: Sequence[str] | str) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class ArgumentError(ConfigError):
    """An argument of the library with a value that it cannot have: `tp=3 does not divide 32 heads; nearest: 2 or 4`.

    Attributes:
        argument: its name.
        words: the sentence after the name.
    """

    def __init__(self, argument: str, words: str) -> None:
        self.argument, self.words = argument, words
        super().__init__(f"{argument}{words}")

    def __reduce__(self) -> tuple[type[ArgumentError], tuple[str, str]]:
        return type(self), (self.argument, self.words)


class ScheduleError(PipeloomError):
    """A schedule that is incomplete, contradictory or would deadlock."""

    exit_code = 3


class VerifyError(PipeloomError):
    """A model under a schedule differs from the same layers in one process."""


class CapacityError(PipeloomError):
    """Too little memory, or no layout that fits."""

    exit_code = 4


class CheckpointError(PipeloomError):
    """A checkpoint that is missing, incomplete or damaged."""

    exit_code = 5
    of_all_ranks = True


class DistributedError(PipeloomError):
    """A rank failed, died, stalled, or disagrees with the others."""

    exit_code = 6


class DivergedError(PipeloomError):
    """Training diverged."""

    of_all_ranks = True


class Preempted(PipeloomError):
    """The run was preempted (SIGTERM) and stopped after completing a step."""

    exit_code = 75


class Interrupted(PipeloomError):
    """The run was interrupted (SIGINT, Ctrl-C); it stopped after completing a step."""

    exit_code = 130


INTERRUPTED = 130  # exit code after Ctrl-C, as in a shell

_NAME = {errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EACCES}  # no such path can be looked up
_DISC = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}


def from_machine(error: BaseException) -> tuple[int, str] | None:
    """(exit code, sentence) for an error of full memory, a full disk or an unusable path; None for any other error."""
    text = next(iter(str(error).strip().splitlines()), "")
    number = error.errno if isinstance(error, OSError) else None
    no_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    if no_memory or number == errno.ENOMEM or (isinstance(error, RuntimeError) and "DefaultCPUAllocator" in text):
        return CapacityError.exit_code, f"out of memory: {text}" if text else "out of memory"
    if number in _DISC:
        where = getattr(error, "filename", None)
        return UsageError.exit_code, f"cannot write {where or 'a file'}: {getattr(error, 'strerror', None) or text}"
    if isinstance(error, UnicodeEncodeError) and error.reason == "surrogates not allowed":
        return (
            UsageError.exit_code,
            f"{error.object!r:.200} is not text: it holds half of a character (a lone surrogate)",
        )
    if isinstance(error, OSError) and error.errno in _NAME and error.filename is not None:
        return UsageError.exit_code, f"the path {error.filename!r} cannot be used: {error.strerror}"
    return None


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says; of one that says nothing its type."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def reason_of(error: BaseException) -> object:
    """Return why the machine refused, without the number and the path of an `OSError`; of any other error the error itself."""
    return getattr(error, "strerror", None) or error


def did_you_mean(word: object, candidates: Iterable[str], count: int = 3, listed: bool = True) -> str:
    """`"; did you mean 'x' or 'y'?"` for the nearest candidates; where none is near, the list of all, or if not `listed`: ""."""
    names = sorted(candidates)
    word = str(word)[:LONGEST_ECHO]
    near = difflib.get_close_matches(word, names, n=count, cutoff=0.55)
    if near:
        return f"; did you mean {' or '.join(repr(name) for name in near)}?"
    return f"; known: {', '.join(names)}" if names and listed else ""


def divisors(number: int) -> list[int]:
    """The divisors of a whole number of at least 1, in ascending order."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def nearest(value: int, valid: Iterable[int]) -> str:
    """`"nearest: 2 or 4"`: the largest valid number below `value` and the smallest above it."""
    numbers = sorted(valid)
    below = [n for n in numbers if n < value][-1:]
    above = [n for n in numbers if n > value][:1]
    return "nearest: " + " or ".join(map(str, below + above))


def missing_packages(what: str, packages: Iterable[str], extra: str = "train") -> UsageError:
    """Return the error for a part of Pipeloom without the packages that an extra installs."""
    names = " and ".join(packages)
    return UsageError(f'{what} needs {names}, which the core install leaves out: pip install -e ".[{extra}]"')


@contextmanager
def naming_extra(what: str) -> Iterator[None]:
    """Turn the error of an import inside that needs a package of the extra `train` into a UsageError that names the extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in TRAIN_PACKAGES:
            raise
        raise missing_packages(what, [error.name]) from None


LONGEST_ECHO = 200  # characters of a user's input that a message repeats
_LONG_WORD = re.compile(rf'[^\s"]{{{LONGEST_ECHO + 1},}}')
_LONGEST_PRINTED_LINE = 4000


def shortened(text: str, most: int = LONGEST_ECHO) -> str:
    """`text`, or its beginning and its length where it is longer than `most` characters: how messages repeat input."""
    return text if len(text) <= most else f"{text[: most - 30]}… ({len(text):,} characters)"


def echo(value: object) -> str:
    """`repr(value)`, shortened: how a message shows a value that a user gave."""
    try:
        return shortened(repr(value[: 2 * LONGEST_ECHO] if isinstance(value, str | bytes | list | tuple) else value))
    except (ValueError, RecursionError):  # a number of more digits than Python writes, a list too deep
        return f"a value of type {type(value).__name__} that is too long to show"


def sentence(text: str) -> str:
    """Return a message as it is printed: words of more than `LONGEST_ECHO` characters, and very long lines, are shortened."""
    lines = (_LONG_WORD.sub(lambda word: shortened(word[0]), line) for line in text.split("\n"))
    return "\n".join(shortened(line, _LONGEST_PRINTED_LINE) for line in lines)


COLUMNS = 80  # of a terminal, for all that is not drawn to its width
_LAYOUT = re.compile(r"(?:\w+=[^\s,/]+,){3,}\S+")


def folded(text: str) -> str:
    """`text` with lines of at most 80 columns, where its words allow.

    What continues a line is indented by 4 more, and a long layout may be broken behind its commas. Lines with colours stay as
    they are, and a label with a path.
    """
    lines: list[str] = []
    for line in text.split("\n"):
        if len(line) <= COLUMNS or "\x1b" in line or (len(line.split()) <= 2 and not _LAYOUT.search(line)):
            lines.append(line)
            continue
        margin = " " * (len(line) - len(line.lstrip()) + 4)
        line = _LAYOUT.sub(lambda word: word[0].replace(",", ", ") if len(word[0]) > COLUMNS - 8 else word[0], line)
        lines += textwrap.wrap(line, COLUMNS, subsequent_indent=margin, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)


def printable(text: str) -> str:
    """`text` with escapes for characters that could control a terminal or cannot be written to a file; line ends and tabs stay.

    These are control characters, bidirectional marks and lone surrogates. Output of other processes, files and file names may
    contain them.
    """
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in text)
