"""Items of a data set for each step: every item once per epoch, in an order that a seed decides.

Everything is a function of (seed, step) and the sizes, so a run needs only its step to resume.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from pipeloom.errors import ConfigError
from pipeloom.ops.random_state import stable_seed

Order = Literal["shuffle-then-split", "split-then-shuffle"]
Remainder = Literal["pad", "drop"]


class Sampler:
    """Item numbers of each step's batch, and of each replica's part of it. All replicas get the same number of items.

    `shuffle-then-split`: one shuffled order of all items per epoch, of which every step takes the next ones: the batch does
    not depend on the number of replicas, and a replica sees other items in each epoch. `split-then-shuffle`: a replica has
    the same items in all epochs (every `replicas`-th one), and shuffles those: for data that is stored where it is used.

    The last batch of an epoch is filled up with items from the epoch's start (`pad`, which also serves data sets smaller
    than a batch), or left out (`drop`). The length of an epoch does not depend on the number of replicas.

    Args:
        items: number of items.
        rows: rows of a batch over all replicas; `replicas` must divide it.

    Raises:
        ConfigError: `replicas` does not divide `rows`, `drop` leaves no batch, or `split-then-shuffle` leaves a replica without
            items.
    """

    def __init__(self, items: int, rows: int, replicas: int, seed: int, order: Order, remainder: Remainder) -> None:
        self.items, self.rows, self.replicas = items, rows, replicas
        self._seed, self._order, self._remainder = seed, order, remainder
        self._known: tuple[int, list[Tensor]] | None = None
        share = items // rows if remainder == "drop" else -(-items // rows)
        self.steps_per_epoch = share
        if rows % replicas:
            raise ConfigError(f"a batch of {rows} sequences cannot be split evenly over {replicas} replicas")
        if items < 1 or share == 0:
            raise ConfigError(
                f'data.remainder = "drop": {items} windows do not fill one batch of {rows}; set train.global_batch_size to '
                f'at most {max(items, 1)}, or data.remainder = "pad"'
            )
        if order == "split-then-shuffle" and items < replicas:
            raise ConfigError(
                f'data.sampling = "split-then-shuffle": {items} windows cannot be split over {replicas} replicas; '
                f'use "shuffle-then-split"'
            )

    def batch(self, step: int) -> Tensor:
        """Return the item numbers [rows] of the whole batch of `step`, replica by replica."""
        return torch.cat([self.part(step, replica) for replica in range(self.replicas)])

    def part(self, step: int, replica: int) -> Tensor:
        """Return the item numbers [rows / replicas] of one replica's part; steps are counted from 0 over all epochs."""
        epoch, at = divmod(step, self.steps_per_epoch)
        per_replica = self.rows // self.replicas
        if self._order == "split-then-shuffle":
            return self._orders(epoch)[replica][at * per_replica : (at + 1) * per_replica]
        start = at * self.rows + replica * per_replica
        return self._orders(epoch)[0][start : start + per_replica]

    def _orders(self, epoch: int) -> list[Tensor]:
        """Return the epoch's order of all items, or of each replica's; the last epoch's is cached."""
        if self._known is None or self._known[0] != epoch:
            if self._order == "shuffle-then-split":
                orders = [self._shuffled(torch.arange(self.items), epoch, 0, self.steps_per_epoch * self.rows)]
            else:
                count = self.steps_per_epoch * self.rows // self.replicas
                parts = [torch.arange(replica, self.items, self.replicas) for replica in range(self.replicas)]
                orders = [self._shuffled(part, epoch, replica, count) for replica, part in enumerate(parts)]
            self._known = epoch, orders
        return self._known[1]

    def _shuffled(self, items: Tensor, epoch: int, replica: int, count: int) -> Tensor:
        """Return `count` items in an order that (seed, epoch, replica) decides, repeated from the start where there are fewer."""
        generator = torch.Generator().manual_seed(stable_seed("order", self._seed, epoch, replica))
        shuffled = items[torch.randperm(len(items), generator=generator)]
        return shuffled.repeat(-(-count // len(items)))[:count]
