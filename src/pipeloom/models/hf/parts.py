"""The layers of a cut model: the part before its decoder layers, one of them, the part after them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeloom.errors import ConfigError, from_machine
from pipeloom.models.hf.recorders import Replay, Stop, Tape

if TYPE_CHECKING:
    from pipeloom.models.hf.stubs import Stubs

# What a family raises under settings that its configuration class has accepted, such as a dropout of 2^63. Errors of a device
# and of other processes are RuntimeErrors too.
_OF_SETTINGS = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, AssertionError, RuntimeError)
_OF_MACHINE = (torch.AcceleratorError, dist.DistError)


class FamilyErrors:
    """A context for calls of a family's code, in which an error that is not the machine's becomes a ConfigError.

    Args:
        name: of the module that is called.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: object) -> None:
        if isinstance(error, _OF_SETTINGS) and not isinstance(error, _OF_MACHINE) and from_machine(error) is None:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise ConfigError(f"{self._name} of transformers fails with its configuration: {reason}") from error


class _View(nn.Module):
    """A module whose parameters, buffers and parts are those of another one, under the same names.

    So a layer of the pipeline can call a module that it wraps, and its parameters keep the names they have in `transformers`.
    """

    _inner: Any
    _errors: FamilyErrors

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.__dict__.update(
            _inner=inner, _parameters=inner._parameters, _buffers=inner._buffers, _modules=inner._modules
        )
        self.__dict__["_non_persistent_buffers_set"] = inner._non_persistent_buffers_set
        self.__dict__["_errors"] = FamilyErrors(type(inner).__name__)

    def train(self, mode: bool = True) -> Any:
        self._inner.train(mode)
        return super().train(mode)


class FirstPart(_View):
    """Everything before the decoder layers: token numbers [batch, length] -> hidden states [batch, length, hidden]."""

    _tape: Tape
    _stubs: Stubs

    def __init__(self, shell: nn.Module, tape: Tape, stubs: Stubs) -> None:
        super().__init__(shell)
        self.__dict__.update(_tape=tape, _stubs=stubs)

    def forward(
        self, tokens: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        self._stubs.place(tokens.device)
        self._tape.run(stop_at=0)
        try:
            with self._errors:
                self._inner(tokens, **_given(attention_mask, position_ids))
        except Stop:
            return self._tape.entered
        raise AssertionError("the model's forward did not call its first decoder layer")


class TrunkLayer(_View):
    """One decoder layer: hidden states [batch, length, hidden] -> the same shape."""

    _index: int
    _replay: Replay

    def __init__(self, layer: nn.Module, index: int, replay: Replay) -> None:
        super().__init__(layer)
        self.__dict__.update(_index=index, _replay=replay)

    def forward(
        self, hidden: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        with self._errors:
            handed = self._replay.handed(hidden, _given(attention_mask, position_ids))
            return handed[self._index].call(self._inner, hidden)


class LastPart(_View):
    """Everything after the decoder layers: hidden states [batch, length, hidden] -> logits [batch, length, vocabulary]."""

    _tape: Tape
    _stubs: Stubs
    _width: int
    _dtype: torch.dtype

    def __init__(self, shell: nn.Module, tape: Tape, stubs: Stubs, width: int, dtype: torch.dtype) -> None:
        super().__init__(shell)
        self.__dict__.update(_tape=tape, _stubs=stubs, _width=width, _dtype=dtype)

    def forward(
        self, hidden: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        self._stubs.place(hidden.device)
        self._tape.run(stop_at=-1, inject=hidden)
        embedded = torch.zeros(*hidden.shape[:2], self._width, dtype=self._dtype, device=hidden.device)
        with self._errors:
            logits: Tensor = self._inner(inputs_embeds=embedded, **_given(attention_mask, position_ids)).logits
        return logits


def _given(attention_mask: Tensor | None, position_ids: Tensor | None) -> dict[str, Tensor]:
    named = {"attention_mask": attention_mask, "position_ids": position_ids}
    return {name: value for name, value in named.items() if value is not None}
