"""`pipeloom plan`: which layout to train a model with on given devices, what it costs, and why the others lost."""

from __future__ import annotations

import gc
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pipeloom.cli.options import flag, memory_of, name_of, with_options
from pipeloom.cli.output import emit, json_flag, require_one_form, require_writable, write
from pipeloom.draw.chart import Panel, chart
from pipeloom.draw.figures import in_blocks
from pipeloom.errors import CapacityError, UsageError, divisors, nearest
from pipeloom.plan import (
    RUNTIMES,
    Device,
    LayoutCosts,
    LayoutPlan,
    PlannedLayout,
    Planner,
    PlanRequest,
    load_device,
    load_model,
    parse_layout,
    search,
)
from pipeloom.plan.layout import values_of
from pipeloom.plan.measured import read
from pipeloom.plan.refine import refine
from pipeloom.plan.report import (
    advice,
    as_dict,
    gib,
    memory_lines,
    none_fits,
    reason,
    refined_lines,
    step_words,
    table,
    what_if,
)
from pipeloom.plan.scaling import scaling
from pipeloom.plan.search import limits_of_source, neighbouring
from pipeloom.schedule.json_form import to_json
from pipeloom.shapes.cut import parse_stages
from pipeloom.shapes.decoder import DecoderShape
from pipeloom.shapes.hub import content_of, own_values, presets
from pipeloom.shapes.ops import Runtime
from pipeloom.traces.timelines import costs_dict

_ROWS = 10
_NOT_DRAWN = ("layout", "output", "costs_to", "as_", "as_json", "refine")
_TIMES = {"ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class PlanFlags:
    """The model, the devices, and the form of the answer."""

    model: str = flag(
        "",
        "MODEL",
        "A preset, a Hugging Face directory, a config.json, or a configuration of `train`.",
        show_default=False,
    )
    job: str | None = flag(
        None, "JOB", "Predict this job of Megatron-LM, torchtitan, Automodel or `train`, and what it could gain."
    )
    devices: int | None = flag(None, "N", "Number of devices; with --layout, that of the layout.", min=1, max=1_000_000)
    memory: str | None = flag(None, "GIB", "Memory of a device, such as 80 or 80GiB; default: the device's.")
    device: str = flag("h100", "NAME", "a100, h100, h200, b200, b300, gb200, gb300, mi300x or mi355x.")
    nodes: int | None = flag(None, "N", "Number of nodes; default: as many as the devices fill.", min=1)
    global_batch: int | None = flag(None, "N", "Sequences of a step; default: four million tokens.", min=1)
    seq: int = flag(4096, "N", "Tokens of a sequence.", min=1, max=2**24)
    runtime: Literal["pipeloom", "megatron", "torchtitan"] = flag(
        "pipeloom", "NAME", "Whose saved tensors, temporaries and schedules: pipeloom, megatron or torchtitan."
    )
    capacity: float = flag(0.0, "X", "Capacity factor of the experts; 0: rows as routed, evenly.", min=0.0)
    layers: int | None = flag(None, "N", "Cut the model to its first N blocks.", min=1)
    lora_r: int | None = flag(None, "R", "Train adapters of this rank alone, as `train` does.", "--lora.r", min=0)
    lora_targets: str | None = flag(None, "NAMES", "Layers with adapters, as of `train`.", "--lora.target_modules")
    layout: list[str] | None = flag(
        None,
        "KEY=N,…",
        "Predict this layout only: dp, tp, cp, pp, ep, etp, v, m, micro_batch, seq, zero, recompute, offload, schedule, group, "
        "slices, vocabulary, capacity, cut, grads, recompute_layers, ep_chunks.",
    )
    fixed: str | None = flag(None, "KEY=N,…", "Search only layouts with these values, such as tp=8,cp=1.")
    stages: str | None = flag(None, "TEXT", "Layers of each stage of --layout, such as 'Et*3|(tt|)*29L'.")
    refine: float = flag(
        0.0, "S", "Search schedules for the three best layouts, or for --layout, in S seconds.", min=0.0, max=86_400.0
    )
    measured: str | None = flag(None, "m=N:TIME", "A measured step of that layout, such as m=4:843ms; scales its time.")
    as_json: bool = json_flag()
    output: Path | None = flag(
        None, "FILE", "Write the best layout for `pipeloom train`; with --job, the best job in its system's words."
    )
    data: str | None = flag(None, "SOURCE", "With --output: the data to train on, as data.source.")
    costs_to: Path | None = flag(
        None, "FILE", "Write the stages' costs, in seconds and bytes, for `search --costs` and other commands."
    )
    costs: Path | None = flag(
        None, "FILE", "Times of the layers from `pipeloom profile --output FILE`, not from the device's data sheet."
    )
    svg: Path | None = flag(
        None,
        "FILE",
        "Draw tokens/s of a device over tp and pp, with the links as they are and half as fast; search nothing.",
    )
    as_: Literal["megatron", "torchtitan", "automodel", "torch-csv", "pipeloom"] | None = flag(
        None,
        "FORM",
        "Print the best layout as a job of megatron, torchtitan, automodel, torch-csv or pipeloom.",
        "--as",
    )

    def require(self) -> None:
        """Raise UsageError for files that cannot be written, and for options whose result nothing would hold."""
        require_writable(self.output, self.costs_to, self.svg)
        require_one_form({"--json": self.as_json, "--as": self.as_})
        if self.data is not None and self.output is None:
            raise UsageError("--data is written to the file of --output, which is not given")
        for spec in fields(self) if self.svg is not None else ():
            if spec.name in _NOT_DRAWN and getattr(self, spec.name) != spec.default:
                raise UsageError(f"--svg draws, and searches nothing; leave out {name_of(spec)}")

    @cached_property
    def directory(self) -> dict[str, str]:
        """The key of `[model]` that trains the model of a directory -> the directory; empty for other models.

        weights: our own decoder computes it; source: the layers of transformers.
        """
        if not Path(self.model).is_dir():
            return {}
        ours = own_values(content_of(self.model, "--model"))
        return {"source" if ours is None else "weights": str(Path(self.model).absolute())}


_GROUPS = {"model": "Model", "devices": "Devices", "runtime": "Layouts", "measured": "Times", "as_json": "Output"}


@with_options(groups_from=_GROUPS)
def command(options: PlanFlags) -> None:
    """Find the layout with which to train a model.

    pipeloom plan --model llama3-70b --devices 64 --device h100

    Predicts the memory of every rank and the time of a step, for every layout of data, tensor, context, pipeline and expert
    parallelism that the model and the devices allow.
    """
    options.require()
    gc.disable()  # schedules are many small objects without cycles, which take a tenth of the time to look through
    try:
        if options.job is not None:
            _gain(options, options.job)
        elif options.model:
            _plan(options)
        else:
            raise UsageError("plan needs --model, or --job with a job that describes its model")
    finally:
        gc.enable()


def _plan(options: PlanFlags) -> None:
    if options.refine and options.runtime == "megatron":
        raise UsageError("--refine: megatron runs its own schedules alone; nearest: --runtime pipeloom")
    text = options.layout[0] if options.layout else None
    if text is not None and (len(options.layout or ()) > 1 or options.fixed is not None):
        other = "--fixed" if options.fixed is not None else "the other --layout"
        raise UsageError(f"--layout {text:.200}: one layout is predicted at a time; leave out {other}")
    if options.nodes is not None and options.devices is None and text is not None:
        options = replace(options, devices=parse_layout(text).world)
    device = _device(options)
    planner = _planner(options, device)
    shape = planner.shape
    if text is not None:
        prediction = _one(options, planner, text, device.memory)
        fits = prediction.peak <= device.memory
        _write(options, prediction, planner)
        if options.as_json or options.as_ is None:
            emit(
                options.as_json,
                lambda: as_dict(prediction) | {"fits": fits},
                lambda: details(prediction, planner, bool(options.measured or options.costs)),
            )
        if not fits:
            raise CapacityError(
                f"--layout {prediction.text} needs {gib(prediction.peak)} GiB, and a device has {gib(device.memory)}"
            )
        return
    if options.measured:
        raise UsageError("--measured scales the prediction of one layout; give it with --layout")
    if options.stages is not None:
        raise UsageError("--stages divides the layers of one layout; give it with --layout")
    request = _request(options, device, shape)
    if options.svg is not None:
        title = f"{shape.name} on {request.devices} {device.name}, nodes of {device.per_node}"
        axis, speed = "devices that share one copy of the model", "tokens/s of a device"
        write(options.svg, lambda: chart(title, axis, [Panel(speed, scaling(planner, request))], log2=True))
        return
    plan = search(planner, request)
    if not plan.predictions:
        raise CapacityError(none_fits(plan, shape.name, request))
    refined: Sequence[LayoutCosts] = plan.predictions
    if options.refine:
        refined = refine(planner, refined, request.memory, options.refine)
    _write(options, refined[0], planner)
    searched = refined_lines(plan.predictions, refined) if options.refine else []
    if options.as_json or options.as_ is None:
        emit(
            options.as_json,
            lambda: {"best": as_dict(refined[0]), "layouts": [*map(as_dict, refined)], "looked_at": plan.looked_at},
            lambda: [*_lines(plan, planner, request), *searched],
        )


_WITH_JOB = ("job", "model", "device", "memory", "nodes", "as_json", "output")


def _gain(options: PlanFlags, source: str) -> None:
    from pipeloom.cli.gains import gain_of
    from pipeloom.interop.systems import read_job

    for spec in fields(options):
        if spec.name not in _WITH_JOB and getattr(options, spec.name) != spec.default:
            raise UsageError(f"{name_of(spec)}: the job says what is trained on what; leave it out beside --job")
    job = read_job(source, load_model(options.model) if options.model else None)
    gain = gain_of(job, _device(replace(options, devices=job.layout.world)))
    gain.report(options.output, options.as_json, details)


def _planner(options: PlanFlags, device: Device) -> Planner:
    runtime = RUNTIMES[options.runtime]
    flags = (("--lora.r", options.lora_r), ("--lora.target_modules", options.lora_targets))
    words = [str(word) for name, value in flags if value is not None for word in (name, value)]
    if options.model in presets() and not words:
        shape = load_model(options.model)
    else:  # a configuration, whose schema takes long to import
        shape, runtime = _configured(options, words, runtime, device)
    if runtime.adapters is not None and options.runtime != "pipeloom":
        raise UsageError(f"--lora.r: {options.runtime}'s adapters are not planned; nearest: --lora.r 0")
    if options.directory.get("source") and options.runtime == "pipeloom":
        shape = replace(shape, num_nextn_predict_layers=0)  # transformers does not train them
    if options.layers is not None:
        if options.layers > (most := shape.num_hidden_layers):
            raise UsageError(f"--layers {options.layers}: {shape.name} has {most}; nearest: {most}")
        shape = shape.with_layers(options.layers)
    if options.costs is None:
        return Planner(shape, device, runtime)
    return Planner(shape, device, runtime, read(options.costs, shape))


def _configured(
    options: PlanFlags, lora: Sequence[str], runtime: Runtime, device: Device
) -> tuple[DecoderShape, Runtime]:
    """Return the model and the runtime with adapters; both as a configuration of `train` has them, where that is the model."""
    from pipeloom.config import load, split_arguments
    from pipeloom.config.settings import BUILT_IN
    from pipeloom.plan.run import adapters_of, runtime_of

    _, flags = split_arguments(lora)
    if options.model.endswith(".toml") or options.model in BUILT_IN:
        config = load(options.model, flags)
        return config.model.shape(), runtime_of(config, None if config.train.device == "cpu" else device)
    return load_model(options.model), replace(runtime, adapters=adapters_of(load(None, flags)))


def _limits(options: PlanFlags, shape: DecoderShape) -> dict[str, Any]:
    """Return what the layers of transformers, where they train the model, require of a layout."""
    if options.runtime != "pipeloom" or "source" not in options.directory:
        return {}
    return limits_of_source(shape, content_of(options.model, "--model"))


def _require_limits(option: str, values: Mapping[str, Any], limits: Mapping[str, Any]) -> None:
    for key, value in limits.items():
        if values.get(key, value) != value:
            reason = "the layers of transformers, which train this model, do not have it"
            raise UsageError(f"{option}: {key}={values[key]}: {reason}; nearest: {key}={value}")


def _device(options: PlanFlags) -> Device:
    device = load_device(options.device)
    if options.nodes is not None:
        if options.devices is None or options.devices % options.nodes:
            sizes = divisors(options.devices) if options.devices else [1]
            raise UsageError(
                f"--nodes {options.nodes} does not divide --devices {options.devices}; {nearest(options.nodes, sizes)}"
            )
        device = replace(device, per_node=options.devices // options.nodes)
    return device if options.memory is None else replace(device, memory=memory_of(options.memory)[0])


def _request(options: PlanFlags, device: Device, shape: DecoderShape) -> PlanRequest:
    if options.devices is None:
        raise UsageError("plan needs --devices, or --layout with the sizes of the axes")
    request = PlanRequest.of(
        *(options.runtime, options.devices, device.memory, options.global_batch, options.seq),
        capacity=options.capacity,
        limits=_limits(options, shape),
        fixed={} if options.fixed is None else values_of(options.fixed, "--fixed"),
    )
    if "recompute_layers" in request.fixed:
        raise UsageError(
            "--fixed: recompute_layers follows from the memory; leave it out, or predict one layout with --layout"
        )
    _require_limits("--fixed", request.fixed, request.limits)
    if options.costs is not None:  # layers are measured whole
        request = replace(request, fixed={"tp": 1, "cp": 1, "ep": 1} | dict(request.fixed))
    return request


def _one(options: PlanFlags, planner: Planner, text: str, device_memory: float) -> LayoutCosts:
    # Megatron and torchtitan divide the blocks evenly unless they are told; our trainer balances its stages.
    cut = "" if options.runtime == "pipeloom" else "even"
    layout = parse_layout(text, PlannedLayout(seq=options.seq, capacity=options.capacity, cut=cut))
    _require_limits("--layout", asdict(layout), _limits(options, planner.shape))
    if options.stages is not None:
        try:
            shape, stages = planner.shape, layout.built().positions
            counts = parse_stages(options.stages, shape.num_hidden_layers, stages, shape.num_nextn_predict_layers)
        except UsageError as error:
            raise UsageError(f"--stages {options.stages!r:.200}: {error}") from None
        layout = replace(layout, stages=tuple(counts))
    if options.devices is not None and options.devices != layout.world:
        raise UsageError(
            f"--layout uses {layout.world} devices, and --devices is {options.devices}; nearest: --devices {layout.world}"
        )
    if options.global_batch not in (None, layout.sequences):
        raise UsageError(
            f"--layout has {layout.sequences} sequences a step, and --global-batch is {options.global_batch}; nearest: "
            f"--global-batch {layout.sequences}"
        )
    prediction = planner.predict(layout)
    if options.refine:
        (prediction,) = refine(planner, [prediction], device_memory, options.refine)
    if options.measured is None:
        return prediction
    match = re.fullmatch(r"m=(\d{1,6}):(\d+(?:\.\d+)?)(ms|s)", options.measured.strip())
    if match is None or not int(match[1]) or not float(match[2]):
        raise UsageError(
            f"--measured is {options.measured!r:.100}; give a number of micro-batches and a time, such as m=4:843ms"
        )
    return planner.measured(prediction, int(match[1]), float(match[2]) * _TIMES[match[3]])


def _write(options: PlanFlags, prediction: LayoutCosts, planner: Planner) -> None:
    if options.costs_to is not None:
        write(options.costs_to, lambda: json.dumps(costs_dict(planner.stage_costs(prediction.layout))) + "\n")
    if options.as_ is None and options.output is None:
        return
    from pipeloom.interop.systems import written

    source, data = options.directory or None, options.data or ""
    if options.as_ is not None:
        text, notes = written(prediction, planner, options.as_, source, data=data)
        sys.stdout.write(text)
        print("".join(f"{note}\n" for note in notes), end="", file=sys.stderr)
    if options.output is not None:
        table = options.output.with_suffix(".json") if prediction.searched is not None else None
        write(options.output, lambda: written(prediction, planner, "pipeloom", source, table, data)[0])
        if table is not None:
            write(table, lambda: to_json(prediction.schedule))


def details(prediction: LayoutCosts, planner: Planner, measured: bool) -> list[str]:
    """Return the costs of a layout in lines."""
    from pipeloom.plan.export import layers_by_rank, layout_string

    layers = prediction.stages, prediction.ahead
    device, worst = planner.device, prediction.ranks[prediction.worst]
    room = (device.memory - prediction.peak) / 2**30
    return [
        f"{prediction.text}:",
        f"{prediction.layout.world} devices, stages {layout_string(*layers)} (E: embedding, t: block, L: output layer)",
        *(in_blocks(layers_by_rank(prediction.short, *layers)) if prediction.layout.pp > 1 else ()),
        step_words(prediction.step, prediction.tokens, device.name, measured=measured),
        *memory_lines(prediction.ranks),
        f"rank {prediction.worst} needs the most, {gib(prediction.peak)} GiB, at {worst.peak_action}: "
        + (f"{room:.1f} GiB are left" if room >= 0 else f"{-room:.1f} GiB more than there are"),
    ]


def _lines(plan: LayoutPlan, planner: Planner, request: PlanRequest) -> list[str]:
    best, numbers = plan.best, plan.looked_at
    lines = [
        f"{planner.shape.name} on {request.devices} {planner.device.name} with {gib(request.memory)} GiB, {request.sequences} "
        f"sequences of {request.seq} tokens a step, run by {planner.runtime.name}",
        "{layouts:,} layouts: {too_slow:,} are too slow by their work alone, and {too_large:,} too large on the mean rank. The "
        "other {others:,} gave {estimated:,} estimates, with ZeRO levels and recomputation; {predicted} were predicted from "
        "their schedules. Below, with the tokens/s of one device, each is slower and smaller than the one above:".format(
            others=numbers["layouts"] - numbers["too_slow"] - numbers["too_large"], **numbers
        ),
        *in_blocks(table(plan.pareto[:_ROWS])),
        advice(plan),
        "",
        *details(best, planner, planner.measured_layers is not None),
        "",
        "one step away from the best layout:",
    ]
    neighbours = neighbouring(planner, best, request)
    lines += [f"  {change}: {reason(each, best, request.memory)}" for change, each in neighbours]
    return [*lines, "", *what_if(planner, request, plan)]
