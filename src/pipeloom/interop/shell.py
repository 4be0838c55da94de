"""The commands of a launch script, read without running anything.

Variables, arrays, defaults (`${X:-4}`), `+=`, arithmetic and continued lines are resolved; what only a run would tell (a variable
of the environment, the output of a command, a value set under a condition) is listed, and stays in the word as it was written.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_ASSIGNS = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_BRACED = re.compile(r"(#?)([A-Za-z_]\w*|\d+)(?:\[([@*]|\d+)\])?(?:(:?[-=?+])(.*))?", re.DOTALL)
_OPERATORS = ("&&", "||", ";;", "<<<", "<<-", "<<", ">>", "<", ">", ";", "&", "|", "(", ")", "\n")
_OPENS, _CLOSES = ("if", "while", "until", "for", "case", "select"), ("fi", "done", "esac")
_DECLARES = ("export", "declare", "local", "readonly", "typeset")
_LONGEST = 4_000_000  # characters: a script of assignments that double a text ends in time
_ARITHMETIC = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Mod: operator.mod,
    ast.FloorDiv: operator.floordiv,
}


@dataclass(frozen=True)
class Piece:
    """A part of a word: literal text, or with `expands` the text behind a `$`."""

    text: str
    quoted: bool
    expands: bool = False


@dataclass(frozen=True)
class Token:
    """A word of pieces, the array assigned in it (or None), or an operator."""

    line: int
    pieces: tuple[Piece, ...] = ()
    operator: str = ""
    array: tuple[Token, ...] | None = None

    @property
    def plain(self) -> str:
        """The word as far as it is literal and unquoted."""
        return "".join(piece.text for piece in self.pieces if not piece.expands and not piece.quoted)


@dataclass(frozen=True)
class Command:
    """A simple command.

    Attributes:
        words: with variables resolved.
        unresolved: a sentence for each expansion in it that only a run would tell.
    """

    line: int
    words: tuple[str, ...]
    unresolved: tuple[str, ...]


def commands_of(text: str) -> list[Command]:
    """Return the commands of a script, or of a command line, in their order."""
    return list(_Reader().commands(text))


class _Lexer:
    """Cuts a script into tokens."""

    def __init__(self, text: str) -> None:
        self.text, self.at, self.line = text.replace("\r\n", "\n"), 0, 1

    def tokens(self) -> Iterator[Token]:
        """Yield the tokens; comments, redirections and documents behind `<<` are left out."""
        ends: list[str] = []
        skips = False
        while self.at < len(self.text):
            if self._blank():
                continue
            sign = next((each for each in _OPERATORS if self.text.startswith(each, self.at)), "")
            if not sign:
                word = self.word()
                if skips and ends and not ends[-1]:
                    ends[-1] = "".join(piece.text for piece in word.pieces)
                elif not skips and not (word.plain.isdigit() and self.text[self.at : self.at + 1] in ("<", ">")):
                    yield word
                skips = False
                continue
            yield from self._operator(sign, ends)
            skips = sign in ("<<<", "<<-", "<<", ">>", "<", ">")

    def _blank(self) -> bool:
        """Pass what separates words; return whether there was any."""
        here = self.text[self.at]
        if self.text.startswith("\\\n", self.at):
            self._pass(2)
        elif here in " \t":
            self._pass(1)
        elif here == "#":
            end = self.text.find("\n", self.at)
            self.at = len(self.text) if end < 0 else end
        else:
            return False
        return True

    def _operator(self, sign: str, ends: list[str]) -> Iterator[Token]:
        line = self.line
        self._pass(len(sign))
        if sign in ("<<", "<<-"):
            ends.append("")
        elif sign in ("<", ">", ">>"):
            if self.text.startswith("&", self.at):  # `2>&1`: the number behind it is skipped as its word
                self._pass(1)
        elif sign == "\n":
            for end in ends:
                found = re.compile(rf"^\t*{re.escape(end)}$", re.MULTILINE).search(self.text, self.at)
                self._pass((found.end() if found else len(self.text)) - self.at)
            ends.clear()
            yield Token(line, operator=sign)
        elif sign != "<<<":
            yield Token(line, operator=sign)

    def _pass(self, count: int) -> str:
        passed = self.text[self.at : self.at + count]
        self.at += count
        self.line += passed.count("\n")
        return passed

    def word(self, ends: str = " \t\n;&|()<>") -> Token:
        """Return the word that begins here, which one of `ends` ends."""
        pieces: list[Piece] = []
        line = self.line
        while self.at < len(self.text):
            here = self.text[self.at]
            if self.text.startswith("\\\n", self.at):
                self._pass(2)
            elif here == "\\":
                pieces.append(Piece(self._pass(2)[1:], True))
            elif here == "'":
                pieces.append(Piece(self._until("'"), True))
            elif here == '"':
                self._pass(1)
                pieces += self._double_quoted()
            elif here in "$`":
                pieces.append(self._expansion(quoted=False))
            elif here == "(" and len(pieces) == 1 and _ASSIGNS.fullmatch(pieces[0].text):
                return Token(line, tuple(pieces), array=self._array())
            elif here in ends:
                break
            else:
                end = re.compile(rf"[{re.escape(ends)}\\'\"$`]").search(self.text, self.at)
                pieces.append(Piece(self._pass((end.start() if end else len(self.text)) - self.at), False))
        return Token(line, tuple(pieces))

    def _array(self) -> tuple[Token, ...]:
        self._pass(1)
        words = []
        while self.at < len(self.text) and self.text[self.at] != ")":
            if self.text[self.at] in "\n;&|<>(":
                self._pass(1)
            elif not self._blank():
                words.append(self.word())
        self._pass(1)
        return tuple(words)

    def _until(self, end: str) -> str:
        """Pass what a sign encloses, and return it."""
        self._pass(1)
        close = self.text.find(end, self.at)
        inside = self._pass((len(self.text) if close < 0 else close) - self.at)
        self._pass(1)
        return inside

    def _double_quoted(self) -> Iterator[Piece]:
        empty = True
        while self.at < len(self.text) and self.text[self.at] != '"':
            here = self.text[self.at]
            if here == "\\":
                escaped = self._pass(2)
                if escaped != "\\\n":
                    yield Piece(escaped[1:] if escaped[1:] in ('"', "$", "\\", "`") else escaped, True)
            elif here in "$`":
                yield self._expansion(quoted=True)
            else:
                end = re.compile(r'[\\"$`]').search(self.text, self.at)
                yield Piece(self._pass((end.start() if end else len(self.text)) - self.at), True)
            empty = False
        self._pass(1)
        if empty:
            yield Piece("", True)

    def _expansion(self, *, quoted: bool) -> Piece:
        if self.text[self.at] == "`":
            return Piece(f"({self._until('`')})", quoted, True)
        self._pass(1)
        here = self.text[self.at : self.at + 1]
        if here == "'" and not quoted:
            return Piece(self._until("'"), True)
        if here in ("{", "("):
            return Piece(self._nested(here, "}" if here == "{" else ")"), quoted, True)
        name = _NAME.match(self.text, self.at)
        return Piece(self._pass(len(name[0])), quoted, True) if name else Piece("$", quoted)

    def _nested(self, opening: str, closing: str) -> str:
        """Pass from an opening sign to its closing one, and return that with the signs."""
        begin, depth = self.at, 0
        while self.at < len(self.text):
            here = self._pass(1)
            depth += (here == opening) - (here == closing)
            if not depth:
                break
        return self.text[begin : self.at]


@dataclass
class _Reader:
    """The variables of a script, and what is known of them."""

    values: dict[str, str | list[str]] = field(default_factory=dict)
    doubts: dict[str, str] = field(default_factory=dict)
    depth: int = 0
    written: int = 0
    missing: list[str] = field(default_factory=list)

    def commands(self, text: str) -> Iterator[Command]:
        """Yield the commands, and take over what the script assigns."""
        statement: list[Token] = []
        for token in [*_Lexer(text).tokens(), Token(0, operator="\n")]:
            if token.operator:
                yield from self._statement(statement)
                statement = []
            else:
                statement.append(token)

    def _statement(self, words: list[Token]) -> Iterator[Command]:
        while words and words[0].plain in ("then", "else", "elif", "do", "{", "}", "!", "time", *_OPENS, *_CLOSES):
            keyword = words[0].plain
            words = words[1:]
            self.depth += (keyword in _OPENS) - (keyword in _CLOSES)
            if keyword in ("for", "case", "select"):
                if words:
                    self.doubts[words[0].plain] = f"line {words[0].line}: ${words[0].plain} is that of a loop"
                return
        if words and words[0].plain in _DECLARES:
            words = [word for word in words[1:] if not word.plain.startswith("-")]
            if not all(self._is_assignment(word) for word in words):
                words = [word for word in words if self._is_assignment(word)]
        while words and self._is_assignment(words[0]):
            if len(words) > 1 and not all(self._is_assignment(word) for word in words):
                words = words[1:]  # of the environment of this command alone
                continue
            self._assign(words[0])
            words = words[1:]
        if words and words[0].plain not in ("[", "[[", "test", "echo", "set", "shift", "function"):
            yield from self._command(words)

    @staticmethod
    def _is_assignment(word: Token) -> bool:
        return bool(word.pieces) and not word.pieces[0].quoted and _ASSIGNS.match(word.pieces[0].text) is not None

    def _assign(self, word: Token) -> None:
        match = _ASSIGNS.match(word.pieces[0].text)
        assert match is not None
        name, adds, self.missing = match[1], bool(match[2]), []
        value: str | list[str]
        if word.array is not None:
            value = [text for each in word.array for text in self._fields(each)]
        else:
            first = Piece(word.pieces[0].text[match.end() :], False)
            value = "".join(self._value(piece) for piece in (first, *word.pieces[1:]))
        earlier = self.values.get(name)
        if adds and isinstance(earlier, list):
            value = [*earlier, *([value] if isinstance(value, str) else value)]
        elif adds and isinstance(earlier, str) and isinstance(value, str):
            value = earlier + value
        self.written += len(value) if isinstance(value, str) else sum(map(len, value))
        if self.written > _LONGEST:
            value = ""
            self.missing.append(f"line {word.line}: {name} is longer than {_LONGEST:,} characters")
        if self.depth:
            self.doubts[name] = f"line {word.line}: {name} is set under a condition, which is not evaluated"
            if name in self.values and not adds:
                return
        elif self.missing:
            self.doubts[name] = self.missing[0]
        else:
            self.doubts.pop(name, None)
        self.values[name] = value

    def _command(self, words: list[Token]) -> Iterator[Command]:
        self.missing, line = [], words[0].line
        texts = [text for word in words for text in self._fields(word)]
        missing = tuple(dict.fromkeys(self.missing))
        inner = texts[texts.index("-c") + 1 :][:1] if "-c" in texts and texts[0] != "python" else []
        if texts and texts[0] == "eval":
            inner = [" ".join(texts[1:])]
        if inner and " " in inner[0]:
            for command in _Reader(self.values, self.doubts, self.depth).commands(inner[0]):
                yield Command(line, command.words, tuple(dict.fromkeys((*missing, *command.unresolved))))
        elif texts:
            yield Command(line, tuple(texts), missing)

    def _fields(self, word: Token) -> list[str]:
        """Return the words that a word becomes: an array in quotes is a word for each element, a text without quotes is split."""
        fields: list[str] = []
        open_field = False

        def extend(texts: list[str]) -> None:
            nonlocal open_field
            if texts and open_field:
                fields[-1] += texts[0]
                texts = texts[1:]
            fields.extend(texts)
            open_field = open_field or bool(fields)

        for piece in word.pieces:
            array = re.fullmatch(r"\{([A-Za-z_]\w*)\[([@*])\]\}", piece.text) if piece.expands else None
            if array and isinstance(items := self.values.get(array[1]), list):
                self._note(array[1])
                whole = [" ".join(items)] if array[2] == "*" else list(items)
                extend(whole if piece.quoted else [part for item in items for part in item.split()])
                continue
            text = self._value(piece)
            if piece.quoted or not piece.expands:
                extend([text])
                continue
            open_field = open_field and text[:1] not in (" ", "\t", "\n")
            extend(text.split())
            open_field = open_field and text[-1:] not in (" ", "\t", "\n")
        return fields

    def _value(self, piece: Piece) -> str:
        if not piece.expands:
            return piece.text
        text = piece.text
        if text.startswith("((") and text.endswith("))"):
            return self._computed(text)
        if text.startswith("("):
            return self._unknown(text, f"the output of a command, $({text[1:-1]:.60})")
        match = _BRACED.fullmatch(text[1:-1]) if text.startswith("{") else _BRACED.fullmatch(text)
        if match is None:
            return self._unknown(text, f"${text:.60}")
        counts, name, index, default, other = match.groups()
        value = self.values.get(name)
        if isinstance(value, list):
            if counts:
                return str(len(value))
            if index in ("@", "*"):
                value = " ".join(value)
            else:
                value = value[int(index or 0)] if int(index or 0) < len(value) else None
        if default and default[-1] == "+":
            return self._text(other or "") if value else ""
        if value is None or (default and default[0] == ":" and not value):
            if not default or default[-1] == "?":
                return self._unknown(text, self.doubts.get(name) or f"${name}, which the script does not set")
            value = self._text(other or "")
            if default[-1] == "=":
                self.values[name] = value
            return value
        self._note(name)
        return str(len(value)) if counts else value

    def _text(self, text: str) -> str:
        """Return a text behind `:-` with its own expansions in their place."""
        return "".join(self._value(piece) for piece in _Lexer(text).word("").pieces)

    def _computed(self, text: str) -> str:
        inside = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda found: self._value(Piece(found[1], True, True)), text[2:-2])
        try:
            return str(_number(ast.parse(inside.strip().replace("/", "//"), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return self._unknown(text, f"$({text:.60})")

    def _note(self, name: str) -> None:
        if name in self.doubts:
            self.missing.append(self.doubts[name])

    def _unknown(self, text: str, words: str) -> str:
        self.missing.append(words)
        return f"${text}"


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        result: int = _ARITHMETIC[type(node.op)](_number(node.left), _number(node.right))
        if abs(result) < 2**63:
            return result
    raise ValueError
