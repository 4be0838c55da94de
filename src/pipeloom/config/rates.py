"""The learning rate of each step."""

from __future__ import annotations

import math

from pipeloom.config.sections import OptimizerSection


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
