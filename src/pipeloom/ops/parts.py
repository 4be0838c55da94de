"""Parts of a layer that a schedule may recompute on their own (`2R0:norms`): a forward drops what they save, R saves it again.

A layer names a part where it calls it: `in_part("norms", self.norm, x)`. If the schedule recomputes the part, what autograd saves
inside the call is dropped at once, and so is the output of the call where later operations of the stage save it; the
arguments stay. R calls the part again on them, and hands what is saved then to the first graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from pipeloom.ops.checksum import storage_key, version_of
from pipeloom.ops.nested import mapped, tensors_in
from pipeloom.ops.recompute import RecomputedCall
from pipeloom.ops.saved_tensors import SavedTensor, SavedView, is_plain, saving

PartResult = TypeVar("PartResult")


def in_part(name: str, run: Callable[..., PartResult], *values: Any, **keywords: Any) -> PartResult:
    """Return `run(*values, **keywords)`, which is part `name` of the layer that calls this.

    Where a schedule recomputes the part, it runs again from the same arguments, random numbers, and state of the module
    that `run` is (or is a method of). A part inside a part belongs to the outer one, if that is recomputed. In a compiled
    layer there are no parts.
    """
    if torch.compiler.is_compiling() or _OBSERVER.get() is None:
        return run(*values, **keywords)
    return run_part(name, run, _module_of(run), values, keywords)


def run_part(
    name: str,
    run: Callable[..., PartResult],
    module: nn.Module | None,
    values: tuple[Any, ...],
    keywords: Mapping[str, Any],
) -> PartResult:
    """As `in_part`, for the caller that knows the module whose state `run` reads or changes."""
    observer = _OBSERVER.get()
    result: PartResult = run(*values, **keywords) if observer is None else observer(name, run, module, values, keywords)
    return result


def _module_of(run: Any) -> nn.Module | None:
    while isinstance(run, partial):
        run = run.func
    owner = run if isinstance(run, nn.Module) else getattr(run, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None


PartObserver = Callable[[str, Callable[..., Any], nn.Module | None, tuple[Any, ...], Mapping[str, Any]], Any]
"""What runs the parts of a forward: takes the arguments of `run_part`, and returns `run(*values, **keywords)`."""

_OBSERVER: ContextVar[PartObserver | None] = ContextVar("observer of parts", default=None)


@contextmanager
def observing(observer: PartObserver) -> Iterator[None]:
    """Let `observer` run the parts of what is computed inside."""
    token = _OBSERVER.set(observer)
    try:
        yield
    finally:
        _OBSERVER.reset(token)


class RecomputedParts:
    """The parts of one forward that are recomputed, and what they save.

    Args:
        names: of the parts; no others are.
        device: that of the stage.
        others: packs what else the forward saves.
        called: the names of all parts that the forward calls are added here.
    """

    def __init__(
        self, names: Collection[str], device: torch.device, others: Callable[[Tensor], SavedTensor], called: set[str]
    ) -> None:
        self.names = names
        self._called = called
        self._device = device
        self._others = others
        self._calls: dict[str, list[_PartCall]] = {name: [] for name in names}
        self._current: RecomputedCall | None = None
        # Key of a storage -> itself, and the call whose output it is, at which place, and its version there.
        self._outputs: dict[int, tuple[weakref.ref[Any], _PartCall, int, int]] = {}

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Return the context of computations whose parts these are."""
        with observing(self.run), saving(self._pack):
            yield

    def run(
        self,
        name: str,
        run: Callable[..., Any],
        module: nn.Module | None,
        values: tuple[Any, ...],
        keywords: Mapping[str, Any],
    ) -> Any:
        """Return `run(*values, **keywords)`; if the part is recomputed, drop what it saves."""
        self._called.add(name)
        if name not in self._calls or self._current is not None:
            return run(*values, **keywords)
        again = partial(_again, name, run, mapped((values, keywords), Tensor, _kept))
        call = _PartCall(RecomputedCall(f"part {name!r:.100}", again, module, self._device, by_action=True), [])
        self._current = call.recomputed
        try:
            result = run(*values, **keywords)
        finally:
            self._current = None
        call.recomputed.ended()
        for at, tensor in enumerate(tensors_in(result)):
            if tensor.layout is torch.strided:
                storage = weakref.ref(tensor.untyped_storage())
                self._outputs[storage_key(tensor)] = storage, call, at, version_of(tensor)
        self._calls[name].append(call)
        return result

    def recompute(self, name: str) -> None:
        """Run the part's calls again, so that the backward has what they save."""
        self._outputs.clear()  # the forward has ended
        for call in self._calls.pop(name):
            outputs = tensors_in(call.recomputed.run_again())
            for at, view in call.views:
                view.fill(outputs[at].untyped_storage())

    def _pack(self, tensor: Tensor) -> SavedTensor:
        if self._current is not None:
            return self._current.pack(tensor)
        if is_plain(tensor.detach()):
            storage, call, at, version = self._outputs.get(storage_key(tensor), (None, None, 0, 0))
            there = storage is not None and storage() is tensor.untyped_storage()
            if call is not None and there and version == version_of(tensor):
                # It is, or is a view of, the output of a call that runs again, as it was then.
                saved = SavedTensor(None)
                call.views.append((at, SavedView.of(saved, tensor)))
                return saved
        return self._others(tensor)


class _PartCall(NamedTuple):
    """One call of a part, and those of its outputs that later operations have saved, with their place in its result."""

    recomputed: RecomputedCall
    views: list[tuple[int, SavedView]]


def _again(name: str, run: Callable[..., Any], given: Any) -> Any:
    """Run a part again on its arguments."""
    try:
        values, keywords = mapped(given, SavedTensor, SavedTensor.value)
    except RuntimeError as error:
        error.add_note(
            f"(part {name!r:.100} is recomputed, and its input was changed in place meanwhile: work on a copy there "
            "(inplace=False), or use a schedule without R of this part)"
        )
        raise
    return run(*values, **keywords)


def _kept(tensor: Tensor) -> SavedTensor:
    """Return an argument to be kept: in place of one with a graph, a leaf of the same memory and version counter."""
    return SavedTensor(tensor if tensor.is_leaf else tensor.detach().requires_grad_())
