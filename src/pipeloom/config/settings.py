"""Loading of configurations: the package's default, a file and those that it extends, flags. One error holds all problems.

A configuration is merged key by key before it is validated, and the origin of each key is recorded: messages name it, and so does
the `config.toml` of a run.
"""

from __future__ import annotations

import copy
import difflib
import glob
import json
import os
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeloom.config.checks import CLASS_KEYS
from pipeloom.config.layout import Layout, examine, names_code, read_schedule, stages_of
from pipeloom.config.problems import sentences, shown
from pipeloom.config.rates import AUTO_RATE, AUTOMATIC, automatic_rates
from pipeloom.config.sections import COMPUTED, DERIVED, SECTIONS, Config
from pipeloom.errors import ConfigError, PipeloomError, UsageError, did_you_mean, echo, shortened
from pipeloom.limits import (
    CONFIG_BYTES,
    MOST_NESTED,
    TOKENIZER_BYTES,
    depth,
    expanded,
    number,
    number_or_text,
    read_file,
    read_json,
    usable_cores,
)
from pipeloom.schedule.families import canonical_name
from pipeloom.schedule.files import names_a_file
from pipeloom.shapes.hub import (
    ADAPTER_CONFIG,
    HUB_FAMILIES,
    ForeignError,
    HubFamily,
    adapter_keys,
    content_of,
    foreign_shape,
    is_directory,
    model_keys,
    own_shape,
    presets,
)

BUILT_IN = ("default", "tiny", "moe")
SHORT = {"html": "log.html"}  # flag that all commands share -> the key that it sets
CODE_KEYS = ("schedule.name", *(f"model.{key}" for key in CLASS_KEYS))  # keys that may name the user's code
_PATH_KEYS = ("model.source", "model.weights", "lora.adapter", "data.tokenizer")


def load(path: str | Path | None = None, *overrides: Mapping[str, Any]) -> Config:
    """The configuration of a file (None: the package's default), then `overrides` ("section.key" -> value) in order.

    Raises ConfigError with every problem of every key; `resolve` finds contradictions between keys.
    """
    config, problems, _ = _validate(merge(path, *overrides))
    if problems or config is None:
        raise ConfigError(list(problems.values()))
    return config


def load_layout(
    path: str | Path | None = None,
    *overrides: Mapping[str, Any],
    world_size: int | None = None,
    folder: Path | None = None,
) -> Layout:
    """The layout of `load(path, *overrides)`, with the problems of both in one ConfigError.

    `world_size` is the number of workers that torchrun started (0: as many as the layout needs, with 1 for an axis of -1); it
    determines an axis of -1, and is a problem where it differs from the layout's. Code that a key names as `module:function` is
    imported from the folder of the file that names it; where `overrides` name it, from `folder` (None: the working directory).
    Raises ScheduleError when all keys are valid but the schedule cannot run.
    """
    merged = merge(path, *overrides)
    _fit_pipeline(merged, world_size)
    config, wrong, fallback = _validate(merged)
    problems = list(wrong.values())
    resolved = config or fallback
    if resolved is None:
        raise ConfigError(problems)
    sizes: list[str] = []
    if not any(key.startswith("parallel") for key in wrong):
        resolved, sizes = _computed(resolved, world_size)
    folders = {key: _folder(merged.origins.get(key, ""), folder) for key in CODE_KEYS}
    try:
        layout, more = examine(
            resolved, {*wrong, "parallel"} if sizes and COMPUTED in _axes(resolved).values() else wrong, folders
        )
    except PipeloomError:
        if problems:
            raise ConfigError(problems) from None
        raise
    problems += more
    problems += [problem for problem in sizes if problem not in problems]
    if problems or layout is None:
        raise ConfigError(problems)
    changes = ((config or resolved, resolved, "environment (WORLD_SIZE)"), (resolved, layout.config, "parallel.zero"))
    notes = *layout.notes, *filter(None, merged.derived.values())
    return replace(layout, origins=_origins(merged, layout.config, changes), notes=notes)


def _fit_pipeline(merged: Merged, world_size: int | None) -> None:
    """Choose `parallel.pp` and `schedule.chunks`, where the user has not, for the layers of the model.

    The pipeline of a model in a directory has at most as many ranks as there are workers, or else GPUs, or else cores of this
    machine.
    """
    config, wrong, _ = _validate(merged)
    unset = {"parallel.pp", "schedule.chunks"} - merged.given
    if config is None or wrong or not unset or config.parallel.stages or names_code(config.schedule.name):
        return
    parallel, schedule, blocks = config.parallel, config.schedule, config.model.num_hidden_layers
    most = parallel.pp
    if most > blocks and "parallel.pp" not in unset:  # refused before a schedule of thousands of ranks is built
        return
    if config.model.source:
        devices = [] if config.train.device == "cpu" else glob.glob("/dev/nvidia[0-9]*")
        workers = (world_size or len(devices) or usable_cores()) // max(1, parallel.dp * parallel.tp * parallel.cp)
        most = max(1, workers if world_size else min(workers, most))
    ranks = range(min(most, blocks), 0, -1) if "parallel.pp" in unset else [parallel.pp]
    chunks = [schedule.chunks, 1] if "schedule.chunks" in unset else [schedule.chunks]
    for pp, count in product(ranks, chunks):
        if stages_of(config, pp, count) <= blocks:
            if (pp, count) != (parallel.pp, schedule.chunks):
                fitting = {"parallel.pp": pp} | ({} if count is None else {"schedule.chunks": count})
                merged.adopt(fitting, f"{blocks} layers")
            return


def _folder(origin: str, given: Path | None) -> Path:
    """Return the folder from which code is imported that a key with this origin names."""
    return Path(origin).absolute().parent if Path(origin).is_file() else (given or Path())


def _origins(merged: Merged, config: Config, changes: Sequence[tuple[Config, Config, str]]) -> dict[str, str]:
    """ "section.key" -> the origin of its value in `config`.

    Args:
        changes: (before, after, what changed the values that differ); the first `before` is that of files and flags alone.
    """
    origins = dict(merged.origins)
    for section, table in config.model_dump().items():
        for key in table:
            name = f"{section}.{key}"
            for before, after, origin in changes:
                if getattr(getattr(before, section), key) != getattr(getattr(after, section), key):
                    origins[name] = origin
            origins.setdefault(name, origins.get(section, "default"))
    return origins


@dataclass
class Merged:
    """Tables merged so far.

    Attributes:
        values: section -> key -> value, as TOML gives them.
        origins: "section.key" -> file or flag that set it last.
        given: the keys that a file of the user's or a flag sets, not only the package's own configurations.
        derived: the keys of `DERIVED` that were set -> a note.
    """

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    given: set[str] = field(default_factory=set)
    derived: dict[str, str] = field(default_factory=dict)

    def lay(self, tables: Mapping[str, Any], origin: str | None, *, default: bool = False) -> None:
        """Merge `tables` over the present values. Chunks and options belong to a schedule: naming another family drops them.

        Args:
            origin: the name of the file; None: flags.
            default: whether the tables are one of the package's own configurations.
        """
        named, before = tables.get("schedule"), self.values.get("schedule")
        if isinstance(named, dict) and isinstance(before, dict):
            name = before.get("name")
            if _family(named.get("name", name)) != _family(name):
                before.pop("chunks", None)
                before["options"] = {}
        tables = copy.deepcopy(dict(tables))
        for key, (former, rule) in DERIVED.items():
            section, _, name = key.partition(".")
            table = tables.get(section)
            if isinstance(table, dict) and name in table:
                value = table.pop(name)
                self.derived[key] = f"{key} = {shown(value)} has no effect: {rule}" if value != former else ""
        for section, table in tables.items():
            _overlay(self.values, section, table)
            for key in [f"{section}.{key}" for key in table] if isinstance(table, dict) else [section]:
                self.origins[key] = origin or f"--{key}"
                if not default:
                    self.given.add(key)

    def adopt(self, values: Mapping[str, Any], origin: str) -> None:
        """Set keys ("section.key" -> value) that neither a file of the user's nor a flag sets."""
        for key, value in values.items():
            section, _, name = key.partition(".")
            if key not in self.given and isinstance(table := self.values.get(section), dict):
                table[name] = value
                self.origins[key] = origin

    def text(self, key: str) -> str:
        """Return the text at "section.key"; "" if there is none."""
        section, _, name = key.partition(".")
        table = self.values.get(section)
        value = table.get(name) if isinstance(table, dict) else None
        return value if isinstance(value, str) else ""


def _overlay(table: dict[str, Any], key: str, value: Any) -> None:
    """Set a key of `table`; a table is merged into one that is there."""
    if isinstance(value, dict) and isinstance(table.get(key), dict):
        for inner, deeper in value.items():
            _overlay(table[key], inner, deeper)
    else:
        table[key] = value


def _family(name: object) -> object:
    """Return a schedule's name for comparisons: two names of one family are equal."""
    return canonical_name(name) if isinstance(name, str) else name


def merge(path: str | Path | None, *overrides: Mapping[str, Any]) -> Merged:
    """The merged tables, not validated. Raises ConfigError for files that cannot be read.

    Files that a key names give values of other keys, in place of the package's own but not of the user's: a schedule its sizes, a
    model, an adapter or a tokenizer theirs. Existing paths become absolute, so that a run's `config.toml` and checkpoints name
    them wherever they are read.
    """
    merged = Merged()
    merged.lay(built_in("default"), "default", default=True)
    if path is not None and str(path) != "default":
        _lay_file(merged, Path(path))
    for layer in overrides:
        merged.lay(_nested(layer), None)
    name = merged.text("schedule.name")
    if name and names_a_file(name) and Path(name).is_file():
        schedule = read_schedule(name)
        merged.adopt({"parallel.pp": schedule.ranks, "schedule.microbatches": schedule.microbatches}, name)
    _adopt_described(merged)
    _fit_microbatches(merged)
    for key in _PATH_KEYS:
        file = expanded(merged.text(key))
        if merged.text(key) not in ("", "auto", "bytes") and os.path.exists(file):
            section, _, name = key.partition(".")
            merged.values[section][name] = str(file.absolute())
    return merged


def _fit_microbatches(merged: Merged) -> None:
    """Cut a batch that is too small for the default number of micro-batches into single sequences."""
    config, _, _ = _validate(merged)
    if (
        config is not None
        and 0 < (rows := config.train.global_batch_size // config.parallel.dp) < config.schedule.microbatches
    ):
        merged.adopt({"schedule.microbatches": rows}, "train.global_batch_size")


def _adopt_described(merged: Merged) -> None:
    """Take the sizes of a model in a directory, or the vocabulary size of a tokenizer for our own decoder, and the options of an
    adapter."""
    source, weights, tokenizer = (merged.text(key) for key in ("model.source", "model.weights", "data.tokenizer"))
    if (preset := merged.text("model.preset")) and not source:
        merged.adopt({f"model.{name}": value for name, value in _preset_keys(preset).items()}, f"preset {preset}")
    if source:
        described = model_keys(foreign_shape(source, f'model.source = "{source}"'), ours=False)
        _adopt(merged, "model.source", f"{source}/config.json", described, set(merged.values["model"]) - {"source"})
    elif weights and is_directory(weights):
        described = own_keys(weights)  # the other keys say how our own decoder trains, such as dropout
        _adopt(merged, "model.weights", f"{weights}/config.json", described, set(described))
    elif not preset and tokenizer not in ("", "auto", "bytes") and (size := vocabulary_size(tokenizer)) is not None:
        merged.adopt({"model.vocab_size": size}, tokenizer)
    if adapter := merged.text("lora.adapter"):
        fixed = {"r", "lora_alpha", "target_modules"}
        described = adapter_keys(adapter, f'lora.adapter = "{adapter}"')
        _adopt(merged, "lora.adapter", f"{adapter}/{ADAPTER_CONFIG}", described, fixed)


def _preset_keys(name: str) -> dict[str, Any]:
    """Keys of `[model]` for a preset. Raises ConfigError for a name that is none, or a model that our own decoder lacks."""
    known = presets()
    if name not in known:
        raise ConfigError(
            f'model.preset = "{name}" is not known{did_you_mean(name, known)}; presets: {", ".join(known)}'
        )
    try:
        return model_keys(own_shape(known[name]), ours=True)
    except ForeignError as error:
        ours = [each for each, values in known.items() if HUB_FAMILIES.get(values["model_type"], HubFamily()).ours]
        raise ConfigError(
            f'model.preset = "{name}": {error}; nearest: {", ".join(ours)}, or model.source with a directory of it'
        ) from None


def own_keys(directory: str) -> dict[str, Any]:
    """Keys of `[model]` with which our own decoder computes the model in a directory. Raises ConfigError where it cannot."""
    where = f'model.weights = "{directory}"'
    try:
        content = content_of(directory, where)
        return model_keys(own_shape(content, f"{where}: {expanded(directory) / 'config.json'}"), ours=True)
    except ForeignError as error:
        raise ConfigError(f"{where}: {error}; nearest: model.source, which trains the model of transformers") from None


def _adopt(merged: Merged, key: str, file: str, values: Mapping[str, Any], fixed: Collection[str]) -> None:
    """Take the `values` that `file` describes. Raises ConfigError where the user gave others for the names `fixed`."""
    section, _, which = key.partition(".")
    table = merged.values[section]
    known = built_in("default")[section] | values  # a run's config.toml holds every key
    for name in sorted(fixed):
        value = list(table[name]) if isinstance(table.get(name), tuple) else table.get(name)
        if f"{section}.{name}" in merged.given and value != known.get(name):
            raise ConfigError(f'{section}.{name} = {shown(value)}: {key} = "{table[which]}" sets it; leave it out')
    merged.adopt({f"{section}.{name}": value for name, value in values.items()}, file)


def vocabulary_size(tokenizer: str) -> int | None:
    """One more than the largest token id of `tokenizer`, a file or a directory; None where its JSON does not give it.

    Errors in the file are reported when the tokenizer itself is loaded.
    """
    path = expanded(tokenizer)
    path = path / "tokenizer.json" if path.is_dir() else path
    try:
        content: Any = read_json(path, TOKENIZER_BYTES, "a tokenizer")
        words = content["model"]["vocab"]
        numbers = [len(words) - 1] if isinstance(words, list) else list(words.values())
        numbers += [token["id"] for token in content.get("added_tokens") or []]
        return int(max(numbers)) + 1 if numbers else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, UsageError):
        return None


def _validate(merged: Merged) -> tuple[Config | None, dict[str, str], Config | None]:
    """(the configuration or None, key -> problem, the configuration with wrong keys set back to the default's)."""
    try:
        config, why = _with_rates(merged.values)
    except ValidationError as error:
        problems = sentences(error, merged.values, merged.origins)
    else:
        merged.origins |= {f"optimizer.{key}": f"{AUTO_RATE}: {reason}" for key, reason in why.items()}
        return config, {}, None
    repaired = built_in("default")
    for section, table in merged.values.items():
        if section in repaired and isinstance(table, dict):
            repaired[section] |= {key: value for key, value in table.items() if f"{section}.{key}" not in problems}
    try:
        return None, problems, _with_rates(repaired)[0]
    except ValidationError:
        return None, problems, None


def _with_rates(values: Mapping[str, Any]) -> tuple[Config, dict[str, str]]:
    """Return the configuration of `values`, and why the optimizer's keys that are "auto" have the values that they have.

    Raises ValidationError.
    """
    table = values.get("optimizer")
    keys = [key for key in AUTOMATIC if isinstance(table, dict) and table.get(key) == AUTO_RATE]
    if keys:
        values = {**values, "optimizer": {**values["optimizer"], **{key: AUTOMATIC[key] for key in keys}}}
    config = Config.model_validate(values)
    section, reason = automatic_rates(config, keys)
    return config.model_copy(update={"optimizer": section}), dict.fromkeys(keys, reason)


def _axes(config: Config) -> dict[str, int]:
    axes = ("pp", "dp", "tp", *["cp"] * (config.parallel.cp > 1))
    return {axis: getattr(config.parallel, axis) for axis in axes}


def _computed(config: Config, world_size: int | None) -> tuple[Config, list[str]]:
    """Return `config` with the axis that is -1 computed from the number of workers, and the problems of that number."""
    axes = _axes(config)
    known = {axis: size for axis, size in axes.items() if size != COMPUTED}
    if world_size is None or len(known) < len(axes) - 1:
        return config, []
    product, workers = " x ".join(f"{axis} {size}" for axis, size in known.items()), prod(known.values())
    world_size = world_size or workers
    for axis in axes.keys() - known.keys():  # one at most
        if world_size % workers:
            below = world_size // workers * workers
            return config, [
                f"parallel.{axis} = -1: {product} = {workers} does not divide the {world_size} workers of WORLD_SIZE; "
                f"start {f'{below} or ' if below else ''}{below + workers} workers"
            ]
        parallel = config.parallel.model_copy(update={axis: world_size // workers})
        return config.model_copy(update={"parallel": parallel}), []
    if workers == world_size:
        return config, []
    fitting = [
        f"parallel.{axis} = {world_size * size // workers}"
        for axis, size in axes.items()
        if world_size * size % workers == 0
    ]
    advice = f"start {workers} workers" + (f", or set {' or '.join(fitting)}" if fitting else "")
    return config, [
        f"parallel.pp = {axes['pp']}: {product} needs {workers} workers, but WORLD_SIZE is {world_size}; {advice}"
    ]


# -- files


def built_in(name: str) -> dict[str, Any]:
    """The tables of a configuration that comes with the package."""
    return read_toml(Path(f"{name}.toml"), _text_of(name))


def _text_of(name: str) -> str:
    return resources.files("pipeloom.config").joinpath(f"{name}.toml").read_text(encoding="utf-8")


def descriptions() -> dict[str, str]:
    """ "section.key" -> its description, the comment above it in default.toml."""
    described: dict[str, str] = {}
    section, comment = "", ""
    for line in _text_of("default").splitlines():
        if key := re.match(r"(?:# )?(\w+) =", line):
            described[f"{section}.{key[1]}"], comment = comment.strip(), ""
        elif line.startswith("["):
            section, comment = line.strip("[]"), ""
        else:
            comment += line.removeprefix("#")
    return described


def _lay_file(merged: Merged, path: Path, extended_by: tuple[Path, ...] = ()) -> None:
    """Merge the file at `path` into `merged`, after the file that it extends.

    A name in BUILT_IN that is not a file stands for the package's own configuration. Raises ConfigError for a file that cannot
    be read, and for a cycle of `extends`.
    """
    if str(path) in BUILT_IN and not path.exists():
        merged.lay(built_in(str(path)), str(path), default=True)
        return
    resolved = path.resolve()
    if resolved in extended_by:
        names = " -> ".join(file.name for file in (*extended_by[extended_by.index(resolved) :], resolved))
        raise ConfigError(f"{path}: extends forms a cycle: {names}")
    tables = read_toml(path)
    parent = tables.pop("extends", None)
    if isinstance(parent, str):
        beside = path.parent / parent
        ours = parent in BUILT_IN and not beside.exists()
        _lay_file(merged, Path(parent) if ours else beside, (*extended_by, resolved))
    elif parent is not None:
        raise ConfigError(f"{path}: extends is {echo(parent)}; it must be the name of a TOML file, in quotes")
    merged.lay(tables, str(path))


def read_toml(path: Path, text: str | None = None) -> dict[str, Any]:
    """Return the tables of a TOML file (of `text`, where it is given).

    Raises ConfigError with the reason; for malformed TOML it begins with file:line:column.
    """
    name = shortened(str(path))
    try:
        if text is None:
            text = read_file(path, CONFIG_BYTES, "a configuration").decode("utf-8-sig")
        tables = tomllib.loads(text)
    except FileNotFoundError:
        files = [file.name for file in path.parent.glob("*.toml")] if path.parent.is_dir() else []
        near = did_you_mean(path.name, [*files, *BUILT_IN])
        raise ConfigError(f"there is no file {name}{near}") from None
    except UsageError as error:
        raise ConfigError(str(error)) from None
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} is not UTF-8 text (byte {error.start})") from None
    except tomllib.TOMLDecodeError as error:
        message, _, place = str(error).rpartition(" (at ")
        if place.startswith("line "):
            line, _, column = place.removeprefix("line ").removesuffix(")").partition(", column ")
        else:  # "at end of document"
            line, column = str(len((text or "").splitlines()) or 1), "1"
        raise ConfigError(f"{name}:{line}:{column}: {message or error}") from None
    except (RecursionError, ValueError) as error:  # a zero byte in the name, a number of thousands of digits
        raise ConfigError(f"{name} cannot be read: {error}") from None
    _require_sound(tables, name)
    return tables


def _require_sound(tables: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError for tables nested too deeply, a whole number of more than 64 bits, and text that no file name has."""
    if depth(tables) > MOST_NESTED:
        raise ConfigError(f"{where}: tables and lists are nested too deeply; at most {MOST_NESTED} levels")
    rest: list[tuple[str, Any]] = list(tables.items())
    while rest:
        key, value = rest.pop()
        if isinstance(value, int) and not -(2**63) <= value < 2**64:
            raise ConfigError(f"{where}: {shortened(key)} is {number(value)}; a whole number has at most 64 bits")
        if isinstance(value, str) and any(c == "\0" or "\ud800" <= c <= "\udfff" for c in value):
            raise ConfigError(
                f"{where}: {shortened(key)} is {value[:200]!a}: it is not text (UTF-8) without zero bytes"
            )
        if isinstance(value, dict):
            rest += value.items()
        elif isinstance(value, list):
            rest += [(key, item) for item in value]


def to_toml(config: Config, origins: Mapping[str, str] | None = None) -> str:
    """Return every key of `config` as TOML that `load` reads to an equal one; keys without a value are left out.

    Args:
        origins: "section.key" -> the origin of its value, for a comment at the end of the line.
    """
    lines: list[str] = []
    for section, table in config.model_dump(exclude_none=True).items():
        lines.append(f"[{section}]")
        for key, value in table.items():
            origin = (origins or {}).get(f"{section}.{key}")
            comment = "  # " + "".join(c if c.isprintable() else "?" for c in origin) if origin is not None else ""
            lines.append(f"{key} = {toml_value(value)}{comment}")
        lines.append("")
    return "\n".join(lines)


def toml_value(value: Any) -> str:
    """Return a value as TOML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, dict):
        inside = ", ".join(f"{json.dumps(str(key))} = {toml_value(item)}" for key, item in value.items())
        return f"{{{inside}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    return repr(value)


# -- flags


def split_arguments(arguments: Sequence[str]) -> tuple[str | None, dict[str, Any]]:
    """(path of the configuration or None, dotted key -> value) from a command's arguments.

    A value is read as TOML, else taken as text. A switch (a key that is true or false) may stand alone. Raises
    UsageError for a second path, a flag without a dot, or one without its value.
    """
    path: str | None = None
    overrides: dict[str, Any] = {}
    rest = list(reversed(arguments))
    while rest:
        word = rest.pop()
        if not word.startswith("-"):
            if path is not None:
                raise UsageError(
                    f"two configurations are named, {path!r:.200} and {word!r:.200}; give one, and flags as --section.key value"
                )
            path = word
            continue
        flag, equals, text = word.removeprefix("--").partition("=")
        flag = SHORT.get(flag, flag)
        if not word.startswith("--") or "." not in flag:
            raise UsageError(f"there is no option {word!r:.200}{_near_flag(flag)}")
        key = flag.replace("-", "_")
        switch = annotation_of(key) is bool
        if not equals:
            path_follows = bool(rest) and (rest[-1].endswith(".toml") or rest[-1] in BUILT_IN)
            if rest and not rest[-1].startswith("--") and not (switch and path_follows):
                text = rest.pop()
            elif switch:
                text = "true"
            else:
                raise UsageError(f"--{flag} needs a value: --{flag} VALUE")
        overrides[key] = parse_value(key, text)
    return path, overrides


def parse_value(key: str, text: str) -> Any:
    """Return the value of `text`, read as TOML if it is valid, else the text itself; for a key that holds text, always text."""
    kind = annotation_of(key)
    if kind is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):  # TOMLDecodeError is one; so are numbers of thousands of digits
        value = text if kind in (str, None) else number_or_text(text)
    only_text = kind is str or all(isinstance(choice, str) for choice in getattr(kind, "__args__", (0,)))
    return text if only_text and not isinstance(value, str) else value


def _nested(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """section -> key -> value (and deeper for a key that is a table) from dotted keys.

    Raises ConfigError for keys or values that `_require_sound` refuses; UsageError for a key that is given both a value and keys
    below it.
    """
    tables: dict[str, Any] = {}
    for dotted, value in overrides.items():
        if dotted.count(".") >= MOST_NESTED:
            raise ConfigError(f"--{shortened(dotted)}: a key has at most {MOST_NESTED} parts")
        _require_sound({dotted: value}, f"--{shortened(dotted)}")
        table = tables
        *path, last = dotted.split(".")
        for part in path:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise UsageError(f"--{dotted}: {part} already has a value that is not a table")
        table[last] = value
    return tables


def annotation_of(key: str) -> Any:
    """Return the type of a key of the configuration; None where there is no such key."""
    section, _, name = key.partition(".")
    model_field = SECTIONS[section].model_fields.get(name) if section in SECTIONS else None
    return model_field.annotation if model_field is not None else None


def other_names() -> dict[str, str]:
    """Return options and keys, of which the first that a command has is meant -> their names in other programs."""
    return tomllib.loads((resources.files("pipeloom.config") / "other_names.toml").read_text("utf-8"))


def named_otherwise(flag: str, known: Collection[str]) -> str:
    """Return the one of `known`, options or keys, which other programs call `flag`; "" for none."""
    word = flag.lower().replace("_", "-")
    means = (keys.split() for keys, names in other_names().items() if word in names.split())
    return next((key for keys in means for key in keys if key in known), "")


def _near_flag(flag: str) -> str:
    known = [f"--{section}.{key}" for section, model in SECTIONS.items() for key in model.model_fields]
    if "." in flag:
        return did_you_mean(f"--{flag}", known)
    if flag in SECTIONS:
        return f"; it is a section: give one of its keys, such as --{flag}.{next(iter(SECTIONS[flag].model_fields))}"
    keys = {name.rpartition(".")[2]: name for name in known}
    if (word := flag.replace("-", "_")) in keys:
        return f"; did you mean {keys[word]}?"
    if other := named_otherwise(flag, [name.removeprefix("--") for name in known]):
        return f"; did you mean --{other}?"
    near = difflib.get_close_matches(word, keys, n=1)
    return f"; did you mean {keys[near[0]]}?" if near else "; a key is given as --section.key value"
