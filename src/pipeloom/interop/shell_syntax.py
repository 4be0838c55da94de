"""The text of a shell script as tokens: words as they were written, operators, and documents in the script."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

_BLANK = re.compile(r"(?:[ \t\r]|\\\n|#[^\n]*)+")
_REDIRECT = re.compile(r"(?:\d+|\{\w+\})?(<<<|<<-?|&>>?|[<>]&|>>|>\||<>|[<>])(?!\()")
_OPERATOR = re.compile(r"&&|\|\||\|&?|;;&?|;&|[;&()\n]")
_PLAIN = re.compile(r"[^\s;&|()<>\\'\"$`]+")
_NAMED = re.compile(r"\$(?:[A-Za-z_]\w*|[0-9@*#?$!_-])")
_LITERAL = re.compile(r"\$'(?:[^'\\]|\\.)*'?", re.DOTALL)
_ENDS = " \t\r\n;&|()<>"
_FUNCTION = re.compile(r"\([ \t]*\)")
# Keywords that commands follow.
_BEFORE = ("if", "then", "elif", "else", "while", "until", "do", "in", "!", "{", "time")
_CLOSES = {"(": ")", "{": "}"}


class Token(NamedTuple):
    """A word, an operator, a redirection (its target follows), or what is given to a command: as it is in a literal one."""

    text: str
    kind: Literal["word", "operator", "redirect", "document", "literal", "string"]
    line: int


def past(text: str, at: int) -> int:
    """Return where the piece of a word ends that begins at `at`: a quoted text, an expansion, or plain characters."""
    here, following = text[at], text[at + 1 : at + 2]
    if here == "\\":
        return at + 2
    if here in "'`":
        return (text.find(here, at + 1) + 1) or len(text)
    if here == '"':
        at += 1
        while at < len(text) and text[at] != '"':
            at = past(text, at) if text[at] in "\\$`" and text[at : at + 2] != "$'" else at + 1
        return at + 1
    if here == "$" and following and following in "({":
        return _closed(text, at + 1)
    pattern = _PLAIN if here != "$" else _LITERAL if following == "'" else _NAMED
    match = pattern.match(text, at)
    return match.end() if match else at + 1


def _closed(text: str, at: int) -> int:
    """Return where the bracket at `at` closes."""
    opening, depth = text[at], 0
    while at < len(text):
        here = text[at]
        if here in "\\'\"`$":
            at = past(text, at)
        elif here == "#" and opening == "(" and text[at - 1].isspace():
            at = text.find("\n", at) % (len(text) + 1)
        else:
            depth += (here == opening) - (here == _CLOSES[opening])
            at += 1
        if not depth:
            break
    return at


def _word_end(text: str, at: int) -> int:
    begin = at
    while at < len(text):
        here = text[at]
        if text.startswith(("((", "<(", ">("), at) or (here == "(" and at > begin and text[at - 1] == "="):
            at = _closed(text, at + (here != "("))
        elif here in _ENDS:
            break
        else:
            at = past(text, at)
    return at


def _is_text(tokens: list[Token], text: str, at: int) -> bool:
    """Return whether a bracket begins a word: arithmetic, or behind a word, where a shell would refuse it."""
    behind = tokens and tokens[-1].kind == "word" and tokens[-1].text not in _BEFORE
    return text.startswith("((", at) or (text[at] == "(" and bool(behind) and _FUNCTION.match(text, at) is None)


def tokens_of(text: str) -> list[Token]:
    """Return the tokens of a script."""
    tokens, documents, at, line = list[Token](), list[tuple[int, str]](), 0, 1

    def took(end: int) -> str:
        nonlocal at, line
        begin, at = at, end
        line += text.count("\n", begin, end)
        return text[begin:end]

    while at < len(text):
        here = line
        if match := _BLANK.match(text, at):
            took(match.end())
        elif match := _REDIRECT.match(text, at):
            took(match.end())
            if not match[1].startswith("<<"):
                tokens.append(Token(match[1] if match[0][0] != "2" else "2>", "redirect", here))
                continue
            took(blank.end() if (blank := _BLANK.match(text, at)) else at)
            word = took(_word_end(text, at))
            end = re.sub(r"[\\'\"]", "", word)
            if match[1] != "<<<":
                documents.append((len(tokens), end))
            tokens.append(
                Token(word, "string" if match[1] == "<<<" else "document" if end == word else "literal", here)
            )
        elif (match := _OPERATOR.match(text, at)) and not _is_text(tokens, text, at):
            tokens.append(Token(took(match.end()), "operator", here))
            for place, end in documents if match[0] == "\n" else ():
                ending = re.compile(rf"^\t*{re.escape(end)}$", re.MULTILINE).search(text, at)
                content = took(ending.start() if ending else len(text))
                tokens[place] = tokens[place]._replace(text=content)
                took(ending.end() if ending else at)
            documents = documents if match[0] != "\n" else []
        else:
            begin = _closed(text, at) if text[at] == "(" else at
            tokens.append(Token(took(max(at + 1, _word_end(text, begin))), "word", here))
    return tokens
