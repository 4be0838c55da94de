"""Main gradients: buffers outside `.grad`, in fp32 for bf16 parameters, that every micro-batch's gradient is added to in place.

A linear layer's weight gradient is one matrix product that adds into the buffer. All other gradients go there when autograd
has accumulated them, and leave `.grad` None.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from pipeloom.ops.products import addmm


class MainGradients:
    """Parameter -> the buffer of its shape that its gradient is added to.

    After `reset`, the first gradient overwrites a buffer and later ones are added, so it need not be filled with zeros.
    Call the methods that add only where autograd does not record: in a backward, or under `no_grad`.

    Attributes:
        accepting: False outside a step: what autograd computes then stays in `.grad`.
        absent: parameters whose buffer has had no gradient since its `reset`.
    """

    def __init__(self) -> None:
        self.accepting = True
        self._buffer_of: dict[nn.Parameter, Tensor] = {}
        self._empty: set[nn.Parameter] = set()
        self.absent: set[nn.Parameter] = set()
        self._hooked: set[nn.Parameter] = set()

    def __contains__(self, parameter: Tensor) -> bool:
        """Return whether gradients of `parameter` go to a buffer now."""
        return self.accepting and parameter in self._buffer_of

    def attach(self, parameter: nn.Parameter, buffer: Tensor) -> None:
        """Direct gradients of `parameter` to `buffer` from now on, and leave its values as they are."""
        self._buffer_of[parameter] = buffer
        self._empty.discard(parameter)
        if parameter not in self._hooked and parameter.requires_grad:
            self._hooked.add(parameter)
            parameter.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]

    def of(self, parameter: nn.Parameter) -> Tensor:
        """The buffer; what it holds is undefined between `reset` and the first gradient or `finalize`."""
        return self._buffer_of[parameter]

    def reset(self, parameters: Iterable[nn.Parameter]) -> None:
        """Discard the values of the buffers of these parameters."""
        parameters = tuple(parameters)
        self._empty.update(parameters)
        self.absent.update(parameters)

    @torch.no_grad()
    def finalize(self, parameters: Iterable[nn.Parameter]) -> None:
        """Move what is in `.grad` to the buffers, and write zeros where no gradient has arrived."""
        for parameter in parameters:
            if parameter.grad is not None:
                self.collect(parameter)
            if parameter in self._empty:
                self._buffer_of[parameter].zero_()
                self._empty.discard(parameter)

    def watched(self, parameter: Tensor) -> bool:
        """Return whether a hook other than this object's own runs when the parameter's gradient is accumulated.

        Its gradients then add up in `.grad` until `finalize`, so that the hook sees them as it does in one process.
        """
        # torch has no public way to see a tensor's hooks.
        return len(parameter._post_accumulate_grad_hooks or ()) > (parameter in self._hooked)

    def _arrived(self, parameter: Tensor) -> None:
        if self.accepting and not self.watched(parameter):
            self.collect(parameter)

    def collect(self, parameter: Tensor) -> None:
        """Move `.grad` to the buffer."""
        assert isinstance(parameter, nn.Parameter)
        if parameter.grad is not None:
            self.add(parameter, parameter.grad)
            parameter.grad = None

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """buffer += gradient, of any floating dtype."""
        buffer, first = self._next(parameter)
        if first:
            buffer.copy_(gradient)
        else:
            buffer.add_(gradient)

    def add_product(self, weight: nn.Parameter, rows: Tensor, columns: Tensor) -> None:
        """buffer += rows^T columns, [n, out]^T [n, in], with products and sums in the buffer's dtype."""
        buffer, first = self._next(weight)
        _add_product(buffer, rows, columns, first)

    @torch.no_grad()
    def add_products(self, weight: nn.Parameter, rows: Tensor, columns: Tensor, counts: Sequence[int]) -> None:
        """As `add_product` for a stack of matrices [groups, out, in], each with its own run of `counts` rows."""
        buffer, first = self._next(weight)
        pieces = zip(buffer, torch.split(rows, list(counts)), torch.split(columns, list(counts)), strict=True)
        for part, rows_here, columns_here in pieces:
            if len(rows_here):
                _add_product(part, rows_here, columns_here, first)
            elif first:
                part.zero_()

    def _next(self, parameter: nn.Parameter) -> tuple[Tensor, bool]:
        """Return the buffer for a gradient that arrives now, and whether it is the first since `reset`, which overwrites it."""
        first = parameter in self._empty
        self._empty.discard(parameter)
        self.absent.discard(parameter)
        return self._buffer_of[parameter], first


def _add_product(buffer: Tensor, rows: Tensor, columns: Tensor, first: bool) -> None:
    """buffer += rows^T columns; with `first` the buffer is overwritten instead."""
    if buffer.is_cuda and buffer.dtype == torch.float32 and rows.dtype == columns.dtype != torch.float32:
        # half-precision factors, fp32 sum: one GEMM that adds where it writes
        if first:
            torch.mm(rows.t(), columns, out_dtype=torch.float32, out=buffer)
        else:
            torch.addmm(buffer, rows.t(), columns, out_dtype=torch.float32, out=buffer)
    else:  # where the types differ: a CPU has no such product; conversion is exact, and small beside it
        addmm(buffer, rows.to(buffer.dtype).t(), columns.to(buffer.dtype), first)
