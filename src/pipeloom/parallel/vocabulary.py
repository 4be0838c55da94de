"""Vocabulary parallelism: embedding, output layer and cross entropy sharded over the tensor-parallel ranks.

Each rank holds vocabulary // size rows of a weight [vocabulary, width]; the last rank also holds the remainder. Where there are
fewer rows than ranks, the last ranks hold none. In training no rank ever holds a full tensor [tokens, vocabulary] (Megatron-LM,
arXiv 1909.08053, section 3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from pipeloom.errors import UsageError
from pipeloom.parallel.collectives import start_all_reduce, start_gather_columns
from pipeloom.parallel.mesh import Axis
from pipeloom.parallel.sharding import ParameterSharding, Shard
from pipeloom.parallel.tensor import ColumnLinear, TensorParallel, sum_over_ranks
from pipeloom.shapes.mesh import uneven_parts

IGNORED = -100  # torch's default ignore_index


class VocabularyEmbedding(nn.Module):
    """Embedding that holds this rank's rows of a weight [vocabulary, width], and sums the looked-up rows over the ranks.

    tokens [batch, tokens] int64 -> [batch, tokens, width]; with sequence parallelism [batch, tokens / size, width]. At most
    one term of the sum is nonzero, so the result is bitwise that of one process. The weight is uninitialized.
    """

    def __init__(self, vocabulary: int, width: int, tensor: TensorParallel) -> None:
        super().__init__()
        self.tensor = tensor
        self.vocabulary = vocabulary
        self.parts = uneven_parts(vocabulary, tensor.size)
        self.weight = nn.Parameter(torch.empty(self.parts[tensor.index], width))

    def sharding(self) -> Mapping[str, ParameterSharding]:
        return {"weight": ParameterSharding((Shard("tp", 0, self.parts),))}

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the embeddings. Raises UsageError for a token outside the vocabulary; on CUDA a device-side assertion fails."""
        rows, outside = _look_up(self.weight, sum(self.parts[: self.tensor.index]), tokens, self.vocabulary)
        return sum_over_ranks(rows.masked_fill(outside.unsqueeze(-1), 0), self.tensor)


class VocabularyHead(ColumnLinear):
    """Output layer that holds this rank's rows of a weight [vocabulary, width] and computes these logits.

    [batch, tokens, width] (with sequence parallelism tokens / size) -> [batch, tokens, local vocabulary]. Use it with
    `cross_entropy` of this module.
    """

    def __init__(self, width: int, vocabulary: int, tensor: TensorParallel) -> None:
        super().__init__(width, uneven_parts(vocabulary, tensor.size), tensor)


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    tensor: TensorParallel,
    vocabulary: int,
    label_smoothing: float = 0.0,
    count: Tensor | None = None,
) -> Tensor:
    """Return the mean over targets of -Σ_v q(v) log p(v), in nats: 0-dim, fp32 (fp64 for fp64 logits), equal on all ranks.

    q is 1 - label_smoothing at the target, plus label_smoothing / vocabulary everywhere. Targets of -100 are ignored. The
    forward has two all-reduces (each token's largest logit, then its sums), the backward none.

    Args:
        logits: [..., local vocabulary], split as by `VocabularyHead`.
        targets: [...], int64.
        count: what the sum over the targets is divided by; None: the number of them.

    Raises UsageError for a target outside the vocabulary (on CUDA a device-side assertion fails).
    """
    total = (targets != IGNORED).sum() if count is None else count
    first, smoothing = sum(uneven_parts(vocabulary, tensor.size)[: tensor.index]), (label_smoothing, vocabulary)
    return _CrossEntropy.apply(logits, targets.flatten(), total, tensor.axis, first, *smoothing)  # type: ignore[no-any-return, no-untyped-call]


@torch.no_grad()
def whole_logits(logits: Tensor, tensor: TensorParallel, vocabulary: int) -> Tensor:
    """Gather logits [..., local vocabulary] to [..., vocabulary] on every rank; meant for the few positions of sampling."""
    return torch.cat(start_gather_columns(logits, tensor.axis, uneven_parts(vocabulary, tensor.size)).wait(), -1)


class VocabularyShare(nn.Module):
    """A rank's rows of a weight [vocabulary, width] that is spread over all ranks of a replica: pp, or pp x tp.

    It is that of the output layer, of the input embedding, or, where they are tied, of both.

    Args:
        width: of the weight, which is uninitialized.
        parts: the rows of each rank, in order.
        index: this rank's number.
        label_smoothing: ε of the loss in training.
        embeds: whether tokens are looked up in it.
        padding: a token whose row gets no gradient from that; None: there is none.
    """

    def __init__(
        self,
        width: int,
        parts: Sequence[int],
        index: int,
        label_smoothing: float = 0.0,
        embeds: bool = False,
        padding: int | None = None,
    ) -> None:
        super().__init__()
        self.parts, self.first, self.label_smoothing = tuple(parts), sum(parts[:index]), label_smoothing
        self.embeds, self.padding = embeds, padding
        self.weight = nn.Parameter(torch.empty(parts[index], width))

    @property
    def vocabulary(self) -> int:
        """The rows of all ranks."""
        return sum(self.parts)

    def sharding(self) -> Mapping[str, ParameterSharding]:
        return {"weight": ParameterSharding((Shard("pp_tp", 0, self.parts),))}

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., width] -> the logits of this share, [..., rows]."""
        return F.linear(hidden, self.weight)

    def look_up(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """tokens [...] int64 -> (their rows [..., width], any row for a token of another share; whether it is of another).

        Raises UsageError for a token outside the vocabulary; on CUDA a device-side assertion fails.
        """
        return _look_up(self.weight, self.first, tokens, self.vocabulary)


class _CrossEntropy(torch.autograd.Function):
    """With x the logits minus their maximum: loss = log Σ exp x - (1 - smoothing) x[target] - smoothing / vocabulary Σ x."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        total: Tensor,
        axis: Axis,
        first: int,
        smoothing: float,
        vocabulary: int,
    ) -> Tensor:
        counts = targets != IGNORED
        _refuse_outside(torch.where(counts, targets, 0), vocabulary, "target")
        work = _shifted(logits, axis)
        place, outside = places_in(targets, first, work.shape[-1])
        target_logits = work.gather(-1, place).sum(-1).masked_fill_(outside, 0)
        smooth = [work.sum(-1)] if smoothing else []
        sums = start_all_reduce(torch.stack([target_logits, work.exp_().sum(-1), *smooth]), axis).wait()
        losses = sums[1].log() - (1 - smoothing) * sums[0]
        if smoothing:
            losses -= smoothing / vocabulary * sums[2]
        # A copy of the one row, since a view would keep the other sums alive until the backward.
        ctx.save_for_backward(work, sums[1].clone(), place, outside, counts, total)
        ctx.smoothing, ctx.vocabulary, ctx.shape, ctx.dtype = smoothing, vocabulary, logits.shape, logits.dtype
        return losses.masked_fill_(~counts, 0).sum() / total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Compute p - q of each token in place of the exponentials; it can neither run twice nor be differentiated."""
        work, exponentials, place, outside, counts, total = ctx.saved_tensors
        scale = gradients[0] / total * counts
        work.mul_((scale / exponentials).unsqueeze(-1))
        if ctx.smoothing:
            work.sub_(scale.unsqueeze(-1) * (ctx.smoothing / ctx.vocabulary))
        hit = (scale * (ctx.smoothing - 1)).masked_fill(outside, 0)
        work.scatter_add_(-1, place, hit.unsqueeze(-1))
        return work.view(ctx.shape).to(ctx.dtype), *[None] * 6


def _shifted(logits: Tensor, axis: Axis) -> Tensor:
    """Return a copy [tokens, local vocabulary] of the logits minus each token's maximum over all ranks, in at least fp32."""
    rows = logits.detach().flatten(0, -2)
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32), copy=True)
    largest = start_all_reduce(largest_of(wide), axis, dist.ReduceOp.MAX).wait()
    return wide.sub_(largest.unsqueeze(-1))


def largest_of(rows: Tensor) -> Tensor:
    """[tokens, columns] -> the largest of each row; of a share without columns -inf, which no maximum over shares keeps."""
    return rows.amax(-1) if rows.shape[-1] else rows.new_full(rows.shape[:-1], -torch.inf)


def places_in(ids: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Return (place of each id in a share [..., 1], 0 for an id of another one; whether it is of another: [...]).

    Places in a share of nothing are [..., 0]: `gather` reads nothing there, and `scatter_add_` adds nothing.

    Args:
        first, count: the ids of the share.
    """
    local = ids - first
    outside = (local < 0) | (local >= count)
    return local.masked_fill(outside, 0).unsqueeze(-1)[..., :count], outside


def rows_at(weight: Tensor, places: Tensor) -> Tensor:
    """Return the rows [..., width] of a share's weight at `places`, as of `places_in`; zeros where it has none."""
    return F.embedding(places.sum(-1), weight if len(weight) else F.pad(weight, (0, 0, 0, 1)))


def _look_up(weight: Tensor, first: int, tokens: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Return (the tokens' rows of a share, any row for a token of another share; whether it is of another)."""
    _refuse_outside(tokens, vocabulary, "token")
    places, outside = places_in(tokens, first, len(weight))
    return rows_at(weight, places), outside


def _refuse_outside(ids: Tensor, vocabulary: int, what: str) -> None:
    # Reading the result would block the process until the device catches up; torch has no public assertion on the device.
    if ids.device.type != "cpu":
        torch._assert_async(((ids >= 0) & (ids < vocabulary)).all(), f"a {what} is outside the vocabulary")
        return
    if not ids.numel():
        return
    low, high = (int(value) for value in torch.aminmax(ids))
    if low < 0 or high >= vocabulary:
        wrong = low if low < 0 else high
        raise UsageError(f"{what} {wrong} is outside the vocabulary of {vocabulary}: ids are 0 to {vocabulary - 1}")
