"""A planned layout in words: the layers of its stages, and the flags of `train` that change it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby, islice, pairwise

from pipeloom.plan.layout import PlannedLayout
from pipeloom.schedule import Schedule


def layout_string(stages: Sequence[int], ahead: int = 0) -> str:
    """The layers of each stage in Megatron's notation, such as `Et*3|(tt|)*29,m|L`'s: equal neighbours are one group.

    Args:
        stages: layers of each stage; the first counts the embedding, the last the output layer.
        ahead: how many of the layers before the output layer predict tokens further ahead (`m`).
    """
    words = stage_words(stages, ahead)
    pieces = []
    for word, group in groupby(words[:-1]):
        count = len(list(group))
        pieces.append(f"{word}|" if count == 1 else f"({word}|)*{count}")
    return "".join(pieces) + words[-1]


def stage_words(stages: Sequence[int], ahead: int = 0) -> list[str]:
    """The layers of each stage, such as "Ettt" or "t*5"; stages and `ahead` as for `layout_string`."""
    letters = iter("E" + "t" * (sum(stages) - 2 - ahead) + "m" * ahead + "L")
    words = ["".join(islice(letters, count)) for count in stages]

    def short(word: str) -> str:
        runs = ((letter, len(list(group))) for letter, group in groupby(word))
        return "".join(letter * count if count < 4 else f"{letter}*{count}" for letter, count in runs)

    return list(map(short, words))


def layers_by_rank(schedule: Schedule, stages: Sequence[int], ahead: int = 0) -> list[list[str]]:
    """Rows of a table: the ranks, and the layers of each of their chunks; neighbours with the same layers are one row.

    Args:
        stages, ahead: layers of each stage by position, as for `layout_string`.
    """
    words = [*stage_words(stages, ahead), *[f"E/{schedule.ranks} L/{schedule.ranks}"] * len(schedule.vocabulary)]
    if schedule._spreads_embedding:
        words[0] = words[0].removeprefix("E")
    by_rank = [[words[schedule.position_of[stage]] or "-" for stage in held] for held in schedule.stages_of]
    rows = [["rank", *(f"chunk {chunk}" for chunk in range(schedule.chunks)), *["share"] * bool(schedule.vocabulary)]]
    for held, group in groupby(enumerate(by_rank), key=lambda each: each[1]):
        ranks = [rank for rank, _ in group]
        rows.append([str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}", *held])
    return rows


def recomputed_blocks(stages: Sequence[int], count: int, ahead: int = 0) -> list[int]:
    """The numbers of the first `count` blocks of each stage, as `train.recompute` has them.

    Args:
        stages, ahead: layers of each stage by position, as for `layout_string`; those that predict further ahead are not among
            the blocks.
    """
    ends = list(accumulate(stages, initial=-1))  # the embedding is before block 0
    blocks = [range(max(0, start), min(end, ends[-1] - 1 - ahead)) for start, end in pairwise(ends)]
    return [number for each in blocks for number in each[:count]]


_FLAGS = {key: f"parallel.{key}" for key in ("dp", "tp", "cp", "pp", "ep", "zero", "vocabulary")} | {
    "v": "schedule.chunks", "m": "schedule.microbatches", "slices": "schedule.slices", "schedule": "schedule.name",
    "recompute": "train.recompute",
}  # fmt: skip


def train_flags(layout: PlannedLayout, now: PlannedLayout) -> list[str]:
    """The flags with which `pipeloom train` runs `layout` instead of `now`."""
    changed = [key for key in _FLAGS if getattr(layout, key) != getattr(now, key)]
    if now.recompute_layers and layout.recompute == "full":
        changed.append("recompute")
    return [f"--{_FLAGS[key]} {getattr(layout, key)}" for key in changed]
