"""AdamW over what this process steps, and the gradient norm over all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.config.sections import OptimizerSection
from pipeloom.errors import CheckpointError
from pipeloom.parallel.data import GradientSync
from pipeloom.parallel.grad_norm import clip, exact_sum, squares
from pipeloom.train.masters import Buckets, Counts, Masters, Parameters, Replaced

_MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimizer:
    """AdamW (arXiv 1711.05101) that decays matrices and leaves vectors alone.

    Without a GradientSync it steps the parameters and reads their `.grad`. With one it steps masters: fp32 values of bf16
    parameters, and this rank's slices only where gradients are sharded (then `step` is collective over dp). The state is that
    of the masters, in fp32 at least.

    Args:
        named: this process's parameters by global name, each once.
        options: rates, averages, decay and clipping.
        sync: the reduction of their gradients, if there is one.
        counts: whether this process counts a parameter in the global norm: each element is counted once over the mesh. With
            sharded gradients every dp rank counts its slice.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        options: OptimizerSection,
        sync: GradientSync | None = None,
        counts: Counts = lambda name: True,
    ) -> None:
        self.masters: Masters = Parameters(named) if sync is None else Buckets(sync)
        self._parameters = [parameter for _, parameter in named]
        self._sync = sync
        self.clip_norm = options.clip_norm
        self._counts = counts
        self._pieces = list(self.masters.pieces)
        groups = [
            {"params": list(self.masters.decayed), "weight_decay": options.weight_decay},
            {"params": list(self.masters.undecayed), "weight_decay": 0.0},
        ]
        filled = [group for group in groups if group["params"]]
        self.adam = (
            torch.optim.AdamW(filled, lr=options.lr, betas=options.betas, eps=1e-8, fused=True) if filled else None
        )

    @property
    def counted(self) -> int:
        """The most squares that `squares` returns."""
        return sum(self._counts(piece.name) for piece in self._pieces)

    def squares(self) -> list[float]:
        """The sum of the squares of each gradient that this process counts; call it after the pipeline's step."""
        self._arrange()
        counted = [piece for piece in self._pieces if self._counts(piece.name)]
        return squares([piece.of(piece.master.grad) for piece in counted if piece.master.grad is not None])

    def square_norm(self) -> float:
        """The sum of `squares`."""
        return exact_sum(self.squares())

    def step(self, norm: float | None, rate: float) -> None:
        """Clips, steps or skips, and drops the gradients.

        Args:
            norm: the global gradient norm; a step whose norm is not finite is skipped; None: neither clips nor skips.
            rate: the learning rate.
        """
        self._arrange()
        if norm is None or math.isfinite(norm):
            if self.adam is not None:
                if norm is not None and self.clip_norm > 0:
                    clip([master.grad for master in self._all if master.grad is not None], norm, self.clip_norm)
                for group in self.adam.param_groups:
                    group["lr"] = rate
                self.adam.step()
            self.masters.publish()  # collective: a rank whose slices hold no parameter has nothing to step, and takes part
        self.zero_grad()

    def zero_grad(self) -> None:
        """Drops all gradients."""
        for tensor in (*self._all, *self._parameters):
            tensor.grad = None
        if self._sync is not None:
            self._sync.zero_grad()

    def hold_gradients(self) -> Callable[[], None]:
        """Keeps the gradients of the step at hand while the next one is computed; the result brings them back."""
        return self.masters.hold()

    def changing(self) -> list[Tensor]:
        """Every tensor that a step writes to, moments aside: those are in `adam.state`."""
        return self.masters.changing()

    def read_parameters(self) -> None:
        """Makes the masters what the parameters are: call it after loading weights without the optimizer's state."""
        self.masters.read()

    @property
    def state_bytes(self) -> int:
        """Memory of the moments, once it has stepped, and of masters that are not the parameters themselves."""
        moments = len(_MOMENTS) * sum(master.nbytes for master in self._all)
        shared = {parameter.untyped_storage().data_ptr() for parameter in self._parameters}
        return moments + sum(m.nbytes for m in self._all if m.untyped_storage().data_ptr() not in shared)

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Global name -> `step`, `shape`, `start` and `stop` (elements of what this process holds of the parameter, counted
        row by row), and of these elements `master`, `exp_avg` and `exp_avg_sq`: flat views, not copies."""
        found: dict[str, dict[str, Any]] = {}
        for piece in self.masters.pieces:
            state = self.adam.state.get(piece.master, {}) if self.adam is not None else {}
            found[piece.name] = {
                "shape": tuple(piece.shape),
                "start": piece.start,
                "stop": piece.stop,
                "step": float(state["step"]) if state else 0.0,
                "master": piece.of(piece.master.detach()),
                **{key: piece.of(state[key]) for key in _MOMENTS if state},
            }
        return found

    @torch.no_grad()
    def load_state_dict(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Takes over a state; of each parameter it must hold the elements that are stepped here, and may hold more.

        A parameter with `step` 0 has no moments: it had no gradient yet. Raises CheckpointError for elements that are missing.
        """
        for piece in self.masters.pieces:
            state = states.get(piece.name)
            if state is None or state["start"] > piece.start or state["stop"] < piece.stop:
                raise CheckpointError(
                    f"the optimizer's state of {piece.name!r} does not hold its elements {piece.start} to {piece.stop}"
                )
        if self.adam is not None:
            self.adam.state.clear()
        self._adopt(self.masters.separate({piece.name: states[piece.name]["step"] for piece in self.masters.pieces}))
        for piece in self.masters.pieces:
            state = states[piece.name]
            own = slice(piece.start - state["start"], piece.stop - state["start"])
            piece.of(piece.master).copy_(state["master"][own])
            if self.adam is None or not state["step"]:
                continue
            mine = self.adam.state[piece.master]
            if not mine:
                mine["step"] = torch.zeros((), dtype=torch.float32, device=piece.master.device)
                mine.update({key: torch.zeros_like(piece.master) for key in _MOMENTS})
            mine["step"].fill_(state["step"])
            for key in _MOMENTS:
                piece.of(mine[key]).copy_(state[key][own])
        self.masters.publish()

    def _arrange(self) -> None:
        """Gradients into the masters; state and places among the groups for those that took the place of others."""
        self._adopt(self.masters.arrange())

    def _adopt(self, replaced: Replaced) -> None:
        if not replaced or self.adam is None:
            return
        for group in self.adam.param_groups:
            group["params"] = [new for old in group["params"] for new, _ in replaced.get(old, [(old, None)])]
        for old, parts in replaced.items():
            state = self.adam.state.pop(old, None)
            for new, elements in parts if state else ():
                self.adam.state[new] = {
                    "step": state["step"].clone(),
                    **{key: state[key][elements] for key in _MOMENTS},
                }
        self._pieces = list(self.masters.pieces)

    @property
    def _all(self) -> list[nn.Parameter]:
        return [*self.masters.decayed, *self.masters.undecayed]
