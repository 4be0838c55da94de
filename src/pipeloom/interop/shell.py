"""The commands of a launch script, read without running anything.

Variables, arrays, defaults (`${X:-4}`), `+=`, arithmetic, continued lines, functions, conditions on values that are known and the
sizes of `#SBATCH` lines are resolved; what only a run would tell (a variable of the environment, the output of a command, a value
set under another condition) is listed, and stays in the word as it was written.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import reduce
from itertools import pairwise
from typing import Any

from pipeloom.errors import UsageError

_ASSIGNS = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_BRACED = re.compile(r"(#?)([A-Za-z_]\w*|\d+)(?:\[([@*]|\d+)\])?(?:(:?[-=?+])(.*))?", re.DOTALL)
_OPERATOR = re.compile(r"(?:\d*(?=[<>]))?(&&|\|\||;;|<<<|<<-?|&>>?|[<>]&|>>|[<>;&|()\n])")
_FUNCTION = re.compile(r"(?:function\s+)?([A-Za-z_][\w-]*)\s*\(\s*\)\s*\{|function\s+([\w-]+)\s*\{")
_REDIRECTS = ("<<<", "&>", "&>>", "<&", ">&", ">>", "<", ">")
_OPENS, _CLOSES = ("if", "while", "until", "for", "case", "select", "{"), ("fi", "done", "esac", "}")
_KEYWORDS = (*_OPENS, *_CLOSES, "then", "else", "elif", "do", "!", "time")
_LOCALS = ("declare", "local", "typeset")
_DECLARES = ("export", "readonly", *_LOCALS)
_TESTS = ("[", "[[", "test", "((")
_SHELLS = ("sbatch", "bash", "sh")
_SILENT = (*_TESTS, *_DECLARES, "echo", "printf", "set", "shift", "unset")
_ENDS = " \t\n;&|()<>"
_LONGEST = 4_000_000  # characters: a script of assignments that double a text, or of functions that call each other, ends in time
_ARITHMETIC: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Mod: operator.mod, ast.FloorDiv: operator.floordiv,
    ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}  # fmt: skip
_COMPARED = {"-eq": ast.Eq, "-ne": ast.NotEq, "-lt": ast.Lt, "-le": ast.LtE, "-gt": ast.Gt, "-ge": ast.GtE}
# What says how many processes a launcher starts: of torchrun, DeepSpeed, mpirun and srun.
_PROCESSES = (
    ("nproc-per-node", "nnodes"), ("num-gpus", "num-nodes"), ("np",), ("ntasks",), ("ntasks-per-node", "nodes"),
)  # fmt: skip
# What a `#SBATCH` line says -> the variables in which slurm repeats it.
_SLURM = {
    "nodes": "SLURM_NNODES SLURM_JOB_NUM_NODES", "ntasks-per-node": "SLURM_NTASKS_PER_NODE",
    "ntasks": "SLURM_NTASKS SLURM_NPROCS", "gpus-per-node": "SLURM_GPUS_PER_NODE SLURM_GPUS_ON_NODE",
    "cpus-per-task": "SLURM_CPUS_PER_TASK",
}  # fmt: skip
_SHORT = {"N": "nodes", "n": "ntasks", "c": "cpus-per-task", "gres": "gpus-per-node"}

# Flags of launchers that do not say how many processes there are.
_LAUNCHERS = """
    *-per-* allow-run-as-root bind-to container-* cpu* export hostfile job-name kill-on-bad-exit label local-addr local-rank*
    log-dir logs-specs map-by master-* max-restarts mem* module monitor-interval mpi nnodes no-python node* np ntasks*
    num-gpus num-nodes output partition rank rdzv-* redirects role run-path standalone start-method tee time use-env
    virtual-local-rank wait
""".split()  # noqa: SIM905

Truth = bool | None
"""Of a condition; None: only a run would tell."""

_Values = dict[str, str | list[str]]
_States = dict[str, tuple[str | list[str] | None, str | None]]  # variable -> its value and doubt, to be restored


@dataclass(frozen=True)
class Command:
    """A simple command.

    Attributes:
        words: with variables resolved.
        unresolved: a sentence for each expansion in it that only a run would tell.
        values: variable -> value where the command starts, its own assignments among them.
    """

    words: tuple[str, ...]
    unresolved: tuple[str, ...]
    values: Mapping[str, str | list[str]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def program(self) -> int:
        """Number of words before the program's own, so of launchers."""
        for at, word in enumerate(self.words):
            module = word == "-m" and not "".join(self.words[at + 1 : at + 2]).startswith("torch.distributed")
            if module or word.endswith((".py", ".sh")):
                return at + 1
        for at, (before, word) in enumerate(pairwise(self.words), 1):
            takes = before.startswith("-") and "=" not in before
            if word[:1] == "$" and not takes and "torchrun" in self.words[:at]:
                return at + 1
        return 0

    @property
    def strange(self) -> list[str]:
        """Flags of launchers that are not known."""
        flags = [flag for flag, _ in flags_of(self.words[: self.program])]
        return [flag for flag in flags if not any(fnmatchcase(flag.replace("_", "-"), known) for known in _LAUNCHERS)]

    @property
    def processes(self) -> int:
        """Number of processes that the launchers start; 0: the text does not say it."""
        launchers = self.words[: self.program] or self.words
        given = dict[str, str]()
        if "srun" in launchers and not {"torchrun", "-m"} & {*launchers}:
            given = {key: str(self.values.get(names.split()[0], "")) for key, names in _SLURM.items()}
        for word, value in pairwise([part for each in launchers for part in each.split("=", 1)]):
            if word.startswith("-"):
                name = word.lstrip("-").replace("_", "-")
                given[_SHORT.get(name, name)] = value
        given.setdefault("nnodes", "1")
        for names in _PROCESSES:
            counts = [given.get(name, "") for name in names]
            if all(re.fullmatch(r"\d{1,7}", count) for count in counts):
                return math.prod(map(int, counts))
        return 0


def commands_of(text: str) -> list[Command]:
    """Return the commands of a script, or of a command line, in their order."""
    text = text.replace("\r\n", "\n")
    return list(_Script(text, _slurm(text, {})).commands())


def _slurm(text: str, values: Mapping[str, str | list[str]]) -> dict[str, str | list[str]]:
    """Return the variables that slurm sets for a script with these `#SBATCH` lines, which in a document name variables."""
    sizes = dict[str, str]()
    for written in re.findall(r"^#SBATCH[ \t]+(.*)$", text, re.MULTILINE):
        line = re.sub(r"\$\{?(\w+)\}?", lambda name: str(values.get(name[1], name[0])), written)
        for name, count in re.findall(r"--?([A-Za-z-]+)[ =]+(?:[A-Za-z]\w*:)*(\d{1,7})(?=\s|$)", line):
            sizes[_SHORT.get(name, name)] = count
    if "ntasks-per-node" in sizes:
        sizes.setdefault("ntasks", str(int(sizes["ntasks-per-node"]) * int(sizes.get("nodes", "1"))))
    return {name: sizes[key] for key, names in _SLURM.items() if key in sizes for name in names.split()}


def best_command(text: str, system: str) -> Command:
    """Return the command of a script that starts the run: the one with the most flags. Raises UsageError where there is none."""
    lines = re.sub(r"^[ \t]*#[^\n]*", "", text, flags=re.MULTILINE)
    commands = commands_of(lines.replace("\n", " ") if lines.lstrip().startswith("--") else text)
    if not any(word.startswith("--") for command in commands for word in command.words):
        raise UsageError(
            f"{system}: no command in this text has flags; give the script, or the line, that starts the run"
        )
    return max(commands, key=lambda each: sum(word.startswith("--") for word in each.words))


def flags_of(words: Sequence[str], ends: tuple[str, ...] = ()) -> Iterator[tuple[str, list[str]]]:
    """Yield (flag without its `--`, its values) of a command; a word that begins with one of `ends` is no value."""
    flag, given = "", list[str]()
    for word in [*words, "--"]:
        if not word.startswith(("--", *ends)):
            given.append(word)
            continue
        if flag:
            yield flag, given
        flag, equals, value = word[2:].partition("=") if word.startswith("--") else ("", "", "")
        given = [value] if equals else []


def _both(left: Truth, right: Truth) -> Truth:
    return False if left is False or right is False else None if left is None or right is None else True


def _negated(value: Truth) -> Truth:
    return None if value is None else not value


def _either(left: Truth, right: Truth) -> Truth:
    return _negated(_both(_negated(left), _negated(right)))


@dataclass
class _Block:
    """A compound command that is being read.

    Attributes:
        runs: whether the part that is being read runs.
        over: whether a part before it did.
        subject: of `case`; None: only a run would tell.
        waits: whether the pattern of a clause of `case` is next.
        function: the name of a function, and where its body begins.
        outer: variables outside a subshell, and what is not known of them.
    """

    word: str
    runs: Truth = True
    over: Truth = False
    subject: str | None = None
    waits: bool = False
    function: tuple[str, int] | None = None
    outer: tuple[_Values, dict[str, str]] | None = None


@dataclass
class _Script:
    """A text that is read from its begin to its end, and the variables so far with what is not known of them."""

    text: str
    values: _Values = field(default_factory=dict)
    doubts: dict[str, str] = field(default_factory=dict)
    functions: dict[str, str] = field(default_factory=dict)
    called: set[str] = field(default_factory=set)
    blocks: list[_Block] = field(default_factory=list)
    spent: list[int] = field(default_factory=lambda: [0])
    nested: int = 0
    states: _States = field(default_factory=dict)  # variables outside the function, where it has its own
    at: int = 0
    begin: int = 0
    status: Truth = True  # of the list of commands so far
    joint: str = ""  # of the list with what follows: "&&", "||" or nothing
    tested: bool = False  # whether a test says the status
    bracket: bool = False  # whether a test in [[ ]] goes on
    negative: bool = False
    unsure: bool = False  # whether what is assigned is not known
    document: str = ""  # what is given to the command that was read
    missing: list[str] = field(default_factory=list)
    prefix: _Values = field(default_factory=dict)  # variables of the command that is being read

    @property
    def here(self) -> str:
        return self.text[self.at : self.at + 1]

    @property
    def runs(self) -> Truth:
        """Truth of whether what is being read runs."""
        status = True if self.status is None and not self.tested and self.joint == "&&" else self.status
        chained = {"&&": status, "||": _negated(status)}.get(self.joint, True)
        return reduce(_both, (block.runs for block in self.blocks), chained)

    def commands(self) -> Iterator[Command]:
        """Yield the commands, and take over what the script assigns."""
        while self.at < len(self.text):
            words, assigned, ends = self._statement()
            runs, missing = self.runs, tuple(dict.fromkeys(self.missing))
            inner = words[words.index("-c") + 1 :][:1] if "-c" in words and not words[0].startswith("python") else []
            if words[:1] == ["eval"]:
                inner = [" ".join(words[1:])]
            if runs is False or not words:
                pass
            elif words[0] in self.functions:
                yield from self._call(words, runs, missing)
            elif inner and " " in inner[0]:
                launchers = words[: words.index("-c") - 1] if "-c" in words else []
                text = inner[0] if words[0] == "eval" else f"( {inner[0]}\n)"
                for command in self._inside(text, runs, missing, self.states):
                    yield replace(command, words=(*launchers, *command.words))
            elif words[0] in _SHELLS and self.document:
                self.values |= _slurm(self.document, self.values)
                text = self.document.replace("\\$", "$")
                yield from self._inside(f"( {text}\n)", runs, missing, self.states)
            elif words[0] in ("local", "unset"):
                self._forget(words, runs)
            elif words[0] == "shift" and isinstance(items := self.values.get("@"), list):
                self.values["@"] = items[int("".join(words[1:2]) or 1) if "".join(words[1:2]).isdigit() else 1 :]
            elif words[0] not in _SILENT:
                yield Command(tuple(words), missing, {**self.values, **self.prefix})
            self._finish(words, assigned, ends)
        for name in [] if self.nested else [name for name in self.functions if name not in self.called]:
            yield from self._inside(self.functions[name], None, (), {})  # another shell may call it

    def _call(self, words: Sequence[str], runs: Truth, missing: tuple[str, ...]) -> Iterator[Command]:
        """Yield the commands of a function; its arguments, and the variables of its own, end with it."""
        self.called.add(words[0])
        given = self.prefix | ({} if {"$@", "${@}", "$*"} & {*words} else {"@": list(words[1:])})
        states = self._states(given)
        self._restore({name: (value, None) for name, value in given.items()})
        yield from self._inside(self.functions[words[0]], runs, missing, states)
        self._restore(states)

    def _forget(self, words: Sequence[str], runs: Truth) -> None:
        """Take over `unset`, and `local` without a value."""
        names = [name for name in words[1:] if words[0] == "unset" or name not in self.states]
        if words[0] == "local":
            self.states |= self._states(names)
        for name in names if "-f" not in words else ():
            doubt = f"{name} is unset under a condition, which is not evaluated"
            self._restore({name: (None, None) if runs else (self.values.get(name), doubt)})

    def _states(self, names: Iterable[str]) -> _States:
        return {name: (self.values.get(name), self.doubts.get(name)) for name in names}

    def _restore(self, states: _States) -> None:
        tables: tuple[dict[str, Any], ...] = (self.values, self.doubts)
        for name, both in states.items():
            for table, state in zip(tables, both, strict=True):
                table[name] = state
                if state is None:
                    del table[name]

    def _inside(self, text: str, runs: Truth, missing: tuple[str, ...], states: _States) -> Iterator[Command]:
        """Yield the commands of a text that is run at this place, as a function or by another shell."""
        self.spent[0] += len(text) + 1000
        if self.nested >= 50 or self.spent[0] > _LONGEST:
            return
        inner = _Script(text, self.values, self.doubts, self.functions, self.called, [_Block("", runs)], self.spent)
        inner.nested, inner.states = self.nested + 1, states
        for command in inner.commands():
            yield replace(command, unresolved=tuple(dict.fromkeys((*missing, *command.unresolved))))

    def _finish(self, words: list[str], assigned: bool, ends: str) -> None:
        """Take over what a statement, and what ends it, say about those that follow."""
        if not words and not assigned:
            if ends not in ("\n", "("):
                self.joint = ""
        else:
            tests = bool(words) and (words[0] in _TESTS or self.bracket)
            result = self._test(words) if tests else {"true": True, ":": True, "false": False}.get(" ".join(words))
            result = True if not words and not self.unsure else result
            result = _negated(result) if self.negative else result
            join = {"&&": _both, "||": _either}.get(self.joint)
            self.status = join(self.status, result) if join else result
            self.tested = tests or (self.tested and join is not None)
            self.bracket = (self.bracket or words[:1] == ["[["]) and "]]" not in words
            self.joint = ends if ends in ("&&", "||") else ""
        block = self.blocks[-1] if self.blocks else None
        if ends == "(":
            self.blocks.append(_Block("(", self.runs, outer=(self.values, self.doubts)))
            self.values, self.doubts = dict(self.values), dict(self.doubts)
        elif ends == ")" and block and block.outer:
            self.values, self.doubts = block.outer
            self.blocks.pop()
        elif ends == ";;" and block:
            block.over, block.waits = _either(block.over, block.runs), block.word == "case"

    def _test(self, words: Sequence[str]) -> Truth:
        """Return what a test says."""
        operands = [word for word in words if word not in ("[", "[[", "]", "]]", "((")]
        operands = operands[words[0] == "test" :]
        negative = operands[:1] == ["!"]
        operands = operands[negative:]
        result: Truth = None
        if len(operands) == 2 and operands[0] in ("-z", "-n"):
            result = (operands[1] == "") == (operands[0] == "-z")
        elif len(operands) == 1:
            result = operands[0] != "0" if words[0] == "((" else operands[0] != "-n"
        elif len(operands) == 3 and operands[1] in ("=", "==", "!="):
            left, sign, right = operands
            same = fnmatchcase(left, right) if words[0] == "[[" or self.bracket else left == right
            result = same != (sign == "!=")
        elif len(operands) == 3 and operands[1] in _COMPARED and operands[0].isdigit() and operands[2].isdigit():
            result = bool(_ARITHMETIC[_COMPARED[operands[1]]](int(operands[0]), int(operands[2])))
        return None if self.missing else _negated(result) if negative else result

    def _statement(self) -> tuple[list[str], bool, str]:
        """Return (the words of the next simple command, whether something is assigned, what ends it); keywords are taken over."""
        words, heredocs = list[str](), list[str]()
        states: _States = {}
        self.missing, self.prefix, self.negative, self.unsure, ends = [], {}, False, False, ""
        self.document = ""
        while self.at < len(self.text):
            if self._clause() or self._blank():
                continue
            assigns = _ASSIGNS.match(self.text, self.at)
            if not words and (function := self._passed(_FUNCTION)):
                self.blocks.append(_Block("{", False, function=(function[1] or function[2], self.at)))
            elif not words and self.text.startswith("((", self.at):
                self.begin = self.at
                words = ["((", self._computed(self._nested("(", ")"))]
            elif match := self._passed(_OPERATOR):
                if match[1] in ("<<", "<<-"):
                    self._blank()
                    heredocs.append("".join(self._word()))
                elif match[1] in _REDIRECTS:
                    while self._blank():
                        pass
                    self._word()
                    if words and words[0] == "[[":
                        self.missing.append("an order of texts")
                else:
                    if match[1] == "\n":
                        self._skip(heredocs)
                    ends = match[1]
                    break
            elif assigns and (not words or words[0] in _DECLARES):
                states = self._states([assigns[1]]) | states
                self._assign(assigns, local=words[:1] != [] and words[0] in _LOCALS and "-g" not in words)
            else:
                if states and not words:  # `X=1 command`: it is the command's alone
                    self.prefix = {name: self.values[name] for name in states if name in self.values}
                    self._restore(states)
                    states = {}
                plain = self.here not in "\"'$\\"
                words += self._word()
                if len(words) == 1 and plain and words[0] in _KEYWORDS:
                    self._keyword(words.pop())
        return words, bool(states), ends

    def _blank(self) -> bool:
        """Pass what separates words; return whether there was any."""
        return self._passed(r"(?:[ \t]|\\\n)+|#[^\n]*") is not None

    def _passed(self, pattern: str | re.Pattern[str]) -> re.Match[str] | None:
        match = re.compile(pattern).match(self.text, self.at)
        self.at = match.end() if match else self.at
        return match

    def _skip(self, heredocs: Sequence[str]) -> None:
        for end in heredocs:
            match = re.compile(rf"^\t*{re.escape(end)}$", re.MULTILINE).search(self.text, self.at)
            self.document = self.text[self.at : match.start() if match else None]
            self.at = match.end() if match else len(self.text)

    def _clause(self) -> bool:
        """Pass the pattern of a clause of `case`, where one is next; return whether there was any."""
        block = self.blocks[-1] if self.blocks else None
        if block is None or not block.waits:
            return False
        self._passed(r"(?:\s|#[^\n]*\n)*\(?[ \t]*")
        block.waits = False
        if re.compile(r"esac\b").match(self.text, self.at):
            return True
        matches: Truth = False
        for pattern in self._until(")").split("|"):
            known = block.subject is not None and "$" not in pattern
            same = fnmatchcase(block.subject or "", pattern.strip().strip("\"'")) if known else None
            matches = _either(matches, same)
        block.runs = _both(matches, _negated(block.over))
        self.status, self.joint = True, ""
        return True

    def _keyword(self, word: str) -> None:
        block = self.blocks[-1] if self.blocks else None
        if word == "!":
            self.negative = not self.negative
        elif word == "case":
            self._blank()
            self.missing = []
            subject = " ".join(self._word(split=False))
            self.blocks.append(_Block(word, False, subject=None if self.missing else subject, waits=True))
            self.missing = []
            self._passed(r"\s*in\b")
        elif word in ("for", "select"):
            self._blank()
            if name := _NAME.match(self.text, self.at):
                self.doubts[name[0]] = f"line {self._line()}: ${name[0]} is that of a loop"
            self._until(";", "\n")
            self.blocks.append(_Block(word, None))
        elif word in _OPENS:
            self.blocks.append(_Block(word, self.runs if word == "{" else True))
        elif block is None:
            return
        elif word == "then":
            block.runs = _both(self.status, _negated(block.over))
        elif word == "do" and block.word in ("while", "until"):
            goes = self.status if block.word == "while" else _negated(self.status)
            block.runs = None if goes else goes
        elif word in ("elif", "else"):
            block.over = _either(block.over, block.runs)
            block.runs = _negated(block.over)
        elif word in _CLOSES:
            self.blocks.pop()
            if block.function:
                self.functions[block.function[0]] = self.text[block.function[1] : self.at - 1]
        if word not in ("!", "time"):
            self.status, self.joint, self.tested = True, "", False

    def _line(self) -> int:
        return self.text.count("\n", 0, self.at) + 1

    def _until(self, *ends: str) -> str:
        """Return the text before the first of these ends, and pass both."""
        stop = min((at for end in ends if (at := self.text.find(end, self.at)) >= 0), default=len(self.text))
        inside, self.at = self.text[self.at : stop], stop + 1
        return inside

    def _assign(self, match: re.Match[str], *, local: bool) -> None:
        name, adds, line, self.at = match[1], bool(match[2]), self._line(), match.end()
        before, self.missing = self.missing, []
        value = self._array() if self.here == "(" else " ".join(self._word(split=False))
        missing, self.missing = self.missing, before
        self.unsure, runs = bool(missing), self.runs
        if runs is False:
            return
        if local and name not in self.states:
            self.states |= self._states([name])
        earlier = self.values.get(name)
        if adds and isinstance(earlier, list):
            value = [*earlier, *([value] if isinstance(value, str) else value)]
        elif adds and isinstance(earlier, str) and isinstance(value, str):
            value = earlier + value
        self.spent[0] += len(value) + sum(map(len, value))
        if self.spent[0] > _LONGEST:
            missing.append(f"line {line}: {name} is longer than {_LONGEST:,} characters")
            value = ""
        if runs is None:
            self.doubts[name] = f"line {line}: {name} is set under a condition, which is not evaluated"
        elif missing:
            self.doubts[name] = missing[0]
        elif not adds:
            self.doubts.pop(name, None)
        if runs or name not in self.values or adds:
            self.values[name] = value

    def _array(self) -> str | list[str]:
        items = list[str]()
        self.at += 1
        while self._passed(r"(?:[\s;&|(<>]|\\\n|#[^\n]*)*") and self.at < len(self.text) and self.here != ")":
            items += self._word()
        self.at += 1
        return items

    def _word(self, ends: str = _ENDS, *, split: bool = True) -> list[str]:
        """Return the words that a word becomes: an array in quotes is one for each element, a text without quotes is split."""
        fields: list[str] = []
        joins = False

        def add(texts: list[str]) -> None:
            nonlocal joins
            if texts and joins:
                fields[-1] += texts[0]
            fields.extend(texts[joins:])
            joins = bool(fields)

        while self.at < len(self.text) and self.here not in ends:
            if self.text.startswith("\\\n", self.at):
                self.at += 2
            elif self.here == "\\":
                add([self.text[self.at + 1 : self.at + 2]])
                self.at += 2
            elif self.here == "'":
                self.at += 1
                add([self._until("'")])
            elif self.here == '"':
                for texts in list(self._quoted()) or [[""]]:
                    add(texts)
            elif self.here in "$`":
                text = " ".join(self._expansion())
                joins = joins and not (split and text[:1].isspace())
                add(text.split() if split else [text])
                joins = joins and not (split and text[-1:].isspace())
            else:
                add([self._run(ends + "\\'\"$`")])
        return fields

    def _run(self, ends: str) -> str:
        match = re.compile(f"[^{re.escape(ends)}]+").match(self.text, self.at)
        run = match[0] if match else self.here
        self.at += len(run)
        return run

    def _quoted(self) -> Iterator[list[str]]:
        self.at += 1
        while self.at < len(self.text) and self.here != '"':
            if self.here == "\\":
                escaped = self.text[self.at : self.at + 2]
                self.at += 2
                yield ["" if escaped == "\\\n" else escaped[1:] if escaped[1:] in ('"', "$", "\\", "`") else escaped]
            elif self.here in "$`":
                yield self._expansion()
            else:
                yield [self._run('\\"$`')]
        self.at += 1

    def _expansion(self) -> list[str]:
        """Return what stands for an expansion: a text, or the elements of an array."""
        self.begin, sign, self.at = self.at, self.here, self.at + 1
        if sign == "`":
            return [self._unknown(f"the output of a command, $({(text := self._until('`')):.60})", f"$({text})")]
        if self.here == "'":
            self.at += 1
            return [self._until("'")]
        if self.here not in ("{", "("):
            name = self._passed(_NAME)
            if name and name[0] in "@*" and isinstance(items := self.values.get("@"), list):
                return list(items)
            return [self._variable(name[0]) if name else "$"]
        text = self._nested(self.here, "}" if self.here == "{" else ")")
        if text.startswith("(("):
            return [self._computed(text)]
        if text.startswith("("):
            return [self._unknown(f"the output of a command, $({text[1:-1]:.60})")]
        array = re.fullmatch(r"([A-Za-z_]\w*)\[@\]|(@)", text[1:-1])
        if array and isinstance(items := self.values.get(array[1] or array[2]), list):
            self._note(array[1] or array[2])
            return list(items)
        return [self._variable(text[1:-1])]

    def _nested(self, opening: str, closing: str) -> str:
        begin, depth = self.at, 0
        while self.at < len(self.text):
            depth += (self.here == opening) - (self.here == closing)
            self.at += 1
            if not depth:
                break
        return self.text[begin : self.at]

    def _variable(self, text: str) -> str:
        match = _BRACED.fullmatch(text)
        given = self.values.get("@")
        if text == "#":  # a script is read as if it had no arguments, which is what their defaults are for
            return str(len(given or ()))
        if match is None:
            words = "the arguments of the script, $@" if text in ("@", "*") else f"${{{text:.60}}}"
            return self._unknown(words)
        counts, name, index, default, other = match.groups()
        value = self.values.get(name)
        if name.isdigit() and isinstance(given, list):
            value = "".join(given[int(name) - 1 : int(name)])
        if isinstance(value, list):
            if counts:
                return str(len(value))
            items = dict(enumerate(value))
            value = " ".join(value) if index in ("@", "*") else items.get(int(index or 0))
        if default and default[-1] == "+":
            return self._text(other) if value else ""
        if value is None or (default and default[0] == ":" and not value):
            if not default or default[-1] == "?":
                return self._unknown(self.doubts.get(name) or f"${name}, which the script does not set")
            value = self._text(other)
            if default[-1] == "=":
                self.values[name] = value
            return value
        self._note(name)
        return str(len(value)) if counts else value

    def _text(self, text: str) -> str:
        """Return a text behind `:-` with its own expansions in their place."""
        inner = _Script(text, self.values, self.doubts, self.functions, missing=self.missing)
        return " ".join(inner._word("", split=False))

    def _computed(self, text: str) -> str:
        try:
            inside = self._text(text[2:-2])
            if "$" not in inside:
                inside = re.sub(r"\b[A-Za-z_]\w*", lambda name: self._variable(name[0]), inside)
            if "$" in inside:  # the reason is listed
                return self.text[self.begin : self.at]
            inside = inside.replace("/", "//").replace("&&", " and ").replace("||", " or ")
            inside = re.sub(r"^(.*)\?(.*):(.*)$", r"(\2) if (\1) else (\3)", inside.strip())
            return str(_number(ast.parse(inside.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return self._unknown(f"${text:.60}")

    def _note(self, name: str) -> None:
        if name in self.doubts:
            self.missing.append(self.doubts[name])

    def _unknown(self, words: str, text: str = "") -> str:
        self.missing.append(words)
        return text or self.text[self.begin : self.at]


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        result = _ARITHMETIC[type(node.op)](_number(node.left), _number(node.right))
        if abs(result) < 2**63:
            return result
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _ARITHMETIC:
        return int(_ARITHMETIC[type(node.ops[0])](_number(node.left), _number(node.comparators[0])))
    if isinstance(node, ast.BoolOp):
        values = [bool(_number(value)) for value in node.values]
        return int(all(values) if isinstance(node.op, ast.And) else any(values))
    if isinstance(node, ast.IfExp):
        return _number(node.body if _number(node.test) else node.orelse)
    raise ValueError
