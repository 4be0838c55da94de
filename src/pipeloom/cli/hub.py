"""`pipeloom export`, `import` and `generate`: checkpoints as Hugging Face directories and back, and text from either."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, Literal

import typer

from pipeloom.cli.options import argument, flag, with_options
from pipeloom.cli.output import json_flag
from pipeloom.cli.workers import be_worker, require_torch, start_workers, words_of
from pipeloom.errors import UsageError, folded
from pipeloom.shapes.hub import ADAPTER_CONFIG


@with_options()
def export(
    checkpoint: Path = argument(
        ..., "RUN_OR_CHECKPOINT_DIR", "A checkpoint, or a run or a folder of runs: the newest checkpoint."
    ),
    out: Path = argument(..., "OUT_DIR", "A new directory."),
    merge: bool = flag(False, None, "Merge adapters into the weights that they were trained with.", "--merge"),
    form: Literal["hf", "dcp"] = flag(
        "hf", None, "hf: for transformers; dcp: the whole state for torch.distributed.checkpoint.", "--format"
    ),
) -> None:
    """Write a checkpoint as a Hugging Face directory.

    `transformers` loads the weights; adapters are written for `peft`.

    pipeloom export runs/20260101-120000-1f1b my-model
    """
    require_torch("export")
    if form == "dcp":
        from pipeloom.train.checkpoint.dcp import export_dcp

        if merge:
            raise UsageError("--merge requires --format hf; dcp writes the checkpoint as it is")
        source = export_dcp(checkpoint, out)
        print(
            folded(f"exported {source} to {out}: torch.distributed.checkpoint.load(state, checkpoint_id={str(out)!r})")
        )
        return
    from pipeloom.train.hub.conversion import export as write

    source = write(checkpoint, out, merge)
    how = (
        "PeftModel.from_pretrained(model, "
        if (out / ADAPTER_CONFIG).is_file()
        else "AutoModelForCausalLM.from_pretrained("
    )
    print(folded(f"exported {source} to {out}: {how}{str(out)!r})"))


@with_options()
def import_(
    source: Path = argument(..., "HF_DIR", "A directory with config.json and safetensors."),
    checkpoint: Path = argument(..., "CHECKPOINT_DIR", "A new folder of checkpoints."),
    form: Literal["hf", "dcp"] = flag(
        "hf", None, "hf, or dcp, whose .metadata file is unpickled: use it only if you trust the source.", "--format"
    ),
) -> None:
    """Make a checkpoint from a Hugging Face directory.

    The checkpoint is for Pipeloom's own decoder if that computes the same model, else for the model in transformers.

    pipeloom import Llama-3.2-1B llama; pipeloom train llama/model.toml
    """
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
    from pipeloom.train.hub.conversion import import_directory

    path, ours = import_directory(source, checkpoint)
    model = (
        "Pipeloom's own decoder, for any layout" if ours else "the model in transformers, for layouts without tp and ep"
    )
    print(f"{path}: of {model}")
    print(f"pipeloom train {checkpoint / 'model.toml'}")


@with_options(groups_from={"tokens": "Sampling", "pp": "Processes", "as_json": "Output"})
def generate(
    context: typer.Context,
    *,
    path: Path = argument(..., "DIR", "A checkpoint, a run or a folder of runs, or a Hugging Face directory."),
    prompt: list[str] = flag(
        ..., "TEXT", "A message to a model that has a chat template, else text to continue; repeatable."
    ),
    raw: bool = flag(False, None, "Continue the text without the chat template.", "--raw"),
    tokens: int = flag(64, "N", "Most new tokens per prompt.", min=1),
    temperature: float = flag(0.8, "T", "Divisor of the logits; 0: always the most likely token."),
    greedy: bool = flag(False, None, "The same as --temperature 0.", "--greedy"),
    top_k: int = flag(0, "K", "Sample from the k most likely tokens; 0: all."),
    top_p: float = flag(1.0, "P", "Sample from the most likely tokens whose probabilities sum to p; 1: all."),
    seed: int = flag(0, "N", "Seed of the sampling.", min=0),
    pp: int = flag(1, "N", "Pipeline-parallel processes.", min=1),
    tp: int = flag(1, "N", "Tensor-parallel processes (Pipeloom's own decoder only).", min=1),
    trust_code: bool = flag(False, None, "Import the classes that a checkpoint names as module:class.", "--trust-code"),
    as_json: bool = json_flag(),
) -> None:
    """Generate text from a checkpoint or a model.

    The tokenizer is that of the model's directory; without one, tokens are bytes.

    pipeloom generate my-model --prompt "Once upon a time" --tokens 100 --top-p 0.9
    """
    require_torch("generate")
    from pipeloom.train.hub.generate import Sampling, open_model
    from pipeloom.train.workers.worker import is_worker

    sampling = Sampling(0.0 if greedy else temperature, top_k, top_p, seed)
    opened = open_model(path, len(prompt), {"parallel.pp": pp, "parallel.tp": tp}, trust_code)
    if not is_worker():
        if opened.checkpoint not in (None, path):
            print(f"pipeloom: the checkpoint is {opened.checkpoint}", file=sys.stderr)
        raise typer.Exit(start_workers("generate", words_of(context), opened.layout.world_size))

    def work(worker: Any) -> None:
        from pipeloom.train.hub.generate import continue_prompts, open_pipeline, printable

        pipeline = open_pipeline(opened, worker.device, worker.watchdog)
        worker.close_to_strangers()
        first = int(os.environ["RANK"]) == 0
        streams = first and len(prompt) == 1 and not as_json

        def show(part: str) -> None:
            print(printable(part), end="", flush=True)

        results = continue_prompts(opened, pipeline, prompt, tokens, sampling, show if streams else None, raw)
        pipeline.close()
        if streams:
            print(flush=True)
        if streams or not first:
            return
        if as_json:
            rows = [
                {"prompt": before, "text": text, "tokens": added}
                for before, (text, added) in zip(prompt, results, strict=True)
            ]
            print(json.dumps({"sequences": rows}), flush=True)
        else:
            print("\n\n".join(printable(text) for text, _ in results), flush=True)

    raise typer.Exit(be_worker(opened.layout, work))
