"""`pipeloom train`: start the workers, or run as one of them when started by torchrun or by `pipeloom train` itself."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from pipeloom.cli.options import flag, with_options
from pipeloom.cli.workers import (
    be_worker,
    describe_keys,
    missing_of_trainer,
    require_one_task,
    require_torch,
    start_workers,
    words_of,
)
from pipeloom.errors import CapacityError, ConfigError, DistributedError, UsageError, folded, printable
from pipeloom.schedule.channels import count_words
from pipeloom.schedule.functions import source_file
from pipeloom.shapes.layers import parameter_count

if TYPE_CHECKING:
    from pipeloom.config import Layout


@with_options()
def command(
    context: typer.Context,
    dry_run: bool = flag(False, None, "Check the configuration, print what would run, and start nothing.", "--dry-run"),
    device: str | None = flag(
        None,
        "NAME",
        "With --dry-run: a100, h100, h200, b200, b300, gb200, gb300, mi300x or mi355x; default: h100 on CUDA.",
    ),
    memory: str | None = flag(
        None, "GIB", "With --dry-run: memory of a device, such as 80 or 80GiB; default: the device's."
    ),
    show_help: bool = flag(
        False, None, "Show this message and every key, or the keys of a section: --help data.", "--help", "-h"
    ),
) -> None:
    """Train a language model.

    Starts the worker processes on this machine, or runs as one of them under torchrun.

    CONFIG is a TOML file, or the name of one that comes with the package: default, tiny or moe. It may contain extends =
    "other.toml"; keys that it does not set take the values of default. Every key has a flag. Values are parsed as TOML, and
    taken as text if they are not valid TOML:

    \b
    pipeloom train --parallel.pp 2 --schedule.name 1f1b --train.steps 20
    torchrun --nproc-per-node 4 -m pipeloom train run.toml
    """
    if show_help:
        sections = [word.strip("[]") for word in context.args]
        head = "" if sections else f"{context.get_help()}\n\nKeys (with their defaults):\n"
        print(head + describe_keys(sections))
        return
    if dry_run:
        _describe(context.args, device, memory)
        raise typer.Exit(0)
    if device is not None or memory is not None:
        raise UsageError("--device and --memory are for --dry-run; nearest: --train.device cuda")
    raise typer.Exit(_train(context.args, words_of(context)))


def _describe(arguments: Sequence[str], name: str | None, memory: str | None) -> None:
    """Print a dry run; needs no torch."""
    from pipeloom.cli.dry_run import report
    from pipeloom.cli.options import memory_of
    from pipeloom.config import load_layout, split_arguments
    from pipeloom.config.sections import NO_DATA
    from pipeloom.plan import load_device
    from pipeloom.train.workers.worker import is_worker, world_size_given

    complete = not missing_of_trainer()
    limit = None if memory is None else memory_of(memory)[0]
    device = None if name is None else load_device(name)
    path, overrides = split_arguments(arguments)
    layout = load_layout(path, overrides, world_size=world_size_given() or 0)
    if device is None and layout.config.train.device == "cuda":
        device = load_device("h100")
    if is_worker() and os.environ["RANK"] != "0":
        return
    if complete and layout.config.data.source != NO_DATA:
        from pipeloom.train.workers.preflight import require_files

        layout = require_files(layout)
    if complete:
        from pipeloom.train.hub.lora_files import require_checkpoints, require_targets

        require_targets(layout.config)
        require_checkpoints(layout.config)
    announce(layout)
    lines, missing = report(layout, device, limit, complete=complete)
    if layout.config.data.source == NO_DATA:
        lines.append('data.source = "": a run needs data: --data.source FILE')
    print(folded("\n".join(lines)), flush=True)
    if missing:
        raise CapacityError(missing)


def _train(arguments: Sequence[str], words: Sequence[str]) -> int:
    """Run the command; return the exit code. `words` are those with which workers are started."""
    from pipeloom.config import load_layout, split_arguments
    from pipeloom.config.sections import NO_DATA
    from pipeloom.train.workers.worker import is_worker, launched_here, world_size_given

    require_torch("train")
    path, overrides = split_arguments(arguments)
    given = world_size_given()
    layout = load_layout(path, overrides, world_size=given)
    if layout.config.data.source == NO_DATA:
        raise ConfigError('data.source = "": a plan does not know your data; nearest: --data.source FILE')
    if not is_worker():
        from pipeloom.train.workers.preflight import require_machine

        require_one_task("train")
        require_machine(layout)
        announce(layout)
        return _attempts(words, layout)

    def train(context: Any) -> None:
        from pipeloom.train.loop import run

        if context.rank == 0 and not launched_here():
            announce(layout)

        run(layout, context)

    return be_worker(layout, train)


def _attempts(arguments: Sequence[str], layout: Layout) -> int:
    """Start the workers, restart them after a failure up to `train.restarts` times, and return the last exit code.

    Each attempt continues in the folder of the previous one, from the newest checkpoint there. Invalid input, a damaged
    checkpoint or a signal ends the run without a restart.
    """
    from pipeloom.train.workers.failures import FOLDER, NOTE

    restarts = layout.config.train.restarts
    if not restarts:
        return start_workers("train", arguments, layout.world_size)
    with tempfile.TemporaryDirectory(prefix="pipeloom-") as private:
        note = Path(private) / "run"
        os.environ[NOTE] = str(note)
        words = list(arguments)
        for attempt in range(restarts + 1):
            begun = time.monotonic()
            code = start_workers("train", words, layout.world_size)
            if code not in (1, DistributedError.exit_code) or attempt == restarts:
                break
            if note.exists():
                os.environ[FOLDER] = note.read_text(encoding="utf-8")
            print(
                f"pipeloom: exit code {code} after {time.monotonic() - begun:.0f} s; restart {attempt + 1} of {restarts} "
                "(train.restarts)",
                file=sys.stderr,
                flush=True,
            )
            words = [*arguments, "--debug.fault", ""]  # an injected fault occurs only in the first attempt
    return code


def announce(layout: Layout) -> None:
    """Print a summary of the run, and the notes of the layout."""
    from pipeloom.cli.verify import unverified
    from pipeloom.config.rates import AUTO_RATE
    from pipeloom.plan.volume import words as volume_words

    def say(sentence: str) -> None:
        print(folded(sentence))

    config, schedule = layout.config, layout.schedule
    options = "".join(f", {key} {value}" for key, value in schedule.options if key != "chunks")
    first = "search, starting with " if layout.search is not None else ""
    chunks = f" of {schedule.chunks} stages" if schedule.chunks > 1 else ""
    train, shape = config.train, config.model.shape()
    say(
        f"training {count_words(parameter_count(shape))} parameters: {first}{schedule.name}{options}, {schedule.ranks} "
        f"rank{'s' * (schedule.ranks > 1)}{chunks}, {schedule.microbatches} micro-batches{_side_by_side(layout)}; "
        f"{train.steps} steps of {train.global_batch_size} x {train.seq_len} tokens, {train.dtype}"
    )
    if (reason := layout.origins.get("optimizer.lr", "")).startswith(AUTO_RATE):
        resumed = config.checkpoint.resume != "none"
        steps = config.optimizer.warmup_steps
        after = f" after {steps} step{'s' * (steps != 1)}" if steps else ""
        say(
            f"  learning rate {config.optimizer.lr:g}{after} ({printable(reason)})"
            + "; a checkpoint that is resumed keeps its own" * resumed
        )
    if layout.code is not None:
        say(f"  the schedule is code: {config.schedule.name} from {printable(layout.code)}")
    for key in layout.classes:
        name = getattr(config.model, key)
        say(f"  model.{key} is code: {name} from {printable(source_file(name) or 'no file')}")
    if volume_words(layout):
        say(f"  {volume_words(layout)}")
    if config.lora.r:
        say(f"  only adapters of rank {config.lora.r} are trained; all other weights are frozen")
    for note in layout.notes:
        say(f"  {printable(note)}")
    if config.model.source:
        from pipeloom.train.data.sources import BYTES, tokenizer_name

        alien = tokenizer_name(config.data.tokenizer, config.model.source) == BYTES
        say(
            f"  the model is that of {printable(config.model.source)}"
            + ("; the tokens are bytes (data.tokenizer), not those of its own tokenizer" * alien)
        )
    if layers := unverified(layout):
        say(
            f"  never verified: {' and '.join(layers)}; pipeloom verify, with the same arguments, compares the layers with one "
            "process"
        )
    sys.stdout.flush()


def _side_by_side(layout: Layout) -> str:
    """Return words for replicas and tensor-parallel ranks, where there are any."""
    mesh, words = layout.mesh, ""
    if mesh.dp > 1:
        words += f", {mesh.dp} data-parallel replicas"
    if mesh.cp > 1:
        words += f", each sequence over {mesh.cp} ranks"
    if mesh.tp > 1:
        words += f", each layer over {mesh.tp} ranks{' (sequences too)' if layout.config.parallel.sp else ''}"
    return words + (f", {mesh.world} workers" if words else "")
