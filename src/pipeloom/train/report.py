"""What a run tells: the terminal, and the files of its own folder."""

from __future__ import annotations

import json
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pipeloom import draw
from pipeloom.config import Config, to_toml
from pipeloom.errors import ConfigError
from pipeloom.schedule import Timeline
from pipeloom.train.metrics import StepMetrics, simulated


@dataclass(frozen=True)
class RunFolder:
    """The files of one run: its configuration, a JSON line a step, and the step that was drawn."""

    root: Path

    @property
    def log(self) -> Path:
        return self.root / "log.jsonl"

    @property
    def trace(self) -> Path:
        return self.root / "trace.json"

    @property
    def svg(self) -> Path:
        return self.root / "timeline.svg"


def make_folder(config: Config) -> RunFolder:
    """A fresh folder in `log.dir`, called after the time and the schedule; raises ConfigError where it cannot be."""
    name = re.sub(r"[^\w.-]+", "-", config.schedule.name).strip("-.")
    stem = Path(config.log.dir).expanduser() / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    for number in range(1, 1000):
        root = stem if number == 1 else stem.with_name(f"{stem.name}-{number}")
        try:
            root.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(f'log.dir = "{config.log.dir}": cannot make a folder there: {error.strerror}') from None
        (root / "config.toml").write_text(to_toml(config), encoding="utf-8")
        return RunFolder(root)
    raise ConfigError(f'log.dir = "{config.log.dir}": {stem} and 998 more exist already')


class Report:
    """The terminal and the folder of a run, for rank 0; use it in a `with` block."""

    def __init__(self, config: Config) -> None:
        self.folder = make_folder(config)
        self._steps = config.train.steps
        self._log: IO[str] = self.folder.log.open("w", encoding="utf-8")
        self._console = Console(file=sys.stdout, highlight=False, markup=False, soft_wrap=True)
        self._progress: Progress | None = None
        if self._console.is_terminal:
            columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._progress = Progress(*columns, console=self._console, transient=True)
            self._task = self._progress.add_task("training", total=self._steps)

    def __enter__(self) -> Report:
        return self

    def __exit__(self, *_: object) -> None:
        self.end_progress()
        self._log.close()

    def say(self, text: str) -> None:
        self._console.print(text)
        self._console.file.flush()

    def record(self, event: str, **figures: Any) -> None:
        """One line of the log: floats in full, so that equal runs have equal lines."""
        self._log.write(json.dumps({"event": event, **figures}) + "\n")
        self._log.flush()

    def step(self, metrics: StepMetrics) -> None:
        self.say(metrics.line(self._steps))
        self.record("figures", **metrics.record())

    def advance(self) -> None:
        """One step more on the progress bar."""
        if self._progress is not None:
            if not self._progress.live.is_started:
                self._progress.start()
                self._console.show_cursor(
                    True
                )  # the watchdog may end this process at once: the cursor must be there then
            self._progress.advance(self._task)

    def end_progress(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def draw(self, measured: Timeline) -> None:
        """Writes the trace of a measured step, and its drawing with the simulated one below it."""
        self.folder.trace.write_text(json.dumps(draw.trace(measured)), encoding="utf-8")
        self.folder.svg.write_text(draw.svg([measured, simulated(measured)]), encoding="utf-8")
