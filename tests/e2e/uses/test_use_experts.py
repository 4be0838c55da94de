"""A mixture of experts: by the trainer, and as a layer of a loop of one's own."""

from __future__ import annotations

import re

from uses import Use


def test_experts_are_trained_by_the_command_and_in_a_loop(use: Use) -> None:
    few = "--train.steps 2 --train.seq_len 32 --train.eval_batches 1 --sample.tokens 2 --log.every 1"
    said = use.run("experts.md", "pipeloom train moe", few)
    assert "expert_load: " in said
    assert "all_to_all: " in said
    loop = use.code("experts.md", "layer = MoELayer(gate, expert, group=None)")
    assert re.fullmatch(r"(step \d loss \d\.\d+\n){3}", use.python("loop.py", loop))
    assert use.pages == ["experts.md"]
