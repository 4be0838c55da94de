"""Options that several commands share: each is declared once, as a field of a dataclass, with its conversion to a value."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import Field, dataclass, field, fields, is_dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

from pipeloom.errors import ArgumentError, PipeloomError, UsageError
from pipeloom.limits import SCHEDULE_BYTES, memory_amount, number_or_text, read_json
from pipeloom.schedule import Costs, Schedule, check
from pipeloom.schedule.costs import Sends
from pipeloom.schedule.families import FAMILIES, SLICED, build, canonical_name, require
from pipeloom.schedule.files import load, names_a_file
from pipeloom.schedule.segments import LayerSegments, segment_costs
from pipeloom.schedule.slices import balanced_cuts, even_cuts, longer_than_whole
from pipeloom.schedule.transforms import parsed_transform, transformed
from pipeloom.traces.segment_times import read_segments
from pipeloom.traces.timelines import costs_of_dict

_MOST_MESSAGE = 2**34
_WORDS = {"true": True, "false": False, "none": None}
_LONG = 2**20  # tokens of the sequence whose cuts stand for any: so many that a cut is exact


def flag(default: Any, metavar: str | None, help: str, *names: str, **limits: Any) -> Any:
    """Declare a field of a dataclass as an option of a command, which is named after the field if `names` are not given."""
    option = typer.Option(*names, metavar=metavar, help=help, **limits)
    return field(default=default, metadata={"option": option, "names": names})


def name_of(spec: Field[Any]) -> str:
    """Return the option that a field declares."""
    names = spec.metadata["names"]
    return names[0].partition("/")[0] if names else f"--{spec.name.replace('_', '-')}"


def argument(default: Any, metavar: str, help: str, **more: Any) -> Any:
    """Declare a word of a command line that has no name; a `default` of ... is one that must be given."""
    return field(default=default, metadata={"option": typer.Argument(metavar=metavar, help=help, **more)})


def with_options(
    *, without: Collection[str] = (), groups_from: Mapping[str, str] | None = None, **defaults: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator for a command whose parameters are declared by `flag` and `argument`, or are dataclasses of such fields.

    typer reads options from a function's signature alone, so the command that it sees has one parameter per field.

    Args:
        without: fields that the command does not offer; they keep their defaults.
        groups_from: option -> title of the group in the command's help that begins with it; besides these the fields of a
            dataclass are a group, which has its name.
        defaults: defaults of this command that differ from the fields' own.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(command, include_extras=True)
        groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
        parameters: list[inspect.Parameter] = []
        title = ""

        def add(name: str, kind: Any, declared: Any, group: str) -> None:
            nonlocal title
            title = (groups_from or {}).get(name, title)
            option = copy(declared.metadata["option"])
            option.rich_help_panel = title or group
            annotation: Any = Annotated[(kind, option)]
            default = defaults.get(name, declared.default)
            parameters.append(
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            )

        for given in inspect.signature(command).parameters.values():
            if isinstance(given.default, Field):
                add(given.name, hints[given.name], given.default, "Options")
            elif given.name not in groups:
                parameters.append(given.replace(annotation=hints[given.name], kind=inspect.Parameter.KEYWORD_ONLY))
            else:
                types, title = get_type_hints(groups[given.name]), ""
                group = re.sub(r"(Flags|s)?$", " options", groups[given.name].__name__, count=1)
                for each in fields(groups[given.name]):
                    if each.name not in without:
                        add(each.name, types[each.name], each, group)

        @wraps(command)
        def run(**values: Any) -> None:
            for name, group in groups.items():
                names = [each.name for each in fields(group) if each.name in values]
                values[name] = group(**{each: values.pop(each) for each in names})
            command(**values)

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


@dataclass(frozen=True)
class Sizes:
    """The sizes of a schedule; None: not given."""

    ranks: int | None = flag(None, "P", "Number of pipeline ranks.")
    microbatches: int | None = flag(None, "M", "Micro-batches of one step.")
    chunks: int | None = flag(None, "V", "Stages per rank, for families that let you choose.")

    @property
    def missing(self) -> str:
        """The flags of sizes that every schedule needs and that are not given, in words; "" if there are none."""
        given = {"--ranks": self.ranks, "--microbatches": self.microbatches}
        return " and ".join(flag for flag, size in given.items() if size is None)


@dataclass(frozen=True)
class FamilyFlags:
    """Options of a family, and transforms."""

    option: list[str] | None = flag(
        None, "KEY=VALUE", "An option of the family, such as rounds=tail; repeatable. The same: NAME:rounds=tail."
    )
    transform: list[str] | None = flag(
        None,
        "NAME",
        "Transform the schedule, for instance with unpair or defer-last-stage-weights=2; repeatable, applied in order.",
    )

    def schedule(
        self,
        name: str,
        sizes: Sizes,
        costs: CostFlags,
        cuts: SliceFlags | None = None,
        sending: SendFlags | None = None,
    ) -> tuple[Schedule, Costs]:
        """Return the schedule called `name`, as `schedule_of` does, and its costs. Unknown transforms are refused first.

        `name` may end in options, as of `parse_spec`.
        Where slices of equally many tokens take longer than whole sequences, a warning is printed.
        """
        for word in self.transform or ():
            parsed_transform(word)
        name, options = parse_spec(name, self.option or ())
        sizes = replace(sizes, chunks=options.pop("chunks", sizes.chunks))
        values, words = costs.values(), self.transform or ()
        schedule = schedule_of(name, sizes, options, values, words)
        values = (sending or SendFlags()).costs(values, schedule)
        if cuts is None or cuts == SliceFlags():
            return schedule, values
        if schedule.slices == 1:
            raise UsageError(
                "--attention and --even-slices are about slices: add --option slices=4 or --transform slices=4"
            )
        values = cuts.of(values, schedule)
        if cuts.even_slices and not names_a_file(name):
            plain = [word for word in words if not word.startswith("slices")]
            whole = schedule_of(name, sizes, options | {"slices": 1}, values, plain)
            if warning := longer_than_whole(schedule, whole, values):
                print(f"warning: {warning}", file=sys.stderr)
        return schedule, values


@dataclass(frozen=True)
class SliceFlags:
    """The cuts of sequences into slices."""

    attention: str | None = flag(
        None,
        "SHARE",
        "Share of a sequence's time that causal attention takes, 0 to 1; slices are cut to take the same time. Default: 0.",
    )
    even_slices: bool = flag(False, None, "Cut slices of equally many tokens instead.", "--even-slices")

    def of(self, costs: Costs, schedule: Schedule) -> Costs:
        """Return the costs with the shares of the schedule's slices."""
        attention = _numbers("--attention", self.attention or "0")
        if isinstance(attention, tuple):
            raise UsageError(f"--attention is {self.attention!r:.200}; give one number")
        if schedule.slices == 1:
            return costs
        return (even_cuts if self.even_slices else balanced_cuts)(_LONG, schedule.slices, attention).costs(costs)


_OF_SEGMENTS = ("forward", "input_grad", "weight_grad", "all_to_all", "pair")  # costs that follow from segments


@dataclass(frozen=True)
class CostFlags:
    """Costs as they are written on the command line: a number, or numbers separated by commas."""

    forward: str = flag("1", "F", "Time of one forward (F).")
    input_grad: str = flag("1", "I", "Time of one input gradient (I).")
    weight_grad: str = flag("1", "W", "Time of one weight gradient (W); a backward B takes I + W.")
    p2p: str = flag("0", "C", "Time of one message between two ranks.")
    held: str = flag(
        "1",
        "SHARE",
        "Memory kept from I until W, as a share of a micro-batch's activations; above 1 is possible.",
        "--held-until-weight-grad",
    )
    all_to_all: str = flag(
        "0", "X", "Share of F and of I spent in the experts' all-to-all, 0 to 1; overlapped pairs hide it."
    )
    pair: str | None = flag(None, "T", "Time of an overlapped pair F|B; default: computed from --all-to-all.")
    slowdown: float = flag(
        1.0,
        "X",
        "Factor on the time of computation while a pair's all-to-all runs; needs --all-to-all.",
        min=1,
        max=100,
    )
    segments: str | None = flag(
        None,
        "FILE|X,…",
        "Segment times of a stage's layers, which give F, I, W and pairs: a JSON file, or a number: each all-to-all's time where "
        "attention and experts take 1.",
    )
    microbatch_costs: str | None = flag(
        None, "X,Y,…", "A factor on the costs of each micro-batch (sequences of different lengths)."
    )
    costs: Path | None = flag(
        None,
        "FILE",
        "Costs of a stage as JSON, bytes among them, as plan --costs-to and --json write them; flags replace them.",
    )
    host_bandwidth: str | None = flag(
        None,
        "X",
        "Activations (with --costs: bytes) that a rank copies to or from host memory per unit of time; default: they are free.",
    )
    message: str | None = flag(None, "BYTES", "Size of one message between stages, such as 65536, 64KiB or 4MiB.")
    overlap_p2p: bool = flag(
        True, None, "Transfer messages while their receiver computes.", "--overlap-p2p/--no-overlap-p2p"
    )

    def values(self) -> Costs:
        """Return the costs. Raises UsageError for a value that is not a number or not a valid cost."""
        base = Costs() if self.costs is None else _costs_in(self.costs)
        names = {spec.name for spec in fields(Costs)} - {"message"}
        given = {each.name: text for each in fields(self) if (text := getattr(self, each.name)) != each.default}
        numbers: dict[str, Any] = {name: _numbers(FLAGS[name], given[name]) for name in names & given.keys()}
        if isinstance(numbers.get("p2p"), tuple):
            raise UsageError(f"--p2p is {self.p2p!r:.200}; give one number, the time of a message between two ranks")
        if self.microbatch_costs is not None:
            factors = _numbers(FLAGS["microbatch"], self.microbatch_costs, "micro-batch")
            numbers["microbatch"] = factors if isinstance(factors, tuple) else (factors,)
        if self.message is not None:
            numbers["message"] = bytes_of(self.message)
        if layers := self.layers():
            if replaced := [FLAGS[name] for name in _OF_SEGMENTS if name in given]:
                raise UsageError(f"--segments gives the times of actions and pairs; leave out {' and '.join(replaced)}")
            base, numbers = segment_costs([layers], **vars(base) | numbers), {}
        costs = replace(base, **numbers)
        if self.slowdown > 1 and self.pair is not None:
            raise UsageError(
                f"--slowdown {self.slowdown:g} computes the time of pairs, and --pair gives it; leave out one of them"
            )
        if self.slowdown > 1 and costs.all_to_all == 0:
            raise UsageError(f"--slowdown {self.slowdown:g} is of pairs that hide an all-to-all; give --all-to-all too")
        return with_slowdown(costs, self.slowdown) if self.slowdown > 1 else costs

    def layers(self) -> tuple[LayerSegments, ...]:
        """Return a stage's layers in segments; empty: none are given."""
        return () if self.segments is None else next(iter(read_segments(self.segments).values()))


@dataclass(frozen=True)
class LimitFlags:
    """A limit of bytes."""

    memory: str | None = flag(None, "GIB", "Memory of a device, such as 20 or 20GiB; needs --costs with bytes.")

    def of(self, costs: Costs) -> float | None:
        """Return the limit in bytes. Raises UsageError for costs without bytes."""
        return None if self.memory is None else bytes_with(costs, self.memory)


@dataclass(frozen=True)
class SendFlags:
    """The wait of senders."""

    sends: Sends | None = flag(
        None,
        "HOW",
        "free: a sender goes on at once; rendezvous: once the receive is posted; coupled: in one call with it.",
    )
    runtime: Literal["pipeloom", "megatron", "torchtitan"] | None = flag(
        None, "NAME", "Let senders wait as they do in pipeloom, megatron or torchtitan."
    )

    def of(self, schedule: Schedule) -> Sends | None:
        """Return how senders wait when `schedule` runs, and check that it can; None: not given."""
        if self.sends is not None and self.runtime is not None:
            raise UsageError(f"--sends is {self.sends} and --runtime {self.runtime}; give one of them")
        sends = self.sends
        if self.runtime is not None:
            from pipeloom.interop.systems import sends_of

            sends = sends_of(self.runtime, schedule)
        if sends is not None:
            check(schedule, sends=sends)
        return sends

    def costs(self, costs: Costs, schedule: Schedule) -> Costs:
        """Return the costs with senders that wait as `of` says, or as they are."""
        sends = self.of(schedule)
        return costs if sends is None else replace(costs, sends=sends)


FLAGS = {
    **{each.name: name_of(each) for each in (*fields(CostFlags), *fields(SendFlags))},
    **{
        name: f"--{name.replace('_', '-')}"
        for name in ("memory", "time_limit", "iterations", "receive_depth", "prove", "pairs")
    },
    "microbatch": "--microbatch-costs",
    "target_modules": "--lora.target_modules",
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
    size, _ = memory_amount(text) or (0.0, False)
    if not 1 <= size <= _MOST_MESSAGE:
        raise UsageError(f"--message is {text!r:.60}; give bytes, up to 16GiB, such as 65536, 64KiB or 4MiB")
    return int(size)


def bytes_with(costs: Costs, text: str, flag: str = "--memory") -> float:
    """Return the bytes of a limit, as `memory_of` does. Raises UsageError for costs without bytes."""
    if not costs.bytes:
        raise UsageError(f"{flag} is {text!r:.60}, and the costs have no bytes to compare: add --costs FILE with bytes")
    return memory_of(text, flag=flag)[0]


def memory_of(text: str, plain_is_gib: bool = True, flag: str = "--memory") -> tuple[float, bool]:
    """Return (amount, whether it is in bytes) of a limit such as 20GiB, 512MiB or 20, which is in GiB or else in activations.

    Raises UsageError for anything else.
    """
    amount = memory_amount(text)
    if amount is None or amount[0] <= 0:
        plain = "GiB, such as 20" if plain_is_gib else "stage-micro-batches, such as 6"
        raise UsageError(f"{flag} is {text!r:.60}; give {plain}, or a size, such as 20GiB or 512MiB")
    number, has_unit = amount
    return (number * 2**30, True) if plain_is_gib and not has_unit else amount


def _costs_in(path: Path) -> Costs:
    """Return the costs in a JSON file: the object itself, or what it has under "costs"."""
    try:
        form = read_json(path, SCHEDULE_BYTES, "a file of costs")
    except OSError as error:
        raise UsageError(f"--costs {path}: {error.strerror}") from None
    return costs_of_dict(form.get("costs", form) if isinstance(form, dict) else form, f"--costs {path}")


def parse_spec(spec: str, words: Iterable[str] = ()) -> tuple[str, dict[str, Any]]:
    """Split `name:key=value,key=value` into name and options; a colon without `=` after it belongs to the name.

    Args:
        words: further options.
    """
    name, _, options = spec.rpartition(":")
    if name and "=" in options:
        return name, options_of([*options.split(","), *words])
    return spec, options_of(words)


def options_of(words: Iterable[str]) -> dict[str, Any]:
    """Parse `key=value` words as a family's options; a value is a number, true, false, none, or otherwise text.

    Raises UsageError for a word of another form, and for a key that is given twice.
    """
    options: dict[str, Any] = {}
    for given in words:
        key, equals, value = given.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not key:
            raise UsageError(f"option {given!r:.200} is not of the form key=value")
        if key in options:
            raise UsageError(f"option {key} is given twice: {options[key]} and {value}")
        word = value.strip()
        options[key] = _WORDS[word.lower()] if word.lower() in _WORDS else number_or_text(word)
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
        schedule = transformed(schedule, transforms, costs)
        check(schedule)
    return schedule


def families(incomplete: str) -> list[str]:
    """Return the names of families that complete a word."""
    return [name for name in (*FAMILIES, *SLICED) if name.startswith(incomplete)]


def family_rows() -> list[tuple[str, str]]:
    """Return (name, first paragraph of its description) of each family."""
    firsts = {name: (inspect.getdoc(family) or "").partition("\n\n")[0] for name, family in FAMILIES.items()}
    return [(name, " ".join(text.split())) for name, text in firsts.items()]


def family_help(word: str) -> str:
    """Return the options of the family that `word` names, with their defaults, and its description; "" for another word."""
    name, known = canonical_name(word), FAMILIES | SLICED
    if name not in known:
        return ""
    options = {"cooldown": "whole (or split)", "slices": "1"}
    for key, parameter in inspect.signature(known[name]).parameters.items():
        if key not in ("ranks", "microbatches", "costs"):
            options[key] = "not given" if parameter.default is None else parameter.default
    listed = ", ".join(f"{key}: {value}" for key, value in options.items())
    return f"Options of {name} (--option KEY=VALUE), with their defaults: {listed}\n\n{inspect.getdoc(known[name])}"


def with_slowdown(costs: Costs, factor: float) -> Costs:
    """Return costs with the time of each pair where computation takes `factor` times as long beside the pair's all-to-all.

    With K the computation and C the communication of both halves: max(C, K + C (1 - 1/factor)).
    """
    names = ("forward", "input_grad", "weight_grad", "all_to_all")
    stages = max(len(values) if isinstance(values := getattr(costs, name), tuple) else 1 for name in names)
    forward, backward, weight, share_of = (costs.per_stage(name, stages) for name in names)
    times: dict[str, list[tuple[float, ...]]] = {"pair": [], "pair_split": []}
    for f, x in zip(forward, share_of, strict=True):
        talks = [x * f + y * i for i, y in zip(backward, share_of, strict=True)]
        works = [(1 - x) * f + (1 - y) * i for i, y in zip(backward, share_of, strict=True)]
        for name, more in (("pair", weight), ("pair_split", (0.0,) * stages)):
            rows = zip(talks, works, more, strict=True)
            times[name].append(tuple(max(talk, work + w + talk * (1 - 1 / factor)) for talk, work, w in rows))
    pair, pair_split = (rows[0][0] if stages == 1 else tuple(rows) for rows in times.values())
    return replace(costs, pair=pair, pair_split=pair_split)


def takes_chunks(name: str) -> bool:
    """Return whether the number of chunks of the family `name` can be chosen; also True for a name that is not a family."""
    family = FAMILIES.get(canonical_name(name))
    return family is None or "chunks" in inspect.signature(family).parameters


def require_schedule(name: str, options: Iterable[str]) -> None:
    """Raise UsageError or ScheduleError for a name, a file or names of options that no sizes can make a schedule of."""
    if names_a_file(name):
        load(name)
    else:
        require(name, options)


def _agree(name: str, schedule: Schedule, sizes: Sizes, options: object) -> None:
    """Raise UsageError for options, and for sizes that differ from the file's."""
    if options:
        raise UsageError(f"{name} is a file: it takes no options")
    for each in fields(Sizes):
        given, actual = getattr(sizes, each.name), getattr(schedule, each.name)
        if given is not None and given != actual:
            raise UsageError(f"--{each.name} is {given}, and {name} has {actual}; leave the option out")


def _numbers(option: str, text: str, of_what: str = "stage") -> float | tuple[float, ...]:
    try:
        values = tuple(float(word) for word in text.split(","))
    except ValueError:
        raise UsageError(
            f"{option} is {text!r:.200}; give a number, or one number for each {of_what}, separated by commas"
        ) from None
    return values[0] if len(values) == 1 else values
