"""A policy gradient over sampled answers of different lengths, with a plan for the micro-batches of each step.

python examples/rl_loop.py, with all ranks in one process, or torchrun --nproc-per-node 2 examples/rl_loop.py

Answers and rewards are given. The reference model runs forward only, through a pipeline of its own, on the same micro-batches.
"""

import os
import random
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import pipeloom as pl
from pipeloom.plan.step import SequenceTime
from pipeloom.runtime import Layer, LocalPipeline, Pipeline, RuntimeOptions

WORDS, WIDTH, PROMPT, LONGEST, TOKENS, KL, STEPS = 32, 32, 4, 96, 128, 0.1, 12
FAMILY, TIME = ("zbv", 2), SequenceTime(fixed=10)  # a micro-batch takes as long as 10 more tokens


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LONGEST, WIDTH)

    def forward(self, words: Tensor, place: Tensor) -> Tensor:
        return self.words(words) + self.places(place)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor, sequence: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(x)).chunk(3, dim=-1)
        mask = (sequence[:, :, None] == sequence[:, None, :]).tril()
        return x + self.out(F.scaled_dot_product_attention(query, key, value, attn_mask=mask))


BLOCKS = [Layer(f"block{i}", Block) for i in range(4)]
LAYERS = [Layer("embedding", Embedding), *BLOCKS, Layer("head", lambda: nn.Linear(WIDTH, WORDS))]


def log_probabilities(logits: Tensor, words: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, words[..., None])[..., 0]


def loss(logits: Tensor, targets: tuple[Tensor, ...]) -> Tensor:
    """The mean over the answers' tokens of the policy gradient and the distance from the reference."""
    words, advantage, answer, reference = targets
    ours = log_probabilities(logits, words)
    ratio = torch.exp(ours - ours.detach())  # 1, with the gradient of the policy
    distance = torch.exp(reference - ours) - (reference - ours) - 1
    return ((KL * distance - ratio * advantage) * answer).sum() / answer.sum()


def samples(step: int, count: int = 24) -> list[tuple[Tensor, float]]:
    """(words, reward) of each answer behind its prompt: most are short. The reward is the share of even words."""
    numbers, generator = random.Random(step), torch.Generator().manual_seed(step)
    lengths = [min(LONGEST, PROMPT + 2 + int(numbers.lognormvariate(2.3, 1.0))) for _ in range(count)]
    words = [torch.randint(0, WORDS, (n,), generator=generator) for n in lengths]
    return [(each, (each[PROMPT:] % 2 == 0).float().mean().item()) for each in words]


def pack(sampled: list[tuple[Tensor, float]], batch: tuple[int, ...], mean: float) -> tuple[Any, ...]:
    """(inputs, targets, keyword arguments) of a micro-batch: these sequences one behind the other, without padding."""
    words = [sampled[at][0] for at in batch]
    sizes = torch.tensor([len(each) - 1 for each in words])
    place = torch.cat([torch.arange(int(n)) for n in sizes])[None]
    advantage = torch.tensor([sampled[at][1] - mean for at in batch]).repeat_interleave(sizes)[None]
    targets = torch.cat([each[1:] for each in words])[None], advantage, (place >= PROMPT - 1).float()
    sequence = torch.arange(len(batch)).repeat_interleave(sizes)[None]
    return torch.cat([each[:-1] for each in words])[None], targets, {"place": place, "sequence": sequence}


def main() -> None:
    distributed = "RANK" in os.environ
    if distributed:
        dist.init_process_group("gloo")
    kind = Pipeline if distributed else LocalPipeline
    schedule, options = pl.schedules.zbv(ranks=2, microbatches=4), RuntimeOptions(seed=0)
    weigh = {"loss": loss, "weight": lambda targets: targets[2].sum()}  # a mean over the answers' tokens
    policy, reference = (kind(LAYERS, schedule, options=options, **weigh) for _ in range(2))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    plan = None
    for step in range(STEPS):
        sampled = samples(step)
        mean = sum(reward for _, reward in sampled) / len(sampled)
        lengths = [len(words) - 1 for words, _ in sampled]
        plan = pl.plan_step(lengths, ranks=2, tokens=TOKENS, time=TIME, families=[FAMILY], last=plan)
        mine = plan.replicas[0]
        batches = [pack(sampled, batch, mean) for batch in mine.microbatches]
        logits = reference.predict(microbatches=batches)  # on the rank with the last stage, which computes the loss
        for at, (inputs, targets, keywords) in enumerate(batches):
            known = targets[1].to("meta") if logits is None else log_probabilities(logits[at], targets[0])
            batches[at] = inputs, (*targets, known), keywords
        value = policy.step(microbatches=batches, schedule=mine.schedule)
        optimizer.step()
        policy.zero_grad()
        if policy.rank == 0:
            sizes = f"{len(batches)} micro-batches of {min(mine.tokens)} to {max(mine.tokens)} tokens"
            print(f"step {step + 1}: {sizes}, loss {value:.4f}")
    ours = policy.predict(microbatches=batches)
    if ours is not None:
        even = torch.cat([each.softmax(-1)[0, :, ::2].sum(-1) for each in ours]).mean()
        print(f"probability of even words {even:.3f}")
    if distributed:
        policy.close()
        reference.close()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
