"""The `pipeloom` command. Each subcommand is one small module, which imports slow packages only when it needs them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from pipeloom.cli import check, compare, hub, plan, rehearse, schedule, search, show
from pipeloom.cli.failures import exit_code_of, protect_streams

_OWN_OPTIONS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
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


app.command("schedule")(schedule.command)
app.command("compare")(compare.command)
app.command("search")(search.command)
app.command("plan")(plan.command)
app.command("check")(check.command)
app.command("rehearse", cls=rehearse.RehearseCommand)(rehearse.command)
app.command("show")(show.command)
app.command("export")(hub.export)
app.command("import")(hub.import_)
app.command("generate")(hub.generate)


@app.command("train", context_settings=_OWN_OPTIONS)
def _train(context: typer.Context) -> None:
    """Train a language model."""
    from pipeloom.cli.train import command

    raise typer.Exit(command(context.args) or 0)


@app.command("verify", context_settings=_OWN_OPTIONS)
def _verify(context: typer.Context) -> None:
    """Compare loss and gradients with one process."""
    from pipeloom.cli.verify import command

    raise typer.Exit(command(context.args) or 0)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit with its exit code (`pipeloom.errors`)."""
    protect_streams()
    given = list(sys.argv[1:] if arguments is None else arguments)
    json = "--json" in given
    sys.exit(exit_code_of(lambda: app(given, prog_name="pipeloom", standalone_mode=False), as_json=json, given=given))
