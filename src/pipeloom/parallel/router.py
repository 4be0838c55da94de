"""Routers: which experts each token goes to, and with which weights their outputs are mixed.

All mix with probabilities, never with raw logits. Sums and probabilities are in fp32 at least. Those that renormalise can leave
it out (`Gate.renormalise`, Hugging Face's `norm_topk_prob`).

- softmax: softmax, the k largest, renormalised to sum to 1 (Mixtral, arXiv 2401.04088).
- noisy: the same with trained noise on the logits in training (arXiv 1701.06538, section 2.1).
- switch: the largest only, weighted with its probability; in training its input is jittered (arXiv 2101.03961, section 2.2).
- gshard: the two largest, renormalised; the second at random, with probability min(1, 2 · its weight), in training
  (arXiv 2006.16668, algorithm 1).
- sigmoid: sigmoid scores; a bias moves the choice, not the weights, which are renormalised scores. The bias is updated from
  the experts' loads, outside autograd (arXiv 2408.15664; DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeloom.decoder_shape import ROUTERS
from pipeloom.errors import ArgumentError, did_you_mean
from pipeloom.ops.token_permute import accumulation_dtype

RANDOM_ROUTERS = ("noisy", "switch", "gshard")
"""Routers that use random numbers in training, which `sample_noise` draws."""


@dataclass(frozen=True)
class Gate:
    """Rule by which a router chooses.

    Attributes:
        router: one of ROUTERS.
        experts: how many there are.
        choices: how many a token goes to, k.
        renormalise: the weights of a token's choices are divided by their sum; without, they are the router's probabilities (of
            sigmoid: its scores). Switch never divides.
        jitter: switch: inputs are multiplied by uniform numbers in [1 - jitter, 1 + jitter].
        bias_rate: sigmoid: how far the bias of an expert moves per step.
    """

    router: str
    experts: int
    choices: int
    renormalise: bool = True
    jitter: float = 0.01
    bias_rate: float = 0.001

    def __post_init__(self) -> None:
        if self.router not in ROUTERS:
            raise ArgumentError(
                "router",
                f"={self.router!r} is not a router{did_you_mean(self.router, ROUTERS)}; routers: {', '.join(ROUTERS)}",
            )
        wanted = ROUTERS[self.router] or self.choices
        if self.choices != wanted:
            raise ArgumentError(
                "choices", f"={self.choices}: router {self.router!r} requires another number; use {wanted}"
            )
        if not 1 <= self.choices <= self.experts:
            near = 1 if self.choices < 1 else self.experts
            raise ArgumentError(
                "choices", f"={self.choices} is not between 1 and {self.experts} experts; nearest: {near}"
            )


@dataclass(frozen=True)
class Routing:
    """Experts and weights of each token.

    Attributes:
        experts: [tokens, k] int64, first choice first.
        weights: [tokens, k] fp32 at least; carries the gradient of the gate.
        kept: [tokens, k] bool, False for choices that are dropped; None: all are kept.
        tally: for the auxiliary losses.
    """

    experts: Tensor
    weights: Tensor
    kept: Tensor | None
    tally: RoutingStats


@dataclass(frozen=True)
class RoutingStats:
    """Sums over tokens, from which the auxiliary losses and the loads are made; tallies of disjoint tokens add up.

    Attributes:
        counts: choices of each expert, before any drop: [experts] int64.
        probabilities: sum over tokens of each expert's probability: [experts], with a gradient.
        squares: sum over tokens of logsumexp(logits)²: 0-dim, with a gradient.
        tokens: how many.
    """

    counts: Tensor
    probabilities: Tensor
    squares: Tensor
    tokens: int

    def __add__(self, other: RoutingStats) -> RoutingStats:
        return RoutingStats(
            self.counts + other.counts,
            self.probabilities + other.probabilities,
            self.squares + other.squares,
            self.tokens + other.tokens,
        )

    def balance_loss(self) -> Tensor:
        """experts · Σ_e f_e P_e: f_e the share of the choices that went to e, P_e its mean probability; 0-dim.

        1 when both are uniform; the gradient flows through P only (arXiv 2101.03961, equation 4). No tokens: 0.
        """
        if self.tokens == 0:
            return self.probabilities.sum()
        shares = self.counts.to(self.probabilities.dtype) / self.counts.sum()
        return self.counts.numel() * (shares * self.probabilities).sum() / self.tokens

    def z_loss(self) -> Tensor:
        """The mean over tokens of logsumexp(logits)²; 0-dim (ST-MoE, arXiv 2202.08906, equation 5)."""
        return self.squares / max(self.tokens, 1)


@dataclass(frozen=True)
class RouterNoise:
    """The random numbers of one micro-batch; None where the gate needs none, or outside training.

    Attributes:
        inputs: factors on the router's inputs, [tokens, width] (switch).
        logits: standard normal numbers, [tokens, experts] (noisy).
        second: uniform numbers in [0, 1), [tokens] (gshard).
    """

    inputs: Tensor | None = None
    logits: Tensor | None = None
    second: Tensor | None = None

    def rows(self, which: Tensor) -> RouterNoise:
        """Return the noise of the tokens `which`."""
        return RouterNoise(
            *(None if x is None else x.index_select(0, which) for x in (self.inputs, self.logits, self.second))
        )


NO_DRAWS = RouterNoise()


def sample_noise(
    gate: Gate, tokens: int, width: int, dtype: torch.dtype, generators: Iterable[torch.Generator]
) -> RouterNoise:
    """Return the noise that `gate` draws in training for samples of `tokens` tokens each; each one's generator is fresh,
    and alone decides.
    """
    if gate.router == "switch":
        uniform = torch.cat([torch.rand(tokens, width, generator=g, device=g.device) for g in generators])
        return RouterNoise(inputs=(1 + gate.jitter * (2 * uniform - 1)).to(dtype))
    if gate.router == "noisy":
        numbers = [torch.randn(tokens, gate.experts, generator=g, device=g.device) for g in generators]
        return RouterNoise(logits=torch.cat(numbers))
    if gate.router == "gshard":
        return RouterNoise(second=torch.cat([torch.rand(tokens, generator=g, device=g.device) for g in generators]))
    return NO_DRAWS


def route(
    gate: Gate,
    logits: Tensor,
    draws: RouterNoise = NO_DRAWS,
    *,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
) -> Routing:
    """The experts of each token; no capacity yet (`limit`).

    Args:
        logits: [tokens, experts].
        scale: noisy: [tokens, experts] before the softplus that makes standard deviations of it.
        bias: sigmoid: [experts], added to the scores when choosing.
    """
    logits = logits.to(accumulation_dtype(logits.dtype))
    if draws.logits is not None and scale is not None:
        logits = logits + draws.logits.to(logits.dtype) * torch.nn.functional.softplus(scale.to(logits.dtype))
    scores = logits.sigmoid() if gate.router == "sigmoid" else logits.softmax(-1)
    ranked = scores if bias is None else scores.detach() + bias
    experts = ranked.topk(gate.choices, -1).indices
    weights = scores.gather(1, experts)
    probabilities = scores
    if gate.router == "sigmoid":
        probabilities = scores / scores.sum(-1, keepdim=True)
    mask = None
    if gate.router != "switch" and (gate.renormalise or draws.second is not None):
        shares = weights / weights.sum(-1, keepdim=True)
        if draws.second is not None:
            mask = torch.ones_like(experts, dtype=torch.bool)
            mask[:, 1] = draws.second < 2 * shares[:, 1].detach()
        if gate.renormalise:
            weights = shares
    tally = RoutingStats(
        torch.bincount(experts.flatten(), minlength=gate.experts),
        probabilities.sum(0),
        logits.logsumexp(-1).square().sum(),
        logits.shape[0],
    )
    return Routing(experts, weights, mask, tally)


def capacity_of(tokens: int, gate: Gate, factor: float) -> int:
    """Rows that an expert takes of `tokens` tokens: ⌈factor · tokens · k / experts⌉ (GShard's C)."""
    return math.ceil(factor * tokens * gate.choices / gate.experts)


def limit(routing: Routing, capacity: int) -> Routing:
    """`routing` with at most `capacity` choices kept an expert.

    The order is defined: all first choices in order of their tokens, then all second ones, and so on. The tokens are those
    of one micro-batch on one data-parallel replica, so the way experts are spread over ranks changes nothing. A dropped
    choice adds nothing to its token; the others keep their weights.
    """
    experts, tokens = routing.experts, routing.experts.shape[0]
    before = experts.t().flatten()  # first choices, then second ones
    wanted = torch.nn.functional.one_hot(before, routing.tally.counts.numel())
    if routing.kept is not None:
        wanted = wanted * routing.kept.t().flatten().unsqueeze(-1)
    places = wanted.cumsum(0).gather(1, before.unsqueeze(-1)).view(experts.shape[1], tokens).t()
    fits = places <= capacity
    return Routing(experts, routing.weights, fits if routing.kept is None else fits & routing.kept, routing.tally)


def dropped_between(wanted: Routing, limited: Routing) -> Tensor | None:
    """Return how many choices of `wanted` found no place in `limited`, which was made of it: 0-dim int64; None: no limit."""
    if limited.kept is None or limited.kept is wanted.kept:
        return None
    lost = ~limited.kept if wanted.kept is None else wanted.kept & ~limited.kept
    return lost.sum()


@torch.no_grad()
def update_bias(bias: Tensor, counts: Tensor, rate: float) -> None:
    """Moves the bias [experts] of each expert by `rate`: up where its load is below the mean, down where above.

    `counts` are those of a whole step over all replicas (arXiv 2408.15664, algorithm 1).
    """
    loads = counts.to(bias.dtype)
    bias.add_((loads.mean() - loads).sign(), alpha=rate)
