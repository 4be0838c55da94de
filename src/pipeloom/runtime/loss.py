"""Transfer of a step's loss from the ranks that compute a share of it to all ranks of the mesh."""

from __future__ import annotations

import contextlib
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeloom.errors import ConfigError, UsageError
from pipeloom.ops.nested import tensors_in
from pipeloom.parallel.collectives import Tag, carrier_of
from pipeloom.parallel.mesh import Mesh
from pipeloom.runtime.health.report import FailureReporter
from pipeloom.runtime.p2p.base import PeerGone
from pipeloom.schedule.model import Schedule

TOTAL = ""  # no layer's loss has this key
Loss = Callable[[Any, Any], Tensor]
"""`loss(output, targets)` of one micro-batch: the mean over its targets, 0-dim."""


@dataclass
class _Transfers:
    """Transfers of losses in one process group that may not have completed: (work, tensor) each.

    Attributes:
        expected: rank with the loss -> an open receive from it that no step has used yet.
    """

    sends: list[tuple[Any, Tensor]] = field(default_factory=list)
    receives: list[tuple[Any, Tensor]] = field(default_factory=list)
    expected: dict[int, tuple[Any, Tensor]] = field(default_factory=dict)


# They are kept as long as the group exists, also after their pipeline is deleted. gloo drops a send whose work object is deleted
# while the other rank still waits for it, and likewise a receive: the loss then arrives in the next receive, or, if it is
# arriving at that moment, blocks the connection for good.
_TRANSFERS: WeakKeyDictionary[Any, _Transfers] = WeakKeyDictionary()


class MicrobatchLoss(NamedTuple):
    """The loss of one micro-batch.

    Attributes:
        loss, targets: as given to the pipeline, and this micro-batch's part of the targets.
        share: the micro-batch's share of the step's mean. Losses are scaled by nothing else.
    """

    loss: Loss
    targets: Any
    share: float

    def mean(self, output: Any, loss: Loss | None = None) -> Tensor:
        """Return `loss(output, targets)`, 0-dim, without the share; for a share of 0, zero with a zero gradient.

        A mean over no target is NaN, and so is 0 times it, so the loss is not called for such a micro-batch.

        Raises UsageError if the loss does not return one number, or the share is NaN.
        """
        if self.share == 0:
            return _zero(output)
        if math.isnan(self.share):
            raise UsageError("the targets are on the meta device on a rank that computes a loss; pass the real ones")
        value = (loss or self.loss)(output, self.targets)
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.numel() != 1:
            returned = f"{value.dtype}{list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise UsageError(
                f"the loss returned {returned}; it must return a tensor with one real number, the mean over the micro-batch's "
                "targets"
            )
        if value.ndim:
            value = value.reshape(())
        # A backward starts at a node of the graph, and a leaf has none.
        return value.clone() if value.requires_grad and value.is_leaf else value


def require_weighing(loss: object, weight: object, ignore_index: int | None) -> None:
    """Raise ConfigError if torch's own cross entropy is a mean over other targets than the default weight counts.

    Args:
        loss: `nn.CrossEntropyLoss`, `nn.NLLLoss` (or compiled, or the `forward` of one), or a `functools.partial` of their
            functions; others are not checked.
        weight, ignore_index: as given to the pipeline.
    """
    loss = getattr(loss, "__self__", loss)
    loss = getattr(loss, "_orig_mod", loss)  # of torch.compile
    if isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss)):
        class_weights, skipped, reduction = loss.weight, loss.ignore_index, loss.reduction
    elif isinstance(loss, partial) and loss.func in (F.cross_entropy, F.nll_loss):
        class_weights, skipped = loss.keywords.get("weight"), loss.keywords.get("ignore_index", -100)
        reduction = loss.keywords.get("reduction", "mean")
    else:
        return
    if weight is not None or reduction != "mean":
        return
    if class_weights is not None:
        raise ConfigError(
            "the loss weighs its classes, so its mean is over the weights of a micro-batch's targets, but the pipeline would "
            "count the targets; pass weight=lambda targets: class_weights[targets].sum()"
        )
    if skipped != ignore_index and (ignore_index is not None or skipped != -100):
        raise ConfigError(
            f"the loss skips targets of {skipped}, and the pipeline's ignore_index is {ignore_index}; pass "
            f"ignore_index={skipped} to the pipeline"
        )


def _zero(output: Any) -> Tensor:
    """Return 0, connected in the graph to every tensor of `output` that requires a gradient."""
    sums = [value.flatten()[:0].abs().sum() for value in tensors_in(output) if value.requires_grad]
    return torch.stack([each.float() for each in sums]).sum() if sums else torch.zeros(())


class _GradientsAreThere:
    """In place of `backward` of a step's loss."""

    def __call__(self, *_: Any, **__: Any) -> None:
        raise UsageError(
            "backward() of a pipeline's loss: step has run the backwards too, and gradients are in .grad of "
            "pipeline.parameters(); leave the line out, and go on with the optimizer's step (evaluate runs none: call step)"
        )

    def __reduce__(self) -> Any:
        return OrderedDict, ()  # what torch.load takes with weights_only, so that a saved loss can be loaded


class PendingLoss:
    """The loss of a step that this rank has finished, but another may not have."""

    def __init__(self, finish: Callable[[], Tensor], names: Sequence[str] = ()) -> None:
        self._finish = finish
        self._names = names
        self._sums: Tensor | None = None

    def wait(self) -> Tensor:
        """Return the mean loss over all targets of the batch, with layers' terms: a 0-dim fp32 tensor, the same on every rank."""
        sums = self._all()
        loss = sums[0] if sums.ndim else sums
        loss.backward = _GradientsAreThere()  # type: ignore[method-assign]  # else torch says that it requires no gradient
        return loss

    def terms(self) -> dict[str, Tensor]:
        """Return key of a layer's loss -> its unweighted mean over all targets: a 0-dim fp32 tensor, the same on every rank."""
        sums = self._all()
        return {name: sums[at + 1] for at, name in enumerate(self._names)}

    def _all(self) -> Tensor:
        if self._sums is None:
            self._sums = self._finish()
        return self._sums


class LossSum(dict[str, Tensor]):
    """One rank's part of a step's loss: key of a layer's loss -> the sum of its shares that the rank computes.

    TOTAL is the sum of all, those of the layers' losses times their weights.
    """

    def add(self, share: Tensor, key: str = TOTAL) -> None:
        # fp32 on every rank, whatever the model's dtype: what receives it makes room for that
        self[key] = self[key] + share.float() if key in self else share.float()

    def add_term(self, key: str, share: Tensor, weight: float) -> None:
        self.add(share * weight)
        self.add(share, key)

    def together(self, names: Sequence[str], device: torch.device) -> Tensor:
        """Return the total, 0-dim; with `names`, a vector of it and these terms. Values that this rank does not compute are 0."""
        zero = torch.zeros((), dtype=torch.float32, device=device)
        sums = [self.get(name, zero).to(device, copy=True) for name in (TOTAL, *names)]
        return torch.stack(sums) if names else sums[0]


class LossBroadcast:
    """Broadcast of the loss without a barrier: the rank that computes it sends it and continues."""

    def __init__(
        self,
        mesh: Mesh,
        schedule: Schedule,
        device: torch.device,
        alarm: FailureReporter,
        terms: Sequence[str] = (),
    ) -> None:
        self._line = mesh.pipeline
        self._device = device
        self._alarm = alarm
        group = mesh.pipeline.group
        self._transfers = _Transfers() if group is None else _TRANSFERS.setdefault(group, _Transfers())
        self._pending = PendingLoss(lambda: torch.zeros(1 + len(terms)), terms)
        one_pipeline = mesh.everyone.size == len(mesh.pipeline.ranks)
        self._source = schedule.placement[schedule.routes[0][-1]]
        self._group = mesh.everyone.group
        self._carrier = carrier_of(device, self._group)
        self._terms = terms
        self._sum = not one_pipeline or len(schedule.routes) > 1 or bool(terms)
        self._receives = self._group is not None and not self._sum and self._line.rank != self._source
        self._counts = mesh.tp.index == 0  # all tp ranks of a last stage compute the same share

    @property
    def terms(self) -> dict[str, Tensor]:
        """The layers' terms of the last loss, by key."""
        return self._pending.terms()

    def expect(self) -> None:
        """Open the receive of the loss before the work of a step, so that the rank that sends it need not wait for this one.

        Otherwise gloo's thread may handle the reply to a receive while the rank is still opening it, and then it polls on the
        rank's own core for up to 4 ms. NCCL's receives occupy a stream, so they are opened in `start`.
        """
        expected = self._transfers.expected
        if self._receives and self._source not in expected and self._carrier.type == "cpu":
            expected[self._source] = self._receive()

    def start(self, share: LossSum) -> PendingLoss:
        """Start the transfer of the sum of all shares, each of them a part of the step's mean."""
        self._pending.wait()  # one that the caller has dropped would receive the next loss instead
        self._pending = self._start(share)
        return self._pending

    def _start(self, share: LossSum) -> PendingLoss:
        # in fp32 on every rank: ranks without a share have no information on the model's dtype
        if self._receives:
            receipt = self._transfers.expected.pop(self._source, None) or self._receive()
            return PendingLoss(lambda: self._take(receipt))
        total = (share if self._counts else LossSum()).together(self._terms, self._carrier)
        if self._group is None:
            return PendingLoss(lambda: total, self._terms)
        if self._sum:
            with self._alarm.reporting():
                reduction = self._group.allreduce([total])
            return PendingLoss(lambda: self._await(reduction, total, None), self._terms)
        self._send(total)
        loss = total.to(self._device, copy=True)
        return PendingLoss(lambda: loss)

    def _receive(self) -> tuple[Any, Tensor]:
        total = torch.zeros((), dtype=torch.float32, device=self._carrier)
        with self._telling(self._source, "it never sent the loss"):
            receipt = self._line.group.recv([total], self._source, Tag.LOSS), total
        self._transfers.receives.append(receipt)
        return receipt

    def _send(self, total: Tensor) -> None:
        with self._alarm.reporting():
            self._wait_for_sends()  # of the previous step: received long ago
        for rank in range(len(self._line.ranks)):
            if rank != self._source:
                with self._telling(rank, "it did not take the loss"):
                    self._transfers.sends.append((self._line.group.send([total], rank, Tag.LOSS), total))

    def _wait_for_sends(self) -> None:
        sends = self._transfers.sends
        while sends:
            work, _ = sends.pop()
            work.wait()  # its buffer must live until it is sent

    def _take(self, receipt: tuple[Any, Tensor]) -> Tensor:
        loss = self._await(*receipt, self._source)
        self._transfers.receives.remove(receipt)
        return loss

    def _await(self, work: Any, loss: Tensor, source: int | None) -> Tensor:
        with self._telling(source, "it never sent the loss"):
            self._alarm.status.wait_between("the loss")
            work.wait()
            self._alarm.status.leave()
        return loss.to(self._device)

    @contextlib.contextmanager
    def _telling(self, peer: int | None, words: str) -> Iterator[None]:
        """Report an error inside to the other ranks; None: any peer may have caused it."""
        with self._alarm.reporting():
            try:
                yield
            except RuntimeError as error:
                if peer is None:
                    raise
                raise PeerGone(peer, f"{words}: {error}") from None

    def close(self) -> None:
        """Wait for the sends; the loss of a peer is ignored."""
        with contextlib.suppress(RuntimeError):
            self._wait_for_sends()
        self._transfers.sends.clear()
