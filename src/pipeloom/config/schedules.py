"""From `[schedule]` and `[parallel] pp` to a Schedule: a family, a file, or a function of the user's."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeloom.config.sections import Config
from pipeloom.errors import ConfigError, PipeloomError
from pipeloom.schedule import Schedule
from pipeloom.schedule.families import build
from pipeloom.schedule.files import load, names_a_file


def read_schedule(name: str) -> Schedule:
    """The schedule in the CSV or JSON file `name`. Raises ConfigError without one, ScheduleError for its content."""
    if not Path(name).is_file():
        raise ConfigError(f'schedule.name = "{name}": there is no such file')
    return load(Path(name))


def make_schedule(config: Config) -> Schedule:
    """The schedule that `config` names; whether it can run is `check`'s to say.

    Raises UsageError when the schedule refuses its sizes or options, when a file's sizes are not the configuration's,
    or when a user's function fails.
    """
    wanted = config.schedule
    if names_a_file(wanted.name):
        return _sized(read_schedule(wanted.name), config)
    with _from_here():
        try:
            made = build(wanted.name, config.parallel.pp, wanted.microbatches, wanted.chunks, wanted.options)
        except PipeloomError:
            raise
        except Exception as error:
            if ":" not in wanted.name and not isinstance(error, TypeError):
                raise
            raise ConfigError(
                f'schedule.name = "{wanted.name}": it failed with {type(error).__name__}: {error}'
            ) from error
    return _sized(made, config)


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


@contextmanager
def _from_here() -> Iterator[None]:
    """Lets `module:function` find modules in the working directory, also under the installed command."""
    here = os.getcwd()
    added = here not in sys.path and "" not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        yield
    finally:
        if added and here in sys.path:
            sys.path.remove(here)
