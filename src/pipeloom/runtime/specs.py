"""The spec book: which shapes a message has, and whether it brings them itself in a header.

Both ends of a channel keep one and ask it the same questions in the same order, so they agree without a word.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal

from pipeloom.errors import UsageError
from pipeloom.runtime.boundary import Boundary, gradients_of, words
from pipeloom.schedule.channels import Message, neighbours
from pipeloom.schedule.model import Schedule


class SpecBook:
    """Boundaries by (stage, shape of the step's inputs), or by (stage, micro-batch) where shapes are sent each time."""

    def __init__(self, schedule: Schedule, policy: Literal["once", "each"]) -> None:
        self.policy = policy
        self._before, _ = neighbours(schedule)
        self._known: dict[tuple[int, Hashable], Boundary] = {}
        self._introduced: set[tuple[int, Hashable]] = set()
        self._signatures: Sequence[Hashable] = ()

    def begin(self, signatures: Sequence[Hashable]) -> None:
        """A new step whose micro-batches have these input signatures."""
        self._signatures = signatures
        if self.policy == "each":
            self._known.clear()
            self._introduced.clear()

    def _key(self, stage: int, microbatch: int) -> tuple[int, Hashable]:
        return stage, (microbatch if self.policy == "each" else self._signatures[microbatch])

    def introduces(self, message: Message) -> bool:
        """Whether `message` is the first of its key on its channel, so that a header comes with it. Ask once a message."""
        if message.channel.kind == "gradient":
            return False
        key = self._key(message.stage, message.microbatch)
        first = key not in self._introduced
        self._introduced.add(key)
        return first

    def of(self, message: Message) -> Boundary | None:
        """The specs of the tensors of `message`, or None when they are not known yet."""
        if message.channel.kind == "activation":
            return self._known.get(self._key(message.stage, message.microbatch))
        origin = self._before[message.stage]
        assert origin is not None
        boundary = self._known.get(self._key(origin, message.microbatch))
        return None if boundary is None else gradients_of(boundary)

    def output(self, stage: int, microbatch: int) -> Boundary:
        """The boundary after `stage`; it must be known."""
        return self._known[self._key(stage, microbatch)]

    def learn(self, stage: int, microbatch: int, boundary: Boundary) -> None:
        """The output of `stage` for `microbatch` has these specs; raises UsageError when others were promised."""
        key = self._key(stage, microbatch)
        known = self._known.setdefault(key, boundary)
        if known != boundary:
            raise UsageError(
                f"the output of stage {stage} for micro-batch {microbatch} is {words(boundary)}; for inputs of the same shape "
                f'it was {words(known)}: its shape depends on the data, so set shapes = "each"'
            )
