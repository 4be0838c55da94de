"""Routers: which experts each token goes to, and with which weights their outputs are mixed.

All mix with probabilities, never with raw logits. Sums and probabilities are in fp32 at least.

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
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeloom.errors import ConfigError, did_you_mean
from pipeloom.ops.rows import wide

ROUTERS = ("softmax", "noisy", "switch", "gshard", "sigmoid")
_EXACTLY = {"switch": 1, "gshard": 2}


@dataclass(frozen=True)
class Gate:
    """How a router chooses.

    Attributes:
        router: one of ROUTERS.
        experts: how many there are.
        choices: how many a token goes to, k.
        jitter: switch: inputs are multiplied by uniform numbers in [1 - jitter, 1 + jitter].
        bias_rate: sigmoid: how far the bias of an expert moves a step.
    """

    router: str
    experts: int
    choices: int
    jitter: float = 0.01
    bias_rate: float = 0.001

    def __post_init__(self) -> None:
        if self.router not in ROUTERS:
            raise ConfigError(
                f"model.router = {self.router!r}: there is no such router{did_you_mean(self.router, ROUTERS)}; "
                f"routers: {', '.join(ROUTERS)}"
            )
        if not 1 <= self.choices <= self.experts:
            raise ConfigError(
                f"model.num_experts_per_tok = {self.choices}: it must be between 1 and model.num_experts {self.experts}"
            )
        wanted = _EXACTLY.get(self.router, self.choices)
        if self.choices != wanted:
            raise ConfigError(
                f"model.num_experts_per_tok = {self.choices}: router {self.router} chooses {wanted}; use {wanted}"
            )


@dataclass(frozen=True)
class Routing:
    """Where tokens go.

    Attributes:
        experts: [tokens, k] int64, first choice first.
        weights: [tokens, k] fp32 at least; carries the gradient of the gate.
        kept: [tokens, k] bool, False for choices that are dropped; None: all are kept.
        tally: for the auxiliary losses.
    """

    experts: Tensor
    weights: Tensor
    kept: Tensor | None
    tally: Tally


@dataclass(frozen=True)
class Tally:
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

    def __add__(self, other: Tally) -> Tally:
        return Tally(
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
class Draws:
    """The random numbers of one micro-batch; None where the gate needs none, or outside training.

    Attributes:
        inputs: factors on the router's inputs, [tokens, width] (switch).
        logits: standard normal numbers, [tokens, experts] (noisy).
        second: uniform numbers in [0, 1), [tokens] (gshard).
    """

    inputs: Tensor | None = None
    logits: Tensor | None = None
    second: Tensor | None = None

    def rows(self, which: Tensor) -> Draws:
        """Those of the tokens `which`."""
        return Draws(
            *(None if x is None else x.index_select(0, which) for x in (self.inputs, self.logits, self.second))
        )


NO_DRAWS = Draws()


def draws_for(gate: Gate, tokens: int, width: int, dtype: torch.dtype, generator: torch.Generator) -> Draws:
    """What `gate` draws for `tokens` tokens in training; `generator` is fresh, and alone decides."""
    device = generator.device
    if gate.router == "switch":
        uniform = torch.rand(tokens, width, generator=generator, device=device)
        return Draws(inputs=(1 + gate.jitter * (2 * uniform - 1)).to(dtype))
    if gate.router == "noisy":
        return Draws(logits=torch.randn(tokens, gate.experts, generator=generator, device=device))
    if gate.router == "gshard":
        return Draws(second=torch.rand(tokens, generator=generator, device=device))
    return NO_DRAWS


def route(
    gate: Gate,
    logits: Tensor,
    draws: Draws = NO_DRAWS,
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
    logits = logits.to(wide(logits.dtype))
    if draws.logits is not None and scale is not None:
        logits = logits + draws.logits.to(logits.dtype) * torch.nn.functional.softplus(scale.to(logits.dtype))
    scores = logits.sigmoid() if gate.router == "sigmoid" else logits.softmax(-1)
    ranked = scores if bias is None else scores.detach() + bias
    experts = ranked.topk(gate.choices, -1).indices
    weights = scores.gather(1, experts)
    probabilities = scores
    if gate.router == "sigmoid":
        probabilities = scores / scores.sum(-1, keepdim=True)
    if gate.router != "switch":
        weights = weights / weights.sum(-1, keepdim=True)
    kept = None
    if draws.second is not None:
        kept = torch.ones_like(experts, dtype=torch.bool)
        kept[:, 1] = draws.second < 2 * weights[:, 1].detach()
    tally = Tally(
        torch.bincount(experts.flatten(), minlength=gate.experts),
        probabilities.sum(0),
        logits.logsumexp(-1).square().sum(),
        logits.shape[0],
    )
    return Routing(experts, weights, kept, tally)


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
    """How many choices of `wanted` found no place in `limited`, which was made of it: 0-dim int64; None: no limit."""
    if limited.kept is None or limited.kept is wanted.kept:
        return None
    lost = ~limited.kept if wanted.kept is None else wanted.kept & ~limited.kept
    return lost.sum()


@torch.no_grad()
def move_bias(bias: Tensor, counts: Tensor, rate: float) -> None:
    """Moves the bias [experts] of each expert by `rate`: up where its load is below the mean, down where above.

    `counts` are those of a whole step over all replicas (arXiv 2408.15664, algorithm 1).
    """
    loads = counts.to(bias.dtype)
    bias.add_((loads.mean() - loads).sign(), alpha=rate)
