"""`pipeloom schedule`: one schedule, simulated and drawn, or written in another form."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipeloom.cli import schedule_arguments
from pipeloom.errors import UsageError

if TYPE_CHECKING:
    from pipeloom.schedule import Costs, Timeline


def command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A family, a CSV or JSON file, or module:function.")],
    ranks: schedule_arguments.RanksOption = None,
    microbatches: schedule_arguments.MicrobatchesOption = None,
    chunks: schedule_arguments.ChunksOption = None,
    option: schedule_arguments.FamilyOption = None,
    transform: schedule_arguments.TransformsOption = None,
    forward: schedule_arguments.ForwardOption = "1",
    input_grad: schedule_arguments.InputGradOption = "1",
    weight_grad: schedule_arguments.WeightGradOption = "1",
    p2p: schedule_arguments.P2pOption = "0",
    held: schedule_arguments.HeldOption = "1",
    all_to_all: schedule_arguments.AllToAllOption = "0",
    pair: schedule_arguments.PairOption = None,
    microbatch_costs: schedule_arguments.MicrobatchCostsOption = None,
    message: schedule_arguments.MessageOption = None,
    overlap_p2p: schedule_arguments.OverlapP2pOption = True,
    as_json: schedule_arguments.JsonOption = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print the schedule in torch's CSV format.")] = False,
    svg: schedule_arguments.SvgOption = None,
    png: schedule_arguments.PngOption = None,
    html: schedule_arguments.HtmlOption = None,
    trace: schedule_arguments.TraceOption = None,
    width: schedule_arguments.WidthOption = None,
) -> None:
    """Draw a schedule, or write it in another format.

    Costs are those of one stage: one number, or one number per stage, separated by commas.

    pipeloom schedule interleaved --ranks 4 --microbatches 9 --option rounds=tail
    """
    if as_json and csv:
        raise UsageError("--json and --csv both print on standard output; choose one")
    require_outputs(svg=svg, png=png, html=html, trace=trace)
    from pipeloom.schedule import simulate

    transforms = schedule_arguments.transforms_of(transform or ())
    costs = schedule_arguments.costs_of(
        (forward, input_grad, weight_grad, p2p), held, (all_to_all, pair), microbatch_costs, message
    )
    options = schedule_arguments.options_of(option or ())
    schedule = schedule_arguments.schedule_of(name, (ranks, microbatches, chunks), options, costs, transforms)
    timeline = simulate(schedule, costs, overlap_p2p=overlap_p2p)
    write_files([timeline], svg=svg, png=png, html=html, trace=trace, width=width)
    if csv:
        from pipeloom.schedule.csv_form import to_csv

        sys.stdout.write(to_csv(schedule))
    elif as_json:
        from pipeloom.schedule.json_form import parts_of_json

        sys.stdout.writelines(parts_of_json(schedule, _figures_and_costs(timeline)))
        print()
    else:
        from pipeloom.draw import terminal

        sys.stdout.write(terminal(timeline, width=width or shutil.get_terminal_size().columns))


def as_dict(timeline: Timeline) -> dict[str, object]:
    """Return the JSON form of the schedule together with the costs of a stage and the figures of the timeline."""
    from pipeloom.schedule.json_form import to_dict

    return to_dict(timeline.schedule) | _figures_and_costs(timeline)


def _figures_and_costs(timeline: Timeline) -> dict[str, object]:
    from pipeloom.draw import figures

    return {"costs": {"of": "a stage", **costs_dict(timeline.costs)}} | figures(timeline)


def costs_dict(costs: Costs) -> dict[str, object]:
    """Return the costs by their names in `Costs`; optional ones only where they are set."""
    always = ("forward", "input_grad", "weight_grad", "p2p", "activation", "held")
    some = {
        "message": costs.message,
        "all_to_all": costs.all_to_all,
        "pair": costs.pair,
        "microbatch": costs.microbatch,
    }
    return {name: getattr(costs, name) for name in always} | {name: value for name, value in some.items() if value}


def require_outputs(
    *, svg: Path | None = None, png: Path | None = None, html: Path | None = None, trace: Path | None = None
) -> None:
    """Raise UsageError for files that cannot be written, before the work whose result they are to hold."""
    if png is not None:
        from pipeloom.draw.svg import require_png

        require_png()
    for path in (svg, png, html, trace):
        if path is None:
            continue
        if path.is_dir():
            raise UsageError(f"cannot write {path}: it is a directory")
        if not path.parent.is_dir():
            raise UsageError(f"cannot write {path}: there is no directory {path.parent}")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise UsageError(f"cannot write {path}: {os.strerror(errno.EACCES)}")


def write_files(
    timelines: Sequence[Timeline],
    *,
    svg: Path | None = None,
    png: Path | None = None,
    html: Path | None = None,
    trace: Path | None = None,
    width: int | None = None,
) -> None:
    """Write the files whose paths are given; the trace contains only the first timeline."""
    from pipeloom import draw

    write_pictures(lambda: draw.svg(timelines, max(width or draw.USUAL_WIDTH, draw.LEAST_WIDTH)), svg, png)
    if html is not None:
        write(html, lambda: draw.html(timelines))
    if trace is not None:
        write(trace, lambda: json.dumps(draw.trace(timelines[0])))


def write_pictures(drawing: Callable[[], str], svg: Path | None, png: Path | None) -> None:
    """Write an SVG document to `svg`, and rendered as PNG to `png`, where they are given."""
    from pipeloom.draw.svg import png as rendered

    if svg is not None:
        write(svg, drawing)
    if png is not None:
        write(png, lambda: rendered(drawing()))


def write(path: Path, content: Callable[[], str | bytes]) -> None:
    """Write the file and report it on standard error, which keeps standard output free for the command's result.

    Raises UsageError if the file cannot be written.
    """
    data = content()
    try:
        path.write_bytes(data if isinstance(data, bytes) else data.encode("utf-8"))
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from None
    print(f"wrote {path}", file=sys.stderr)
