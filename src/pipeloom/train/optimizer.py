"""AdamW, SGD or Muon over the elements that this process steps, and the squares of its gradients for the global norm."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pipeloom.config.sections import Config, ModelSection, OptimizerSection
from pipeloom.parallel.buckets import main_dtype
from pipeloom.parallel.data import GradientSync
from pipeloom.parallel.grad_norm import clip, exact_sum, squares
from pipeloom.parallel.masters import Counts, Masters
from pipeloom.parallel.sharding import WHOLE, ParameterSharding
from pipeloom.runtime import Pipeline
from pipeloom.train.muon import Muon, MuonWeight, fused_in

_MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",), "muon": ("momentum_buffer",)}
_CLASSES = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "muon": Muon}
RoleName = Literal["matrix", "embedding", "vector"]


def role_of(name: str, dimensions: int) -> RoleName:
    """Return the role of a parameter by its global name.

    - vector: norms and biases, which have one dimension or a name that ends in `bias`;
    - matrix: any other parameter of a numbered block (`model.layers.3.mlp.up_proj.weight`), a stack of experts included;
    - embedding: any other matrix, the output layer included.
    """
    words = name.split(".")
    if dimensions < 2 or words[-1].split("_")[-1] == "bias":
        return "vector"
    return "matrix" if any(word.isdecimal() for word in words) else "embedding"


class Optimizer:
    """The optimizer of `[optimizer]`: AdamW (arXiv 1711.05101), SGD, or Muon for the matrices of blocks and AdamW for the rest.

    Matrices decay by `weight_decay`, embeddings and the output layer by `embedding_decay`, norms and biases by `vector_decay`
    (`role_of`).

    Without a GradientSync it steps the parameters and reads their `.grad`. With one it steps masters: fp32 values of bf16
    parameters, and only this rank's slices where gradients are sharded. Then `step` is collective over dp (Muon's over dp and
    tp), and returns before the other ranks' slices have arrived: a Pipeline waits for them, other callers must call `wait`.
    The state is that of the masters, in at least fp32.

    Args:
        named: this process's parameters by global name, each once.
        options: learning rate, momentum, weight decay and clipping.
        sync: the reduction of their gradients, if there is one.
        counts: whether this process counts a parameter in the global norm: each element is counted once over the mesh. With
            sharded gradients every dp rank counts its slice.
        layouts: global name -> how a parameter is sharded, for Muon; parameters without an entry are whole.
        foreign: the sizes of a Hugging Face model, whose fused projections Muon steps one by one.

    Attributes:
        masters: the tensors that they step.
        optimizers: torch optimizers over disjoint sets of masters; empty where this process steps nothing.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        options: OptimizerSection,
        sync: GradientSync | None = None,
        counts: Counts = lambda name: True,
        *,
        layouts: Mapping[str, ParameterSharding] | None = None,
        foreign: ModelSection | None = None,
    ) -> None:
        self.clip_norm = options.clip_norm
        self._options = options
        self._shapes = {name: p.shape for name, p in named}
        self._trained = [parameter for _, parameter in named]
        self._sync = sync
        self._counts = counts
        self.masters = Masters(named, sync)
        self.optimizers: list[torch.optim.Optimizer] = []
        for rule in _MOMENTS:
            by_decay: dict[float, list[nn.Parameter]] = {}
            for master in self.masters.all:
                if self._rule(master.name) == rule:
                    by_decay.setdefault(self._decay(master.name), []).append(master.tensor)
            groups: list[dict[str, Any]] = [{"params": held, "weight_decay": decay} for decay, held in by_decay.items()]
            inertia: dict[str, Any] = {"momentum": options.momentum, "nesterov": options.nesterov}
            if rule == "muon":
                matrices = {
                    name: _matrix(name, p, (layouts or {}).get(name, WHOLE), foreign)
                    for name, p in named
                    if p.requires_grad and self._rule(name) == "muon"
                }
                if matrices:  # a rank whose slices hold none of their elements still takes part in gathering them
                    rates = {"lr": options.lr, "rule": options.adjust_lr_fn, **inertia}
                    self.optimizers.append(Muon(groups or [{"params": []}], matrices, self.masters.all, sync, **rates))
            elif groups and rule == "sgd":
                self.optimizers.append(torch.optim.SGD(groups, lr=options.lr, **inertia))
            elif groups:
                adamw = torch.optim.AdamW(groups, lr=options.lr, betas=options.betas, eps=1e-8, fused=True)
                self.optimizers.append(adamw)

    @classmethod
    def of(cls, pipeline: Pipeline, config: Config) -> Optimizer:
        """Return the optimizer of the pipeline's parameters on this process."""
        return cls(
            list(pipeline.named_parameters()),
            config.optimizer,
            pipeline.sync,
            pipeline.counts_in_norm,
            layouts=pipeline.layouts,
            foreign=config.model if config.model.source else None,
        )

    def _rule(self, name: str) -> str:
        """Return the optimizer of a parameter: "adamw", "sgd" or "muon"."""
        rule = self._options.name
        return "adamw" if rule == "muon" and role_of(name, len(self._shapes[name])) != "matrix" else rule

    def _decay(self, name: str) -> float:
        options, role = self._options, role_of(name, len(self._shapes[name]))
        embedding_decay = options.weight_decay if options.embedding_decay is None else options.embedding_decay
        return {"matrix": options.weight_decay, "embedding": embedding_decay, "vector": options.vector_decay}[role]

    def moments(self, name: str) -> tuple[str, ...]:
        """Return the names of the state tensors kept for a parameter, besides `step`."""
        rule = self._rule(name)
        return () if rule == "sgd" and not self._options.momentum else _MOMENTS[rule]

    def torch_optimizer(self, name: str) -> torch.optim.Optimizer:
        """Return the one of `optimizers` that steps a parameter."""
        return next(each for each in self.optimizers if isinstance(each, _CLASSES[self._rule(name)]))

    @property
    def counted(self) -> int:
        """The largest number of squares that `squares` can return."""
        return sum(self._counts(master.name) for master in self.masters.all)

    def squares(self) -> list[float]:
        """Return the sum of squares of each gradient that this process counts; call it after the pipeline's step."""
        self.masters.take_gradients()
        gradients = [master.gradient for master in self.masters.all if self._counts(master.name)]
        return squares([gradient for gradient in gradients if gradient is not None])

    def named_squares(self, gradients: bool) -> dict[str, float]:
        """Return name -> the sum of squares of the gradients, or of the values, that this process counts of a parameter."""
        self.masters.take_gradients()
        tensors = {
            master.name: master.gradient if gradients else master.tensor.detach().reshape(-1)
            for master in self.masters.all
            if self._counts(master.name)
        }
        return {name: exact_sum(squares([tensor])) for name, tensor in tensors.items() if tensor is not None}

    def step(self, norm: float | None, rate: float) -> None:
        """Clip the gradients, make or skip the step, and drop the gradients.

        Args:
            norm: the global gradient norm. A step whose norm is not finite is skipped. None: neither clip nor skip.
            rate: the learning rate.
        """
        self.masters.take_gradients()
        if norm is None or math.isfinite(norm):
            if norm is not None and self.clip_norm > 0:
                clip([p.grad for p in self._tensors if p.grad is not None], norm, self.clip_norm)
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rate
                optimizer.step()
        # Collective: a rank must take part even if its slices hold no parameter or it skipped the step.
        self.masters.publish()
        self.zero_grad()

    def wait(self) -> None:
        """Wait for the values that other ranks have stepped; call it before you read parameters without a Pipeline's methods."""
        self.masters.wait()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for tensor in (*self._tensors, *self._trained):
            tensor.grad = None
        if self._sync is not None:
            self._sync.zero_grad()

    @property
    def state_bytes(self) -> int:
        """Bytes of the moments after the first step, and of masters that do not share memory with the parameters."""
        moments = sum(len(self.moments(master.name)) * master.tensor.nbytes for master in self.masters.all)
        shared = {parameter.untyped_storage().data_ptr() for parameter in self._trained}
        return moments + sum(p.nbytes for p in self._tensors if p.untyped_storage().data_ptr() not in shared)

    @property
    def held(self) -> list[Tensor]:
        """The masters, and the moments that exist."""
        states = [state for each in self.optimizers for state in each.state.values()]
        moments = [value for state in states for value in state.values() if isinstance(value, Tensor)]
        return [*self._tensors, *moments]

    @property
    def _tensors(self) -> list[nn.Parameter]:
        return [master.tensor for master in self.masters.all]


def _matrix(name: str, parameter: nn.Parameter, layout: ParameterSharding, foreign: ModelSection | None) -> MuonWeight:
    wide = main_dtype(parameter.dtype)
    return MuonWeight(
        name,
        parameter.shape,
        layout,
        fused_in(name, tuple(layout.full_shape(parameter.shape)), foreign),
        torch.bfloat16 if parameter.dtype == torch.bfloat16 else wide,
    )
