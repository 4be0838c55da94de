"""The tags of messages between two processes: over gloo, messages of different tags do not wait for one another."""

from __future__ import annotations

import enum


@enum.unique
class Tag(enum.IntEnum):
    """The contents of a message in a process group. The numbers differ, so that no receive matches a message of another kind."""

    ACTIVATION = 11
    GRADIENT = 12
    ACTIVATION_HEADER = 13
    TIED_WEIGHT = 14
    CLOCK = 15
    LOSS = 16
    NUMBERS = 17
    GRADIENT_HEADER = 18
    ROWS = 19
