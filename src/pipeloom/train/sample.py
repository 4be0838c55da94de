"""Text from the model, token by token, through the pipeline."""

from __future__ import annotations

import torch
from torch import Tensor

from pipeloom.models import names
from pipeloom.models.init import stable_seed
from pipeloom.parallel.tensor import TensorParallel
from pipeloom.parallel.vocabulary import whole_logits
from pipeloom.runtime import Pipeline
from pipeloom.train.collect import sums
from pipeloom.train.tokenizer import ByteTokenizer

PROMPT = "def "
SAMPLED_TOKENS = 160
TEMPERATURE = 0.8


def generate(pipeline: Pipeline, tokenizer: ByteTokenizer, seq_len: int, seed: int, prompt: str = PROMPT) -> str:
    """`prompt` and SAMPLED_TOKENS sampled tokens; the same for the same weights and seed. Collective; every rank gets it.

    The window is as long as in training, filled up at the right: attention is causal, so what stands there changes
    nothing, and one shape goes through the pipeline.
    """
    text = tokenizer.encode(prompt).long()
    generator = torch.Generator().manual_seed(stable_seed("sample", seed))
    for _ in range(SAMPLED_TOKENS):
        recent = text[-seq_len:]
        window = torch.zeros(1, seq_len, dtype=torch.int64)
        window[0, : len(recent)] = recent
        logits = pipeline.predict(window.to(pipeline.device))
        # only the rank with the last stage has logits: its choice is the sum, as the others add 0
        chosen = _choose(_whole(pipeline, logits[0, len(recent) - 1]), generator) if logits is not None else 0
        text = torch.cat((text, torch.tensor([int(sums(pipeline, [chosen])[0])])))
    return printable(tokenizer.decode(text))


def printable(text: str) -> str:
    """`text` with control characters, which could steer a terminal, as U+FFFD; line ends and tabs stay."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def _whole(pipeline: Pipeline, logits: Tensor) -> Tensor:
    """Of one position: [vocabulary], from each tensor-parallel rank's part."""
    if pipeline.mesh.tp.size == 1:
        return logits
    shard = next(pipeline.layouts[name].over("tp") for name in names.VOCABULARY_WEIGHTS if name in pipeline.layouts)
    assert shard is not None
    return whole_logits(logits, TensorParallel(pipeline.mesh.tp), sum(shard.sizes))


def _choose(logits: Tensor, generator: torch.Generator) -> int:
    share = torch.softmax(logits.float().cpu() / TEMPERATURE, dim=-1)
    return int(torch.multinomial(share, 1, generator=generator))
