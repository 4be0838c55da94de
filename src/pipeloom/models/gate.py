"""The router of a block: the gate's weights, its random numbers, its auxiliary losses, and the recorded loads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.errors import UsageError
from pipeloom.ops.deferred import DeferringLayer, apply_linear
from pipeloom.ops.layer import MicrobatchContext, SharesTokens, attach_loss
from pipeloom.ops.random_state import OfMicrobatch
from pipeloom.ops.slices import SliceState
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
from pipeloom.shapes.decoder import RANDOM_ROUTERS, DecoderShape
from pipeloom.shapes.rules import require_rules


@dataclass(frozen=True)
class GateShape:
    """The sizes and options of a gate, those of `DecoderShape` that concern it, for a layer of your own."""

    hidden_size: int
    num_experts: int
    num_experts_per_tok: int = 2
    norm_topk_prob: bool = True
    router: str = "softmax"
    capacity_factor: float = 0.0
    pad_to_capacity: bool = False
    aux_loss_coef: float = 0.01
    z_loss_coef: float = 0.001


class TopKGate(OfMicrobatch, SharesTokens, DeferringLayer):
    """Router that scores tokens, chooses their experts, and attaches the auxiliary losses of a micro-batch.

    Every tensor-parallel rank gets all tokens of the micro-batch, so all of them choose alike. Each gets only the gradient of
    its own terms of the experts.

    Attributes:
        source: source of random numbers; set by the code that builds the layer, such as a `Pipeline`. None: torch's generator.
        aux_loss: the auxiliary losses of the last forward without a micro-batch's context, which `MoELayer.aux_loss` returns.
        context: the ranks that share the micro-batch's tokens; the auxiliary losses cover those of all of them.
        loads: (step, micro-batch, slice) -> choices of each expert in the last step, then those beyond their capacity (not those
            dropped at random): [experts + 1] int64. A recomputed forward writes the same values again.
    """

    e_score_correction_bias: Tensor

    def __init__(self, shape: DecoderShape | GateShape, tensor: TensorParallel | None = None) -> None:
        super().__init__()
        self.gate = Gate(shape.router, shape.num_experts, shape.num_experts_per_tok, shape.norm_topk_prob)
        self.capacity_factor, self.pads = shape.capacity_factor, shape.pad_to_capacity
        require_rules(pad_to_capacity=self.pads, dropless=not self.capacity_factor)
        self.balance, self.z = shape.aux_loss_coef, shape.z_loss_coef
        self.tensor = tensor
        self.weight = nn.Parameter(torch.empty(shape.num_experts, shape.hidden_size))
        noisy = shape.router == "noisy"
        self.noise_weight = nn.Parameter(torch.empty(shape.num_experts, shape.hidden_size)) if noisy else None
        if shape.router == "sigmoid":
            self.register_buffer("e_score_correction_bias", torch.zeros(shape.num_experts))
        if not self.weight.is_meta:
            for parameter in self.parameters():
                nn.init.kaiming_uniform_(parameter, math.sqrt(5))  # as `nn.Linear` does
        self.aux_loss: Tensor | None = None
        self.loads: dict[tuple[int, int, int], Tensor] = {}

    def sharding(self) -> Mapping[str, ParameterSharding]:
        sharding = ParameterSharding(partial=self.tensor is not None)
        return {"weight": sharding} if self.noise_weight is None else {"weight": sharding, "noise_weight": sharding}

    @property
    def has_losses(self) -> bool:
        return bool(self.balance or self.z)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "aux_loss": None}  # torch copies no tensor that has a graph

    def reset_bias(self) -> None:
        """Set the bias of the choice to 0, in fp32."""
        if self.gate.router == "sigmoid":
            weight = self.weight
            self.e_score_correction_bias = torch.zeros(self.gate.experts, dtype=torch.float32, device=weight.device)

    def require_runnable(self, microbatch: MicrobatchContext | None) -> None:
        """Raise ArgumentError for a part of the tokens of sequences where random numbers or a capacity are of whole ones."""
        if self.context is not None or (microbatch is not None and microbatch.place is not None):
            router = self.gate.router if self.training else "softmax"
            random = router if router in RANDOM_ROUTERS else ""
            require_rules(cut=True, router=random, capacity_factor=self.capacity_factor)

    def draw(self, tokens: Tensor, microbatch: MicrobatchContext | None) -> RouterNoise:
        """Return the random numbers for tokens [tokens, width], which are all of the micro-batch."""
        if not self.training or self.gate.router not in RANDOM_ROUTERS:
            return NO_DRAWS
        count, samples = len(tokens), 1
        generators: Iterable[torch.Generator | None] = (None,)  # torch's own
        if self.source is not None:
            if microbatch is None:
                raise UsageError(
                    f'router "{self.gate.router}" has a `source`, so it needs the keyword argument `microbatch` in training: a '
                    "layer that contains it passes on its own"
                )
            samples, generators = microbatch.samples, self.source.generators(microbatch, tokens.device)
        if count % samples:
            raise UsageError(f"the router got {count} tokens of {samples} samples; each must have as many")
        return sample_noise(self.gate, count // samples, tokens, generators)

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
        """Return `routing`, of all tokens of a micro-batch, without choices beyond the experts' capacity.

        In training each expert computes as many rows as its capacity, where `pad_to_capacity` says so.
        """
        if self.capacity_factor == 0:
            return routing
        capacity = capacity_of(routing.tally.tokens, self.gate, self.capacity_factor)
        limited = drop_over_capacity(routing, capacity)
        return replace(limited, rows=capacity) if self.pads and self.training else limited

    def attach_aux_loss(
        self,
        weights: Tensor,
        tally: RoutingStats,
        microbatch: MicrobatchContext | None,
        state: SliceState | None = None,
    ) -> Tensor:
        """Return `weights`, with a backward that adds the gradient of the micro-batch's auxiliary losses.

        The losses cover this replica's tokens of the micro-batch, of all its slices, and are weighted by its share of the step,
        like its loss. Without `microbatch` nothing says which share that is: the losses are left in `aux_loss`.
        """
        self.aux_loss = None
        if not self.training or not self.has_losses:
            return weights
        if self.tensor is not None and self.tensor.index != 0:
            return weights  # because the gradients of the ranks are summed
        counts, tokens, share = tally.counts, tally.tokens, 1.0 if microbatch is None else microbatch.share
        total: Callable[[], Tensor] | None = None
        if self.context is not None or state is not None:
            numbers = torch.cat((counts.double(), counts.new_tensor((tokens, share), dtype=torch.float64)))
            summed = numbers if self.context is None else self.context.summed(numbers)
            total = (lambda: summed) if state is None else state.total(summed)

        def loss(probabilities: Tensor, squares: Tensor) -> Tensor:
            """Return this rank's and slice's terms of the losses, which are sums over tokens once the counts of all are known."""
            choices, (rows, weight) = counts, (tokens, share)
            if total is not None:
                sums = total()
                choices, (rows, weight) = sums[:-2].round().long(), sums[-2:].tolist()
            stats = RoutingStats(choices, probabilities, squares, round(rows))
            return weight * (self.balance * stats.balance_loss() + self.z * stats.z_loss())

        if microbatch is not None:
            return attach_loss(weights, loss, tally.probabilities, tally.squares)
        self.aux_loss = loss(tally.probabilities, tally.squares)
        return weights

    def record_load(self, counts: Tensor, dropped: Tensor | None, microbatch: MicrobatchContext | None) -> None:
        """Record a micro-batch's load, in training."""
        if self.training and torch.is_grad_enabled():
            lost = counts.new_zeros(1) if dropped is None else dropped.view(1)
            step, index, place = (
                (0, 0, None) if microbatch is None else (microbatch.step, microbatch.index, microbatch.place)
            )
            if any(each[0] != step for each in self.loads):  # of an earlier one, which nobody took
                self.loads = {}
            self.loads[step, index, 0 if place is None else place.index] = torch.cat((counts.detach(), lost))


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
