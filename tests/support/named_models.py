"""Models whose layers hand on tensors by name, each with the same modules put together in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeloom.runtime import Layer, LossTerm

WIDTH, LENGTH, WORDS = 8, 4, 11


class Attend(nn.Module):
    """A small GPT-2 block; the last one adds a skip that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        y = x + torch.tanh(self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True)))
        return y if skip is None else y + 0.5 * skip


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)

    def forward(self, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        return x, {"embedded": x, "even": tokens % 2 == 0}


class Masked(nn.Module):
    """Reads a tensor that carries no gradient, and one that does, as arguments of other names."""

    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor, *, mask: Tensor, first: Tensor) -> Tensor:
        return self.output(torch.where(mask[..., None], x, x * 0.5) * torch.sigmoid(first))


class Down(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        y = torch.tanh(self.linear(x))
        return y * 0.9, {"skip": y}


class Up(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return torch.tanh(self.linear(torch.cat([x, skip], -1)))


class Tower(nn.Module):
    """The first layer of a tower takes its own input of the step by name; the last one writes what it makes."""

    def __init__(self, begins: bool, ends: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.begins, self.ends = begins, ends

    def forward(self, x: Any, image: Tensor | None = None) -> Any:
        y = torch.tanh(self.linear(image if self.begins else x))
        return {"end": y} if self.ends else y


class Compare(nn.Module):
    """Both towers' ends, and a residual stream that earlier layers have read and written."""

    def __init__(self) -> None:
        super().__init__()
        self.bilinear = nn.Bilinear(WIDTH, WIDTH, WIDTH)

    def forward(self, nothing: None, a: Tensor, b: Tensor) -> Tensor:
        assert nothing is None
        return self.bilinear(a, b)


class Stream(nn.Module):
    """Reads a residual stream and writes it anew."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, stream: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        stream = x if stream is None else stream
        y = torch.tanh(self.linear(x + 0.3 * stream))
        return y, {"stream": stream + 0.1 * y}


class Early(nn.Module):
    """A block with a prediction head of its own on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        y = torch.tanh(self.linear(x))
        return y, {"early": self.head(y), "early2": self.head(y * 2)}


def mse(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def l1(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).abs().mean()


class Case(NamedTuple):
    """A model as layers, and `whole(modules, inputs, keywords, targets)`: its loss in plain torch."""

    layers: Callable[[], list[Layer]]
    loss: Callable[[Any, Any], Tensor]
    whole: Callable[[dict[str, Any], Any, dict[str, Any], Tensor], tuple[Tensor, dict[str, Tensor]]]
    tokens: bool = False
    keywords: tuple[str, ...] = ()


def gpt_layers() -> list[Layer]:
    last = Layer("b6", Attend, reads={"skip": "embedded"})
    return [
        Layer("embed", Embed, writes=("embedded", "even")),
        *(Layer(f"b{i}", Attend) for i in range(6)),
        last,
        Layer("head", Masked, reads={"mask": "even", "first": "embedded"}),
    ]


def gpt(m: dict[str, Any], tokens: Tensor, _: dict[str, Any], targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    e = x = m["embed"].words(tokens) + m["embed"].places(torch.arange(LENGTH))
    for at in range(7):
        x = m[f"b{at}"](x, e) if at == 6 else m[f"b{at}"](x)
    return cross_entropy(m["head"](x, mask=tokens % 2 == 0, first=e), targets), {}


def unet_layers() -> list[Layer]:
    downs = [Layer(f"down{i}", Down, writes={"skip": f"skip{i}"}) for i in range(4)]
    middle = Layer("middle", nn_linear)
    return [*downs, middle, *(Layer(f"up{i}", Up, reads={"skip": f"skip{i}"}) for i in (3, 2, 1, 0))]


def nn_linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def unet(m: dict[str, Any], x: Tensor, _: dict[str, Any], targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    skips = []
    for at in range(4):
        skips.append(torch.tanh(m[f"down{at}"].linear(x)))
        x = skips[-1] * 0.9
    x = m["middle"](x)
    for at in (3, 2, 1, 0):
        x = torch.tanh(m[f"up{at}"].linear(torch.cat([x, skips[at]], -1)))
    return mse(x, targets), {}


def tower_layers() -> list[Layer]:
    return [
        Layer("text0", lambda: Tower(False, False)),
        Layer("text1", lambda: Tower(False, False)),
        Layer("text2", lambda: Tower(False, False)),
        Layer("text3", lambda: Tower(False, True), writes={"end": "text"}),
        Layer("image0", lambda: Tower(True, False)),
        Layer("image1", lambda: Tower(False, False)),
        Layer("image2", lambda: Tower(False, False)),
        Layer("image3", lambda: Tower(False, True), writes={"end": "picture"}),
        Layer("compare", Compare, reads={"a": "text", "b": "picture"}),
    ]


def towers(m: dict[str, Any], x: Tensor, keywords: dict[str, Any], targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    y = keywords["image"]
    for at in range(4):
        x, y = torch.tanh(m[f"text{at}"].linear(x)), torch.tanh(m[f"image{at}"].linear(y))
    return mse(m["compare"].bilinear(x, y), targets), {}


def stream_layers() -> list[Layer]:
    return [
        Layer("s0", Stream, writes=("stream",)),
        *(Layer(f"s{i}", Stream, reads=("stream",), writes=("stream",)) for i in (1, 2)),
        Layer("plain3", nn_linear),
        *(Layer(f"s{i}", Stream, reads=("stream",), writes=("stream",)) for i in (4, 5)),
        Layer("plain6", nn_linear),
        Layer("plain7", nn_linear),
        Layer("up8", Up, reads={"skip": "stream"}),
    ]


def streams(m: dict[str, Any], x: Tensor, _: dict[str, Any], targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    stream = x
    for at in range(8):
        if at in (3, 6, 7):
            x = m[f"plain{at}"](x)
        else:
            x = torch.tanh(m[f"s{at}"].linear(x + 0.3 * stream))
            stream = stream + 0.1 * x
    return mse(torch.tanh(m["up8"].linear(torch.cat([x, stream], -1))), targets), {}


TERMS = {"one": 0.3, "two": 2.0, "three": 0.25}


def heads_layers() -> list[Layer]:
    """Losses on two stages besides the last one's; one layer has two."""
    return [
        Layer("a0", nn_linear),
        Layer("a1", lambda: Renamed("one", None), losses={"one": LossTerm(mse, TERMS["one"])}),
        *(Layer(f"a{i}", nn_linear) for i in (2, 3, 4)),
        Layer("a5", lambda: Renamed("two", "three"), losses={"two": LossTerm(l1, 2.0), "three": LossTerm(mse, 0.25)}),
        *(Layer(f"a{i}", nn_linear) for i in (6, 7)),
        Layer("a8", nn_linear),
    ]


class Renamed(Early):
    """`Early` with keys of its own."""

    def __init__(self, first: str, second: str | None) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        y, found = super().forward(x)
        return y, {self.first: found["early"], **({self.second: found["early2"]} if self.second else {})}


def heads(m: dict[str, Any], x: Tensor, _: dict[str, Any], targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    terms = {}
    for at in range(9):
        if at not in (1, 5):
            x = m[f"a{at}"](x)
            continue
        x = torch.tanh(m[f"a{at}"].linear(x))
        head = m[f"a{at}"].head
        terms |= (
            {"one": mse(head(x), targets)}
            if at == 1
            else {"two": l1(head(x), targets), "three": mse(head(2 * x), targets)}
        )
    return mse(x, targets) + sum(TERMS[name] * term for name, term in terms.items()), terms


CASES = {
    "gpt": Case(gpt_layers, cross_entropy, gpt, tokens=True),
    "u-net": Case(unet_layers, mse, unet),
    "two towers": Case(tower_layers, mse, towers, keywords=("image",)),
    "residual stream": Case(stream_layers, mse, streams),
    "heads": Case(heads_layers, mse, heads),
}


def data(case: Case, rows: int, seed: int = 0) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Inputs, targets and keyword arguments, different in each row."""
    draw = torch.Generator().manual_seed(seed)
    if case.tokens:
        return (*torch.randint(0, WORDS, (2, rows, LENGTH), generator=draw), {})  # type: ignore[return-value]
    x, y = torch.randn(2, rows, LENGTH, WIDTH, generator=draw)
    return x, y, {name: torch.randn(rows, LENGTH, WIDTH, generator=draw) for name in case.keywords}


def plain(
    case: Case, state: dict[str, Tensor], x: Tensor, y: Tensor, keywords: dict[str, Tensor], sizes: list[int]
) -> tuple[float, dict[str, Tensor], dict[str, float]]:
    """(loss, gradients, terms) of one process that knows nothing of pipelines, from these weights."""
    modules = {layer.name: layer() for layer in case.layers()}
    own = {f"{name}.{inner}": p for name, module in modules.items() for inner, p in module.named_parameters()}
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(state[name])
    total, sums, start = 0.0, dict.fromkeys(TERMS, 0.0), 0
    for size in sizes:
        rows = slice(start, start + size)
        start += size
        loss, terms = case.whole(modules, x[rows], {k: v[rows] for k, v in keywords.items()}, y[rows])
        (loss * (size / len(x))).backward()
        total += loss.item() * size / len(x)
        for name, term in terms.items():
            sums[name] += term.item() * size / len(x)
    return total, {name: p.grad for name, p in own.items() if p.grad is not None}, sums if case.whole is heads else {}
