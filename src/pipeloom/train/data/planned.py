"""Steps of whole documents in unequal micro-batches: packed, ordered and scheduled for their lengths by `plan_step`."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from pipeloom.config import Config
from pipeloom.plan.step import SequenceTime, StepPlan, plan_step
from pipeloom.runtime.batch import IGNORE_INDEX
from pipeloom.schedule import Schedule
from pipeloom.schedule.families import canonical_name
from pipeloom.shapes.layers import training_flops
from pipeloom.train.data.batches import Batch


class PlannedBatch(NamedTuple):
    """One replica's part of a step's batch.

    Attributes:
        microbatches: a row each, of several documents.
        schedule: for their lengths.
        tokens, flops: of the documents of all replicas; floating-point operations of the forward and backward.
    """

    microbatches: tuple[Batch, ...]
    schedule: Schedule
    tokens: int
    flops: float

    def to(self, device: torch.device) -> PlannedBatch:
        return self._replace(microbatches=tuple(each.to(device) for each in self.microbatches))

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments for `Pipeline.step`."""
        given = [(each.tokens, each.targets, each.keywords) for each in self.microbatches]
        return {"microbatches": given, "schedule": self.schedule}


class StepPlanner:
    """Divides the documents of each batch among replicas and micro-batches; the same batch gives the same plan in every run.

    A document's time is in proportion to its operations; a micro-batch takes a hundredth of a full one's besides, so that there
    are more only where they shorten the step. The plan of the run's first batch tells later ones how many
    micro-batches to try, also in a run that is resumed.

    Args:
        chunks: of a rank.
        first: the run's first batch.
    """

    def __init__(self, config: Config, chunks: int, first: Batch) -> None:
        train, axes, shape = config.train, config.parallel, config.model.shape()
        self._ranks, self._replicas, self._depth = axes.pp, axes.dp, config.model.num_nextn_predict_layers
        self._tokens = most_tokens(config)
        self._family = canonical_name(config.schedule.name), chunks
        once, twice = (training_flops(shape, count * train.seq_len, 1) for count in (1, 2))
        square = (twice - 2 * once) / (2 * train.seq_len**2)
        time = SequenceTime(linear=once / train.seq_len - square * train.seq_len, square=square)
        self._time = replace(time, fixed=time.of(self._tokens) / 100)
        self._first = self._planned(lengths_of(documents_of(first)), None)

    @property
    def words(self) -> str:
        """Return the micro-batches of each replica in the plan of the first batch, and its gap to the bound."""
        counts = " and ".join(str(len(each.microbatches)) for each in self._first.replicas)
        return f"{counts} micro-batches, {100 * self._first.gap:.1f} % above the bound"

    def part(self, batch: Batch, replica: int) -> PlannedBatch:
        """Return a replica's part of a batch of packed rows."""
        documents = documents_of(batch)
        lengths = lengths_of(documents)
        mine = self._planned(lengths, self._first).replicas[replica]
        return PlannedBatch(
            tuple(
                _joined(batch, [documents[at] for at in numbers]).with_ahead(self._depth)
                for numbers in mine.microbatches
            ),
            mine.schedule,
            sum(lengths),
            sum(map(self._time.of, lengths)),
        )

    def _planned(self, lengths: list[int], last: StepPlan | None) -> StepPlan:
        return plan_step(
            lengths,
            self._ranks,
            self._replicas,
            tokens=self._tokens,
            time=self._time,
            families=[self._family],
            last=last,
        )


def most_tokens(config: Config) -> int:
    """Return the most tokens of a planned micro-batch: those of the largest equal one."""
    rows = -(-config.train.global_batch_size // (config.parallel.dp * config.schedule.microbatches))
    return rows * config.train.seq_len


def documents_of(batch: Batch) -> list[tuple[int, slice]]:
    """Return (row, places) of each document of packed rows that has targets."""
    assert batch.positions is not None
    documents = []
    for row, (positions, targets) in enumerate(zip(batch.positions, batch.targets, strict=True)):
        edges = [*(positions == 0).nonzero().flatten().tolist(), len(positions)]
        places = [slice(start, end) for start, end in pairwise(edges)]
        documents += [(row, each) for each in places if bool((targets[each] != IGNORE_INDEX).any())]
    return documents


def lengths_of(documents: list[tuple[int, slice]]) -> list[int]:
    return [places.stop - places.start for _, places in documents]


def _joined(batch: Batch, documents: list[tuple[int, slice]]) -> Batch:
    """Return a batch of one row, of these documents."""
    return Batch(*(None if part is None else torch.cat([part[at] for at in documents])[None] for part in batch))  # type: ignore[arg-type]
