"""Experts in training: how a layout spreads them, how evenly tokens use them, and the biases that balance their loads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from pipeloom.config import Config
from pipeloom.models import names
from pipeloom.models.gate import balance, gates_of, take_loads
from pipeloom.parallel.collectives import carrier_of
from pipeloom.runtime import Pipeline


@dataclass(frozen=True)
class Loads:
    """Balance of one step's use of its experts.

    Attributes:
        largest: tokens of the busiest expert over the mean of its block, for the block where this is largest; between 1 (even)
            and the number of experts.
        dropped: tokens dropped because their expert was full, as a share of all choices.
    """

    largest: float
    dropped: float


class ExpertLoads:
    """Collects the loads of a pipeline's experts in each step, and updates the biases of sigmoid routers by them."""

    def __init__(self, config: Config, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._experts = 0 if config.model.source else config.model.num_experts  # Hugging Face gates count no tokens
        self._biased = config.model.router == "sigmoid"
        sparse = config.model.expert_blocks if self._experts else ()
        blocks = [names.block(number) for number, experts in enumerate(sparse) if experts]
        self._blocks = len(blocks)
        held = [(at, pipeline.modules[name]) for at, name in enumerate(blocks) if name in pipeline.modules]
        self._gates = [(at, gate) for at, module in held for gate in gates_of([module])]

    def after_step(self, wanted: bool) -> Loads | None:
        """Update the biases of sigmoid routers by the step's loads; collective, after each step.

        Args:
            wanted: whether to return the loads; the same on every rank.

        Returns:
            the step's loads; None if they are not wanted, or if the model has no experts.
        """
        if not self._experts or not (wanted or self._biased):
            return None
        mesh, device = self._pipeline.mesh, self._pipeline.device
        carrier = carrier_of(device, mesh.everyone.group)
        table = torch.zeros(self._blocks, self._experts + 1, dtype=torch.int64, device=carrier)
        for at, gate in self._gates:
            loads = take_loads(gate)
            if mesh.place.tp == 0:  # the other tensor-parallel ranks had the same tokens
                table[at] = loads
        if mesh.everyone.group is not None:
            with self._pipeline.waiting("the other ranks' loads of the experts"):
                dist.all_reduce(table, group=mesh.everyone.group)
        counts = table[:, :-1]
        if self._biased:
            for at, gate in self._gates:
                balance(gate, counts[at].to(device))
        if not wanted:
            return None
        even = counts.sum(1) / self._experts
        largest = (counts.amax(1) / even.clamp_min(1e-9)).max()
        return Loads(float(largest), float(table[:, -1].sum() / counts.sum().clamp_min(1)))
