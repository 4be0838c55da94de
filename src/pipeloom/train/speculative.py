"""Optimizer steps without a barrier: a rank steps before the global gradient norm is known, and rolls the step back if needed.

Clipping, and skipping steps that are not finite, need the gradients of all ranks. That is a barrier in every step, after
which the pipeline must fill again. Here a rank whose own gradients need no clipping steps at once, and the ranks exchange
their norms during the next forward and backward (zero-bubble pipelines, arXiv 2401.10241, section 4; in the paper, norms are
passed along the pipeline and a step is undone by arithmetic; here every rank receives them directly and restores exact
copies). Losses and weights are bitwise equal to those with a barrier.

Every rank sends the same kinds of messages in every step, whatever it decides, so that no rank waits for a message that is
never sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeloom.ops.stage_state import StageState
from pipeloom.parallel.grad_norm import exact_sum
from pipeloom.runtime import Pipeline
from pipeloom.runtime.loss import PendingLoss
from pipeloom.train.collect import NumberGather
from pipeloom.train.optimizer import Optimizer
from pipeloom.train.step import NormRow, Outcome, norm_of
from pipeloom.train.workers.context import together


class OptimizerCopy:
    """Exact copies of an optimizer's parameters and state, in memory that the next `take` reuses."""

    def __init__(self) -> None:
        self._originals: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._states: list[dict[Any, dict[str, Any]]] = []

    @torch.no_grad()
    def take(self, optimizer: Optimizer) -> None:
        """Copy the present values; the copies replace those of the last call."""
        self._states = [{master: dict(state) for master, state in each.state.items()} for each in optimizer.optimizers]
        states = [state for by_master in self._states for state in by_master.values()]
        values = [value for state in states for value in state.values() if isinstance(value, Tensor)]
        # also parameters that other ranks step for this one
        self._originals = [tensor.detach() for tensor in (*optimizer.masters.changing(), *values)]
        if [(t.shape, t.dtype) for t in self._originals] != [(t.shape, t.dtype) for t in self._copies]:
            self._copies = [torch.empty_like(tensor) for tensor in self._originals]
        if self._copies:  # in one call for all tensors, where one call each takes longer than the copies
            torch._foreach_copy_(self._copies, self._originals)

    @torch.no_grad()
    def restore(self, optimizer: Optimizer) -> None:
        """Write the copies back."""
        optimizer.wait()  # a transfer under way would overwrite what is restored
        if self._copies:  # as in `take`
            torch._foreach_copy_(self._originals, self._copies)
        for inner, states in zip(optimizer.optimizers, self._states, strict=True):
            inner.state.clear()  # a parameter's first gradient may have added state
            inner.state.update({master: dict(state) for master, state in states.items()})


def before_forward(pipeline: Pipeline) -> Callable[[], None]:
    """Copy what a forward pass changes besides gradients, the state of the layers and torch's random state; return a function
    that restores them."""
    state, device, random = StageState(list(pipeline.modules.values())), pipeline.device, torch.get_rng_state()
    of_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore() -> None:
        state.restore()
        torch.set_rng_state(random)
        if of_device is not None:
            torch.cuda.set_rng_state(of_device, device)

    return restore


_FLAG_COLUMNS = 2  # in front of a row: whether the rank speculates, and the requests that it has received


@dataclass(frozen=True)
class _Step:
    """A step of this rank that is not confirmed yet; `restore_gradients` must be called before it is repeated."""

    loss: PendingLoss
    rate: float
    exchange: NumberGather
    restore_gradients: Callable[[], None] | None


class SpeculativeOptimizer:
    """The steps of one rank. Every rank of the pipeline constructs one, and calls its methods in the same order.

    It holds copies of this rank's parameters and optimizer state, and the gradients of one more step. The optimizer must
    change the tensors of its state in place, as torch's optimizers do.

    Args:
        optimizer: the optimizer of this rank's parameters. With sharded gradients every rank publishes once per step, and
            once more where any rank rolls back its step.
    """

    def __init__(self, pipeline: Pipeline, optimizer: Optimizer) -> None:
        self.rollbacks = 0  # steps that any rank rolled back
        self.speculations = 0  # steps of this rank that preceded the norm
        self._pipeline = pipeline
        self._optimizer = optimizer
        self._pending: _Step | None = None
        self._last_norm_within_clip = False
        self._before_step = OptimizerCopy()
        self._row = NormRow(pipeline, optimizer)

    def step(self, batch: Mapping[str, Any], rate: float, flags: int = 0) -> Outcome | None:
        """Run forward, backward and optimizer step; return the step before this one, which is final now (None at first).

        Args:
            batch: arguments of `Pipeline.step`.
            rate: the learning rate.
            flags: requests received by this rank; they appear in every rank's outcome of this step.
        """
        restore = before_forward(self._pipeline)
        loss = self._pipeline.forward_backward(**batch)
        before, wrong_weights = self._confirm()
        if wrong_weights:
            loss.wait()
            restore()
            self._pipeline.next_step -= 1  # the same step number, so the same random numbers
            loss = self._pipeline.forward_backward(**batch)
        self._advance(loss, rate, flags)
        return before

    def settle(self) -> Outcome | None:
        """Confirm the last step (None: there is none). Call it before weights are used for anything but the next step."""
        return self._confirm()[0]

    def _advance(self, loss: PendingLoss, rate: float, flags: int) -> None:
        """Step now if this rank's own gradients need no clipping, else once all ranks' numbers have arrived."""
        with self._pipeline.waiting_for_device():
            row = self._row.make(0.0, float(flags))
        speculate = self._last_norm_within_clip and self._needs_no_clip(math.sqrt(exact_sum(row[_FLAG_COLUMNS:])))
        row[0] = float(speculate)
        exchange = NumberGather(self._pipeline, row)
        restore_gradients = None
        if speculate:
            self.speculations += 1
            self._before_step.take(self._optimizer)
            restore_gradients = self._optimizer.masters.hold()
            self._optimizer.step(None, rate)
        else:
            self._optimizer.step(_norm(exchange), rate)
        self._pending = _Step(loss, rate, exchange, restore_gradients)

    def _confirm(self) -> tuple[Outcome | None, bool]:
        """Return the pending step's outcome, and whether the computation after it used wrong weights on any rank.

        In that case the present gradients are released, and a rank that stepped too early repeats its step.
        """
        step, self._pending = self._pending, None
        if step is None:
            return None, False
        norm = _norm(step.exchange)
        self._last_norm_within_clip = self._needs_no_clip(norm)
        rows = step.exchange.wait()
        wrong = not self._last_norm_within_clip and any(row[0] for row in rows)
        if wrong:
            self.rollbacks += 1
            self._pipeline.zero_grad()
            if step.restore_gradients is not None:
                self._before_step.restore(self._optimizer)
                step.restore_gradients()
                self._optimizer.step(norm, step.rate)
            else:
                self._optimizer.masters.publish()  # collective: other ranks publish their repeated step
        flags = together(row[1] for row in rows)
        loss = step.loss.wait()
        with self._pipeline.waiting_for_device():
            terms = {key: value.item() for key, value in step.loss.terms().items()}
            return Outcome(loss.item(), norm, step.rate, flags, wrong, terms=terms), wrong

    def _needs_no_clip(self, norm: float) -> bool:
        """Return whether a norm requires neither clipping nor skipping the step."""
        most = self._optimizer.clip_norm
        return math.isfinite(norm) and (most == 0 or norm <= most)


def _norm(exchange: NumberGather) -> float:
    return norm_of(exchange.wait(), _FLAG_COLUMNS)
