"""Options that several commands share: each is declared once, as a field of a dataclass, with its conversion to a value."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from pipeloom.errors import ArgumentError, PipeloomError, UsageError

if TYPE_CHECKING:
    from pipeloom.schedule import Costs, Schedule

_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_MOST_MESSAGE = 2**34


def with_options(
    *, without: Collection[str] = (), **defaults: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that replaces each dataclass parameter of a command by the options that its fields declare.

    typer reads options from a function's signature alone, so the command that it sees has one parameter per field.

    Args:
        without: fields that the command does not offer; they keep their defaults.
        defaults: defaults of this command that differ from the fields' own.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(command, include_extras=True)
        groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
        parameters: list[inspect.Parameter] = []
        for given in inspect.signature(command).parameters.values():
            if given.name not in groups:
                parameters.append(given.replace(annotation=hints[given.name], kind=inspect.Parameter.KEYWORD_ONLY))
                continue
            types = get_type_hints(groups[given.name], include_extras=True)
            parameters += [
                inspect.Parameter(
                    field.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=defaults.get(field.name, field.default),
                    annotation=types[field.name],
                )
                for field in fields(groups[given.name])
                if field.name not in without
            ]

        @wraps(command)
        def run(**values: Any) -> None:
            for name, group in groups.items():
                names = [field.name for field in fields(group) if field.name in values]
                values[name] = group(**{field: values.pop(field) for field in names})
            command(**values)

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


@dataclass(frozen=True)
class Sizes:
    """The sizes of a schedule; None: not given."""

    ranks: Annotated[int | None, typer.Option(metavar="P", help="Number of pipeline ranks.")] = None
    microbatches: Annotated[int | None, typer.Option(metavar="M", help="Micro-batches of one step.")] = None
    chunks: Annotated[
        int | None, typer.Option(metavar="V", help="Stages per rank, for families that let you choose.")
    ] = None

    @property
    def missing(self) -> str:
        """The flags of sizes that every schedule needs and that are not given, in words; "" if there are none."""
        given = {"--ranks": self.ranks, "--microbatches": self.microbatches}
        return " and ".join(flag for flag, size in given.items() if size is None)


@dataclass(frozen=True)
class FamilyFlags:
    """Options of a family, and transforms."""

    option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="An option of the family, such as rounds=tail; repeatable."),
    ] = None
    transform: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Transform the schedule, for instance with unpair or defer-last-stage-weights=2; repeatable, applied in order.",
        ),
    ] = None

    def schedule(self, name: str, sizes: Sizes, costs: CostFlags) -> tuple[Schedule, Costs]:
        """Return the schedule called `name`, as `schedule_of` does, and its costs. Unknown transforms are refused first."""
        from pipeloom.schedule.transforms import parsed_transform

        for word in self.transform or ():
            parsed_transform(word)
        values = costs.values()
        return schedule_of(name, sizes, options_of(self.option or ()), values, self.transform or ()), values


@dataclass(frozen=True)
class CostFlags:
    """Costs as they are written on the command line: a number, or numbers separated by commas."""

    forward: Annotated[str, typer.Option(metavar="F", help="Time of one forward (F).")] = "1"
    input_grad: Annotated[str, typer.Option(metavar="I", help="Time of one input gradient (I).")] = "1"
    weight_grad: Annotated[
        str,
        typer.Option(metavar="W", help="Time of one weight gradient (W); a backward B takes I + W."),
    ] = "1"
    p2p: Annotated[str, typer.Option(metavar="C", help="Time of one message between two ranks.")] = "0"
    held: Annotated[
        str,
        typer.Option(
            "--held-until-weight-grad",
            metavar="SHARE",
            help="Share of a micro-batch's activation memory that is kept from I until W, 0 to 1.",
        ),
    ] = "1"
    all_to_all: Annotated[
        str,
        typer.Option(
            metavar="X",
            help="Share of F and of I spent in the experts' all-to-all, 0 to 1; overlapped pairs hide it.",
        ),
    ] = "0"
    pair: Annotated[
        str | None,
        typer.Option(metavar="T", help="Time of an overlapped pair F|B; default: computed from --all-to-all."),
    ] = None
    microbatch_costs: Annotated[
        str | None,
        typer.Option(
            metavar="X,Y,…",
            help="A factor on the costs of each micro-batch (sequences of different lengths).",
        ),
    ] = None
    message: Annotated[
        str | None,
        typer.Option(metavar="BYTES", help="Size of one message between stages, such as 65536, 64KiB or 4MiB."),
    ] = None
    overlap_p2p: Annotated[
        bool,
        typer.Option("--overlap-p2p/--no-overlap-p2p", help="Transfer messages while their receiver computes."),
    ] = True

    def values(self) -> Costs:
        """Return the costs. Raises UsageError for a value that is not a number or not a valid cost."""
        from pipeloom.schedule import Costs

        plain = ("forward", "input_grad", "weight_grad", "p2p", "held", "all_to_all", "pair")
        given = {name: text for name in plain if (text := getattr(self, name)) is not None}
        numbers: dict[str, Any] = {name: _numbers(FLAGS[name], text) for name, text in given.items()}
        if isinstance(numbers["p2p"], tuple):
            raise UsageError(f"--p2p is {self.p2p!r:.200}; give one number, the time of a message between two ranks")
        if self.microbatch_costs is not None:
            factors = _numbers(FLAGS["microbatch"], self.microbatch_costs, "micro-batch")
            numbers["microbatch"] = factors if isinstance(factors, tuple) else (factors,)
        if self.message is not None:
            numbers["message"] = bytes_of(self.message)
        return Costs(**numbers)


FLAGS = {
    **{field.name: f"--{field.name.replace('_', '-')}" for field in fields(CostFlags)},
    **{name: f"--{name.replace('_', '-')}" for name in ("memory", "time_limit", "prove", "pairs")},
    "held": "--held-until-weight-grad",
    "microbatch": "--microbatch-costs",
}
"""Argument of the library -> the flag that gives it."""
_PHRASES = {
    "costs.microbatch": FLAGS["microbatch"],
    "overlap_p2p=False": "--no-overlap-p2p",
    "write it as JSON": "write it as JSON (--json)",
}


def message_with_flags(error: PipeloomError) -> str:
    """Return the message of an error of the library, with flags in place of argument names."""
    text = str(error)
    if isinstance(error, ArgumentError):
        text = f"{FLAGS.get(error.argument, error.argument)}{error.words}"
    for phrase, flag in _PHRASES.items():
        text = text.replace(phrase, flag)
    return text


def bytes_of(text: str) -> int:
    """Return the bytes of a size such as 65536, 64KiB or 4MiB, for `--message`. Raises UsageError for anything else."""
    match = re.fullmatch(r"(\d{1,15})\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].lower() not in _UNITS:
        raise UsageError(f"--message is {text!r:.60}; give bytes, such as 65536, 64KiB or 4MiB")
    size = int(match[1]) * _UNITS[match[2].lower()]
    if not 1 <= size <= _MOST_MESSAGE:
        raise UsageError(f"--message is {text!r:.60}; it must be from 1 byte to 16GiB")
    return size


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
    sizes: Sizes,
    options: dict[str, Any],
    costs: Costs | None = None,
    transforms: Sequence[str] = (),
) -> Schedule:
    """Return the schedule called `name` (a family, `module:function`, or a CSV or JSON file), transformed and checked.

    Args:
        sizes: a file contains them; those given must be equal to the file's.
        costs: costs of a stage, for the families and transforms whose order depends on them.
        transforms: as for `transformed`.

    Raises:
        UsageError: an unknown name or option, or a size that is missing, refused, or different from the file's.
        ScheduleError: a schedule that cannot run, with the reason.
    """
    from pipeloom.schedule import check
    from pipeloom.schedule.families import build, require
    from pipeloom.schedule.files import load, names_a_file

    if names_a_file(name):
        schedule = load(name)
        _agree(name, schedule, sizes, options)
    else:
        if sizes.missing:
            require(name, options or ())
            raise UsageError(f"schedule {name} needs {sizes.missing}")
        schedule = build(name, sizes.ranks or 0, sizes.microbatches or 0, sizes.chunks, options, costs)
    check(schedule)
    if transforms:
        from pipeloom.schedule.transforms import transformed

        schedule = transformed(schedule, transforms, costs)
        check(schedule)
    return schedule


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


def _agree(name: str, schedule: Schedule, sizes: Sizes, options: object) -> None:
    """Raise UsageError for options, and for sizes that differ from the file's."""
    if options:
        raise UsageError(f"{name} is a file: it takes no options")
    for field in fields(Sizes):
        given, actual = getattr(sizes, field.name), getattr(schedule, field.name)
        if given is not None and given != actual:
            raise UsageError(f"--{field.name} is {given}, and {name} has {actual}; leave the option out")


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
