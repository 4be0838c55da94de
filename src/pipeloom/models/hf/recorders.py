"""Arguments that a model's own forward passes to its decoder layers, recorded by running it with recorders in their places."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from pipeloom.errors import ConfigError, UsageError

_CACHED = (
    4  # hand-overs kept per process: micro-batches with masks of their own that can be in flight within one action
)


@dataclass(frozen=True)
class HandOver:
    """Arguments of a decoder layer besides the hidden states.

    Attributes:
        args: positional arguments after the hidden states.
        keywords: keyword arguments.
        name: of the hidden states, where they are a keyword argument; None: they are the first argument.
    """

    args: tuple[Any, ...]
    keywords: Mapping[str, Any]
    name: str | None

    def call(self, layer: nn.Module, hidden: Tensor) -> Tensor:
        """The hidden states that `layer` makes of `hidden`."""
        given = () if self.name is not None else (hidden,)
        named = {} if self.name is None else {self.name: hidden}
        result = layer(*given, *self.args, **named, **self.keywords)
        output: Tensor = result[0] if isinstance(result, (tuple, list)) else result
        return output

    def keeps_apart(self, begins: Tensor) -> bool:
        """Return whether a mask among these hides from every token that begins a document the one before it.

        Args:
            begins: [batch, length - 1], whether a document begins at each token but the first of the row.
        """
        length, begin = begins.shape[1] + 1, begins[:, None]
        tensors = [value for _, value in _named(self) if isinstance(value, Tensor)]
        masks = [
            value
            for value in tensors
            if value.shape[-2:] == (length, length) and (value.dtype == torch.bool or value.is_floating_point())
        ]  # not complex rotary tables
        return any(bool((_hides(mask, 1) | ~begin).all()) and not (_hides(mask, 0) & begin).any() for mask in masks)


def _hides(mask: Tensor, back: int) -> Tensor:
    """Return whether each token but the first may not attend to the one `back` places before it: [..., length - 1]."""
    entries = mask.diagonal(-back, -2, -1)[..., 1 - back :]
    return ~entries if mask.dtype == torch.bool else entries < -1e4


class Stop(Exception):
    """Ends a model's forward once a recorder has what it needs."""


class Tape:
    """Mode of a model's recorders in a run, and what they have recorded.

    Attributes:
        extra: how many values a decoder layer returns after the hidden states; None: it returns these alone.
        handed: what each layer is called with in the present run.
    """

    def __init__(self, extra: int | None) -> None:
        self.extra = extra
        self.handed: list[HandOver] = []
        self._first: Tensor | None = None
        self._last: Tensor | None = None
        self._version = 0
        self._stop_at = -1
        self._inject: Tensor | None = None

    def run(self, stop_at: int, inject: Tensor | None = None) -> None:
        """Prepare a run that ends at layer `stop_at` (negative: it does not), or goes on after the last with `inject`."""
        self.handed = []
        self._first = self._last = None
        self._stop_at, self._inject = stop_at, inject

    @property
    def entered(self) -> Tensor:
        """The hidden states that the first layer was called with."""
        assert self._first is not None
        return self._first

    def record(self, index: int, count: int, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        """A recorder's call as layer `index` of `count`."""
        name = None if args else "hidden_states"
        hidden = args[0] if args else keywords.get("hidden_states")
        if not isinstance(hidden, Tensor):
            raise ConfigError(f"its forward calls decoder layer {index} without hidden states")
        if index != len(self.handed):
            raise ConfigError(f"its forward calls decoder layer {index} as number {len(self.handed)}")
        if index == 0:
            self._first = hidden
        elif hidden is not self._last or hidden._version != self._version:
            raise Altered(f"its forward changes the hidden states between decoder layers {index - 1} and {index}")
        rest = {key: value for key, value in keywords.items() if key != name}
        self.handed.append(HandOver(args[1:], rest, name))
        if index == self._stop_at:
            raise Stop
        self._last = self._inject if self._inject is not None and index == count - 1 else hidden.detach()
        self._version = self._last._version
        return self._last if self.extra is None else (self._last, *([None] * self.extra))


class Altered(ConfigError):
    """The hidden states of one layer did not reach the next one as they were."""


class Recorder(nn.Module):
    """Stands for decoder layer `index`; attributes that the forward of the model reads are those of `layer`."""

    _index: int
    _count: int
    _tape: Tape

    def __init__(self, layer: nn.Module, index: int, count: int, tape: Tape) -> None:
        super().__init__()
        # outside of torch's registry: the layer must not become a part of the model that is run
        self.__dict__.update(_layer=layer, _index=index, _count=count, _tape=tape)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_layer"], name)

    def forward(self, *args: Any, **keywords: Any) -> Any:
        return self._tape.record(self._index, self._count, args, keywords)


class Replay:
    """Runs a model's forward for what it hands to its layers; the same for every layer of a micro-batch, so it is kept.

    Args:
        shell: the model with recorders; its parameters hold no memory.
        embedding_width: of `inputs_embeds`.
        convolves: whether layers have a convolution over the tokens, which no mask keeps inside a document.
    """

    def __init__(
        self, shell: nn.Module, tape: Tape, embedding_width: int, dtype: torch.dtype, convolves: bool = False
    ) -> None:
        self.shell, self.tape = shell.eval(), tape
        self._convolves = convolves
        self._width, self._dtype = embedding_width, dtype
        self._kept: OrderedDict[tuple[Any, ...], tuple[Sequence[HandOver], Any]] = OrderedDict()

    def handed(self, hidden: Tensor, keywords: Mapping[str, Any]) -> Sequence[HandOver]:
        """Return the arguments of each layer for hidden states [batch, length, width] and a micro-batch's keyword arguments.

        Raises UsageError for rows of several documents between which the layers would attend.
        """
        given = {name: value for name, value in keywords.items() if value is not None}
        shape = hidden.shape[:2]
        versions = tuple(
            (name, id(value), getattr(value, "_version", 0) if not _is_inference(value) else 0)
            for name, value in sorted(given.items())
        )
        key = (shape, hidden.device, versions)
        if key not in self._kept:
            # the keyword arguments are kept with it, so that no other one can have their id meanwhile
            handed = self.run(tuple(shape), hidden.device, given)
            self._require_apart(handed, given)
            self._kept[key] = handed, given
            if len(self._kept) > _CACHED:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key][0]

    def _require_apart(self, handed: Sequence[HandOver], keywords: Mapping[str, Any]) -> None:
        positions, mask = keywords.get("position_ids"), keywords.get("attention_mask")
        if not isinstance(positions, Tensor) or positions.ndim != 2:
            return
        begins = positions[:, 1:] != positions[:, :-1] + 1
        if isinstance(mask, Tensor) and mask.shape == positions.shape:  # positions of padding say nothing
            begins &= (mask[:, 1:] != 0) & (mask[:, :-1] != 0)
        if begins.any() and (self._convolves or not all(each.keeps_apart(begins) for each in handed)):
            given = "" if mask is None else " where attention_mask is given"
            raise UsageError(
                f"position_ids say that rows hold several documents (a position is not the one before it plus 1), and the layers "
                f"of {type(self.shell).__name__} do not keep them apart{given}; nearest: rows of one document each"
            )

    def run(self, shape: tuple[int, ...], device: torch.device, keywords: Mapping[str, Any]) -> Sequence[HandOver]:
        """A run. Raises ConfigError where a layer is handed something that depends on weights or on hidden states."""
        count = len(self.recorders)
        self.tape.run(stop_at=count - 1)
        # What depends on weights or hidden states knows a gradient. The graph is dropped at once; hooks of its own keep what it
        # saves from those of a recomputed layer, whose two runs would differ, since only one of them finds nothing kept.
        with torch.enable_grad(), saved_tensors_hooks(_same, _same):
            embedded = torch.zeros(*shape, self._width, dtype=self._dtype, device=device, requires_grad=True) * 1
            try:
                self.shell(inputs_embeds=embedded, **keywords)
            except Stop:
                pass
            else:
                raise ConfigError(f"its forward called {len(self.tape.handed)} of {count} decoder layers")
        for index, handed in enumerate(self.tape.handed):
            for name, value in _named(handed):
                if isinstance(value, Tensor) and value.requires_grad:
                    raise ConfigError(
                        f"its forward passes decoder layer {index} {name}, which depends on weights or on hidden "
                        "states, and only "
                        "the hidden states of the layer before travel between stages"
                    )
                if isinstance(value, dict):
                    raise ConfigError(
                        f"its forward passes decoder layer {index} {name}, a dictionary in which layers pass values "
                        "to one another"
                    )
        return self.tape.handed

    @property
    def recorders(self) -> list[Recorder]:
        return [part for part in self.shell.modules() if isinstance(part, Recorder)]


def _same(value: Tensor) -> Tensor:
    return value


def _is_inference(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_inference()


def _named(handed: HandOver) -> Iterator[tuple[str, Any]]:
    """(words for it, value) of everything in a hand-over; a dictionary with values is looked through, an empty one is not."""
    waiting = [(f"argument {at + 2}", value) for at, value in enumerate(handed.args)]
    waiting += [(repr(name), value) for name, value in handed.keywords.items()]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, (tuple, list)):
            waiting += [(name, each) for each in value]
        elif isinstance(value, dict) and value:
            waiting += [(name, each) for each in value.values()]
        else:
            yield name, value
