"""The `pipeloom` command. Each subcommand is one small module, which imports slow packages only when it needs them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from pipeloom.cli import check, compare, hub, improve, plan, profile, rehearse, schedule, search, show, train, verify
from pipeloom.cli.failures import exit_code_of, protect_streams
from pipeloom.cli.workers import WordedCommand

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,  # rich's table of four columns truncates option names at 80 columns
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _pipeloom(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    """Pipeline-parallel training in which every schedule is data: created, checked, simulated, drawn and run as one object."""
    if version:
        from pipeloom import __version__

        typer.echo(f"pipeloom {__version__}")
        raise typer.Exit()


for _name, _command in (
    ("schedule", schedule.command),
    ("compare", compare.command),
    ("search", search.command),
    ("plan", plan.command),
    ("check", check.command),
    ("rehearse", rehearse.command),
    ("show", show.command),
    ("improve", improve.command),
    ("export", hub.export),
    ("import", hub.import_),
    ("generate", hub.generate),
):
    app.command(_name, cls=WordedCommand)(_command)
for _name, _command in (("train", train.command), ("verify", verify.command), ("profile", profile.command)):
    app.command(
        _name,
        cls=WordedCommand,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        options_metavar="[CONFIG] [--section.key VALUE …] [OPTIONS]",
        add_help_option=_name != "train",  # whose help is more than typer's
    )(_command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit with its exit code (`pipeloom.errors`)."""
    protect_streams()
    given = list(sys.argv[1:] if arguments is None else arguments)
    json = "--json" in given
    sys.exit(exit_code_of(lambda: app(given, prog_name="pipeloom", standalone_mode=False), as_json=json, given=given))
