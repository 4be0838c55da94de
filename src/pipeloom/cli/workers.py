"""Functions that commands with workers share: start of the workers, run of one worker, and help on configuration keys."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand

from pipeloom.cli.options import family_help
from pipeloom.errors import TRAIN_PACKAGES, UsageError, folded, missing_packages

if TYPE_CHECKING:
    from pipeloom.config import Layout
    from pipeloom.shapes.decoder import DecoderShape


_RESULT = "PIPELOOM_RESULT"  # names the file in which rank 0 leaves its result
_WORDS = "words"


class WordedCommand(TyperCommand):
    """Command that keeps the words of its command line, with which its workers are started, and describes families among them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[_WORDS] = list(args)
        return super().parse_args(ctx, args)

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """Write the help, with examples that can be copied where they take several lines."""

        def example(command: re.Match[str]) -> str:
            lines = textwrap.wrap(command[0], formatter.width - 8, subsequent_indent="    ", break_on_hyphens=False)
            return "\b\n" + " \\\n".join(lines)

        self.help = re.sub(r"(?m)(?<=\n\n)pipeloom .*$", example, inspect.cleandoc(self.help or ""))
        super().format_help_text(ctx, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then the options in the groups of `with_options`."""
        groups: dict[str, list[Any]] = {}
        for parameter in self.get_params(ctx):
            title = getattr(parameter, "rich_help_panel", None) or "Options"
            if (record := parameter.get_help_record(ctx)) is not None:
                groups.setdefault("Arguments" if parameter.param_type_name == "argument" else title, []).append(record)
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the options of the families that the command line names, behind the command's own."""
        for text in map(family_help, words_of(ctx)):
            formatter.write(f"\n{folded(text)}\n" if text else "")

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Complete the keys of the configuration too, where the command takes them."""
        items: list[Any] = super().shell_complete(ctx, incomplete)
        if not self.context_settings.get("ignore_unknown_options") or not incomplete.startswith("--"):
            return items
        from pipeloom.config import descriptions

        item = type(super().shell_complete(ctx, "--")[0])  # click's class, or that of typer's copy of click
        keys = descriptions().items()
        return items + [item(f"--{key}", help=words) for key, words in keys if f"--{key}".startswith(incomplete)]


def words_of(context: typer.Context) -> list[str]:
    """Return the words of the command line after the command's name."""
    return list(context.meta[_WORDS])


def require_torch(command: str) -> None:
    """Raise UsageError that names the extra if the trainer's packages are not installed; import none of them."""
    if missing := missing_of_trainer():
        raise missing_packages(f"pipeloom {command}", missing)


def require_one_task(command: str) -> None:
    """Raise UsageError in one of several tasks of Slurm, each of which would start workers of its own."""
    if (tasks := os.environ.get("SLURM_NTASKS", "1")) != "1":
        raise UsageError(
            f"SLURM_NTASKS is {tasks:.20} and RANK is not set: each of these tasks would start a run of its own; start one "
            "torchrun a node: srun --ntasks-per-node 1 torchrun --nnodes $SLURM_NNODES --node-rank $SLURM_NODEID … "
            f"-m pipeloom {command} … (docs/cluster.md); on one host: unset SLURM_NTASKS"
        )


def missing_of_trainer() -> list[str]:
    """Return the names of the trainer's packages that are not installed; import none of them."""
    return [name for name in TRAIN_PACKAGES if importlib.util.find_spec(name) is None]


def count_foreign(values: Mapping[str, Any], where: str) -> DecoderShape | None:
    """Return the shape of a model that `transformers` builds; None where a package for it is not installed."""
    if missing_of_trainer():
        return None
    from pipeloom.models.hf.sizes import counted_shape

    return counted_shape(values, where)


def start_workers(command: str, arguments: Sequence[str], world_size: int) -> int:
    """Run this command line as `world_size` workers; return the exit code.

    The working directory is on the workers' import path only if it contains the package itself, which then need not be
    installed.
    """
    from pipeloom.train.workers.launch import launch

    require_one_task(command)
    here = Path(__file__).parents[2] == Path.cwd()
    return launch(
        [sys.executable, *([] if here else ["-P"]), "-m", "pipeloom", command, *arguments],
        world_size,
        obedient=command == "train",
    )


def result_of_workers(
    command: str, arguments: Sequence[str], layout: Layout, body: Callable[[Any], str]
) -> tuple[int, str]:
    """Run `body` on the workers of `layout`; return the exit code, and what `body` returned on rank 0.

    A process that is no worker starts them, as `start_workers` does, and has the result where the exit code is 0. Of the workers
    only rank 0 has it, under torchrun; the result of all others is "".
    """
    from pipeloom.train.workers.worker import is_worker

    if not is_worker():
        with tempfile.TemporaryDirectory(prefix="pipeloom-") as folder:
            file = Path(folder) / "result"
            os.environ[_RESULT] = str(file)
            try:
                code = start_workers(command, arguments, layout.world_size)
            finally:
                del os.environ[_RESULT]
            return code, "" if code else file.read_text(encoding="utf-8")
    result = ""

    def run(worker: Any) -> None:
        nonlocal result
        result = body(worker)

    code = be_worker(layout, run)
    if int(os.environ["RANK"]) != 0:
        return code, ""
    if _RESULT not in os.environ:
        return code, result
    Path(os.environ[_RESULT]).write_text(result, encoding="utf-8")
    return code, ""


def be_worker(layout: Layout, body: Callable[[Any], None]) -> int:
    """Run `body` as one worker of `layout`. Return 0, or exit with the exit code of the failure."""
    from pipeloom.train.workers.worker import leave, main

    code = main(layout, body)
    if code:
        leave(code)
    return code


def layout_of_workers(ranks: int, device: str, timeout: float | str) -> Layout:
    """Return a layout for the start-up of workers that train no model: their number, the device and the watchdog's timeout."""
    from pipeloom.config import load_layout
    from pipeloom.train.workers.worker import world_size_given

    keys = {
        "parallel.pp": ranks,
        "schedule.name": "gpipe",
        "schedule.microbatches": 1,
        "train.global_batch_size": 1,
        "model.num_hidden_layers": ranks,
        "train.device": device,
        "train.timeout": timeout,
    }
    return load_layout(None, keys, world_size=world_size_given())


def describe_keys(sections: Collection[str] = ()) -> str:
    """Return the configuration keys of `sections` (none: of all) with descriptions and defaults, at the width of the terminal."""
    from pipeloom.config import descriptions, load
    from pipeloom.config.settings import toml_value

    default = load().model_dump()
    lines = []
    width = max(60, min(120, shutil.get_terminal_size().columns))
    described = descriptions()
    for section, values in default.items():
        if sections and section not in sections:
            continue
        lines.append(f"\n[{section}]")
        for key, value in values.items():
            default_text = "" if value is None or value == "" else f" ({toml_value(value)})".replace('"', "")
            flag = f"  --{section}.{key:<{29 - len(section)}} "
            text = textwrap.wrap(
                f"{described[f'{section}.{key}']}{default_text}", width - len(flag), break_on_hyphens=False
            )
            lines += [(flag if at == 0 else " " * len(flag)) + words for at, words in enumerate(text)]
    return "\n".join(lines)
