"""`pl.verify`: a model under a schedule against the same layers called one after the other in one process.

The stage contract (docs/own_model.md) says what a layer may do. The runtime does not inspect whether layers keep it; this
comparison shows it, whatever the reason.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from pipeloom.errors import UsageError, VerifyError
from pipeloom.limits import require_positive, require_types, require_whole
from pipeloom.ops.layer import Layer
from pipeloom.ops.nested import mapped, tensors_in
from pipeloom.ops.random_state import seed_random, seeded, stable_seed
from pipeloom.runtime.batch import (
    IGNORE_INDEX,
    Microbatches,
    SequenceSlices,
    Weighing,
    Weight,
    as_inputs,
    batch_rows,
    chosen_sizes,
    join,
    require_targets,
    split_batch,
)
from pipeloom.runtime.loss import Loss
from pipeloom.runtime.options import RuntimeOptions
from pipeloom.runtime.pipeline import LocalPipeline, call_before_layers, layers_of_ranks
from pipeloom.runtime.stage_modules import LayerSource, build_stage, layer_name, require_arguments
from pipeloom.runtime.tied_weights import Tie, layer_of, share, values_by_name
from pipeloom.schedule.actions import Action, kind_of, unit_words
from pipeloom.schedule.model import Schedule, actions_of

# Of the optimizer's steps, along gradients of norm 1: large enough for a wrong step to show in the next loss.
_RATE = 0.01
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}  # of rounding; what breaks the contract differs by more
_COARSE = 0.05  # of dtypes of 16 bits and less
_OF_LOSS = 1e-6  # at least: a pipeline returns its loss in fp32
_OF_LARGEST = 1e-3  # of the largest gradient; a smaller one (of a bias before a norm, say) may be nothing but rounding

Rule = Literal["results", "slices", "backwards", "parameters", "buffers", "recomputation", "evaluation"]
_RULES: dict[Rule, str] = {
    "results": "a layer's result depends only on its inputs, parameters, buffers, keyword arguments and random numbers",
    "slices": "where sequences are cut, a token sees the earlier slices of its sequence through `slice_state` alone",
    "backwards": "a backward reads and writes only what belongs to its own micro-batch",
    "parameters": "every parameter belongs to the layer that uses it, or is named in `tied`",
    "buffers": "a buffer changes alike in every order of micro-batches that the schedule has",
    "recomputation": "a second forward from the same inputs, buffers and random numbers has the same result",
    "evaluation": "evaluation depends only on inputs, parameters and buffers",
}


@dataclass
class Verified:
    """Largest differences between the steps of a pipeline and those of one process, all within the tolerance.

    Attributes:
        steps: number of steps compared, with and without recomputation.
        loss_error: |a - b| / |b| of the losses, b that of one process.
        unseen: kinds of actions of the schedule that did nothing in one process: gathers and sums over replicas.
        errors: global parameter name -> max |a - b| / max |b| of its gradients, b at least 1e-3 of the largest one of the model.
    """

    steps: int = 0
    loss_error: float = 0.0
    errors: dict[str, float] = field(default_factory=dict)
    unseen: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """True: a difference raises VerifyError instead."""
        return True

    def __str__(self) -> str:
        worst = max(self.errors.values(), default=0.0)
        unseen = f"; not looked at, as one process has no replicas: {', '.join(self.unseen)}" if self.unseen else ""
        return f"{self.steps} steps equal one process: loss to {self.loss_error:.1e}, gradients to {worst:.1e}{unseen}"


def verify(
    layers: Sequence[LayerSource],
    schedule: Schedule,
    inputs: Any,
    targets: Any,
    *,
    loss: Loss,
    steps: int = 3,
    tied: Sequence[Sequence[str]] = (),
    weight: Weight | None = None,
    ignore_index: int | None = IGNORE_INDEX,
    stages: Sequence[int] | None = None,
    tolerance: float | None = None,
    options: RuntimeOptions = RuntimeOptions(),
    **keywords: Any,
) -> Verified:
    """Train the whole model under the schedule in this process, and the same layers in plain torch, and compare the two.

    Each step's loss, outputs of layers, gradients (None included) and buffers are compared, then the optimizer changes the
    weights, and the next step gets the same rows in other micro-batches; finally evaluation and predictions. This runs once as
    is, and once with every layer recomputed. The layers given are not changed: modules are copied (copies lose
    hooks of parameters, which factories can register), factories called anew.
    Layers draw the same random numbers on both sides.

    >>> from pipeloom import schedules
    >>> layers = [torch.nn.Linear(4, 4) for _ in range(2)]
    >>> batch = torch.rand(8, 4)
    >>> report = verify(layers, schedules.one_f_one_b(2, 4), batch, batch, loss=torch.nn.functional.mse_loss)
    >>> report.steps, max(report.errors.values()) < 1e-4
    (6, True)

    Args:
        layers, schedule, loss, tied, weight, ignore_index, stages, options: as of `Pipeline`.
        inputs, targets, keywords: a batch, as of `Pipeline.step`; its rows should differ.
        steps: number of optimizer steps of each run.
        tolerance: the largest relative difference that counts as rounding. Default: 1e-9 for fp64, 1e-4 for fp32, 0.05 for
            narrower types, by the narrowest type of a parameter.

    Returns:
        the largest differences.

    Raises:
        VerifyError: the first difference: its stage, layer and parameter, how large it is, and the rule of the stage contract.
        UsageError: layers that cannot be copied; and what a pipeline refuses.
    """
    require_arguments(layers, schedule, loss)
    require_targets("verify", targets)
    require_types(verify, {"tolerance": tolerance, "options": options})
    require_whole("steps", steps)
    if tolerance:  # 0: bit for bit
        require_positive("tolerance", tolerance)
    kinds = {action.kind for action in actions_of(schedule)}
    report = Verified(unseen=tuple(sorted(kind for kind in kinds if kind_of(kind).of_stage)))
    weighing = Weighing(weight, ignore_index, shared_targets=options.shared_targets)
    batch = _Batch(inputs, targets, keywords, weighing, options.microbatch_sizes)
    with seeded(0):
        for recompute in ("none", "full"):
            models = _copied(layers), _copied(layers)
            run = replace(options, recompute=recompute)
            sides = _Sides(*models, schedule, loss, run, batch, tied=tied, stages=stages, tolerance=tolerance)
            with _without_gradients([each for each in (*layers, loss) if isinstance(each, nn.Module)]) as changed:
                for step in range(steps):
                    sides.compare_step(step, report)
                    report.steps += 1
                sides.compare_evaluation(steps)
                if changed():
                    what = "the loss, or a layer, uses parameters of the modules that were given, not of their copies"
                    raise _breach(what, "parameters")
    return report


def _breach(what: str, rule: Rule) -> VerifyError:
    return VerifyError(f"{what}; the stage contract (docs/own_model.md, {rule!r}): {_RULES[rule]}")


@contextlib.contextmanager
def _without_gradients(modules: Sequence[nn.Module]) -> Iterator[Callable[[], bool]]:
    """Take away the gradients of modules of which copies run, and put them back; yield whether they have others meanwhile."""
    before = [(parameter, parameter.grad) for module in modules for parameter in module.parameters()]
    for parameter, _ in before:
        parameter.grad = None
    try:
        yield lambda: any(parameter.grad is not None for parameter, _ in before)
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient


class _Call(NamedTuple):
    """A layer's forward of one micro-batch of one step, or of a slice of one."""

    step: int
    microbatch: int
    layer: str
    slice: int = 0


OutputSums = tuple[complex, float]
"""Sums of a layer's outputs, weighted by place, and of their magnitudes: enough to see a difference."""


class _Outputs:
    """OutputSums of the outputs of each call of a layer, which gets random numbers that depend on the call alone.

    Args:
        slices: into which the outputs are cut, to be compared with calls for slices; None: they are compared whole.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]], slices: SequenceSlices | None = None) -> None:
        self._slices = slices
        self.sums: dict[_Call, OutputSums] = {}
        self._call: _Call | None = None
        for name, module in modules:
            if not isinstance(module, torch.jit.ScriptModule):  # which takes no hooks
                module.register_forward_hook(partial(self._after, name))

    def before(self, call: _Call) -> None:
        """Prepare for a call: seed the generators of torch, Python and NumPy."""
        self._call = call
        seed = stable_seed(*call)
        if torch.accelerator.is_available():
            torch.manual_seed(seed)
        else:  # `torch.manual_seed` would keep a stack trace per call for a CUDA device that is never used
            torch.default_generator.manual_seed(seed)
        seed_random(seed)

    def _after(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._call is None or self._call.layer != name or self._call in self.sums:
            return
        if self._slices is None:
            self.sums[self._call] = _sums(list(_strided(output)))
            return
        parts = [self._slices.cut(value, len(value) if value.ndim else 0) for value in _strided(output)]
        for at in range(len(self._slices.places)):
            self.sums[self._call._replace(slice=at)] = _sums([part[at] for part in parts])


@torch.no_grad()
def _sums(tensors: Sequence[Tensor]) -> OutputSums:
    values = [_wide(tensor).flatten() for tensor in tensors]
    weighted = [(v * torch.arange(len(v), device=v.device).cos()).sum().item() for v in values]
    return complex(sum(weighted)), sum(v.abs().sum().item() for v in values)


@dataclass
class _Batch:
    """The rows of a batch, which each step cuts into other micro-batches."""

    inputs: Any
    targets: Any
    keywords: Mapping[str, Any]
    weighing: Weighing
    sizes: Sequence[int] | None

    def of(self, step: int) -> tuple[Any, Any, dict[str, Any]]:
        """Return the inputs, targets and keyword arguments of a step: the rows in turn, each step beginning one row later."""
        rows = batch_rows(as_inputs(self.inputs))
        inputs, targets, keywords = _rolled((self.inputs, self.targets, self.keywords), rows, step)
        return inputs, targets, keywords

    def parts(self, step: int, count: int) -> Microbatches:
        inputs, targets, keywords = self.of(step)
        sizes = chosen_sizes(inputs, count, self.sizes)
        return split_batch(inputs, targets, keywords, sizes, replace(self.weighing, step=step))


class _Sides:
    """A model twice: as a pipeline, and as layers that are called one after the other."""

    def __init__(
        self,
        layers: Sequence[LayerSource],
        plain: Sequence[LayerSource],
        schedule: Schedule,
        loss: Loss,
        options: RuntimeOptions,
        batch: _Batch,
        *,
        tied: Sequence[Sequence[str]],
        stages: Sequence[int] | None,
        tolerance: float | None,
    ) -> None:
        names = [layer_name(layer, at) for at, layer in enumerate(layers)]
        weighing = batch.weighing
        self.pipeline = LocalPipeline(
            layers,
            schedule,
            loss=loss,
            tied=tied,
            weight=weighing.weight,
            ignore_index=weighing.ignore_index,
            stages=stages,
            options=options,
            separate_replicas=True,
        )
        self.batch, self.loss = batch, loss
        self.recomputes = options.recompute != "none"
        seed = torch.initial_seed() if options.seed is None else options.seed
        memo: dict[int, Any] = {}
        sources = [_apart(layer, name, memo) for layer, name in zip(plain, names, strict=True)]
        self.plain = build_stage(sources, range(len(sources)), self.pipeline.device, {}, "none", seed, lambda *_: None)
        self.modules = dict(zip(names, self.plain.modules, strict=True))
        for names_of_one in tied:
            share(Tie(tuple(names_of_one), ()), self.modules)
        self.parameters = values_by_name(self.modules)
        self.stage_of = {name: at for at, which in enumerate(self.pipeline.layer_names) for name in which}
        state = {**self.parameters, **values_by_name(self.modules, "named_buffers")}
        with torch.no_grad():
            for name, value in self.pipeline.state_dict().items():
                state[name].copy_(value)
        dtypes = [p.dtype for p in self.parameters.values() if p.is_floating_point()]
        widest = max((_TOLERANCE.get(dtype, _COARSE) for dtype in dtypes), default=_TOLERANCE[torch.float32])
        self.tolerance = widest if tolerance is None else tolerance
        slices = SequenceSlices.of(batch.inputs, schedule.slices, options.slice_tokens)
        self.expected = _Outputs(self.modules.items(), slices)
        self.actual = _Outputs(layers_of_ranks(self.pipeline))
        call_before_layers(self.pipeline, self._before)

    def _before(self, layer: str, action: Action) -> None:
        self.actual.before(_Call(self._step, action.microbatch, layer, action.slice or 0))

    # -- the two runs ----------------------------------------------------------------------------------------------------

    def compare_step(self, step: int, report: Verified) -> None:
        """Run a step on both sides, compare it, and let an optimizer change the weights of both."""
        self._step = step
        inputs, targets, keywords = self.batch.of(step)
        for parameter in self.parameters.values():
            parameter.grad = None
        expected = self._serial_step()
        self.pipeline.zero_grad()
        actual = self.pipeline.step(inputs, targets, **keywords).item()
        self._compare_outputs("results")
        report.loss_error = max(report.loss_error, self._compare_loss("the loss", actual, expected, "results"))
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None and p.grad.numel()]
        least = _OF_LARGEST * max((_wide(gradient).abs().max().item() for gradient in gradients), default=0.0)
        order = {name: at for at, name in enumerate(self.parameters)}
        # from the end, as backwards run: a wrong gradient makes those of all layers before it wrong
        for name, parameter in sorted(self.pipeline.named_parameters(), key=lambda item: -order[item[0]]):
            where = f"the gradient of {self._place(name)}"
            serial = self.parameters[name].grad
            rule: Rule = "parameters" if (parameter.grad is None) != (serial is None) else "backwards"
            error = self._compare(where, parameter.grad, serial, rule, least)
            report.errors[name] = max(report.errors.get(name, 0.0), error)
        self._compare_buffers()
        self._optimize()

    def compare_evaluation(self, step: int) -> None:
        """Compare the loss and the outputs of evaluation mode."""
        self._step = step
        self.pipeline.eval()
        for module in self.modules.values():
            module.eval()
        inputs, targets, keywords = self.batch.of(step)
        try:
            with torch.no_grad():
                shares = [share for _, share in self._serial_forwards(step)]
        except Exception:
            return  # layers that one process cannot evaluate either, such as those with hooks on gradients
        loss = self.pipeline.evaluate(inputs, targets, **keywords)
        self._compare_outputs("evaluation")
        self._compare_loss("the loss of evaluate", loss.item(), sum(float(share) for share in shares), "evaluation")
        inputs, targets, keywords = self.batch.of(step + 1)
        with torch.no_grad():
            outputs = join([output for output, _ in self._serial_forwards(step + 1)])
        for got, want in zip(_strided(self.pipeline.predict(inputs, **keywords)), _strided(outputs), strict=True):
            self._compare("the output of predict", got, want, "evaluation")
        self._compare_buffers()

    def _serial_forwards(self, step: int) -> Iterator[tuple[Any, Tensor | float]]:
        parts = self.batch.parts(step, self.pipeline.schedule.microbatches)
        return (self._serial_forward(parts, at) for at in range(parts.count))

    def _serial_step(self) -> float:
        total = 0.0
        for _, loss in self._serial_forwards(self._step):
            if isinstance(loss, Tensor):
                if loss.requires_grad:
                    loss.backward()  # type: ignore[no-untyped-call]
                total += loss.item()
        return total

    def _serial_forward(self, parts: Microbatches, at: int) -> tuple[Any, Tensor | float]:
        """Return the last layer's output for a micro-batch, and the micro-batch's share of the loss."""
        x: Any = parts.inputs[at]
        target, given, share = parts.targets[at], parts.keywords[at], parts.shares[at]
        tensors: dict[str, Tensor | None] = {}
        terms: list[Any] = []
        for number, (layer, module) in enumerate(self.modules.items()):
            declared = self.plain.declared[number]
            named = {**self.plain.accepted(number, given), **self.plain.read(number, tensors)}
            self.expected.before(_Call(self._step, at, layer))
            x = module(*x, **named) if isinstance(x, tuple) else module(x, **named)
            x, lost = declared.taken_from(x, tensors)
            terms += [term.weight * term.loss(lost[key], target) for key, term in declared.losses.items() if share]
        return x, sum(terms, start=self.loss(x, target)) * share if share else 0.0

    @torch.no_grad()
    def _optimize(self) -> None:
        """Step all weights along their gradients, by the same factor on both sides."""
        gradients = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        norm = sum(_wide(gradient).abs().square().sum().item() for gradient in gradients.values())
        rate = _RATE / max(norm**0.5, 1e-30)
        for name, parameter in self.pipeline.named_parameters():
            if parameter.grad is not None and name in gradients:
                parameter.sub_(_dense(parameter.grad) * rate)
                self.parameters[name].sub_(_dense(gradients[name]) * rate)

    # -- comparisons -----------------------------------------------------------------------------------------------------

    def _compare_outputs(self, rule: Rule) -> None:
        """Compare what the layers returned, in the order of the model."""
        order = {name: at for at, name in enumerate(self.modules)}
        sliced = self.pipeline.schedule.slices > 1
        for call in sorted(self.actual.sums, key=lambda call: (order[call.layer], call.microbatch, call.slice)):
            (a, _), (b, size) = self.actual.sums[call], self.expected.sums.get(call, (0.0, 0.0))
            if not abs(a - b) <= self.tolerance * max(size, 1e-30):
                difference = abs(a - b) / max(size, 1e-30)
                unit = unit_words(call.microbatch, call.slice if sliced else None)
                where = f"the output of layer {self._layer(call.layer)}, {unit},"
                self._refuse(where, difference, "slices" if sliced and rule == "results" else rule)
        self.actual.sums.clear()
        self.expected.sums.clear()

    def _compare_buffers(self) -> None:
        expected = values_by_name(self.modules, "named_buffers")
        for layer, module in layers_of_ranks(self.pipeline):
            for name, got in values_by_name({layer: module}, "named_buffers").items():
                want = expected.get(name)
                if want is not None and want.layout is torch.strided and not torch.equal(got, want):
                    self._compare(f"buffer {self._place(name)}", got, want, "buffers")

    def _compare_loss(self, what: str, got: float, want: float, rule: Rule) -> float:
        return self._compare(what, torch.tensor(got), torch.tensor(want), rule, rounding=_OF_LOSS)

    def _compare(
        self,
        what: str,
        got: Tensor | None,
        want: Tensor | None,
        rule: Rule,
        least: float = 0.0,
        rounding: float = 0.0,
    ) -> float:
        """Return the relative difference. Raises VerifyError above the tolerance and what is nothing but `rounding`."""
        error = relative_error(got, want, least)
        if not error <= max(self.tolerance, rounding):
            self._refuse(what, error, rule)
        return error

    def _refuse(self, what: str, error: float, rule: Rule) -> None:
        share = f"by {100 * error:.2g} % of its largest value"
        how = share if error < float("inf") else "altogether (missing or not finite in one)"
        recomputed = "" if not self.recomputes else ", with every layer recomputed"
        rule = "recomputation" if self.recomputes else rule
        name = self.pipeline.schedule.name or "the schedule"
        raise _breach(f"step {self._step} under {name}{recomputed}: {what} differs from one process {how}", rule)

    def _place(self, name: str) -> str:
        layer = layer_of(name, self.modules)
        assert layer is not None
        return f"{name!r} (layer {self._layer(layer)})"

    def _layer(self, name: str) -> str:
        return f"{name!r} of stage {self.stage_of[name]}"


def relative_error(a: Tensor | None, b: Tensor | None, least: float = 0.0) -> float:
    """Return max |a - b| / max |b|, or over `least` if that is larger; 0 if both are None or zero; infinite if only one is None,
    the shapes differ, a value is not finite, or only b is zero."""
    if a is None or b is None:
        return 0.0 if a is b else float("inf")
    if a.shape != b.shape or not bool(a.isfinite().all()) or not bool(b.isfinite().all()):
        return float("inf")
    if not a.numel():
        return 0.0
    a, b = _wide(a), _wide(b)
    difference, size = float((a - b).abs().max()), max(float(b.abs().max()), least)
    if size == 0:
        return 0.0 if difference == 0 else float("inf")
    return difference / size


def _copied(layers: Sequence[LayerSource]) -> list[LayerSource]:
    """Return copies of the modules, made together so that what they share stays shared; factories stay as they are."""
    memo: dict[int, Any] = {}
    try:
        return [copy.deepcopy(layer, memo) if isinstance(layer, nn.Module) else layer for layer in layers]
    except (TypeError, RuntimeError, AttributeError) as error:
        raise UsageError(
            f"verify copies modules, and one cannot be copied ({error}): give factories (Layer(name, build))"
        ) from error


def _apart(layer: LayerSource, name: str, memo: dict[int, Any]) -> LayerSource:
    """Return a factory of copies of what a factory makes, since it may return the same module again; a module as it is."""
    if isinstance(layer, nn.Module):
        return layer

    def build() -> nn.Module:
        module = layer()
        # A copy of a ScriptModule loses its signature.
        return module if isinstance(module, torch.jit.ScriptModule) else copy.deepcopy(module, memo)

    return replace(layer, build=build) if isinstance(layer, Layer) else Layer(name, build)


def _rolled(value: Any, rows: int, by: int) -> Any:
    """Return a batch, or a part of it, with the rows of its tensors moved."""
    return mapped(value, Tensor, lambda each: torch.roll(each, by, 0) if each.ndim and len(each) == rows else each)


def _strided(value: Any) -> Iterator[Tensor]:
    return (tensor for tensor in tensors_in(value) if tensor.layout is torch.strided and not tensor.is_nested)


def _dense(value: Tensor) -> Tensor:
    return value.to_dense() if value.layout is not torch.strided else value


def _wide(value: Tensor) -> Tensor:
    return _dense(value).to(torch.complex128 if value.is_complex() else torch.float64)
