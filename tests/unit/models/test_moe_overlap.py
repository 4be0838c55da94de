"""What a block with its sequences in blocks refuses."""

from __future__ import annotations

from typing import Any

import pytest

from pipeloom.errors import ArgumentError
from pipeloom.models import DecoderShape
from pipeloom.models.moe_overlap import SparseBlockInBlocks
from pipeloom.parallel.context import ContextParallel, share_tokens
from pipeloom.parallel.dispatch import ExpertParallel
from pipeloom.parallel.mesh import Axis
from pipeloom.parallel.tensor import TensorParallel

TWO = Axis((0, 1), 0, None)


@pytest.mark.parametrize(
    ("options", "tensor", "context", "words"),
    [
        ({"capacity_factor": 1.5}, None, None, "ep_blocks=2 needs capacity_factor 0, not 1.5"),
        ({}, TensorParallel(TWO), None, "ep_blocks=2 needs tp 1, not 2"),
        ({}, None, ContextParallel(TWO), "ep_blocks=2 needs whole sequences"),
    ],
)
def test_what_blocks_of_sequences_cannot_have(options: dict[str, Any], tensor: Any, context: Any, words: str) -> None:
    shape = DecoderShape(1, 8, 2, 2, 8, vocab_size=12, num_experts=4, **options)
    block = share_tokens(SparseBlockInBlocks(shape, tensor, ExpertParallel(TWO, blocks=2)), context)
    with pytest.raises(ArgumentError, match=words):
        block.segments()
