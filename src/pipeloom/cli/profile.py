"""`pipeloom profile`: what a model's layers, and the links between processes, cost on this device."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from pipeloom.cli.options import flag, with_options
from pipeloom.cli.output import emit, json_flag, require_writable, write
from pipeloom.cli.workers import layout_of_workers, require_torch, result_of_workers, words_of
from pipeloom.draw.chart import Panel, chart
from pipeloom.draw.figures import in_blocks
from pipeloom.schedule.channels import size_words
from pipeloom.shapes.hub import presets
from pipeloom.shapes.layers import layer_sizes
from pipeloom.traces.timelines import costs_dict

if TYPE_CHECKING:
    from pipeloom.config import Layout
    from pipeloom.measure.device_profile import DeviceProfile

_EXPERT_LINKS = {("all-to-all", axis) for axis in ("ep", "world")}
_TIMEOUT = 600.0  # seconds that ranks wait for one that measures


@with_options()
def command(
    context: typer.Context,
    processes: int = flag(1, "N", "Processes that measure at once; 2 or more: their links too.", min=1, max=1024),
    repeats: int = flag(9, "N", "Repetitions, after a warm-up.", min=2, max=1000),
    output: Path | None = flag(None, "FILE", "Write all of it as JSON, which --costs FILE and --segments FILE take."),
    svg: Path | None = flag(None, "FILE", "Draw links and copies: bandwidth by size."),
    as_json: bool = json_flag(),
) -> None:
    """Measure a model's layers and the links on this device.

    pipeloom profile tiny --processes 2 --output costs.json

    MODEL is as CONFIG of `pipeloom train`, with its flags; or a preset of `pipeloom plan`, or a Hugging Face directory. One layer
    of each kind runs: F, I, W, B and R of one micro-batch and of one sequence, medians with their spread. The costs in the file
    are those of the configuration's stages, in seconds.
    """
    require_torch("profile")
    require_writable(output, svg)
    layout = _layout(context.args)
    code, report = _measure(layout, processes, repeats, words_of(context))
    if code or not report:
        raise typer.Exit(code)
    form: dict[str, Any] = json.loads(report)
    if output is not None:
        write(output, lambda: report + "\n")
    if svg is not None:
        write(svg, lambda: _chart(form))
    emit(as_json, lambda: form, lambda: _lines(form))


def _layout(arguments: Sequence[str]) -> Layout:
    """Return the layout of the command line: a configuration, a preset of the planner, or a Hugging Face directory."""
    from pipeloom.config import load_layout, split_arguments
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
        print(
            f"measuring layers and links with {processes} process{'es' * (processes > 1)}", file=sys.stderr, flush=True
        )

    def body(context: Any) -> str:
        from pipeloom.measure.device_profile import profiled
        from pipeloom.train.tuning import tune_process

        tune_process()
        return json.dumps(_form(layout, profiled(layout, context.device, repeats, context.waiting)), allow_nan=False)

    workers = layout_of_workers(processes, layout.config.train.device, _TIMEOUT)
    return result_of_workers("profile", words, workers, body)


def _require_memory(layout: Layout, processes: int) -> None:
    """Raise CapacityError where the weights and gradients of one layer of each kind exceed this machine's memory."""
    from pipeloom.train.workers.preflight import require_bytes

    config = layout.config
    count = sum(size.parameters for size in set(layer_sizes(config.model.shape(), config.train.seq_len)))
    if config.train.device != "cuda":
        advice = "shrink them with --model.vocab_size, --model.intermediate_size or --model.hidden_size"
        require_bytes(8 * count * processes, "layers, one of each kind, with their gradients", advice)


def _form(layout: Layout, profile: DeviceProfile) -> dict[str, Any]:
    """Return the JSON form: the costs of the layout's stages, and everything measured."""
    from pipeloom.measure.device_profile import measured_costs

    segments = profile.segments
    exchanges = (link for link in profile.links if (link.operation, link.axis) in _EXPERT_LINKS)
    exchange = next(exchanges, None)
    talk = exchange.time(segments.rows) if segments is not None and exchange is not None else 0.0
    return {
        "costs": costs_dict(replace(measured_costs(layout, profile), microbatch=()), "a stage"),
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
            "chunks": layout.config.parallel.ep_chunks,
            "layers": max(1, segments.layers // layout.schedule.positions),
        },
        "links": [link.as_dict() for link in profile.links],
    }


def _lines(form: dict[str, Any]) -> list[str]:
    """Return the tables: layers, segments, and links at three sizes."""
    from pipeloom.measure.device_profile import KINDS

    def ms(sample: dict[str, float]) -> str:
        return f"{1e3 * sample['median']:.3g} ±{sample['spread'] / (sample['median'] or 1.0):.0%}"

    samples, tokens = form["microbatch"]
    rows = [["layer, ms", *KINDS.values()]]
    for each in form["layers"]:
        times = [ms(each["seconds"][kind]) for kind in KINDS.values()]
        number = f" x{len(each['layers'])}" if len(each["layers"]) > 1 else ""
        rows.append([each["name"][-18:] + number, *times])
    lines = [
        f"{form['device']}; micro-batches of {samples} x {tokens} tokens; medians and their spread",
        *in_blocks(rows),
    ]
    names = {"input": "kept", "saved": "saved", "pending": "pending"}
    sizes = [[each["name"][-18:], *(size_words(each["bytes"][name]) for name in names)] for each in form["layers"]]
    lines += in_blocks([["layer, bytes", *names.values()], *sizes])
    rows = [
        [each["name"][-18:], part, ms(each["seconds"][f"R:{part}"]), size_words(size)]
        for each in form["layers"]
        for part, size in each["bytes"]["parts"].items()
        if f"R:{part}" in each["seconds"]
    ]
    lines += in_blocks([["layer", "part", "ms of its R", "saved"], *rows]) if rows else []
    if (segments := form["segments"]) is not None:
        lines.append("a block with experts, ms:")
        rows = [["", "F", "I", "W"]]
        rows += [[name, *(f"{1e3 * time:.3g}" for time in segments[name])] for name in ("attention", "experts")]
        lines += in_blocks(rows)
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
    words = (
        "F forward, I input gradient, W weight gradient, B both at once, R the forward again; kept: the layer's input; saved: "
        "what a backward needs besides; pending: what W needs after I; latency and MB/s: time = latency + bytes / MB/s, fitted"
    )
    return [*lines, *in_blocks(rows), words]


def _chart(form: dict[str, Any]) -> str:
    """Return an SVG chart: bandwidth by size of each link and operation."""
    from math import log2

    lines = {
        " ".join([link["axis"], link["operation"], *map(str, link["ranks"] if link["operation"] == "send" else ())]): [
            (log2(size), size / seconds[0] / 1e6) for size, seconds in zip(link["sizes"], link["seconds"], strict=True)
        ]
        for link in form["links"]
    }
    return chart(f"bandwidth by size on {form['device']}", "log2 of the bytes", [Panel("MB/s", lines)])
