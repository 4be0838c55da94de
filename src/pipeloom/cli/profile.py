"""`pipeloom profile`: what a model's layers, and the links between processes, cost on this device."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeloom.cli.output import JSON_HELP, aligned, write
from pipeloom.cli.workers import be_worker, hand_over, layout_of_workers, require_torch, run_workers, words_of
from pipeloom.errors import CapacityError

if TYPE_CHECKING:
    from pipeloom.config import Layout
    from pipeloom.runtime.layer_bytes import LayerBytes
    from pipeloom.schedule import Costs
    from pipeloom.train.report.layer_times import LayerTimes, SegmentTimes
    from pipeloom.train.report.link_times import LinkTimes

_KINDS = {"forward": "F", "input_grad": "I", "weight_grad": "W", "backward": "B", "recompute": "R"}
_EXPERT_LINKS = {("all-to-all", axis) for axis in ("ep", "world")}
_TIMEOUT = 600.0  # seconds that ranks wait for one that measures


@dataclass(frozen=True)
class DeviceProfile:
    """Everything measured: each kind's times, each layer's bytes, a block's segments (None: no experts), links and copies."""

    device: str
    layers: Sequence[LayerTimes]
    bytes: Sequence[LayerBytes]
    segments: SegmentTimes | None
    links: Sequence[LinkTimes]


def command(
    context: typer.Context,
    processes: Annotated[
        int,
        typer.Option(metavar="N", min=1, max=1024, help="Processes that measure at once; 2 or more: their links too."),
    ] = 1,
    repeats: Annotated[int, typer.Option(metavar="N", min=2, max=1000, help="Repetitions, after a warm-up.")] = 9,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write all of it as JSON, which --costs FILE and --segments FILE take."),
    ] = None,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw links and copies: bandwidth by size.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:
    """Measure a model's layers and the links on this device.

    pipeloom profile tiny --processes 2 --output costs.json

    MODEL is as CONFIG of `pipeloom train`, with its flags; or a preset of `pipeloom plan`, or a Hugging Face directory. One layer
    of each kind runs: F, I, W, B and R of one micro-batch and of one sequence, medians with their spread. The costs in the file
    are those of the configuration's stages, in seconds.
    """
    require_torch("profile")
    layout = _layout(context.args)
    code, report = _measure(layout, processes, repeats, words_of(context))
    if code or not report:
        raise typer.Exit(code)
    form: dict[str, Any] = json.loads(report)
    if output is not None:
        write(output, lambda: report + "\n")
    if svg is not None:
        write(svg, lambda: _chart(form))
    print(report if as_json else "\n".join(_lines(form)))


def _layout(arguments: Sequence[str]) -> Layout:
    """Return the layout of the command line: a configuration, a preset of the planner, or a Hugging Face directory."""
    from pipeloom.config import load_layout, split_arguments
    from pipeloom.config.hub import presets
    from pipeloom.config.settings import BUILT_IN

    path, overrides = split_arguments(arguments)
    keys: dict[str, Any] = {}
    if path is not None and path not in BUILT_IN and not Path(path).is_file():
        if Path(path).is_dir():
            path, keys = None, {"model.source": path}
        elif path.lower() in presets():
            keys, path = {"model.preset": path.lower()}, None
    return load_layout(path, keys | overrides, world_size=0)


def _measure(layout: Layout, processes: int, repeats: int, words: Sequence[str]) -> tuple[int, str]:
    """Return the exit code and the profile as JSON; "" on workers, whose launcher returns it."""
    from pipeloom.train.workers.worker import is_worker

    if not is_worker():
        from pipeloom.train.workers.preflight import require_room

        require_room(processes, "--processes")
        _require_memory(layout, processes)
        return run_workers("profile", words, processes)
    result = ""

    def body(context: Any) -> None:
        nonlocal result
        result = json.dumps(_form(layout, _profiled(layout, context, repeats)), allow_nan=False)

    code = be_worker(layout_of_workers(processes, layout.config.train.device, _TIMEOUT), body)
    return code, result if hand_over(lambda: result) else ""


def _require_memory(layout: Layout, processes: int) -> None:
    """Raise CapacityError where the weights and gradients of one layer of each kind exceed this machine's memory."""
    from pipeloom.config.stages import layer_sizes
    from pipeloom.train.workers.preflight import memory_of_machine

    config = layout.config
    count = sum(size.parameters for size in set(layer_sizes(config.model, config.train.seq_len)))
    need, memory = 8 * count * processes, memory_of_machine()
    if config.train.device != "cuda" and need > memory:
        raise CapacityError(
            f"one layer of each kind takes {need / 1e9:,.0f} GB with its gradients, and this machine has {memory / 1e9:,.0f} GB; "
            "shrink it with --model.vocab_size, --model.intermediate_size or --model.hidden_size"
        )


def _profiled(layout: Layout, context: Any, repeats: int) -> DeviceProfile:
    """Measure on this worker; all workers measure at once, as they would train."""
    import torch

    from pipeloom.parallel.mesh import Mesh
    from pipeloom.schedule.transforms import half_split
    from pipeloom.train.report.layer_bytes import layer_bytes
    from pipeloom.train.report.layer_times import layer_times, segment_times
    from pipeloom.train.report.link_times import copy_times, link_times
    from pipeloom.train.tuning import tune_process

    if layout.config.train.tune_cpu:
        tune_process()
    device = context.device
    links = copy_times(device, repeats)
    if context.world_size > 1:
        with context.waiting("the other processes to measure links", "evaluation"):
            mesh = Mesh.of(layout.mesh) if layout.world_size == context.world_size else None
            links += link_times(mesh, device, repeats)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    with context.waiting("the other processes to measure layers", "evaluation"):
        sizes = layer_bytes(
            replace(layout, schedule=half_split(layout.schedule))
        )  # so that what W reads is measured too
        return DeviceProfile(
            name,
            layer_times(layout, device, repeats, () if layout.config.train.compile != "none" else _parts(sizes)),
            sizes,
            segment_times(layout, device, repeats),
            links,
        )


def _parts(sizes: Sequence[LayerBytes]) -> list[str]:
    """Return the names of the parts of the layers, in the order of their first calls."""
    return list(dict.fromkeys(part for each in sizes for part in each.parts))


def _form(layout: Layout, profile: DeviceProfile) -> dict[str, Any]:
    """Return the JSON form: the costs of the layout's stages, and everything measured."""
    from pipeloom.traces.timelines import costs_dict

    segments = profile.segments
    exchanges = (link for link in profile.links if (link.operation, link.axis) in _EXPERT_LINKS)
    exchange = next(exchanges, None)
    talk = exchange.time(segments.rows) if segments is not None and exchange is not None else 0.0
    return {
        "costs": {"of": "a stage", **costs_dict(_stage_costs(layout, profile))},
        "device": profile.device,
        "microbatch": [max(layout.microbatch_sizes), layout.config.train.seq_len],
        "layers": [
            {
                "name": each.name,
                "layers": each.layers,
                "seconds": {kind: sample._asdict() for kind, sample in each.seconds.items()},
                "seconds_of_one_sequence": {kind: sample._asdict() for kind, sample in each.one.items()},
                "bytes": asdict(profile.bytes[each.layers[0]]),
            }
            for each in profile.layers
        ],
        "segments": None
        if segments is None
        else {
            "attention": [each.median for each in segments.attention],
            "experts": [each.median for each in segments.experts],
            "dispatch": talk,
            "combine": talk,
            "layers": max(1, segments.layers // layout.schedule.positions),
        },
        "links": [link.as_dict() for link in profile.links],
    }


def _stage_costs(layout: Layout, profile: DeviceProfile) -> Costs:
    """Return `Costs` of the layout's stages, in seconds and bytes: sums over their layers; a hop is the slowest message."""
    from pipeloom.config.standing_bytes import spans
    from pipeloom.config.volume import boundary_bytes
    from pipeloom.train.report.step_bytes import predicted_costs

    of_layer = {number: each.seconds for each in profile.layers for number in each.layers}

    def of_stages(kind: str) -> tuple[float, ...]:
        return tuple(sum(of_layer[at][kind].median for at in range(*span)) for span in spans(layout))

    times: dict[str, Any] = {name: of_stages(kind) for name, kind in _KINDS.items()}
    letters = sorted({kind for seconds in of_layer.values() for kind in seconds if kind.startswith("R:")})
    times["parts"] = {letter.removeprefix("R:"): of_stages(letter) for letter in letters}
    sends = [link for link in profile.links if link.operation == "send"]
    if sends:
        times |= {
            "p2p": max(link.latency for link in sends),
            "bandwidth": min(link.bandwidth for link in sends),
        }
    sizes = predicted_costs(layout, profile.bytes)
    return replace(sizes, **times, microbatch=(), message=float(max(boundary_bytes(layout))))


def _lines(form: dict[str, Any]) -> list[str]:
    """Return the tables: layers, segments, and links at three sizes."""
    from pipeloom.schedule.channels import size_words

    def ms(sample: dict[str, float]) -> str:
        return f"{1e3 * sample['median']:.3g} ±{sample['spread'] / (sample['median'] or 1.0):.0%}"

    samples, tokens = form["microbatch"]
    rows = [["layer, ms", *_KINDS.values()]]
    for each in form["layers"]:
        times = [ms(each["seconds"][kind]) for kind in _KINDS.values()]
        number = f" x{len(each['layers'])}" if len(each["layers"]) > 1 else ""
        rows.append([each["name"][-18:] + number, *times])
    lines = [
        f"{form['device']}; micro-batches of {samples} x {tokens} tokens; medians and their spread",
        *aligned(rows),
    ]
    names = {"input": "kept", "saved": "saved", "pending": "pending"}
    sizes = [[each["name"][-18:], *(size_words(each["bytes"][name]) for name in names)] for each in form["layers"]]
    lines += aligned([["layer, bytes", *names.values()], *sizes])
    rows = [
        [each["name"][-18:], part, ms(each["seconds"][f"R:{part}"]), size_words(size)]
        for each in form["layers"]
        for part, size in each["bytes"]["parts"].items()
        if f"R:{part}" in each["seconds"]
    ]
    lines += aligned([["layer", "part", "ms of its R", "saved"], *rows]) if rows else []
    if (segments := form["segments"]) is not None:
        lines.append("a block with experts, ms:")
        rows = [["", "F", "I", "W"]]
        rows += [[name, *(f"{1e3 * time:.3g}" for time in segments[name])] for name in ("attention", "experts")]
        lines += aligned(rows)
        lines.append(
            f"dispatch and combine: {1e3 * segments['dispatch']:.3g} ms each"
            if segments["dispatch"]
            else "dispatch and combine count 0: no all-to-all was measured (--processes with parallel.ep)"
        )
    rows = [["link", "operation", "latency µs", "MB/s"]]
    rows[0] += [size_words(size) for size in form["links"][0]["sizes"][1::2]]
    for link in form["links"]:
        between = "-".join(map(str, link["ranks"])) if link["operation"] == "send" else ""
        line = [f"{link['axis']} {between}".strip(), link["operation"]]
        line += [f"{1e6 * link['latency']:.3g}", f"{link['bandwidth'] / 1e6:,.0f}"]
        rows.append(line + [f"{1e3 * median:.3g} ms" for median, _ in link["seconds"][1::2]])
    return [*lines, *aligned(rows)]


def _chart(form: dict[str, Any]) -> str:
    """Return an SVG chart: bandwidth by size of each link and operation."""
    from math import log2

    from pipeloom.draw.chart import Panel, chart

    lines = {
        " ".join([link["axis"], link["operation"], *map(str, link["ranks"] if link["operation"] == "send" else ())]): [
            (log2(size), size / seconds[0] / 1e6) for size, seconds in zip(link["sizes"], link["seconds"], strict=True)
        ]
        for link in form["links"]
    }
    return chart(f"bandwidth by size on {form['device']}", "log2 of the bytes", [Panel("MB/s", lines)])
