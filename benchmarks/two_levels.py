"""An emulated block whose all-to-alls have two levels, in chunks of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from pipeloom.measure.rehearse import EmulatedLayer, TimedExchange, factor_of, scaled
from pipeloom.ops.layer import MicrobatchContext
from pipeloom.ops.segments import Compute, Segment, in_turns


class TwoLevels(EmulatedLayer):
    """A layer each of whose all-to-alls takes a hop inside a node too, on a link of its own.

    Args:
        inside: time of each hop inside a node; 0: there is none.
        chunks: runs of the tokens, whose all-to-alls overlap with the other runs' experts and all-to-alls.
    """

    def __init__(self, *values: Any, inside: float = 0.0, chunks: int = 1, **keywords: Any) -> None:
        super().__init__(*values, **keywords)
        self.inside, self.chunks = inside, chunks

    def segments(self, microbatch: MicrobatchContext | None = None) -> Sequence[Segment]:
        times, factor = self.times, factor_of(self.factors, microbatch)
        attention, share = self.part("attention", scaled(times.attention, factor)), factor / self.chunks
        combine_backward, dispatch_backward = times.backward_talk
        runs = [
            [
                *self._hops("dispatch", share * times.dispatch, share * dispatch_backward, share),
                self.part("experts", scaled(times.experts, share), at),
                *self._hops("combine", share * times.combine, share * combine_backward, share)[::-1],
            ]
            for at in range(self.chunks)
        ]
        if self.chunks == 1:
            return [attention, *runs[0]]
        run_of = {id(segment): at for at, run in enumerate(runs) for segment in run}
        turns = in_turns(runs, lambda timed: (run_of[id(timed)],), Compute("nothing", lambda values: values))
        split = Compute("attention", lambda values: attention.run(values) * self.chunks)
        return [split, *turns, Compute("sum", lambda values: (sum(values) / self.chunks,))]

    def _hops(self, name: str, seconds: float, backward_seconds: float, share: float) -> list[Segment]:
        """Return an all-to-all: between nodes, then inside a node if that takes time."""
        across = cast(Segment, TimedExchange(name, self.clock, seconds, backward_seconds))
        if not self.inside:
            return [across]
        hop = TimedExchange(name, self.clock, share * self.inside, share * self.inside, "inside", quick=True)
        return [across, Compute(name, lambda values: values), cast(Segment, hop)]
