"""The output layer spread over the ranks of a pipeline: each rank's share, and what S, T and the group entries do with it.

A rank holds rows of the output weight [vocabulary, width]. With y its logits, l their largest, and L and Z the largest logit and
the sum of exp(y - L) over all ranks, a token's loss is log Z + L - (1 - ε) y[target] - ε / V Σ y, and the gradient of its logits
exp(y - l) · exp(l - L) / Z - q, where q is 1 - ε at the target plus ε / V (arXiv 2411.05288, algorithms 1 and 2).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from pipeloom.errors import ConfigError, UsageError
from pipeloom.mesh_shape import uneven_parts
from pipeloom.ops.layer import Layer
from pipeloom.parallel.collectives import carrier_of
from pipeloom.parallel.mesh import Axis, Mesh, group_of_members
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

    def broadcast(self, microbatch: int, hidden: Tensor | None, targets: Tensor) -> None:
        """BROADCAST: receive the last stage's output [..., width], or send `hidden`, which only that stage's rank has.

        Raises UsageError for an output that has not the weight's width and dtype, and a row for each target.
        """
        self._tokens[microbatch] = _Tokens(self._copy_of(hidden, shape_of(targets)))

    def _copy_of(self, hidden: Tensor | None, shape: Sequence[int]) -> Tensor:
        """Return the last stage's output [*shape, width] on every rank."""
        weight = self.share.weight
        values = torch.empty((*shape, weight.shape[1]), dtype=weight.dtype, device=weight.device)
        if hidden is not None:
            if hidden.shape != values.shape or hidden.dtype != weight.dtype:
                raise UsageError(
                    f"the last stage returned {hidden.dtype}{list(hidden.shape)}, the vocabulary's weight is "
                    f"{weight.dtype}[{self.share.vocabulary}, {weight.shape[1]}], and the targets are {list(shape)}"
                )
            values.copy_(hidden.detach())
        return self._moved(dist.broadcast, values, self._root)

    def _moved(self, collective: Callable[..., Any], tensor: Tensor, *arguments: Any) -> Tensor:
        """Return `tensor`, or a copy of it, after a collective of the ranks, on the host where the group moves no others."""
        carrier = tensor.to(carrier_of(tensor.device, self.axis.group))
        collective(carrier, *arguments, group=self.axis.group)
        return carrier.to(tensor.device)

    def scores(self, microbatch: int, targets: Tensor, training: bool) -> None:
        """S: compute the logits of the share, and with one reduction its part of the input gradient.

        Raises UsageError for targets outside the vocabulary.
        """
        tokens, share = self._tokens[microbatch], self.share
        flat = self._flat(targets)
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

    def _flat(self, targets: Tensor) -> Tensor:
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
        everyone = self._facts_of_all(tokens.facts)  # [ranks, 4, tokens]
        largest = everyone[:, 0].amax(0)
        shifts = (everyone[:, 0] - largest).exp_()
        hit, powers, total = everyone[:, 1].sum(0), (everyone[:, 2] * shifts).sum(0), everyone[:, 3].sum(0)
        tokens.factor = shifts[self.axis.index] / powers
        tokens.scale = tokens.counts * (weight / tokens.counts.sum().clamp(min=1).to(powers.dtype))
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
        gradient = self._sum_at_sources(gradient.contiguous())
        return gradient if self.axis.index in self.sources else None

    def _facts_of_all(self, facts: Tensor) -> Tensor:
        """Return the facts of all ranks, in their order: by one all-to-all, which on gloo takes a third of its all-gather."""
        carrier = carrier_of(facts.device, self.axis.group)
        copies = facts.to(carrier).expand(self.axis.size, *facts.shape).contiguous()
        received = torch.empty_like(copies)
        dist.all_to_all_single(received, copies, group=self.axis.group)
        return received.to(facts.device)

    def _sum_at_sources(self, part: Tensor) -> Tensor:
        """Return the sum of the ranks' parts, on the ranks of the last stage of layers."""
        carrier = carrier_of(part.device, self.axis.group)
        if carrier.type != "cpu":
            several = len(self.sources) > 1  # all of these need the sum
            return self._moved(dist.all_reduce, part) if several else self._moved(dist.reduce, part, self._root)
        # gloo's sums poll, which takes milliseconds where processes share a core: here each rank sends its part
        rows = part.to(carrier).view(1, -1)
        sent = [int(rank in self.sources) for rank in range(self.axis.size)]
        received = rows.new_empty(self.axis.size * sent[self.axis.index], rows.shape[1])
        copies = rows.expand(sum(sent), -1).contiguous()
        counts = [sent[self.axis.index]] * self.axis.size
        dist.all_to_all_single(received, copies, counts, sent, group=self.axis.group)
        return received.sum(0).view(part.shape).to(part.device)

    @torch.no_grad()
    def logits(self, hidden: Tensor | None) -> Tensor | None:
        """Return the logits [..., vocabulary] of the last stage's output `hidden` [..., width], on the ranks that have it."""
        sizes = torch.zeros(9, dtype=torch.int64)  # the number of dimensions, and them
        if hidden is not None:
            sizes[: hidden.ndim] = torch.tensor([hidden.ndim, *hidden.shape[:-1]])
        count, *shape = self._moved(dist.broadcast, sizes.to(self.share.weight.device), self._root).tolist()
        part = self.share(self._copy_of(hidden, shape[: count - 1]))
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
        if logits.requires_grad:  # else the weight is frozen, and S computed the input gradient
            torch.autograd.backward([logits], [rows.view(logits.shape).to(logits.dtype)])
        if self.fused:
            del self._tokens[microbatch]


def shape_of(targets: Any) -> torch.Size:
    """Return the shape of a micro-batch's targets. Raises UsageError for others than a tensor with values, which S needs."""
    if not isinstance(targets, Tensor) or targets.is_meta:
        what = "on the meta device" if isinstance(targets, Tensor) else f"of type {type(targets).__name__}"
        raise UsageError(f"the targets are {what}; a vocabulary over the pipeline needs a tensor of them on every rank")
    return targets.shape


class FollowedRows:
    """Rows of one weight of which the shares hold copies: sent to them before a step, and their gradients back behind it.

    The weight is a parameter, whole on a rank or in parts by tensor parallelism; the copies are not. Collective over the ranks
    of a replica.

    Args:
        spread: this rank's share.
        parts: rank on `spread.axis` -> (first row, row behind the last) of the weight there, for the ranks that hold it.
        weight: the weight here; None: other ranks hold it.

    Attributes:
        trains: whether the copies have gradients; False: the weight is frozen.
    """

    def __init__(
        self, spread: SpreadVocabulary, parts: Mapping[int, tuple[int, int]], weight: nn.Parameter | None
    ) -> None:
        self.weight = weight
        self._axis, self._copy = spread.axis, spread.share.weight
        wide = torch.promote_types(self._copy.dtype, torch.float32)
        self._total = torch.zeros_like(self._copy, dtype=wide, requires_grad=False)
        self.trains = self._copy.requires_grad
        if self.trains:
            self._copy.register_post_accumulate_grad_hook(self._collect)  # type: ignore[no-untyped-call]
        starts = list(accumulate(spread.share.parts, initial=0))
        # (holder, rank of the share, first row, row behind the last) of all common rows
        self._common = [
            (holder, rank, max(first, begin), min(last, end))
            for holder, (first, last) in sorted(parts.items())
            for rank, (begin, end) in enumerate(pairwise(starts))
            if max(first, begin) < min(last, end)
        ]
        self._first = {False: parts.get(spread.axis.index, (0, 0))[0], True: spread.share.first}

    def _collect(self, copy: Tensor) -> None:
        assert copy.grad is not None
        self._total += copy.grad
        copy.grad = None

    @torch.no_grad()
    def send(self) -> None:
        """Give every share the present values of its rows."""
        self._exchange(self.weight, self._copy, lambda here, rows: here.copy_(rows))

    @torch.no_grad()
    def add_gradients(self, gradient: Tensor | None) -> None:
        """Add the shares' gradients of their rows to `gradient`, that of the weight here, in order of the ranks."""
        self._exchange(self._total, gradient, lambda here, rows: here.add_(rows), back=True)
        self._total.zero_()

    def _exchange(
        self, source: Tensor | None, target: Tensor | None, take: Callable[[Tensor, Tensor], Tensor], back: bool = False
    ) -> None:
        calls, received = [], []
        me, carrier = self._axis.index, carrier_of(self._copy.device, self._axis.group)
        for holder, rank, first, last in self._common:
            sender, receiver = (rank, holder) if back else (holder, rank)
            if sender == me:
                assert source is not None
                rows = source.detach()[first - self._first[back] : last - self._first[back]].to(carrier).contiguous()
                if receiver != me:
                    calls.append(dist.P2POp(dist.isend, rows, self._axis.ranks[receiver], self._axis.group))
            if receiver == me:
                assert target is not None
                here = target[first - self._first[not back] : last - self._first[not back]]
                if sender != me:
                    rows = torch.empty_like(here, dtype=self._total.dtype if back else here.dtype, device=carrier)
                    calls.append(dist.P2POp(dist.irecv, rows, self._axis.ranks[sender], self._axis.group))
                received.append((here, rows))
        for work in dist.batch_isend_irecv(calls) if calls else ():
            work.wait()
        for here, rows in received:
            take(here, rows.to(here.device))


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
