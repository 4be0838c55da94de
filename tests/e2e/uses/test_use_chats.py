"""Fine-tuning with chats: a model and conversations of the user's, a run, its answer, its weights."""

from __future__ import annotations

import json
import re

from uses import Use


def test_a_model_is_tuned_on_chats_and_answers(use: Use) -> None:
    use.run("README.md", "python examples/tiny_llama.py")
    (use.folder / "tiny-llama").rename(use.folder / "my-llama")
    said = [{"role": "user", "content": "What rests?"}, {"role": "assistant", "content": "The shuttle."}]
    (use.folder / "chat.jsonl").write_text(f"{json.dumps({'messages': said})}\n" * 100)

    page = "pipeloom train --model.source my-llama --data.source chat.jsonl --train"
    said_of_run = use.run("data.md", page, "--train.global_batch_size 8 --sample.tokens 4")
    losses = re.search(r"held-out loss: ([\d.]+) nats per token \(before training ([\d.]+);", said_of_run)
    assert losses is not None
    assert float(losses[1]) < float(losses[2])
    assert "100 conversations with 100 answers to learn" in " ".join(said_of_run.split())

    assert use.run("data.md", "pipeloom generate runs/*-zb-h1", wide=True).strip()
    use.run("data.md", "pipeloom export runs/*-zb-h1 my-chat")
    assert "<|assistant|>" in (use.folder / "my-chat/chat_template.jinja").read_text()
    assert use.pages == ["README.md", "data.md"]
