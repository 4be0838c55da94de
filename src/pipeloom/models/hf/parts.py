"""The layers of a cut model: the part before its decoder layers, one of them, the part after them.

The arguments that a model's own forward passes to its decoder layers are recorded by running it with recorders in their places.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeloom.errors import ConfigError, UsageError, from_machine
from pipeloom.models.hf.context import SharedTokens, local_positions, sharing
from pipeloom.models.hf.past import PastTokens
from pipeloom.ops.block_attention import document_begins
from pipeloom.ops.checksum import version_of
from pipeloom.ops.deferred import DeferringLayer, apply_linear
from pipeloom.ops.layer import SharesTokens
from pipeloom.ops.saved_tensors import SavedTensor, saving
from pipeloom.ops.slices import SliceState
from pipeloom.parallel.context import ContextParallel


class Stubs:
    """Zeros of the parameters' shapes, one number in memory each, in the places of the parameters called `names`.

    They are plain attributes: no parameter or buffer of the module that anybody would train, save or move.

    Args:
        requires_grad: whether what is computed from them knows so.
    """

    def __init__(self, module: nn.Module, names: Sequence[str], requires_grad: bool = False) -> None:
        self._module, self._requires_grad = module, requires_grad
        self._like = {name: (module.get_parameter(name).shape, module.get_parameter(name).dtype) for name in names}
        self._sources: dict[str, Tensor] = {}
        self._device: torch.device | None = None
        self.place(torch.device("cpu"))
        if not names:
            return
        # A forward may ask the first parameter for a dtype (GPT, of its attention mask).
        first = torch.empty(0, dtype=self._like[names[0]][1])
        for part in module.modules():
            if next(part.parameters(), None) is None:
                part.__dict__["parameters"] = lambda recurse=True: iter([first] if recurse else ())

    def place(self, device: torch.device) -> None:
        """Have them on `device`."""
        if device == self._device:
            return
        self._device = device
        for name, (shape, dtype) in self._like.items():
            trains = self._requires_grad and dtype.is_floating_point
            self._sources[name] = torch.zeros((), dtype=dtype, device=device, requires_grad=trains)
            stub = self._sources[name].expand(shape)
            stub._is_hf_initialized = True  # type: ignore[attr-defined]  # so that transformers draws nothing into it
            set_tensor(self._module, name, stub)

    def used_by(self, result: Tensor) -> set[str]:
        """The names of those that `result` has been computed from."""
        names = {id(source): name for name, source in self._sources.items()}
        used: set[str] = set()
        seen: set[object] = set()
        waiting = [result.grad_fn]
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            variable = getattr(node, "variable", None)
            if id(variable) in names:
                used.add(names[id(variable)])
            waiting += [before for before, _ in node.next_functions]
        return used


def set_tensor(module: nn.Module, name: str, value: Tensor) -> None:
    """Put a plain tensor in the place of the parameter `name` of `module`, which no longer counts it as one."""
    path, _, leaf = name.rpartition(".")
    home = module.get_submodule(path)
    if hasattr(home, leaf):
        delattr(home, leaf)
    home.__dict__[leaf] = value


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
        self._last_version = 0
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
        elif hidden is not self._last or version_of(hidden) != self._last_version:
            raise Altered(f"its forward changes the hidden states between decoder layers {index - 1} and {index}")
        rest = {key: value for key, value in keywords.items() if key != name}
        self.handed.append(HandOver(args[1:], rest, name))
        if index == self._stop_at:
            raise Stop
        self._last = self._inject if self._inject is not None and index == count - 1 else hidden.detach()
        self._last_version = version_of(self._last)
        if self.extra is None:
            return self._last
        # What a layer returns besides hidden states must not reach the next one: `Replay` refuses what knows a gradient.
        further = None if self._inject is not None else hidden.new_zeros((), requires_grad=True)
        return self._last, *([further] * self.extra)


class Altered(ConfigError):
    """The hidden states of one layer did not reach the next one as they were."""


class Recorder(nn.Module):
    """Stands for decoder layer `index`; attributes that the forward of the model reads are those of `layer`."""

    def __init__(self, layer: nn.Module, index: int, count: int, tape: Tape) -> None:
        super().__init__()
        self._index, self._count, self._tape = index, count, tape
        # outside of torch's registry: the layer must not become a part of the model that is run
        self.__dict__["_layer"] = layer

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
        self._width, self.dtype = embedding_width, dtype
        self._kept: OrderedDict[tuple[Any, ...], tuple[Sequence[HandOver], Any]] = OrderedDict()
        self._positions: tuple[Any, Tensor | None, Tensor] | None = None

    def positions(self, tokens: SharedTokens, hidden: Tensor) -> Tensor:
        """Return the positions of the tokens at hand, the same object for all layers of a micro-batch."""
        start = 0 if tokens.state is None else tokens.state.place.start
        key = (id(tokens.position_ids), start, tokens.context, hidden.shape[:2], hidden.device)
        if self._positions is None or self._positions[0] != key:
            self._positions = key, tokens.position_ids, local_positions(tokens, hidden)
        return self._positions[2]

    def handed(self, hidden: Tensor, keywords: Mapping[str, Any], spread: bool = False) -> Sequence[HandOver]:
        """Return the arguments of each layer for hidden states [batch, length, width] and a micro-batch's keyword arguments.

        Args:
            spread: the attention itself keeps documents apart, and knows the positions of all ranks.

        Raises UsageError for rows of several documents between which the layers would attend.
        """
        given = {name: value for name, value in keywords.items() if value is not None}
        shape = hidden.shape[:2]
        versions = tuple(
            (name, id(value), version_of(value) if isinstance(value, Tensor) else getattr(value, "tokens", 0))
            for name, value in sorted(given.items())
        )
        key = (shape, hidden.device, versions)
        if key not in self._kept:
            # the keyword arguments are kept with it, so that no other one can have their id meanwhile
            handed = self.run(tuple(shape), hidden.device, given)
            if not spread:
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
        begins = document_begins(positions)[:, 1:]
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
        with torch.enable_grad(), saving(SavedTensor):
            embedded = torch.zeros(*shape, self._width, dtype=self.dtype, device=device, requires_grad=True) * 1
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


# What a family raises under settings that its configuration class has accepted, such as a dropout of 2^63. Errors of a device
# and of other processes are RuntimeErrors too.
_OF_SETTINGS = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, AssertionError, RuntimeError)
_OF_MACHINE = (torch.AcceleratorError, dist.DistError)


@contextmanager
def family_errors(name: str) -> Iterator[None]:
    """Turn an error of a family's code into a ConfigError, unless it is the machine's; `name` is that of the module called."""
    try:
        yield
    except _OF_SETTINGS as error:
        if isinstance(error, _OF_MACHINE) or from_machine(error) is not None:
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ConfigError(f"{name} of transformers fails with its configuration: {reason}") from error


class ModelPart(nn.Module):
    """A module whose parameters, buffers and parts are those of another one, under the same names.

    So a layer of the pipeline can call a module that it wraps, and its parameters keep the names they have in `transformers`.

    Attributes:
        past: keys and values of earlier tokens, while text is generated; None: rows are computed whole.
    """

    past: PastTokens | None = None
    _inner: Any

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        # Both modules share one set of tensors and submodules, so that a change of one is a change of the other. torch has no
        # public name for the dicts that hold them.
        self.__dict__.update(
            _inner=inner, _parameters=inner._parameters, _buffers=inner._buffers, _modules=inner._modules
        )
        self._non_persistent_buffers_set = inner._non_persistent_buffers_set

    def train(self, mode: bool = True) -> Any:
        self._inner.train(mode)
        return super().train(mode)

    def _given(self, model: Any, attention_mask: Tensor | None, position_ids: Tensor | None) -> dict[str, Any]:
        """Return the keyword arguments of the forward of `model`, the whole one with recorders."""
        named = {"attention_mask": attention_mask, "position_ids": position_ids}
        past = {} if self.past is None else self.past.given(self, model)
        return {name: value for name, value in named.items() if value is not None} | past


class FirstPart(ModelPart):
    """Everything before the decoder layers: token numbers [batch, length] -> hidden states [batch, length, hidden].

    Args:
        embedding: the name of an embedding of which it gets the tokens' rows [batch, length, width]; None: it gets the tokens.
    """

    _embedding: Any

    def __init__(self, shell: nn.Module, tape: Tape, stubs: Stubs, embedding: str | None = None) -> None:
        super().__init__(shell)
        self._tape, self._stubs = tape, stubs
        # outside of torch's registry: its parameters are those of another layer
        self.__dict__["_embedding"] = None if embedding is None else shell.get_submodule(embedding)

    def forward(
        self, tokens: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        self._stubs.place(tokens.device)
        self._tape.run(stop_at=0)
        try:
            with family_errors(type(self._inner).__name__):
                given = {"input_ids": tokens} if self._embedding is None else {"inputs_embeds": self._embedded(tokens)}
                self._inner(**given, **self._given(self._inner, attention_mask, position_ids))
        except Stop:
            return self._tape.entered
        raise AssertionError("the model's forward did not call its first decoder layer")

    def _embedded(self, rows: Tensor) -> Tensor:
        """Return what the embedding makes of tokens with these rows, which it may scale."""
        layer = self._embedding
        if type(layer) is nn.Embedding:
            return rows
        weight, layer.padding_idx = layer.__dict__["weight"], None
        set_tensor(layer, "weight", rows.flatten(0, -2))
        try:
            numbers = torch.arange(len(layer.weight), device=rows.device)
            embedded: Tensor = layer(numbers.view(rows.shape[:-1]))
        finally:
            set_tensor(layer, "weight", weight)
        return embedded


class TrunkLayer(SharesTokens, ModelPart):
    """One decoder layer: hidden states [batch, length, hidden] -> the same shape."""

    def __init__(
        self,
        layer: nn.Module,
        index: int,
        replay: Replay,
        context: ContextParallel | None = None,
        slices: bool = False,
    ) -> None:
        super().__init__(layer)
        self._index, self._replay, self.context = index, replay, context
        self._in_blocks = slices or context is not None

    def forward(
        self,
        hidden: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        slice_state: SliceState | None = None,
    ) -> Tensor:
        tokens, positions = None, position_ids
        if self._in_blocks:
            if attention_mask is not None:
                who = "slices take" if self.context is None else "context parallelism takes"
                raise UsageError(f"{who} no attention_mask; nearest: position_ids, or padding on the right")
            tokens = SharedTokens(self.context, position_ids, slice_state)
            positions = self._replay.positions(tokens, hidden)
        elif slice_state is not None or self.context is not None:
            wanted = "slices=True" if self.context is None else "context=ContextParallel(mesh.cp)"
            raise UsageError(
                f"its attention is over the tokens at hand alone; cut the model with hf.layers(…, {wanted})"
            )
        with family_errors(type(self._inner).__name__), sharing(tokens):
            given = self._given(self._replay.shell, attention_mask, positions)
            handed = self._replay.handed(hidden, given, spread=tokens is not None)
            return handed[self._index].call(self._inner, hidden)

    def keeps_past(self) -> bool:
        """Return whether the layer, called with a token, leaves what it keeps of it in a cache of `transformers`."""
        shell: Any = self._replay.shell
        width = shell.config.get_text_config().hidden_size
        token = torch.zeros(1, 1, width, dtype=self._replay.dtype, device=next(self.parameters()).device)
        self.past = past = PastTokens()
        past.begin(0)
        try:
            self(token)
        except Exception:  # of the family's own forward, of any type
            return False
        finally:
            self.past = None
        return not self._in_blocks and past.filled(self._index)


class LastPart(ModelPart):
    """Everything after the decoder layers: hidden states [batch, length, hidden] -> logits [batch, length, vocabulary]."""

    def __init__(self, shell: nn.Module, tape: Tape, stubs: Stubs, width: int, dtype: torch.dtype) -> None:
        super().__init__(shell)
        self._tape, self._stubs, self._width, self._dtype = tape, stubs, width, dtype

    def forward(
        self, hidden: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        self._stubs.place(hidden.device)
        self._tape.run(stop_at=-1, inject=hidden)
        embedded = torch.zeros(*hidden.shape[:2], self._width, dtype=self._dtype, device=hidden.device)
        with family_errors(type(self._inner).__name__):
            given = self._given(self._inner, attention_mask, position_ids)
            logits: Tensor = self._inner(inputs_embeds=embedded, **given).logits
        return logits


class TransposedLinear(DeferringLayer):
    """x [..., inputs] -> x weight + bias, with weight [inputs, outputs]; it has the parameters of the given layer."""

    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.register_parameter("weight", layer.get_parameter("weight"))
        self.register_parameter("bias", layer.get_parameter("bias"))

    def forward(self, x: Tensor) -> Tensor:
        return apply_linear(x, self.weight, self.bias, self.grad_context, transposed=True)


def is_conv1d(module: nn.Module) -> bool:
    """Return whether this is the `Conv1D` of `transformers`."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def with_separate_weight_gradients(module: nn.Module) -> None:
    """Replace every plain `Conv1D` inside `module` by a `TransposedLinear`."""
    for part in list(module.modules()):
        for name, child in part.named_children():
            if is_conv1d(child):
                setattr(part, name, TransposedLinear(child))
