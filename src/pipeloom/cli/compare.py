"""`pipeloom compare`: several schedules that do the same work, in one table."""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from pipeloom.cli import flags, papers, schedule_arguments, volumes
from pipeloom.cli import sweep as sweeps
from pipeloom.cli.schedule import require_outputs, write_files, write_pictures
from pipeloom.cli.sweep import SIZES, Sweep
from pipeloom.errors import PipeloomError, UsageError

if TYPE_CHECKING:
    from pipeloom.schedule import Costs, Schedule, Timeline

Sizes = tuple[int | None, int | None, int | None]
_FIGURES = (
    ("", "makespan"),
    ("bubble", "ratio"),
    ("bubble", "rate"),
    ("span", "rate"),
    ("", "period"),
    ("mes.", "count"),
    ("mes.", "size"),
    ("act.", "max"),
    ("act.", "mean"),
    ("mem.", "max"),
)


class Row(NamedTuple):
    """One schedule of the comparison: its name on the command line, with options, and its timeline."""

    label: str
    timeline: Timeline


def command(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME[:key=value,…] …", help="Schedules, with options; or all.")
    ] = None,
    ranks: schedule_arguments.RanksOption = None,
    microbatches: schedule_arguments.MicrobatchesOption = None,
    chunks: schedule_arguments.ChunksOption = None,
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
    svg: schedule_arguments.SvgOption = None,
    png: schedule_arguments.PngOption = None,
    html: schedule_arguments.HtmlOption = None,
    width: schedule_arguments.WidthOption = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            "--sweep",
            metavar="SIZE=A..B",
            help="Tabulate makespan and memory over a range of ranks, microbatches or chunks; --svg draws them.",
        ),
    ] = None,
    volume: Annotated[
        str | None,
        typer.Option(
            "--volume",
            metavar="CONFIG",
            help="Compare the bytes that a step of this configuration sends, as a pipeline and as tensor parallelism.",
        ),
    ] = None,
    paper: Annotated[
        str | None, typer.Option("--paper", metavar="NAME", help="Recompute a paper's table; available: zero-bubble.")
    ] = None,
) -> None:
    """Compare schedules that do the same work.

    Costs are those of 1/p of the model; a stage of a schedule with v chunks per rank costs 1/v of them.

    pipeloom compare 1f1b interleaved:chunks=4 gpipe --ranks 4 --microbatches 8

    pipeloom compare all --ranks 8 --microbatches 32

    pipeloom compare --volume my.toml --ranks 4

    pipeloom compare --paper zero-bubble
    """
    require_outputs(svg=svg, png=png, html=html)
    sizes = (ranks, microbatches, chunks)
    if paper is not None:
        _print_paper(paper, names or (), as_json)
        return
    if volume is not None:
        _print_volumes(volume, names or (), sizes, as_json)
        return
    if not names:
        raise UsageError("name the schedules to compare, or give all")
    for spec in names if len(names) > 1 else ():  # before others are simulated
        if spec != "all":
            schedule_arguments.require_schedule(*parse_spec(spec))
    costs = schedule_arguments.costs_of(
        (forward, input_grad, weight_grad, p2p), held, (all_to_all, pair), microbatch_costs, message
    )
    if sweep is not None:
        if html is not None:
            raise UsageError("--html draws timelines and --sweep compares figures; leave one of them out, or use --svg")
        _sweep(Sweep.of(sweep), names, sizes, (costs, overlap_p2p), as_json, (svg, png, width))
        return
    rows, refused = _rows(names, sizes, costs, overlap_p2p)
    write_files([row.timeline for row in rows], svg=svg, png=png, html=html, width=width)
    if as_json:
        print(json.dumps(_as_dict(rows, refused, costs), allow_nan=False))
    else:
        print(table(rows, refused, costs, width or shutil.get_terminal_size().columns))


def _print_paper(paper: str, names: Sequence[str], as_json: bool) -> None:
    if names:
        raise UsageError(f"--paper has its own schedules; leave out {' '.join(names)}")
    rows = papers.recompute(paper)
    print(json.dumps({"paper": paper, "rows": rows}, allow_nan=False) if as_json else papers.table(rows))


def _print_volumes(config: str, names: Sequence[str], sizes: Sizes, as_json: bool) -> None:
    if names:
        raise UsageError(f"--volume compares layouts of one configuration; leave out {' '.join(names)}")
    ranks, microbatches, _ = sizes
    layouts = volumes.of(config, ranks, microbatches)
    print(json.dumps(volumes.as_dict(layouts)) if as_json else volumes.table(layouts))


def _rows(
    names: Sequence[str], sizes: Sizes, costs: Costs, overlap_p2p: bool
) -> tuple[list[Row], list[tuple[str, str]]]:
    """Return a row for each schedule, and (name, reason) of each family of `all` that does not support these sizes.

    Raises the error of a schedule named explicitly, and UsageError if no schedule supports the sizes.
    """
    from pipeloom.schedule.families import FAMILIES

    rows: list[Row] = []
    refused: list[tuple[str, str]] = []
    for spec in names:
        for one in FAMILIES if spec == "all" else (spec,):
            try:
                rows.append(_row(one, sizes, costs, overlap_p2p))
            except PipeloomError as error:
                if spec != "all" or None in sizes[:2]:
                    raise
                refused.append((one, flags.words(error)))
    if not rows:
        raise UsageError("no schedule supports these sizes:\n" + "\n".join(f"  {n}: {why}" for n, why in refused))
    return rows, refused


def _sweep(
    sweep: Sweep,
    names: Sequence[str],
    sizes: Sizes,
    simulation: tuple[Costs, bool],
    as_json: bool,
    files: tuple[Path | None, Path | None, int | None],
) -> None:
    """Print or draw the comparison at every value of the sweep."""
    from pipeloom.draw import LEAST_WIDTH, USUAL_WIDTH
    from pipeloom.draw.figures import cost_numbers
    from pipeloom.schedule.families import FAMILIES

    given = sizes[SIZES.index(sweep.size)]
    if given is not None:
        raise UsageError(f"--{sweep.size} is {given}, but --sweep varies it; leave one of them out")

    def simulated(name: str, value: int) -> Timeline:
        at = SIZES.index(sweep.size)
        point: Any = (*sizes[:at], value, *sizes[at + 1 :])
        if sweep.size == "chunks" and not schedule_arguments.takes_chunks(parse_spec(name)[0]):
            raise UsageError(f"the number of chunks of {name} is fixed")
        return _row(name, point, *simulation).timeline

    every = [one for spec in names for one in (FAMILIES if spec == "all" else (spec,))]
    series = sweep.run(every, simulated)
    costs = cost_numbers(simulation[0])
    svg, png, width = files
    given_sizes = [
        f"{value} {size.replace('microbatches', 'micro-batches')}"
        for size, value in zip(SIZES, sizes, strict=True)
        if value
    ]
    fixed = ", ".join([*given_sizes, f"costs of 1/p of the model: {costs}"])
    write_pictures(lambda: sweeps.drawing(sweep, series, fixed, max(width or USUAL_WIDTH, LEAST_WIDTH)), svg, png)
    print(json.dumps(sweeps.as_dict(sweep, series), allow_nan=False) if as_json else sweeps.table(sweep, series, costs))


def _row(spec: str, sizes: Sizes, costs: Costs, overlap_p2p: bool) -> Row:
    from pipeloom.schedule import simulate
    from pipeloom.schedule.families import FAMILIES, canonical_name

    name, options = parse_spec(spec)
    name = canonical_name(name)
    ranks, microbatches, chunks = sizes
    if "chunks" in options:
        chunks = options.pop("chunks")
    elif not schedule_arguments.takes_chunks(name):
        chunks = None
    schedule = schedule_arguments.schedule_of(name, (ranks, microbatches, chunks), options)
    costs = share(costs, schedule)
    if name in FAMILIES and "costs" in inspect.signature(FAMILIES[name]).parameters:
        schedule = schedule_arguments.schedule_of(name, (ranks, microbatches, chunks), options, costs)
    return Row(spec, simulate(schedule, costs, overlap_p2p=overlap_p2p))


def parse_spec(spec: str) -> tuple[str, dict[str, Any]]:
    """Split `name:key=value,key=value` into name and options; a colon without `=` after it belongs to the name."""
    name, colon, options = spec.rpartition(":")
    if not colon or "=" not in options:
        return spec, {}
    return name, schedule_arguments.options_of(options.split(","))


def share(costs: Costs, schedule: Schedule) -> Costs:
    """Return the costs of a stage of `schedule` from `costs` of 1/p of the model (p values: one per p-th of the model).

    A stage is one of `positions` equal parts of the model, so its costs are p / positions of those given (1/v with v chunks
    per rank). Raises UsageError for a cost with neither one value nor p values.
    """
    factor = schedule.ranks / schedule.positions
    spread: dict[str, Any] = {}
    for name in ("forward", "input_grad", "weight_grad", "held", "all_to_all", "pair"):
        values = getattr(costs, name)
        if isinstance(values, tuple):
            if len(values) != schedule.ranks:
                raise UsageError(
                    f"{flags.COSTS[name]} has {len(values)} values; compare takes costs of 1/p of the model: give one number, "
                    f"or {schedule.ranks}"
                )
            spread[name] = tuple(values[at * schedule.ranks // schedule.positions] for at in schedule.position_of)
    return replace(costs, **spread).scaled(factor)


def _as_dict(rows: Sequence[Row], refused: Sequence[tuple[str, str]], costs: Costs) -> dict[str, Any]:
    from pipeloom.cli.schedule import as_dict, costs_dict
    from pipeloom.draw.figures import full_rank

    schedules = []
    for row in rows:
        full = full_rank(row.timeline.schedule)
        peaks = [peak * full for peak in row.timeline.peak_activations]
        schedules.append({"label": row.label, **as_dict(row.timeline), "full_rank_activations": peaks})
    return {
        "schedules": schedules,
        "costs": {"of": "1/p of the model", **costs_dict(costs)},
        "refused": [{"name": name, "reason": why} for name, why in refused],
    }


def table(rows: Sequence[Row], refused: Sequence[tuple[str, str]], costs: Costs, width: int) -> str:
    """Return the comparison as text: one line per schedule, the meaning of the figures, and the skipped schedules."""
    from pipeloom.draw.figures import BUBBLE_WORDS, cost_numbers

    figures_of_rows = [_cells(row.timeline) for row in rows]
    # where peak memory equals peak activations, its column would only repeat them
    memory = any(line["mem.", "max"] != line["act.", "max"] for line in figures_of_rows)
    columns = [
        key for key in _FIGURES if (memory or key != ("mem.", "max")) and (costs.message or key != ("mes.", "size"))
    ]
    cells = [[line[key] for key in columns] for line in figures_of_rows]
    heads = [[head[at] for head in columns] for at in (0, 1)]
    wide = [max(len(line[at]) for line in [*heads, *cells]) for at in range(len(heads[0]))]
    room = width - sum(wide) - 2 * len(wide)
    labels = [row.label for row in rows]
    first = max(len("schedule"), *(len(label) for label in labels if len(label) <= room), 0)
    lines = []
    for label, line in zip(["", "schedule", *labels], [*heads, *cells], strict=True):
        figures = "".join(f"  {cell:>{w}}" for cell, w in zip(line, wide, strict=True))
        if len(label) > first:
            lines.append(label)
            label = ""
        lines.append(f"{label:<{first}}{figures}".rstrip())
    lines.insert(2, "─" * (first + sum(wide) + 2 * len(wide)))
    notes = [
        "",
        f"costs of 1/p of the model: {cost_numbers(costs)}",
        "  (a stage of a schedule with v chunks per rank costs 1/v of them)",
        *(f"{key.replace('_', ' ')}: {words}" for key, words in BUBBLE_WORDS.items()),
        "mes.: number of messages between ranks in a step" + (", and their total size" if costs.message else ""),
        "act.: peak activations in full-rank units (micro-batches of 1/p of the model),",
        "  the maximum and the mean over the ranks",
    ]
    if memory:
        notes += [
            "mem.: peak memory in the same units: less where W or an overlapped pair's segments free",
            "  memory earlier",
        ]
    if refused:
        notes += ["", "skipped (sizes not supported):", *(f"  {name}: {why}" for name, why in refused)]
    return "\n".join([*lines, *notes])


def _cells(timeline: Timeline) -> dict[tuple[str, str], str]:
    from pipeloom.draw.figures import full_rank, messages, number
    from pipeloom.schedule import period
    from pipeloom.schedule.channels import size_words

    full = full_rank(timeline.schedule)
    peaks = [peak * full for peak in timeline.peak_activations]
    sent = messages(timeline.schedule, timeline.costs)
    values = (
        number(timeline.makespan),
        f"{timeline.bubble_ratio:.4f}",
        f"{timeline.bubble_rate:.4f}",
        f"{timeline.span_bubble_rate:.4f}",
        number(period(timeline.schedule, timeline.costs, overlap_p2p=timeline.overlap_p2p)),
        str(sent["count"]),
        size_words(sent["size"]),
        number(max(peaks)),
        number(sum(peaks) / len(peaks)),
        number(max(timeline.peak_memory)),
    )
    return dict(zip(_FIGURES, values, strict=True))
