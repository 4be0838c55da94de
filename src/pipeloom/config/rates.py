"""The learning rate of each step."""

from __future__ import annotations

import math
from collections.abc import Collection

from pipeloom.config.sections import Config, OptimizerSection
from pipeloom.errors import ArgumentError
from pipeloom.shapes.layers import parameter_count

AUTO_RATE = "auto"
# Key of `[optimizer]` that may be "auto" -> a valid value in its place, until the rest of the configuration is known.
AUTOMATIC: dict[str, float] = {"lr": 1.0, "min_lr": 0.0, "warmup_steps": 0}


def suitable_rate(parameters: int, trained: bool, adapters: bool = False) -> float:
    """Return the learning rate for all weights of a model of this size, whose weights are `trained` already or not.

    From scratch, small models take 3e-3. Larger ones take GPT-3's rates (arXiv 2005.14165, table 2.1: 6e-4 at 125 M
    parameters), which fall about with the fourth root of the size. Trained weights are changed with a tenth of that.
    Adapters take the rate of QLoRA (arXiv 2305.14314).
    """
    if adapters:
        return 2e-4
    rate = 3e-3 if parameters < 20e6 else 6e-4 * (125e6 / parameters) ** 0.25
    return float(f"{rate / 10 if trained else rate:.2g}")


def automatic_rates(config: Config, keys: Collection[str]) -> tuple[OptimizerSection, str]:
    """Return the optimizer's section with values for those `keys` of AUTOMATIC that are "auto", and the reason for the rate."""
    options, steps = config.optimizer, config.train.steps
    weights = config.model.source or config.model.weights
    try:
        count = parameter_count(config.model.shape())
    except ArgumentError:  # sizes that contradict each other, which are reported with the other problems
        count = 0
    lr, why = suitable_rate(count, bool(weights), config.lora.r > 0), "for a new model of this size"
    if weights:
        why = f"for a model of this size that starts from {weights}" if not config.lora.r else "for adapters"
    lr = lr if "lr" in keys else options.lr
    warmup = min(max(10, round(0.03 * steps)), steps // 4)
    values = {"lr": lr, "min_lr": float(f"{lr / 10:.6g}"), "warmup_steps": warmup}
    return options.model_copy(update={key: values[key] for key in keys}), why


def learning_rate(step: int, steps: int, options: OptimizerSection, replicas: int = 1) -> float:
    """Return the learning rate of step `step` (from 0) of `steps`. It depends on the step alone, so a resumed run continues it.

    Linear warm-up to `lr`: lr (k + 1) / warmup_steps in step k. Then `lr_schedule`, with x from 0 at the first step after
    warm-up to 1 at step `steps` - 1:

    - cosine: min_lr + (lr - min_lr) (1 + cos πx) / 2 (arXiv 1608.03983);
    - linear: lr + (min_lr - lr) x;
    - wsd (arXiv 2404.06395): lr, then linear decay to min_lr over the last `decay_steps` steps (0: a tenth of `steps`);
    - constant: lr.

    Both lr and min_lr are multiplied by `batch_factor`.
    """
    lr, low = (rate * batch_factor(options.lr_rule, replicas) for rate in (options.lr, options.min_lr))
    if step < options.warmup_steps:
        return lr * (step + 1) / options.warmup_steps
    last = max(steps - 1, options.warmup_steps)
    if options.lr_schedule == "wsd":
        decay = options.decay_steps or max(1, steps // 10)
        share = max(0, step - (last - decay)) / decay
    else:
        share = (step - options.warmup_steps) / max(1, last - options.warmup_steps)
    match options.lr_schedule:
        case "cosine":
            return low + (lr - low) * (1 + math.cos(math.pi * share)) / 2
        case "constant":
            return lr
        case _:
            return lr + (low - lr) * share


def batch_factor(rule: str, replicas: int) -> float:
    """Return the factor of learning rates for a batch `replicas` times as large as the one for which they were chosen.

    `none`: 1, for rates chosen for the global batch, however many replicas share it. `linear`: `replicas`, for SGD (arXiv
    1706.02677). `sqrt`: √`replicas`, for Adam and its variants (arXiv 2205.10287).
    """
    return {"none": 1.0, "linear": float(replicas), "sqrt": math.sqrt(replicas)}[rule]
