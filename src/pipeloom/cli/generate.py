"""`pipeloom generate`: text from a checkpoint, a run or a Hugging Face directory, sampled through the pipeline."""

from __future__ import annotations

import json as json_format
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from pipeloom.cli.workers import be_worker, require_torch, start_workers


def command(
    path: Annotated[Path, typer.Argument(metavar="DIR", help="A checkpoint, a run, or a Hugging Face directory.")],
    prompt: Annotated[list[str], typer.Option(metavar="TEXT", help="Text to continue; repeatable.")],
    tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Most new tokens per prompt.")] = 64,
    temperature: Annotated[
        float, typer.Option(metavar="T", help="Divisor of the logits; 0: always the most likely token.")
    ] = 0.8,
    greedy: Annotated[bool, typer.Option("--greedy", help="The same as --temperature 0.")] = False,
    top_k: Annotated[int, typer.Option(metavar="K", help="Sample from the k most likely tokens; 0: all.")] = 0,
    top_p: Annotated[
        float,
        typer.Option(metavar="P", help="Sample from the most likely tokens whose probabilities sum to p; 1: all."),
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Seed of the sampling.")] = 0,
    pp: Annotated[int, typer.Option(min=1, metavar="N", help="Pipeline-parallel processes.")] = 1,
    tp: Annotated[
        int, typer.Option(min=1, metavar="N", help="Tensor-parallel processes (Pipeloom's own decoder only).")
    ] = 1,
    trust_code: Annotated[
        bool, typer.Option("--trust-code", help="Import the classes that a checkpoint names as module:class.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
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
        words = [str(path), *(f"--prompt={text}" for text in prompt), f"--tokens={tokens}", f"--seed={seed}"]
        words += [f"--temperature={sampling.temperature}", f"--top-k={top_k}", f"--top-p={top_p}"]
        words += [f"--pp={pp}", f"--tp={tp}", *(["--json"] if json else []), *(["--trust-code"] if trust_code else [])]
        raise typer.Exit(start_workers("generate", words, opened.layout.world_size))

    def work(context: Any) -> None:
        from pipeloom.train.hub.generate import continue_prompts, open_pipeline, printable

        pipeline = open_pipeline(opened, context.device, context.watchdog)
        context.close_to_strangers()
        results = continue_prompts(opened, pipeline, prompt, tokens, sampling)
        pipeline.close()
        if int(os.environ["RANK"]) != 0:
            return
        if json:
            rows = [
                {"prompt": before, "text": text, "tokens": added}
                for before, (text, added) in zip(prompt, results, strict=True)
            ]
            print(json_format.dumps({"sequences": rows}), flush=True)
        else:
            print("\n\n".join(printable(text) for text, _ in results), flush=True)

    raise typer.Exit(be_worker(opened.layout, work))
