"""Seeds for a while: the same numbers inside, and afterwards those that would have come without."""

from __future__ import annotations

import random

import numpy as np
import torch

from pipeloom.ops.random_state import seeded


def drawn() -> tuple[float, ...]:
    return random.random(), float(np.random.random()), torch.rand(()).item()


def test_numbers_inside_are_the_seed_s_and_those_after_it_are_as_without() -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    inside, plain = [], [drawn(), drawn()]
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    around = [drawn()]
    for _ in range(2):
        with seeded(5):
            inside.append(drawn())
    around.append(drawn())
    assert around == plain
    assert all(first == second for first, second in zip(*inside, strict=True))
