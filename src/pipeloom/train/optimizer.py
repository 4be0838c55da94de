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
from pipeloom.train.masters import Buckets, Counts, Masters, Parameters

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
        self._counted = [piece for piece in self.masters.pieces if counts(piece.name)]
        groups = [
            {"params": list(self.masters.decayed), "weight_decay": options.weight_decay},
            {"params": list(self.masters.undecayed), "weight_decay": 0.0},
        ]
        filled = [group for group in groups if group["params"]]
        self.adam = (
            torch.optim.AdamW(filled, lr=options.lr, betas=options.betas, eps=1e-8, fused=True) if filled else None
        )

    def square_norm(self) -> float:
        """The sum of the squares of the gradients that this process counts; call it after the pipeline's step."""
        self.masters.arrange()
        return square_norm([p.of(p.master.grad) for p in self._counted if p.master.grad is not None])

    def step(self, norm: float | None, rate: float) -> None:
        """Clips, steps or skips, and drops the gradients.

        Args:
            norm: the global gradient norm; a step whose norm is not finite is skipped; None: neither clips nor skips.
            rate: the learning rate.
        """
        self.masters.arrange()
        if self.adam is not None and (norm is None or math.isfinite(norm)):
            if norm is not None:
                clip([master.grad for master in self._all if master.grad is not None], norm, self.clip_norm)
            for group in self.adam.param_groups:
                group["lr"] = rate
            self.adam.step()
            self.masters.publish()
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

        Raises CheckpointError for elements that are missing.
        """
        for piece in self.masters.pieces:
            state = states.get(piece.name)
            if state is None or state["start"] > piece.start or state["stop"] < piece.stop:
                raise CheckpointError(
                    f"the optimizer's state of {piece.name!r} does not hold its elements {piece.start} to {piece.stop}"
                )
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

    @property
    def _all(self) -> list[nn.Parameter]:
        return [*self.masters.decayed, *self.masters.undecayed]


def merge_states(states: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """One state from those of ranks that stepped slices of the same parameters: `load_state_dict` takes any part of it.

    Raises CheckpointError when slices leave a gap.
    """
    pieces: dict[str, list[Mapping[str, Any]]] = {}
    for state in states:
        for name, piece in state.items():
            pieces.setdefault(name, []).append(piece)
    merged: dict[str, dict[str, Any]] = {}
    for name, parts in pieces.items():
        parts.sort(key=lambda part: part["start"])
        distinct = [part for at, part in enumerate(parts) if at == 0 or part["start"] != parts[at - 1]["start"]]
        for before, after in zip(distinct, distinct[1:], strict=False):
            if before["stop"] != after["start"]:
                raise CheckpointError(f"the optimizer's state of {name!r} has a gap at element {before['stop']}")
        merged[name] = {
            **distinct[0],
            "stop": distinct[-1]["stop"],
            **{key: torch.cat([part[key] for part in distinct]) for key in ("master", *_MOMENTS) if key in distinct[0]},
        }
    return merged


def square_norm(gradients: Sequence[Tensor]) -> float:
    """The sum of the squares of all elements, summed over tensors in fp64."""
    if not gradients:
        return 0.0
    wide = max((gradient.dtype for gradient in gradients), key=lambda dtype: dtype.itemsize)
    norms = torch._foreach_norm(list(gradients), 2, dtype=wide if wide.itemsize > 4 else torch.float32)
    return float(torch.stack(norms).double().square().sum())


def global_norm(squares: Sequence[float]) -> float:
    """The norm over all ranks from each rank's `square_norm`, in rank order: added in that order, so that all get the same."""
    total = 0.0
    for square in squares:
        total += square
    return math.sqrt(total)


def clip(gradients: Sequence[Tensor], norm: float, most: float) -> None:
    """Scales the gradients by most / norm where the global `norm` is above `most`; `most` 0 never clips."""
    if gradients and most > 0 and norm > most:
        torch._foreach_mul_(list(gradients), most / norm)
