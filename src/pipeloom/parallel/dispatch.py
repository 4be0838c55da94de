"""Dispatch and combine: rows to their experts and back over the expert-parallel ranks, as segments of a layer.

The segments pass on these values: rows, the weights of the mixture, the dispatch plan, and then any others of the layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeloom.ops.segments import Compute, Done, Pending, Segment, Values
from pipeloom.ops.token_permute import TokenPermutation, combine_rows, gather_rows, permute
from pipeloom.parallel.dispatch_plan import AllToAllSplit, DispatchPlan, ExpertParallel
from pipeloom.parallel.through_host import start

ROWS, WEIGHTS, PLAN = 0, 1, 2


@dataclass(frozen=True)
class AllToAll:
    """One all-to-all of the dispatch plan; its backward is the same exchange in the other direction.

    Attributes:
        name: "dispatch" or "combine".
        split: index into the dispatch plan's `hops`.
        back: whether rows leave the experts rather than go to them.
        places: the values that move, tensors [rows, width].
        quick: whether the exchange stays inside a node.
        routes: whether the rows' routes move with them, in the forward.
    """

    name: str
    split: int
    back: bool
    places: tuple[int, ...] = (ROWS,)
    quick: bool = False
    routes: bool = False

    @property
    def filled(self) -> tuple[int, ...]:
        """Return the places whose values the forward replaces."""
        return (*self.places, PLAN) if self.routes else self.places

    def start(self, values: Values) -> Pending:
        dispatch_plan: DispatchPlan = values[PLAN]
        return self.exchange(values, dispatch_plan, self.back, dispatch_plan.routes if self.routes else None)

    def start_backward(self, gradients: Values, saved: Values) -> Pending:
        return self.exchange(gradients, saved[PLAN], not self.back)

    def exchange(
        self, values: Values, dispatch_plan: DispatchPlan, back: bool, routes: Tensor | None = None
    ) -> Pending:
        split = dispatch_plan.hops[self.split]
        if split.axis.size == 1:
            return Done(values)
        moved = [(at, values[at]) for at in self.places if values[at] is not None]
        transfers = {at: _TensorAllToAll(tensor, split, back) for at, tensor in moved}
        if routes is not None:
            return _Moving(values, transfers, _TensorAllToAll(routes, split, back))
        return _Moving(values, transfers) if moved else Done(values)


class _TensorAllToAll:
    """An all-to-all of one tensor in progress."""

    def __init__(self, rows: Tensor, split: AllToAllSplit, back: bool) -> None:
        send, receive = (split.receive, split.send) if back else (split.send, split.receive)
        self._rows = rows.contiguous()  # held until the end: it is read while it is sent
        self._received = rows.new_empty((sum(receive), *rows.shape[1:]))
        self._work = start(
            dist.all_to_all_single, self._received, self._rows, list(receive), list(send), group=split.axis.group
        )

    def wait(self) -> Tensor:
        self._work.wait()
        return self._received


class _Moving:
    """The values of a layer, some of which are being exchanged."""

    def __init__(
        self, values: Values, transfers: dict[int, _TensorAllToAll], routes: _TensorAllToAll | None = None
    ) -> None:
        self._values = values
        self._transfers = transfers
        self._routes = routes

    def wait(self) -> Values:
        arrived: dict[int, Any] = {at: transfer.wait() for at, transfer in self._transfers.items()}
        if self._routes is not None:
            arrived[PLAN] = replace(self._values[PLAN], routes=self._routes.wait())
        return tuple(arrived.get(at, value) for at, value in enumerate(self._values))


def permute_for_dispatch(
    x: Tensor, weights: Tensor, leaving: TokenPermutation, parallel: ExpertParallel | None
) -> tuple[Tensor, Tensor]:
    """Tokens x [tokens, width] and weights [tokens, k] -> the rows and weights that leave for the experts."""
    two_level = parallel is not None and parallel.size > 1 and parallel.two_level
    return gather_rows(x, leaving), (gather_rows(weights, leaving) if two_level else weights)


def dispatch_segments(parallel: ExpertParallel | None) -> list[Segment]:
    """From `permute_for_dispatch` to the experts' rank; the first segment is the one that is worth hiding."""
    if parallel is None or parallel.size == 1:
        return []
    if not parallel.two_level:
        return [AllToAll("dispatch", 0, back=False)]
    return [
        AllToAll("dispatch", 0, back=False, places=(ROWS, WEIGHTS), routes=True),
        Compute("fan out", _fan_out),
        AllToAll("dispatch", 1, back=False, quick=True),
    ]


def combine_segments(parallel: ExpertParallel | None) -> list[Segment]:
    """From the experts to `unpermute_and_mix`; the last segment is the one that is worth hiding."""
    if parallel is None or parallel.size == 1:
        return []
    if not parallel.two_level:
        return [AllToAll("combine", 0, back=True)]
    return [
        AllToAll("combine", 1, back=True, quick=True),
        Compute("mix", _mix_in_node),
        AllToAll("combine", 0, back=True),
    ]


def group_by_expert(rows: Tensor, dispatch_plan: DispatchPlan) -> Tensor:
    """Sort rows from the order of arrival to the order of experts."""
    arrival = dispatch_plan.arrival
    if arrival.order is None or arrival.inverse is None:
        return rows
    return permute(rows, arrival.order, arrival.inverse)


def ungroup(rows: Tensor, dispatch_plan: DispatchPlan) -> Tensor:
    """The inverse of `group_by_expert`."""
    arrival = dispatch_plan.arrival
    if arrival.order is None or arrival.inverse is None:
        return rows
    return permute(rows, arrival.inverse, arrival.order)


def unpermute_and_mix(rows: Tensor, weights: Tensor | None, dispatch_plan: DispatchPlan) -> Tensor:
    """Combine the returned rows by the weights of the mixture -> tokens [tokens, width].

    With two levels each row already is one node's part of the mixture, and `weights` is not used.
    """
    if dispatch_plan.fan is not None or weights is None:
        tokens, parts = dispatch_plan.leaving.slot.shape
        weights = torch.ones(tokens, parts, dtype=torch.float32, device=rows.device)
    return combine_rows(rows, weights, dispatch_plan.leaving)


def _fan_out(values: Values) -> Values:
    rows, weights, dispatch_plan, *rest = values
    fanned: DispatchPlan = dispatch_plan.fanned()
    assert fanned.fan is not None
    return gather_rows(rows, fanned.fan), weights, fanned, *rest


def _mix_in_node(values: Values) -> Values:
    dispatch_plan: DispatchPlan = values[PLAN]
    assert dispatch_plan.fan is not None
    rows, weights, *rest = values
    return combine_rows(rows, weights, dispatch_plan.fan), None, *rest


def bytes_across_nodes(dispatch_plans: Sequence[DispatchPlan], parallel: ExpertParallel, row_bytes: int) -> int:
    """Bytes of rows that this rank sends to other nodes in one dispatch, rows of `row_bytes` each."""
    hops = [dispatch_plan.hops[0] for dispatch_plan in dispatch_plans]
    if parallel.two_level:
        assert parallel.across is not None
        here = parallel.across.index
        return row_bytes * sum(sum(split.send) - split.send[here] for split in hops)
    length = parallel.size // parallel.nodes
    here = parallel.axis.index // length
    return row_bytes * sum(count for split in hops for rank, count in enumerate(split.send) if rank // length != here)
