"""The commands of a launch script, read without running anything.

Variables, arrays, defaults (`${X:-4}`), `+=`, arithmetic and continued lines are resolved; what only a run would tell (a variable
of the environment, the output of a command, a value set under a condition) is listed, and stays in the word as it was written.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch

from pipeloom.errors import UsageError

_ASSIGNS = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_BRACED = re.compile(r"(#?)([A-Za-z_]\w*|\d+)(?:\[([@*]|\d+)\])?(?:(:?[-=?+])(.*))?", re.DOTALL)
_OPERATOR = re.compile(r"(?:\d*(?=[<>]))?(&&|\|\||;;|<<<|<<-?|&>>?|[<>]&|>>|[<>;&|()\n])")
_REDIRECTS = ("<<<", "&>", "&>>", "<&", ">&", ">>", "<", ">")
_OPENS, _CLOSES = ("if", "while", "until", "for", "case", "select"), ("fi", "done", "esac")
_KEYWORDS = (*_OPENS, *_CLOSES, "then", "else", "elif", "do", "{", "}", "!", "time")
_DECLARES = ("export", "declare", "local", "readonly", "typeset")
_TESTS = ("[", "[[", "test")
_SILENT = (*_TESTS, *_DECLARES, "echo", "printf", "set", "shift", "function")
_ENDS = " \t\n;&|()<>"
_LONGEST = 4_000_000  # characters: a script of assignments that double a text ends in time
_ARITHMETIC = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Mod: operator.mod, ast.FloorDiv: operator.floordiv,
}  # fmt: skip


# Flags of torchrun, torch.distributed.launch and srun that do not say how many processes there are.
_LAUNCHERS = """
    container-* cpu-bind* cpus-per-* export gpus-per-* job-name kill-on-bad-exit label local-addr local-rank* log-dir logs-specs
    master-* max-restarts monitor-interval mpi module no-python node-rank ntasks* output partition rank rdzv-* redirects role
    run-path standalone start-method tee time use-env virtual-local-rank
""".split()  # noqa: SIM905


def launches(flag: str) -> bool:
    """Return whether a flag, with hyphens, is one of a launcher that changes nothing here."""
    return any(fnmatch(flag, pattern) for pattern in _LAUNCHERS)


@dataclass(frozen=True)
class Command:
    """A simple command.

    Attributes:
        words: with variables resolved.
        unresolved: a sentence for each expansion in it that only a run would tell.
    """

    words: tuple[str, ...]
    unresolved: tuple[str, ...]


def commands_of(text: str) -> list[Command]:
    """Return the commands of a script, or of a command line, in their order."""
    return list(_Script(text.replace("\r\n", "\n")).commands())


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


@dataclass
class _Script:
    """A text that is read from its begin to its end, and the variables so far with what is not known of them."""

    text: str
    values: dict[str, str | list[str]] = field(default_factory=dict)
    doubts: dict[str, str] = field(default_factory=dict)
    at: int = 0
    begin: int = 0
    depth: int = 0
    written: int = 0
    tested: bool = False
    missing: list[str] = field(default_factory=list)

    @property
    def here(self) -> str:
        return self.text[self.at : self.at + 1]

    def commands(self) -> Iterator[Command]:
        """Yield the commands, and take over what the script assigns."""
        while self.at < len(self.text):
            words = self._statement()
            missing = tuple(dict.fromkeys(self.missing))
            self.tested = self.tested and bool(words) and words[0] in _TESTS
            inner = words[words.index("-c") + 1 :][:1] if "-c" in words and not words[0].startswith("python") else []
            if words[:1] == ["eval"]:
                inner = [" ".join(words[1:])]
            if inner and " " in inner[0] and self.depth < 50:
                for command in _Script(inner[0], self.values, self.doubts, depth=self.depth + 1).commands():
                    yield Command(command.words, tuple(dict.fromkeys((*missing, *command.unresolved))))
            elif words and words[0] not in _SILENT:
                yield Command(tuple(words), missing)

    def _statement(self) -> list[str]:
        """Return the words of the next simple command; keywords and assignments before it are taken over."""
        words, heredocs = list[str](), list[str]()
        before: tuple[dict[str, str | list[str]], dict[str, str]] | None = None
        self.missing = []
        while self.at < len(self.text):
            if self._blank():
                continue
            assigns = _ASSIGNS.match(self.text, self.at)
            if match := _OPERATOR.match(self.text, self.at):
                self.at = match.end()
                if match[1] in ("<<", "<<-"):
                    self._blank()
                    heredocs.append("".join(self._word()))
                elif match[1] in _REDIRECTS:
                    while self._blank():
                        pass
                    self._word()
                else:
                    if match[1] == "\n":
                        self._skip(heredocs)
                    self.tested = match[1] in ("&&", "||")
                    break
            elif assigns and (not words or words[0] in _DECLARES):
                before = before or (dict(self.values), dict(self.doubts))
                self._assign(assigns)
            else:
                if before and not words:  # `X=1 command`: it is the command's alone
                    (self.values, self.doubts), before = before, None
                plain = self.here not in "\"'$\\"
                words += self._word()
                if len(words) == 1 and plain and words[0] in _KEYWORDS:
                    self._keyword(words.pop())
        return words

    def _blank(self) -> bool:
        """Pass what separates words; return whether there was any."""
        passed = re.compile(r"(?:[ \t]|\\\n)+|#[^\n]*").match(self.text, self.at)
        self.at = passed.end() if passed else self.at
        return passed is not None

    def _skip(self, heredocs: Sequence[str]) -> None:
        for end in heredocs:
            match = re.compile(rf"^\t*{re.escape(end)}$", re.MULTILINE).search(self.text, self.at)
            self.at = match.end() if match else len(self.text)

    def _keyword(self, word: str) -> None:
        self.depth += (word in _OPENS) - (word in _CLOSES)
        if word in ("for", "case", "select"):
            self._blank()
            name = _NAME.match(self.text, self.at)
            if word != "case" and name:
                self.doubts[name[0]] = f"line {self._line()}: ${name[0]} is that of a loop"
            self._until("\n" if word == "case" else ";", "\n")

    def _line(self) -> int:
        return self.text.count("\n", 0, self.at) + 1

    def _until(self, *ends: str) -> str:
        """Return the text before the first of these ends, and pass both."""
        stop = min((at for end in ends if (at := self.text.find(end, self.at)) >= 0), default=len(self.text))
        inside, self.at = self.text[self.at : stop], stop + 1
        return inside

    def _assign(self, match: re.Match[str]) -> None:
        name, adds, line, self.at = match[1], bool(match[2]), self._line(), match.end()
        before, self.missing = self.missing, []
        value = self._array() if self.here == "(" else " ".join(self._word(split=False))
        earlier = self.values.get(name)
        if adds and isinstance(earlier, list):
            value = [*earlier, *([value] if isinstance(value, str) else value)]
        elif adds and isinstance(earlier, str) and isinstance(value, str):
            value = earlier + value
        self.written += len(value) + sum(map(len, value))
        if self.written > _LONGEST:
            self.missing.append(f"line {line}: {name} is longer than {_LONGEST:,} characters")
            value = ""
        conditional = self.depth or self.tested
        if conditional:
            self.doubts[name] = f"line {line}: {name} is set under a condition, which is not evaluated"
        elif self.missing:
            self.doubts[name] = self.missing[0]
        else:
            self.doubts.pop(name, None)
        if not conditional or name not in self.values or adds:
            self.values[name] = value
        self.missing = before

    def _array(self) -> str | list[str]:
        items = list[str]()
        self.at += 1
        while self.at < len(self.text) and self.here != ")":
            if self.here in _ENDS and not self._blank():
                self.at += 1
            elif self.here not in _ENDS and not self._blank():
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
                joins = joins and (not split or text[:1] not in " \t\n")
                add(text.split() if split else [text])
                joins = joins and (not split or text[-1:] not in " \t\n")
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
            name = _NAME.match(self.text, self.at)
            self.at = name.end() if name else self.at
            return [self._variable(name[0]) if name else "$"]
        text = self._nested(self.here, "}" if self.here == "{" else ")")
        if text.startswith("(("):
            return [self._computed(text)]
        if text.startswith("("):
            return [self._unknown(f"the output of a command, $({text[1:-1]:.60})")]
        array = re.fullmatch(r"([A-Za-z_]\w*)\[@\]", text[1:-1])
        if array and isinstance(items := self.values.get(array[1]), list):
            self._note(array[1])
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
        if match is None:
            return self._unknown(f"${{{text:.60}}}")
        counts, name, index, default, other = match.groups()
        value = self.values.get(name)
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
        inner = _Script(text, self.values, self.doubts, missing=self.missing)
        return " ".join(inner._word("", split=False))

    def _computed(self, text: str) -> str:
        inside = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda match: self._variable(match[1]), text[2:-2])
        try:
            return str(_number(ast.parse(inside.strip().replace("/", "//"), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return self._unknown(f"$({text:.60})")

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
        result: int = _ARITHMETIC[type(node.op)](_number(node.left), _number(node.right))
        if abs(result) < 2**63:
            return result
    raise ValueError
