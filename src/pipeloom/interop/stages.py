"""The layers of stages as names of modules, as torchtitan and NeMo Automodel write them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pipeloom.errors import UsageError

_BLOCK = re.compile(r"(?:model\.)?layers\.(\d{1,6})")


def names_of_stages(
    stages: Sequence[int], embedding: str, last: Sequence[str], block: str = "layers."
) -> list[list[str]]:
    """Return the modules of each stage.

    Args:
        stages: layers of each stage; the first counts the embedding, the last the output layer.
        embedding: the embedding's name.
        last: the names of the norm and the output layer.
        block: what a block's name begins with.
    """
    layers = [[embedding], *([f"{block}{at}"] for at in range(sum(stages) - 2)), list(last)]
    parts, start = [], 0
    for count in stages:
        parts.append([name for layer in layers[start : start + count] for name in layer])
        start += count
    return parts


def stages_of_names(parts: Sequence[Sequence[str]], where: str) -> tuple[int, ...]:
    """Return the layers of each stage; raises UsageError, with a message that begins with `where`, for blocks out of order."""
    counts, following = [], 0
    for at, part in enumerate(parts):
        blocks = [int(match[1]) for name in part if (match := _BLOCK.fullmatch(name))]
        if blocks != list(range(following, following + len(blocks))):
            raise UsageError(f"{where}: part {at} has blocks {blocks[:5]}, and block {following} is next")
        following += len(blocks)
        counts.append(len(blocks) + (at == 0) + (at == len(parts) - 1))
    return tuple(counts)
