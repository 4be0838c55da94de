"""The `pipeloom` command. Each subcommand is one module, which is imported when the command runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand

from pipeloom.cli.failures import exit_code_of, protect_streams
from pipeloom.cli.workers import WordedCommand, count_foreign
from pipeloom.shapes.hub import count_with

COMMANDS = {
    "schedule": "Draw a schedule, or write it in another format.",
    "compare": "Compare schedules that do the same work.",
    "search": "Search for a schedule within a memory limit.",
    "plan": "Find the layout with which to train a model.",
    "translate": "Write a job of one training system in the words of another.",
    "check": "Check that a schedule is complete and free of deadlock, and with --costs that it fits the memory.",
    "rehearse": "Run a schedule with real messages and emulated computation.",
    "show": "Show the measured steps of a run.",
    "improve": "Find what a measured step would have saved under another schedule.",
    "export": "Write a checkpoint as a Hugging Face directory.",
    "import": "Make a checkpoint from a Hugging Face directory.",
    "generate": "Generate text from a checkpoint or a model.",
    "train": "Train a language model.",
    "verify": "Compare loss and gradients with one process.",
    "profile": "Measure a model's layers and the links on this device.",
}
"""Name of a subcommand -> the first sentence of its help."""
_WITH_KEYS = ("train", "verify", "profile")  # commands that take every key of the configuration as a flag
_IN_HUB = {"export": "export", "import": "import_", "generate": "generate"}


class DeferredCommand(TyperCommand):
    """Place of a subcommand, whose module is imported when it runs: it need not wait for the packages of the others."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Return the context of the command itself."""
        name = self.name or ""
        settings: dict[str, Any] = {}
        if name in _WITH_KEYS:
            settings = {
                "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
                "options_metavar": "[CONFIG] [--section.key VALUE …] [OPTIONS]",
                "add_help_option": name != "train",  # whose help is more than typer's
            }
        module = import_module(f"pipeloom.cli.{'hub' if name in _IN_HUB else name}")
        alone = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
        alone.command(name, cls=WordedCommand, **settings)(getattr(module, _IN_HUB.get(name, "command")))
        return typer.main.get_command(alone).make_context(info_name, args, parent, **extra)


app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,  # rich's table of four columns truncates option names at 80 columns
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

count_with(count_foreign)


@app.callback(invoke_without_command=True)
def _pipeloom(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    """Pipeline-parallel training in which every schedule is data: created, checked, simulated, drawn and run as one object."""
    if version:
        from pipeloom import __version__

        typer.echo(f"pipeloom {__version__}")
        raise typer.Exit()


for _name, _summary in COMMANDS.items():
    app.command(_name, cls=DeferredCommand, help=_summary)(lambda: None)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit with its exit code (`pipeloom.errors`)."""
    protect_streams()
    given = list(sys.argv[1:] if arguments is None else arguments)
    json = "--json" in given
    sys.exit(exit_code_of(lambda: app(given, prog_name="pipeloom", standalone_mode=False), as_json=json, given=given))
