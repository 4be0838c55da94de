"""The commands of a launch script, read without running anything.

Variables, arrays, defaults (`${X:-4}`), `+=`, arithmetic, functions, subshells, pipelines, positional arguments (`set --`),
documents that are scripts, conditions on values that are known and the sizes of `#SBATCH` lines are resolved; what only a run
would tell (a variable of the environment, the output of a command, a value set under another condition) is listed, and stays in
the word as it was written.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Any

from pipeloom.errors import UsageError
from pipeloom.interop.launchers import Command, Variables, slurm_variables
from pipeloom.interop.shell_syntax import Token, past, tokens_of

_ASSIGNS = re.compile(r"([A-Za-z_]\w*)(?:\[([^]=]*)\])?(\+?)=")
_BRACED = re.compile(r"(#?)([A-Za-z_]\w*|\d+|[@*])(?:\[(.*?)\])?(?:(:?[-=?+])(.*))?", re.DOTALL)
_NAME = re.compile(r"\b[A-Za-z_]\w*")
_UNQUOTED = re.compile(r"[^\\$`]*")
_DECLARES = ("export", "readonly", "declare", "local", "typeset")
_COMPOUND = {
    "{": "group", "(": "group", "if": "branches", "case": "case",
    "while": "loop", "until": "loop", "for": "loop", "select": "loop",
}  # fmt: skip
"""Keyword -> the method that takes over what it begins."""
_TESTS = ("[", "[[", "test", "((")
# Commands that are run for their status.
_ASKS = (*_TESTS, "grep", "command", "which", "type", "hash", "pgrep", "diff", "cmp")
_SHELLS = ("sbatch", "bash", "sh", "zsh")
_PASS_ON = ("srun", ".", "source", *_SHELLS)  # what runs a script that is named behind it
_ELSEWHERE = ("ssh", "pdsh", "tmux", "screen", "su")  # what runs the text in its last word
_READERS = ("read", "mapfile", "readarray", "getopts", "let")  # what sets the variables that its words name
_CHANGES = ("set", "shift", "unset", "exit", "return")
_SILENT = (*_TESTS, *_DECLARES, *_READERS, *_CHANGES, "echo", "printf", "trap", "chmod", "cat", "tee")
_ARGUMENTS = ("$@", "${@}", "$*", "${*}")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)")  # another shell may take 010 for octal
_LONGEST = 4_000_000  # characters: a script of assignments that double a text, or of functions that call each other, ends in time
_ARITHMETIC: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: lambda left, right: abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1),  # it truncates
    ast.Mod: lambda left, right: abs(left) % abs(right) * (-1 if left < 0 else 1),
    ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}  # fmt: skip
_COMPARED = {"-eq": ast.Eq, "-ne": ast.NotEq, "-lt": ast.Lt, "-le": ast.LtE, "-gt": ast.Gt, "-ge": ast.GtE}

Truth = bool | None
"""Of a condition; None: only a run would tell."""

_States = dict[str, tuple[Any, str | None]]  # variable -> its value and doubt, to be restored


def commands_of(text: str) -> list[Command]:
    """Return the commands of a script, or of a command line, in their order. Raises UsageError for one nested too deeply."""
    text = text.replace("\r\n", "\n")
    script = _Script(slurm_variables(text) | {"@": {"1": "$@"}}, {"@": "the arguments of the script, $@"})
    try:
        script.inside(tokens_of(text), 0, True)
        for name in [each for each in script.functions if each not in script.called]:
            script.exited = False
            script.inside(*script.functions[name][:2], None)  # another shell may call it
    except RecursionError:
        raise UsageError("the script has too many commands inside each other") from None
    return script.found


def best_command(text: str, system: str, known: Callable[[str], bool]) -> Command:
    """Return the command of a script that starts the run: the one with the most flags that the system has.

    Args:
        known: whether a word is one of the system.

    Raises UsageError where there is none.
    """
    lines = re.sub(r"^[ \t]*#[^\n]*", "", text, flags=re.MULTILINE)
    commands = commands_of(lines.replace("\n", " ") if lines.lstrip().startswith("--") else text)

    counts = {each: sum(map(known, each.words)) for each in commands}
    best = max(counts, key=lambda each: counts[each], default=None)
    if best is not None and counts[best]:
        most = [each.words for each, count in counts.items() if 2 * count >= counts[best]]
        jobs = len({words[[*map(known, words)].index(True) :] for words in most})  # however they are started
        more = [f"the text starts {jobs} jobs: the one with the most flags is read, or the first of them"] * (jobs > 1)
        return replace(best, unresolved=(*best.unresolved, *more))
    starts = [each for each in commands if {*_PASS_ON, "torchrun", "python"} & {*each.words}] or commands
    near = max(starts, key=lambda each: len(each.words), default=Command((), ()))
    words = f"; nearest: `{' '.join(near.words):.120}`" if near.words else ""
    raise UsageError(
        f"{system}: no command in this text has flags of it; give the script, or the line, that starts the run{words}"
    )


def _both(left: Truth, right: Truth) -> Truth:
    return False if left is False or right is False else None if left is None or right is None else True


def _negated(value: Truth) -> Truth:
    return None if value is None else not value


def _either(left: Truth, right: Truth) -> Truth:
    return _negated(_both(_negated(left), _negated(right)))


def _matches(text: str, pattern: str) -> Truth:
    """Return whether a text has a pattern; classes, extended patterns and escapes are not evaluated."""
    return None if re.search(r"\\|\[\^|\[\[[:.=]|[?*+@!]\(", pattern) else fnmatchcase(text, pattern)


@dataclass
class _Script:
    """Tokens that are being read, the variables so far with what is not known of them, and the commands that were found."""

    values: Variables
    doubts: dict[str, str]
    tokens: Sequence[Token] = ()
    at: int = 0
    functions: dict[str, tuple[Sequence[Token], int, Truth]] = field(default_factory=dict)  # body; is it set?
    files: dict[str, str] = field(default_factory=dict)  # that the script itself writes
    called: set[str] = field(default_factory=set)
    found: list[Command] = field(default_factory=list)
    locals: _States = field(default_factory=dict)  # variables outside the function, where it has its own
    missing: list[str] = field(default_factory=list)  # of the words that are being expanded
    line: int = 0
    spent: int = 0
    nested: int = 0
    tested: bool = False  # whether a test says the status of the last command
    piped: str = ""  # what the part of a pipeline before this one writes
    forks: bool = False  # whether there is a pipeline, or a command in the background
    returned: Truth = False  # whether the function has ended
    exited: bool = False
    ending: str = ""  # the doubt whether what follows runs
    place: str = "under a condition, which is not evaluated"  # of what may not run

    @property
    def here(self) -> str:
        """Text of the next token; "": there is none."""
        return self.tokens[self.at].text if self.at < len(self.tokens) else ""

    def _passed(self, *words: str) -> bool:
        """Pass a token where it is one of these."""
        passed = self.here in words and self.here != ""
        self.at += passed
        return passed

    def run(self, runs: Truth, *ends: str) -> Truth:
        """Take over a list of commands up to one of `ends`, and return its status.

        Args:
            runs: whether it runs.
        """
        status: Truth = True
        tested, joint, state = False, "", None
        while self.at < len(self.tokens):
            if self._passed(";", "&", "\n"):
                continue
            if self.here in (*ends, ")", ";;", ";&", ";;&"):
                break
            state = state if joint else self._state()
            known = True if status is None and not tested and joint == "&&" else status
            result = self._pipeline(_both(runs, {"&&": known, "||": _negated(known)}.get(joint, True)))
            tested = self.tested or (tested and joint != "")
            status = {"&&": _both, "||": _either}.get(joint, lambda _, now: now)(status, result)
            joint = "&&" if self._passed("&&") else "||" if self._passed("||") else ""
            if state and not joint and self.here == "&":
                self._leave(state)
                status = True
        self.tested = tested
        return status

    def _pipeline(self, runs: Truth) -> Truth:
        negated = False
        while self.here in ("!", "time"):
            negated ^= self._passed("!")
            self._passed("time")
        state = self._state()
        result = self._command(runs)
        if state and self.here in ("|", "|&"):
            self._leave(state)
            negated, result = True, None
        while self._passed("|", "|&"):
            with self._subshell():
                self._command(runs)
        self.piped = ""
        self.tested |= negated
        return _negated(result) if negated else result

    def _state(self) -> tuple[Any, ...] | None:
        """Return what a subshell leaves as it is, where there may be one."""
        if not self.forks:
            return None
        return dict(self.values), dict(self.doubts), self.locals, self.returned, self.exited, self.ending

    def _leave(self, state: tuple[Any, ...]) -> None:
        self.values, self.doubts, self.locals, self.returned, self.exited, self.ending = state

    @contextmanager
    def _subshell(self) -> Iterator[None]:
        state = self.values, self.doubts, self.locals, self.returned, self.exited, self.ending
        self.values, self.doubts, self.locals = dict(self.values), dict(self.doubts), {}
        self.spent += len(self.values)
        try:
            yield
        finally:
            self._leave(state)

    def _command(self, runs: Truth) -> Truth:
        """Take over one command, and return its status."""
        while self._passed("\n"):
            pass
        word, begin, self.tested = self.here, self.at, False
        if begin >= len(self.tokens):
            return None
        runs = _both(runs, _negated(_either(self.returned, self.exited)))
        if self._passed("function") or [each.text for each in self.tokens[begin + 1 : begin + 3]] == ["(", ")"]:
            name, self.at = self.here, self.at + 1
            self.at += 2 * (self.here == "(")
            if runs is not False:
                self.functions[name] = self.tokens, self.at, runs
            self._command(False)
            return True
        if word not in _COMPOUND:
            return self._simple(runs)
        self.at += 1
        result: Truth = getattr(self, f"_{_COMPOUND[word]}")(runs, word)
        self.tested |= _COMPOUND[word] != "group"
        while self.at < len(self.tokens) and self.tokens[self.at].kind not in ("word", "operator"):
            self.at += 1 + (self.tokens[self.at].kind == "redirect")
        return result

    def _group(self, runs: Truth, word: str) -> Truth:
        with self._subshell() if word == "(" else nullcontext():
            result = self.run(runs, "}")
        self._passed("}" if word == "{" else ")")
        return result

    def _branches(self, runs: Truth, _: str) -> None:
        over: Truth = False
        more = True
        while more:
            left = _both(runs, _negated(over))
            last = self.tokens[self.at - 1].text == "else"
            holds = True if last else self.run(left, "then", "fi")
            self._passed("then")
            self.run(_both(left, holds), "elif", "else", "fi")
            over = _either(over, holds)
            more = self._passed("elif", "else")
        self._passed("fi")

    def _loop(self, runs: Truth, word: str) -> None:
        goes: Truth = None
        if word in ("while", "until"):
            goes = False if self.run(runs, "do", "done") is (word == "until") else None
        else:
            self.doubts[self.here] = f"line {self.tokens[self.at - 1].line}: ${self.here} is that of a loop"
            while self.here not in (";", "\n", "do", ""):
                self.at += 1
            self.run(False, "do")
        self._passed("do")
        place, self.place = self.place, "in a loop, which is not unrolled"
        self.run(_both(runs, goes), "done")
        self.place = place
        self._passed("done")

    def _case(self, runs: Truth, _: str) -> None:
        over: Truth = False
        falls = False
        self.missing = []
        subject, self.at = self.text(self.here), self.at + 1
        unknown, end = bool(self.missing), len(self.tokens)
        while self.at < end and not self._passed("esac"):
            if self._passed("in", "\n", ";;", ";&", ";;&", "("):
                continue
            holds: Truth = False
            while self.at < end and not self._passed(")"):
                self.missing = []
                pattern = "".join(self.expand(self.here, split=False, pattern=True))
                same = None if unknown or self.missing else _matches(subject, pattern)
                holds, self.at = _either(holds, same), self.at + 1
                self._passed("|")
            took = _both(runs, None if falls else _both(_negated(over), holds))
            self.run(took, "esac")
            falls |= took is not False and self.here in (";&", ";;&")
            over = _either(over, holds)

    def _simple(self, runs: Truth) -> Truth:
        raws, outputs, document = list[str](), list[str](), self.piped
        self.missing, self.line = [], self.tokens[self.at].line
        while self.at < len(self.tokens):
            text, kind, _ = self.tokens[self.at]
            if kind == "operator" and (raws[:1] != ["[["] or raws[-1] == "]]" or text == "\n"):
                break
            self.at += 1
            if kind == "redirect" and raws[:1] != ["[["]:
                outputs += [self.here] * (text in (">", ">>", ">|", "&>", "&>>"))
                self.at += 1
            elif kind in ("document", "literal", "string") and runs is not False:
                string = kind == "string"
                document = text if kind == "literal" else self.text(text) if string else self._quoted(text)
            else:
                raws.append(text)
        self.at += not raws and not outputs and self.here not in ("\n", "")
        if runs is False or not raws:
            return None
        count = next((at for at, raw in enumerate(raws) if not _ASSIGNS.match(raw)), len(raws))
        states = self._states(match[1] for raw in raws[:count] if (match := _ASSIGNS.match(raw)))
        unsure = any([self._assign(raw, runs) for raw in raws[:count]])
        if count == len(raws):
            return None if unsure else True
        prefix = {name: self.values[name] for name in states if name in self.values}
        self._restore(states if count else {})  # `X=1 command`: it is the command's alone
        words = ["((", self._computed(raws[count])] if raws[count].startswith("((") else list[str]()
        for raw in raws[count:] if not words else ():
            if words and words[0] in _DECLARES and _ASSIGNS.match(raw):
                self._assign(raw, runs, local=words[0] not in ("export", "readonly") and "-g" not in words)
            else:
                pattern = words[:1] == ["[["] and words[-1] in ("=", "==", "!=")
                words += self.expand(raw, split=words[:1] != ["[["], pattern=pattern)
        missing = tuple(dict.fromkeys(self.missing))
        self.tested = words[:1] != [] and words[0] in _ASKS
        if self.tested and words[0] in _TESTS:
            return None if missing else self._test(words)
        return self._obey(words, missing, runs, prefix, document, outputs) if words else None

    def _obey(
        self, words: list[str], missing: tuple[str, ...], runs: Truth, prefix: Variables, document: str, outputs: list[str],
    ) -> Truth:  # fmt: skip
        """Run what a function, another shell or a script of this one has, or take over what a command does; others are found.

        Returns its status.
        """
        status: Truth = {"true": True, ":": True, "false": False}.get(words[0])
        first, shell = PurePosixPath(words[0]).name, next((at for at, word in enumerate(words) if word in _SHELLS), -1)
        script = next((at for at, word in enumerate(words) if word.removeprefix("./") in self.files), -1)
        options = [at for at, word in enumerate(words) if at > shell >= 0 and re.fullmatch(r"-\w*c", word)]
        given, launchers, text = prefix, list[str](), ""
        if words[0] in self.functions:
            self.called.add(words[0])
            given = prefix | {"@": _numbered(words[1:])}
            states = self._states(given)
            self._restore({name: (value, None) for name, value in given.items()})
            if missing and {*_ARGUMENTS} & {*words}:
                self.doubts["@"] = missing[0]
            tokens, at, defined = self.functions[words[0]]
            status = self.inside(tokens, at, _both(runs, defined), (), missing, states)
            self._restore(states)
        elif first == "eval":
            status = self.inside(tokens_of(" ".join(words[1:])), 0, runs, (), missing, self.locals)
        elif first in _ELSEWHERE and " " in words[-1]:
            text = words[-1]
        elif options and options[0] + 1 < len(words):
            text, launchers = words[options[0] + 1], words[:shell]
        elif script >= 0 and (script == 0 or {*words[:script]} & {*_PASS_ON}):
            text, launchers = self.files[words[script].removeprefix("./")], words[:script] if first == "srun" else []
            given = prefix | {"@": _numbered(words[script + 1 :])}
        elif shell >= 0 and document:
            text = document
        elif first in ("cat", "tee"):
            self.piped = document
            targets = [name for raw in outputs for name in self.expand(raw)] + words[1:] * (first == "tee")
            self.files |= dict.fromkeys((name.removeprefix("./") for name in targets), document) if document else {}
        elif first not in _SILENT:
            values = {name: value for name, value in (self.values | prefix).items() if name != "@"}
            doubts = (*missing, self.ending) if self.ending else missing
            self.found.append(Command(tuple(words), doubts, values))
        else:
            self._set(words, missing, runs, document if "IFS" not in self.values | prefix else "")
        if text:
            with self._subshell():
                self.values |= given | slurm_variables(text, words[1:] if first == "sbatch" else ())
                self.inside(tokens_of(text), 0, runs, launchers, missing)
        if first == "exec" and len(words) > 1:
            self._end(words[:1], runs)
        return status

    def _set(self, words: Sequence[str], missing: Sequence[str], runs: Truth, document: str) -> None:
        """Take over a command of the shell itself."""
        if words[0] in ("local", "unset"):
            self._forget(words, runs)
        elif words[0] == "shift" and isinstance(items := self.values.get("@"), dict):
            number = int(words[1]) if len(words) > 1 and words[1].isdigit() else 1
            self.values["@"] = _numbered(list(items.values())[number:])
        elif words[0] == "set" and "--" in words:
            doubt = missing[0] if missing else self.doubts.get("@") if {*_ARGUMENTS} & {*words} else None
            self._restore({"@": (_numbered(words[words.index("--") + 1 :]), doubt)})
        elif words[0] in _READERS:
            self._read(words, document if runs else "")
        elif words[0] in ("exit", "return"):
            self._end(words, runs)

    def _end(self, words: Sequence[str], runs: Truth) -> None:
        """Take over `return`, and `exit`: one that tells of a failure is a doubt, since a script is read for what it starts."""
        fails = re.fullmatch("0*[1-9][0-9]*", "".join(words[1:2])) is not None
        if words[0] == "return":
            self.returned = _either(self.returned, runs if self.nested > 1 else None)
        elif runs and not fails:
            self.exited = True
        elif runs or not fails:
            self.ending = f"line {self.line}: the script may end here, by `{' '.join(words)}`"

    def inside(
        self, tokens: Sequence[Token], at: int, runs: Truth, launchers: Sequence[str] = (), missing: Sequence[str] = (),
        states: _States | None = None,
    ) -> Truth:  # fmt: skip
        """Run the command at a token, or another script, at this place, and return its status."""
        self.spent += 1000
        if self.nested >= 50 or self.spent > _LONGEST:
            return None
        begin, outer = len(self.found), (self.tokens, self.at, self.locals, self.piped, self.returned)
        self.tokens, self.at, self.locals, self.piped = tokens, at, {} if states is None else states, ""
        self.returned = False
        self.nested += 1
        status = self._command(runs) if at else None
        self.forks |= not at and any(kind == "operator" and text in ("|", "|&", "&") for text, kind, _ in tokens)
        while not at and self.at < len(tokens):
            status = self.run(runs)
            self.at += 1
        self.nested -= 1
        if self.returned is not False:
            status, self.tested = None, True
        self.tokens, self.at, self.locals, self.piped, self.returned = outer
        for place, each in enumerate(self.found[begin:], begin):
            doubts = tuple(dict.fromkeys((*missing, *each.unresolved)))
            self.found[place] = replace(each, words=(*launchers, *each.words), unresolved=doubts)
        return status

    def _read(self, words: Sequence[str], document: str) -> None:
        """Take over a command that sets variables: a plain `read` of a text, others as what only a run would tell."""
        flags, text = " ".join(words[1:-1]), document.strip(" \t\n")
        known = words[0] == "read" and document != "" and re.fullmatch("(-r ?)?(-r?d )?", flags) is not None
        known = known and ("d" in flags or "\n" not in text) and ("r" in flags or "\\" not in text)
        for name in [match[0] for word in words[1:] if (match := _NAME.match(word))]:
            value = text if known else self.values.get(name)
            self._restore({name: (value, None if known else f"line {self.line}: {name} is set by `{words[0]}`")})

    def _forget(self, words: Sequence[str], runs: Truth) -> None:
        """Take over `unset`, and `local` without a value."""
        names = [name for name in words[1:] if words[0] == "unset" or name not in self.locals]
        if words[0] == "local":
            self.locals |= self._states(names)
        for name in names if "-f" not in words else ():
            doubt = f"{name} is unset {self.place}"
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

    def _test(self, words: Sequence[str]) -> Truth:
        """Return what a test says."""
        for sign, join in (("||", _either), ("&&", _both)):
            if words[0] == "[[" and sign in words:
                at = words.index(sign)
                return join(self._test([*words[:at], "]]"]), self._test(["[[", *words[at + 1 :]]))
        operands = [word for word in words[1:] if word not in ("]", "]]")]
        negative = operands[:1] == ["!"]
        operands = operands[negative:]
        result: Truth = None
        if len(operands) == 2 and operands[0] in ("-z", "-n"):
            result = (operands[1] == "") == (operands[0] == "-z")
        elif len(operands) == 1:
            result = operands[0] not in (("0",) if words[0] == "((" else ("",))
        elif len(operands) == 3 and operands[1] in ("=", "==", "!="):
            left, sign, right = operands
            same = _matches(left, right) if words[0] == "[[" else left == right
            result = _negated(same) if sign == "!=" else same
        elif len(operands) == 3 and operands[1] in _COMPARED and all(map(_NUMBER.fullmatch, operands[::2])):
            result = bool(_ARITHMETIC[_COMPARED[operands[1]]](int(operands[0]), int(operands[2])))
        return _negated(result) if negative else result

    def _assign(self, raw: str, runs: Truth, *, local: bool = False) -> bool:
        """Take over an assignment; return whether its value is not known."""
        match = _ASSIGNS.match(raw)
        assert match is not None
        name, key, adds, text = match[1], match[2], bool(match[3]), raw[match.end() :]
        before, self.missing = self.missing, []
        value: Any = _array(self, text) if text.startswith("(") else self.text(text)
        if key is not None:
            value, adds = {self.text(key): value}, True
        missing, self.missing = self.missing, before
        if local and name not in self.locals:
            self.locals |= self._states([name])
        earlier = self.values.get(name)
        if isinstance(earlier, str) and isinstance(value, dict):
            earlier = {"0": earlier}
        if isinstance(earlier, dict) and isinstance(value, str) and not local:
            value, key, adds = {"0": (earlier.get("0", "") if adds else "") + value}, "0", True
        if adds and isinstance(earlier, dict):
            items = value if key else {str(at): item for at, item in enumerate(value.values(), len(earlier))}
            value = earlier | items
        elif adds and isinstance(earlier, str) and isinstance(value, str):
            value = earlier + value
        self.spent += len(value) + sum(map(len, value))
        if self.spent > _LONGEST:
            missing.append(f"line {self.line}: {name} is longer than {_LONGEST:,} characters")
            value = ""
        if runs is None:
            self.doubts[name] = f"line {self.line}: {name} is set {self.place}"
        elif missing:
            self.doubts[name] = missing[0]
        elif not adds:
            self.doubts.pop(name, None)
        if runs or name not in self.values or adds:
            self.values[name] = value
        return bool(missing)

    def text(self, raw: str) -> str:
        """Return what a word becomes where it is not split."""
        return " ".join(self.expand(raw, split=False))

    def expand(self, raw: str, *, split: bool = True, pattern: bool = False) -> list[str]:
        """Return the words that a word becomes: an array in quotes is one for each element, a text without quotes is split.

        Args:
            pattern: whether it is one, in which what is quoted stands for itself.
        """
        fields, joins, at = list[str](), False, 0

        def add(texts: list[str], quoted: bool = True) -> None:
            nonlocal joins
            if pattern and quoted:
                texts = [re.sub(r"[*?\[(]", r"[\g<0>]", text) for text in texts]
            if texts and joins:
                fields[-1] += texts[0]
            fields.extend(texts[joins:])
            joins = bool(fields)

        while at < len(raw):
            begin, at = at, past(raw, at)
            piece = raw[begin:at]
            if piece[0] == "\\":
                add([] if piece == "\\\n" else [piece[1:]])
            elif piece.startswith(("'", "$'")):
                add([piece.removeprefix("$")[1:].removesuffix("'")])
            elif piece[0] == '"':
                for texts in list(self._pieces(piece[1:].removesuffix('"'))) or [[""]]:
                    add(texts)
            elif piece[0] in "$`":
                items = self._expansion(piece)
                text = " ".join(items)
                joins = joins and not (split and text[:1].isspace())
                add(text.split() if split else [text], quoted=False)
                joins = joins and not (split and text[-1:].isspace())
            else:
                add([piece], quoted=False)
        return fields

    def _pieces(self, text: str) -> Iterator[list[str]]:
        """Yield what the parts of a text in double quotes become."""
        at = 0
        while at < len(text):
            begin = at
            quotes = text.startswith(("$'", '$"'), at)  # which are no quotes inside others
            plain = _UNQUOTED.match(text, at + 1) if quotes or text[at] not in "\\$`" else None
            at = past(text, at) if plain is None else plain.end()
            piece = text[begin:at]
            if piece[0] == "\\":
                yield ["" if piece == "\\\n" else piece[1:] if piece[1:] in ('"', "$", "\\", "`") else piece]
            else:
                yield self._expansion(piece) if piece[0] in "$`" and not quotes else [piece]

    def _quoted(self, text: str) -> str:
        return "".join(" ".join(texts) for texts in self._pieces(text))

    def _expansion(self, piece: str) -> list[str]:
        """Return what stands for an expansion: a text, or the elements of an array."""
        if piece[0] == "`":
            piece = f"$({piece[1:].removesuffix('`')})"
        if piece == "$":
            return ["$"]
        if piece.startswith("$(("):
            return [self._computed(piece)]
        if piece.startswith("$("):
            return [self._unknown(f"the output of a command, $({piece[2:-1]:.60})", piece)]
        name = piece[2:-1] if piece.startswith("${") else piece[1:]
        array = re.fullmatch(r"([A-Za-z_]\w*)\[([@*])\]|([@*])", name)
        if array and isinstance(items := self.values.get(array[1] or "@"), dict):
            self._note(array[1] or "@")
            return [" ".join(items.values())] if "*" in name else list(items.values())
        return [self._variable(name, piece)]

    def _variable(self, text: str, piece: str) -> str:
        match = _BRACED.fullmatch(text)
        given = self.values.get("@")
        # A script is read as if it had no arguments, which is what their defaults are for.
        known = [item for item in given.values() if item not in _ARGUMENTS] if isinstance(given, dict) else []
        if text == "#":
            return str(len(known))
        if match is None:
            return self._unknown(
                f"${{{text:.60}}}" if piece.startswith("${") else f"{piece}, which the script does not set", piece
            )
        counts, name, index, default, other = match.groups()
        value = self.values.get(name)
        if name.isdigit():
            value = "".join(known[int(name) - 1 : int(name)]) or (None if "@" in self.doubts else "")
        if index and isinstance(value, str):
            value = {"0": value}
        if isinstance(value, dict):
            every = index in ("@", "*") or name in "@*"
            if counts and every:
                self._note(name)
                return str(len(value))
            value = " ".join(value.values()) if every else value.get(self.text(index or "0"))
        if default and default[-1] == "+":
            self._note(name)
            return "" if value is None or (default[0] == ":" and not value) else self.text(other)
        if value is None or (default and default[0] == ":" and not value):
            if not default or default[-1] == "?":
                return self._unknown(self.doubts.get(name) or f"${name}, which the script does not set", piece)
            value = self.text(other)
            if default[-1] == "=":
                self.values[name] = value
            return value
        self._note(name)
        return str(len(value)) if counts else value

    def _computed(self, piece: str) -> str:
        """Return the number that `$((…))` stands for, or the text where it is not known."""
        text = piece.removeprefix("$")[2:-2]
        for name in re.findall(r"([A-Za-z_]\w*)\s*(?:[-+*/%]?=(?!=)|\+\+|--)", text):
            self.doubts[name] = f"line {self.line}: {name} is set by arithmetic"
        try:
            inside = self._quoted(text).replace('"', "")
            if "$" not in inside:
                inside = _NAME.sub(lambda name: f"({self._variable(name[0], f'${name[0]}') or 0})", inside)
            if "$" in inside:  # the reason is listed
                return piece
            inside = inside.replace("#", "$")  # a base, which is not evaluated
            inside = inside.replace("&&", " and ").replace("||", " or ")
            inside = re.sub(r"^(.*)\?(.*):(.*)$", r"(\2) if (\1) else (\3)", inside.strip())
            return str(_number(ast.parse(inside.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, MemoryError):
            return self._unknown(f"{piece:.60}", piece)

    def _note(self, name: str) -> None:
        if name in self.doubts:
            self.missing.append(self.doubts[name])

    def _unknown(self, words: str, piece: str) -> str:
        self.missing.append(words)
        return piece


def _numbered(words: Sequence[str]) -> dict[str, str]:
    return {str(at): word for at, word in enumerate(words, 1)}


def _array(script: _Script, text: str) -> dict[str, str]:
    """Return the elements of an array that is written in brackets, by their keys."""
    items = dict[str, str]()
    for raw, kind, _ in tokens_of(text[1:].removesuffix(")")):
        if kind != "word":
            continue
        key = re.match(r"\[([^]]*)\]=", raw)
        for word in script.expand(raw[key.end() if key else 0 :], split=key is None):
            items[script.text(key[1]) if key else str(len(items))] = word
    return items


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
