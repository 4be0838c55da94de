"""Words for many micro-batches from words for few: a stretch in which every letter comes equally often is repeated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pipeloom.solver.cyclic import Cyclic
from pipeloom.solver.problem import EPS, Problem, Words

ROUND = 12
MEASURED = 5000
CLOSE = 1.01


def extended(small: Problem, words: Words, problem: Problem) -> Words | None:
    """`words` of `small` for all micro-batches of `problem`; None if no stretch of them can be repeated within the room.

    Of the stretches of different lengths that is taken whose repetition takes the least time a micro-batch.
    """
    p, missing = problem.ranks, problem.microbatches - small.microbatches
    chosen, least = None, float("inf")
    for each in range(1, min(ROUND, MEASURED // (3 * problem.stages), small.microbatches // 2) + 1):
        if missing % each:
            continue
        stretch = stretch_of(small, words, each)
        if stretch is None or not stretch.fits or not stretch.measure(least * each):
            continue
        if stretch.length / each < least - EPS:
            chosen, least = each, stretch.length / each
        if stretch.length <= CLOSE * stretch.work:
            return repeated(small, words, each, problem)
    if (
        missing % p == 0 and 2 * p <= small.microbatches
    ):  # a round, as in interleaved schedules; too long to be measured
        stretch = stretch_of(small, words, p)
        if stretch is not None and stretch.fits:
            return repeated(small, words, p, problem)
    return None if chosen is None else repeated(small, words, chosen, problem)


def stretch_of(problem: Problem, words: Words, each: int) -> Cyclic | None:
    """The middle of the words in which every rank has each of its letters `each` times; None if there is none."""
    m = problem.microbatches
    part = replace(problem.even, microbatches=each)
    shift = [0] * part.tables.none
    rows = []
    for row in words:
        first = even_stretch([node // m for node in row], each)
        if first is None:
            return None
        line = []
        for node in row[first : first + each * (len(row) // m)]:
            letter, microbatch = divmod(node, m)
            own = letter * each + microbatch % each
            shift[own] = microbatch // each
            line.append(own)
        rows.append(line)
    return Cyclic(part, rows, shift)


def repeated(small: Problem, words: Words, each: int, problem: Problem) -> Words | None:
    """`words` of `small` with a stretch of `each` micro-batches repeated until there are as many as in `problem`.

    None if a rank has no such stretch. The number of micro-batches that are missing must be a multiple of `each`. What comes
    before and after the stretch stays, so that it may be longer or hold more memory than expected: the caller looks.
    """
    m, more = small.microbatches, (problem.microbatches - small.microbatches) // each
    result = []
    for row in words:
        letters = [node // m for node in row]
        first = even_stretch(letters, each)
        if first is None:
            return None
        last = first + each * (len(row) // m)
        done = dict.fromkeys(letters, 0)
        line = []
        for letter in [*letters[:last], *letters[first:last] * more, *letters[last:]]:
            line.append(letter * problem.microbatches + done[letter])
            done[letter] += 1
        result.append(line)
    return result


def even_stretch(letters: Sequence[int], each: int) -> int | None:
    """Where the run begins that has every letter `each` times and lies nearest to the middle; None if there is none."""
    count = dict.fromkeys(letters, 0)
    size = each * len(count)
    even = 0
    best, nearest = None, len(letters) + 1
    for at, letter in enumerate(letters):
        even -= count[letter] == each
        count[letter] += 1
        even += count[letter] == each
        if at >= size:
            gone = letters[at - size]
            even -= count[gone] == each
            count[gone] -= 1
            even += count[gone] == each
        first = at + 1 - size
        if even == len(count) and abs(2 * first + size - len(letters)) < nearest:
            best, nearest = first, abs(2 * first + size - len(letters))
    return best
