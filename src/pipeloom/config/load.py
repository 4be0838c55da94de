"""Loading of configurations: the package's default, a file and those that it extends, overrides. One error holds all problems."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeloom.config.adapter import adapter_keys
from pipeloom.config.expert_checks import CLASS_KEYS
from pipeloom.config.files import Merged, built_in, lay_file
from pipeloom.config.hub import is_directory, own_sizes, sizes
from pipeloom.config.layout import Layout, examine
from pipeloom.config.overrides import nested
from pipeloom.config.problems import sentences
from pipeloom.config.schedules import read_schedule
from pipeloom.config.sections import COMPUTED, Config
from pipeloom.config.vocabulary import vocabulary_size
from pipeloom.errors import ConfigError, PipeloomError
from pipeloom.limits import expanded
from pipeloom.schedule.files import names_a_file

CODE_KEYS = ("schedule.name", *(f"model.{key}" for key in CLASS_KEYS))  # keys that may name the user's code


def load(path: str | Path | None = None, *overrides: Mapping[str, Any]) -> Config:
    """The configuration of a file (None: the package's default), then `overrides` ("section.key" -> value) in order.

    Raises ConfigError with every problem of every key; `resolve` finds contradictions between keys.
    """
    merged = merge(path, *overrides)
    config, problems, _ = _validate(merged)
    if problems or config is None:
        raise ConfigError(list(problems.values()))
    return config


def load_layout(
    path: str | Path | None = None,
    *overrides: Mapping[str, Any],
    world_size: int | None = None,
    folder: Path | None = None,
) -> Layout:
    """`resolve(load(path, *overrides))` with the problems of both in one ConfigError.

    `world_size` is the number of workers that torchrun started; it determines an axis of -1, and is a problem where it differs
    from the layout's. Code that a key names as `module:function` is imported from the folder of the file that names it; where
    `overrides` name it, from `folder` (None: the working directory). Raises ScheduleError when all keys are valid but the
    schedule cannot run.
    """
    merged = merge(path, *overrides)
    config, wrong, fallback = _validate(merged)
    problems = list(wrong.values())
    if config is None and fallback is None:
        raise ConfigError(problems)
    resolved = config or fallback
    assert resolved is not None
    sizes: list[str] = []
    if not any(key.startswith("parallel") for key in wrong):
        resolved, sizes = _computed(resolved, world_size)
    folders = {key: _folder(merged.origins.get(key, ""), folder) for key in CODE_KEYS}
    try:
        layout, more = examine(
            resolved, {*wrong, "parallel"} if sizes and COMPUTED in _axes(resolved) else wrong, folders
        )
    except PipeloomError:
        if problems:
            raise ConfigError(problems) from None
        raise
    problems += more
    problems += [problem for problem in sizes if problem not in problems]
    if problems or layout is None:
        raise ConfigError(problems)
    return replace(layout, origins=_origins(merged, config or resolved, resolved))


def _folder(origin: str, given: Path | None) -> Path:
    """Return the folder from which code is imported that a key with this origin names."""
    return Path(origin).absolute().parent if Path(origin).is_file() else (given or Path())


def _origins(merged: Merged, before: Config, after: Config) -> dict[str, str]:
    """ "section.key" -> the origin of its value in `after`; `before` has the values of files and flags alone."""
    origins = dict(merged.origins)
    for section, table in after.model_dump().items():
        for key, value in table.items():
            name = f"{section}.{key}"
            if getattr(getattr(before, section), key) != value:
                origins[name] = "environment (WORLD_SIZE)"
            origins.setdefault(name, origins.get(section, "default"))
    return origins


def merge(path: str | Path | None, *overrides: Mapping[str, Any]) -> Merged:
    """The merged tables, not validated. Raises ConfigError for files that cannot be read."""
    merged = Merged()
    merged.lay(built_in("default"), "default", default=True)
    if path is not None and str(path) != "default":
        lay_file(merged, path)
    for layer in overrides:
        merged.lay(nested(layer), None)
    _adopt_file_sizes(merged)
    _adopt_model_sizes(merged)
    _adopt_adapter(merged)
    _make_absolute(merged, "model", "weights", ("",))
    _make_absolute(merged, "data", "tokenizer", ("", "auto", "bytes"))
    _adopt_vocabulary(merged)
    return merged


def _make_absolute(merged: Merged, section: str, key: str, words: Sequence[str]) -> None:
    """Make an existing path absolute, so that a run's `config.toml` and checkpoints name it wherever they are read.

    Args:
        words: values that are not paths.
    """
    table = merged.values.get(section)
    value = table.get(key) if isinstance(table, dict) else None
    if isinstance(table, dict) and isinstance(value, str) and value not in words:
        table[key] = _absolute(value)


def _absolute(name: str) -> str:
    path = expanded(name)
    return str(path.absolute()) if os.path.exists(path) else name


def _adopt_file_sizes(merged: Merged) -> None:
    """Take the ranks and micro-batches of a schedule file in place of the default's, but not of the user's."""
    schedule, parallel = merged.values.get("schedule"), merged.values.get("parallel")
    if not isinstance(schedule, dict) or not isinstance(parallel, dict):
        return
    name = schedule.get("name")
    if not isinstance(name, str) or not names_a_file(name) or not Path(name).is_file():
        return
    loaded = read_schedule(name)
    if "parallel.pp" not in merged.given:
        parallel["pp"] = loaded.ranks
        merged.origins["parallel.pp"] = name
    if "schedule.microbatches" not in merged.given:
        schedule["microbatches"] = loaded.microbatches
        merged.origins["schedule.microbatches"] = name


def _adopt_model_sizes(merged: Merged) -> None:
    """Take the sizes of a model in a directory. Raises ConfigError for other sizes that the user gave."""
    model = merged.values.get("model")
    if not isinstance(model, dict):
        return
    source, weights = (model.get(key) for key in ("source", "weights"))
    if isinstance(source, str) and source:
        _take_sizes(merged, model, "source", source, sizes(source))
        model["source"] = _absolute(source)
    elif isinstance(weights, str) and weights and is_directory(weights):
        _take_sizes(merged, model, "weights", weights, own_sizes(weights))


def _take_sizes(
    merged: Merged, model: dict[str, Any], which: str, directory: str, directory_keys: Mapping[str, Any]
) -> None:
    """Replace the default's sizes by `directory_keys`, those of the directory that `model.which` names."""
    for key in sorted(merged.given):
        section, _, name = key.partition(".")
        if section != "model" or name == which or name not in model:
            continue
        if which == "weights" and name not in directory_keys:
            continue  # how our own decoder trains, such as dropout
        if model[name] != directory_keys.get(name):
            raise ConfigError(
                f'{key} = {model[name]}: the model of model.{which} = "{directory}" sets it; leave it out'
            )
    merged.origins.update(dict.fromkeys((f"model.{key}" for key in directory_keys), f"{directory}/config.json"))
    model.update(directory_keys)


def _adopt_adapter(merged: Merged) -> None:
    """Take the options of an adapter in a directory. Raises ConfigError for other ones that the user gave."""
    section = merged.values.get("lora")
    adapter = section.get("adapter") if isinstance(section, dict) else None
    if not isinstance(section, dict) or not isinstance(adapter, str) or not adapter:
        return
    adapter_options = adapter_keys(adapter)
    for name in ("r", "lora_alpha", "target_modules"):
        given = section.get(name)
        if (
            f"lora.{name}" in merged.given
            and (list(given) if isinstance(given, tuple) else given) != adapter_options[name]
        ):
            raise ConfigError(f'lora.{name} = {given}: the adapter of lora.adapter = "{adapter}" sets it; leave it out')
    adopted = {name: value for name, value in adapter_options.items() if f"lora.{name}" not in merged.given}
    section.update(adopted, adapter=_absolute(adapter))


def _adopt_vocabulary(merged: Merged) -> None:
    """Take the vocabulary size of our own decoder from the tokenizer, in place of the default but not of the user's."""
    model, data = merged.values.get("model"), merged.values.get("data")
    if not isinstance(model, dict) or not isinstance(data, dict) or model.get("source"):
        return
    if isinstance(model.get("weights"), str) and model["weights"] and is_directory(model["weights"]):
        return  # its config.json gives the vocabulary size
    name = data.get("tokenizer")
    if not isinstance(name, str) or name in ("auto", "bytes") or "model.vocab_size" in merged.given:
        return
    size = vocabulary_size(name)
    if size is not None:
        model["vocab_size"] = size


def _validate(merged: Merged) -> tuple[Config | None, dict[str, str], Config | None]:
    """(the configuration or None, key -> problem, the configuration with wrong keys set back to the default's)."""
    try:
        return Config.model_validate(merged.values), {}, None
    except ValidationError as error:
        problems = sentences(error, merged.values, merged.origins)
    default = built_in("default")
    repaired: dict[str, Any] = {section: dict(table) for section, table in default.items()}
    for section, table in merged.values.items():
        if section in default and isinstance(table, dict):
            sound = {key: value for key, value in table.items() if f"{section}.{key}" not in problems}
            repaired[section] |= sound
    try:
        return None, problems, Config.model_validate(repaired)
    except ValidationError:
        return None, problems, None


def _axes(config: Config) -> tuple[int, int, int]:
    return config.parallel.pp, config.parallel.dp, config.parallel.tp


def _computed(config: Config, world_size: int | None) -> tuple[Config, list[str]]:
    """Return `config` with the axis that is -1 computed from the number of workers, and the problems of that number."""
    parallel = config.parallel
    sizes = dict(zip(("pp", "dp", "tp"), _axes(config), strict=True))
    open_axes = [axis for axis, size in sizes.items() if size == COMPUTED]
    if world_size is None or len(open_axes) > 1:
        return config, []
    product = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size != COMPUTED)
    known = prod(size for size in sizes.values() if size != COMPUTED)
    if open_axes:
        axis = open_axes[0]
        if world_size % known:
            below = world_size // known * known
            return config, [
                f"parallel.{axis} = -1: {product} = {known} does not divide the {world_size} workers of WORLD_SIZE; "
                f"start {f'{below} or ' if below else ''}{below + known} workers"
            ]
        return config.model_copy(update={"parallel": parallel.model_copy(update={axis: world_size // known})}), []
    if known == world_size:
        return config, []
    fitting = [
        f"parallel.{axis} = {world_size * size // known}"
        for axis, size in sizes.items()
        if world_size * size % known == 0
    ]
    advice = f"start {known} workers" + (f", or set {' or '.join(fitting)}" if fitting else "")
    return config, [
        f"parallel.pp = {parallel.pp}: {product} needs {known} workers, but WORLD_SIZE is {world_size}; {advice}"
    ]
