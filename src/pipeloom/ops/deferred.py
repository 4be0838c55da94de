"""Linear layers whose weight gradient autograd does not compute: it waits for W, or is added to a main gradient.

I computes the input gradient now, W the weight's later (zero-bubble pipelines, arXiv 2401.10241, section 2: B and W). If the
schedule has I and W for a micro-batch (`Saving.splits`), or the stage runs in segments, `Stage.begin_forward` gives it a
`WeightGradQueue`; the layers' backwards put their work into it (`WeightGradContext.writes_now`), `compute.weight_grad` runs it.

What waits are the matrix weights of plain `nn.Linear`s and of modules with `set_weight_grad_context`: tensor-parallel and
expert linears, gates, LoRA factors, transformers' transposed linears. In I stay biases; weights that are hooked or computed from
others; subclasses of `nn.Linear` and instances with another forward; compiled modules; inputs that are subclasses of Tensor and
transforms of `torch.func`; backwards that a layer starts itself; and the parameters of all other layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from pipeloom.errors import UsageError
from pipeloom.ops.checksum import version_of
from pipeloom.ops.main_gradient import MainGradients
from pipeloom.ops.products import (
    addmm,
    adjoint,
    as_rows,
    linear,
    matmul,
    not_a_view,
    plain_operations_only,
    suits_onednn,
)

_FORWARD = nn.Linear.forward
_NO_TASK = -2  # autograd's graph task outside a backward is -1
# The number of the pass that runs the calling node. torch has no public name for it, and no other way to tell passes apart.
_current_task = torch._C._current_graph_task_id
# The function that torch.autograd.backward calls after its checks: an internal name, which a new torch may remove.
_engine: Any = getattr(torch.autograd.graph, "_engine_run_backward", None)


class Fetched(Protocol):
    """A tensor in transit: the result of an asynchronous collective."""

    def wait(self) -> Tensor: ...


class WeightGradQueue:
    """The weight gradients of one micro-batch that have not been computed yet."""

    def __init__(self) -> None:
        self._entries: list[tuple[Callable[..., None], Callable[[], Fetched] | None]] = []
        self._read: list[tuple[Tensor, int]] = []  # the tensors read, with their versions

    def put(
        self, work: Callable[..., None], fetch: Callable[[], Fetched] | None = None, *, reads: Sequence[Tensor] = ()
    ) -> None:
        """Queue `work()`, which adds a gradient to its weight's `.grad`; it runs in W.

        Args:
            fetch: starts the transfer of a tensor, with which `work` is then called. W starts it during earlier work.
            reads: tensors that `work` reads; they must not be changed in place until then.
        """
        self._entries.append((work, fetch))
        self._read += [(tensor, version_of(tensor)) for tensor in reads]

    @property
    def reads(self) -> tuple[Tensor, ...]:
        """The tensors that the work reads."""
        return tuple(tensor for tensor, _ in self._read)

    def flush(self) -> None:
        """Do all queued work and release its tensors, the latest first, since those are still in the cache.

        At most one fetch runs ahead. Raises UsageError if a tensor that the work reads has been changed meanwhile.
        """
        read, self._read = self._read, []
        if any(version_of(tensor) != version for tensor, version in read):
            raise UsageError(
                "the input of a linear layer, or the gradient of its output, was changed in place between its I and its W, by a "
                "hook on a gradient or by another micro-batch's forward: change a copy of it, or choose a schedule that does "
                "not split backwards"
            )
        del read
        entries, self._entries = self._entries, []
        fetches = iter([fetch for _, fetch in reversed(entries) if fetch is not None])

        def start() -> Fetched | None:
            fetch = next(fetches, None)
            return None if fetch is None else fetch()

        with torch.no_grad():
            coming = start()
            while entries:
                work, fetch = entries.pop()
                if fetch is None or coming is None:
                    work()
                    continue
                fetched, coming = coming, start()
                work(fetched.wait())


def add_weight_gradient(weight: nn.Parameter, x: Tensor, gradient: Tensor, main: MainGradients | None = None) -> None:
    """weight.grad += gradient^T conj(x), over all leading dimensions; in place where the types allow.

    Args:
        main: main gradients, to which the gradient is added instead if the weight has one.
    """
    rows, columns = as_rows(gradient), adjoint(as_rows(x))
    if main is not None and weight in main:
        main.add_product(weight, rows, columns)
    elif weight.grad is None:
        weight.grad = matmul(rows.t(), columns).to(weight.dtype)
    elif weight.grad.dtype == rows.dtype:
        addmm(weight.grad, rows.t(), columns)
    else:
        weight.grad += matmul(rows.t(), columns)


def as_autocast(x: Tensor) -> Tensor:
    """Return `x` in the dtype in which autocast would compute a product of it; `x` itself if autocast does not apply."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(kind))


class StageBackward:
    """The backward pass started by a stage itself, as opposed to passes started by layers.

    A layer may call `torch.autograd.grad` in its forward, in a recomputed forward or in the backward of its own function
    (gradient penalties, forces). Autograd numbers its passes (graph tasks), so a node can tell which pass runs it. Only
    nodes of the stage's own pass may write to a weight-gradient queue or a main gradient; in any other pass a weight
    gradient is an ordinary result, which that pass returns, adds up or differentiates.
    """

    def __init__(self) -> None:
        self._task: int | None = _NO_TASK  # None: started, and no node has run yet

    @property
    def running(self) -> bool:
        """Return whether the calling node is run by the stage's own pass."""
        return _current_task() == self._task

    def run(
        self, roots: Sequence[GradientEdge | Tensor], gradients: Sequence[Tensor | None], trusted: bool = False
    ) -> None:
        """Run a backward pass, as `run_backward` does, as the stage's own."""
        # A pass begins with one of its roots, on which no other node depends; the first root that runs records the number.
        nodes: list[Any] = [root.grad_fn if isinstance(root, Tensor) else root.node for root in roots]
        hooks = [node.register_prehook(self._enter) for node in nodes]
        self._task = None
        try:
            run_backward(roots, gradients, trusted)
        finally:
            self._task = _NO_TASK
            for hook in hooks:
                hook.remove()

    def _enter(self, _: Any) -> None:
        if self._task is None:
            self._task = _current_task()


@dataclass(eq=False)
class WeightGradContext:
    """The weight-gradient queue that a stage's linear layers write to at the moment.

    Attributes:
        queue: the queue for weight gradients; None: layers compute them in the backward.
        main: main gradients to which weight gradients are added; None: to `.grad`.
        in_place: whether a layer adds its weight gradient itself also without a queue: a single product that accumulates
            replaces a product with its own memory and a sum.
        stage_backward: the pass in which layers do so; in any other, autograd gets the weight gradients. None: in every pass,
            for layers without a stage whose caller starts no other pass.
    """

    stage_backward: StageBackward | None = None
    main: MainGradients | None = None
    in_place: bool = False
    queue: WeightGradQueue | None = None

    @property
    def writes(self) -> bool:
        """Return whether layers whose forward runs now may write their weight gradients themselves."""
        return self.in_place or self.queue is not None or self.main is not None

    def writes_now(self, weight: Tensor, queue: WeightGradQueue | None) -> bool:
        """Return whether a layer's node, run now, writes the gradient of `weight` itself instead of returning it to autograd.

        Only in the stage's own pass, and only if no hook waits for autograd to accumulate the weight's gradient.

        Args:
            queue: the queue at the time of the layer's forward.
        """
        # Hooks expect what autograd accumulates, at the time that it does. torch has no public way to see a tensor's hooks.
        if weight._backward_hooks:
            return False
        if self.stage_backward is not None and not self.stage_backward.running:
            return False
        main = self.main if self.main is not None and weight in self.main else None  # has a hook of this kind itself
        if weight._post_accumulate_grad_hooks and (main is None or main.watched(weight)):
            return False
        return queue is not None or main is not None or self.in_place


class _Linear(torch.autograd.Function):
    """A linear layer that writes its weight gradient without autograd if the context allows: to a queue, or at once to its sum.

    Its backward can be differentiated: it saves its inputs, and autograd records the products. Without a context it only
    computes products, which may be oneDNN's.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        grad_context: WeightGradContext | None,
        transposed: bool = False,
    ) -> Tensor:
        ctx.set_materialize_grads(False)  # an output that has no gradient gives the weight none, not zeros
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.transposed = weight, transposed
        ctx.grad_context, ctx.queue = grad_context, None if grad_context is None else grad_context.queue
        return not_a_view(linear(x, weight.t() if transposed else weight, bias))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        if gradient is None:
            return (None,) * 5
        x, weight = ctx.saved_tensors
        weight = weight.t() if ctx.transposed else weight
        dx = matmul(gradient, adjoint(weight.to(gradient.dtype))) if ctx.needs_input_grad[0] else None
        db = as_rows(gradient).sum(0) if ctx.needs_input_grad[2] else None
        dw = None
        columns, rows = (gradient, x) if ctx.transposed else (x, gradient)
        if ctx.grad_context is None or not ctx.grad_context.writes_now(ctx.weight, ctx.queue):
            dw = matmul(as_rows(rows).t(), adjoint(as_rows(columns)))
        elif ctx.queue is not None:
            # tensors of the same versions, without the graph
            columns, rows = columns.detach(), rows.detach()
            work = partial(add_weight_gradient, ctx.weight, columns, rows, ctx.grad_context.main)
            ctx.queue.put(work, reads=(columns, rows))
        else:
            add_weight_gradient(ctx.weight, columns, rows, ctx.grad_context.main)
        return dx, dw, db, None, None


@runtime_checkable
class DefersWeightGrads(Protocol):
    """A layer that can defer its weight gradients: it reads `grad_context.queue` in its forward (None: it must not defer)."""

    def set_weight_grad_context(self, grad_context: WeightGradContext) -> None: ...


class DeferringLayer(nn.Module):
    """A layer of ours whose forward passes `grad_context` to `apply_linear` or another operation that follows it."""

    grad_context: WeightGradContext | None = None

    def set_weight_grad_context(self, grad_context: WeightGradContext) -> None:
        self.grad_context = grad_context


def defer_weight_gradients(module: nn.Module, grad_context: WeightGradContext) -> None:
    """Make the plain linear layers inside `module`, and those that are `DefersWeightGrads`, follow the context.

    A subclass of `nn.Linear`, an instance with another forward, and all instances where someone has replaced the forward of the
    class keep their forward, and their weight gradients stay in I. So does that of a weight with a hook (`register_hook`,
    `register_post_accumulate_grad_hook`). A module that is compiled (`nn.Module.compile`) computes all of its weight gradients in
    I: a compiled graph returns them, and writes to no queue.
    """
    if getattr(module, "_compiled_call_impl", None) is not None:  # torch has no public name for it
        return
    for part in module.modules():
        if isinstance(part, DefersWeightGrads):
            part.set_weight_grad_context(grad_context)
        elif type(part) is nn.Linear and nn.Linear.forward is _FORWARD:
            forward = part.__dict__.get("forward")
            is_ours = isinstance(forward, partial) and forward.func is _forward
            if forward is None or is_ours:
                part.forward = partial(_forward, part, grad_context)  # type: ignore[method-assign]


def _forward(layer: nn.Linear, grad_context: WeightGradContext, /, input: Tensor) -> Tensor:
    """As `nn.Linear.forward`, whose argument has this name."""
    return apply_linear(input, layer.weight, layer.bias, grad_context)


def apply_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    grad_context: WeightGradContext | None,
    transposed: bool = False,
) -> Tensor:
    """Return x weight^T + bias (`transposed`: x weight + bias), with the weight gradient handled as the context says, or by
    autograd without a context.

    A weight that is computed from others (pruned, normed), or replaced by a transform of `torch.func`, gets its gradient from
    autograd too.
    """
    # Whether the optimizer trains this very weight, and autograd records its uses.
    trained = type(weight) is nn.Parameter and weight.requires_grad and torch.is_grad_enabled()
    writes = grad_context is not None and grad_context.writes and trained and type(x) in (Tensor, nn.Parameter)
    if writes and not plain_operations_only():
        return _Linear.apply(as_autocast(x), weight, bias, grad_context, transposed)  # type: ignore[no-any-return, no-untyped-call]
    weight = weight.t() if transposed else weight
    if torch.is_grad_enabled() and suits_onednn(x, weight, bias):
        return _Linear.apply(x, weight, bias, None)  # type: ignore[no-any-return, no-untyped-call]
    return linear(x, weight, bias)


def run_backward(
    roots: Sequence[GradientEdge | Tensor], gradients: Sequence[Tensor | None], trusted: bool = False
) -> None:
    """Do what `torch.autograd.backward(roots, gradients)` does.

    torch's argument checks take a quarter of the time of a pass through few layers. A stage whose gradients come from the next
    stage can skip them: each is the gradient of a leaf made from the output, so it has the output's shape and dtype.

    Args:
        roots: outputs as their places in the graph, and losses (0-dim).
        gradients: one for each root.
        trusted: whether the gradients are certain to have the shapes and dtypes of the outputs.
    """
    if not trusted or _engine is None:
        torch.autograd.backward(roots, gradients)  # type: ignore[arg-type]
        return
    _engine(tuple(roots), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True)
