"""Matrix products of linear layers: PyTorch's own, or after `use_onednn_linear()` oneDNN's where those take half the time.

PyTorch multiplies fp32 matrices on x86 with MKL, which leaves AVX-512 unused on AMD's processors; oneDNN, a part of PyTorch
too, uses it. The choice depends on the machine and the shapes alone, so that runs repeat bit by bit.
`torch.backends.mkldnn.enabled = False` leaves all to PyTorch.
"""

from __future__ import annotations

from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F

_LEAST_WORK = 2**20  # multiplications; below this size oneDNN's call overhead of about 10 microseconds is not recovered
_TYPES = (Tensor, nn.Parameter)
_CPU_FACTS = Path("/proc/cpuinfo")  # of Linux
_use_onednn = False  # of this process, as PyTorch's own switches of its backends are


def use_onednn_linear(use: bool = True) -> bool:
    """Multiply through oneDNN in linear layers of this process, or (`use=False`) no longer; off until it is called.

    Call it before pipelines are constructed, and on every rank alike: results differ from PyTorch's in the last bits.

    Returns: whether oneDNN is used; never on a machine where PyTorch's own products are as fast (`machine_prefers_onednn`).
    """
    global _use_onednn
    _use_onednn = use and machine_prefers_onednn()
    return _use_onednn


def uses_onednn() -> bool:
    """Return whether `use_onednn_linear` has taken effect in this process."""
    return _use_onednn


def adjoint(factor: Tensor) -> Tensor:
    """The complex conjugate of a real or complex factor, as gradients of a product need it."""
    return factor.conj() if factor.is_complex() else factor


def plain_operations_only() -> bool:
    """Return whether a linear layer must call PyTorch's own operation: a compiler or a transform (`torch.func`, forward-mode AD)
    supports no other.
    """
    # PyTorch has no public names for whether a transform is active.
    transformed = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    return torch.compiler.is_compiling() or transformed


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weight^T + bias: [..., inputs], [outputs, inputs] and [outputs] -> [..., outputs]."""
    if torch.is_grad_enabled() or not suits_onednn(x, weight, bias):
        return F.linear(x, weight, bias)
    return _by_onednn(x, weight, bias)


def suits_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether `linear` goes through oneDNN, which autograd does not differentiate."""
    return _suits(x, weight, weight.shape[0]) and (bias is None or bias.dtype == x.dtype)


def not_a_view(out: Tensor) -> Tensor:
    """Return `out` over the same storage, not as the view that PyTorch makes of the rows of a product of several dimensions.

    A custom Function that returns a view forbids its caller to change it in place, as in `relu_(linear(x))`.
    """
    return out if out.dim() == 2 else out.new_empty(0).set_(out)  # type: ignore[call-overload]


def as_rows(x: Tensor) -> Tensor:
    """[..., n] -> [rows, n]."""
    return x.reshape(prod(x.shape[:-1]), x.shape[-1])  # torch infers no size where n is 0


def matmul(x: Tensor, y: Tensor) -> Tensor:
    """x y: [..., k] and [k, n] -> [..., n]."""
    if torch.is_grad_enabled() or not _suits(x, y, y.shape[1]):
        return x @ y
    return _by_onednn(x, y.t())


def addmm(total: Tensor, x: Tensor, y: Tensor, first: bool = False) -> None:
    """total += x y, [m, k] and [k, n], all of one dtype; `first`: total = x y, whatever it held."""
    if not torch.is_grad_enabled() and _suits(x, y, y.shape[1]):
        product = _by_onednn(x, y.t())
        if first:
            total.copy_(product)
        else:
            total.add_(product)
    elif first:
        torch.mm(x, y, out=total)
    else:
        total.addmm_(x, y)


@cache
def machine_prefers_onednn() -> bool:
    """Return whether this is an AMD processor with AVX-512, and PyTorch has both libraries."""
    return (
        torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
        and onednn_operation() is not None
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and _CPU_FACTS.exists()
        and "AuthenticAMD" in _CPU_FACTS.read_text()
    )


def _suits(x: Tensor, y: Tensor, columns: int) -> bool:
    """Return whether oneDNN takes x y or x y^T, of so many columns, and less time for it."""
    return (
        _use_onednn
        and not torch.compiler.is_compiling()
        and x.dtype == y.dtype == torch.float32
        and x.device.type == y.device.type == "cpu"
        and type(x) in _TYPES
        and type(y) in _TYPES
        and x.dim() > 1
        and prod(x.shape) * columns >= _LEAST_WORK
        and bool(torch.backends.mkldnn.enabled)
        and not torch.is_autocast_enabled("cpu")
        and not plain_operations_only()
    )


def _by_onednn(x: Tensor, y: Tensor, bias: Tensor | None = None) -> Tensor:
    """x y^T + bias; autograd records nothing."""
    product: Tensor = onednn_operation()(x, y, bias, "none", [], "")
    return product


@cache
def onednn_operation() -> Any:
    """Return oneDNN's linear operation, which PyTorch's compiler calls; it has no public name. None where PyTorch has none."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None)
