"""The router of a block: the gate's weights, its random numbers, its auxiliary losses, and the recorded loads."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipeloom.decoder_shape import RANDOM_ROUTERS, DecoderShape
from pipeloom.errors import UsageError
from pipeloom.ops.deferred import DeferringLayer, apply_linear
from pipeloom.ops.layer import MicrobatchContext, attach_loss
from pipeloom.ops.random_state import RandomSource
from pipeloom.parallel.context import ContextParallel
from pipeloom.parallel.router import (
    NO_DRAWS,
    Gate,
    RouterNoise,
    Routing,
    RoutingStats,
    capacity_of,
    drop_over_capacity,
    route,
    sample_noise,
    update_bias,
)
from pipeloom.parallel.sharding import ParameterSharding
from pipeloom.parallel.tensor import TensorParallel


@dataclass(frozen=True)
class GateShape:
    """The sizes and options of a gate, those of `DecoderShape` that concern it, for a layer of your own."""

    hidden_size: int
    num_experts: int
    num_experts_per_tok: int = 2
    norm_topk_prob: bool = True
    router: str = "softmax"
    capacity_factor: float = 0.0
    aux_loss_coef: float = 0.01
    z_loss_coef: float = 0.001


class TopKGate(DeferringLayer):
    """Router that scores tokens, chooses their experts, and attaches the auxiliary losses of a micro-batch.

    Every tensor-parallel rank gets all tokens of the micro-batch, so all of them choose alike. Each gets only the gradient of
    its own terms of the experts.

    Attributes:
        source: source of random numbers; set by the code that builds the layer.
        context: the ranks that share the micro-batch's tokens; the auxiliary losses cover those of all of them.
        loads: micro-batch -> choices of each expert in the last step, then those beyond their expert's capacity (not those
            dropped at random): [experts + 1] int64. A recomputed forward writes the same values again.
    """

    e_score_correction_bias: Tensor

    def __init__(self, shape: DecoderShape | GateShape, tensor: TensorParallel | None = None) -> None:
        super().__init__()
        self.gate = Gate(shape.router, shape.num_experts, shape.num_experts_per_tok, shape.norm_topk_prob)
        self.capacity_factor = shape.capacity_factor
        self.balance, self.z = shape.aux_loss_coef, shape.z_loss_coef
        self.tensor = tensor
        self.context: ContextParallel | None = None
        self.weight = nn.Parameter(torch.empty(shape.num_experts, shape.hidden_size))
        noisy = shape.router == "noisy"
        self.noise_weight = nn.Parameter(torch.empty(shape.num_experts, shape.hidden_size)) if noisy else None
        if shape.router == "sigmoid":
            self.register_buffer("e_score_correction_bias", torch.zeros(shape.num_experts))
        if not self.weight.is_meta:
            for parameter in self.parameters():
                nn.init.kaiming_uniform_(parameter, math.sqrt(5))  # as `nn.Linear` does
        self.source: RandomSource | None = None
        self.loads: dict[int, Tensor] = {}

    def sharding(self) -> Mapping[str, ParameterSharding]:
        sharding = ParameterSharding(partial=self.tensor is not None)
        return {"weight": sharding} if self.noise_weight is None else {"weight": sharding, "noise_weight": sharding}

    def reset_bias(self) -> None:
        """Set the bias of the choice to 0, in fp32."""
        if self.gate.router == "sigmoid":
            weight = self.weight
            self.e_score_correction_bias = torch.zeros(self.gate.experts, dtype=torch.float32, device=weight.device)

    def draw(self, tokens: Tensor, microbatch: MicrobatchContext | None) -> RouterNoise:
        """Return the random numbers for tokens [tokens, width], which are all of the micro-batch."""
        if not self.training or self.gate.router not in RANDOM_ROUTERS:
            return NO_DRAWS
        if self.source is None or microbatch is None:
            raise UsageError(
                f'router "{self.gate.router}" needs `source` and the keyword argument `microbatch` in training'
            )
        (count, width), samples = tokens.shape, microbatch.samples
        if count % samples:
            raise UsageError(f"the router got {count} tokens of {samples} samples; each must have as many")
        generators = self.source.generators(microbatch, tokens.device)
        return sample_noise(self.gate, count // samples, width, tokens.dtype, generators)

    def choose(self, tokens: Tensor, draws: RouterNoise) -> Routing:
        """Return the experts of tokens [tokens, width], before capacity limits and auxiliary losses."""
        jittered = tokens if draws.inputs is None else tokens * draws.inputs
        logits = apply_linear(jittered, self.weight, None, self.grad_context)
        scale = None
        if self.noise_weight is not None and draws.logits is not None:
            scale = apply_linear(tokens, self.noise_weight, None, self.grad_context)
        bias = self.e_score_correction_bias if self.gate.router == "sigmoid" else None
        return route(self.gate, logits, draws, scale=scale, bias=bias)

    def limit(self, routing: Routing) -> Routing:
        """Return `routing`, of all tokens of a micro-batch, without choices beyond the experts' capacity."""
        if self.capacity_factor == 0:
            return routing
        return drop_over_capacity(routing, capacity_of(routing.tally.tokens, self.gate, self.capacity_factor))

    def attach_aux_loss(self, weights: Tensor, tally: RoutingStats, microbatch: MicrobatchContext | None) -> Tensor:
        """Return `weights`, with a backward that adds the gradient of the micro-batch's auxiliary losses.

        The losses cover this replica's tokens of the micro-batch, and are weighted by its share of the step, like its loss.
        """
        if not self.training or not (self.balance or self.z):
            return weights
        if self.tensor is not None and self.tensor.index != 0:
            return weights  # because the gradients of the ranks are summed
        share = 1.0 if microbatch is None else microbatch.share
        if self.context is not None:
            tally, share = _over_ranks(tally, share, self.context)
        return attach_loss(weights, share * (self.balance * tally.balance_loss() + self.z * tally.z_loss()))

    def record_load(self, counts: Tensor, dropped: Tensor | None, microbatch: MicrobatchContext | None) -> None:
        """Record a micro-batch's load, in training."""
        if self.training and torch.is_grad_enabled():
            lost = counts.new_zeros(1) if dropped is None else dropped.view(1)
            self.loads[0 if microbatch is None else microbatch.index] = torch.cat((counts.detach(), lost))


def _over_ranks(tally: RoutingStats, share: float, context: ContextParallel) -> tuple[RoutingStats, float]:
    """Return the sums over the ranks that share a micro-batch's tokens; the gradient flows to this rank's terms alone."""
    here = torch.cat((tally.counts.double(), tally.probabilities.double(), tally.squares.double().view(1)))
    numbers = here.new_tensor([tally.tokens, share])
    total = context.summed(torch.cat((here, numbers)))
    experts, dtype = tally.counts.numel(), tally.probabilities.dtype
    others = (total[: here.numel()] - here.detach()).to(dtype)
    others_tally = RoutingStats(
        others[:experts].round().long(),
        others[experts:-1],
        others[-1],
        round(float(total[-2])) - tally.tokens,
    )
    return tally + others_tally, float(total[-1])


def gates_of(modules: Iterable[nn.Module]) -> list[TopKGate]:
    """Return the gates inside these modules, in order."""
    return [part for module in modules for part in module.modules() if isinstance(part, TopKGate)]


def take_loads(gate: TopKGate) -> Tensor:
    """Return and clear the loads of the last step's micro-batches.

    Returns: [experts + 1] int64: choices of each expert, then choices that were dropped. Under tensor parallelism every rank
    has recorded all of them.
    """
    loads, gate.loads = list(gate.loads.values()), {}
    return sum(loads, torch.zeros(gate.gate.experts + 1, dtype=torch.int64, device=gate.weight.device))


def balance(gate: TopKGate, counts: Tensor) -> None:
    """Move the bias of a sigmoid gate towards even loads; `counts` [experts] are those of the whole step, over all replicas."""
    if gate.gate.router == "sigmoid":
        update_bias(gate.e_score_correction_bias, counts, gate.gate.bias_rate)
