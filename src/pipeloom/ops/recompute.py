"""Recomputation: a call keeps only its inputs, and runs again before the backward needs what it saves (arXiv 1604.06174)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.errors import UsageError
from pipeloom.ops.checksum import version_of
from pipeloom.ops.saved_tensors import SavedTensor, saving
from pipeloom.ops.stage_state import StageState


class StartState:
    """Start of a computation besides its arguments: the state of modules, random numbers, and autocast.

    Args:
        device: of random numbers, beside those of the CPU.
    """

    def __init__(self, modules: Iterable[nn.Module], device: torch.device) -> None:
        self._devices = [device] if device.type == "cuda" else []
        kinds = [kind for kind in {"cpu", device.type} & {"cpu", "cuda"} if torch.is_autocast_enabled(kind)]
        self._autocast = [(kind, torch.get_autocast_dtype(kind)) for kind in kinds]
        self._random: tuple[Tensor, ...] | None = self._generators()
        self._buffers_of_modules = StageState(modules)

    def forget_unchanged(self) -> None:
        """Drop what the computation, which has ended, has left unchanged. Call it once."""
        self._buffers_of_modules.forget_unchanged()
        if self._random is not None and all(map(torch.equal, self._random, self._generators())):
            self._random = None  # it draws nothing

    @contextmanager
    def again(self) -> Iterator[None]:
        """Return the context of another run. A backward inside the first run may start one before that has ended."""
        with self._buffers_of_modules.again(), ExitStack() as contexts:
            for kind, dtype in self._autocast:
                contexts.enter_context(torch.autocast(kind, dtype))
            if self._random is not None:
                contexts.enter_context(torch.random.fork_rng(self._devices))
                torch.set_rng_state(self._random[0])
                for device, state in zip(self._devices, self._random[1:], strict=True):
                    torch.cuda.set_rng_state(state, device)
            yield

    def _generators(self) -> tuple[Tensor, ...]:
        """Return the states of torch's generators, of the CPU and of the device."""
        return torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in self._devices)


class RecomputedCall:
    """One call that runs again: from the same arguments, random numbers and state of a module, and with the same autocast.

    Args:
        name: of the call, for errors.
        again: runs it again on its arguments; returns the result.
        module: whose state it reads or changes.
        device: of its random numbers, beside those of the CPU.
        by_action: whether `run_again` is called; otherwise it runs when a tensor that it has saved is needed.
        stops: whether such a run ends with the last tensor that it saves, by an exception.
    """

    def __init__(
        self,
        name: str,
        again: Callable[[], Any],
        module: nn.Module | None,
        device: torch.device,
        by_action: bool = False,
        stops: bool = False,
    ) -> None:
        self.name = name
        self._again, self._by_action, self._stops = again, by_action, stops
        # What it has saved: its place in the graph, its shape and dtype, and the version of a parameter.
        self._saved: list[tuple[weakref.ref[SavedTensor], tuple[Any, ...], int | None]] = []
        self._start = StartState([] if module is None else [module], device)
        self._ended = False

    def pack(self, tensor: Tensor) -> SavedTensor:
        """Return what the graph holds in place of a tensor that the first run saves."""
        saved = SavedTensor(None, None if self._by_action else self.run_again)
        # A parameter is the same in both runs, and may have been changed between them; a transposed one is a view.
        whole = tensor if tensor._base is None else tensor._base
        version = version_of(tensor) if whole.is_leaf and whole.requires_grad else None
        self._saved.append((weakref.ref(saved), (tensor.shape, tensor.dtype), version))
        return saved

    def ended(self) -> None:
        """Note that the first run has ended."""
        self._start.forget_unchanged()
        self._ended = True

    def run_again(self) -> Any:
        """Run it again, and hand what it saves to the first graph; return the result, if it runs to its end."""
        slots, count, same = self._saved[:], 0, True

        def pack(tensor: Tensor) -> SavedTensor:
            nonlocal count, same
            saved, count = SavedTensor(tensor), count + 1
            if count <= len(slots):
                reference, form, version = slots[count - 1]
                slot, same = reference(), same and form == (tensor.shape, tensor.dtype)
                if slot is not None and slot.held is None and saved.held is not None:
                    slot.held = saved.held if version is None else (saved.held[0], version)
            if self._stops and count == len(slots):
                raise _Stop
            return saved

        result = None
        # The exception ends the innermost contexts too, and does not reach the backward.
        with suppress(_Stop), self._start.again(), torch.enable_grad(), saving(pack):
            result = self._again()
        if not same or (count != len(slots) and self._ended):
            raise UsageError(
                f"{self.name} saves {len(slots)} tensors in a forward and {count}, or others, when it runs again: it must "
                "compute the same from the same arguments"
            )
        return result


class _Stop(Exception):
    """Ends a second run that has saved all that is needed."""


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
    changes an input, the backward raises.)
    """
    if not torch.is_grad_enabled():
        return run(*values)
    tensors = [value for value in values if isinstance(value, Tensor)]
    versions = [version_of(tensor) for tensor in tensors]
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), torch.device("cpu"))
    inputs = _Inputs.apply(torch.empty(0, requires_grad=True), *tensors).grad_fn  # type: ignore[no-untyped-call]
    others = [None if isinstance(value, Tensor) else (value,) for value in values]
    on_aliases = partial(_on_aliases, on_change, run)

    def again() -> Any:
        tensors = iter(inputs.saved_tensors)
        return on_aliases(*(next(tensors) if other is None else other[0] for other in others))

    # The exception that ends a second run early does not pass through TorchScript.
    stops = not any(isinstance(part, torch.jit.ScriptModule) for part in module.modules())
    call = RecomputedCall(type(module).__name__, again, module, device, stops=stops)
    try:
        with saving(call.pack):
            result = on_aliases(*values)
    except RuntimeError as error:
        if "saved tensor hooks" in str(error) or "Inference tensors" in str(error):
            error.add_note(f"({type(module).__name__} is recomputed: leave the layer out of `recompute`)")
        raise
    if [version_of(tensor) for tensor in tensors] != versions:
        raise UsageError(
            f"{type(module).__name__} is recomputed, and its forward changes its input in place: work on a copy "
            "there (inplace=False), or leave the layer out of `recompute`"
        )
    call.ended()
    return result


class _Inputs(torch.autograd.Function):
    """A node that does nothing but save tensors, as all hooks around it want them saved."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return root.clone()


def on_copies(on_change: Callable[[], None], run: Callable[..., Any], *values: Any, **keywords: Any) -> Any:
    """Return `run(*values, **keywords)` on copies of the values, which it may change; call `on_change` if it does."""
    copies = [value.clone() if isinstance(value, Tensor) else value for value in values]
    result = run(*copies, **keywords)
    if any(isinstance(value, Tensor) and version_of(value) for value in copies):
        on_change()
    return result


def _on_aliases(on_change: Callable[[], None] | None, run: Callable[..., Any], *values: Any) -> Any:
    """Run on aliases of the inputs, new in each run, so that hooks of the second run touch no tensor of the first graph; or on
    copies, which `run` may change.
    """
    if on_change is not None:
        return on_copies(on_change, run, *values)
    hooked = [type(v) is Tensor and v.requires_grad and v.layout is torch.strided for v in values]
    return run(*(v.view_as(v) if takes else v for v, takes in zip(values, hooked, strict=True)))
