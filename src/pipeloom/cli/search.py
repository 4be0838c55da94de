"""`pipeloom search`: the best schedule found within a memory limit, and a bound on its distance from the optimum."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from pipeloom.cli import schedule_arguments
from pipeloom.cli.schedule import as_dict, require_outputs, write_files
from pipeloom.errors import INTERRUPTED, UsageError

if TYPE_CHECKING:
    from pipeloom.solver import Progress, SearchResult

Placement = Annotated[
    str | None,
    typer.Option(metavar="PLACE", help="linear, loop, vee, or the rank of each stage, such as 0,1,1,0."),
]
Memory = Annotated[
    float | None,
    typer.Option(
        "--memory",
        metavar="X",
        help="Most activation memory per rank, in stage-micro-batches; default: no limit.",
    ),
]
ObjectiveOption = Annotated[
    str,
    typer.Option(
        metavar="WHAT",
        help="Minimise the makespan (for steps that end in a barrier) or the largest span of a rank (for steps that do not).",
    ),
]


def command(
    ranks: schedule_arguments.RanksOption = None,
    microbatches: schedule_arguments.MicrobatchesOption = None,
    chunks: schedule_arguments.ChunksOption = None,
    placement: Placement = None,
    memory: Memory = None,
    held: schedule_arguments.HeldOption = "1",
    objective: ObjectiveOption = "makespan",
    forward: schedule_arguments.ForwardOption = "1",
    input_grad: schedule_arguments.InputGradOption = "1",
    weight_grad: schedule_arguments.WeightGradOption = "1",
    p2p: schedule_arguments.P2pOption = "0",
    all_to_all: schedule_arguments.AllToAllOption = "0",
    pair: schedule_arguments.PairOption = None,
    microbatch_costs: schedule_arguments.MicrobatchCostsOption = None,
    overlap_p2p: schedule_arguments.OverlapP2pOption = True,
    time_limit: Annotated[float | None, typer.Option(metavar="S", help="Longest search, in seconds.")] = None,
    iterations: Annotated[int | None, typer.Option(metavar="N", help="Most moves of the local search.")] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the random choices.")] = 0,
    pairs: Annotated[bool, typer.Option("--pairs", help="Search over overlapped pairs too.")] = False,
    prove: Annotated[
        bool, typer.Option("--prove", help="Try to prove optimality with OR-Tools (needs the extra opt).")
    ] = False,
    as_json: schedule_arguments.JsonOption = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print the schedule in torch's CSV format.")] = False,
    svg: schedule_arguments.SvgOption = None,
    png: schedule_arguments.PngOption = None,
    html: schedule_arguments.HtmlOption = None,
    trace: schedule_arguments.TraceOption = None,
    width: schedule_arguments.WidthOption = None,
) -> None:
    """Search for a schedule within a memory limit.

    Costs are those of one stage: one number, or one number per stage, separated by commas.

    pipeloom search --ranks 8 --microbatches 16 --memory 6
    """
    if as_json and csv:
        raise UsageError("--json and --csv both print on standard output; choose one")
    if ranks is None or microbatches is None:
        missing = [flag for flag, size in (("--ranks", ranks), ("--microbatches", microbatches)) if size is None]
        raise UsageError(f"search needs {' and '.join(missing)}")
    require_outputs(svg=svg, png=png, html=html, trace=trace)
    from pipeloom.solver import search

    with _display() as progress:
        result = search(
            ranks,
            microbatches,
            schedule_arguments.costs_of(
                (forward, input_grad, weight_grad, p2p), held, (all_to_all, pair), microbatch_costs
            ),
            memory,
            placement=_placement(placement),
            chunks=chunks,
            objective=objective,  # type: ignore[arg-type]
            time_limit=time_limit,
            iterations=iterations,
            seed=seed,
            prove=prove,
            pairs=pairs,
            overlap_p2p=overlap_p2p,
            progress=progress,
        )
    write_files([result.timeline], svg=svg, png=png, html=html, trace=trace, width=width)
    if csv:
        from pipeloom.schedule.csv_form import to_csv

        sys.stdout.write(to_csv(result.schedule))
    elif as_json:
        print(json.dumps(_as_dict(result, memory, seed), allow_nan=False))
    else:
        _print(result, width or shutil.get_terminal_size().columns)
    if result.interrupted:
        raise typer.Exit(INTERRUPTED)


def _placement(text: str | None) -> str | list[int] | None:
    if text is None or "," not in text:
        return [0] if text == "0" else text
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise UsageError(f"--placement is {text!r:.200}; give linear, loop, vee, or the rank of each stage") from None


def _as_dict(result: SearchResult, memory: float | None, seed: int) -> dict[str, object]:
    """Return the keys of `schedule --json` and those of the search.

    With the objective makespan, `lower_bound` and `gap` are the search's, which take the memory limit into account.
    """
    fields = as_dict(result.timeline)
    if result.objective == "makespan":
        fields |= {"lower_bound": result.lower_bound, "gap": result.gap}
    return fields | {
        "search": {
            "objective": result.objective,
            "value": result.value,
            "lower_bound": result.lower_bound,
            "gap": result.gap,
            "proved": result.proved,
            "memory": memory,
            "origin": result.origin,
            "seed": seed,
            "iterations": result.iterations,
            "seconds": round(result.seconds, 3),
            "interrupted": result.interrupted,
        }
    }


def _print(result: SearchResult, width: int) -> None:
    from pipeloom.draw import terminal
    from pipeloom.draw.figures import number

    sys.stdout.write(terminal(result.timeline, width=width))
    spans = max(result.timeline.spans)
    proof = "proved optimal" if result.proved else f"gap {100 * result.gap:.1f} %"
    print(f"makespan {number(result.timeline.makespan)}, largest span {number(spans)}")
    print(f"{result.objective} within this memory: lower bound {number(result.lower_bound)}, {proof}")
    ended = "interrupted, " if result.interrupted else ""
    print(f"{ended}started from {result.origin}, {result.iterations} moves, {result.seconds:.1f} s")


@contextmanager
def _display() -> Iterator[Callable[[Progress], None] | None]:
    """Show the progress of the search as one line on standard error, if that is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console

    from pipeloom.draw.figures import number

    with Console(stderr=True).status("searching") as status:

        def show(now: Progress) -> None:
            gap = f"{100 * (now.value / now.lower_bound - 1):.1f} %" if now.lower_bound else "unknown"
            status.update(
                f"best {number(now.value)}, gap {gap}, {now.iterations} moves, {now.seconds:.0f} s; press Ctrl-C to "
                "stop and keep the best"
            )

        yield show
