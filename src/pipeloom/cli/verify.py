"""`pipeloom verify`: loss and every gradient of one or more layouts, compared with a single process."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from pipeloom.cli.options import flag, with_options
from pipeloom.cli.output import json_flag
from pipeloom.cli.workers import require_torch, result_of_workers, words_of
from pipeloom.errors import DistributedError, UsageError, folded
from pipeloom.limits import expanded
from pipeloom.schedule.functions import source_file
from pipeloom.shapes.hub import content_of, is_verified

if TYPE_CHECKING:
    from pipeloom.config import Layout
    from pipeloom.config.matrix import Matrix

TOLERANCE = 1e-5
_RECORD = "verified.json"  # in log.dir: digests of layers of others with which a layout has passed
_NAME_WIDTH = 44


@with_options()
def command(
    context: typer.Context,
    matrix: Path | None = flag(None, "FILE", "Verify the layouts of a TOML file."),
    tolerance: float = flag(TOLERANCE, "X", "Largest error that passes.", min=0, max=1),
    as_json: bool = json_flag(),
) -> None:
    """Compare loss and gradients with one process.

    Runs one step of a layout in the pipeline and in one process, in fp32 with the same micro-batches, and compares the loss and
    every gradient. The error of a gradient is max |a - b| / max |b|. The exit code is 0, or 1 if an error exceeds the tolerance.

    CONFIG and the flags are those of `pipeloom train`. A matrix has [[layout]] tables, and an optional [base] table for the keys
    that all layouts share. A list in a layout stands for each of its values in turn. One pool of workers runs all layouts. With
    skip_invalid = true, invalid combinations are skipped and counted.
    """
    require_torch("verify")
    raise typer.Exit(_verify(layouts_of(context.args, matrix), tolerance, as_json, words_of(context)))


def _verify(rows: Matrix, tolerance: float, as_json: bool, words: Sequence[str]) -> int:
    """Return 0, 1 if an error exceeds the tolerance, or the exit code of failed workers. Raises PipeloomError."""
    from pipeloom.train.workers.preflight import require_cuda, require_room
    from pipeloom.train.workers.worker import is_worker, world_size_given

    given, largest = world_size_given(), max(rows.layouts, key=lambda layout: layout.world_size)
    if given is not None and given < largest.world_size:
        raise UsageError(f"WORLD_SIZE is {given}, but the largest layout needs {largest.world_size} workers")
    if not is_worker():
        require_room(largest.world_size)
        for layout in rows.layouts:
            require_cuda(layout.config.train, largest.world_size)
        for file in sorted({layout.code for layout in rows.layouts if layout.code is not None}):
            print(f"a schedule is code from {file}", file=sys.stderr)

    def verify(context: Any) -> str:
        return json.dumps(_verdicts(rows, context, tolerance, as_json))

    code, report = result_of_workers("verify", words, largest, verify)
    if code or not report:
        return _failed(code, as_json)
    verdicts = json.loads(report)
    record_verified(rows.layouts, verdicts)
    return summarise(rows, verdicts, tolerance, as_json)


def layouts_of(arguments: Sequence[str], matrix: Path | None) -> Matrix:
    """Return the layouts of a command line without `verify`'s own options. Raises a PipeloomError that lists all problems."""
    from pipeloom.config import load_layout, split_arguments
    from pipeloom.config.matrix import Matrix, label, load_matrix

    path, overrides = split_arguments(arguments)
    if matrix is None:
        layout = load_layout(path, overrides)
        return Matrix((layout,), (label(layout),), ())
    return load_matrix(matrix, path, overrides)


def _verdicts(rows: Matrix, worker: Any, tolerance: float, as_json: bool) -> list[dict[str, Any]]:
    """Verify every layout in turn on one worker; rank 0 prints a row for each, and alone has the verdicts."""
    from pipeloom.train.report.verify import run

    verdicts: list[dict[str, Any]] = []
    width = min(_NAME_WIDTH, max(map(len, rows.names)))
    results = run(rows.layouts, worker, tolerance)
    for name, result in zip(rows.names, results, strict=True):
        if result is not None:  # only rank 0 has it
            verdicts.append(verdict(name, result, tolerance))
            if not as_json:
                print(folded(row(verdicts[-1], width)), flush=True)
    return verdicts


def verdict(name: str, result: Any, tolerance: float) -> dict[str, Any]:
    """Return a layout's result as JSON values; `failing` holds the parameters whose error exceeds the tolerance."""
    errors: dict[str, float] = dict(result.errors)
    worst = max(errors, key=lambda key: (errors[key] != errors[key], errors[key])) if errors else ""
    return {
        "layout": name,
        "passed": bool(result.passed),
        "loss_error": float(result.loss_error),
        "worst_parameter": worst,
        "worst_error": errors.get(worst, 0.0),
        "parameters": len(errors),
        "failing": {key: error for key, error in errors.items() if not error <= tolerance},
    }


def row(verdict: dict[str, Any], width: int) -> str:
    """Return one line of the table."""
    state = "PASS" if verdict["passed"] else "FAIL"
    worst = f"{verdict['worst_error']:.1e} {verdict['worst_parameter']}" if verdict["worst_error"] else "0"
    return f"{state}  {verdict['layout']:<{width}}  loss {verdict['loss_error']:.1e}  worst gradient {worst}"


def summarise(rows: Matrix, verdicts: list[dict[str, Any]], tolerance: float, as_json: bool) -> int:
    """Print the failing parameters and the number that passed, or everything as JSON; return 0 if all passed, otherwise 1."""
    failed = [verdict for verdict in verdicts if not verdict["passed"]]
    if as_json:
        _print_json({"passed": not failed, "tolerance": tolerance, "layouts": verdicts, "skipped": list(rows.skipped)})
        return int(bool(failed))
    for verdict in failed:
        print(f"\n{verdict['layout']}: loss differs by {verdict['loss_error']:.1e}, and these gradients:")
        for name, error in sorted(verdict["failing"].items(), key=lambda item: -item[1]):
            print(f"  {error:.1e}  {name}")
    if rows.skipped:
        print(folded(f"skipped as invalid: {len(rows.skipped)}, such as {rows.skipped[0]}"))
    passed = len(verdicts) - len(failed)
    dtypes = sorted({"fp64" if layout.config.train.dtype == "float64" else "fp32" for layout in rows.layouts})
    print(
        f"{passed} of {len(verdicts)} layouts pass at {tolerance:g} "
        f"({' and '.join(dtypes)}, max |a-b| / max |b| per parameter)"
    )
    return int(bool(failed))


def unverified(layout: Layout) -> list[str]:
    """Return names of the layers that are not Pipeloom's, and with which no `pipeloom verify` has passed in this `log.dir`.

    Hugging Face families of `VERIFIED_FAMILIES` count as verified. Code that has changed since is not verified.
    """
    passed = _recorded(layout)
    return [name for name, digest in _digests_of_others(layout).items() if digest not in passed]


def record_verified(layouts: Sequence[Layout], verdicts: Sequence[dict[str, Any]]) -> None:
    """Record in `log.dir` the layers of others with which layouts have passed. A folder that cannot be written stays as it is."""
    for layout, verdict in zip(layouts, verdicts, strict=False):
        digests = _digests_of_others(layout).values()
        if not verdict["passed"] or not digests:
            continue
        with contextlib.suppress(OSError):
            path = expanded(layout.config.log.dir) / _RECORD
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(sorted(_recorded(layout).union(digests))), encoding="utf-8")


def _recorded(layout: Layout) -> set[str]:
    try:
        return set(map(str, json.loads((expanded(layout.config.log.dir) / _RECORD).read_text(encoding="utf-8"))))
    except (OSError, ValueError, TypeError):  # absent or damaged: nothing is known
        return set()


def _digests_of_others(layout: Layout) -> dict[str, str]:
    """Return name -> digest of each part of a layout's model whose code is not Pipeloom's."""
    model = layout.config.model
    files: dict[str, tuple[str, Path | None]] = {}
    if model.source and not is_verified(content_of(model.source, "model.source")):
        files["the model's family"] = "", expanded(model.source) / "config.json"
    for key in layout.classes:
        file = source_file(getattr(model, key))
        files[f"model.{key}"] = getattr(model, key), None if file is None else Path(file)
    return {
        name: hashlib.sha256(text.encode() + b"\n" + (file.read_bytes() if file is not None else b"")).hexdigest()[:16]
        for name, (text, file) in files.items()
    }


def _print_json(report: dict[str, Any]) -> None:
    """Print a report with null in place of infinities and NaNs, which JSON cannot represent."""
    finite = json.loads(json.dumps(report), parse_constant=lambda _: None)
    print(json.dumps(finite, indent=1, allow_nan=False))


def _failed(code: int, as_json: bool) -> int:
    if as_json and code:
        kind = DistributedError.__name__ if code == DistributedError.exit_code else "WorkerFailure"
        message = f"the workers ended with exit code {code}; the reason is on standard error"
        print(json.dumps({"error": {"type": kind, "exit_code": code, "message": message}}))
        sys.stdout.flush()
    return code
