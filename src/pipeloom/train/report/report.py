"""Output of a run: the terminal, the files of its own folder, TensorBoard and Weights & Biases."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pipeloom import draw
from pipeloom.config import Config, to_toml
from pipeloom.draw.losses import loss_curve
from pipeloom.errors import COLUMNS, ConfigError, UsageError, folded, printable
from pipeloom.limits import expanded
from pipeloom.schedule import Timeline
from pipeloom.traces import timelines as timeline_files
from pipeloom.train.report.metrics import StepMetrics, simulated
from pipeloom.train.report.prediction import Comparison, step_lines
from pipeloom.train.workers.failures import DIGESTS_FILE, EXIT_FILE
from pipeloom.train.workers.preflight import environment_lines

_ROWS_BELOW_HEAD = 20  # that a terminal shows with their head


class TensorBoardFigures:
    """Event files in `tensorboard/` of the run's folder.

    `write` takes the figures of a step, counted from 1. Step numbers never decrease, and one may be written several times.
    """

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder / "tensorboard"))

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbFigures:
    """A run of Weights & Biases, named after the run's folder; offline unless WANDB_MODE is set."""

    def __init__(self, config: Config, folder: Path) -> None:
        import wandb  # type: ignore[import-not-found]

        self._run: Any = wandb.init(
            project=config.log.wandb,
            name=folder.name,
            dir=str(folder),
            config=config.model_dump(mode="json"),
            mode=os.environ.get("WANDB_MODE", "offline"),
        )

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        self._run.finish()


class RunFolder:
    """Paths of the files of one run: its log, with one JSON object per line, and the traces and drawings of its steps."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.log = root / "log.jsonl"
        self.trace = root / "trace.json"
        self.svg = root / "timeline.svg"
        self.page = root / "timeline.html"
        self.timelines = root / "timelines.json"


def make_folder(config: Config) -> Path:
    """Create a folder in `log.dir`, with mode 0700, named after the time and the schedule. Raises OSError if that fails."""
    name = re.sub(r"[^\w.-]+", "-", config.schedule.name).strip("-.")
    stem = expanded(config.log.dir) / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    number, root = 1, stem
    while True:
        try:
            root.mkdir(0o700, parents=True)
            return root
        except FileExistsError:
            number += 1
            root = stem.with_name(f"{stem.name}-{number}")


class Report:
    """The terminal and the folder of a run, for rank 0; use it in a `with` block.

    Training continues if a file cannot be written, because the disk is full or the folder was deleted: one line reports that,
    once per file, and the figures are on the terminal.
    """

    def __init__(
        self,
        config: Config,
        folder: Path | None = None,
        facts: Mapping[str, Any] | None = None,
        origins: Mapping[str, str] | None = None,
    ) -> None:
        """
        Args:
            folder: of a run to continue in; None: a new one.
            facts: for the `run.json` of a new folder.
            origins: origins of the configuration's values, for the comments in `config.toml`.

        Raises ConfigError if the folder cannot be written.
        """
        self._steps = config.train.steps
        self._html = config.log.html
        try:
            self.folder = RunFolder(make_folder(config) if folder is None else folder)
            self._log = os.open(self.folder.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            self._begin(config, origins, facts if folder is None else None)
        except OSError as error:
            where = error.filename or self.folder.root
            raise ConfigError(f'log.dir = "{config.log.dir}": cannot write {where}: {error.strerror}') from None
        self._writers: list[TensorBoardFigures | WandbFigures] = []
        if config.log.tensorboard:
            self._writers.append(TensorBoardFigures(self.folder.root))
        if config.log.wandb:
            self._writers.append(WandbFigures(config, self.folder.root))
        self._rows = 0  # of the table of steps
        self._torn = False  # whether only part of the last line was written
        self._unwritten: set[Path] = set()
        self._console = Console(file=sys.stdout, highlight=False, markup=False, soft_wrap=True)
        self._progress: Progress | None = None
        if self._console.is_terminal:
            columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._progress = Progress(*columns, console=self._console, transient=True)
            self._task = self._progress.add_task("training", total=self._steps)

    def _begin(self, config: Config, origins: Mapping[str, str] | None, facts: Mapping[str, Any] | None) -> None:
        """Remove the record of the run's last end, and write `config.toml`; with `facts`, also `run.json`."""
        root = self.folder.root
        (root / EXIT_FILE).unlink(missing_ok=True)
        text = "\n".join([to_toml(config, origins), *environment_lines(), ""])
        (root / "config.toml").write_text(text, encoding="utf-8")
        if facts is not None:
            where = expanded(config.checkpoint.dir).absolute()
            more = {"checkpoints": str(where)} if config.checkpoint.dir else {}
            text = json.dumps({**facts, "started": time.time(), **more})
            (root / DIGESTS_FILE).write_text(text, encoding="utf-8")

    def __enter__(self) -> Report:
        return self

    def __exit__(self, *_: object) -> None:
        self.end_progress()
        os.close(self._log)
        for writer in self._writers:
            with contextlib.suppress(OSError):
                writer.close()

    def figures(self, step: int, figures: Mapping[str, Any]) -> None:
        """Pass the finite numbers among `figures` to TensorBoard and Weights & Biases, if configured."""
        values = {name: value for name, value in figures.items() if name != "step" and isinstance(value, int | float)}
        numbers = {name: float(value) for name, value in values.items() if math.isfinite(value)}
        for writer in list(self._writers):
            try:
                writer.write(step, numbers)
            except Exception as error:  # an error of another package, of any type: it must not end a run
                self._writers.remove(writer)
                self.say(f"{type(writer).__name__}: {type(error).__name__}: {error}; training continues without it")

    def say(self, text: str) -> None:
        self._console.print(folded(printable(text)))
        self._console.file.flush()

    def record(self, event: str, **figures: Any) -> None:
        """Write one line of the log, with floats in full precision, so that equal runs have equal lines."""
        line = json.dumps({"event": event, **figures}) + "\n"
        data = ("\n" * self._torn + line).encode()
        try:
            written = os.write(self._log, data)  # unbuffered: a buffer would grow while the disk is full
        except OSError as error:
            self._cannot_write(self.folder.log, error)
            return
        if written:
            self._torn = written < len(data)

    def _cannot_write(self, path: Path, error: OSError) -> None:
        if path not in self._unwritten:
            self._unwritten.add(path)
            self.say(f"cannot write {path}: {error.strerror or error}; training continues without it")

    def step(self, metrics: StepMetrics) -> None:
        """Report the figures of a step: a row of a table, whose head is repeated."""
        head, *rows = metrics.lines(self._steps)
        self.say("\n".join([*([head] if self._rows % _ROWS_BELOW_HEAD == 0 else []), *rows]))
        self._rows += 1
        self.record("figures", **asdict(metrics))
        self.figures(metrics.step, asdict(metrics))

    def advance(self) -> None:
        """Advance the progress bar by one step."""
        if self._progress is not None:
            if not self._progress.live.is_started:
                self._progress.start()
                self._console.show_cursor(
                    True
                )  # the watchdog may end this process at any moment, and the cursor must be visible then
            self._progress.advance(self._task)

    def end_progress(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def draw(self, measured: Timeline, steps: Sequence[Timeline], predicted: Sequence[Timeline] = ()) -> None:
        """Write the recorded `steps`, the trace of `measured`, and drawings of `measured` above its simulation; on the page, also
        a row for what was `predicted` without it, and the losses."""
        both = [measured, simulated(measured)]
        page = expanded(self._html) if self._html else self.folder.page
        title = f"{self.folder.root.name}: measured and simulated"
        texts: tuple[tuple[Path, Callable[[], str]], ...] = (
            (self.folder.trace, lambda: json.dumps(draw.trace(measured))),
            (self.folder.timelines, lambda: json.dumps(timeline_files.to_dict(steps))),
            (self.folder.svg, lambda: draw.svg(both)),
            (page, lambda: draw.html(both, title, loss_curve(self.folder.log, draw.USUAL_WIDTH), rows=predicted)),
        )
        for path, text in texts:
            try:
                path.write_text(text(), encoding="utf-8")
            except OSError as error:
                with contextlib.suppress(OSError):
                    path.unlink()  # a truncated drawing cannot be opened
                self._cannot_write(path, error)

    def say_files(self, drawn: bool = True) -> None:
        """Print where the files are, and which of them are missing or incomplete.

        Args:
            drawn: whether `draw` was called: otherwise there is only the log.
        """
        page = expanded(self._html) if self._html else self.folder.page
        files = [
            ("log:    ", self.folder.log),
            ("trace:  ", self.folder.trace),
            ("svg:    ", self.folder.svg),
            ("page:   ", page),
        ]
        for words, path in files if drawn else files[:1]:
            note = ""
            if not path.exists():
                note = "  (not written)" if path in self._unwritten and path.parent.exists() else "  (gone)"
            elif path in self._unwritten:
                note = "  (incomplete)"
            self.say(f"{words}{path}{note}")

    def conclude(
        self,
        traces: Sequence[Timeline],
        losses: tuple[float, float, int],
        unit: str,
        written: str,
        crowded: str,
        compare: Callable[[Timeline], Comparison] | None = None,
    ) -> None:
        """Report the end of the run: losses, bubble, a sample, and the paths of its files.

        Args:
            traces: measured steps; none where all steps were made before, or the last one ended the measuring for a search.
            losses: on the held-out text before and after training, and the number of its targets.
            unit: the word for a target.
            written: the sample; "": none.
            crowded: how many ranks share how many cores; "" where each has its own.
            compare: compares the typical step with its prediction; it may raise UsageError.
        """
        before, after, count = losses
        comparison: Comparison | None = None
        if traces:
            with contextlib.suppress(UsageError):  # a model that the planner does not know
                comparison = compare(typical(traces)) if compare is not None else None
            self.draw(typical(traces), traces, [comparison.predicted] if comparison is not None else ())
        self.say(f"\nheld-out loss: {after:.4f} nats per {unit} (before training {before:.4f}; {count:,} {unit}s)")
        if traces:
            measured = typical(traces)
            prediction = simulated(measured)
            self.record(
                "bubble",
                ranks=measured.schedule.ranks,
                shared_cores=crowded,
                measured=measured.bubble_rate,
                simulated=prediction.bubble_rate,
                makespan_measured=measured.makespan,
                makespan_simulated=prediction.makespan,
            )
            self.say("\n".join(step_lines(measured, comparison, crowded)))
        if comparison is not None:
            self.record("prediction", **comparison.record())
        if written:
            self.record("sample", text=written)
            parts = (textwrap.wrap(line, COLUMNS - 4, drop_whitespace=False) or [""] for line in written.split("\n"))
            self.say("sample:\n" + "\n".join(f"  | {part}" for line in parts for part in line))
        self.say_files(drawn=bool(traces))


class _NoReport:
    """Report of a rank that has none: its calls do nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *values, **figures: None


def reported(report: Report | None) -> Report:
    """Return `report`, or for a rank without one an object whose calls do nothing, so that all ranks run the same lines."""
    return cast(Report, _NoReport()) if report is None else report


def typical(traces: Sequence[Timeline]) -> Timeline:
    """Return the trace with the median makespan, excluding the first trace (warm-up) unless it is the only one."""
    settled = sorted(list(traces)[1:] or traces, key=lambda timeline: timeline.makespan)
    return settled[len(settled) // 2]
