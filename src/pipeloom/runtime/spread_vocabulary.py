"""The output layer spread over the ranks of a pipeline: each rank's share, and what S, T and the group entries do with it.

A rank holds rows of the output weight [vocabulary, width]. With y its logits, l their largest, and L and Z the largest logit and
the sum of exp(y - L) over all ranks, a token's loss is log Z + L - (1 - ε) y[target] - ε / V Σ y, and the gradient of its logits
exp(y - l) · exp(l - L) / Z - q, where q is 1 - ε at the target plus ε / V (arXiv 2411.05288, algorithms 1 and 2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from pipeloom.errors import ConfigError, UsageError
from pipeloom.ops.layer import Layer
from pipeloom.parallel.collectives import carrier_of
from pipeloom.parallel.mesh import Axis, Mesh, group_of_members
from pipeloom.parallel.tensor import uneven_parts
from pipeloom.parallel.vocabulary import IGNORED, VocabularyShare


def vocabulary_share(name: str, weight: Tensor, rank: int, ranks: int, label_smoothing: float = 0.0) -> Layer:
    """Return the layer `name` with the share of one of `ranks` of the output weight [vocabulary, width].

    It is the last of a model's layers on every rank; the schedule has been through the transform `vocabulary`.

    Args:
        label_smoothing: ε of the loss in training.
    """
    parts = uneven_parts(len(weight), ranks)

    def share() -> nn.Module:
        module = VocabularyShare(weight.shape[1], parts, rank, label_smoothing)
        rows = weight[module.first : module.first + parts[rank]]
        module.weight = nn.Parameter(rows.clone())
        return module

    return Layer(name, share)


@dataclass
class _Tokens:
    """State of one micro-batch on a share, from its broadcast to its T; rows are tokens.

    Attributes:
        hidden: the last stage's output.
        logits: of the share, with their graph.
        powers: exp(logits - largest), [tokens, rows].
        facts: the largest logit; then the target's logit, the sum of the powers and that of the logits: [4, tokens].
        row, outside: the target's row in this share, and whether it is in another.
        counts: whether the target counts.
        part: this share's part of the input gradient, of one reduction: the powers times the weight.
        factor: of the powers, so that they sum to one over the ranks.
        scale: of a token's loss in the step's.
    """

    hidden: Tensor
    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    powers: Tensor = field(default_factory=lambda: torch.empty(0))
    facts: Tensor = field(default_factory=lambda: torch.empty(0))
    row: Tensor = field(default_factory=lambda: torch.empty(0))
    outside: Tensor = field(default_factory=lambda: torch.empty(0))
    counts: Tensor = field(default_factory=lambda: torch.empty(0))
    part: Tensor | None = None
    factor: Tensor = field(default_factory=lambda: torch.empty(0))
    scale: Tensor = field(default_factory=lambda: torch.empty(0))


class SpreadVocabulary:
    """The share of one rank, and its part in the group entries; these run in one thread after the other.

    Args:
        share: this rank's.
        axis: the ranks of a replica, with a process group that nothing else uses.
        sources: those of them that have the last stage of layers, in order.
        fused: whether one reduction follows S, which computes its part of the input gradient.
    """

    def __init__(self, share: VocabularyShare, axis: Axis, sources: Sequence[int], fused: bool) -> None:
        self.share, self.axis, self.sources, self.fused = share, axis, sources, fused
        self._tokens: dict[int, _Tokens] = {}

    @classmethod
    def of(cls, share: VocabularyShare, mesh: Mesh, source: int, fused: bool) -> SpreadVocabulary:
        """Return the share of this process, with a new process group; collective over the ranks of its replica.

        Args:
            source: the rank of the last stage of layers.

        Raises ConfigError for a share of another number of ranks.
        """
        numbers = mesh.shape.group_of(mesh.everyone.index, "pp_tp")
        ranks = tuple(mesh.everyone.ranks[number] for number in numbers)
        if len(share.parts) != len(ranks):
            raise ConfigError(
                f"the vocabulary is cut into {len(share.parts)} shares, and {len(ranks)} ranks have one each"
            )
        sources = [at for at, number in enumerate(numbers) if mesh.shape.place(number).pp == source]
        axis = Axis(ranks, mesh.place.pp_tp, None if len(ranks) == 1 else group_of_members(ranks))
        return cls(share, axis, sources, fused)

    @property
    def _root(self) -> int:
        return self.axis.ranks[self.sources[0]]

    def broadcast(self, microbatch: int, hidden: Tensor | None) -> None:
        """BROADCAST: receive the last stage's output [..., width], or send `hidden`, which only that stage's rank has.

        Raises UsageError for an output of another width or dtype than the weight's, or with more than 7 dimensions.
        """
        weight = self.share.weight
        sizes = torch.zeros(8, dtype=torch.int64)
        if hidden is not None:
            if hidden.shape[-1] != weight.shape[1] or hidden.dtype != weight.dtype or hidden.ndim > 7:
                raise UsageError(
                    f"the last stage returned {hidden.dtype}{list(hidden.shape)}, and the vocabulary's weight is "
                    f"{weight.dtype}[{self.share.vocabulary}, {weight.shape[1]}]"
                )
            sizes[: hidden.ndim + 1] = torch.tensor([hidden.ndim, *hidden.shape])
        sizes = sizes.to(weight.device)
        sizes = self._moved(dist.broadcast, sizes, self._root)
        count, *shape = sizes.tolist()
        values = torch.empty(shape[:count], dtype=weight.dtype, device=weight.device)
        if hidden is not None:
            values.copy_(hidden.detach())
        self._tokens[microbatch] = _Tokens(self._moved(dist.broadcast, values, self._root))

    def _moved(self, collective: Callable[..., Any], tensor: Tensor, *arguments: Any) -> Tensor:
        """Return `tensor`, or a copy of it, after a collective of the ranks, on the host where the group moves no others."""
        carrier = tensor.to(carrier_of(tensor.device, self.axis.group))
        collective(carrier, *arguments, group=self.axis.group)
        return carrier.to(tensor.device)

    def scores(self, microbatch: int, targets: Tensor, training: bool) -> None:
        """S: compute the logits of the share, and with one reduction its part of the input gradient.

        Raises UsageError for targets that are not on this rank, of another shape, or outside the vocabulary.
        """
        tokens, share = self._tokens[microbatch], self.share
        flat = self._flat(targets, tokens.hidden)
        with torch.set_grad_enabled(training):
            tokens.hidden = tokens.hidden.requires_grad_(training and not self.fused)
            tokens.logits = share(tokens.hidden)
        with torch.no_grad():
            rows = tokens.logits.detach().flatten(0, -2)
            rows = rows.to(torch.promote_types(rows.dtype, torch.float32), copy=True)
            tokens.counts = flat != IGNORED
            local = flat - share.first
            tokens.outside = (local < 0) | (local >= rows.shape[1])
            tokens.row = local.masked_fill(tokens.outside, 0).unsqueeze(-1)
            hits = rows.gather(-1, tokens.row).squeeze(-1).masked_fill_(tokens.outside, 0)
            largest, total = rows.amax(-1), rows.sum(-1)
            tokens.powers = rows.sub_(largest.unsqueeze(-1)).exp_()
            tokens.facts = torch.stack([largest, hits, tokens.powers.sum(-1), total])
            if training and self.fused:
                tokens.part = tokens.powers.to(share.weight.dtype) @ share.weight

    def _flat(self, targets: Tensor, hidden: Tensor) -> Tensor:
        if not isinstance(targets, Tensor) or targets.device.type == "meta" or targets.shape != hidden.shape[:-1]:
            shape = list(targets.shape) if isinstance(targets, Tensor) else type(targets).__name__
            raise UsageError(
                f"the targets are {shape}; a vocabulary over the pipeline needs {list(hidden.shape[:-1])} of them on every rank"
            )
        flat = targets.flatten()
        known = flat[flat != IGNORED]
        if known.numel() and not (int(known.min()) >= 0 and int(known.max()) < self.share.vocabulary):
            raise UsageError(f"a target is outside the vocabulary of {self.share.vocabulary}")
        return flat

    @torch.no_grad()
    def sum_scores(self, microbatch: int, weight: float, training: bool) -> Tensor:
        """REDUCE_SUM, and the first part of REDUCE: return the micro-batch's share of the step's loss, 0-dim, on every rank.

        Args:
            weight: its share of the step's mean.
        """
        tokens, share = self._tokens[microbatch], self.share
        smoothing = share.label_smoothing if training else 0.0
        largest = self._moved(dist.all_reduce, tokens.facts[0].clone(), dist.ReduceOp.MAX)
        shift = (tokens.facts[0] - largest).exp_()
        sums = torch.stack([tokens.facts[1], tokens.facts[2] * shift, tokens.facts[3]])
        hit, powers, total = self._moved(dist.all_reduce, sums)
        tokens.factor = shift / powers
        tokens.scale = tokens.counts * (weight / tokens.counts.sum().clamp(min=1))
        losses = powers.log() + largest - (1 - smoothing) * hit - smoothing / share.vocabulary * total
        if not training:
            del self._tokens[microbatch]
        shares: Tensor = (losses * tokens.scale).masked_fill(~tokens.counts, 0)
        return shares.sum()

    @torch.no_grad()
    def sum_input_gradient(self, microbatch: int) -> Tensor | None:
        """The second part of REDUCE, and REDUCE_INPUT: return the input gradient on the rank of the last stage of layers."""
        tokens, share = self._tokens[microbatch], self.share
        if not self.fused:
            gradient = self._tokens.pop(microbatch).hidden.grad
            assert gradient is not None
        else:
            assert tokens.part is not None
            smoothing, weight = share.label_smoothing, share.weight
            hit = weight[tokens.row.squeeze(-1)].masked_fill_(tokens.outside.unsqueeze(-1), 0).mul_(1 - smoothing)
            if smoothing:
                hit += smoothing / share.vocabulary * weight.sum(0)
            rows = (tokens.part * tokens.factor.unsqueeze(-1)).sub_(hit).mul_(tokens.scale.unsqueeze(-1))
            gradient, tokens.part = rows.to(weight.dtype).view(tokens.hidden.shape), None
        if len(self.sources) > 1:  # all of these ranks need the sum
            gradient = self._moved(dist.all_reduce, gradient.contiguous())
        else:
            gradient = self._moved(dist.reduce, gradient.contiguous(), self._root)
        return gradient if self.axis.index in self.sources else None

    @torch.no_grad()
    def logits(self, hidden: Tensor | None) -> Tensor | None:
        """Return the logits [..., vocabulary] of the last stage's output `hidden` [..., width], on the ranks that have it."""
        self.broadcast(-1, hidden)
        part = self.share(self._tokens.pop(-1).hidden)
        widest = F.pad(part, (0, max(self.share.parts) - part.shape[-1]))
        carrier = widest.to(carrier_of(widest.device, self.axis.group))
        everyone = [torch.empty_like(carrier) for _ in self.share.parts]
        dist.all_gather(everyone, carrier, group=self.axis.group)
        if hidden is None:
            return None
        rows = [each[..., :size] for each, size in zip(everyone, self.share.parts, strict=True)]
        return torch.cat(rows, -1).to(part.device)

    def gradients(self, microbatch: int) -> None:
        """T: add the gradient of the share's weight; with two reductions compute its part of the input gradient, too."""
        tokens = self._tokens[microbatch]
        smoothing = self.share.label_smoothing
        with torch.no_grad():
            rows = tokens.powers.mul_((tokens.factor * tokens.scale).unsqueeze(-1))
            if smoothing:
                rows -= (smoothing / self.share.vocabulary * tokens.scale).unsqueeze(-1)
            hit = (tokens.scale * (smoothing - 1)).masked_fill(tokens.outside, 0)
            rows.scatter_add_(-1, tokens.row, hit.unsqueeze(-1))
        logits = tokens.logits
        torch.autograd.backward([logits], [rows.view(logits.shape).to(logits.dtype)])
        if self.fused:
            del self._tokens[microbatch]


def require_share(layer: nn.Module, ranks_here: int) -> VocabularyShare:
    """Return the layer of this rank's vocabulary stage.

    Args:
        ranks_here: how many ranks of the pipeline are in this process.

    Raises ConfigError for a layer of another type, and where several ranks share a process.
    """
    if ranks_here > 1:
        raise ConfigError(
            "a vocabulary over the pipeline needs a process for each rank, whose group entries wait for others"
        )
    if not isinstance(layer, VocabularyShare):
        raise ConfigError(
            "the schedule spreads the vocabulary over the pipeline, and the last layer is to be a vocabulary_share; it is of "
            f"type {type(layer).__name__}"
        )
    return layer
