"""`pipeloom search`: the best schedule found within a memory limit, and a bound on its distance from the optimum."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import typer

from pipeloom.cli.options import CostFlags, SendFlags, Sizes, flag, memory_of, with_options
from pipeloom.cli.output import OutputFlags, as_dict, write_csv
from pipeloom.draw.figures import number
from pipeloom.errors import INTERRUPTED, UsageError, folded
from pipeloom.schedule import Costs
from pipeloom.solver import Progress, SearchResult, search
from pipeloom.solver.in_bytes import search_in_bytes


@dataclass(frozen=True)
class SearchFlags:
    """The limits of a search and its objective."""

    placement: str | None = flag(None, "PLACE", "linear, loop, vee, or the rank of each stage, such as 0,1,1,0.")
    memory: str | None = flag(
        None,
        "X",
        "Most memory of a rank: stage-micro-batches, such as 6; with --costs FILE that has bytes, GiB, such as 20 or 512MiB; "
        "default: no limit.",
    )
    objective: str = flag(
        "makespan",
        "WHAT",
        "Minimise the makespan (for steps that end in a barrier) or the largest span of a rank (for steps that do not).",
    )
    time_limit: float | None = flag(None, "S", "Longest search, in seconds.")
    iterations: int | None = flag(None, "N", "Most moves of the local search.")
    seed: int = flag(0, "N", "Seed of the random choices.")
    pairs: bool = flag(False, None, "Search over overlapped pairs too.", "--pairs")
    prove: bool = flag(False, None, "Try to prove optimality with OR-Tools (needs the extra opt).", "--prove")


@with_options(without=("message", "runtime"))
def command(sizes: Sizes, options: SearchFlags, costs: CostFlags, sending: SendFlags, output: OutputFlags) -> None:
    """Search for a schedule within a memory limit.

    Costs are those of one stage: one number, or one number per stage, separated by commas.

    pipeloom search --ranks 8 --microbatches 16 --memory 6
    """
    output.require()
    if sizes.ranks is None or sizes.microbatches is None:
        raise UsageError(f"search needs {sizes.missing}")
    values = costs.values()
    values = values if sending.sends is None else replace(values, sends=sending.sends)
    memory, in_bytes = _limit(options, values)
    run: Any = search_in_bytes if in_bytes else search
    with _display() as progress:
        limits: dict[str, Any] = vars(options) | {"placement": _placement(options.placement), "memory": memory}
        result = run(
            sizes.ranks,
            sizes.microbatches,
            values,
            chunks=sizes.chunks,
            overlap_p2p=costs.overlap_p2p,
            progress=progress,
            **limits,
        )
    output.draw([result.timeline], **result.beside)
    if output.csv:
        write_csv(result.schedule)
    elif output.as_json:
        print(json.dumps(_as_dict(result, options, memory), allow_nan=False))
    else:
        output.print_timeline(result.timeline, bound=False)
        print(folded("\n".join(_lines(result))))
    if result.interrupted:
        raise typer.Exit(INTERRUPTED)


def _limit(options: SearchFlags, costs: Costs) -> tuple[float | None, bool]:
    """Return the limit of memory and whether it is in bytes; a plain number is in activations where the costs have no bytes."""
    if options.memory is None:
        return None, False
    limit, in_bytes = memory_of(options.memory, plain_is_gib=bool(costs.bytes))
    if in_bytes and not costs.bytes:
        raise UsageError(
            f"--memory {options.memory:.60}: a limit in bytes needs the bytes of what a stage saves: give --costs FILE, which "
            "plan --costs-to or profile --output wrote, or a number of stage-micro-batches, such as --memory 4"
        )
    return limit, in_bytes


def _placement(text: str | None) -> str | list[int] | None:
    if text is None or "," not in text:
        return [0] if text == "0" else text
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise UsageError(f"--placement is {text!r:.200}; give linear, loop, vee, or the rank of each stage") from None


def _as_dict(result: SearchResult, options: SearchFlags, memory: float | None) -> dict[str, object]:
    """Return the keys of `schedule --json` and those of the search.

    With the objective makespan, `lower_bound` and `gap` are the search's, which take the memory limit into account.
    """
    fields = as_dict(result.timeline)
    if result.objective == "makespan":
        fields |= {"lower_bound": result.lower_bound, "gap": result.gap}
    return fields | {
        "search": {
            **{
                name: getattr(result, name) for name in ("objective", "value", "lower_bound", "gap", "proved", "origin")
            },
            **{name: getattr(result, name) for name in ("iterations", "interrupted", "recomputed", "offloaded")},
            "memory": memory,
            "seed": options.seed,
            "seconds": round(result.seconds, 3),
        }
    }


def _lines(result: SearchResult) -> list[str]:
    proof = "proved optimal" if result.proved else f"gap {100 * result.gap:.1f} %"
    ended = "interrupted, " if result.interrupted else ""
    return [
        f"makespan {number(result.timeline.makespan)}, largest span {number(max(result.timeline.spans))}",
        f"{result.objective} within this memory: lower bound {number(result.lower_bound)}, {proof}",
        *_places_lines("recomputed", result.recomputed),
        *_places_lines("offloaded", result.offloaded),
        f"{ended}started from {result.origin}, {result.iterations} moves, {result.seconds:.1f} s",
    ]


def _places_lines(word: str, places: dict[int, tuple[int, ...]]) -> list[str]:
    """One line for the stages that have the same micro-batches, as in `recomputed: stages 0-2: micro-batches 0-3, 6`."""
    stages_of: dict[tuple[int, ...], list[int]] = {}
    for stage, microbatches in places.items():
        stages_of.setdefault(microbatches, []).append(stage)
    return [f"{word}: stages {_ranges(stages)}: micro-batches {_ranges(mbs)}" for mbs, stages in stages_of.items()]


def _ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers in words: 0-2, 5."""
    first = [n for n in numbers if n - 1 not in numbers]
    last = [n for n in numbers if n + 1 not in numbers]
    return ", ".join(f"{a}-{b}" if a < b else f"{a}" for a, b in zip(first, last, strict=True))


@contextmanager
def _display() -> Iterator[Callable[[Progress], None] | None]:
    """Show the progress of the search as one line on standard error, if that is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console

    with Console(stderr=True).status("searching") as status:

        def show(now: Progress) -> None:
            gap = f"{100 * (now.value / now.lower_bound - 1):.1f} %" if now.lower_bound else "unknown"
            status.update(
                f"best {number(now.value)}, gap {gap}, {now.iterations} moves, {now.seconds:.0f} s; press Ctrl-C to "
                "stop and keep the best"
            )

        yield show
