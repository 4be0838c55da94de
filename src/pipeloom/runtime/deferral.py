"""The output layer's weight gradients that wait for the cool-down, when the ranks have idle time."""

from __future__ import annotations

from collections import deque

from pipeloom.ops.deferred import Desk, Ledger


class HeadDeferral:
    """One rank's debts of the last layer; the last `limit` micro-batches of a step are put off, 0: all.

    The last ones, because a debt keeps its layer's input and output gradient alive, and the end is nearest to them.

    Attributes:
        desk: where the last layer's linear layers learn of their ledger.
    """

    def __init__(self, limit: int, desk: Desk) -> None:
        self.desk = desk
        self._limit = limit
        self._left = 0
        self._held: deque[Ledger] = deque()

    def begin(self, microbatches: int) -> None:
        """A step starts, in which so many micro-batches go through the last layer here."""
        self._left = microbatches
        self._held.clear()  # what a step that failed has left

    def hold(self, ledger: Ledger) -> None:
        """A micro-batch's backward is done but for this debt, which is paid now or put off."""
        self._left -= 1
        if self._limit and self._left >= self._limit:
            ledger.pay()
        else:
            self._held.append(ledger)

    def pay_one(self) -> None:
        """Computes the oldest weight gradients that were put off, if there are any."""
        if self._held:
            self._held.popleft().pay()

    def pay_all(self) -> None:
        while self._held:
            self.pay_one()

    @property
    def owes(self) -> bool:
        return bool(self._held)
