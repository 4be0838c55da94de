"""Recomputation: a layer's forward keeps only its inputs, and runs again before its backward (arXiv 1604.06174)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from pipeloom.errors import UsageError
from pipeloom.ops.checksum import version_of
from pipeloom.ops.stage_state import StageState


def recomputed(
    run: Callable[..., Any],
    values: tuple[Any, ...],
    module: nn.Module,
    on_change: Callable[[], None] | None = None,
) -> Any:
    """Return `run(*values)`, differentiable although no intermediate values are kept.

    The second run draws the same random numbers as the first, starts from the state of `module` that the first one read
    (`StageState`), and leaves no trace in it: what counts, averages or iterates in a forward does so once. A hook that `run`
    registers on an input is called once.

    Args:
        on_change: run on copies of the inputs, and call this if `run` changes one in place; None: that is an error.

    Raises UsageError when `run` changes an input in place: the second run would start from other values. (If other code
    changes an input, torch raises in the backward.)
    """
    if not torch.is_grad_enabled():
        return run(*values)
    first = _First(values, module)
    scripted = any(isinstance(part, torch.jit.ScriptModule) for part in module.modules())
    try:
        # The exception that ends a second run early does not pass through TorchScript.
        with set_checkpoint_early_stop(False) if scripted else nullcontext():
            return checkpoint(
                _on_aliases,
                on_change,
                run,
                *values,
                use_reentrant=False,
                context_fn=lambda: (first, _Again(first.state)),
            )
    except RuntimeError as error:
        if "saved tensor hooks" in str(error) or "Inference tensors" in str(error):
            error.add_note(f"({type(module).__name__} is recomputed: leave the layer out of `recompute`)")
        raise


def _on_aliases(on_change: Callable[[], None] | None, run: Callable[..., Any], *values: Any) -> Any:
    """Run on aliases of the inputs, new in each run, so that hooks of the second run touch no tensor of the first graph; or on
    copies, which `run` may change.
    """
    if on_change is None:
        return run(*(v.view_as(v) if _takes_hooks(v) else v for v in values))
    copies = [v.clone() if isinstance(v, Tensor) else v for v in values]
    result = run(*copies)
    if any(isinstance(v, Tensor) and version_of(v) for v in copies):
        on_change()
    return result


def _takes_hooks(value: Any) -> bool:
    return type(value) is Tensor and value.requires_grad and value.layout is torch.strided


class _First:
    """The context of the first run: records the state before it."""

    def __init__(self, values: tuple[Any, ...], module: nn.Module) -> None:
        self._module = module
        self._inputs = [(value, version_of(value)) for value in values if isinstance(value, Tensor)]
        self.state = StageState([module])

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            if any(version_of(value) != version for value, version in self._inputs):
                raise UsageError(
                    f"{type(self._module).__name__} is recomputed, and its forward changes its input in place: work on a copy "
                    "there (inplace=False), or leave the layer out of `recompute`"
                )
            self.state.forget_unchanged()


class _Again:
    """The context of another run from the same state. A backward inside the first run may start one before it has ended."""

    def __init__(self, state: StageState) -> None:
        self._state = state

    def __enter__(self) -> None:
        self._state.swap_in()

    def __exit__(self, *_: Any) -> None:  # by an exception too: torch ends the run once it has all that is needed
        self._state.swap_out()
