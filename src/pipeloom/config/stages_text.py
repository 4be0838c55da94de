"""The stages string: `"Et*3|(tt|)*29|L"` says which layers each stage holds.

E is the embedding, t a block, L the final norm and output layer; `|` separates stages; `x*3` repeats a letter and
`(…)*n` a group, including its `|`.
"""

from __future__ import annotations

import re

from pipeloom.errors import UsageError
from pipeloom.limits import MOST_LAYERS

_REPEATED_LETTER = re.compile(r"([EtL|])\*(\d{1,9})")
_REPEATED_GROUP = re.compile(r"\(([EtL|]*)\)(?:\*(\d{1,9}))?")
_MARKS = 1_000  # most repetitions in a text, so that nested ones are soon expanded
_MOST_LETTERS = 2 * MOST_LAYERS  # letters of the text written out: layers, and as many ends of stages


def parse_stages(text: str, blocks: int, stages: int) -> list[int]:
    """The number of layers of each stage in `text`, for a model of `blocks` blocks cut into `stages` stages.

    A `|` at the end closes the last stage; `||` asks for a stage without layers. Raises UsageError for other
    characters, wrong counts, and layers out of order.
    """
    letters = expand(text)
    parts = letters.removesuffix("|").split("|")
    counts = {letter: letters.count(letter) for letter in "EtL"}
    if counts["t"] != blocks:
        raise UsageError(f"it holds {counts['t']} blocks (t), but model.num_hidden_layers is {blocks}")
    for letter, what in (("E", "embedding"), ("L", "output layer")):
        if counts[letter] != 1:
            raise UsageError(f"it must hold the {what} ({letter}) once; it holds it {counts[letter]} times")
    order = letters.replace("|", "")
    if order != "E" + "t" * blocks + "L":
        raise UsageError("its layers must be E, then every t, then L")
    if len(parts) != stages:
        empty = f" ({parts.count('')} of them empty: `||`)" if "" in parts else ""
        raise UsageError(f"it makes {len(parts)} stages{empty}, but the schedule has {stages}")
    if not parts[0] or not parts[-1]:
        raise UsageError("its first stage must hold E and its last one L")
    return [len(part) for part in parts]


def expand(text: str) -> str:
    """`text` with its repetitions written out, without spaces, commas and backslashes.

    Raises UsageError for other characters, an incomplete repetition, and a text that is too long.
    """
    plain = re.sub(r"[\s,\\]", "", text)
    wrong = re.search(r"[^EtL|()*\d]", plain)
    if wrong:
        raise UsageError(f"{wrong[0]!r:.200} is not a layer code; stages are written with E, t, L, |, *n and (…)*n")
    if plain.count("*") + plain.count("(") > _MARKS or len(plain) > _MOST_LETTERS:
        raise UsageError(f"it holds more than {_MARKS:,} repetitions, or {_MOST_LETTERS:,} letters")
    while True:
        plain, letters = _REPEATED_LETTER.subn(lambda match: _repeat(match[1], match[2]), plain)
        plain, groups = _REPEATED_GROUP.subn(lambda match: _repeat(match[1], match[2]), plain)
        if len(plain) > _MOST_LETTERS:
            raise UsageError(f"it stands for more than {_MOST_LETTERS:,} letters")
        if not letters and not groups:
            break
    wrong = re.search(r"[^EtL|]", plain)
    if wrong:
        raise UsageError(f"{wrong[0]!r:.200} has no partner; repetitions are written t*3 and (tt|)*3")
    return plain


def _repeat(what: str, times: str | None) -> str:
    count = int(times) if times is not None else 1
    if len(what) * count > _MOST_LETTERS:
        raise UsageError(f"({what:.200})*{count} is longer than {_MOST_LETTERS:,} letters")
    return what * count
