"""The Schedule that `[schedule]` and `[parallel] pp` name: of a family, from a file, or by a user's function."""

from __future__ import annotations

from pathlib import Path

from pipeloom.config.sections import Config
from pipeloom.errors import ConfigError, UsageError
from pipeloom.schedule import Schedule
from pipeloom.schedule.families import build
from pipeloom.schedule.files import load, names_a_file
from pipeloom.schedule.transforms import transformed


def read_schedule(name: str) -> Schedule:
    """The schedule in the CSV or JSON file `name`. Raises ConfigError if there is none, ScheduleError for its content."""
    if not Path(name).is_file():
        raise ConfigError(f'schedule.name = "{name}": there is no such file')
    return load(Path(name))


def make_schedule(config: Config, folder: Path | None = None) -> Schedule:
    """The schedule that `config` names, with its transforms applied; not yet checked.

    A user's function is imported from `folder` (None: the working directory).

    Raises UsageError when the schedule refuses its sizes or options, when a file's sizes differ from the configuration's,
    when a user's function fails, or when a transform refuses the schedule.
    """
    schedule = _untransformed(config, folder)
    try:
        return transformed(schedule, config.schedule.transforms)
    except UsageError as error:
        raise ConfigError(f"schedule.transforms = {list(config.schedule.transforms)}: {error}") from error


def _untransformed(config: Config, folder: Path | None) -> Schedule:
    wanted = config.schedule
    if names_a_file(wanted.name):
        return _sized(read_schedule(wanted.name), config)
    sizes = config.parallel.pp, wanted.microbatches, wanted.chunks
    try:
        complete = build(wanted.name, *sizes, wanted.options, folder=folder)
    except TypeError as error:  # an option of the wrong type
        raise ConfigError(f'schedule.name = "{wanted.name}": it failed with {type(error).__name__}: {error}') from error
    return _sized(complete, config)


def _sized(schedule: Schedule, config: Config) -> Schedule:
    problems = []
    if schedule.ranks != config.parallel.pp:
        problems.append(
            f'parallel.pp = {config.parallel.pp}, but schedule "{config.schedule.name}" is for {schedule.ranks} ranks; '
            f"set parallel.pp = {schedule.ranks}"
        )
    if schedule.microbatches != config.schedule.microbatches:
        problems.append(
            f'schedule.microbatches = {config.schedule.microbatches}, but schedule "{config.schedule.name}" is for '
            f"{schedule.microbatches}; set schedule.microbatches = {schedule.microbatches}"
        )
    if config.schedule.chunks is not None and schedule.chunks != config.schedule.chunks:
        problems.append(
            f'schedule.chunks = {config.schedule.chunks}, but schedule "{config.schedule.name}" has {schedule.chunks}; '
            f"set schedule.chunks = {schedule.chunks}"
        )
    if problems:
        raise ConfigError(problems)
    return schedule
