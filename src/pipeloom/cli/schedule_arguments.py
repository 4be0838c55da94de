"""Command-line arguments for schedules and their costs, shared by several commands, and their conversion to values."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeloom.errors import UsageError

if TYPE_CHECKING:
    from pipeloom.schedule import Costs, Schedule

RanksOption = Annotated[int | None, typer.Option("--ranks", metavar="P", help="Number of pipeline ranks.")]
MicrobatchesOption = Annotated[
    int | None, typer.Option("--microbatches", metavar="M", help="Micro-batches of one step.")
]
ChunksOption = Annotated[
    int | None, typer.Option("--chunks", metavar="V", help="Stages per rank, for families that let you choose.")
]
ForwardOption = Annotated[str, typer.Option("--forward", metavar="F", help="Time of one forward (F).")]
InputGradOption = Annotated[str, typer.Option("--input-grad", metavar="I", help="Time of one input gradient (I).")]
WeightGradOption = Annotated[
    str, typer.Option("--weight-grad", metavar="W", help="Time of one weight gradient (W); a backward B takes I + W.")
]
P2pOption = Annotated[str, typer.Option("--p2p", metavar="C", help="Time of one message between two ranks.")]
HeldOption = Annotated[
    str,
    typer.Option(
        "--held-until-weight-grad",
        metavar="SHARE",
        help="Share of a micro-batch's activation memory that is kept from I until W, 0 to 1.",
    ),
]
AllToAllOption = Annotated[
    str,
    typer.Option(
        "--all-to-all",
        metavar="X",
        help="Share of F and of I spent in the experts' all-to-all, 0 to 1; overlapped pairs hide it.",
    ),
]
PairOption = Annotated[
    str | None,
    typer.Option("--pair", metavar="T", help="Time of an overlapped pair F|B; default: computed from --all-to-all."),
]
MicrobatchCostsOption = Annotated[
    str | None,
    typer.Option(
        "--microbatch-costs",
        metavar="X,Y,…",
        help="A factor on the costs of each micro-batch (sequences of different lengths).",
    ),
]
MessageOption = Annotated[
    str | None,
    typer.Option(
        "--message", metavar="BYTES", help="Size of one message between stages, such as 65536, 64KiB or 4MiB."
    ),
]
OverlapP2pOption = Annotated[
    bool,
    typer.Option("--overlap-p2p/--no-overlap-p2p", help="Transfer messages while their receiver computes."),
]
FamilyOption = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="KEY=VALUE", help="An option of the family, such as rounds=tail; repeatable."),
]
TransformsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--transform",
        metavar="NAME",
        help="Transform the schedule, for instance with unpair or defer-last-stage-weights=2; repeatable, applied in order.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
SvgOption = Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Write the drawing as SVG.")]
PngOption = Annotated[
    Path | None,
    typer.Option(
        "--png", metavar="FILE", help="Write the drawing as PNG, at twice its size in pixels (needs the extra png)."
    ),
]
HtmlOption = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", help="Write an interactive HTML page, which works offline."),
]
TraceOption = Annotated[Path | None, typer.Option("--trace", metavar="FILE", help="Write a trace that Perfetto opens.")]
WidthOption = Annotated[
    int | None,
    typer.Option(
        "--width",
        metavar="N",
        min=20,
        max=20000,
        help="Width of the drawing: columns in the terminal, pixels in the SVG.",
    ),
]


_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_MOST_MESSAGE = 2**34


def costs_of(
    times: tuple[str, str, str, str],
    held: str,
    pairs: tuple[str, str | None],
    sizes: str | None,
    message: str | None = None,
) -> Costs:
    """Return the costs that the options give. Raises UsageError for a value that is not a number or not a valid cost.

    Args:
        times: times of F, I, W and a message between ranks.
        held: share of the activation memory that is kept from I until W.
        pairs: share of the all-to-all, and time of a pair.
        sizes: factors on the costs of each micro-batch.
        message: size of a message between stages, as `bytes_of` takes it.
    """
    from pipeloom.schedule import Costs

    forward, input_grad, weight_grad, p2p = times
    hop = _numbers("--p2p", p2p)
    if isinstance(hop, tuple):
        raise UsageError(f"--p2p is {p2p!r:.200}; give one number, the time of a message between two ranks")
    return Costs(
        forward=_numbers("--forward", forward),
        input_grad=_numbers("--input-grad", input_grad),
        weight_grad=_numbers("--weight-grad", weight_grad),
        p2p=hop,
        held=_numbers("--held-until-weight-grad", held),
        all_to_all=_numbers("--all-to-all", pairs[0]),
        pair=None if pairs[1] is None else _numbers("--pair", pairs[1]),
        microbatch=() if sizes is None else _sizes(sizes),
        message=0.0 if message is None else bytes_of(message),
    )


def bytes_of(text: str) -> int:
    """Return the bytes of a size such as 65536, 64KiB or 4MiB, for `--message`. Raises UsageError for anything else."""
    match = re.fullmatch(r"(\d{1,15})\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].lower() not in _UNITS:
        raise UsageError(f"--message is {text!r:.60}; give bytes, such as 65536, 64KiB or 4MiB")
    size = int(match[1]) * _UNITS[match[2].lower()]
    if not 1 <= size <= _MOST_MESSAGE:
        raise UsageError(f"--message is {text!r:.60}; it must be from 1 byte to 16GiB")
    return size


def _sizes(text: str) -> tuple[float, ...]:
    numbers = _numbers("--microbatch-costs", text, "micro-batch")
    return numbers if isinstance(numbers, tuple) else (numbers,)


def options_of(words: Sequence[str]) -> dict[str, Any]:
    """Parse `key=value` words as a family's options; a value is a number, true, false, none, or otherwise text.

    Raises UsageError for a word of another form, and for a key that is given twice.
    """
    options: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not key:
            raise UsageError(f"option {word!r:.200} is not of the form key=value")
        if key in options:
            raise UsageError(f"option {key} is given twice: {options[key]} and {value}")
        options[key] = _value(value.strip())
    return options


def schedule_of(
    name: str,
    sizes: tuple[int | None, int | None, int | None],
    options: dict[str, Any],
    costs: Costs | None = None,
    transforms: Sequence[str] = (),
) -> Schedule:
    """Return the schedule called `name` (a family, `module:function`, or a CSV or JSON file), transformed and checked.

    Args:
        sizes: ranks, micro-batches, chunks. A file contains them; those given must be equal to the file's.
        costs: costs of a stage, for the families and transforms whose order depends on them.
        transforms: as for `transformed`.

    Raises:
        UsageError: an unknown name or option, or a size that is missing, refused, or different from the file's.
        ScheduleError: a schedule that cannot run, with the reason.
    """
    from pipeloom.schedule import check
    from pipeloom.schedule.families import build, require
    from pipeloom.schedule.files import load, names_a_file

    ranks, microbatches, chunks = sizes
    if names_a_file(name):
        schedule = load(name)
        _agree(name, schedule, sizes, options)
    else:
        missing = [flag for flag, size in (("--ranks", ranks), ("--microbatches", microbatches)) if size is None]
        if missing:
            require(name, options or ())
            raise UsageError(f"schedule {name} needs {' and '.join(missing)}")
        schedule = build(name, ranks or 0, microbatches or 0, chunks, options, costs)
    check(schedule)
    if transforms:
        from pipeloom.schedule.transforms import transformed

        schedule = transformed(schedule, transforms, costs)
        check(schedule)
    return schedule


def transforms_of(words: Sequence[str]) -> tuple[str, ...]:
    """Return the `--transform` words. Raises UsageError for an unknown transform, before anything is built."""
    from pipeloom.schedule.transforms import parsed_transform

    for word in words:
        parsed_transform(word)
    return tuple(words)


def takes_chunks(name: str) -> bool:
    """Return whether the number of chunks of the family `name` can be chosen; also True for a name that is not a family."""
    from pipeloom.schedule.families import FAMILIES, canonical_name

    family = FAMILIES.get(canonical_name(name))
    return family is None or "chunks" in inspect.signature(family).parameters


def require_schedule(name: str, options: Iterable[str]) -> None:
    """Raise UsageError or ScheduleError for a name, a file or names of options that no sizes can make a schedule of."""
    from pipeloom.schedule.families import require
    from pipeloom.schedule.files import load, names_a_file

    if names_a_file(name):
        load(name)
    else:
        require(name, options)


def _agree(name: str, schedule: Schedule, sizes: tuple[int | None, int | None, int | None], options: object) -> None:
    """Raise UsageError for options, and for sizes that differ from the file's."""
    if options:
        raise UsageError(f"{name} is a file: it takes no options")
    has = (schedule.ranks, schedule.microbatches, schedule.chunks)
    for flag, given, actual in zip(("--ranks", "--microbatches", "--chunks"), sizes, has, strict=True):
        if given is not None and given != actual:
            raise UsageError(f"{flag} is {given}, and {name} has {actual}; leave the option out")


def _numbers(option: str, text: str, of_what: str = "stage") -> float | tuple[float, ...]:
    try:
        values = tuple(float(word) for word in text.split(","))
    except ValueError:
        raise UsageError(
            f"{option} is {text!r:.200}; give a number, or one number for each {of_what}, separated by commas"
        ) from None
    return values[0] if len(values) == 1 else values


def _value(text: str) -> Any:
    if text.lower() in ("true", "false", "none"):
        return {"true": True, "false": False, "none": None}[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
