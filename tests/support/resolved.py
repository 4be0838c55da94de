"""The layout of a configuration that is already there."""

from __future__ import annotations

from pipeloom.config import Config, Layout
from pipeloom.config.layout import examine
from pipeloom.errors import ConfigError


def resolve(config: Config) -> Layout:
    """Return the layout of `config`. Raises ConfigError with all problems, ScheduleError for a schedule that cannot run."""
    layout, problems = examine(config)
    if problems or layout is None:
        raise ConfigError(problems)
    return layout
