"""A searched schedule in the run's folder: reported, saved, and reused by a later run of the same configuration."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from pipeloom.config import Config
from pipeloom.config.search import SearchRequest
from pipeloom.errors import PipeloomError
from pipeloom.limits import expanded
from pipeloom.schedule import Costs, check, simulate
from pipeloom.schedule.costs import TIME_TOLERANCE
from pipeloom.schedule.files import load
from pipeloom.schedule.json_form import to_dict
from pipeloom.train.report import Report
from pipeloom.train.schedule_search.run import SearchOutcome, memory_limit, value_of

FILE = "schedule.json"
# The fields of `Costs` that a search in training sets. A reused schedule must fit into the memory with all of them: that of
# micro-batches of several sizes does not without their factors.
_SAVED_COSTS = ("forward", "input_grad", "weight_grad", "backward", "p2p", "held", "microbatch")


def fingerprint(config: Config, device: torch.device) -> str:
    """Return a hash of the version, the device's name and the settings that the costs and the schedule depend on."""
    from pipeloom import __version__

    schedule = config.schedule.model_dump()
    schedule["options"] = {key: value for key, value in schedule["options"].items() if key != "reuse"}
    train = config.train
    facts = [
        __version__,
        torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        config.model.model_dump(),
        config.parallel.model_dump(),
        schedule,
        {key: value for key, value in train.model_dump().items() if key not in ("steps", "seed", "timeout")},
        config.optimizer.barrier,
    ]
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def earlier_outcome(config: Config, request: SearchRequest, device: torch.device) -> SearchOutcome | None:
    """Return the outcome of the latest run with the same `fingerprint` that fits the request; None if there is none."""
    key = fingerprint(config, device)
    for path in sorted(expanded(config.log.dir).glob(f"*/{FILE}"), reverse=True):
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))["searched"]
            if saved["fingerprint"] != key:
                continue
            schedule = load(path)
            costs = Costs(**saved["costs"])
            check(schedule)
            if schedule.ranks != request.ranks or schedule.microbatches != request.microbatches:
                continue
            if max(simulate(schedule, costs).peak_memory) > memory_limit(request, costs) + TIME_TOLERANCE:
                continue
            objective = request.objective
            return SearchOutcome(
                schedule,
                costs,
                objective,
                value_of(schedule, costs, objective),
                value_of(request.family, costs, objective),
                float(saved["lower_bound"]),
                f"and schedule of {path}, as schedule.options.reuse allows",
            )
        except (OSError, ValueError, KeyError, TypeError, PipeloomError):  # not written by a search, or damaged
            continue
    return None


def report_outcome(report: Report, key: str, request: SearchRequest, outcome: SearchOutcome) -> None:
    """Print and record the outcome, and save it in the run's folder; `key` is the run's `fingerprint`."""
    report.record("search", **figures_of(request, outcome))
    path = save_outcome(report, key, request, outcome)
    word = "makespan" if outcome.objective == "makespan" else "largest span"
    report.say(
        f"searched schedule: {word} {_time(outcome.value, request)}, was {_time(outcome.baseline, request)} with "
        f"{request.family.name}, bound {_time(outcome.lower_bound, request)}, gap {100 * outcome.gap:.1f} % "
        f"(costs {outcome.source}" + (f"; searched for {outcome.seconds:.1f} s" if outcome.seconds else "") + ")"
    )
    report.say(f"  saved to {path}; reuse it with --schedule.name {path}")


def save_outcome(report: Report, key: str, request: SearchRequest, outcome: SearchOutcome) -> Path:
    """Write the schedule into the run's folder, with everything that a later run needs to reuse it; return the file."""
    path = report.folder.root / FILE
    saved = to_dict(outcome.schedule) | {"searched": figures_of(request, outcome) | {"fingerprint": key}}
    path.write_text(json.dumps(saved, allow_nan=False) + "\n", encoding="utf-8")
    return path


def figures_of(request: SearchRequest, outcome: SearchOutcome) -> dict[str, Any]:
    """Return the outcome as it appears in the log and in the saved file."""
    return {
        "objective": outcome.objective,
        "value": outcome.value,
        "was": outcome.baseline,
        "family": request.family.name,
        "lower_bound": outcome.lower_bound,
        "gap": outcome.gap,
        "memory": request.memory,
        "source": outcome.source,
        "costs": {
            name: value
            for name, value in asdict(outcome.costs).items()
            if name in _SAVED_COSTS and value not in (None, ())
        },
    }


def _time(value: float, request: SearchRequest) -> str:
    return f"{value:.6g}" if request.costs is not None else f"{value * 1e3:.1f} ms"
