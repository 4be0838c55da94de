"""`pipeloom export` and `pipeloom import`: checkpoints out to Hugging Face directories, and in from them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from pipeloom.cli.workers import require_torch


def export(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="RUN_OR_CHECKPOINT_DIR", help="A checkpoint, or the newest of a run.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT_DIR", help="A new directory.")],
    merge: Annotated[
        bool, typer.Option("--merge", help="Add adapters to the weights that they were trained with.")
    ] = False,
    form: Annotated[
        str,
        typer.Option("--format", metavar="FORMAT", help="hf; or dcp: for torch.distributed.checkpoint, whole state."),
    ] = "hf",
) -> None:
    """Write a checkpoint's weights as a directory that `transformers` loads; adapters as one that `peft` loads.

    pipeloom export runs/20260101-120000-1f1b my-model
    """
    _require_format(form)
    require_torch("export")
    if form == "dcp":
        from pipeloom.errors import UsageError
        from pipeloom.train.dcp import export_dcp

        if merge:
            raise UsageError("--merge is for --format hf: dcp holds the checkpoint as it is")
        print(
            f"{export_dcp(checkpoint, out)} is now {out}: torch.distributed.checkpoint.load(state, checkpoint_id={str(out)!r})"
        )
        return
    from pipeloom.config.adapter import ADAPTER_CONFIG
    from pipeloom.train.hub import export as write

    taken = write(checkpoint, out, merge)
    how = (
        "PeftModel.from_pretrained(model, "
        if (out / ADAPTER_CONFIG).is_file()
        else "AutoModelForCausalLM.from_pretrained("
    )
    print(f"{taken} is now {out}: {how}{str(out)!r})")


def import_(
    source: Annotated[Path, typer.Argument(metavar="HF_DIR", help="A directory with config.json and safetensors.")],
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT_DIR", help="A new folder of checkpoints.")],
    form: Annotated[
        str,
        typer.Option(
            "--format", metavar="FORMAT", help="hf; or dcp, whose .metadata is unpickled: only if you trust it."
        ),
    ] = "hf",
) -> None:
    """Make a checkpoint of a Hugging Face directory: of our own decoder where it computes the same model.

    pipeloom import Llama-3.2-1B llama; pipeloom train llama/model.toml
    """
    _require_format(form)
    require_torch("import")
    if form == "dcp":
        from pipeloom.train.dcp import import_dcp

        print(
            f"{source / '.metadata'} is a pickle, which runs what it says: import only what you trust", file=sys.stderr
        )
        print(f"{source} is now {import_dcp(source, checkpoint)}")
        return
    from pipeloom.errors import ConfigError
    from pipeloom.train.hub import import_directory

    if checkpoint.exists() and (not checkpoint.is_dir() or any(checkpoint.iterdir())):
        raise ConfigError(f"{checkpoint} exists, and is not empty: give a new directory")
    path, own = import_directory(source, checkpoint)
    print(
        f"{path}: {'our own decoder, for any layout' if own else 'as transformers has it, for layouts without tp and ep'}"
    )
    print(f"pipeloom train {checkpoint / 'model.toml'}")


def _require_format(form: str) -> None:
    if form not in ("hf", "dcp"):
        from pipeloom.errors import UsageError

        raise UsageError(f'--format is "{form}"; it is hf (transformers) or dcp (torch.distributed.checkpoint)')
