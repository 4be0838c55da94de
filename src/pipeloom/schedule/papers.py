"""Tables of record: figures that papers publish, recomputed from their own profiles by our families and simulator."""

from __future__ import annotations

from dataclasses import dataclass

from pipeloom.schedule.costs import Costs
from pipeloom.schedule.families import build
from pipeloom.schedule.simulate import simulate

ZERO_BUBBLE_COLUMNS = ("1f1b", "interleaved", "zb-h1", "zb-h2", "zb-auto 1p", "zb-auto 2p")


@dataclass(frozen=True)
class ModelSize:
    """Memory that a micro-batch keeps of one layer: M_B = 34 h + 5 a s, of which M_W = 32 h until W (arXiv 2401.10241,
    section 2.3).

    Attributes:
        name: of the model.
        hidden, heads: h and a.
        chunks: v of the interleaved column.
        sequence: tokens per sequence, s.
    """

    name: str
    hidden: int
    heads: int
    chunks: int
    sequence: int = 1024

    @property
    def held(self) -> float:
        """M_W / M_B."""
        return 32 * self.hidden / (34 * self.hidden + 5 * self.heads * self.sequence)


@dataclass(frozen=True)
class Profile:
    """One row: model, p, m, measured times of one micro-batch on one rank in ms, and the published bubble rates."""

    model: ModelSize
    ranks: int
    microbatches: int
    forward: float
    input_grad: float
    weight_grad: float
    p2p: float
    published: tuple[float, ...]

    @property
    def costs(self) -> Costs:
        return Costs(self.forward, self.input_grad, self.weight_grad, self.p2p, held=self.model.held)


_SMALL = ModelSize("1.5B", 2304, 24, 3)
_LARGE = ModelSize("6.2B", 4096, 32, 4)

ZERO_BUBBLE_PROFILES = (
    Profile(_SMALL, 8, 24, 18.522, 18.086, 9.337, 0.601, (0.2431, 0.1055, 0.1585, 0.1083, 0.1585, 0.0433)),
    Profile(_SMALL, 8, 32, 18.513, 18.086, 9.331, 0.626, (0.1985, 0.0818, 0.1242, 0.0837, 0.1242, 0.0039)),
    Profile(_SMALL, 8, 64, 18.546, 18.097, 9.321, 0.762, (0.1240, 0.0443, 0.0674, 0.0444, 0.0674, 0.0026)),
    Profile(_LARGE, 8, 24, 29.718, 29.444, 19.927, 0.527, (0.2347, 0.0808, 0.1323, 0.0698, 0.1323, 0.0029)),
    Profile(_LARGE, 8, 32, 29.802, 29.428, 19.530, 0.577, (0.1898, 0.0628, 0.1045, 0.0559, 0.1045, 0.0022)),
    Profile(_LARGE, 8, 64, 29.935, 29.621, 19.388, 0.535, (0.1091, 0.0320, 0.0554, 0.0294, 0.0554, 0.0010)),
)


def zero_bubble_rates(profile: Profile) -> tuple[float, ...]:
    """The bubble rates of `ZERO_BUBBLE_COLUMNS` for one profile (arXiv 2401.10241, section 4, table of bubble rates).

    1 - m (f + b + w) / largest span. The interleaved column is 1 - m (f + b + w) / (makespan - p p2p), which is how the
    paper's figures are reproduced.
    """
    costs, p, m = profile.costs, profile.ranks, profile.microbatches
    work = m * (profile.forward + profile.input_grad + profile.weight_grad)

    def rate(name: str, **options: object) -> float:
        return 1 - work / max(simulate(build(name, p, m, None, options, costs), costs).spans)

    chunks = profile.model.chunks
    looped = simulate(build("interleaved", p, m, chunks), costs.scaled(1 / chunks))
    return (
        rate("1f1b"),
        1 - work / (looped.makespan - p * profile.p2p),
        rate("zb-h1"),
        rate("zb-h2"),
        rate("zb-auto", memory=p, objective="span"),
        rate("zb-auto", memory=2 * p, objective="span"),
    )
