"""Routers: the choice of experts for each token, and the weights that combine the outputs of these experts.

All routers weight with probabilities or scores, never with raw logits. Sums and probabilities are in at least fp32.
Renormalisation can be switched off (`Gate.renormalise`, Hugging Face's `norm_topk_prob`).

- softmax: softmax, the k largest, renormalised to sum to 1 (Mixtral, arXiv 2401.04088).
- noisy: the same with trained noise on the logits in training (arXiv 1701.06538, section 2.1).
- switch: the largest only, weighted with its probability; the router's input is jittered in training
  (arXiv 2101.03961, section 2.2).
- gshard: the two largest, renormalised; in training the second is kept with probability min(1, 2 · its weight)
  (arXiv 2006.16668, algorithm 1).
- sigmoid: sigmoid scores; a bias affects the choice but not the weights, which are renormalised scores. The bias is updated
  from the experts' loads, outside autograd (arXiv 2408.15664; DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeloom.errors import ArgumentError, did_you_mean
from pipeloom.ops.token_permute import accumulation_dtype, count_keys
from pipeloom.shapes.decoder import ROUTERS


@dataclass(frozen=True)
class Gate:
    """Configuration of a router.

    Attributes:
        router: one of ROUTERS.
        experts: number of experts.
        choices: number of experts per token, k.
        renormalise: whether the weights of a token's choices are divided by their sum. Otherwise they are the router's
            probabilities (scores for sigmoid). Switch never renormalises.
        jitter: for switch: inputs are multiplied by uniform numbers in [1 - jitter, 1 + jitter].
        bias_rate: for sigmoid: change of an expert's bias per step.

    Raises ArgumentError for an unknown router, or for a number of choices that the router or the experts do not allow.
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
        weights: [tokens, k], at least fp32; differentiable with respect to the logits.
        kept: [tokens, k] bool, False for dropped choices; None if all are kept.
        tally: statistics for the auxiliary losses.
        rows: rows that each expert computes, so that the host need not know how many were chosen; None: those that were.
    """

    experts: Tensor
    weights: Tensor
    kept: Tensor | None
    tally: RoutingStats
    rows: int | None = None


@dataclass(frozen=True)
class RoutingStats:
    """Sums over tokens that the auxiliary losses and loads are computed from; those of disjoint sets of tokens can be added.

    Attributes:
        counts: choices of each expert, before any drop: [experts] int64.
        probabilities: sum over tokens of each expert's probability: [experts], with a gradient.
        squares: sum over tokens of logsumexp(logits)²: 0-dim, with a gradient.
        tokens: number of tokens.
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
        """Return experts · Σ_e f_e P_e, 0-dim, with f_e the share of choices of expert e and P_e its mean probability.

        It is 1 if both are uniform, and 0 without tokens. The gradient flows through P only (arXiv 2101.03961, equation 4).
        """
        if self.tokens == 0:
            return self.probabilities.sum()
        shares = self.counts.to(self.probabilities.dtype) / self.counts.sum()
        return self.counts.numel() * (shares * self.probabilities).sum() / self.tokens

    def z_loss(self) -> Tensor:
        """Return the mean over tokens of logsumexp(logits)², 0-dim (ST-MoE, arXiv 2202.08906, equation 5)."""
        return self.squares / max(self.tokens, 1)


@dataclass(frozen=True)
class RouterNoise:
    """Random numbers of one micro-batch; None for those that the gate does not use, and outside training.

    Attributes:
        inputs: factors of the router's inputs, [tokens, width] (switch).
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


def sample_noise(gate: Gate, tokens: int, inputs: Tensor, generators: Iterable[torch.Generator | None]) -> RouterNoise:
    """Return the noise of `gate` in training for one sample of `tokens` tokens per generator (None: torch's own).

    The noise of a sample depends only on its generator, which must be freshly seeded. `inputs` are the router's, [..., width].
    """
    device = inputs.device
    if gate.router == "switch":
        uniform = torch.cat([torch.rand(tokens, inputs.shape[-1], generator=g, device=device) for g in generators])
        return RouterNoise(inputs=(1 + gate.jitter * (2 * uniform - 1)).to(inputs.dtype))
    if gate.router == "noisy":
        numbers = [torch.randn(tokens, gate.experts, generator=g, device=device) for g in generators]
        return RouterNoise(logits=torch.cat(numbers))
    if gate.router == "gshard":
        return RouterNoise(second=torch.cat([torch.rand(tokens, generator=g, device=device) for g in generators]))
    return NO_DRAWS


def route(
    gate: Gate,
    logits: Tensor,
    draws: RouterNoise = NO_DRAWS,
    *,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
) -> Routing:
    """Return the experts of each token, without a capacity limit (see `drop_over_capacity`).

    Args:
        gate: configuration of the router.
        logits: [tokens, experts].
        draws: noise of these tokens.
        scale: for noisy: [tokens, experts]; its softplus is the standard deviation of the noise.
        bias: for sigmoid: [experts], added to the scores when choosing.
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
        count_keys(experts, gate.experts),
        probabilities.sum(0),
        logits.logsumexp(-1).square().sum(),
        logits.shape[0],
    )
    return Routing(experts, weights, mask, tally)


def capacity_of(tokens: int, gate: Gate, factor: float) -> int:
    """Return the capacity of an expert for `tokens` tokens, in rows: ⌈factor · tokens · k / experts⌉ (GShard's C)."""
    return math.ceil(factor * tokens * gate.choices / gate.experts)


def drop_over_capacity(routing: Routing, capacity: int) -> Routing:
    """Return `routing` with at most `capacity` choices kept per expert.

    Choices are kept in a fixed order: all first choices in token order, then all second choices, and so on. The tokens are
    those of one micro-batch on one data-parallel replica, so the result does not depend on the placement of experts. A
    dropped choice adds nothing to the output of its token; the other choices keep their weights.
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
    """Return the number of choices of `wanted` that are dropped in `limited`: 0-dim int64; None without a limit."""
    if limited.kept is None or limited.kept is wanted.kept:
        return None
    lost = ~limited.kept if wanted.kept is None else wanted.kept & ~limited.kept
    return lost.sum()


@torch.no_grad()
def update_bias(bias: Tensor, counts: Tensor, rate: float) -> None:
    """Change the bias [experts] in place by `rate`: up for experts with a load below the mean, down for those above it.

    `counts` [experts] are sums over a whole step and all replicas (arXiv 2408.15664, algorithm 1).
    """
    loads = counts.to(bias.dtype)
    bias.add_((loads.mean() - loads).sign(), alpha=rate)
