"""A model of one's own in a pipeline: two inputs, a skip past all stages, a head on the way, a mask by keyword, tied weights.

python examples/own_model.py                                        all ranks in one process, for a debugger
torchrun --nproc-per-node 2 examples/own_model.py                   one process per rank
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import pipeloom as pl
from pipeloom.runtime import Layer, LocalPipeline, LossTerm, Pipeline, RuntimeOptions

WORDS, TOPICS, WIDTH, LENGTH = 50, 4, 32, 16


class Embedding(nn.Module):
    """Two inputs of the first stage; the hidden states for the next layer, and by name a residual that the last one adds."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.topics = nn.Embedding(WORDS, WIDTH), nn.Embedding(TOPICS, WIDTH)
        nn.init.normal_(self.words.weight, std=0.1)
        nn.init.normal_(self.topics.weight, std=0.1)

    def forward(self, words: Tensor, topics: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return self.words(words), {"topic": self.topics(topics)}


class Block(nn.Module):
    """What one stage hands to the next is what this takes by position; `mask` comes from `step` by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        query, key, value = self.qkv(self.norm(x)).chunk(3, dim=-1)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return x + torch.tanh(self.out(mixed))


class EarlyHead(nn.Module):
    """A prediction on the way, with a loss of its own (`LAYERS` says which, and how much it counts)."""

    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return x, {"early": self.output(x)}


class Head(nn.Module):
    """Reads the first layer's residual by name. Its weight is the first layer's: `tied` names the two."""

    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: Tensor, topic: Tensor) -> Tensor:
        return self.output(x + topic)


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over one micro-batch's targets; -100 does not count."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch(step: int, rows: int = 9) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
    """((words, topics), targets, mask): the target is the number after the word's, and padding at the end does not count."""
    generator = torch.Generator().manual_seed(step)
    words = torch.randint(0, WORDS, (rows, LENGTH), generator=generator)
    topics = torch.randint(0, TOPICS, (rows, LENGTH), generator=generator)
    real = torch.arange(LENGTH) < LENGTH - torch.arange(rows)[:, None]
    targets = ((words + 1) % WORDS).masked_fill(~real, -100)
    return (words, topics), targets, real[:, None, :].expand(rows, LENGTH, LENGTH)


LAYERS = [
    Layer("embedding", Embedding, writes=("topic",)),
    *(Layer(f"block{i}", Block) for i in range(2)),
    Layer("early", EarlyHead, losses={"early": LossTerm(loss, weight=0.2)}),
    *(Layer(f"block{i}", Block) for i in range(2, 4)),
    Layer("head", Head, reads=("topic",)),
]
TIED = [("embedding.words.weight", "head.output.weight")]


def main() -> None:
    schedule = pl.schedules.zbv(ranks=2, microbatches=4)
    distributed = "RANK" in os.environ
    first = not distributed or os.environ["RANK"] == "0"
    inputs, targets, mask = batch(0)
    if first:
        print("verified:", pl.verify(LAYERS, schedule, inputs, targets, loss=loss, tied=TIED, mask=mask))
    if distributed:
        dist.init_process_group("gloo")
    kind = Pipeline if distributed else LocalPipeline
    pipeline = kind(LAYERS, schedule, loss=loss, tied=TIED, options=RuntimeOptions(seed=0))
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-2)
    for step in range(20):
        inputs, targets, mask = batch(step)
        value = pipeline.step(inputs, targets, mask=mask)
        optimizer.step()
        pipeline.zero_grad()
        if first:
            print(f"step {step + 1} loss {value:.4f}, of the early head {pipeline.loss_terms['early']:.4f}")
    logits = pipeline.predict(inputs, mask=mask)  # on the rank with the last stage, None on others
    if logits is not None:
        counts = targets != -100
        print(f"accuracy {(logits.argmax(-1) == targets)[counts].float().mean():.3f}")
    if distributed:
        pipeline.close()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
