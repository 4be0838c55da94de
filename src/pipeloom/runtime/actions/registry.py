"""The functions that execute actions, by kind."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from pipeloom.parallel.zero import StageShards
from pipeloom.schedule.actions import kind_of


class Queue(NamedTuple):
    """A queue of a rank, as the actions on it see it.

    Attributes:
        stream: the stream of its copies; None for computation and on the CPU.
        before_layer: called with a layer's name before its weights are read: they may still be in transit.
        before_kind: called with a stage before an action of a registered kind, which may read the stage's gradients.
        shards: what gathers and frees parameters and reduces gradients; None: these actions do nothing.
        vocabulary: this rank's `SpreadVocabulary`, where the schedule spreads the vocabulary over the pipeline.
    """

    stream: torch.cuda.Stream | None = None
    before_layer: Callable[[str], None] | None = None
    before_kind: Callable[[int], None] | None = None
    shards: StageShards | None = None
    vocabulary: Any = None


class _Executions(dict[str, Any]):
    """Letter of a kind -> what executes its actions; those of parts and of registered kinds are added where first run."""

    def __missing__(self, letter: str) -> Any:
        base, _, part = letter.partition(":")
        self[letter] = partial(self[base], part=part) if part else partial(self[""], kind_of(letter))
        return self[letter]


EXECUTIONS = _Executions()


def executes(*letters: str) -> Callable[[Any], Any]:
    """Decorate the function that executes actions of these kinds: it gets the micro-batch's flight, the stage and its queue, and
    the keyword `part` where the action names a part.

    "" is that of kinds that `register_kind` has added, and gets the kind before.
    """

    def registered(function: Any) -> Any:
        EXECUTIONS.update(dict.fromkeys(letters, function))
        return function

    return registered
