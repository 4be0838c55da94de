"""`pipeloom compare`: several schedules that do the same work, in one table."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any

from pipeloom.cli import lengths, papers
from pipeloom.cli import sweep as sweeps
from pipeloom.cli.options import (
    CostFlags,
    LimitFlags,
    SendFlags,
    Sizes,
    SliceFlags,
    argument,
    flag,
    message_with_flags,
    name_of,
    parse_spec,
    require_schedule,
    schedule_of,
    takes_chunks,
    with_options,
)
from pipeloom.cli.output import OutputFlags, as_dict, emit
from pipeloom.cli.sweep import Sweep
from pipeloom.draw.figures import cost_numbers, in_blocks
from pipeloom.draw.tables import full_rank_peaks, shared_costs, shown_figures
from pipeloom.errors import COLUMNS, ConfigError, PipeloomError, UsageError
from pipeloom.schedule import Costs, Timeline, simulate
from pipeloom.schedule.channels import size_words
from pipeloom.schedule.families import FAMILIES, canonical_name
from pipeloom.traces.timelines import costs_dict

Row = tuple[str, "Timeline"]
"""A schedule's name on the command line, with options, and its timeline."""


@dataclass(frozen=True)
class TableFlags:
    """Tables of another kind than one comparison."""

    sweep: str | None = flag(
        None,
        "SIZE=A..B",
        "Tabulate makespan and memory over a range of ranks, microbatches or chunks; --svg draws them.",
    )
    volume: str | None = flag(
        None,
        "CONFIG",
        "Compare the bytes that a step of this configuration sends, as a pipeline and as tensor parallelism.",
    )
    lengths: str | None = flag(
        None, "FILE", "Plan a step of sequences of these lengths, beside simple packings; costs are of 1,000 tokens."
    )
    replicas: int = flag(1, "N", "Data-parallel replicas of --lengths.", min=1)
    tokens: int | None = flag(None, "N", "The most tokens of a micro-batch of --lengths; default: the longest.", min=1)
    attention_tokens: int | None = flag(
        None, "N", "Tokens of a sequence of --lengths at which attention takes as long as all else.", min=1
    )
    paper: str | None = flag(None, "NAME", "Recompute a published table: zero-bubble, moe or pipemorph.")

    def require(self, names: Sequence[str], output: OutputFlags, sizes: Sizes, costs: Sequence[Any]) -> None:
        """Raise UsageError for schedules, drawings, sizes and costs (dataclasses of flags) that a table has of its own."""
        for table, value in vars(self).items():
            if table not in ("volume", "paper", "lengths") or value is None:
                continue
            if names:
                raise UsageError(f"--{table} compares schedules of its own; leave out {' '.join(names)}")
            if table != "lengths" and output.drawn:
                raise UsageError(f"--{table} prints a table and draws nothing; leave out --{output.drawn[0]}")
            of_others = {"paper": (sizes, *costs), "volume": costs}.get(table, ())
            for spec, given in ((spec, getattr(group, spec.name)) for group in of_others for spec in fields(group)):
                if given != spec.default:
                    raise UsageError(f"--{table} has sizes or costs of its own; leave out {name_of(spec)}")
        if self.lengths is None and (self.replicas, self.tokens, self.attention_tokens) != (1, None, None):
            raise UsageError("--replicas, --tokens and --attention-tokens are of --lengths FILE, which is not given")


@with_options(without=("csv", "trace"))
def command(
    *,
    names: list[str] | None = argument(None, "NAME[:key=value,…] …", "Schedules, with options; or all."),
    sizes: Sizes,
    costs: CostFlags,
    cuts: SliceFlags,
    sending: SendFlags,
    limits: LimitFlags,
    tables: TableFlags,
    output: OutputFlags,
) -> None:
    """Compare schedules that do the same work.

    Costs are those of 1/p of the model; a stage of a schedule with v chunks per rank costs 1/v of them.

    pipeloom compare 1f1b interleaved:chunks=4 gpipe --ranks 4 --microbatches 8

    pipeloom compare all --ranks 8 --microbatches 32

    pipeloom compare --volume my.toml --ranks 4

    pipeloom compare --lengths lengths.txt --ranks 4 --replicas 2 --attention-tokens 8192

    pipeloom compare --paper moe
    """
    output.require()
    tables.require(names or (), output, sizes, (costs, cuts, sending, limits))
    if tables.paper is not None:
        rows = papers.recompute(tables.paper)
        emit(
            output.as_json,
            lambda: {"paper": tables.paper, "rows": rows},
            lambda: papers.table(str(tables.paper), rows),
        )
        return
    if tables.volume is not None:
        layouts = volumes_of(tables.volume, sizes)
        emit(output.as_json, lambda: layouts, lambda: volume_table(layouts))
        return
    if tables.lengths is not None:
        if sizes.ranks is None:
            raise UsageError("--lengths needs --ranks, such as --ranks 2")
        numbers, most = lengths.lengths_in(tables.lengths), (tables.replicas, tables.tokens, tables.attention_tokens)
        plans = lengths.plans_of(numbers, sizes.ranks, *most, costs.values())
        best = plans[0][1]
        output.draw(lengths.drawn(best), partial(lengths.token_lines, best), bound=best.bound)
        emit(output.as_json, lambda: lengths.as_dict(plans), lambda: lengths.table(plans))
        return
    if not names:
        raise UsageError("name the schedules to compare, or give all")
    for spec in names if len(names) > 1 else ():  # before others are simulated
        if spec != "all":
            require_schedule(*parse_spec(spec))
    work = Work(sizes, costs.values(), costs.overlap_p2p, cuts, sending)
    if tables.sweep is not None:
        if output.html is not None:
            raise UsageError("--html draws timelines and --sweep compares figures; leave one of them out, or use --svg")
        _sweep(Sweep.of(tables.sweep), names, work, output)
        return
    compared, refused = _rows(names, work)
    limit = limits.of(work.costs)
    output.draw([timeline for _, timeline in compared], limit=limit)
    emit(
        output.as_json,
        lambda: _as_dict(compared, refused, work.costs),
        lambda: table(compared, refused, work.costs, output.columns, limit),
    )


@dataclass(frozen=True)
class Work:
    """The work that all schedules of a comparison do; the costs are those of 1/p of the model."""

    sizes: Sizes
    costs: Costs
    overlap_p2p: bool
    cuts: SliceFlags = SliceFlags()
    sending: SendFlags = SendFlags()

    def timeline(self, spec: str) -> Timeline:
        """Simulate the schedule called `spec`, with options, for this work."""
        name, options = parse_spec(spec)
        name, sizes = canonical_name(name), self.sizes
        if "chunks" in options:
            sizes = replace(sizes, chunks=options.pop("chunks"))
        elif not takes_chunks(name):
            sizes = replace(sizes, chunks=None)
        schedule = schedule_of(name, sizes, options)
        costs = self.cuts.of(shared_costs(self.costs, schedule), schedule)
        if name in FAMILIES and "costs" in inspect.signature(FAMILIES[name]).parameters:
            schedule = schedule_of(name, sizes, options, costs)
        return simulate(schedule, self.sending.costs(costs, schedule), overlap_p2p=self.overlap_p2p)


def _rows(names: Sequence[str], work: Work) -> tuple[list[Row], list[tuple[str, str]]]:
    """Return a row for each schedule, and (name, reason) for each family of `all` that does not support these sizes.

    Raises the error of a schedule named explicitly, and UsageError if no schedule supports the sizes.
    """
    rows: list[Row] = []
    refused: list[tuple[str, str]] = []
    for spec in names:
        for one in _schedules(spec):
            try:
                rows.append((one, work.timeline(one)))
            except PipeloomError as error:
                if spec != "all" or work.sizes.missing:
                    raise
                refused.append((one, message_with_flags(error)))
    if not rows:
        raise UsageError("no schedule supports these sizes:\n" + "\n".join(f"  {n}: {why}" for n, why in refused))
    return rows, refused


def _schedules(spec: str) -> Iterable[str]:
    """Return the names that a word of the command line stands for."""
    return FAMILIES if spec == "all" else (spec,)


def _sweep(sweep: Sweep, names: Sequence[str], work: Work, output: OutputFlags) -> None:
    """Print or draw the comparison at every value of the sweep."""
    sizes = {size: value for size, value in vars(work.sizes).items() if value is not None}
    if sweep.size in sizes:
        raise UsageError(f"--{sweep.size} is {sizes[sweep.size]}, but --sweep varies it; leave one of them out")

    def simulated(name: str, value: int) -> Timeline:
        return replace(work, sizes=replace(work.sizes, **{sweep.size: value})).timeline(name)

    specs = [one for spec in names for one in _schedules(spec)]
    fixed_chunks = {one for one in specs if not takes_chunks(parse_spec(one)[0])} if sweep.size == "chunks" else set()
    series = sweep.run(specs, simulated, fixed_chunks)
    costs = cost_numbers(work.costs)
    given = [f"{value} {size.replace('microbatches', 'micro-batches')}" for size, value in sizes.items()]
    fixed = ", ".join([*given, f"costs of 1/p of the model: {costs}"])
    output.draw_as(lambda width: sweeps.drawing(sweep, series, fixed, width))
    swept = {"size": sweep.size, "values": list(sweep.values)}
    emit(output.as_json, lambda: {"sweep": swept, "series": series}, lambda: sweeps.table(sweep, series, costs))


def _as_dict(rows: Sequence[Row], refused: Sequence[tuple[str, str]], costs: Costs) -> dict[str, Any]:
    schedules = [
        {
            "label": label,
            **as_dict(timeline),
            "full_rank_activations": full_rank_peaks(timeline),
            "parameters": timeline.schedule.stages // timeline.schedule.positions,
        }
        for label, timeline in rows
    ]
    return {
        "schedules": schedules,
        "costs": costs_dict(costs, "1/p of the model"),
        "refused": [{"name": name, "reason": why} for name, why in refused],
    }


def table(
    rows: Sequence[Row],
    refused: Sequence[tuple[str, str]],
    costs: Costs,
    width: int,
    limit: float | None = None,
) -> list[str]:
    """Return the lines of the comparison: one per schedule, the meaning of the figures, and the skipped schedules.

    Args:
        limit: bytes of a device.
    """
    cells, notes = shown_figures(rows, costs, limit)
    lines = [*in_blocks(cells, min(width, COLUMNS)), "", *notes]
    if refused:
        lines += ["", "skipped (sizes not supported):", *(f"  {name}: {why.splitlines()[0]}" for name, why in refused)]
    return lines


def volumes_of(config: str, sizes: Sizes) -> dict[str, Any]:
    """Return the volumes of the model of `config`, as a pipeline and tensor-parallel; sizes that are None are as configured.

    "refused" holds the reason for each layout that the model cannot have; "linear_layer" what one layer sends per token between
    activations that are whole on every rank, as gathered columns or as rows. Raises ConfigError if it can have none of
    them, or if `config` cannot be read.
    """
    from pipeloom.config import load, load_layout
    from pipeloom.plan.volume import volumes

    config_of_file = load(config)
    count = sizes.ranks if sizes.ranks is not None else max(config_of_file.parallel.pp, config_of_file.parallel.tp, 2)
    m = sizes.microbatches if sizes.microbatches is not None else config_of_file.schedule.microbatches
    alone = {"parallel.pp": 1, "parallel.tp": count, "schedule.name": "gpipe"}
    layouts: list[dict[str, Any]] = []
    refused: list[dict[str, Any]] = []
    for label, axes in (
        (
            f"pipeline, {config_of_file.schedule.name}",
            {"parallel.pp": count, "parallel.tp": 1, "parallel.sp": False},
        ),
        ("tensor parallel", alone | {"parallel.sp": False}),
        ("tensor and sequence parallel", alone | {"parallel.sp": True}),
    ):
        try:
            layout = load_layout(config, {"schedule.microbatches": m, **axes})
        except PipeloomError as error:
            refused.append({"label": label, "reason": str(error).splitlines()[0]})
        else:
            sent = [asdict(each) for each in volumes(layout)]
            layouts.append({"label": label, "workers": layout.world_size, "volumes": sent})
    if not layouts:
        raise ConfigError([f"{row['label']}: {row['reason']}" for row in refused])
    model, others = config_of_file.model, count - 1
    inputs, outputs = model.hidden_size, model.intermediate_size
    values = {"column": others * (outputs + 2 * inputs), "row": others * (2 * outputs + inputs)}
    linear = {"ranks": count, "inputs": inputs, "outputs": outputs, "values_per_token": values}
    return {"layouts": layouts, "refused": refused, "linear_layer": linear}


def volume_table(rows: dict[str, Any]) -> list[str]:
    """Return a line for each layout: bytes, and messages or collective operations, by kind, of all workers in a step."""
    linear = rows["linear_layer"]
    by_kind = [{each["kind"]: each for each in row["volumes"]} for row in rows["layouts"]]
    kinds = list(dict.fromkeys(kind for sent in by_kind for kind in sent))
    lines = [["layout", "workers", *kinds, "total"]]
    for row, sent in zip(rows["layouts"], by_kind, strict=True):
        cells = [
            f"{size_words(sent[kind]['bytes'])} in {sent[kind]['count']:,}" if kind in sent else "-" for kind in kinds
        ]
        total = size_words(sum(each["bytes"] for each in row["volumes"]))
        lines.append([row["label"], str(row["workers"]), *cells, total])
    values = linear["values_per_token"]
    return [
        *in_blocks(lines),
        "",
        "bytes that all workers send in a step, and the number of messages or collective operations",
        f"a linear layer of {linear['inputs']} inputs and {linear['outputs']} outputs, whole on each of {linear['ranks']} "
        f"ranks before and after it, sends {values['column']:,} values per token as columns with gathered output, "
        f"{values['row']:,} as rows",
        *(f"skipped: {row['label']}: {row['reason']}" for row in rows["refused"]),
    ]
