"""`pipeloom export` and `pipeloom import`: conversion of checkpoints to and from Hugging Face directories."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from pipeloom.cli.workers import require_torch


def export(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_OR_CHECKPOINT_DIR", help="A checkpoint, or a run, whose newest checkpoint is written."
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT_DIR", help="A new directory.")],
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge adapters into the weights that they were trained with.")
    ] = False,
    form: Annotated[
        str,
        typer.Option(
            "--format", metavar="FORMAT", help="hf, or dcp: the whole state for torch.distributed.checkpoint."
        ),
    ] = "hf",
) -> None:
    """Write a checkpoint as a Hugging Face directory.

    `transformers` loads the weights; adapters are written for `peft`.

    pipeloom export runs/20260101-120000-1f1b my-model
    """
    _require_format(form)
    require_torch("export")
    if form == "dcp":
        from pipeloom.errors import UsageError
        from pipeloom.train.checkpoint.dcp import export_dcp

        if merge:
            raise UsageError("--merge requires --format hf; dcp writes the checkpoint as it is")
        print(
            f"exported {export_dcp(checkpoint, out)} to {out}: torch.distributed.checkpoint.load(state, "
            f"checkpoint_id={str(out)!r})"
        )
        return
    from pipeloom.config.adapter import ADAPTER_CONFIG
    from pipeloom.train.hub.conversion import export as write

    source = write(checkpoint, out, merge)
    how = (
        "PeftModel.from_pretrained(model, "
        if (out / ADAPTER_CONFIG).is_file()
        else "AutoModelForCausalLM.from_pretrained("
    )
    print(f"exported {source} to {out}: {how}{str(out)!r})")


def import_(
    source: Annotated[Path, typer.Argument(metavar="HF_DIR", help="A directory with config.json and safetensors.")],
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT_DIR", help="A new folder of checkpoints.")],
    form: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="hf, or dcp, whose .metadata file is unpickled: use it only if you trust the source.",
        ),
    ] = "hf",
) -> None:
    """Make a checkpoint from a Hugging Face directory.

    The checkpoint is for Pipeloom's own decoder if that computes the same model, else for the model in transformers.

    pipeloom import Llama-3.2-1B llama; pipeloom train llama/model.toml
    """
    _require_format(form)
    require_torch("import")
    if form == "dcp":
        from pipeloom.train.checkpoint.dcp import import_dcp

        print(
            f"{source / '.metadata'} is a pickle file, which can run any code when it is read: import only from "
            "sources that you trust",
            file=sys.stderr,
        )
        print(f"imported {source} to {import_dcp(source, checkpoint)}")
        return
    from pipeloom.errors import ConfigError
    from pipeloom.train.hub.conversion import import_directory

    if checkpoint.exists() and (not checkpoint.is_dir() or any(checkpoint.iterdir())):
        raise ConfigError(f"{checkpoint} exists and is not empty; give a new directory")
    path, ours = import_directory(source, checkpoint)
    model = (
        "Pipeloom's own decoder, for any layout" if ours else "the model in transformers, for layouts without tp and ep"
    )
    print(f"{path}: of {model}")
    print(f"pipeloom train {checkpoint / 'model.toml'}")


def _require_format(form: str) -> None:
    if form not in ("hf", "dcp"):
        from pipeloom.errors import UsageError

        raise UsageError(f'--format is "{form}"; it is hf (transformers) or dcp (torch.distributed.checkpoint)')
