"""`auto_layers`: the cut model is the whole one, in a pipeline too; what cannot be cut is refused with the reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipeloom as pl
from pipeloom.errors import ConfigError, UsageError
from pipeloom.runtime import Layer, LocalPipeline, RuntimeOptions
from pipeloom.runtime.assembly import PipelineSpec
from pipeloom.runtime.stage_modules import LayerSource


def block() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)


class Small(nn.Module):
    """A GPT-like model: tied embeddings, a parameter of its own in two places, a skip over all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(20, 8), nn.Embedding(6, 8)
        self.blocks = nn.ModuleList([block() for _ in range(6)])
        self.scale, self.norm = nn.Parameter(torch.full((8,), 0.9)), nn.LayerNorm(8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        x = first = self.words(tokens) + self.places(torch.arange(tokens.shape[1])) * self.scale
        for each in self.blocks:
            x = each(x, mask)
        return self.head(self.norm(x + 0.5 * first) * self.scale)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.downs = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.ups = nn.ModuleList([nn.Linear(12, 6) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.downs:
            x = torch.tanh(down(x))
            skips.append(x)
        for up in self.ups:
            x = torch.tanh(up(torch.cat([x, skips.pop()], -1)))
        return x


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def test_a_small_gpt() -> None:
    torch.manual_seed(0)
    model = Small()
    tokens, targets = torch.randint(0, 20, (2, 9, 6))
    cut = pl.auto_layers(model, tokens[:2])
    assert model.training
    assert len(cut.layers) == 8
    assert cut.tied == [["part0.scale", "part7.scale"], ["part0.words.weight", "part7.head.weight"]]
    assert "8 parts, which give its output on the example" in str(cut)
    assert "part3: blocks.2" in str(cut)
    pl.verify(cut.layers, pl.schedules.zbv(2, 4), tokens, targets, loss=cross_entropy, tied=cut.tied)
    cross_entropy(model(tokens), targets).backward()  # the pipeline's loss and gradients are the model's own
    pipeline = LocalPipeline(cut.layers, pl.schedules.zbv(2, 4), loss=cross_entropy, tied=cut.tied)
    pipeline.step(tokens, targets)
    own = dict(model.named_parameters())
    found = {name.split(".", 1)[1]: p.grad for name, p in pipeline.named_parameters()}
    assert found.keys() == own.keys()
    assert all((found[name] - own[name].grad).abs().max() <= 1e-6 for name in own)  # type: ignore[operator]


def test_a_u_net_and_a_sequential() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(2, 9, 6)
    cut = pl.auto_layers(UNet(), x)
    assert (
        sum(len(layer.writes) for layer in cut.layers) == 1
    )  # the trunk is `ups`, which holds more: one skip passes a part
    pl.verify(cut.layers, pl.schedules.build("interleaved", 2, 4, 2), x, y, loss=F.mse_loss)
    plain = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    assert [layer.name for layer in pl.auto_layers(plain, x).layers] == ["part0", "part1", "part2", "part3"]


class Odd(nn.Module):
    """Blocks called as `call` says."""

    def __init__(self, call: Any, parts: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(3, 3) for _ in range(parts)])
        self.other = nn.Linear(3, 3)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x)


def decides(m: Any, x: Tensor) -> Tensor:
    for each in m.blocks:
        x = each(x) if x.sum() > 0 else x
    return x


def number(m: Any, x: Tensor) -> Tensor:
    count = x.shape[0]
    return m.blocks[1](m.blocks[0](x)) / count


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Bilinear(3, 3, 3), "Bilinear has no sequential trunk"),
        (Odd(lambda m, x: m.other(x), 1), "Odd has no sequential trunk"),
        (Odd(decides), "Odd cannot be cut: its forward decides by the values of tensors"),
        (Odd(lambda m, x: m.blocks[0](m.blocks[0](x))), "its forward calls 'blocks.0' of the trunk more than once"),
        (Odd(lambda m, x: m.other(x)), "its forward calls 0 entries of the trunk"),
        (
            Odd(lambda m, x: F.dropout(m.blocks[1](m.blocks[0](x)))),
            "calls dropout as a function; use an nn.Dropout module",
        ),
        (Odd(number), "of type int in part 0, is used by part 3, and only tensors go from one to another"),
    ],
)
def test_refused(model: nn.Module, words: str) -> None:
    example = (torch.randn(2, 3),) * (2 if isinstance(model, nn.Bilinear) else 1)
    with pytest.raises(ConfigError) as caught:
        pl.auto_layers(model, example)
    assert words in str(caught.value)


def test_an_example_that_is_no_tensor() -> None:
    with pytest.raises(UsageError, match=r"example_batch is .*; it must be a Tensor or a Sequence\[Tensor\]"):
        pl.auto_layers(Small(), {"tokens": torch.zeros(1, 6)})


def test_layers_with_costs_are_cut_by_them() -> None:
    """Modules and those of auto_layers have their parameters; where a layer has no cost, each stage has as many."""

    def sizes(layers: Sequence[LayerSource], stages: list[int] | None = None) -> list[int]:
        spec = PipelineSpec(layers, pl.schedules.gpipe(4, 4), F.mse_loss, None, None, stages, (), RuntimeOptions())
        return [len(layers) for layers in spec.ranges]

    layers = [
        Layer(f"l{at}", block, cost=cost) for at, cost in enumerate((0.5, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01, 0.7))
    ]
    assert sizes(layers) == [1, 3, 3, 1]
    assert sizes([*layers[:-1], Layer("head", block)]) == [2, 2, 2, 2]
    assert sizes(layers, [1, 1, 1, 5]) == [1, 1, 1, 5]
    model = nn.Sequential(nn.Linear(8, 300), nn.Linear(300, 8), *(nn.Linear(8, 8) for _ in range(5)), nn.Linear(8, 900))
    assert sizes(pl.auto_layers(model, torch.rand(2, 8)).layers) == sizes([*model]) == [1, 1, 5, 1]
    assert sizes([nn.Embedding(900, 8), *(nn.Linear(8, 8) for _ in range(7))]) == [2, 2, 2, 2]
    assert sizes([*model[:-1], nn.Identity]) == [2, 2, 2, 2]
    assert sizes([nn.Linear(8, 8), *(nn.Identity() for _ in range(5)), nn.Linear(8, 8), nn.Linear(8, 8)]) == [
        1,
        5,
        1,
        1,
    ]
