"""What a case gives: in one process that knows nothing of pipelines, in a LocalPipeline, and on a rank of a Pipeline.

All three return an Observation of plain numbers, so that it may travel between processes.
"""

from __future__ import annotations

import contextlib
import re
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fuzz._cases import Case, schedule_of
from fuzz._layers import DERIVING, LENGTH, WIDTH, build, share, tied_weight
from pipeloom.errors import PipeloomError
from pipeloom.ops.layer import KEYWORD, MicrobatchContext
from pipeloom.parallel.mesh import Mesh
from pipeloom.runtime import Layer, LocalPipeline, Pipeline, RuntimeOptions
from pipeloom.shapes.mesh import MeshShape

RATE, DECAY = 1e-2, 0.1
TIMEOUT = 60.0  # seconds for which a rank waits for a message

Numbers = list[float]


@dataclass
class Observation:
    """What a run shows.

    Attributes:
        replica: of the process.
        losses: of each step and evaluation.
        gradients: for each optimizer step name -> gradient before it, None where there is none; empty where it is not kept
            in `.grad`.
        weights, buffers: name -> values at the end.
        counts: calls of each hook.
        kept: the sum of what the `keep` hooks kept.
        error: the exception that ended the run: its class, its message, its traceback.
        refused: whether that is one of Pipeloom's own, so a refusal.
    """

    replica: int = 0
    losses: Numbers = field(default_factory=list)
    gradients: list[dict[str, Numbers | None]] = field(default_factory=list)
    weights: dict[str, Numbers] = field(default_factory=dict)
    buffers: dict[str, Numbers] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    kept: float = 0.0
    error: tuple[str, str, str] | None = None
    refused: bool = False


def numbers(value: Tensor) -> Numbers:
    value = value.detach()
    return (torch.view_as_real(value) if value.is_complex() else value).reshape(-1).tolist()  # type: ignore[no-any-return]


def loss_of(all_outputs: bool, output: Any, target: Tensor) -> Tensor:
    """The mean squared error of the hidden tensor; with `all_outputs` of what else the last layer returns, too."""
    outputs = output if isinstance(output, tuple) else (output,)
    chosen = [value for value in (outputs if all_outputs else outputs[:1]) if value is not None]
    total = torch.zeros((), dtype=target.dtype)
    for value in chosen:
        if value.is_complex():
            value = torch.view_as_real(value).sum(-1)
        scaled = value.to(target.dtype).reshape(value.shape[0], -1)
        total = total + ((scaled - target.reshape(target.shape[0], -1)[:, :1]) ** 2).mean()
    return total


def batch(case: Case, replica: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1_000_003 * case.seed + 1_009 * replica + step)
    rows = sum(case.replica_rows(replica))
    x, y = (torch.randn(rows, LENGTH, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    return x.to(torch.get_default_dtype()), y.to(torch.get_default_dtype())


class Built:
    """The layers of a case in one process, built where and when someone asks for them."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.modules: dict[str, nn.Module] = {}
        self.counts: Counter[str] = Counter()
        self.kept: list[Tensor] = []

    def make(self, at: int) -> nn.Module:
        name = f"l{at}"
        made = build(self.case.layers[at], f"{self.case.seed} {at}", name, self.counts, self.kept)
        self.modules[name] = made
        return made

    def ties(self) -> list[tuple[str, ...]]:
        """The global names that are one weight each."""
        found = []
        for pair in self.case.ties:
            paths = [tied_weight(self._plain(at)) for at in pair]
            if None not in paths:
                found.append(tuple(f"l{at}.{path}" for at, path in zip(pair, paths, strict=True)))
        return found

    def _plain(self, at: int) -> nn.Module:
        return build(self.case.layers[at], "", "", Counter(), [])

    def sources(self) -> list[Any]:
        """What a pipeline is given: factories, or modules of which those tied by one object share it."""
        count = len(self.case.layers)
        if not self.case.modules:
            return [Layer(f"l{at}", partial(self.make, at)) for at in range(count)]
        modules = [self.make(at) for at in range(count)]
        for module, name in zip(modules, self.modules, strict=True):
            module.name = name  # type: ignore[assignment]
        if self.case.one_object:
            self.share(modules)
        return modules

    def share(self, modules: Sequence[nn.Module]) -> None:
        for names in self.ties():
            parts = [name.split(".", 1) for name in names]
            share([modules[int(layer[1:])] for layer, _ in parts], [path for _, path in parts])

    def state(self, seen: Observation) -> None:
        """Puts buffers, hook counts and what hooks kept into the observation."""
        for name, module in self.modules.items():
            for inner, value in module.named_buffers():
                seen.buffers[f"{name}.{inner}"] = numbers(value.double())
        seen.counts = dict(self.counts)
        seen.kept = float(sum(value.double().sum() for value in self.kept)) if self.kept else 0.0


def observed(run: Callable[[Case, Observation], None], case: Case, replica: int = 0) -> Observation:
    """What `run` shows, with its exception if it ends with one; torch's defaults are as before."""
    seen = Observation(replica)
    torch.set_default_dtype(getattr(torch, case.dtype))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run(case, seen)
    except Exception as error:
        seen.error = type(error).__name__, str(error), "".join(traceback.format_exception(error))
        seen.refused = isinstance(error, PipeloomError)
    finally:
        torch.set_default_dtype(torch.float32)
        if any("compiled" in text for text in case.layers):
            torch._dynamo.reset()
    return seen


# -- one process -------------------------------------------------------------------------------------------------------


class Replica:
    """One data-parallel replica of the reference: a model, its optimizer, and its place in the batch."""

    def __init__(self, case: Case, number: int) -> None:
        self.case, self.number = case, number
        self.built = Built(case)
        self.modules = [self.built.make(at) for at in range(len(case.layers))]
        self.built.share(self.modules)
        named = [(f"l{at}.{n}", p) for at, m in enumerate(self.modules)
                 for n, p in m.named_parameters(remove_duplicate=False)]  # fmt: skip
        self.named: dict[str, nn.Parameter] = dict(named)
        self.parameters = list(dict.fromkeys(self.named.values()))
        self.optimizer = optimizer(self.parameters, by_shape=case.shard_gradients)

    def output(self, x: Tensor, context: MicrobatchContext) -> Any:
        values: Any = x
        for text, module in zip(self.case.layouts, self.modules, strict=True):
            keywords = {KEYWORD: context} if text.kind in ("sometimes", "one micro-batch", "noise") else {}
            values = module(*values, **keywords) if isinstance(values, tuple) else module(values, **keywords)
        return values

    def run(self, step: int, total: float, sizes: Sequence[int], data: tuple[Tensor, Tensor]) -> float:
        """The replica's share of the loss, micro-batch after micro-batch; backward too where gradients are enabled."""
        loss = 0.0
        parts = zip(*(torch.split(value, list(sizes)) for value in data), strict=True)
        for at, (x, y) in enumerate(parts):
            weight = y.numel() / total
            first = self.number * sum(sizes) + sum(sizes[:at])
            context = MicrobatchContext(step, self.number * len(sizes) + at, weight, first, sizes[at])
            part = loss_of(self.case.all_outputs, self.output(x.clone(), context), y) * weight
            if part.requires_grad:
                part.backward()
            loss += part.item()
        return loss


def optimizer(parameters: Sequence[nn.Parameter], by_shape: bool = False) -> torch.optim.Optimizer:
    """AdamW; `by_shape`: only matrices decay, as in the trainer."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=RATE)
    # in float32 the rounding of a gradient that is nearly zero must not decide a step
    eps = 1e-8 if torch.get_default_dtype() == torch.float64 else 1.0
    if by_shape:
        groups = [
            {"params": [p for p in trained if p.ndim >= 2], "weight_decay": DECAY},
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW([group for group in groups if group["params"]], lr=RATE, eps=1e-8)
    return torch.optim.AdamW(trained, lr=RATE, weight_decay=DECAY, eps=eps)


def reference(case: Case, seen: Observation) -> None:
    """The replicas one after the other in one process; their gradients are added up as a reduction should."""
    replicas = [Replica(case, number) for number in range(max(1, case.dp))]
    step = 0
    for _ in range(case.steps):
        for _ in range(case.accumulate):
            data = [batch(case, replica.number, step) for replica in replicas]
            total = float(sum(y.numel() for _, y in data))
            sizes = [case.replica_rows(replica.number) for replica in replicas]
            seen.losses.append(sum(r.run(step, total, s, d) for r, s, d in zip(replicas, sizes, data, strict=True)))
            step += 1
            if case.evaluate:
                with torch.no_grad():
                    seen.losses.append(
                        sum(r.run(step, total, s, d) for r, s, d in zip(replicas, sizes, data, strict=True))
                    )
        reduce(replicas)
        seen.gradients.append(gradients_of(replicas[0].named.items()))
        for replica in replicas:
            replica.optimizer.step()
            drop(case, replica.parameters)
    seen.weights = {name: numbers(value) for name, value in replicas[0].named.items()}
    for replica in replicas:
        mine = Observation()
        replica.built.state(mine)
        seen.buffers |= {f"{replica.number} {name}": value for name, value in mine.buffers.items()}
        seen.counts = dict(Counter(seen.counts) + Counter(mine.counts))
        seen.kept += mine.kept


def reduce(replicas: Sequence[Replica]) -> None:
    """Every replica's gradients become the sum over all: None where all are None, otherwise None counts as zero."""
    if len(replicas) == 1:
        return
    for copies in zip(*(replica.parameters for replica in replicas), strict=True):
        parts = [copy.grad for copy in copies if copy.grad is not None]
        for copy in copies:
            copy.grad = torch.stack(parts).sum(0) if parts else None


def gradients_of(named: Any) -> dict[str, Numbers | None]:
    return {name: None if p.grad is None else numbers(p.grad) for name, p in named}


def drop(case: Case, parameters: Sequence[nn.Parameter], zero_grad: Callable[[], None] | None = None) -> None:
    """Drops gradients as the case says."""
    if case.zero == "pipeline" and zero_grad is not None:
        zero_grad()
    for parameter in parameters:
        if case.zero == "zeros" and parameter.grad is not None:
            parameter.grad.zero_()
        elif case.zero != "zeros":
            parameter.grad = None


# -- pipelines ---------------------------------------------------------------------------------------------------------


def options_of(case: Case, replica: int) -> RuntimeOptions:
    recompute: Any = case.recompute
    if isinstance(recompute, tuple):
        recompute = frozenset(f"l{at}" for at in recompute)
    return RuntimeOptions(
        transport=case.transport,  # type: ignore[arg-type]
        overlap_p2p=case.overlap_p2p,
        receive_depth=case.receive_depth,
        shapes=case.shapes,  # type: ignore[arg-type]
        deallocate=case.deallocate,
        timeout=TIMEOUT,
        monitor=False,
        microbatch_sizes=case.replica_rows(replica),
        recompute=recompute,
        main_gradients=case.main_gradients,
        shard_gradients=case.shard_gradients,
    )


def train(case: Case, pipeline: Any, replica: int, seen: Observation, step: Callable[[], None]) -> None:
    """The steps of a case on any pipeline; `step` is the optimizer's."""
    parameters = list(pipeline.parameters())
    for _ in range(case.steps):
        for at in range(case.accumulate):
            quiet = case.unsynced and case.dp > 0 and at < case.accumulate - 1
            with pipeline.no_sync() if quiet else contextlib.nullcontext():
                x, y = batch(case, replica, pipeline.next_step)
                seen.losses.append(float(pipeline.step(x.clone(), y)))
            if case.evaluate:
                seen.losses.append(float(pipeline.evaluate(x.clone(), y)))
        if not (case.dp and case.shard_gradients):
            seen.gradients.append(gradients_of(pipeline.named_parameters()))
        step()
        drop(case, parameters, pipeline.zero_grad)
    seen.weights = {name: numbers(value) for name, value in pipeline.named_parameters()}


def local(case: Case, seen: Observation) -> None:
    built = Built(case)
    pipeline = LocalPipeline(
        built.sources(),
        schedule_of(case),
        loss=partial(loss_of, case.all_outputs),
        stages=case.stages,
        tied=() if case.one_object and case.modules else built.ties(),
        options=options_of(case, 0),
    )
    adam = optimizer(list(pipeline.parameters()))
    train(case, pipeline, 0, seen, lambda: adam.step() and None)
    built.state(seen)
    seen.buffers = {f"0 {name}": value for name, value in seen.buffers.items()}


_MESHES: dict[tuple[int, int], Mesh | None] = {}


def mesh_of(ranks: int, dp: int) -> Any:
    """The mesh of that shape over all processes of the group; made once, as groups are never freed."""
    if (ranks, dp) not in _MESHES:
        _MESHES[ranks, dp] = Mesh.of(MeshShape(pp=ranks, dp=dp))
    return _MESHES[ranks, dp]


def distributed(case: Case, seen: Observation) -> None:
    """On one of the case's processes."""
    mesh = mesh_of(case.ranks, case.dp)
    seen.replica = mesh.place.dp
    built = Built(case)
    pipeline = Pipeline(
        built.sources(),
        schedule_of(case),
        loss=partial(loss_of, case.all_outputs),
        mesh=mesh,
        stages=case.stages,
        tied=() if case.one_object and case.modules else built.ties(),
        options=options_of(case, mesh.place.dp),
    )
    try:
        step = sharded_step(pipeline) if case.shard_gradients else optimizer(list(pipeline.parameters())).step
        train(case, pipeline, mesh.place.dp, seen, lambda: step() and None)
    finally:
        pipeline.close()
    here = {name for names in pipeline.layer_names for name in names}
    built.modules = {name: module for name, module in built.modules.items() if name in here}
    built.state(seen)
    seen.buffers = {f"{mesh.place.dp} {name}": value for name, value in seen.buffers.items()}
    if dist.is_initialized():
        dist.barrier()


def sharded_step(pipeline: Pipeline) -> Callable[[], None]:
    """The trainer's AdamW, which steps this replica's slices and shares the weights."""
    from pipeloom.config import load_layout
    from pipeloom.train.optimizer import Optimizer

    usual = load_layout("tiny").config.optimizer
    section = usual.model_copy(
        update={
            "name": "adamw",
            "lr": RATE,
            "min_lr": RATE,
            "lr_rule": "none",
            "betas": (0.9, 0.999),
            "weight_decay": DECAY,
            "vector_decay": 0.0,
            "embedding_decay": DECAY,
            "warmup_steps": 0,
            "clip_norm": 0.0,
            "zero1": True,
            "barrier": True,
        }
    )
    adam = Optimizer(list(pipeline.named_parameters()), section, pipeline.sync, pipeline.counts_in_norm)
    return lambda: adam.step(None, RATE)


# -- comparison --------------------------------------------------------------------------------------------------------

TOLERANCE = {"float64": 1e-7, "float32": 3e-3}
CLASSES = ("missing", "none", "gradient", "hook", "buffer", "kept", "loss", "weight")
RERUN_HOOKS = (
    "forward",
    "forward_pre",
    "keep",
)  # a recomputed forward calls them again, and so does torch's checkpoint


def differences(case: Case, want: Observation, seen: Sequence[Observation]) -> list[str]:
    """What is wrong, a line each that begins with its class, in the order of CLASSES: causes before what follows from them.

    `seen`: of every process.
    """
    return sorted(_differences(case, want, seen), key=lambda line: CLASSES.index(line.split(":")[0].split(" ")[0]))


def _differences(case: Case, want: Observation, seen: Sequence[Observation]) -> Iterator[str]:
    tolerance = TOLERANCE[case.dtype]
    for process in seen:
        yield from _wrong("loss", tolerance + 2e-6, {"": want.losses}, {"": process.losses})
        for step, gradients in enumerate(process.gradients):
            expected = want.gradients[step]
            for name, gradient in gradients.items():
                if (gradient is None) != (expected[name] is None):
                    is_, should = ("None" if value is None else "a tensor" for value in (gradient, expected[name]))
                    yield f"none: {name} in step {step} is {is_}, and in one process {should}"
            numbered = {name: value for name, value in gradients.items() if value and expected[name] is not None}
            yield from _wrong(f"gradient in step {step}", tolerance, expected, numbered)
        yield from _wrong("weight", tolerance, want.weights, process.weights)
        yield from _wrong("buffer", tolerance, want.buffers, process.buffers)
    covered = {name for process in seen for name in process.weights}
    if not _covers(case, want.weights, covered):
        yield f"missing: no process holds {sorted(want.weights.keys() - covered)}"
    for name in sorted({key for each in (want, *seen) for key in each.counts}):
        layer, hook = name.split(" ", 1)
        at = int(layer[1:])
        again = re.split("[ @]", hook)[0] in RERUN_HOOKS or case.layouts[at].kind in DERIVING
        if again and case.recomputed(at):
            continue
        called, expected_calls = sum(process.counts.get(name, 0) for process in seen), want.counts.get(name, 0)
        if called != expected_calls:
            yield f"hook: {name} is called {called} times, and in one process {expected_calls}"
    if case.recompute == "none":
        kept = sum(process.kept for process in seen)
        yield from _wrong("kept outputs", tolerance, {"": [want.kept]}, {"": [kept]})


def _covers(case: Case, wanted: Mapping[str, Any], covered: set[str]) -> bool:
    """Whether every parameter is there; of two tied ones, either."""
    missing = wanted.keys() - covered
    tied = {f"l{at}." for pair in case.ties for at in pair}
    return all(any(name.startswith(layer) for layer in tied) for name in missing)


def _wrong(
    what: str, tolerance: float, want: Mapping[str, Numbers | None], got: Mapping[str, Numbers | None]
) -> Iterator[str]:
    """A line for each name whose numbers are further off than `tolerance`, relative to the largest of them all."""
    scale = max((abs(number) for values in want.values() for number in values or ()), default=0.0)
    for name, values in got.items():
        expected = want.get(name)
        if values is None:
            continue
        if expected is None or len(expected) != len(values):
            yield f"{what}: {name} has {len(values)} numbers, and in one process {len(expected or ())}"
            continue
        size = max(max(map(abs, expected), default=0.0), 1e-3 * scale, 1e-12)
        worst = max((_distance(a, b) for a, b in zip(values, expected, strict=True)), default=0.0)
        if worst > tolerance * size:
            yield f"{what}: {name} is off by {worst / size:.2g} of its largest number"


def _distance(a: float, b: float) -> float:
    if a == b or (a != a and b != b):
        return 0.0
    return abs(a - b) if a == a and b == b else float("inf")
