"""The learning rate of a step."""

from __future__ import annotations

import math

from pipeloom.config.sections import OptimizerSection


def learning_rate(step: int, steps: int, options: OptimizerSection, replicas: int = 1) -> float:
    """Linear warm-up to `lr` over `warmup_steps` steps, then half a cosine down to `min_lr` at the last step.

    The rate of step k (from 0) is lr (k + 1) / warmup_steps, then min_lr + (lr - min_lr) (1 + cos πx) / 2, x from 0 at
    the first step after warm-up to 1 at step `steps` - 1: a function of the step, so a resumed run goes on as it would have.
    All of it times `batch_factor`.
    """
    lr, low = (rate * batch_factor(options.lr_rule, replicas) for rate in (options.lr, options.min_lr))
    if step < options.warmup_steps:
        return lr * (step + 1) / options.warmup_steps
    last = max(steps - 1, options.warmup_steps)
    share = (step - options.warmup_steps) / max(1, last - options.warmup_steps)
    return low + (lr - low) * (1 + math.cos(math.pi * share)) / 2


def batch_factor(rule: str, replicas: int) -> float:
    """What rates are multiplied by for a batch that is `replicas` times as large as the one that they were chosen for.

    `none`: 1, for rates that belong to the global batch, however many replicas share it. `linear`: N, for SGD (arXiv
    1706.02677). `sqrt`: √N, for Adam and its kin (arXiv 2205.10287).
    """
    return {"none": 1.0, "linear": float(replicas), "sqrt": math.sqrt(replicas)}[rule]
