"""Output of commands: JSON, drawings in files, tables of text."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeloom.cli.options import flag
from pipeloom.draw import LEAST_WIDTH, USUAL_WIDTH, figures, terminal
from pipeloom.draw.svg import png as rendered
from pipeloom.draw.svg import require_png
from pipeloom.errors import UsageError, folded
from pipeloom.schedule import Schedule, Timeline
from pipeloom.schedule.json_form import to_dict
from pipeloom.traces.timelines import costs_dict


def json_flag() -> Any:
    """Declare `--json`, which every command has that prints a result."""
    return flag(False, None, "Print one JSON object and nothing else.", "--json")


@dataclass(frozen=True)
class OutputFlags:
    """The files and forms in which a command writes its result."""

    as_json: bool = json_flag()
    csv: bool = flag(False, None, "Print the schedule in torch's CSV format.", "--csv")
    svg: Path | None = flag(None, "FILE", "Write the drawing as SVG.")
    png: Path | None = flag(
        None, "FILE", "Write the drawing as PNG, at twice its size in pixels (needs the extra png)."
    )
    html: Path | None = flag(None, "FILE", "Write an interactive HTML page, which works offline.")
    trace: Path | None = flag(None, "FILE", "Write a trace that Perfetto opens.")
    width: int | None = flag(
        None, "N", "Width of the drawing: columns in the terminal, pixels in the SVG.", min=20, max=20000
    )

    @property
    def columns(self) -> int:
        """The width of text in the terminal."""
        return self.width or shutil.get_terminal_size().columns

    @property
    def drawn(self) -> list[str]:
        """The options that ask for a drawing."""
        return [name for name in ("svg", "png", "html") if getattr(self, name) is not None]

    def require(self) -> None:
        """Raise UsageError for files that cannot be written, before the work whose result they are to hold."""
        require_one_form({"--json": self.as_json, "--csv": self.csv})
        if self.png is not None:
            require_png()
        require_writable(self.svg, self.png, self.html, self.trace)

    def draw(self, timelines: Sequence[Timeline], below: Callable[[float], str] | None = None, **page: Any) -> None:
        """Write the files that the options name; the trace contains only the first timeline.

        Args:
            below: width -> an SVG document to draw below the timelines.
            page: `bound` and `limit` of `draw.html`; the SVG has the limit too.
        """
        from pipeloom import draw

        self.draw_as(lambda width: draw.svg(timelines, width, below=below, limit=page.get("limit")))
        if self.html is not None:
            write(self.html, lambda: draw.html(timelines, None, below(draw.USUAL_WIDTH) if below else "", **page))
        if self.trace is not None:
            write(self.trace, lambda: json.dumps(draw.trace(timelines[0])))

    def draw_as(self, drawing: Callable[[int], str]) -> None:
        """Write an SVG document, width -> text, to the files of `--svg` and `--png`, where they are given."""
        width = max(self.width or USUAL_WIDTH, LEAST_WIDTH)
        if self.svg is not None:
            write(self.svg, lambda: drawing(width))
        if self.png is not None:
            write(self.png, lambda: rendered(drawing(width)))

    def print_timeline(self, timeline: Timeline, bound: bool = True) -> None:
        """Draw `timeline` in the terminal, with or without its lower bound."""
        sys.stdout.write(terminal(timeline, width=self.columns, bound=bound))


def require_one_form(given: Mapping[str, object]) -> None:
    """Raise UsageError where more than one option that prints a form of the result on standard output is given."""
    forms = [option for option, value in given.items() if value]
    if len(forms) > 1:
        raise UsageError(f"{' and '.join(forms)} print on standard output; choose one")


def require_writable(*paths: Path | None) -> None:
    """Raise UsageError for a file that cannot be written, or that is named twice, before the work whose result it is to hold."""
    seen = set[str]()
    for path in paths:
        if path is None:
            continue
        if path.is_dir():
            raise UsageError(f"cannot write {path}: it is a directory")
        if not path.parent.is_dir():
            raise UsageError(f"cannot write {path}: there is no directory {path.parent}")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise UsageError(f"cannot write {path}: {os.strerror(errno.EACCES)}")
        real = os.path.realpath(path)
        if real in seen and (path.is_file() or not path.exists()):  # a device takes both
            raise UsageError(f"{path} is named for two results, and would hold only one of them")
        seen.add(real)


def write_csv(schedule: Schedule, path: Path | None = None, *, messages: bool = False) -> None:
    """Print a schedule in torch's CSV format, or write it to a file; what torch needs beside it goes to standard error.

    Args:
        messages: with sends and receives, as torch's runtime executes it.
    """
    from pipeloom.interop.torch_runtime import csv_of

    text, notes = csv_of(schedule, messages=messages)
    print("".join(f"{note}\n" for note in notes), end="", file=sys.stderr)
    if path is None:
        sys.stdout.write(text)
    else:
        write(path, lambda: text)


def write(path: Path, content: Callable[[], str | bytes]) -> None:
    """Write the file and report it on standard error, which keeps standard output free for the command's result.

    Raises UsageError if the file cannot be written.
    """
    data = content()
    try:
        path.write_bytes(data if isinstance(data, bytes) else data.encode("utf-8"))
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from None
    print(f"wrote {path}", file=sys.stderr)


def emit(as_json: bool, values: Callable[[], Mapping[str, Any]], lines: Callable[[], Iterable[str]]) -> None:
    """Print a result: its values as one JSON object, or its lines, folded."""
    print(json.dumps(values(), allow_nan=False) if as_json else folded("\n".join(lines())))


def as_dict(timeline: Timeline) -> dict[str, object]:
    """Return the JSON form of the schedule together with the costs of a stage and the figures of the timeline."""
    bytes_ = {"peak_bytes": timeline.peak_bytes} if timeline.costs.bytes else {}
    return to_dict(timeline.schedule) | {"costs": costs_dict(timeline.costs, "a stage")} | figures(timeline) | bytes_
