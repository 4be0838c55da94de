"""AdamW, SGD or Muon over the elements that this process steps, and the squares of its gradients for the global norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pipeloom.config.sections import Config, ModelSection, OptimizerSection
from pipeloom.errors import CheckpointError
from pipeloom.parallel.buckets import main_dtype
from pipeloom.parallel.data import GradientSync
from pipeloom.parallel.grad_norm import clip, exact_sum, squares
from pipeloom.parallel.sharding import WHOLE, ParameterSharding
from pipeloom.runtime import Pipeline
from pipeloom.train.masters import Buckets, Counts, Parameters, Replaced, Setting
from pipeloom.train.muon import Muon, MuonWeight, WholeMatrices, fused_in

_MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",), "muon": ("momentum_buffer",)}
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
        setting = self._setting
        self.masters = Parameters(named, setting) if sync is None else Buckets(sync, setting)
        self._pieces = list(self.masters.pieces)
        self.optimizers: list[torch.optim.Optimizer] = []
        for rule in _MOMENTS:
            by_decay: dict[float, list[nn.Parameter]] = {}
            for master, master_setting in self.masters.settings.items():
                if master_setting.rule == rule:
                    by_decay.setdefault(master_setting.decay, []).append(master)
            groups: list[dict[str, Any]] = [
                {"params": masters, "weight_decay": decay} for decay, masters in by_decay.items()
            ]
            if rule == "muon":
                matrices = {
                    name: _matrix(name, p, (layouts or {}).get(name, WHOLE), foreign)
                    for name, p in named
                    if p.requires_grad and setting(name).rule == "muon"
                }
                if matrices:  # a rank whose slices hold none of their elements still takes part in gathering them
                    self.optimizers.append(
                        Muon(
                            groups or [{"params": []}],
                            WholeMatrices(matrices, sync, options.adjust_lr_fn),
                            lambda: self._pieces,
                            lr=options.lr,
                            momentum=options.momentum,
                            nesterov=options.nesterov,
                        )
                    )
            elif groups:
                self.optimizers.append(_of_torch(rule, groups, options))

    @classmethod
    def of(cls, pipeline: Pipeline, config: Config) -> Optimizer:
        """Return the optimizer of the pipeline's parameters on this process."""
        return cls(
            list(pipeline.named_parameters()),
            config.optimizer,
            pipeline.sync,
            pipeline.counts,
            layouts=pipeline.layouts,
            foreign=config.model if config.model.source else None,
        )

    def _setting(self, name: str) -> Setting:
        options, role = self._options, role_of(name, len(self._shapes[name]))
        embedding_decay = options.weight_decay if options.embedding_decay is None else options.embedding_decay
        decay = {"matrix": options.weight_decay, "embedding": embedding_decay, "vector": options.vector_decay}[role]
        if options.name == "muon":
            return Setting("muon", decay, name) if role == "matrix" else Setting("adamw", decay)
        return Setting(options.name, decay)

    def moments(self, name: str) -> tuple[str, ...]:
        """Return the names of the state tensors kept for a parameter, besides `step`."""
        rule = self._setting(name).rule
        return () if rule == "sgd" and not self._options.momentum else _MOMENTS[rule]

    def state_of(self, master: nn.Parameter) -> dict[str, Any]:
        """Return torch's state of a master; empty where it has none yet."""
        return next((each.state[master] for each in self.optimizers if each.state.get(master)), {})

    @property
    def counted(self) -> int:
        """The largest number of squares that `squares` can return."""
        return sum(self._counts(piece.name) for piece in self._pieces)

    def squares(self) -> list[float]:
        """Return the sum of squares of each gradient that this process counts; call it after the pipeline's step."""
        self._arrange()
        counted = [piece for piece in self._pieces if self._counts(piece.name)]
        return squares([piece.of(piece.master.grad) for piece in counted if piece.master.grad is not None])

    def named_squares(self, gradients: bool) -> dict[str, float]:
        """Return name -> the sum of squares of the gradients, or of the values, that this process counts of a parameter."""
        self._arrange()
        squares_by_name: dict[str, float] = {}
        for piece in self._pieces:
            tensor = piece.master.grad if gradients else piece.master.detach()
            if tensor is not None and self._counts(piece.name):
                squares_by_name[piece.name] = squares_by_name.get(piece.name, 0.0) + exact_sum(
                    squares([piece.of(tensor)])
                )
        return squares_by_name

    def square_norm(self) -> float:
        """Return the sum of `squares`."""
        return exact_sum(self.squares())

    def step(self, norm: float | None, rate: float) -> None:
        """Clip the gradients, make or skip the step, and drop the gradients.

        Args:
            norm: the global gradient norm. A step whose norm is not finite is skipped. None: neither clip nor skip.
            rate: the learning rate.
        """
        self._arrange()
        if norm is None or math.isfinite(norm):
            if norm is not None and self.clip_norm > 0:
                clip([master.grad for master in self._all if master.grad is not None], norm, self.clip_norm)
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

    def publish_again(self) -> None:
        """Take part in the collective of other ranks that publish a repeated step, on a rank that does not repeat it."""
        self.masters.publish()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for tensor in (*self._all, *self._trained):
            tensor.grad = None
        if self._sync is not None:
            self._sync.zero_grad()

    def hold_gradients(self) -> Callable[[], None]:
        """Keep this step's gradients while the next step computes its own; return a function that restores them."""
        return self.masters.hold()

    def changing(self) -> list[Tensor]:
        """Return every tensor that a step writes to, except the moments, which are in the state of `optimizers`."""
        return self.masters.changing()

    def read_parameters(self) -> None:
        """Copy the parameters' values to the masters: call it after loading weights without the optimizer's state."""
        self.masters.read()

    @property
    def state_bytes(self) -> int:
        """Bytes of the moments after the first step, and of masters that do not share memory with the parameters."""
        moment_counts = {piece.master: len(self.moments(piece.name)) for piece in self._pieces}
        moments = sum(moment_counts.get(master, 0) * master.nbytes for master in self._all)
        shared = {parameter.untyped_storage().data_ptr() for parameter in self._trained}
        return moments + sum(m.nbytes for m in self._all if m.untyped_storage().data_ptr() not in shared)

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return global name -> `shape` of this process's part of the parameter, `start` and `stop` (range of its elements,
        counted row by row), `step`, and flat views, not copies, of these elements: `master` and the `moments`.

        `step` is 1.0 where SGD or Muon, which do not count steps, have a state.
        """
        states: dict[str, dict[str, Any]] = {}
        for piece in self.masters.pieces:
            state = self.state_of(piece.master)
            moments = [key for key in self.moments(piece.name) if state.get(key) is not None]
            states[piece.name] = {
                "shape": tuple(piece.shape),
                "start": piece.start,
                "stop": piece.stop,
                "step": float(state.get("step", 1.0)) if moments else 0.0,
                "master": piece.of(piece.master.detach()),
                **{key: piece.of(state[key]) for key in moments},
            }
        return states

    @torch.no_grad()
    def load_state_dict(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Load a state, which must hold the elements of each parameter that this process steps, and may hold more.

        A parameter with `step` 0 has no moments: it has had no gradient yet. Raises CheckpointError for missing elements.
        """
        for piece in self.masters.pieces:
            state = states.get(piece.name)
            if state is None or state["start"] > piece.start or state["stop"] < piece.stop:
                raise CheckpointError(
                    f"the optimizer's state of {piece.name!r} does not hold its elements {piece.start} to {piece.stop}"
                )
        self.masters.wait()
        for optimizer in self.optimizers:
            optimizer.state.clear()
        self._adopt(self.masters.separate({piece.name: states[piece.name]["step"] for piece in self.masters.pieces}))
        for piece in self.masters.pieces:
            state = states[piece.name]
            section = slice(piece.start - state["start"], piece.stop - state["start"])
            piece.of(piece.master).copy_(state["master"][section])
            moments = self.moments(piece.name)
            if not state["step"] or not moments:
                continue
            mine = self._optimizer_of(piece.master).state[piece.master]
            for key in moments:
                if key not in mine:
                    mine[key] = torch.zeros_like(piece.master)
                piece.of(mine[key]).copy_(state[key][section])
            if "exp_avg" in moments:
                mine["step"] = torch.tensor(state["step"], dtype=torch.float32, device=piece.master.device)
        self.masters.publish()

    def _arrange(self) -> None:
        """Put the gradients into the masters, and hand state and parameter groups on to masters that replace others."""
        self._adopt(self.masters.arrange())

    def _adopt(self, replaced: Replaced) -> None:
        if not replaced:
            return
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["params"] = [new for old in group["params"] for new, _ in replaced.get(old, [(old, None)])]
            for old, parts in replaced.items():
                state = optimizer.state.pop(old, None)
                for new, elements in parts if state else ():
                    optimizer.state[new] = {
                        key: value[elements] if value.ndim else value.clone() for key, value in state.items()
                    }
        self._pieces = list(self.masters.pieces)

    def _optimizer_of(self, master: nn.Parameter) -> torch.optim.Optimizer:
        return next(
            each for each in self.optimizers for group in each.param_groups if any(p is master for p in group["params"])
        )

    @property
    def _all(self) -> list[nn.Parameter]:
        return list(self.masters.settings)


def _of_torch(rule: str, groups: list[dict[str, Any]], options: OptimizerSection) -> torch.optim.Optimizer:
    if rule == "adamw":
        return torch.optim.AdamW(groups, lr=options.lr, betas=options.betas, eps=1e-8, fused=True)
    return torch.optim.SGD(groups, lr=options.lr, momentum=options.momentum, nesterov=options.nesterov)


def _matrix(name: str, parameter: nn.Parameter, layout: ParameterSharding, foreign: ModelSection | None) -> MuonWeight:
    wide = main_dtype(parameter.dtype)
    return MuonWeight(
        name,
        parameter.shape,
        layout,
        fused_in(name, tuple(layout.full_shape(parameter.shape)), foreign),
        torch.bfloat16 if parameter.dtype == torch.bfloat16 else wide,
    )
