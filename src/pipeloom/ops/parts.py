"""Parts of a layer that a schedule may recompute on their own (`2R0:norms`): a forward drops what they save, R saves it again.

A layer names a part where it calls it: `in_part("norms", self.norm, x)`. If the schedule recomputes the part, what autograd saves
inside the call is dropped at once, and so is the output of the call where later operations of the stage save it; the
arguments stay. R calls the part again on them, and hands what is saved then to the first graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from pipeloom.errors import UsageError
from pipeloom.ops.checksum import storage_key, version_of
from pipeloom.ops.stage_state import StageState

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
    result: PartResult = (
        run(*values, **keywords) if observer is None else observer.run(name, run, module, values, keywords)
    )
    return result


def _module_of(run: Any) -> nn.Module | None:
    while isinstance(run, partial):
        run = run.func
    owner = run if isinstance(run, nn.Module) else getattr(run, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None


class PartObserver(Protocol):
    """Runs the parts of a forward."""

    def run(
        self,
        name: str,
        run: Callable[..., Any],
        module: nn.Module | None,
        values: tuple[Any, ...],
        keywords: Mapping[str, Any],
    ) -> Any:
        """Return `run(*values, **keywords)`."""


_OBSERVER: ContextVar[PartObserver | None] = ContextVar("observer of parts", default=None)


@contextmanager
def observing(observer: PartObserver) -> Iterator[None]:
    """Let `observer` run the parts of what is computed inside."""
    token = _OBSERVER.set(observer)
    try:
        yield
    finally:
        _OBSERVER.reset(token)


class SavingHooks(Protocol):
    """Hooks of the tensors that autograd saves."""

    def pack(self, tensor: Tensor) -> Any:
        """Return what is held in place of a saved tensor."""

    def unpack(self, saved: Any) -> Tensor:
        """Return the tensor."""


@dataclass(slots=True, eq=False)
class _Slot:
    """The place of a saved tensor in the graph; None: R has not saved it yet."""

    value: Tensor | None = None


class _OutputView(NamedTuple):
    """A saved tensor as a view of the storage of output `at` of a call."""

    slot: _Slot
    at: int
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class RecomputedParts:
    """The parts of one forward that are recomputed, and what they save.

    Args:
        names: of the parts; no others are.
        device: that of the stage.
        others: for what else the forward saves; None: autograd holds it.
        called: the names of all parts that the forward calls are added here.
    """

    def __init__(
        self, names: Collection[str], device: torch.device, others: SavingHooks | None, called: set[str]
    ) -> None:
        self.names = names
        self._called = called
        self._device = device
        self._others = others
        self._calls: dict[str, list[_PartCall]] = {name: [] for name in names}
        self._current: _PartCall | None = None
        # Key of a storage -> itself, and the call whose output it is, at which place, and its version there.
        self._outputs: dict[int, tuple[weakref.ref[Any], _PartCall, int, int]] = {}

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Return the context of computations whose parts these are."""
        with observing(self), torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
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
        call = self._current = _PartCall(name, run, values, keywords, module, self._device)
        try:
            result = run(*values, **keywords)
        finally:
            self._current = None
        call.ended()
        for at, tensor in enumerate(_tensors(result)):
            if tensor.layout is torch.strided:
                storage = weakref.ref(tensor.untyped_storage())
                self._outputs[storage_key(tensor)] = storage, call, at, version_of(tensor)
        self._calls[name].append(call)
        return result

    def recompute(self, name: str) -> None:
        """Run the part's calls again, so that the backward has what they save."""
        self._outputs.clear()  # the forward has ended
        for call in self._calls.pop(name):
            call.again()

    def _pack(self, tensor: Tensor) -> Any:
        if self._current is not None:
            slot = _Slot()
            self._current.slots.append(slot)
            return slot
        view = self._view_of_output(tensor)
        if view is not None:
            return view
        return tensor if self._others is None else self._others.pack(tensor)

    def _unpack(self, saved: Any) -> Tensor:
        if isinstance(saved, _Slot):
            if saved.value is None:
                raise UsageError(
                    "a layer computes gradients in its forward from a part that is recomputed by an action of its own, whose "
                    "forward saves nothing: recompute the stage in blocks (R;B)"
                )
            return saved.value
        if self._others is not None:
            return self._others.unpack(saved)
        assert isinstance(saved, Tensor)
        return saved

    def _view_of_output(self, tensor: Tensor) -> _Slot | None:
        """Return the slot of a tensor that is, or is a view of, the output of a call that runs again, as it was then."""
        if (
            tensor.layout is not torch.strided
            or type(tensor.detach()) is not Tensor
            or tensor.is_conj()
            or tensor.is_neg()
        ):
            return None
        storage, call, at, version = self._outputs.get(storage_key(tensor), (None, None, 0, 0))
        if (
            storage is None
            or call is None
            or storage() is not tensor.untyped_storage()
            or version != version_of(tensor)
        ):
            return None
        offset = int(tensor.storage_offset())
        view = _OutputView(_Slot(), at, tensor.dtype, offset, tensor.size(), tensor.stride())
        call.views.append(view)
        return view.slot


@dataclass(slots=True, eq=False)
class _PartCall:
    """One call of a part: its arguments without their graph, its state and random numbers, and what it saved.

    Attributes:
        slots: those of the tensors that it saved, in order.
        views: those of its outputs, saved by later operations.
    """

    name: str
    run: Callable[..., Any]
    values: tuple[Any, ...]
    keywords: Mapping[str, Any]
    module: nn.Module | None
    device: torch.device
    slots: list[_Slot] = field(default_factory=list)
    views: list[_OutputView] = field(default_factory=list)

    def __post_init__(self) -> None:
        given = self.values, self.keywords
        self._versions = [version_of(tensor) for tensor in _tensors(given)]
        self.values, self.keywords = _without_graph(given)
        self._state = StageState([] if self.module is None else [self.module])
        self._random: tuple[Tensor, ...] | None = self._generators()

    _versions: list[int] = field(init=False)
    _state: StageState = field(init=False)
    _random: tuple[Tensor, ...] | None = field(init=False)

    def ended(self) -> None:
        """Note that the first run has ended."""
        self._state.forget_unchanged()
        assert self._random is not None
        if all(map(torch.equal, self._random, self._generators())):
            self._random = None  # it draws nothing

    def again(self) -> None:
        """Run it again, and fill the slots with what it saves."""
        if [version_of(tensor) for tensor in _tensors((self.values, self.keywords))] != self._versions:
            raise UsageError(
                f"part {self.name!r:.100} is recomputed, and its input was changed in place meanwhile: work on a copy there "
                "(inplace=False), or use a schedule without R of this part"
            )
        saved: list[Tensor] = []
        random = nullcontext() if self._random is None else torch.random.fork_rng(self._devices)
        self._state.swap_in()
        try:
            with torch.enable_grad(), random, torch.autograd.graph.saved_tensors_hooks(_saver(saved), _unused):
                if self._random is not None:
                    torch.set_rng_state(self._random[0])
                    for state in self._random[1:]:
                        torch.cuda.set_rng_state(state, self.device)
                result = self.run(*self.values, **self.keywords)
        finally:
            self._state.swap_out()
        if len(saved) != len(self.slots):
            raise UsageError(
                f"part {self.name!r:.100} saves {len(self.slots)} tensors in a forward and {len(saved)} when it runs again: it "
                "must compute the same from the same arguments"
            )
        for slot, tensor in zip(self.slots, saved, strict=True):
            slot.value = tensor
        outputs = _tensors(result)
        for view in self.views:
            storage = outputs[view.at].untyped_storage()
            view.slot.value = torch.empty(0, dtype=view.dtype, device=storage.device).set_(
                storage, view.offset, view.size, view.stride
            )

    @property
    def _devices(self) -> list[torch.device]:
        return [self.device] if self.device.type == "cuda" else []

    def _generators(self) -> tuple[Tensor, ...]:
        """Return the states of torch's generators, of the CPU and of the stage's GPU."""
        return torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in self._devices)


def _tensors(values: Any) -> list[Tensor]:
    """Return the tensors in `values`: itself, or inside tuples, lists and dicts."""
    if isinstance(values, Tensor):
        return [values]
    inner = values.values() if isinstance(values, Mapping) else values if isinstance(values, (tuple, list)) else ()
    return [tensor for value in inner for tensor in _tensors(value)]


def _without_graph(values: Any) -> Any:
    """Return `values` with leaves of the same memory and version counter in place of tensors with a graph."""
    if isinstance(values, Tensor):
        return values.detach().requires_grad_() if values.requires_grad and not values.is_leaf else values
    if isinstance(values, Mapping):
        return {key: _without_graph(value) for key, value in values.items()}
    if isinstance(values, (tuple, list)):
        inner = [_without_graph(value) for value in values]
        return type(values)(*inner) if hasattr(values, "_fields") else type(values)(inner)
    return values


def _saver(saved: list[Tensor]) -> Callable[[Tensor], None]:
    """Return the hook that adds what is saved to a list; the second graph holds nothing itself."""

    def save(tensor: Tensor) -> None:
        saved.append(tensor.detach())

    return save


def _unused(nothing: None) -> Tensor:
    raise UsageError("a layer computes gradients in its forward, in a part that is recomputed by an action of its own")
