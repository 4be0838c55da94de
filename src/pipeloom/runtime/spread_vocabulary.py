"""The vocabulary spread over the ranks of a pipeline: each rank's share, and what S, T and the group entries do with it.

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
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipeloom.errors import ConfigError, UsageError
from pipeloom.limits import of_annotated_types
from pipeloom.ops.layer import Layer
from pipeloom.parallel.collectives import carrier_of, start_collective, start_gather_columns
from pipeloom.parallel.mesh import Axis, Mesh, group_of_members
from pipeloom.parallel.vocabulary import IGNORED, VocabularyShare, largest_of, places_in, rows_at
from pipeloom.schedule.model import Schedule, parts
from pipeloom.shapes.mesh import uneven_parts


@of_annotated_types
def vocabulary_share(
    name: str,
    weight: Tensor,
    rank: int,
    ranks: int,
    label_smoothing: float = 0.0,
    embeds: bool = False,
    padding: int | None = None,
) -> Layer:
    """Return the layer `name` with the share of one of `ranks` of a weight [vocabulary, width].

    It is the last of a model's layers on every rank; the schedule has been through the transform `vocabulary`. The share of
    another weight in which tokens are looked up stands before it.

    Args:
        label_smoothing: ε of the loss in training.
        embeds: whether tokens are looked up in it; the first of the other layers then gets their rows [..., width], and the
            schedule has been through the transform `embedding`.
        padding: a token whose row gets no gradient from that; None: there is none.
    """
    parts = uneven_parts(len(weight), ranks)

    def share() -> nn.Module:
        module = VocabularyShare(weight.shape[1], parts, rank, label_smoothing, embeds, padding)
        rows = weight[module.first : module.first + parts[rank]]
        module.weight = nn.Parameter(rows.clone())
        return module

    return Layer(name, share, spread=True)


@dataclass
class _Tokens:
    """State of one micro-batch on a share, from its broadcast to its T; rows are tokens.

    Attributes:
        hidden: the last stage's output.
        logits: of the share, with their graph.
        powers: exp(logits - largest), [tokens, rows].
        facts: the largest logit; then the target's logit, the sum of the powers and that of the logits: [4, tokens].
        place, outside: of the target in this share, and whether it is in another (`places_in`).
        counts: whether the target counts.
        part: this share's part of the input gradient, of one reduction: the powers times the weight.
        factor: of the powers, so that they sum to one over the ranks.
        scale: of a token's loss in the step's.
    """

    hidden: Tensor
    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    powers: Tensor = field(default_factory=lambda: torch.empty(0))
    facts: Tensor = field(default_factory=lambda: torch.empty(0))
    place: Tensor = field(default_factory=lambda: torch.empty(0))
    outside: Tensor = field(default_factory=lambda: torch.empty(0))
    counts: Tensor = field(default_factory=lambda: torch.empty(0))
    part: Tensor | None = None
    factor: Tensor = field(default_factory=lambda: torch.empty(0))
    scale: Tensor = field(default_factory=lambda: torch.empty(0))


@dataclass(eq=False)
class SpreadVocabulary:
    """The shares of one rank, and its part in the group entries; these run in one thread after the other.

    Attributes:
        share: this rank's of the output layer.
        embedding: that of the input embedding, the same one where the two are tied; None: the first stage has all of it.
        axis: the ranks of a replica, with a process group that nothing else uses.
        entrances, sources: those of them that have the first stage of layers, and the last one, in order.
        fused: whether one reduction follows S, which computes its part of the input gradient.
    """

    share: VocabularyShare
    embedding: VocabularyShare | None
    axis: Axis
    entrances: Sequence[int]
    sources: Sequence[int]
    fused: bool
    _tokens: dict[int, _Tokens] = field(default_factory=dict)
    _rows: dict[int, tuple[GradientEdge, Tensor]] = field(default_factory=dict)

    @classmethod
    def of(cls, shares: Sequence[VocabularyShare], mesh: Mesh, schedule: Schedule) -> SpreadVocabulary:
        """Return the shares of this process, with a new process group; collective over the ranks of its replica.

        Raises ConfigError for shares of another number of ranks, or where the schedule looks tokens up and they do not, or the
        other way round.
        """
        share, embeds = shares[-1], shares[0].embeds
        if embeds != schedule._spreads_embedding:
            raise ConfigError(
                "the input embedding is spread over the pipeline, and the schedule does not look tokens up: it lacks the "
                "transform embedding"
                if embeds
                else "the schedule looks tokens up in the shares of the vocabulary, and the model's first layer does"
            )
        fused = not any(action.kind == "REDUCE_SUM" for cell in schedule.programs[0] for action in parts(cell))
        ends = [schedule.placement[schedule.routes[0][end]] for end in (0, -1)]
        numbers = mesh.shape.group_of(mesh.everyone.index, "pp_tp")
        ranks = tuple(mesh.everyone.ranks[number] for number in numbers)
        if len(share.parts) != len(ranks):
            raise ConfigError(
                f"the vocabulary is cut into {len(share.parts)} shares, and {len(ranks)} ranks have one each"
            )
        entrances, sources = (
            [at for at, number in enumerate(numbers) if mesh.shape.place(number).pp == end] for end in ends
        )
        axis = Axis(ranks, mesh.place.pp_tp, None if len(ranks) == 1 else group_of_members(ranks))
        return cls(share, shares[0] if embeds else None, axis, entrances, sources, fused)

    @property
    def _root(self) -> int:
        return self.axis.ranks[self.sources[0]]

    def look_up(self, microbatch: int, tokens: Tensor, training: bool) -> Tensor:
        """EMBED: return the rows [..., width] of `tokens` on the ranks of the first stage of layers; values of no use elsewhere.

        Raises UsageError for a token outside the vocabulary.
        """
        share = self.embedding
        assert share is not None
        with torch.set_grad_enabled(training):
            rows, outside = share.look_up(tokens)
        trains = rows.requires_grad
        if trains:
            without = outside if share.padding is None else outside | (tokens == share.padding)
            self._rows[microbatch] = get_gradient_edge(rows), without
        with torch.no_grad():  # at most one term of the sum is not 0
            whole = self._sum_at(self.entrances, rows.detach().masked_fill(outside.unsqueeze(-1), 0))
        return whole.requires_grad_(trains)

    def add_rows(self, microbatch: int, gradient: Tensor | None = None) -> None:
        """EMBED_GRAD: add the gradients of the rows of this share.

        Args:
            gradient: that of the input of the first stage of layers, on its ranks; None there: it has none.
        """
        if microbatch not in self._rows:
            return
        assert self.embedding is not None
        (edge, without), weight = self._rows.pop(microbatch), self.embedding.weight
        if gradient is None:
            gradient = torch.zeros((*without.shape, weight.shape[1]), dtype=weight.dtype, device=weight.device)
        whole = self._moved(dist.broadcast, gradient.contiguous(), self.axis.ranks[self.entrances[0]])
        torch.autograd.backward([edge], [whole.masked_fill(without.unsqueeze(-1), 0)])

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
        """Return `tensor` after a collective of the ranks that writes into it."""
        start_collective(collective, tensor, None, *arguments, group=self.axis.group).wait()
        return tensor

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
            tokens.place, tokens.outside = places_in(flat, share.first, rows.shape[1])
            hits = rows.gather(-1, tokens.place).sum(-1).masked_fill_(tokens.outside, 0)
            largest, total = largest_of(rows), rows.sum(-1)
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
            hit = rows_at(weight, tokens.place).masked_fill_(tokens.outside.unsqueeze(-1), 0).mul_(1 - smoothing)
            if smoothing:
                hit += smoothing / share.vocabulary * weight.sum(0)
            rows = (tokens.part * tokens.factor.unsqueeze(-1)).sub_(hit).mul_(tokens.scale.unsqueeze(-1))
            gradient, tokens.part = rows.to(weight.dtype).view(tokens.hidden.shape), None
        gradient = self._sum_at(self.sources, gradient.contiguous())
        return gradient if self.axis.index in self.sources else None

    def _facts_of_all(self, facts: Tensor) -> Tensor:
        """Return the facts of all ranks, in their order: by one all-to-all, which on gloo takes a third of its all-gather."""
        copies = facts.expand(self.axis.size, *facts.shape).contiguous()
        received = torch.empty_like(copies)
        start_collective(dist.all_to_all_single, received, copies, group=self.axis.group).wait()
        return received

    def _sum_at(self, ends: Sequence[int], part: Tensor) -> Tensor:
        """Return the sum of the ranks' parts, on the ranks that are `ends`."""
        carrier = carrier_of(part.device, self.axis.group)
        if carrier.type != "cpu":
            several = len(ends) > 1  # all of these need the sum
            root = self.axis.ranks[ends[0]]
            return self._moved(dist.all_reduce, part) if several else self._moved(dist.reduce, part, root)
        # gloo's sums poll, which takes milliseconds where processes share a core: here each rank sends its part
        rows = part.to(carrier).view(1, -1)
        sent = [int(rank in ends) for rank in range(self.axis.size)]
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
        everyone = start_gather_columns(part, self.axis, self.share.parts).wait()
        return None if hidden is None else torch.cat(everyone, -1)

    def gradients(self, microbatch: int) -> None:
        """T: add the gradient of the share's weight; with two reductions compute its part of the input gradient, too."""
        tokens = self._tokens[microbatch]
        smoothing = self.share.label_smoothing
        with torch.no_grad():
            rows = tokens.powers.mul_((tokens.factor * tokens.scale).unsqueeze(-1))
            if smoothing:
                rows -= (smoothing / self.share.vocabulary * tokens.scale).unsqueeze(-1)
            hit = (tokens.scale * (smoothing - 1)).masked_fill(tokens.outside, 0)
            rows.scatter_add_(-1, tokens.place, hit.unsqueeze(-1))
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


def require_shares(layers: Sequence[nn.Module], ranks_here: int) -> list[VocabularyShare]:
    """Return the layers of this rank's vocabulary stage.

    Args:
        ranks_here: how many ranks of the pipeline are in this process.

    Raises ConfigError for layers of another type, and where several ranks share a process.
    """
    if ranks_here > 1:
        raise ConfigError(
            "a vocabulary over the pipeline needs a process for each rank, whose group entries wait for others"
        )
    if not isinstance(layers[-1], VocabularyShare):
        raise ConfigError(
            "the schedule spreads the vocabulary over the pipeline, and the last layer is to be a vocabulary_share; it is of "
            f"type {type(layers[-1]).__name__}"
        )
    return [layer for layer in layers if isinstance(layer, VocabularyShare)]
