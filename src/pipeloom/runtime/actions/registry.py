"""The functions that execute actions, by kind, and what they get of their step and queue."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from pipeloom.parallel.zero import StageShards
from pipeloom.runtime.health.fault_injection import Faults
from pipeloom.runtime.health.status import Status
from pipeloom.schedule.actions import Action, kind_of


@dataclass(frozen=True)
class StepHooks:
    """Objects and callbacks that a step reports to while it runs.

    Attributes:
        status: the action that the rank is in and what it waits for, for the watchdog.
        faults: the faults to inject.
        before_last_backward: called with a stage before its last B, if that is a single call of autograd.
        stage_done: called with a stage once its gradients are complete and the messages of the completing action are sent.
        before_layer: called with a layer's name before its weights are read: they may still be in transit.
        shards: what gathers and frees parameters and reduces gradients; None: these actions do nothing.
        before_kind: called with a stage before an action of a registered kind, which may read the stage's gradients.
        beside: called with an action on another queue than that of computation and what executes it, in the action's thread.
    """

    status: Status
    faults: Faults
    before_last_backward: Callable[[int], object] = lambda _: None
    stage_done: Callable[[int], object] = lambda _: None
    before_layer: Callable[[str], None] | None = None
    before_kind: Callable[[int], object] = lambda _: None
    shards: StageShards | None = None
    beside: Callable[[Action, Callable[[], object]], object] = lambda _, execute: execute()


class Queue(NamedTuple):
    """A queue of a rank, as the actions on it see it.

    Attributes:
        stream: the stream of its copies; None for computation and on the CPU.
        hooks: of the step.
        vocabulary: this rank's `SpreadVocabulary`, where the schedule spreads the vocabulary over the pipeline.
    """

    stream: torch.cuda.Stream | None
    hooks: StepHooks
    vocabulary: Any


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
