"""Text generation, token by token, through a model's pipeline."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeloom.errors import UsageError
from pipeloom.models import names
from pipeloom.models.init import stable_seed
from pipeloom.parallel.tensor import TensorParallel
from pipeloom.parallel.vocabulary import whole_logits
from pipeloom.runtime import LocalPipeline, Pipeline
from pipeloom.train.collect import sums
from pipeloom.train.data.tokenizers import Tokenizer

PROMPT = "def "
SAMPLED_TOKENS = 160
_WINDOW_STEP = 32  # windows grow by this many tokens: larger means fewer distinct shapes, but more padding to compute


@dataclass(frozen=True)
class Sampling:
    """Rule for choosing a token from its logits.

    Attributes:
        temperature: divisor of the logits; 0: always the most likely token (greedy).
        top_k: sample from the k most likely tokens; 0: all.
        top_p: sample from the smallest set of most likely tokens whose probabilities sum to at least p; 1: all.
        seed: seed of the random draws.

    Raises UsageError for a value outside these ranges.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UsageError(f"temperature is {self.temperature:g}; it must be 0 (greedy) or above, such as 0.8")
        if self.top_k < 0:
            raise UsageError(f"top_k is {self.top_k}; it must be 0 (all tokens) or above")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p is {self.top_p:g}; it must be above 0 and at most 1 (all tokens)")

    def choose(self, logits: Tensor, generator: torch.Generator) -> int:
        """Return the id of a token, given the logits [vocabulary]. Ties go to the lower id."""
        logits = logits.float().cpu()
        if self.temperature == 0:
            return int(logits.argmax())
        ordered, tokens = (logits / self.temperature).sort(descending=True, stable=True)
        if self.top_k:
            ordered, tokens = ordered[: self.top_k], tokens[: self.top_k]
        shares = torch.softmax(ordered, dim=-1)
        shares = shares.masked_fill(shares.cumsum(0) - shares >= self.top_p, 0)
        return int(tokens[torch.multinomial(shares, 1, generator=generator)])


@torch.no_grad()
def extend(
    pipeline: Pipeline | LocalPipeline,
    prompts: Sequence[Sequence[int]],
    count: int,
    sampling: Sampling,
    *,
    ends: Collection[int] = (),
    context: int | None = None,
) -> list[list[int]]:
    """Return up to `count` new tokens for each prompt, on every rank. Collective.

    All prompts go through the pipeline together, padded on the right: attention is causal, so padding changes nothing. The
    tokens of a prompt depend on its own index and tokens, not on the other prompts.

    Args:
        ends: tokens that end a sequence; they are its last.
        context: the longest window, in tokens; None: no limit.

    Raises UsageError for an empty prompt.
    """
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise UsageError(f"prompt {number} is empty; give it one token at least")
    texts = [list(prompt) for prompt in prompts]
    generators = [torch.Generator().manual_seed(stable_seed("sample", sampling.seed, at)) for at in range(len(prompts))]
    going = set(range(len(texts)))
    for _ in range(count):
        recent = [text if context is None else text[-context:] for text in texts]
        longest = max(len(recent[at]) for at in going)
        length = -(-longest // _WINDOW_STEP) * _WINDOW_STEP
        window = torch.zeros(len(texts), length if context is None else min(length, context), dtype=torch.int64)
        for at in going:
            window[at, : len(recent[at])] = torch.tensor(recent[at])
        logits = pipeline.predict(window.to(pipeline.device))
        tokens = [0.0] * len(texts)
        if logits is not None:
            for at in going:
                tokens[at] = sampling.choose(_whole(pipeline, logits[at, len(recent[at]) - 1]), generators[at])
        # only the rank with the last stage has logits; the other ranks add 0, so the sum is its choice
        for at, token in enumerate(sums(pipeline, tokens)):
            if at in going:
                texts[at].append(int(token))
                if int(token) in ends:
                    going.discard(at)
        if not going:
            break
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


def generate(pipeline: Pipeline, tokenizer: Tokenizer, seq_len: int, seed: int, prompt: str = PROMPT) -> str:
    """Return `prompt` and SAMPLED_TOKENS sampled tokens as text, on every rank. Collective.

    The same weights and seed give the same text.
    """
    tokens = tokenizer.encode(prompt).tolist() or [0]  # the vocabulary may contain none of the prompt's characters
    (added,) = extend(pipeline, [tokens], SAMPLED_TOKENS, Sampling(seed=seed), context=seq_len)
    return printable(tokenizer.decode(torch.tensor([*tokens, *added])))


def printable(text: str) -> str:
    """Return `text` with control characters, which could control a terminal, replaced by U+FFFD, except newlines and tabs."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def _whole(pipeline: Pipeline | LocalPipeline, logits: Tensor) -> Tensor:
    """Return the logits [vocabulary] of one position, from each tensor-parallel rank's part."""
    if pipeline.mesh.tp.size == 1:
        return logits
    shard = next(pipeline.layouts[name].over("tp") for name in names.VOCABULARY_WEIGHTS if name in pipeline.layouts)
    assert shard is not None
    return whole_logits(logits, TensorParallel(pipeline.mesh.tp), sum(shard.sizes))
