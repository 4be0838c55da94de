"""A mixture of experts: by the trainer, and as a layer of a loop of one's own."""

from __future__ import annotations

import json
import re

from uses import Use


def test_experts_are_trained_by_the_command_and_in_a_loop(use: Use) -> None:
    few = "--train.steps 2 --train.seq_len 32 --train.eval_batches 1 --sample.tokens 2 --log.every 1"
    use.run("experts.md", "pipeloom train moe", few)
    (log,) = use.folder.glob("runs/*/log.jsonl")
    figures = [row for line in log.read_text().splitlines() if (row := json.loads(line))["event"] == "figures"]
    assert [row["expert_load"] >= 1 and row["all_to_all"] >= 0 for row in figures] == [True, True]
    loop = use.code("experts.md", "layer = MoELayer(gate, expert, group=None)")
    assert re.fullmatch(r"(step \d loss \d\.\d+\n){3}", use.python("loop.py", loop))
    assert use.pages == ["experts.md"]
