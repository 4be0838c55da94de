"""Models whose boundaries carry more than one tensor that requires a gradient; four layers each, one a stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import pipeloom as pl
from models import WIDTH, Block
from pipeloom.runtime import Layer


class Open(Block):
    """One tensor in; hidden, gate, bool mask, int ids, None and a detached copy out."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        hidden = super().forward(x)
        ids = (x[..., 0] > 0).long()
        return hidden, torch.sigmoid(hidden[..., :1]), ids.bool(), ids, None, hidden.detach() * 0.5


class Middle(Block):
    """Uses all six and hands all six on, some of them untouched."""

    def forward(self, x: Tensor, gate: Tensor, mask: Tensor, ids: Tensor, nothing: None, old: Tensor) -> Any:  # type: ignore[override]
        assert nothing is None
        assert mask.dtype is torch.bool
        assert ids.dtype is torch.int64
        assert not old.requires_grad
        out = torch.where(mask[..., None], super().forward(x) * gate, old) + ids[..., None]
        return out, gate, mask, ids, nothing, old


class Close(Block):
    def forward(self, x: Tensor, gate: Tensor, mask: Tensor, ids: Tensor, nothing: None, old: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x + gate) + old * mask[..., None]


class Twice(Block):
    """The same tensor two times."""

    def forward(self, x: Tensor, again: Tensor | None = None) -> Any:  # type: ignore[override]
        hidden = super().forward(x if again is None else x + 0.5 * again)
        return hidden, hidden


class PassOn(Block):
    """Its own input, untouched, beside its output."""

    def forward(self, x: Tensor, old: Tensor | None = None) -> Any:  # type: ignore[override]
        return super().forward(x if old is None else x - 0.3 * old), x


class Views(Block):
    """Two views of one storage, one of them transposed."""

    def forward(self, x: Tensor, back: Tensor | None = None) -> Any:  # type: ignore[override]
        hidden = super().forward(x if back is None else torch.cat((x, back.transpose(0, 1)), 1))
        return hidden[:, :1], hidden[:, 1:].transpose(0, 1)


class JoinViews(Block):
    def forward(self, x: Tensor, back: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(torch.cat((x, back.transpose(0, 1)), 1))


class Join(Block):
    def forward(self, x: Tensor, other: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x + other)


class Ids(nn.Module):
    """Integers out: nothing comes back over this boundary."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (x[..., 0] * 3).long().clamp(-4, 4) + 4, x[..., 1] > 0


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, WIDTH)
        with torch.no_grad():
            self.table.weight.copy_(torch.linspace(-1, 1, 9 * WIDTH).reshape(9, WIDTH).sin())

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.table(ids) * mask[..., None]


class Frozen(Block):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.requires_grad_(False)


class Unused(Block):
    """A second output that carries a gradient, and that nobody uses."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.side = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        hidden = super().forward(x)
        return hidden, hidden.detach() * self.side


class First(Block):
    def forward(self, x: Tensor, ignored: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)


def chain(*kinds: Callable[..., nn.Module]) -> list[Layer]:
    """The layers by their classes, each with a seed of its own where it takes one."""
    plain = (Ids, Embed)
    return [
        Layer(f"layer{i}", (lambda kind=kind: kind()) if kind in plain else (lambda kind=kind, seed=i: kind(seed)))
        for i, kind in enumerate(kinds)
    ]


MODELS: dict[str, Callable[[], list[Layer]]] = {
    "several tensors, None, int and bool": lambda: chain(Open, Middle, Middle, Close),
    "the same tensor twice": lambda: chain(Twice, Twice, Twice, Join),
    "an input passed through": lambda: chain(PassOn, PassOn, PassOn, Join),
    "views of one storage": lambda: chain(Views, Views, Views, JoinViews),
    "integers only": lambda: chain(Ids, Embed, Block, Block),
    "frozen leading layers": lambda: chain(Frozen, Frozen, Block, Block),
    "frozen layers in the middle": lambda: chain(Block, Frozen, Frozen, Block),
    "frozen last layers": lambda: chain(Block, Block, Frozen, Frozen),
}
SPLIT = pl.Schedule.of(  # I now, W later
    [
        ["0F0", "0F1", "2F0", "2F1", "2I0", "2I1", "0I0", "0I1", "2W0", "2W1", "0W1", "0W0"],
        ["1F0", "1F1", "3F0", "3F1", "3I0", "3I1", "1I0", "1I1", "3W0", "1W0", "3W1", "1W1"],
    ],
    placement=[0, 1, 0, 1],
    microbatches=2,
    name="split",
)
