"""The learning rate of a step."""

from __future__ import annotations

import math

from pipeloom.config.sections import OptimizerSection


def learning_rate(step: int, steps: int, options: OptimizerSection) -> float:
    """Linear warm-up to `lr` over `warmup_steps` steps, then half a cosine down to `min_lr` at the last step.

    The rate of step k (from 0) is lr (k + 1) / warmup_steps, then min_lr + (lr - min_lr) (1 + cos πx) / 2, x from 0 at
    the first step after warm-up to 1 at step `steps` - 1.
    """
    if step < options.warmup_steps:
        return options.lr * (step + 1) / options.warmup_steps
    last = max(steps - 1, options.warmup_steps)
    share = (step - options.warmup_steps) / max(1, last - options.warmup_steps)
    return options.min_lr + (options.lr - options.min_lr) * (1 + math.cos(math.pi * share)) / 2
