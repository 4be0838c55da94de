"""What a user can get wrong: schedules as text, configurations, overrides and command lines, mutated.

A case is a command line and the files that it names. Each runs in this process, with everything up to the start of workers, and
`REAL` of them as real commands too. What is checked:

* the exit code is one that the command documents: 0, 2, 3 or 4, never 1; with `--json` standard output is one JSON object;
* an answer takes less than `SECONDS` of processor time, and the process stays below `MEGABYTES`;
* no traceback, and no more than 200 characters of one word of the input.

A case that fails is shrunk (fewer words, shorter words and files) and printed as a line of its own. At the end a table counts the
exit codes for each command.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from fuzz._answers import Answer, answer_of, inside
from fuzz._loop import run_cases, smallest
from pipeloom.config.sections import SECTIONS
from pipeloom.schedule.csv_form import to_csv
from pipeloom.schedule.families import FAMILIES, build
from pipeloom.schedule.json_form import to_json

CASES = 5_000
REAL = 50  # of them also run as a command
SECONDS, REAL_SECONDS, MEGABYTES = 60.0, 600.0, 500  # a guard against what does not end, on any machine
LARGE = 1_000
PLAIN_MEGABYTES = 45  # `pipeloom` itself, before it has read anything: what is added to the growth of this process
DOCUMENTED = {"schedule": (0, 2, 3, 4), "compare": (0, 2, 3, 4), "search": (0, 2, 3, 4), "check": (0, 2, 3)}
DOCUMENTED |= {"train": (0, 2, 3, 4), "verify": (0, 2, 3, 4)}
FOLDER = "DIR"  # stands for the folder of the case's files


def words(text: str) -> tuple[str, ...]:
    """Return the words of a line."""
    return tuple(text.split())


NUMBERS = (
    *words("0 -1 1 2 3 7 16 64 1000 1e3 4096 65536 1000000 2147483648 9223372036854775808 1e308 -1e308 1e-320"),
    *words("nan inf -inf 0x10 1_000 1.5 ٣"),
    *("9" * 400, "9" * 6000),
)
WORDS = (
    *("", " ", "\t", "\n", "[1, 2", "a b " * 500, "\u202e", "\x1b[31m", "\ud800", '"', "'", "\\"),
    *words("none true [] {} [[]] a.b .. . / // ~ - -- %s {0} é \U0001f9f5 module:function os:system : a: :b = a=b"),
    *words("/dev/null /dev/zero /dev/full /proc/self/mem /"),
    *("x" * 300, "[" * 3000, "(" * 3000, "1," * 3000, ";" * 50),
)
CELLS = (*words('0F0 9F9 0B0 0I0 0W0 (0F0;0B0)OVERLAP_F_B 0F F0 0F0x 0SEND_F0 0UNSHARD -1F0 0F999999999 "'), "")


@dataclass(frozen=True)
class Case:
    """One command line.

    Attributes:
        words: after `pipeloom`; `FOLDER` in one stands for the folder of the files.
        files: (name, content).
    """

    words: tuple[str, ...]
    files: tuple[tuple[str, str], ...] = ()

    def __repr__(self) -> str:
        return repr((self.words, self.files))


def random_case(seed: int) -> Case:
    """The case of this seed: a sound command line, and up to four mutations of it or of its files."""
    random = Random(seed)
    case = random.choice(_BASES)(random)
    for _ in range(random.choice((0, 1, 1, 1, 2, 4))):
        if case.files and random.random() < 0.7:
            at = random.randrange(len(case.files))
            files = list(case.files)
            files[at] = (files[at][0], mutated_text(files[at][1], random))
            case = replace(case, files=tuple(files))
        else:
            case = replace(case, words=mutated_words(case.words, random))
    return case


def _small(random: Random) -> tuple[str, ...]:
    return ("--ranks", str(random.choice((1, 2, 3, 4))), "--microbatches", str(random.choice((1, 2, 4, 8))))


def _schedule(random: Random) -> Case:
    more = random.choice(
        ((), ("--json",), ("--csv",), ("--chunks", "2"), ("--option", "rounds=tail"), ("--forward", "1,2,1,2"))
    )
    return Case(("schedule", random.choice(sorted(FAMILIES)), *_small(random), *more))


def _compare(random: Random) -> Case:
    names = random.choice((("all",), ("1f1b", "gpipe"), ("interleaved:chunks=4", "zb-h1"), ("1f1b:cooldown=split",)))
    return Case(("compare", *names, *_small(random), *random.choice(((), ("--json",), ("--p2p", "0.5")))))


def _search(random: Random) -> Case:
    more = random.choice(
        ((), ("--memory", "3"), ("--placement", "vee"), ("--objective", "span"), ("--json",), ("--pairs",))
    )
    limits = ("--iterations", "0", "--time-limit", "5")  # a mutation of the first may ask for hours
    return Case(("search", *_small(random), *limits, *more))


def _text(random: Random) -> tuple[str, str]:
    for _ in range(9):
        with contextlib.suppress(Exception):
            schedule = build(random.choice(sorted(FAMILIES)), random.choice((1, 2, 4)), random.choice((1, 2, 4, 8)))
            return (
                ("s.json", to_json(schedule))
                if len(schedule.routes) > 1 or random.random() < 0.5
                else ("s.csv", to_csv(schedule))
            )
    return "s.csv", "0F0,0B0\n"


def _check(random: Random) -> Case:
    name, text = _text(random)
    more = random.choice(((), ("--json",), ("--receive-depth", "2"), ("--transport", "batched")))
    return Case((random.choice(("check", "check", "schedule")), f"{FOLDER}/{name}", *more), ((name, text),))


def _flags(random: Random, count: int) -> tuple[str, ...]:
    """Flags of random keys, with values that mean something to some key."""
    values = words("1 2 4 0.5 true 1f1b gpipe zb-h1 [0,1] full none cpu Et*4L search")
    found: list[str] = []
    for _ in range(random.randrange(count + 1)):
        section = random.choice(sorted(SECTIONS))
        found += [f"--{section}.{random.choice(sorted(SECTIONS[section].model_fields))}", random.choice(values)]
    return tuple(found)


def _train(random: Random) -> Case:
    return Case((random.choice(("train", "train", "verify")), "tiny", *_flags(random, 3)))


def _configured(random: Random) -> Case:
    schedule, text = _text(random)
    toml = (
        'extends = "tiny"\n[model]\nnum_hidden_layers = 4\n[parallel]\npp = 2\ndp = 1\n[schedule]\nmicrobatches = 4\n'
        f'name = "{random.choice(("1f1b", "zbv", "search", f"{FOLDER}/{schedule}"))}"\n'
        '[train]\nsteps = 5\nrecompute = [0, 1]\n[optimizer]\nbetas = [0.9, 0.95]\n[data]\nsource = "stdlib"\n'
    )
    files = (("c.toml", toml), (schedule, text))
    return Case((random.choice(("train", "verify")), f"{FOLDER}/c.toml", *_flags(random, 1)), files)


def _matrix(random: Random) -> Case:
    toml = (
        "skip_invalid = true\n[base.train]\nseq_len = 16\n[[layout]]\n"
        'schedule.name = ["gpipe", "1f1b"]\nparallel.pp = [2, 3]\nschedule.microbatches = [4]\n'
    )
    return Case(("verify", "tiny", "--matrix", f"{FOLDER}/m.toml"), (("m.toml", toml),))


_BASES: tuple[Callable[[Random], Case], ...] = (
    *(_schedule, _compare, _search, _check, _check, _train, _train, _configured, _configured, _matrix),
)


def mutated_words(words: tuple[str, ...], random: Random) -> tuple[str, ...]:
    """The command stays; a word is replaced, dropped, doubled, swapped, cut, joined or added."""
    found, at = list(words), random.randrange(1, len(words)) if len(words) > 1 else 0
    way = random.randrange(8)
    if at == 0 or way == 0:
        found.insert(len(found), random.choice((*WORDS, *NUMBERS)))
    elif way <= 3:
        found[at] = random.choice(NUMBERS if found[at][:1].isdigit() or way == 1 else WORDS)
    elif way == 4:
        del found[at]
    elif way == 5:
        found.insert(at, found[at])
    elif way == 6:
        found[at] = mutated_text(found[at], random)
    else:
        flags = [word for word in _all_flags() if not word.startswith("--prove")]
        found += [random.choice(flags), random.choice((*NUMBERS, *WORDS))]
    return tuple(word.replace("\0", "0") for word in found)  # no operating system passes a zero byte


def _all_flags() -> tuple[str, ...]:
    keys = [f"--{section}.{key}" for section, model in SECTIONS.items() for key in model.model_fields]
    own = (
        "--ranks --microbatches --chunks --option --forward --pair --held-until-weight-grad --memory --placement --seed "
        "--json --csv --tolerance --matrix --receive-depth --microbatch-costs"
    )
    return (*keys, *words(own))


def mutated_text(text: str, random: Random) -> str:
    """A line, cell, number, character or stretch of the text changed."""
    way, at = random.randrange(10), random.randrange(len(text) + 1)
    lines = text.split("\n")
    line = random.randrange(len(lines))
    if way == 0:
        return text[:at] + random.choice((*WORDS, *CELLS)) + text[at:]
    if way == 1:
        return text[:at] + text[at + random.randrange(1, 9) :]
    if way == 2:
        lines.insert(line, random.choice(lines))
    elif way == 3:
        del lines[line]
    elif way == 4:
        cells = lines[line].split(",")
        cells[random.randrange(len(cells))] = random.choice((*CELLS, *NUMBERS))
        lines[line] = ",".join(cells)
    elif way == 5:
        places = [place for place, letter in enumerate(text) if letter.isdigit()]
        if places:
            at = random.choice(places)
            return text[:at] + random.choice(NUMBERS) + text[at + 1 :]
    elif way == 6:
        return (
            text[:at]
            + chr(random.choice((random.randrange(128), random.randrange(0x2500), 0xFEFF, 0xDC80)))
            + text[at:]
        )
    elif way == 7:
        return text[:at] + text[at : at + 20] * random.choice((2, 50, 3000)) + text[at:]
    elif way == 8:
        return text[:at]
    else:
        lines[line], lines[-1] = lines[-1], lines[line]
    return "\n".join(lines)


def answer(case: Case) -> Answer:
    """Run the case in this process; workers are not started."""
    workers = {"pipeloom.cli.train": lambda _: 0, "pipeloom.cli.workers": _no_verdicts}
    with tempfile.TemporaryDirectory() as folder, inside(folder):
        return answer_of(_written(case, folder), workers)


def _no_verdicts(*_: object) -> int:
    Path(os.environ["PIPELOOM_RESULT"]).write_text("[]")
    return 0


def _written(case: Case, folder: str) -> list[str]:
    """The command line, once its files are written into the folder."""
    for name, text in case.files:
        content = text.replace(FOLDER, folder).encode(errors="surrogateescape" if _escapable(text) else "replace")
        Path(folder, name).write_bytes(content)
    return [word.replace(FOLDER, folder) for word in case.words]


def _escapable(text: str) -> bool:
    return all(not "\ud800" <= letter <= "\udfff" or "\udc80" <= letter <= "\udcff" for letter in text)


def failure(case: Case) -> str | None:
    """What is wrong with the answer, None where nothing is."""
    try:
        found = answer(case)
    except BaseException as error:
        return f"{type(error).__name__} escapes: {error}"
    return complaint(case, found, SECONDS)


def _is_large(case: Case, found: Answer) -> bool:
    """Return whether the case asks for a schedule of thousands of micro-batches or ranks, and gets it.

    Such a schedule takes time and memory in proportion to its size; the limits on sizes bound both.
    """
    texts = (*case.words, *(number for _, text in case.files for number in re.findall(r"\b[0-9_]{4,8}\b", text)))
    digits = [text.replace("_", "") for text in texts if len(text) < 9]
    sizes = [int(text) for text in digits if text.isdecimal()]
    return found.code in (0, 3) and max(sizes, default=0) >= LARGE


def complaint(case: Case, found: Answer, seconds: float) -> str | None:
    command = case.words[0]
    if found.code not in DOCUMENTED.get(command, (0, 2)):
        last = found.trace.strip().splitlines()[-3:] if found.trace else [found.said[-300:]]
        return f"exit code {found.code}: {' '.join(last)[:400]}"
    if "Traceback" in found.said:
        return f"a traceback: {found.said[:300]}"
    if found.seconds > seconds and not _is_large(case, found):
        return f"slow: {found.seconds:.1f} s"
    # what is shorter is shown as it is; the JSON form of a schedule, and drawings, are not echoes
    if found.code and max(map(len, found.said.split()), default=0) > 230:
        return f"echo: a word of {max(map(len, found.said.split()))} characters"
    if found.code == 0 and "--json" in case.words and command in ("schedule", "compare", "search", "check"):
        try:
            json.loads(found.out)
        except ValueError as error:
            return f"JSON: {error}"
    return None


def real_failure(case: Case) -> str | None:
    """As `failure`, for a real command whose workers would be one process of a machine without memory for more."""
    with tempfile.TemporaryDirectory() as folder:
        words = _written(case, folder)
        try:
            encoded = [word.encode() for word in words]
        except UnicodeEncodeError:
            return None
        if any(len(word) > 100_000 for word in encoded):
            return None
        start = time.monotonic()
        with tempfile.TemporaryFile() as out:
            run = subprocess.Popen([sys.executable, "-m", "pipeloom", *encoded], stdout=out, stderr=out, cwd=folder)
            try:
                run.wait(REAL_SECONDS)
            except subprocess.TimeoutExpired:
                run.kill()
                run.wait()
                return f"slow: no answer in {REAL_SECONDS:g} s"
            out.seek(0)
            said = out.read().decode(errors="replace")
    plain = replace(case, words=tuple(word for word in case.words if word != "--json"))
    found = Answer(run.returncode, time.monotonic() - start, "", said, said if "Traceback" in said else "")
    return complaint(plain, found, REAL_SECONDS)


def simplifications(case: Case) -> Iterator[Case]:
    """Fewer words, shorter words, shorter files."""
    for at in range(1, len(case.words)):
        yield replace(case, words=case.words[:at] + case.words[at + 1 :])
        for word in _shorter(case.words[at]):
            yield replace(case, words=(*case.words[:at], word, *case.words[at + 1 :]))
    for at, (name, text) in enumerate(case.files):
        yield replace(case, files=case.files[:at] + case.files[at + 1 :])
        for content in _shorter(text):
            yield replace(case, files=(*case.files[:at], (name, content), *case.files[at + 1 :]))


def _shorter(text: str) -> Iterator[str]:
    size = len(text) // 2
    while size:
        for at in range(0, len(text), size):
            yield text[:at] + text[at + size :]
        size //= 2


def replay(text: str) -> int:
    """Run one case from its text; 0 where its answer is sound."""
    words, files = ast.literal_eval(text)
    case = Case(tuple(words), tuple(map(tuple, files)))
    found, wrong = answer(case), failure(case)
    print(found.said[:4_000], end="")
    print(f"exit code {found.code}, {found.seconds:.2f} s; {wrong or 'sound'}")
    if found.trace and wrong:
        print(found.trace)
    return int(wrong is not None)


def _megabytes(line: str) -> float:
    """Return a figure of this process's memory as the kernel counts it: VmRSS, or its peak VmHWM; without a /proc, the peak."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 1024)
    return next(int(words.split()[1]) for words in status.splitlines() if words.startswith(line)) / 1024


def _forget_peak() -> None:
    """Start the peak afresh: what ran in this process before, other tests for example, is not the inputs' memory."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def main(seed: int, cases: int | None, deadline: float | None) -> int:
    """Run the part (see `tests.fuzz.__main__`)."""
    session = Session(max(1, min(CASES if cases is None else cases, CASES) // REAL))
    failures = run_cases("input", CASES, (seed, cases, deadline), session.run, session.__str__)
    columns = sorted({code for counter in session.codes.values() for code in counter})
    print(f"{'exit code':<10}" + "".join(f"{code:>7}" for code in columns))
    for command, counter in sorted(session.codes.items()):
        print(f"{command:<10}" + "".join(f"{counter[code]:>7}" for code in columns))
    return failures


class Session:
    """Cases one after another; `every`: how many there are for one that runs as a real command, too."""

    def __init__(self, every: int) -> None:
        self.every, self.count, self.reals, self.slowest, self.most = every, 0, 0, 0.0, 0.0
        self.codes: dict[str, Counter[int]] = {}

    def __str__(self) -> str:
        return f" ({self.reals} as real commands too, slowest {self.slowest:.2f} s, {self.most:.0f} MB)"

    def run(self, number: int) -> str | None:
        """What is wrong with the case of this number, shrunk; None: nothing."""
        self.count += 1
        case = random_case(number)
        _forget_peak()
        before, large = _megabytes("VmRSS"), False
        try:
            found = answer(case)
            wrong = complaint(case, found, SECONDS)
            if wrong is not None and wrong.startswith("slow"):  # the first answer that needs torch imports it
                found = answer(case)
                wrong = complaint(case, found, SECONDS)
            self.codes.setdefault(case.words[0], Counter())[found.code] += 1
            large = _is_large(case, found)
            self.slowest = max(self.slowest, 0.0 if large else found.seconds)
            refused = bool(found.code)
        except Exception as error:
            wrong, refused = f"{type(error).__name__} escapes: {error}", False
        runs: Callable[[Case], str | None] = failure
        if wrong is None and self.count % self.every == 0 and refused:  # one that is refused, as a real command
            self.reals, runs = self.reals + 1, real_failure
            wrong = real_failure(case)
        megabytes = PLAIN_MEGABYTES + _megabytes("VmHWM") - before
        self.most = max(self.most, 0.0 if large else megabytes)
        if wrong is None and megabytes > MEGABYTES and not large:
            return f"memory: {megabytes:.0f} MB\n  python -m tests.fuzz input --case {json.dumps(repr(case)[:2_000])}"
        if wrong is None:
            return None
        kind = wrong.split(":")[0]
        small = smallest(case, lambda one: (runs(one) or "").split(":")[0] == kind, simplifications)
        text = repr(small) if len(repr(small)) < 2_000 else repr(case)[:2_000]
        return f"{(runs(small) or wrong)[:500]!r}\n  python -m tests.fuzz input --case {json.dumps(text)}"
